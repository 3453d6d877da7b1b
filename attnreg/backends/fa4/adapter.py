"""FA4's forward and backward: the contract's calls mapped to flash-attn-4's calls.

Layouts, LSE, sinks and masks are the contract's already. The adapter handles three differences:

- The package's open side of a window is None.
- The package never writes rows past the last offset.
- Rows of no sequence have to be finite (`launching.offsets`). They are set to zero in a copy, because only
  the GPU knows where a packed batch ends. Once it has reported that no such rows exist, nothing is copied any
  more.

A NaN within a sequence of a packed batch can still spread to the previous sequence.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.backends.fa4 import compiled_kinds, ranges, softcap
from attnreg.backends.fa4.compiled_kinds import Family
from attnreg.backends.fa4.launches import LauncherArguments
from attnreg.backends.fa4.package import SINKS, PackageCall, functions, quiet, release, release_is_tested
from attnreg.backends.fa4.trials import Trials
from attnreg.core.contract.backend import Call, Kernels, Launcher
from attnreg.core.contract.spec import Direction
from attnreg.core.launching import visible
from attnreg.core.launching.counts import counts_in, counts_of, derivation_for
from attnreg.core.launching.launchers import FunctionLauncher
from attnreg.core.launching.memory import inputs_of
from attnreg.core.launching.offsets import empty_results, find_unused, none_unused
from attnreg.core.torchlib.layout import aligned
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import BackendUnavailableError, UnsupportedInputError, is_of_device

# The package's compiler crashes when two threads use it at once. Every call of the package holds this lock,
# also if its kind is compiled: only the package knows which call will compile, and the lock costs 0.1 µs of
# 90. Autograd runs backwards on its own threads, so both directions share the lock. Launches by arguments
# don't need it.
_compile_lock = open_after_fork(threading.RLock())

_NOTHING = contextlib.nullcontext()

# A first call of a kind that takes longer, in seconds, is logged.
LONG = 1.0

log = logging.getLogger("attnreg")


def load() -> Kernels:
    """Import flash-attn-4 and return its kernels.

    Raises:
        BackendUnavailableError: the release's functions have other arguments than the adapter expects.
    """
    adapter = _Adapter(*functions(), release_is_tested(), Trials())
    return Kernels(adapter.forward, adapter.backward, adapter.specialize)


class _Adapter(NamedTuple):
    """The package's two functions, and the trials of launches that skip their Python."""

    run_forward: Callable[..., Any]
    run_backward: Callable[..., Any]
    tested_release: bool
    trials: Trials

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output, in the query's dtype, and the LSE in float32, (B, H, S) or (H, T).

        Query and key are (B, S, H, D) or packed (T, H, D), the value has D_v; with pages key and value are
        (pages, page size, H, D). All are float16 or bfloat16.

        Raises:
            UnsupportedInputError: a CUDA graph is captured, and no call of this kind has run; or the kernels
                can't have as many tokens with `key_ranges`.
            BackendUnavailableError: the first call of a kind failed, but not by an error of the device.
        """
        inputs = query, key, value
        if query.numel() == 0 or key.numel() == 0:
            return empty_results(query, value, call)
        if compiled_kinds.counts_keys(*inputs, call) and call.cu_seqlens_k is not None:
            used, offsets = counts_in(counts_of(call.cu_seqlens_k), len(call.cu_seqlens_k) - 1)
            call = call._replace(cu_seqlens_k=offsets, seqused_k=used)
        family = compiled_kinds.family_of("forward", query, key, value, call)
        if family.as_pages:
            key, value = _unlike_a_tile(compiled_kinds.tiles(family, call.max_q)[1], key, value)
            inputs = query, key, value
        if call.key_ranges is not None:
            return self._forward_in_ranges(family, inputs, call)
        launched = self._try_launch(family, inputs, call)
        if launched is not None:
            out, lse = launched
            return out, lse
        call = _with_dense_integers(call)
        # 0 would let the package choose, and fail on Hopper where it chooses more than one.
        options = self._options(family, call) | {"num_splits": 1, "return_lse": True}
        if not none_unused(query, key, call):
            # Filled before the call: clearing unused rows afterwards would take two passes over the output
            # and a mask.
            options["out"], options["lse"] = empty_results(query, value, call)
            if not family.as_pages:
                # Weights of unused keys are zero, whatever is in the keys, so that only the values matter.
                (value,) = _blanked(find_unused(query, key, call).keys, options["out"], value)
        tensors = {"q": query, "k": key, "v": value} | _further_tensors(call)
        package_call = PackageCall("forward", self.run_forward, tensors, options, family.as_pages)
        out, lse = self._run(family, package_call, inputs, call)
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
        """Return the gradients of query, key and value, and of sinks if the call has any. See `Kernels`.

        Gradients have the shapes and dtypes of their inputs. `grad_out` and `out` are like a forward's
        output, `lse` like its LSE. Raises as `forward` does.
        """
        if query.numel() == 0 or key.numel() == 0:
            return tuple(_make_zeros(x) for x in (query, key, value, call.sinks) if x is not None)
        lse = lse.contiguous()  # another backend's forward may give it other strides
        inputs = grad_out, query, key, value, out, lse
        family = compiled_kinds.family_of("backward", query, key, value, call, grad_out, out)
        if call.key_ranges is not None:
            return self._backward_in_ranges(family, inputs, call)
        launched = self._try_launch(family, inputs, call)
        if launched is not None:
            return launched
        call = _with_dense_integers(call)
        options = self._options(family, call) | {"deterministic": call.repeatable}
        if call.grad_lse is not None:
            options["dlse"] = call.grad_lse.float().contiguous()
        if not none_unused(query, key, call):
            # In a backward each row is a factor of a sum over a whole tile: all four tensors have to be
            # finite.
            unused_queries, unused_keys = find_unused(query, key, call)
            options |= {"dq": _make_zeros(query), "dk": _make_zeros(key), "dv": _make_zeros(value)}
            query, grad_out = _blanked(unused_queries, options["dq"], query, grad_out)
            key, value = _blanked(unused_keys, options["dk"], key, value)
        tensors = {"dout": grad_out, "q": query, "k": key, "v": value, "out": out, "lse": lse}
        package_call = PackageCall("backward", self.run_backward, tensors | _further_tensors(call), options)
        return self._run(family, package_call, inputs, call)

    def _forward_in_ranges(
        self, family: Family, inputs: tuple[Tensor, ...], call: Call
    ) -> tuple[Tensor, Tensor]:
        """Run a forward with `key_ranges`, on the packed batch as one sequence. See `ranges`."""
        query, key, value = inputs
        visible_keys = visible.derived_of_packed(query, key, call)
        options = {"softmax_scale": call.scale, "num_splits": 1, "return_lse": True}
        options |= ranges.options("forward", visible_keys, (len(query), len(key)))
        if not none_unused(query, key, call):
            (value,) = _blanked(find_unused(query, key, call).keys, query.new_zeros(1), value)
        tensors = {"q": query[None], "k": key[None], "v": value[None]}
        package_call = PackageCall("forward", self.run_forward, tensors, options)
        out, lse = self._run(family, package_call, inputs, call)
        return out[0], lse[0]

    def _backward_in_ranges(
        self, family: Family, inputs: tuple[Tensor, ...], call: Call
    ) -> tuple[Tensor, ...]:
        """Run a backward with `key_ranges`, on the packed batch as one sequence."""
        grad_out, query, key, value, out, lse = inputs
        visible_keys = visible.derived_of_packed(query, key, call)
        options = {"softmax_scale": call.scale} | ranges.options(
            "backward", visible_keys, (len(query), len(key))
        )
        # Weights of queries that see no key are 0, and so is the product with a NaN only where that is gone.
        blind = visible_keys.blind[0]
        if call.grad_lse is not None:
            options["dlse"] = call.grad_lse.float().masked_fill(blind, 0.0)[None]
        query, grad_out = _blanked(blind, query.new_zeros(1), query, grad_out)
        if not none_unused(query, key, call):
            key, value = _blanked(find_unused(query, key, call).keys, key.new_zeros(1), key, value)
        tensors = {"dout": grad_out, "q": query, "k": key, "v": value, "out": out, "lse": lse}
        tensors = {name: x[None] for name, x in tensors.items()}
        package_call = PackageCall("backward", self.run_backward, tensors, options)
        return tuple(x[0] for x in self._run(family, package_call, inputs, call))

    def specialize(self, direction: Direction, tensors: tuple[Tensor, ...], call: Call) -> Launcher | None:
        """Return the launcher of a call's kind; None if the package has to run it. See `launchers`."""
        *grad_out, query, key, value = tensors[:-2] if direction == "backward" else tensors
        derived = None
        if direction == "forward" and compiled_kinds.counts_keys(query, key, value, call):
            # Any offsets will do: it counts whether there are any, and how they are laid out.
            call = call._replace(seqused_k=call.cu_seqlens_k)
            derived = derivation_for(query.device)
        family = compiled_kinds.family_of(direction, query, key, value, call, *grad_out, *tensors[4:5])
        launcher = self._launcher(family, tensors, call)
        return launcher if launcher is None or derived is None else replace(launcher, counts=derived)

    def _try_launch(
        self, family: Family, inputs: tuple[Tensor, ...], call: Call
    ) -> tuple[Tensor, ...] | None:
        """Launch a call by its arguments and return the results; None if that isn't possible."""
        launch = self._launcher(family, inputs, call)
        if launch is None:
            return None
        with _current(inputs[0].device):
            return launch(*_launch_arguments(inputs, call))

    def _launcher(self, family: Family, inputs: tuple[Tensor, ...], call: Call) -> FunctionLauncher | None:
        """Return what launches calls of a kind by their arguments; None if nothing may."""
        if not (self.tested_release and family.major == 9 and _is_plain(family, inputs, call)):
            return None
        of_lengths = family.class_of(*compiled_kinds.lengths_of(*inputs_of(inputs)[:2], call))
        if not self.trials.look(family, of_lengths):
            return None
        return self.trials.launcher(family, _arguments(self._options(family, call), call))

    def _run(
        self, family: Family, package_call: PackageCall, inputs: tuple[Tensor, ...], call: Call
    ) -> tuple[Tensor, ...]:
        """Call the package, one thread at a time, on the tensors' device; never compile in a CUDA graph."""
        query, key, _ = inputs_of(inputs)
        of_lengths = family.class_of(*compiled_kinds.lengths_of(query, key, call))
        new, capturing = (family, of_lengths) not in compiled_kinds.have_run, _capturing(query)
        if new and capturing:
            raise UnsupportedInputError(
                f"FA4 has to run this kind of {family.direction} once before it can be recorded in a CUDA "
                "graph"
            )
        tried, begun = not capturing and self._launcher(family, inputs, call) is not None, time.monotonic()
        try:
            with _compile_lock, _current(query.device), quiet() if new else _NOTHING:
                if tried:
                    arguments, launch_arguments = (
                        _arguments(package_call.options, call),
                        _launch_arguments(inputs, call),
                    )
                    results = self.trials.run(family, of_lengths, arguments, package_call, launch_arguments)
                else:
                    results = package_call()
        except Exception as error:
            if not new or isinstance(error, BackendUnavailableError):
                raise
            problem = f"{release()} has loaded, but its first {family.direction} of this kind failed"
            if is_of_device(error):
                error.add_note(problem)
                raise
            # Failed launches are errors of the device. This error comes from the package's compiler or its
            # checks.
            raise BackendUnavailableError(f"{problem}: {type(error).__name__}: {error}") from error
        if new:
            compiled_kinds.have_run.update(((family, of_lengths), (family.as_of_spec(), of_lengths)))
            seconds = time.monotonic() - begun
            if seconds > LONG:
                log.info("FA4 compiled a %s in %.1f s: %s", family.direction, seconds, family)
        return results

    def _options(self, family: Family, call: Call) -> dict[str, Any]:
        """Return the keywords of a function, without its tensors."""
        return _options(call) | softcap.options(family, call, own=self.tested_release)


