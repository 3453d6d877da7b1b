"""efficient: torch's memory-efficient kernels for CUDA, which support float32, biases and any head dim.

They run dense calls. From torch 2.14 on they take fewer key heads than query heads: so its source says, no
GPU has run it yet. Differences from the contract: a bias needs the query's dtype, all four dimensions and
rows of whole sixteen bytes. The LSE of a row without a key is 0, and an LSE's length is rounded up to 32. The
batch is a dimension of the CUDA grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import UNBOUNDED, AttentionSpec, Direction
from attnreg.core.launching.offsets import empty_results
from attnreg.core.torchlib import captured, versions
from attnreg.core.torchlib.layout import readable
from attnreg.errors import UnsupportedInputError

OP = "_efficient_attention_{}"

# torch/aten/src/ATen/native/transformers/sdp_utils_cpp.h
NO_MASK, TOP_LEFT, BOTTOM_RIGHT = range(3)

# From torch/aten/src/ATen/native/transformers/cuda/mem_eff_attention: the largest head dim that its kernels
# are compiled for, and kAlignLSE.
MOST, LSE_STEP = 65536, 32

# Always: without an LSE the forward is wrong where all heads share one key and value (stride 0).
WITH_LSE = True

LIMITS: dict[str, Any] = {
    "devices": ("cuda",),
    "dtypes": ("float16", "bfloat16", "float32"),
    "compute_capability": ((5, 0), (12, 1)),
    "head_dim": Range(4, MOST, 4),
    "head_dim_v": Range(4, MOST, 4),
    "heads": Range(0, GRID),
    "gqa": versions.EFFICIENT_SHARES_HEADS,
    **dict.fromkeys(("causal", "window", "dropout", "bias", "bias_gradient"), True),
    **dict.fromkeys(("deterministic", "capture"), True),
}
FORWARD = Capabilities(**LIMITS)
BACKWARD = Capabilities(**LIMITS, delta_from_out=True)


def _refuses(spec: AttentionSpec) -> Iterator[str]:
    capability = spec.device.capability
    if spec.dtype == "bfloat16" and capability is not None and capability < (8, 0):
        yield f"compute capability must be 8.0 or above for bfloat16, got {capability[0]}.{capability[1]}"
    if spec.dtype != "float32" and (spec.head_dim % 8 or spec.head_dim_v % 8):
        yield f"head dims must be multiples of 8 in {spec.dtype}, got {spec.head_dim} and {spec.head_dim_v}"
    if spec.windowed and spec.window != _from_first_key(spec.max_q, spec.max_k):
        yield f"window_size must be (-1, -1) or causal, got {spec.window}"
    if spec.window == (-1, 0) and spec.max_q > spec.max_k:
        yield f"a causal call must have no more queries than keys, got {spec.max_q} and {spec.max_k}"
    if spec.needs_backward and spec.dtype == "float32" and spec.max_k == 1:
        # The gradients of query and key are 0, as they are in plain PyTorch. The kernel subtracts two sums of
        # as many products as the head dim, in different orders: 4e-5 was seen in dq, 1.4e-4 in dk (H200).
        yield "max_k must be above 1 in float32, got 1: gradients that are 0 would be rounding errors"
    if spec.bias and spec.window != UNBOUNDED:
        yield "attn_bias must be None with a causal mask, got a tensor"
    if spec.dropout == 1.0:
        yield "dropout_p must be below 1, got 1.0"
    if spec.dropout > 0.0 and spec.batch > GRID:
        yield f"batch must be at most {GRID} with dropout, got {spec.batch}"
    if spec.dropout > 0.0 and spec.capturing:
        yield "dropout_p must be 0 in a CUDA graph: the random state is read on the host"


def _cuts_of_lengths(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths at which `_refuses` changes for calls of the spec's kind."""
    yield from (Cut.beyond("max_q", "max_k", at=spec.window[1] + step) for step in (0, 1))
    yield Cut.beyond("max_q", "max_k")
    yield from (Cut.of("max_k", at=length) for length in (1, 2))
    yield Cut.of("batch", at=GRID + 1)


def _from_first_key(max_q: int, max_k: int) -> tuple[int, int]:
    """Return the window of a causal mask that is aligned top-left."""
    return -1, max_q - max_k


def _mask_type(call: Call) -> int:
    if call.window == UNBOUNDED:
        return NO_MASK
    return BOTTOM_RIGHT if call.window == (-1, 0) else TOP_LEFT


def _split_batch(batch: int) -> list[slice]:
    """Cut a batch into parts for one launch each."""
    return [slice(start, start + GRID) for start in range(0, batch, GRID)]


def _is_empty(query: Tensor, key: Tensor) -> bool:
    return not (query.numel() and key.numel())


