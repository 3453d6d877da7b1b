"""FA4's forward and backward: the contract's calls mapped to those of flash-attn-4.

Layouts, LSE, sinks and masks are the contract's already. Three things have to be put right: an open side of a
window is None there; rows past the last offset are never written; rows of no sequence have to be finite
(`contract.offsets`). These are set to zero in a copy, as only the GPU knows where a packed batch ends;
once it has reported that there are none, a batch costs nothing more. A NaN within one sequence of a packed
batch can still spread to the one before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.fa4 import compiled_kinds, softcap
from attnreg.backends.fa4.package import SINKS, PackageCall, functions, quiet, release, release_is_tested
from attnreg.backends.fa4.recording import Description, describe
from attnreg.backends.fa4.replay import Replays
from attnreg.contract.backend import Call, Kernels
from attnreg.contract.launchers import Launcher
from attnreg.contract.offsets import empty_results, facts, find_unused
from attnreg.contract.spec import Direction
from attnreg.errors import BackendUnavailableError, UnsupportedInputError, is_of_device
from attnreg.torchlib.layout import stream_of
from attnreg.torchlib.locks import open_after_fork

# The package's compiler crashes when two threads use it at once. Locked around every call of the package,
# whether its kind is compiled or not: that costs 0.1 µs of 90, and only the package knows which call will
# compile. Autograd runs backwards on threads of its own, so both directions share it. Replays don't need it.
_compile_lock = open_after_fork(threading.RLock())

_NOTHING = contextlib.nullcontext()


def load() -> Kernels:
    """Import flash-attn-4 and return its kernels.

    Raises:
        BackendUnavailableError: the release's functions aren't those that the adapter knows.
    """
    adapter = _Adapter(*functions(), Replays(release_is_tested()))
    return Kernels(adapter.forward, adapter.backward, adapter.specialize)


class _Adapter(NamedTuple):
    """The package's two functions, and the calls that can do without their Python."""

    run_forward: Callable[..., Any]
    run_backward: Callable[..., Any]
    replays: Replays

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return output and LSE. See `Kernels`."""
        inputs = query, key, value
        description = describe(call, *inputs)
        recipe = self.replays.find(description)
        if recipe is not None and _none_unused(query, key, call):
            with _current(query.device):
                out, lse = recipe.replay(*inputs, *_further(call).values())
            return out, lse
        if query.numel() == 0 or key.numel() == 0:
            return empty_results(query, value, call)
        call = _with_dense_integers(call)
        # 0 would let the package choose, and fail on Hopper where it chooses more than one.
        options = self._options("forward", query, call) | {"num_splits": 1, "return_lse": True}
        if not _none_unused(query, key, call):
            description = None
            # Weights of unused keys are zero, whatever is in the keys, so that only the values matter.
            _, unused_keys = find_unused(query, key, call)
            # Filled before: clearing unused rows afterwards would be two passes over the output and a mask.
            options["out"], options["lse"] = empty_results(query, value, call)
            (value,) = _blanked(unused_keys, options["out"], value)
        if call.block_table is not None:
            options["page_table"] = call.block_table
        tensors = {"q": query, "k": key, "v": value} | _further(call)
        package_call = PackageCall("forward", self.run_forward, tensors, options)
        out, lse = _run(package_call, call, self.replays, description)
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
        """Return the gradients of query, key and value, and of sinks if there are some. See `Kernels`."""
        lse = lse.contiguous()  # another backend's forward may give it other strides
        inputs = grad_out, query, key, value, out, lse
        description = describe(call, *inputs)
        recipe = self.replays.find(description)
        if recipe is not None and _none_unused(query, key, call):
            with _current(query.device):
                return recipe.replay(*inputs, *_further(call).values())
        if query.numel() == 0 or key.numel() == 0:
            return tuple(_zeros(x) for x in (query, key, value, call.sinks) if x is not None)
        call = _with_dense_integers(call)
        options = self._options("backward", query, call) | {"deterministic": call.repeatable}
        if call.grad_lse is not None:
            options["dlse"] = call.grad_lse.float().contiguous()
        if not _none_unused(query, key, call):
            description = None
            # Here each row is a factor of a sum over a whole tile: all four have to be finite.
            unused_queries, unused_keys = find_unused(query, key, call)
            options |= {"dq": _zeros(query), "dk": _zeros(key), "dv": _zeros(value)}
            query, grad_out = _blanked(unused_queries, options["dq"], query, grad_out)
            key, value = _blanked(unused_keys, options["dk"], key, value)
        tensors = {"dout": grad_out, "q": query, "k": key, "v": value, "out": out, "lse": lse}
        package_call = PackageCall("backward", self.run_backward, tensors | _further(call), options)
        return _run(package_call, call, self.replays, description)

    def specialize(self, direction: Direction, tensors: tuple[Tensor, ...], call: Call) -> Launcher | None:
        """Return the replay of such a call once its recipe is confirmed. See `contract.launchers`."""
        if direction == "backward" and not tensors[-1].is_contiguous():
            return None  # the LSE would have to be copied first
        recipe = self.replays.find(describe(call, *tensors))
        return None if recipe is None else recipe.replay

    def _options(self, direction: Direction, query: Tensor, call: Call) -> dict[str, Any]:
        """Return the keywords of a function that its tensors don't decide."""
        return _options(call) | softcap.options(direction, call, query, own=self.replays.tested_release)


