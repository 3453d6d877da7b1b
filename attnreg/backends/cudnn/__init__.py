"""cuDNN: NVIDIA's attention kernels, as graphs of nvidia-cudnn-frontend.

This module declares what cuDNN can run; read adapter.py next. A call passes these modules in order:

- `problem`: what an execution plan depends on.
- `rounding`: rounds lengths, so that ragged batches share execution plans.
- `execution_plans`: the execution plans that exist.
- `graph`: builds an execution plan.
- `lengths`: derives an execution plan's inputs from offsets.

README.md has the reasons.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.metadata import version as installed
from importlib.util import find_spec
from typing import Any

import torch

from attnreg.backends.cudnn.adapter import backward, forward, specialize
from attnreg.backends.cudnn.execution_plans import ExecutionPlans
from attnreg.backends.cudnn.problem import STEP
from attnreg.backends.cudnn.rounding import LEAST_LENGTH
from attnreg.core.contract.backend import Backend, Kernels
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.torchlib.versions import version_of

PACKAGE = "nvidia-cudnn-frontend"

# The most bytes that a deterministic backward may allocate.
MOST_BYTES = 2**30

_BOTH: dict[str, Any] = {
    "devices": ("cuda",),
    "dtypes": ("float16", "bfloat16"),
    "compute_capability": ((8, 0), (12, 1)),
    "head_dim": Range(8, 256, 8),
    "head_dim_v": Range(8, 256, 8),
    "batch": Range(0, GRID),
    "heads": Range(0, GRID),
    **dict.fromkeys(("varlen", "gqa", "causal", "window", "bias", "seqused_k", "dropout"), True),
    **dict.fromkeys(("deterministic", "capture"), True),
}


def _unavailable() -> str | None:
    if version_of(PACKAGE, installed) is None:
        return f"{PACKAGE} isn't installed"
    if find_spec("cudnn") is None:
        return f"{PACKAGE} is installed, but its module cudnn is missing"
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU here"


def _version() -> str | None:
    """Return cuDNN's version, then the frontend's: faults of kernels depend on cuDNN's."""
    number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    frontend = version_of(PACKAGE, installed)
    if number is None or frontend is None:
        return None
    major, rest = divmod(number, 10000)
    return f"{major}.{rest // 100}.{rest % 100} (frontend {frontend})"


def _refuses(spec: AttentionSpec) -> tuple[str, ...]:
    reasons = []
    masked = spec.window != (-1, -1)
    if not spec.varlen and masked and spec.max_q > spec.max_k:
        reasons.append(
            f"a masked dense call must have no more queries than keys, got {spec.max_q} and {spec.max_k}"
        )
    if not spec.varlen and spec.seqused_k:
        reasons.append("seqused_k must be None with dense tensors, got a tensor")
    if not spec.varlen and spec.max_q == spec.max_k == 1:
        reasons.append("query and key must not both have length 1, got 1 and 1")
    size, capability = max(spec.head_dim, spec.head_dim_v), spec.device.capability
    if size > 128 and capability is not None and capability[0] not in (9, 10):
        reasons.append(f"head_dim must be 8 to 128 on compute capability {capability[0]}.x, got {size}")
    if spec.head_dim > 192 and spec.head_dim_v != spec.head_dim:
        # cuDNN 9.19 on an H200: a wrong gradient of the query with 256 and 128.
        reasons.append(
            f"head_dim above 192 must be the value's too, got {spec.head_dim} and {spec.head_dim_v}"
        )
    return (*reasons, *_against_bias(spec), *_against_dropout(spec))


def _against_bias(spec: AttentionSpec) -> Iterator[str]:
    """Yield the reasons against a bias: it was tried on compute capability 9.0 alone.

    Of the bias itself a spec knows nothing. What cuDNN can't take of it the adapter declines.
    """
    capability = spec.device.capability
    if not spec.bias:
        return
    if capability is not None and capability[0] != 9:
        yield f"compute capability must be 9.x with attn_bias, got {capability[0]}.{capability[1]}"
    if spec.varlen:
        yield "attn_bias must be None with packed tensors, got a tensor"
    elif spec.windowed:
        # The frontend refuses a left bound beside a bias, and every mask that is aligned bottom-right.
        yield f"window_size must be (-1, -1) or causal with attn_bias, got {spec.window}"
    elif spec.causal and spec.max_q != spec.max_k:
        got = f"{spec.max_q} and {spec.max_k}"
        yield f"query and key must have the same length with attn_bias and a causal mask, got {got}"
    if spec.head_dim_v != spec.head_dim:
        got = f"{spec.head_dim} and {spec.head_dim_v}"
        yield f"head_dim of query and value must be the same with attn_bias, got {got}"


