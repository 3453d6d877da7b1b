"""FA3: FlashAttention 3, the Hopper kernels that the package flash_attn_3 registers with torch.

This adapter hasn't run on a GPU, because there is no built package to test it with. Layouts, windows and LSE
are the contract's, with three differences. The LSE of a row without a key is +inf. Rows past the last offset
are never written. A NaN spreads from rows that no query may see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.launching.offsets import empty_results, find_unused
from attnreg.core.torchlib.layout import readable
from attnreg.errors import RegistrationError

PACKAGE = "flash_attn_3"

# What the adapter passes to each op; the other arguments keep their defaults.
SHARED = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "is_causal", "window_size_left", "window_size_right"),
)
PASSED = {
    "fwd": (*SHARED, "page_table", "num_splits"),
    "bwd": (*SHARED, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"),
}


class _FA3Backward(Capabilities):
    """The declared fields, and a backward's limits that no field can express."""

    def unsupported(self, spec: AttentionSpec) -> tuple[str, ...]:
        """Return every reason why `spec` can't run here; empty if it can."""
        reasons = super().unsupported(spec)
        # The package rounds head dims up to 64, 96, 128, 192 or 256, and checks the rounded value.
        if reasons or not spec.deterministic or spec.head_dim <= 192:
            return reasons
        return (f"head_dim must be at most 192 with deterministic algorithms, got {spec.head_dim}",)


# From hopper/flash_api.cpp of flash-attention. The package can be built for compute capability 8.x, too,
# where it has FA2's kernels. Its Hopper kernels run on no newer GPU.
LIMITS: dict[str, Any] = {
    "devices": ("cuda",),
    "dtypes": ("float16", "bfloat16"),
    "compute_capability": ((9, 0), (9, 0)),
    "head_dim": Range(8, 256, 8),
    "batch": Range(0, GRID),  # hopper/flash_bwd_launch_template.h
    "heads": Range(0, GRID),
    **dict.fromkeys(("varlen", "gqa", "causal", "window", "seqused_k", "deterministic", "capture"), True),
}
FORWARD = Capabilities(**LIMITS, page_size=Range(1), num_splits=True)
BACKWARD = _FA3Backward(**LIMITS, delta_from_out=True)


def _refuses(spec: AttentionSpec) -> tuple[str, ...]:
    if spec.num_splits not in (None, 1):
        return (f"num_splits must be 1 or None, got {spec.num_splits}",)
    return ()


def _unavailable() -> str | None:
    try:
        here = find_spec(PACKAGE) is not None
    except ValueError:  # a module of that name without a spec is loaded
        here = False
    if not here:
        return f"{PACKAGE} isn't installed"
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU here"


def _version() -> str | None:
    return _version_by(version)


# Cached: reading the version takes a millisecond, and each decision may need it.
@functools.cache
def _version_by(ask: Callable[[str], str]) -> str | None:
    try:
        return ask(PACKAGE)
    except PackageNotFoundError:
        return None


def _load() -> Kernels:
    import_module(f"{PACKAGE}._C")  # registers the ops
    run_forward, run_backward = (_checked(name) for name in PASSED)

    def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if query.numel() == 0 or key.numel() == 0:
            return empty_results(query, value, call)
        queries, keys = find_unused(query, key, call)
        key, value = _zeroed(keys, key, value)
        # One split, because several splits are added up in an order that changes from run to run.
        arguments = _arguments(query, key, value, call)
        out, lse = run_forward(page_table=call.block_table, num_splits=1, **arguments)[:2]
        (out,) = _zeroed(queries, out)
        without_keys = lse == torch.inf if queries is None else (lse == torch.inf) | queries
        return out, lse.masked_fill(without_keys, -torch.inf)

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Preallocated, because only some versions return the gradients as their first three results.
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (query, key, value))
        if query.numel() == 0 or key.numel() == 0:
            return grad_q, grad_k, grad_v
        queries, keys = find_unused(query, key, call)
        query, grad_out, out = _zeroed(queries, query, grad_out, out)
        key, value = _zeroed(keys, key, value)
        run_backward(
            dout=readable(grad_out), out=readable(out), softmax_lse=lse.contiguous(), dq=grad_q, dk=grad_k,
            dv=grad_v, deterministic=call.repeatable, **_arguments(query, key, value, call),
        )  # fmt: skip
        return grad_q, grad_k, grad_v

    return Kernels(forward, backward)


def _arguments(query: Tensor, key: Tensor, value: Tensor, call: Call) -> dict[str, Any]:
    """Return the arguments of both ops."""
    return {
        "q": readable(query),
        "k": readable(key),
        "v": readable(value),
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "seqused_k": call.seqused_k,
        "max_seqlen_q": call.max_q if call.varlen else None,
        "max_seqlen_k": None if call.cu_seqlens_k is None else call.max_k,
        "softmax_scale": call.scale,
        "is_causal": call.causal,
        "window_size_left": call.window[0],
        "window_size_right": call.window[1],
    }


def _checked(name: str) -> Callable[..., Any]:
    """Return an op as a function of keywords, after checking that its arguments are as the adapter expects.

    Raises:
        RegistrationError: an argument is missing, or another one is required; names it and the version.
    """
    package = f"{PACKAGE} {_version() or 'of unknown version'}"
    op = getattr(getattr(torch.ops, PACKAGE), name, None)
    if op is None:
        raise RegistrationError(f"{package} registers no operator {PACKAGE}::{name}")
    arguments = op.default._schema.arguments
    if lacking := [
        passed for passed in PASSED[name] if passed not in {argument.name for argument in arguments}
    ]:
        raise RegistrationError(
            f"{PACKAGE}::{name} of {package} has no argument {', '.join(lacking)}: {op.default._schema}"
        )
    # Older versions declare no defaults: unused arguments are passed as None.
    further = [
        argument
        for argument in arguments
        if argument.name not in PASSED[name] and not argument.has_default_value()
    ]
    if needed := [argument.name for argument in further if argument.type.kind() != "OptionalType"]:
        raise RegistrationError(
            f"{PACKAGE}::{name} of {package} needs {', '.join(needed)}, which attnreg doesn't know"
        )
    return functools.partial(op.default, **dict.fromkeys((argument.name for argument in further), None))


# Copies each tensor, because only the GPU knows where a packed batch ends.
def _zeroed(rows: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of the tensors with zeros in the marked rows; without `rows` the tensors themselves."""
    if rows is None:
        return tensors
    return tuple(tensor.masked_fill(rows[..., None, None], 0.0) for tensor in tensors)


def _cuts(_spec: AttentionSpec) -> tuple[Cut, ...]:
    return (Cut.of("batch", at=GRID + 1),)


BACKEND = Backend(
    name="FA3",
    forward=FORWARD,
    backward=BACKWARD,
    load=_load,
    unavailable=_unavailable,
    version=_version,
    refuses=_refuses,
    cuts=_cuts,
    install="pip install ./hopper (in a clone of Dao-AILab/flash-attention)",
    # Below FA2, which is tested. FA3 runs only if a request names it.
    priority=5,
    experimental=True,
)
