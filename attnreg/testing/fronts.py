"""Calls a backend through each front, with each way to choose a backend, three times.

The first call makes a plan, the second may find it, the call cache may run a later one. Each has values of
its own, and packed calls have offsets of their own: nothing kept of an earlier call may show in the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnreg import api
from attnreg.core import aten, registry
from attnreg.core.contract.backend import Backend
from attnreg.core.dispatch import counters
from attnreg.core.varlen.front import AuxRequest, varlen_attn
from attnreg.errors import RegistrationError
from attnreg.tools.measure import Case, Error, Inputs, inputs
from attnreg.tools.measure.places import describe_faults
from attnreg.tools.measure.reference import Results, attention
from attnreg.tools.measure.rule import compare

CALLS = 3

DENSE = Case(name="repeated", lens_q=(65, 65), lens_k=(65, 65), scale=0.3)
PACKED = Case(name="repeated", lens_q=(33, 7, 64), lens_k=(40, 9, 70), varlen=True, scale=0.3)

# What the program calls and how it chooses the backend, and the call.
FRONTS = {
    "varlen_attn(backend=)": PACKED,
    "varlen_attn in use_backend": PACKED,
    "varlen_attn after register_backend": PACKED,
    "SDPA in use_backend": DENSE,
    "SDPA after register_backend": DENSE,
}


def measure_front(
    front: str, backend: Backend, case: Case, device: torch.device, seed: int, backward: bool
) -> dict[str, Error]:
    """Return the largest error of each tensor in three calls of a front.

    Raises:
        RegistrationError: another backend has its name, or the calls didn't reach it.
    """
    largest: dict[str, Error] = {}
    with _known(backend), _chosen(front, backend):
        for number in range(CALLS):
            drawn = case.reordered() if number % 2 else case
            arguments = inputs(drawn, device, seed + number)
            with torch.set_grad_enabled(backward):
                results = _reaching(backend.name, partial(_called, front, backend.name, arguments))
            truth, plain = (
                attention(drawn, arguments, dtype) for dtype in (torch.float64, arguments.q.dtype)
            )
            for name, got in results.items():
                error = compare((got,), getattr(plain, name), getattr(truth, name), arguments.q.dtype)
                if not error.passed:
                    place = describe_faults(drawn, name, got, getattr(truth, name), error.allowed, truth.lse)
                    error = error._replace(place=f"in call {number + 1} of {CALLS}: {place}")
                largest[name] = max(largest.get(name, error), error, key=lambda each: each.share)
    return largest


def against(front: str, case: Case, device: torch.device) -> tuple[str, ...]:
    """Return why a front can't bring a call to a backend; empty if it can, or if there is no front."""
    halves = ("float16", "bfloat16")
    if front.startswith("SDPA") and device.type not in ("cpu", "cuda"):
        return (f"the routers below SDPA need a CPU or a CUDA GPU, got {device.type}",)
    if front.startswith("SDPA") and device.type == "cuda" and case.dtype not in halves:
        return (f"torch's flash op, which SDPA calls, needs {' or '.join(halves)}, got {case.dtype}",)
    return ()


@contextmanager
def _known(backend: Backend) -> Iterator[None]:
    """Add a backend to the registry; restore the registry and torch's ops afterwards."""
    installed, before = aten.installed(), registry.entries().get(backend.name.casefold())
    entry = registry.add(backend, "attnreg.testing")
    try:
        yield
    finally:
        if not installed:
            aten.restore()
        if before is None:
            registry.discard(entry)


def _chosen(front: str, backend: Backend) -> AbstractContextManager[object]:
    if front.endswith("use_backend"):
        return api.use_backend(backend.name)
    return api.register_backend(backend) if front.endswith("register_backend") else nullcontext()


def _called(front: str, name: str, arguments: Inputs) -> dict[str, Tensor]:
    """Return the results of a call, in the contract's shapes."""
    *tensors, grad_out, call = arguments
    recording = torch.is_grad_enabled()
    leaves = [x.detach().requires_grad_(recording) for x in tensors]
    returned: dict[str, Tensor] = {}
    if front.startswith("SDPA"):
        query, key, value = (x.transpose(1, 2) for x in leaves)
        options: dict[str, Any] = {"is_causal": call.window == (-1, 0), "scale": call.scale}
        out = F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)
    else:
        lengths = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k
        options = {"scale": call.scale, "window_size": call.window, "enable_gqa": True}
        options |= {"backend": name if front.endswith("(backend=)") else None}
        packed: Any = varlen_attn
        out, returned["lse"] = packed(*leaves, *lengths, return_aux=AuxRequest(lse=True), **options)
    grads = torch.autograd.grad(out, leaves, grad_out) if recording else ()
    return {"out": out.detach(), **returned, **dict(zip(Results._fields[2:], grads, strict=False))}


def _reaching(name: str, call: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Run a call; an error if any direction of it ran on another backend."""
    before = counters.call_counts()
    results = call()
    ran = {
        other: {direction: n - before.get(other, {}).get(direction, 0) for direction, n in counts.items()}
        for other, counts in counters.call_counts().items()
    }
    expected = {name: {"forward": 1, "backward": int("dq" in results)}}
    if (got := {other: counts for other, counts in ran.items() if any(counts.values())}) != expected:
        raise RegistrationError(f"calls by backend: got {got}, expected {expected}")
    return results
