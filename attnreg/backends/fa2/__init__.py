"""FA2: FlashAttention 2, by the CUDA kernels inside torch or in the package flash-attn.

This module declares what FA2 can run, and chooses the provider of a call. Torch's kernels (native.py) run
every call that they can. The package (flash_attn_package.py) runs ALiBi slopes, a softcap, and a paged
key-value cache on torch 2.11. README.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnreg.backends.fa2.flash_attn_package import Package, installed, missing, package
from attnreg.backends.fa2.native import PAGES, SPLITS, TorchKernels, is_empty, keeps_contract
from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut, cut_of_decoding
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.launching.offsets import empty_results
from attnreg.core.launching.regular import fills
from attnreg.core.launching.rows import clear_backward, clear_forward


class _FA2Forward(Capabilities):
    """The declared fields, and a forward's limits that no field can express."""

    def unsupported(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return every reason why `spec` can't run here; empty if it can."""
        return super().unsupported(spec) or tuple(_forward_reasons(spec))


class _FA2Backward(Capabilities):
    """The declared fields, and a backward's limits that no field can express."""

    def unsupported(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return every reason why `spec` can't run here; empty if it can."""
        return super().unsupported(spec) or tuple(_backward_reasons(spec))


# torch/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: compute capability 8.0 on,
# fp16 and bf16, head dims in steps of 8 up to 256, equal for value and query.
LIMITS: dict[str, Any] = {
    "devices": ("cuda",),
    "dtypes": ("float16", "bfloat16"),
    "compute_capability": ((8, 0), (12, 1)),
    "head_dim": Range(8, 256, 8),
    "batch": Range(0, GRID),
    "heads": Range(0, GRID),
    **dict.fromkeys(("varlen", "gqa", "causal", "window", "dropout"), True),
    **dict.fromkeys(("alibi", "softcap", "deterministic", "capture"), True),
}
MOST_SPLITS = 128  # the same file
FORWARD = _FA2Forward(**LIMITS, seqused_k=True, page_size=Range(256, step=256), num_splits=SPLITS)
BACKWARD = _FA2Backward(**LIMITS, delta_from_out=True)


def _needs_package(paged: bool, alibi: bool, softcap: float) -> bool:
    """Whether only the package can run a forward."""
    return alibi or softcap > 0.0 or (paged and not PAGES)


def _forward_reasons(spec: AttentionSpec) -> Iterator[str]:
    paged = spec.page_size is not None
    if spec.seqused_k and not spec.varlen:
        yield "seqused_k needs packed tensors, got dense ones"
    if paged and spec.dropout > 0.0:
        yield "dropout_p must be 0 with a block_table, which has no backward"
    # The kernels split packed sequences if there are pages or heads are rows. Torch decides about dense
    # tensors.
    splits = paged or _folds(spec)
    if spec.num_splits is not None and not spec.varlen:
        yield f"num_splits must be None for dense tensors, got {spec.num_splits}"
    elif splits and (spec.num_splits or 1) > MOST_SPLITS:
        yield f"num_splits must be at most {MOST_SPLITS} where keys are split, got {spec.num_splits}"
    # csrc/flash_attn/src/flash_fwd_launch_template.h: with splits, batch and heads share a dimension of the
    # grid.
    elif splits and (spec.num_splits or 1) > 1 and spec.batch * spec.heads_q > GRID:
        yield f"batch times heads must be at most {GRID} with num_splits, got {spec.batch * spec.heads_q}"
    if _needs_package(paged, spec.alibi, spec.softcap):
        yield from _package_reasons(spec, "block_table needs torch 2.12 or")


def _package_reasons(spec: AttentionSpec, otherwise: str = "") -> Iterator[str]:
    """Yield reasons against calls that only the package can run.

    `otherwise` names what needs the package, if no option does.
    """
    option = "alibi_slopes" if spec.alibi else "softcap" if spec.softcap else ""
    if lack := missing(spec.device.simulated):
        verb = "need" if spec.alibi else "needs"
        yield f"{f'{option} {verb}' if option else otherwise} {lack}"
    if option and spec.num_splits is not None:
        yield f"num_splits must be None with {option}, got {spec.num_splits}"
    if spec.softcap and spec.dropout > 0.0:
        yield f"dropout_p must be 0 with softcap, got {spec.dropout}"


def _backward_reasons(spec: AttentionSpec) -> Iterator[str]:
    # torch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: too little shared memory.
    small = spec.device.capability is not None and (
        (8, 6) <= spec.device.capability <= (8, 9) or spec.device.capability >= (12, 0)
    )
    if small and spec.head_dim > 192 and (spec.head_dim <= 224 or spec.dropout > 0.0):
        yield (
            "head_dim must be at most 192, or above 224 without dropout, on compute capability "
            f"8.6 to 8.9 and 12, got {spec.head_dim}"
        )
    if spec.alibi or spec.softcap:
        yield from _package_reasons(spec)
        # csrc/flash_attn/src/flash_bwd_kernel.h up to 2.8.3 computes in 32 bits where a sequence's sums for
        # dq begin. On overflow the kernel writes to any address, and the CUDA context is lost. Torch's
        # kernels use 64 bits (https://github.com/Dao-AILab/flash-attention/pull/2260).
        step = 32 if spec.head_dim <= 128 else 64
        sums = (spec.tokens_q + 128 * spec.batch) * spec.heads_q * _rounded_dim(spec)
        if spec.varlen and sums >= 2**31:
            yield (
                f"(tokens + 128 * sequences) * heads * head dim rounded up to {step} must be below 2**31 for "
                f"a packed backward with {'alibi_slopes' if spec.alibi else 'softcap'}, got {sums}"
            )


def _refuses(spec: AttentionSpec) -> tuple[str, ...]:
    reasons = []
    if spec.dropout == 1.0:
        reasons.append("dropout_p must be below 1, got 1.0")
    largest = max(spec.tokens_q * spec.heads_q, spec.tokens_k * spec.heads_k) * spec.head_dim
    if spec.varlen and largest >= 2**31:
        reasons.append(f"packed tensors must have fewer than 2**31 elements, got {largest}")
    return tuple(reasons)


def _cuts(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths at which this module's reasons or priority change for calls of the spec's kind."""
    yield Cut.of("batch", at=GRID // max(spec.heads_q, 1) + 1)
    for tokens, heads in (("tokens_q", spec.heads_q), ("tokens_k", spec.heads_k)):
        yield Cut.of(tokens, at=-(-(2**31) // max(heads * spec.head_dim, 1)))
    width = spec.heads_q * _rounded_dim(spec)
    yield Cut(((1, ("tokens_q",)), (128, ("batch",))), at=-(-(2**31) // max(width, 1)))
    yield from (Cut.of("max_q", at=length) for length in (1, 2))
    yield Cut.of("max_q", at=cut_of_decoding(spec))


def _rounded_dim(spec: AttentionSpec) -> int:
    step = 32 if spec.head_dim <= 128 else 64
    return -(-spec.head_dim // step) * step


def _unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without its flash attention kernels"
    return None


def _version() -> str:
    flash_attn = installed()
    return f"{torch.__version__} (flash-attn {flash_attn})" if flash_attn else str(torch.__version__)


def _load() -> Kernels:
    native = TorchKernels()

    def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if is_empty(query, key, call):
            return empty_results(query, value, call)
        options = call.block_table is not None, call.alibi_slopes is not None, call.softcap
        by_package = _needs_package(*options)
        provider: TorchKernels | Package = package() if by_package else native
        out, lse = provider.forward((query, key, value), call)
        return (out, lse) if keeps_contract(query, key, call) else _to_contract(out, lse, call)

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty(query, key, call):
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        by_package = call.alibi_slopes is not None or call.softcap > 0.0
        provider: TorchKernels | Package = package() if by_package else native
        if keeps_contract(query, key, call):
            return provider.backward((grad_out, query, key, value, out, lse), call)
        if call.cu_seqlens_q is not call.cu_seqlens_k or call.cu_seqlens_q is None:
            lse = torch.nan_to_num(lse, torch.nan, torch.inf, torch.inf)  # marks such rows for the kernels
        grad_q, grad_k, grad_v = provider.backward((grad_out, query, key, value, out, lse), call)
        if _has_offsets(call):
            clear_backward(grad_q, grad_k, grad_v, call.cu_seqlens_q, call.cu_seqlens_k)  # type: ignore[arg-type]
            return grad_q, grad_k, grad_v
        return (
            _zero_unused_rows(grad_q, call.cu_seqlens_q),
            _zero_unused_rows(grad_k, call.cu_seqlens_k),
            _zero_unused_rows(grad_v, call.cu_seqlens_k),
        )

    return Kernels(forward, backward, native.specialize)


def _to_contract(out: Tensor, lse: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Set rows without a key and unused rows to the contract's values, in place."""
    if _has_offsets(call):
        clear_forward(out, lse, call.cu_seqlens_q, call.cu_seqlens_k, call.window)  # type: ignore[arg-type]
        return out, lse
    lse = lse.nan_to_num_(torch.nan, -torch.inf, -torch.inf)
    if call.cu_seqlens_q is None or fills(call.cu_seqlens_q, len(out)):
        return out, lse
    lse.masked_fill_(_unused(lse.shape[-1], call.cu_seqlens_q), -torch.inf)
    return _zero_unused_rows(out, call.cu_seqlens_q), lse


def _has_offsets(call: Call) -> bool:
    """Whether the lengths of both sides follow from their offsets."""
    return call.cu_seqlens_q is not None and call.cu_seqlens_k is not None and call.seqused_k is None


def _zero_unused_rows(packed: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Zero the rows past the last offset, which the kernels don't write, in place."""
    if cu_seqlens is None:
        return packed
    return packed.masked_fill_(_unused(packed.shape[0], cu_seqlens)[:, None, None], 0.0)


def _unused(tokens: int, cu_seqlens: Tensor) -> Tensor:
    return torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1]


def _priority(spec: AttentionSpec) -> int:
    """Return the priority: the highest for decoding, if the host is the limit or keys are split."""
    return 40 if spec.decodes and (_folds(spec) or not spec.capturing) else 10


def _folds(spec: AttentionSpec) -> bool:
    """Whether the kernel treats query heads as rows and splits the keys, if each sequence has a query."""
    return spec.max_q == 1 and spec.heads_q > spec.heads_k


BACKEND = Backend(
    name="FA2",
    forward=FORWARD,
    backward=BACKWARD,
    load=_load,
    unavailable=_unavailable,
    version=_version,
    refuses=_refuses,
    priority=_priority,
    cuts=_cuts,
)