def _expanded_bias(query: Tensor, key: Tensor, call: Call) -> Tensor | None:
    """Return the bias as the kernels read it, (B, H, S_q, S_k) in the query's dtype; copied where needed."""
    bias, length = call.attn_bias, key.shape[1]
    if bias is None:
        return None
    if bias.dtype == torch.bool:
        bias = query.new_zeros(()).masked_fill(~bias, -torch.inf)
    if bias.dtype != query.dtype:
        raise UnsupportedInputError(f"attn_bias must be boolean or {query.dtype}, got {bias.dtype}")
    bias = bias.expand(*bias.shape[:-1], length)
    step = 16 // bias.element_size()
    if bias.stride(-1) != 1 or bias.data_ptr() % 16 or any(stride % step for stride in bias.stride()[:-1]):
        rows = bias.new_empty((*bias.shape[:-1], length + -length % step))
        bias = rows[..., :length].copy_(bias)
    return bias.expand(query.shape[0], query.shape[2], query.shape[1], length)


def _hidden_rows(bias: Tensor | None) -> Tensor | None:
    """Return which rows see no key, broadcast to (B, H, S_q); None if there is no bias."""
    if bias is None:
        return None
    hides = ~bias if bias.dtype == torch.bool else bias == -torch.inf
    return hides.all(-1)


class _Torch:
    """Torch's two kernels, captured before a router covers them."""

    def __init__(self) -> None:
        self._forward = captured.kernel(OP.format("forward"), "CUDA")
        self._backward = captured.kernel(OP.format("backward"), "CUDA")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output (B, S, H, D_v), in the query's dtype, and the LSE (B, H, S) in float32.

        Query and key are (B, S, H, D), the value (B, S, H, D_v), in float32, float16 or bfloat16.

        Raises:
            UnsupportedInputError: the bias is neither boolean nor in the query's dtype.
        """
        if _is_empty(query, key):
            return empty_results(query, value, call)
        bias = _expanded_bias(query, key, call)
        query, key, value = map(readable, (query, key, value))
        parts: list[tuple[Tensor, ...]] = []
        for rows in _split_batch(query.shape[0]):
            out, lse, seed, offset, *_ = self._forward(
                query[rows], key[rows], value[rows], None if bias is None else bias[rows],
                None, None, None, None, call.dropout, _mask_type(call), WITH_LSE, scale=call.scale,
            )  # fmt: skip
            parts.append((out, lse[..., : call.max_q]))
            if call.rng_state is not None:
                # The kernel draws seed and offset of its mask from torch's generator, and returns both.
                call.rng_state.view(torch.int64).copy_(torch.stack((seed, offset)))
        out, lse = _joined(parts)
        hidden = _hidden_rows(call.attn_bias)
        if hidden is not None:
            hidden = hidden.expand(lse.shape)
            lse = lse.masked_fill(hidden, -torch.inf)
            out = out.masked_fill(hidden.transpose(1, 2).unsqueeze(-1), 0.0)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, in their shapes and dtype, then the bias's if wanted.

        `grad_out` and `out` are like the forward's output, `lse` like its LSE. Raises as `forward` does.
        """
        wanted = call.attn_bias if call.bias_gradient else None
        if _is_empty(query, key):
            inputs = query, key, value, *(() if wanted is None else (wanted,))
            return tuple(map(torch.zeros_like, inputs))
        bias = _expanded_bias(query, key, call)
        grad_out, query, key, value = map(readable, (grad_out, query, key, value))
        out = out.contiguous()  # the kernel reads only two of its strides
        # The kernel skips rows whose LSE is +inf, as after the last row: rows without a key get that, too.
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        lse = F.pad(lse, (0, -lse.shape[-1] % LSE_STEP), value=torch.inf)
        state = torch.zeros(2, dtype=torch.int64, device="cpu")  # whatever the default device is
        if call.rng_state is not None:
            state = call.rng_state.view(torch.int64).cpu()  # where the kernel reads it
        parts = []
        for rows in _split_batch(query.shape[0]):
            grads = self._backward(
                grad_out[rows], query[rows], key[rows], value[rows], None if bias is None else bias[rows],
                out[rows], None, None, call.max_q, call.max_k, lse[rows], call.dropout, *state.unbind(),
                _mask_type(call), wanted is not None, scale=call.scale,
            )  # fmt: skip
            parts.append(grads[:3] if wanted is None else grads)
        grad_q, grad_k, grad_v, *of_bias = _joined(parts)
        if wanted is not None:
            of_bias = [of_bias[0].sum_to_size(wanted.shape)]
        return grad_q, grad_k, grad_v, *of_bias


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Concatenate the results of all parts of a batch."""
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts, strict=True)))


def _cuts_batch(direction: Direction, spec: AttentionSpec) -> bool:
    """Whether torch's own kernel would be launched on too large a batch."""
    return spec.batch > GRID


def _load() -> Kernels:
    kernels = _Torch()
    return Kernels(kernels.forward, kernels.backward, replaces_native=_cuts_batch)


def _unavailable() -> str | None:
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU here"


def _version() -> str:
    return str(torch.__version__)


BACKEND = Backend(
    name="efficient",
    forward=FORWARD,
    backward=BACKWARD,
    load=_load,
    unavailable=_unavailable,
    version=_version,
    refuses=_refuses,
    cuts=_cuts_of_lengths,
)
