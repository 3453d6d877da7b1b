"""flex: torch's FlexAttention, compiled by Inductor, for packed and dense calls that other kernels refuse.

It runs head dims up to 512 and float32 in packed calls, on any card that Triton compiles for. This module
declares what it can run. Read `adapter` next: it maps the contract's calls to programs. `graphs`
traces torch's ops, `programs` compiles them. `launching.visible` computes which keys each query sees.
README.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from attnreg.backends.flex.adapter import backward, forward
from attnreg.core.contract.backend import Backend, Kernels
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec

# From this length on `flex` takes less time than `math` (H200, README.md). What shorter calls gain is small
# beside the seconds that their first call compiles.
LONG = 512

# `tl.dot` multiplies no smaller tiles than 16 by 16.
LIMITS: dict[str, Any] = {
    "devices": ("cuda",),
    "dtypes": ("float16", "bfloat16", "float32"),
    "compute_capability": ((7, 5), (12, 1)),
    "head_dim": Range(16, 512, 8),
    "head_dim_v": Range(16, 512, 8),
    "batch": Range(0, GRID),
    "heads": Range(0, GRID),
    "ranges": Range(0, 32),  # with which programs compare each key: they have code for each
    **dict.fromkeys(("varlen", "gqa", "causal", "window", "bias", "alibi", "seqused_k", "key_ranges"), True),
    **dict.fromkeys(("any_scale", "softcap", "deterministic", "score_mod", "mask_mod"), True),
}
FORWARD = Capabilities(**LIMITS, num_splits=True)
BACKWARD = Capabilities(**LIMITS, grad_lse=True)


def _refuses(spec: AttentionSpec) -> Iterator[str]:
    capability = spec.device.capability
    if spec.dtype == "bfloat16" and capability is not None and capability < (8, 0):
        yield f"compute capability must be 8.0 or above for bfloat16, got {capability[0]}.{capability[1]}"


def _priority(spec: AttentionSpec) -> int:
    """Return the priority: before `math`, behind all others, if queries and keys are long."""
    return -50 if min(spec.max_q, spec.max_k) >= LONG else -200


def _cuts(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths at which the priority changes."""
    yield from (Cut.of(length, at=LONG) for length in ("max_q", "max_k"))


def _load() -> Kernels:
    return Kernels(forward, backward)


def _unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU here"
    return None if find_spec("triton") else "triton isn't installed"


def _version() -> str:
    return str(torch.__version__)


BACKEND = Backend(
    name="flex",
    forward=FORWARD,
    backward=BACKWARD,
    load=_load,
    unavailable=_unavailable,
    version=_version,
    refuses=_refuses,
    install="pip install triton",
    priority=_priority,
    cuts=_cuts,
    stands_in=True,
    compiles=True,
)
