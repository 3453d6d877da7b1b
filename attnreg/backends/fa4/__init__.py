"""FA4: FlashAttention 4, the CuTe kernels of the package flash-attn-4 for Hopper and Blackwell.

Layouts, LSE and masks are the contract's. What has to be put right: an open side of a window is
None there, rows past the last offset are never written, and rows of no sequence have to be finite
(`_fa4_rows`). A NaN within one sequence of a packed batch can still spread to the one before it.

Kernels are compiled at the first call of their kind and kept on disk (`_fa4_package`); inside a CUDA
graph that can't happen (`_fa4_kinds`). A call that comes back launches what it launched, without the
package's Python (`_fa4_launches`).
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attnreg.backends.fa4.kinds import kind_of, repeated, seen
from attnreg.backends.fa4.launches import Launches, known_as
from attnreg.backends.fa4.limits import BACKWARD, FORWARD, refuses
from attnreg.backends.fa4.package import RESULTS, first, functions, installed, quiet, release, unavailable
from attnreg.backends.fa4.rows import blank, empty, unseen, whole, zeros
from attnreg.contract.backend import Backend, Call, Kernels
from attnreg.errors import UnsupportedInputError
from attnreg.torchlib.locks import open_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnreg.backends.fa4.launches import Name
    from attnreg.contract.spec import Direction

__all__ = ["BACKEND"]

# The compiler crashes when two threads use it at once. Held around every call of the package, known
# kind or not: it costs 0.1 µs of 90, and which call will compile is in the end the package's to say.
# Autograd runs backwards on threads of its own, so it is one lock for both directions. What only
# launches does without.
_compiling = open_after_fork(threading.RLock())

_NOTHING = contextlib.nullcontext()


def _load() -> Kernels:
    run_forward, run_backward = functions()
    launches = Launches()

    def forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        inputs = query, key, value
        name = known_as(call, *inputs)
        if (recipe := launches.recipe(name)) is not None and whole(query, key, call):
            with _current(query.device):
                out, lse = recipe.again(*inputs, call.cu_seqlens_q, call.cu_seqlens_k)
            return out, lse
        if _nothing_to_do(query, key):
            return empty(query, value, call)
        call = _closed_up(call)
        given = _arguments(call, None) | {"num_splits": 1, "return_lse": True}
        if not whole(query, key, call):
            name = None
            _, keys = unseen(query, key, call)
            given["out"], given["lse"] = empty(query, value, call)
            (value,) = blank(keys, given["out"], value)
        if call.block_table is not None:
            given["page_table"] = call.block_table
        tensors = {"q": query, "k": key, "v": value}
        out, lse = _run("forward", run_forward, tensors, given, call, launches, name)
        return out, lse

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse.contiguous()
        inputs = query, key, value, grad_out, out, lse
        name = known_as(call, *inputs)
        if (recipe := launches.recipe(name)) is not None and whole(query, key, call):
            with _current(query.device):
                grad_q, grad_k, grad_v = recipe.again(*inputs, call.cu_seqlens_q, call.cu_seqlens_k)
            return grad_q, grad_k, grad_v
        if _nothing_to_do(query, key):
            return zeros(query), zeros(key), zeros(value)
        call = _closed_up(call)
        given = _arguments(call, 0.0) | {"deterministic": call.deterministic}
        if not whole(query, key, call):
            name = None
            queries, keys = unseen(query, key, call)
            given |= {"dq": zeros(query), "dk": zeros(key), "dv": zeros(value)}
            query, grad_out = blank(queries, given["dq"], query, grad_out)
            key, value = blank(keys, given["dk"], key, value)
        tensors = {"q": query, "k": key, "v": value, "dout": grad_out, "out": out, "lse": lse}
        grad_q, grad_k, grad_v = _run("backward", run_backward, tensors, given, call, launches, name)
        return grad_q, grad_k, grad_v

    return Kernels(forward, backward, partial(_specialize, launches))


def _specialize(
    launches: Launches, direction: Direction, tensors: tuple[Tensor, ...], call: Call
) -> Callable[..., tuple[Tensor, ...] | None] | None:
    """Return what does such a call again: its recipe. See `Kernels`."""
    if direction == "backward":
        grad_out, query, key, value, out, lse = tensors
        if not lse.is_contiguous():
            return None
        tensors = query, key, value, grad_out, out, lse
    query = tensors[0]
    recipe = launches.recipe(known_as(call, *tensors))
    if recipe is None:
        return None
    again, device = recipe.again, query.device
    without = () if call.varlen else (None, None)

    def forward(*given: Tensor) -> tuple[Tensor, ...] | None:
        return again(*given, *without) if _is_current(device) else None

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...] | None:
        if not _is_current(device):
            return None
        return again(query, key, value, grad_out, *rest, *without)

    return forward if direction == "forward" else backward


def _arguments(call: Call, softcap: float | None) -> dict[str, Any]:
    """Return what both functions are given; without a softcap one wants None, the other 0.0."""
    left, right = call.window
    # A negative bound means what it says there; only None is open.
    causal = left < 0 and right == 0
    return {
        "softmax_scale": call.scale,
        "softcap": softcap,
        "causal": causal,
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 and not causal else None,
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "seqused_k": call.seqused_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
    }


def _closed_up(call: Call) -> Call:
    """Return a call whose integers lie without gaps: asserted even of a single one, whose stride is moot."""
    apart = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
        if (tensor := getattr(call, name)) is not None and tensor.stride(-1) != 1
    }
    return call._replace(**apart) if apart else call


def _run(
    direction: str,
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    given: dict[str, Any],
    call: Call,
    launches: Launches,
    name: Name | None,
) -> tuple[Tensor, ...]:
    """Call the package, one thread at a time, on the tensors' device; never to compile in a CUDA graph."""
    run = partial(function, **tensors, **given)
    query = tensors["q"]
    kind = kind_of(direction, query, tensors["k"], tensors["v"], call)
    exact = (kind, repeated(*tensors.values()))
    new = exact not in seen
    if new and _capturing(query):
        raise UnsupportedInputError(
            f"FA4 has to run this kind of {direction} once before it can be recorded in a CUDA graph"
        )
    try:
        with _compiling, _current(query.device), quiet() if new else _NOTHING:
            if name is not None and launches.meet(name) and not new and not _capturing(query):
                inputs = (*tensors.values(), call.cu_seqlens_q, call.cu_seqlens_k)
                results = launches.watch(name, kind, run, inputs, RESULTS[direction])
            else:
                results = run()
    except Exception as error:
        if new:
            error.add_note(f"{release()} has loaded, but its first {direction} of this kind failed")
        raise
    if new:
        seen.update((kind, exact))
    return first(results, direction)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make it the current device, which the kernels are compiled for and launched on."""
    return _NOTHING if _is_current(device) else torch.cuda.device(device)


def _is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index == torch._C._cuda_getDevice()


def _nothing_to_do(query: Tensor, key: Tensor) -> bool:
    return query.numel() == 0 or key.numel() == 0


BACKEND = Backend(
    name="FA4",
    forward=FORWARD,
    backward=BACKWARD,
    load=_load,
    unavailable=unavailable,
    version=installed,
    refuses=refuses,
    install="pip install 'attnreg[fa4]'",
    # The fastest of packed batches on an H200, forward and backward (docs/benchmarks.md).
    priority=30,
)
