"""FA3: FlashAttention 3, the Hopper kernels that the package flash_attn_3 registers with torch.

Its forwards have run on an H200. Its backwards failed there: a build of the package in pieces couldn't launch
one of their kernels (docs/results/accuracy.md). Layouts, windows and LSE are the contract's, with three
differences. Rows past the last offset are never written. A NaN spreads from rows that no query may see: in a
forward from values. A backward reads `seqused_k` only of packed keys.

A build of the package may lack kernels. It says so itself, in the module flash_attn_config.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnreg.core.contract.backend import Backend, Call, Kernels
from attnreg.core.contract.capabilities import GRID, Capabilities, Range
from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec
from attnreg.core.launching.offsets import Unused, empty_results, find_unused, is_empty, none_unused, zeroed
from attnreg.core.torchlib.layout import readable, with_last_stride_1
from attnreg.core.torchlib.versions import version_of
from attnreg.errors import RegistrationError

PACKAGE = "flash_attn_3"

# What the adapter passes to each op; the other arguments keep their defaults.
SHARED = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "is_causal", "window_size_left", "window_size_right"),
)
PASSED = {
    "fwd": (*SHARED, "page_table", "leftpad_k", "num_splits"),
    "bwd": (*SHARED, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"),
}

# The head dims of the package's kernels, which others are rounded up to. A build may lack some.
KERNEL_DIMS = (64, 96, 128, 192, 256)

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


def _refuses(spec: AttentionSpec) -> Iterator[str]:
    if spec.num_splits not in (None, 1):
        yield f"num_splits must be 1 or None, got {spec.num_splits}"
    yield from _against_build(spec)


def _refuses_gradients(spec: AttentionSpec) -> Iterator[str]:
    without = _without(spec)
    if "BACKWARD" in without:
        yield f"{PACKAGE} is built without BACKWARD"
    elif spec.deterministic and _kernel_dim(spec, without) == 256:
        limit = max((dim for dim in _dims(without) if dim < 256), default=0)
        yield f"head_dim must be at most {limit} with deterministic algorithms, got {spec.head_dim}"


def _against_build(spec: AttentionSpec) -> Iterator[str]:
    """Yield the reasons against a call whose kernel the installed package was built without."""
    without = _without(spec)
    shortened = spec.seqused_k and spec.page_size is None
    for requested, feature, expected in (
        (spec.dtype == "float16", "FP16", "dtype must be bfloat16, got float16"),
        (spec.windowed, "LOCAL", f"window_size must be (-1, -1) or causal, got {spec.window}"),
        (spec.varlen, "VARLEN", "input must be dense, got packed"),
        (shortened, "VARLEN", "seqused_k must be None, got a tensor"),
        (spec.page_size is not None, "PAGEDKV", "block_table must be None, got a tensor"),
    ):
        if requested and feature in without:
            yield f"{expected}: {PACKAGE} is built without {feature}"
    if _kernel_dim(spec, without) is None:
        largest = max(_dims(without), default=0)
        lacking = " and ".join(f"HDIM{dim}" for dim in KERNEL_DIMS if dim > largest)
        yield f"head_dim must be at most {largest}, got {spec.head_dim}: {PACKAGE} is built without {lacking}"


def _dims(without: frozenset[str]) -> list[int]:
    return [dim for dim in KERNEL_DIMS if f"HDIM{dim}" not in without]


def _kernel_dim(spec: AttentionSpec, without: frozenset[str]) -> int | None:
    """Return the head dim of the kernel that runs a call; None if it isn't built."""
    return next((dim for dim in _dims(without) if dim >= spec.head_dim), None)


def _without(spec: AttentionSpec) -> frozenset[str]:
    """Return what the package is built without, of which nothing is known on a simulated machine."""
    return frozenset() if spec.device.simulated else _left_out()


# Cached, because each decision needs it.
@functools.cache
def _left_out() -> frozenset[str]:
    """Return what the installed package is built without, as in FLASH_ATTENTION_DISABLE_FP16."""
    try:
        flags = import_module("flash_attn_config").CONFIG["build_flags"]
    except ImportError:  # older versions don't say
        return frozenset()
    return frozenset(name.partition("_DISABLE_")[2] for name, is_set in flags.items() if is_set) - {""}


