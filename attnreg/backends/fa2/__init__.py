"""FA2: FlashAttention 2, by the CUDA kernels inside torch or in the package flash-attn.

This module declares what FA2 can run, and chooses the provider of a call. Torch's kernels (native.py) run
every call that they can. The package (flash_attn_package.py) runs ALiBi slopes, a softcap, and a paged
key-value cache on torch 2.11. README.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attnreg.backends.fa2.conventions import (
    Provider,
    adapt,
    against_card,
    against_size,
    against_sums,
    cuts_of_size,
)
from attnreg.backends.fa2.flash_attn_package import installed, missing, package
from attnreg.backends.fa2.native import PAGES, SPLITS, TorchKernels
from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut, cut_of_decoding
from attnreg.core.contract.spec import AttentionSpec

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
    yield from against_card(spec)
    if spec.alibi or spec.softcap:
        yield from _package_reasons(spec)
        yield from against_sums(spec, "alibi_slopes" if spec.alibi else "softcap")


def _refuses(spec: AttentionSpec) -> tuple[str, ...]:
    of_dropout = ("dropout_p must be below 1, got 1.0",) if spec.dropout == 1.0 else ()
    return (*of_dropout, *against_size(spec))


def _cuts(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths at which this module's reasons or priority change for calls of the spec's kind."""
    yield Cut.of("batch", at=GRID // max(spec.heads_q, 1) + 1)
    yield from cuts_of_size(spec)
    yield from (Cut.of("max_q", at=length) for length in (1, 2))
    yield Cut.of("max_q", at=cut_of_decoding(spec))


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

    def provider_of(call: Call) -> Provider:
        by_package = _needs_package(call.block_table is not None, call.alibi_slopes is not None, call.softcap)
        return package() if by_package else native

    return Kernels(*adapt(provider_of), native.specialize)


def _priority(spec: AttentionSpec) -> int:
    """Return the priority: high for decoding, if the host is the limit or keys are split."""
    return 40 if spec.decodes and (_folds(spec) or not spec.capturing) else 10


def _folds(spec: AttentionSpec) -> bool:
    """Whether the kernel treats query heads as rows and splits the keys, if each sequence has a query."""
    return spec.max_q == 1 and spec.heads_q > spec.heads_k


BACKEND = Backend(
    name="FA2",
    forward=Capabilities(
        **LIMITS, seqused_k=True, page_size=Range(256, step=256), num_splits=SPLITS, refuses=_forward_reasons
    ),
    backward=Capabilities(**LIMITS, delta_from_out=True, refuses=_backward_reasons),
    load=_load,
    unavailable=_unavailable,
    version=_version,
    refuses=_refuses,
    priority=_priority,
    cuts=_cuts,
)