def _against_dropout(spec: AttentionSpec) -> Iterator[str]:
    """Yield the reasons against dropout: it was tried on compute capability 9.0 alone.

    Both directions drop the same weights only if their execution plans have the same longest lengths. Those
    of packed calls are rounded in each direction by itself.
    """
    if not spec.dropout:
        return
    if (capability := spec.device.capability) is not None and capability[0] != 9:
        yield f"compute capability must be 9.x with dropout, got {capability[0]}.{capability[1]}"
    if spec.dropout == 1.0:
        yield "dropout_p must be below 1, got 1.0"
    if spec.varlen:
        yield f"dropout_p must be 0 with packed tensors, got {spec.dropout}"
    elif spec.window != (-1, -1) and spec.max_q != spec.max_k:
        # The frontend refuses every mask that is aligned bottom-right.
        got = f"{spec.max_q} and {spec.max_k}"
        yield f"query and key must have the same length with dropout_p and a mask, got {got}"
    if not spec.varlen and spec.max_k == 1:
        # Gradients that are 0 were beyond twice plain PyTorch's error on an H200.
        yield "key must have more than one token with dropout_p, got 1"
    if spec.bias:
        yield f"dropout_p must be 0 with attn_bias, got {spec.dropout}"


def _refuses_gradients(spec: AttentionSpec) -> Iterator[str]:
    yield from _against_deterministic(spec)
    if spec.bias_gradient and spec.max_k % STEP:  # there is no execution plan for padded rows of a bias
        yield f"max_k must be a multiple of {STEP} for the gradient of attn_bias, got {spec.max_k}"


def _against_deterministic(spec: AttentionSpec) -> Iterator[str]:
    """Yield the reasons against the same bits in each backward: it was tried on compute capability 9.0 alone.

    Such a backward allocates two bytes for each score.
    """
    capability = spec.device.capability
    if not spec.deterministic:
        return
    if capability is not None and capability[0] != 9:
        yield f"compute capability must be 9.x to be deterministic, got {capability[0]}.{capability[1]}"
    if spec.varlen:
        yield (
            "input must be dense to be deterministic, got packed: it would allocate batch * heads * "
            f"{LEAST_LENGTH}^2 * 2 bytes"
        )
    # Only here: a length that is read and that no cut names has all calls decided by exact lengths.
    elif (takes := 2 * spec.heads_q * spec.batch * spec.max_q * spec.max_k) > MOST_BYTES:
        yield f"to be deterministic it may allocate {MOST_BYTES} bytes, and would allocate {takes}"
    if spec.bias:
        yield "attn_bias must be None where deterministic algorithms are on, got a tensor"


def _cuts(spec: AttentionSpec) -> Iterator[Cut]:
    """Yield the lengths at which this module's reasons change for calls of the spec's kind."""
    yield Cut.of("batch", at=GRID + 1)
    # With that gradient the number of keys has no cut: whether it is a multiple is decided for each.
    if not (spec.varlen or spec.bias_gradient):
        yield from (Cut.of(name, at=length) for name in ("max_q", "max_k") for length in (1, 2))
        if spec.window != (-1, -1):
            is_square = spec.bias or spec.dropout > 0.0
            yield from (Cut.beyond("max_q", "max_k", at=step) for step in ((0, 1) if is_square else (1,)))
        if spec.deterministic:
            yield Cut.of("batch", "max_q", "max_k", at=MOST_BYTES // (2 * max(spec.heads_q, 1)) + 1)


def _priority(spec: AttentionSpec) -> int:
    """Return the priority: behind torch's kernels with a bias or dropout, which they run without a build."""
    return -10 if spec.bias or spec.dropout > 0.0 else 20


def _builds(spec: AttentionSpec) -> bool:
    """Whether each new shape gets an execution plan of its own."""
    return not spec.varlen


def _load() -> Kernels:
    import cudnn

    cudnn.backend_version()  # raises if the library is missing, unlike the import
    plans = ExecutionPlans(cudnn)
    return Kernels(
        functools.partial(forward, plans),
        functools.partial(backward, plans),
        functools.partial(specialize, plans),
    )


BACKEND = Backend(
    name="cuDNN",
    forward=Capabilities(**_BOTH),
    backward=Capabilities(**_BOTH, bias_gradient=True, delta_from_out=True, refuses=_refuses_gradients),
    load=_load,
    unavailable=_unavailable,
    version=_version,
    refuses=_refuses,
    install="pip install 'attnreg[cudnn]'",
    priority=_priority,
    cuts=_cuts,
    builds=_builds,
)