def _unavailable() -> str | None:
    try:
        here = find_spec(PACKAGE) is not None
    except ValueError:  # a module of that name without a spec is loaded
        here = False
    if not here:
        return f"{PACKAGE} isn't installed"
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU here"


def _version() -> str | None:
    return version_of(PACKAGE, version)


def _load() -> Kernels:
    import_module(f"{PACKAGE}._C")  # registers the ops
    run_forward, run_backward = (_checked(name) for name in PASSED)

    def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if is_empty(query, key, call):
            return empty_results(query, value, call)
        queries, keys = _unused(query, key, call)
        # Weights of unused keys are 0, whatever is in the keys, so that only the values matter.
        (value,) = zeroed(keys, value)
        # One split, because several splits are added up in an order that changes from run to run.
        arguments = _arguments(query, key, value, call) | {"num_splits": 1} | _pages(call)
        out, lse = run_forward(**arguments)[:2]
        if queries is None:
            return out, lse
        (out,) = zeroed(queries, out)
        return out, lse.masked_fill(queries, -torch.inf)

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Preallocated, because only some versions return the gradients as their first three results.
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (query, key, value))
        grads = grad_q, grad_k, grad_v
        if is_empty(query, key, call):
            return grads
        queries, keys = _unused(query, key, call)
        query, grad_out = zeroed(queries, query, grad_out)
        key, value = zeroed(keys, key, value)
        if call.seqused_k is not None and call.cu_seqlens_k is None:
            batch, length = key.shape[:2]
            offsets = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * length
            call = call._replace(cu_seqlens_k=offsets)
            key, value, grad_k, grad_v = (x.flatten(0, 1) for x in (key, value, grad_k, grad_v))
        run_backward(
            dout=readable(grad_out), out=readable(out), softmax_lse=lse.contiguous(), dq=grad_q, dk=grad_k,
            dv=grad_v, deterministic=call.repeatable, **_arguments(query, key, value, call),
        )  # fmt: skip
        return grads

    return Kernels(forward, backward)


def _unused(query: Tensor, key: Tensor, call: Call) -> Unused:
    """Return which rows have to be zeroed, as `find_unused` does; none if none is known to be unused."""
    return Unused(None, None) if none_unused(query, key, call) else find_unused(query, key, call)


def _arguments(query: Tensor, key: Tensor, value: Tensor, call: Call) -> dict[str, Any]:
    """Return the arguments of both ops."""
    return {
        "q": readable(query),
        "k": readable(key),
        "v": readable(value),
        "cu_seqlens_q": _contiguous(call.cu_seqlens_q),
        "cu_seqlens_k": _contiguous(call.cu_seqlens_k),
        "seqused_k": _contiguous(call.seqused_k),
        "max_seqlen_q": call.max_q if call.varlen else None,
        "max_seqlen_k": None if call.cu_seqlens_k is None else call.max_k,
        "softmax_scale": call.scale,
        "is_causal": call.causal,
        "window_size_left": call.window[0],
        "window_size_right": call.window[1],
    }


def _pages(call: Call) -> dict[str, Any]:
    """Return the arguments of a forward that only pages need."""
    if call.block_table is None or call.seqused_k is None:
        return {"page_table": None, "leftpad_k": None}
    # With a left padding, here of 0, values past the last key are loaded as zeros. Else pages that are a
    # multiple of a key tile would be loaded by TMA, with whatever is in them.
    return {"page_table": _contiguous(call.block_table), "leftpad_k": torch.zeros_like(call.seqused_k)}


def _contiguous(integers: Tensor | None) -> Tensor | None:
    return None if integers is None else with_last_stride_1(integers)


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


def _cuts(_spec: AttentionSpec) -> tuple[Cut, ...]:
    return (Cut.of("batch", at=GRID + 1),)


BACKEND = Backend(
    name="FA3",
    forward=Capabilities(**LIMITS, page_size=Range(1), num_splits=True),
    backward=Capabilities(**LIMITS, delta_from_out=True, refuses=_refuses_gradients),
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
