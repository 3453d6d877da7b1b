"""A gradient of the LSE for backwards that take none: in further columns of the head dim.

The gradient of a score is its weight times (gradient of the weight - delta + gradient of the LSE). A flash
backward computes delta of each row as rowsum(grad_out * out). So delta can carry the gradient of the LSE: in
further columns `out` is constant, and `grad_out` is minus that gradient, divided by the constant. Query, key
and value are 0 there: scores, weights and the gradients of weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnreg.core.adaptation.padded_dims import STEP, with_zeros
from attnreg.core.contract.capabilities import Capabilities
from attnreg.core.contract.spec import AttentionSpec, Direction, canonical_dtype

if TYPE_CHECKING:  # limits are looked up without torch
    from torch import Tensor

    from attnreg.core.contract.backend import Call

# Two are used; so many more give a head dim that kernels take.
COLUMNS = STEP

# The constants of `out`. The second column has what rounding takes from the first: together they are precise
# to 2**-16 of the gradient in bfloat16, to 2**-22 in float16. The range of float16 ends at 65,504 and at
# 2**-24. With these constants gradients may reach from 2**21 to 2**-31. Weights of many keys bring large ones
# down again. At the small end kernels, which round the gradients of scores to float16, have long had 0.
UNITS = {"float16": (2.0**5, 2.0**-6)}


class LseColumns:
    """The adaptation of backwards that compute delta from the output and take no gradient of the LSE."""

    def applies(self, spec: AttentionSpec, direction: Direction, limits: Capabilities) -> bool:
        """Whether a backward has a gradient of the LSE that the kernel declares in columns alone."""
        if direction == "forward" or not spec.grad_lse:
            return False
        return limits.delta_from_out and not limits.grad_lse

    def adapted(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec with further columns in place of the gradient."""
        dims = spec.head_dim + COLUMNS, spec.head_dim_v + COLUMNS
        return spec.but(grad_lse=False, head_dim=dims[0], head_dim_v=dims[1])

    def plain(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec without the gradient of the LSE."""
        return spec.but(grad_lse=False)

    def in_reason(self, spec: AttentionSpec) -> str:
        """Return how many columns are added."""
        return f"grad_lse takes {COLUMNS} more columns of the head dim"

    def described(self, spec: AttentionSpec) -> str:
        """Return how many columns are added, and the head dims."""
        by_columns = f"given the gradient of the LSE in {COLUMNS} more columns of the head dim"
        return f"{by_columns}, {spec.head_dim + COLUMNS} for {spec.head_dim}"

    def wrap(self, kernel: Callable[..., Any], direction: Direction) -> Callable[..., tuple[Tensor, ...]]:
        """Return a backward for calls with a gradient of the LSE, from a kernel's for calls without.

        It copies each tensor once, and reads nothing back.
        """

        def run(
            grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
        ) -> tuple[Tensor, ...]:
            if call.grad_lse is None:
                raise TypeError("grad_lse: got None, expected a tensor")
            dims = query.shape[-1], key.shape[-1], value.shape[-1]
            tensors = grad_out, query, key, value, out
            grad_out, query, key, value, out = (with_zeros(x, x.shape[-1] + COLUMNS) for x in tensors)
            # A row that sees no key takes no gradient, and may have NaN for one.
            rest = call.grad_lse.masked_fill(lse == float("-inf"), 0.0).mT
            for column, unit in enumerate(UNITS.get(canonical_dtype(out.dtype), (1.0, 1.0)), dims[2]):
                out[..., column].fill_(unit)
                rest = rest.add(grad_out[..., column].copy_(rest / -unit), alpha=unit)
            grads = kernel(grad_out, query, key, value, out, lse, call._replace(grad_lse=None))
            return tuple(grad[..., :dim].contiguous() for grad, dim in zip(grads, dims, strict=True))

        return run