def _options(call: Call) -> dict[str, Any]:
    """Return the keywords that both functions have."""
    left, right = call.window
    # The package takes a negative bound literally; only None is an open side.
    causal = left < 0 and right == 0
    return {
        "softmax_scale": call.scale,
        "causal": causal,
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 and not causal else None,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
    }


def _further_tensors(call: Call) -> dict[str, Tensor]:
    """Return the tensors of options, and the offsets, as far as a call has them, by the package's keywords.

    A launcher is given them in this order.
    """
    options = {SINKS: call.sinks, "seqused_k": call.seqused_k, "page_table": call.block_table}
    tensors = options | {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    return {name: x for name, x in tensors.items() if x is not None}


def _with_dense_integers(call: Call) -> Call:
    """Return a call whose integer tensors have a last stride of 1, as the package asserts for any size."""
    copies = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
        if (tensor := getattr(call, name)) is not None and tensor.stride(-1) != 1
    }
    return call._replace(**copies) if copies else call


def _unlike_a_tile(tile: int, *tensors: Tensor) -> list[Tensor]:
    """Return tensors (T, H, D), or copies with a further row, as a page of a tile's size is loaded whole."""
    return [torch.cat((x, x[:1])) if len(x) == tile else x for x in tensors]


def _is_plain(family: Family, inputs: tuple[Tensor, ...], call: Call) -> bool:
    """Whether the package would run a call without copies, and `launches` lists its launches."""
    options = (
        call.attn_bias, call.alibi_slopes, call.grad_lse, call.key_ranges, call.score_mod, call.mask_mod
    )  # fmt: skip
    if any(x is not None for x in options) or call.dropout:
        return False
    counts_keys, has_pages = call.seqused_k is not None, call.block_table is not None
    if (counts_keys or has_pages) and not _reads_plain_pages(family, call):
        return False
    offsets = [x for x in (call.cu_seqlens_q, call.cu_seqlens_k) if x is not None]
    if len(offsets) == 1 and not has_pages:
        return False
    # The LSE of a backward, the tensors of options, and offsets.
    further = [*inputs[5:], *_further_tensors(call).values()]
    # Compiled functions depend on repeated dimensions. A packed call may run on a copy without repeated
    # dimensions.
    repeats = call.cu_seqlens_q is None
    return (
        all(aligned(x, repeats) for x in inputs[:5])
        and all(x.data_ptr() % 16 == 0 for x in further)
        and all(x.stride(0) == 1 for x in offsets)
    )


