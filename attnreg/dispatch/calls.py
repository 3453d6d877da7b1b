"""From tensors to a kernel: what both fronts, aten's routers and `varlen_attn`, share.

The hot path is one dictionary look-up: a tuple of everything that capabilities read, to the plan
that runs the call. No host sync, no query of a device, no environment variable, no log line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnreg.contract.declines import served
from attnreg.contract.validation import check, check_scale, check_values
from attnreg.dispatch.planning import Native, Plan, make_plan, spec_of
from attnreg.dispatch.state import state
from attnreg.errors import UnsupportedInputError

if TYPE_CHECKING:
    from torch import Tensor

    from attnreg.contract.backend import Call
    from attnreg.contract.spec import Direction
    from attnreg.dispatch import scope

__all__ = [
    "backward",
    "bounds",
    "forward",
    "keys_used",
    "prepare",
    "scale_of",
    "wants_deterministic",
    "wants_gradient",
]


def forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, pin: scope.Pin | None, needs_backward: bool
) -> tuple[Tensor, Tensor]:
    """Run the forward of a call on the backend that is chosen for it; `pin` leads the choice.

    Raises:
        InvalidInputError: the call contradicts itself.
        UnsupportedInputError: no backend can run it, or none may.
    """

    def run() -> tuple[Tensor, Tensor]:
        chosen = prepare("forward", query, key, value, call, pin, needs_backward=needs_backward)
        result: tuple[Tensor, Tensor] = chosen.run(query, key, value, call)
        return result

    return served(run)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    pin: scope.Pin | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward of a call; `pin` is what its forward passed on."""

    def run() -> tuple[Tensor, Tensor, Tensor]:
        chosen = prepare("backward", query, key, value, call, pin)
        grads: tuple[Tensor, Tensor, Tensor] = chosen.run(grad_out, query, key, value, out, lse, call)
        return grads

    return served(run)


def prepare(
    direction: Direction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    pin: scope.Pin | None,
    native: Native | None = None,
    needs_backward: bool = True,
) -> Plan:
    """Return the plan for a call in the contract's layout, after checking it."""
    now = state()
    if direction == "backward" and pin is not None and pin.no_gradient:
        raise UnsupportedInputError(pin.no_gradient)
    offsets_q, offsets_k = call.cu_seqlens_q, call.cu_seqlens_k
    look_up = (
        direction, needs_backward, native, pin, call.deterministic,
        query.is_cuda and torch.cuda.is_current_stream_capturing(),
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device,
        call.max_q, call.max_k, call.window, call.dropout, call.num_splits, call.scale > 0.0,
        None if offsets_q is None else (offsets_q.shape, offsets_q.dtype, offsets_q.device),
        None if offsets_k is None else (offsets_k.shape, offsets_k.dtype, offsets_k.device),
        call.seqused_k is not None and _kind(call.seqused_k),
        call.block_table is not None and _kind(call.block_table),
        call.attn_bias is not None and _kind(call.attn_bias),
        call.alibi_slopes is not None and _kind(call.alibi_slopes),
    )  # fmt: skip
    found = now.plans.get(look_up)
    if found is None:
        check(query, key, value, call)
        spec = spec_of(query, key, value, call, needs_backward)
        leading = pin.preference if pin is not None else None
        found = make_plan(now, look_up, spec, direction, native, leading)
    if direction == "forward":
        check_scale(call.scale)
        if offsets_q is not None and query.is_cpu:
            check_values(query, key, call)
    return found


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """Return what the checks and capabilities read of a further tensor."""
    return tensor.shape, tensor.dtype, tensor.device


def keys_used(seqused_k: Tensor | None, cu_seq_k: Tensor | None, block_table: Tensor | None) -> Tensor | None:
    """Return how many keys of each sequence count; with pages offsets of the keys say so, too."""
    if block_table is None or seqused_k is not None or cu_seq_k is None:
        return seqused_k
    return cu_seq_k.diff()


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the softmax scale: as given, else one over the root of the head dim."""
    return scale if scale is not None else float((query.shape[-1] or 1) ** -0.5)


def wants_gradient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether autograd records this call; true below autograd as well as above."""
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def wants_deterministic() -> bool:
    """Whether nondeterministic kernels are to be refused; `warn_only` leaves them be."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def bounds(window: tuple[int, int], causal: bool, max_q: int, max_k: int) -> tuple[int, int]:
    """Return the one way to write a window: -1 where a bound excludes nothing, causal as `(left, 0)`.

    A left bound of `max_k - 1` reaches the first key from every row, a right bound of `max_q - 1`
    the last key; for one query row causal is no mask at all.
    """
    left, right = window[0], 0 if causal else window[1]
    return (-1 if left < 0 or left >= max_k - 1 else left, -1 if right < 0 or right >= max_q - 1 else right)