def _options(call: Call) -> dict[str, Any]:
    """Return the keywords of both functions."""
    left, right = call.window
    # The package takes a negative bound literally; only None is an open side.
    causal = left < 0 and right == 0
    return {
        "softmax_scale": call.scale,
        "causal": causal,
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 and not causal else None,
        "seqused_k": call.seqused_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
    }


def _further(call: Call) -> dict[str, Tensor]:
    """Return the sinks that a call has, and its offsets: both, those of the queries with pages, or none."""
    tensors = {SINKS: call.sinks, "cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    return {name: x for name, x in tensors.items() if x is not None}


def _with_dense_integers(call: Call) -> Call:
    """Return a call whose integers have a last stride of 1, which the package asserts even of one element."""
    copies = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
        if (tensor := getattr(call, name)) is not None and tensor.stride(-1) != 1
    }
    return call._replace(**copies) if copies else call


def _run(
    package_call: PackageCall, call: Call, replays: Replays, description: Description | None
) -> tuple[Tensor, ...]:
    """Call the package, one thread at a time, on the tensors' device; never to compile in a CUDA graph."""
    direction, _, tensors, _ = package_call
    query = tensors["q"]
    kind = compiled_kinds.kind_of(direction, query, tensors["k"], tensors["v"], call)
    # The limits see the kind only: a spec doesn't say which tensors are expanded, nor the dtype of sinks.
    sinks = None if call.sinks is None else call.sinks.dtype
    exact = (kind, sinks, compiled_kinds.repeated_dims(*tensors.values()))
    new, capturing = exact not in compiled_kinds.have_run, _capturing(query)
    if new and capturing:
        raise UnsupportedInputError(
            f"FA4 has to run this kind of {direction} once before it can be recorded in a CUDA graph"
        )
    try:
        with _compile_lock, _current(query.device), quiet() if new else _NOTHING:
            if description is not None and replays.seen(description) and not new and not capturing:
                results = replays.run(description, package_call)
            else:
                results = package_call()
    except Exception as error:
        if not new or isinstance(error, BackendUnavailableError):
            raise
        problem = f"{release()} has loaded, but its first {direction} of this kind failed"
        if is_of_device(error):
            error.add_note(problem)
            raise
        # A launch fails by an error of the device: this is the package's compiler, or a check of it.
        raise BackendUnavailableError(f"{problem}: {type(error).__name__}: {error}") from error
    if new:
        compiled_kinds.have_run.update((kind, exact))
    return results


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make it the current device, which the kernels are compiled for and launched on."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)


def _none_unused(query: Tensor, key: Tensor, call: Call) -> bool:
    """Whether it is known that every row belongs to a sequence and counts."""
    if call.cu_seqlens_q is None:
        return call.seqused_k is None
    return facts(call, len(query), len(key), stream_of(query) if query.is_cuda else 0).no_unused_rows


def _blanked(rows: Tensor | None, zeros: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies with zeros, taken from `zeros`, in these rows; without rows the tensors themselves."""
    if rows is None:
        return tensors
    # A view of a tensor that is filled already: a Python number would cost one more launch.
    rows, zero = rows[..., None, None], zeros.as_strided((), ())
    return tuple(torch.where(rows, zero, tensor) for tensor in tensors)


def _zeros(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.shape)