def _reads_plain_pages(family: Family, call: Call) -> bool:
    """Whether a forward reads its keys from pages, and the integers for that as they are."""
    used, table = call.seqused_k, call.block_table
    return (
        family.direction == "forward"
        and (family.as_pages or (table is not None and table.stride(-1) == 1 and table.dtype == torch.int32))
        and call.cu_seqlens_q is not None
        and used is not None
        and used.stride(0) == 1
        and call.sinks is None
    )


def _arguments(options: dict[str, Any], call: Call) -> LauncherArguments:
    """Return the arguments of compiled functions that the package's keywords determine."""
    left, right = options["window_size_left"], options["window_size_right"]
    return LauncherArguments(options["softmax_scale"], left, right, call.window)


def _launch_arguments(inputs: tuple[Tensor, ...], call: Call) -> list[Any]:
    """Return the arguments of a launcher. Every row of a call with sinks is known to see a key."""
    arguments: list[Any] = [*inputs, *_further_tensors(call).values()]
    if call.block_table is not None:
        arguments.append(None)  # pages have no offsets
    if call.cu_seqlens_q is not None:
        query, key, _ = inputs_of(inputs)
        known = call.sinks is not None or none_unused(query, key, call)
        arguments += call.max_q, call.max_k, known
    return arguments


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a device the current device, for which kernels are compiled and on which they are launched."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _NOTHING
    return torch.cuda.device(device)


def _blanked(rows: Tensor | None, zeros: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies with zeros in the marked rows; without `rows` the tensors themselves.

    `rows` is boolean, (T,) or (B, S); `zeros` is any tensor of the same dtype that begins with 0.
    """
    if rows is None:
        return tensors
    # A view of a filled tensor, because a Python number would cost a further launch.
    rows, zero = rows[..., None, None], zeros.as_strided((), ())
    return tuple(torch.where(rows, zero, tensor) for tensor in tensors)


def _make_zeros(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(tensor.shape)
