"""Checks of the contract besides accuracy: form, memory, repeatability, dropout, launchers."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from attnreg.core.contract.backend import Call, Kernels
from attnreg.core.contract.spec import Direction
from attnreg.core.launching.launchers import AddressLauncher, Launcher, takes_options
from attnreg.core.launching.validation import checked_against_contract
from attnreg.errors import RegistrationError
from attnreg.tools.measure.cases import Case
from attnreg.tools.measure.inputs import Guarded, Inputs
from attnreg.tools.measure.places import first_difference
from attnreg.tools.measure.reference import Results, kept_weights, names_of


def checked(kernels: Kernels) -> Kernels:
    """Return kernels that check the form of their results, and raise `RegistrationError` if it is wrong."""
    forward = _checked(kernels.forward, "forward")
    backward = None if kernels.backward is None else _checked(kernels.backward, "backward")
    return kernels._replace(forward=forward, backward=backward)


def _checked(run: Callable[..., Any], direction: Direction) -> Callable[..., Any]:
    return checked_against_contract(run, direction, "the kernel", lambda: None)


def run_both(kernels: Kernels, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return output and LSE, and the gradients if there is a backward. Unwritten elements are NaN."""
    with _uninitialized_is_nan():
        return _results(kernels, inputs)


def results(kernels: Kernels, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the same as in a program: in torch's deterministic mode if the call is deterministic."""
    if not inputs.call.deterministic:
        return _results(kernels, inputs)
    # Aten's flash op reads the mode, but not a mode that only warns. In that mode torch refuses matrix
    # products on a GPU unless this variable is set.
    variable = "CUBLAS_WORKSPACE_CONFIG"
    unset = variable not in os.environ
    os.environ.setdefault(variable, ":4096:8")
    try:
        with _deterministic_mode("error", filled=False):
            return _results(kernels, inputs)
    finally:
        if unset:
            del os.environ[variable]


@torch.no_grad()
def _results(kernels: Kernels, inputs: Inputs) -> tuple[Tensor, ...]:
    q, k, v, grad_out, call = inputs
    out, lse = kernels.forward(q, k, v, call.of("forward"))
    if kernels.backward is None:
        return out, lse
    return out, lse, *kernels.backward(grad_out, q, k, v, out, lse, call.of("backward"))


@contextmanager
def _uninitialized_is_nan() -> Iterator[None]:
    """Make torch.empty return NaN, so that an element that a kernel doesn't write shows."""
    # Torch fills memory only in a deterministic mode. "warn" is the mode that refuses no operation.
    with _deterministic_mode(torch.get_deterministic_debug_mode() or "warn", filled=True):
        yield


@contextmanager
def _deterministic_mode(wanted: int | str, filled: bool) -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    mode, before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(wanted)
    settings.fill_uninitialized_memory = filled
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = before


def check_memory(guarded: Guarded, results: list[tuple[Tensor, ...]]) -> None:
    """Check that nothing was written to the inputs or around them, and that the results are new tensors.

    `results` are the results of several calls, in the contract's shapes. Raises `RegistrationError` if a
    kernel has written to an input or around it, or if a result lies in an input's memory.
    """
    if where := guarded.written():
        raise RegistrationError(f"the kernel has written to its inputs or around them: {where}")
    names = names_of(guarded.inputs.call)
    named = [pair for several in results for pair in zip(names, several, strict=False)]
    if shared := {name for name, result in named if guarded.holds(result)}:
        raise RegistrationError(f"{', '.join(sorted(shared))}: got memory of an input, expected new tensors")


def check_new(kernels: Kernels, inputs: Inputs) -> None:
    """Check that a call writes to no result of an earlier call of its kind, which may still be in use.

    Raises `RegistrationError` if a result lies in the memory of an earlier result.
    """
    earlier, later = run_both(kernels, inputs), run_both(kernels, inputs)
    kept = {x.untyped_storage().data_ptr() for x in earlier if x.numel()}
    named = zip(names_of(inputs.call), later, strict=False)
    if shared := {name for name, x in named if x.numel() and x.untyped_storage().data_ptr() in kept}:
        raise RegistrationError(
            f"{', '.join(sorted(shared))}: got memory of an earlier call's result, expected new tensors"
        )


def check_seen_nan(kernels: Kernels, case: Case, inputs: Inputs) -> None:
    """Check that a NaN in a query, or in a key or value that it sees, is a NaN in its output and gradient.

    The LSE isn't checked, because kernels may return +inf. Neither are gradients of other keys. Raises
    `RegistrationError` if a row that sees the NaN has numbers.
    """
    for field, tensor in zip(("query", "key", "value"), inputs[:3], strict=True):
        changed = tensor.clone()
        (changed if case.varlen else changed[0])[0] = torch.nan
        replaced: dict[str, Any] = {field[0]: changed}
        returned = run_both(kernels, inputs._replace(**replaced))
        named = dict(zip(Results._fields, returned, strict=False))
        count = 1 if field == "query" else case.lens_q[0]
        for name in ("out", "dq")[: 1 + ("dq" in named)]:
            rows = named[name] if case.varlen else named[name][0]
            if not (is_nan := rows[:count].isnan()).all():
                row, head, dim = (~is_nan).nonzero()[0].tolist()
                raise RegistrationError(
                    f"{name}: got numbers for a NaN in the {field}, expected NaN: in sequence 0 first at row "
                    f"{row}, head {head}, dim {dim}; {int((~is_nan).sum()):,} of {is_nan.numel():,} elements"
                )


def check_repeatable(kernels: Kernels, inputs: Inputs) -> None:
    """Check that a call with `deterministic` has the same bits each time; else raises `RegistrationError`."""
    first, *others = (results(kernels, inputs) for _ in range(3))
    names = names_of(inputs.call)
    pairs = [pair for other in others for pair in zip(names, first, other, strict=False)]
    if differing := {name: first_difference(name, y, x) for name, x, y in pairs if not torch.equal(x, y)}:
        raise RegistrationError(
            f"{', '.join(sorted(differing))}: got other bits for the same deterministic call; "
            f"{next(filter(None, differing.values()), 'NaN in all of them')}"
        )


def check_dropout(kernels: Kernels, case: Case, inputs: Inputs) -> None:
    """Check how many weights are dropped, and that another random state drops others.

    Raises `RegistrationError` if either is wrong.
    """
    q, k, v, _, call = inputs
    if call.rng_state is None:
        return
    other = call._replace(rng_state=(call.rng_state.view(torch.int64) + 1).view(torch.uint64))
    with torch.no_grad():
        kept, others = (kept_weights(case, kernels.forward(q, k, v, drawn)[0]) for drawn in (call, other))
    count = case.heads[0] * sum(map(_seen, case.lens_q, case.lens_k, repeat(case.window)))
    dropped = 1.0 - float(kept.count_nonzero()) / count
    # Six standard deviations: of right kernels one in 500 million is beyond them.
    if abs(dropped - case.dropout) > 6.0 * math.sqrt(case.dropout * (1.0 - case.dropout) / count):
        raise RegistrationError(f"dropout: got {dropped:.3f} of the weights dropped, expected {case.dropout}")
    if torch.equal(kept, others):
        raise RegistrationError("dropout: got the same weights dropped with another rng_state")


def _seen(len_q: int, len_k: int, window: tuple[int, int]) -> int:
    """Return how many pairs of a query and a key a window leaves of a sequence."""
    left, right = (len_q + len_k if bound < 0 else bound for bound in window)
    ends = range(len_k - len_q, len_k)  # of each row the key in line with it
    return sum(max(0, min(end + right, len_k - 1) - max(end - left, 0) + 1) for end in ends)


def launched(
    specialize: Callable[..., Any],
    kernels: Kernels,
    inputs: Inputs,
    results: tuple[Tensor, ...],
    earlier: Inputs,
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the results of every launcher, or the kernel's own where it has none or its launcher declines.

    Launchers are specialized for `earlier`: a call of the same kind and class of lengths, with other values.
    Yields nothing if the call cache has different entries for the two calls, or if a row of `earlier` sees no
    key. `results` are the kernel's own results, in the contract's shapes. Raises `RegistrationError` if a
    launcher's results have another form.
    """
    *tensors, grad_out, call = inputs
    *before, grad_before, call_before = earlier
    out_before, lse_before, *_ = run_both(kernels, earlier)
    has_same_layouts = [*map(_layout_class, earlier[:4])] == [*map(_layout_class, inputs[:4])]
    if not has_same_layouts or not lse_before.isfinite().all():
        return

    def launches(
        direction: Direction, first_inputs: list[Tensor], arguments: list[Tensor], own: Any
    ) -> list[Any]:
        with torch.no_grad(), _uninitialized_is_nan():
            launcher = specialize(direction, tuple(first_inputs), call_before)
            launcher = launcher if takes_options(launcher, call_before) else None
            # As a function, and as the compiled call cache calls it.
            ways: list[Any] = [launcher]
            if isinstance(launcher, AddressLauncher):
                ways.append(launcher.on_addresses)
            return [own if run is None else _launch(run, direction, arguments, call, own) for run in ways]

    for forward in launches("forward", before, tensors, results[:2]):
        first_inputs, wanted = [grad_before, *before, out_before, lse_before], [grad_out, *tensors, *forward]
        for backward in launches("backward", first_inputs, wanted, results[2:]) if kernels.backward else [()]:
            yield *forward, *backward


def _layout_class(x: Tensor) -> tuple[object, ...]:
    """Return what a launcher may rely on about a tensor's memory: see `launching.launchers`."""

    def stride_class(stride: int) -> int:
        return stride if stride < 2 else 2 if stride * x.itemsize % 16 == 0 else 3

    return x.data_ptr() % 16 == 0, x.is_contiguous(), *map(stride_class, x.stride())


def _launch(run: Launcher, direction: Direction, arguments: list[Tensor], call: Call, own: Any) -> Any:
    """Return a launcher's results, checked like a kernel's; `own` if the launcher declines."""
    further: tuple[Any, ...] = ()
    if call.varlen:
        further = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, False
    options = [call.seqused_k, call.block_table] if direction == "forward" else []
    further = *(x for x in (*options, call.sinks) if x is not None), *further
    return _checked(lambda *_: run(*arguments, *further) or own, direction)(*arguments, call)
