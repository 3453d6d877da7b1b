"""Rules backends out of a measurement: those with wrong results or an exception."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnreg.core.adaptation.sinks import grad_of_sinks, rescaled
from attnreg.core.contract.backend import Kernels
from attnreg.core.contract.spec import AttentionSpec, Direction
from attnreg.core.registry.entry import Entry
from attnreg.core.times.kinds import kind_of
from attnreg.core.times.points import Measured
from attnreg.errors import AttnregError
from attnreg.tools.measure import Case, Error, measure_taken
from attnreg.tools.measure.sample import Verdict
from attnreg.tools.tuning.workload import small_cases

TENSORS: dict[Direction, tuple[str, ...]] = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


def reasons(entry: Entry, spec: AttentionSpec, direction: Direction) -> tuple[str, ...]:
    """Return every reason against a backend for a call. Sinks are no reason: results can be rescaled."""
    return entry.reasons(replace(spec, sinks=False), direction)


def kernels_for(entry: Entry, spec: AttentionSpec, case: Case) -> Kernels:
    """Return a backend's kernels for a call like a case, as `varlen_attn` runs them.

    If the case has sinks, the kernels take them. Results of kernels that don't count sinks are rescaled.
    """
    kernels = entry.kernels(spec)
    forward, backward = kernels.forward, kernels.backward
    if not case.counts_sinks:
        return kernels
    if not (case.every_row_sees_a_key and entry.counts_sinks(spec, "forward")):
        forward = with_rescaling(forward, "forward")
    if backward and not (case.every_row_sees_a_key and entry.counts_sinks(spec, "backward")):
        backward = with_rescaling(backward, "backward")
    return Kernels(forward, backward)


def with_rescaling(kernel: Callable[..., Any], direction: Direction) -> Callable[..., Any]:
    """Return a kernel for calls with sinks, from one of that direction for calls without."""

    def forward(query: Tensor, key: Tensor, value: Tensor, call: Any) -> tuple[Tensor, ...]:
        out, lse = kernel(query, key, value, call._replace(sinks=None))
        return rescaled(out, lse, call.sinks, call.batch_invariant)

    def backward(grad_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *tensors, call = rest
        grads = kernel(grad_out, *tensors, call._replace(sinks=None))
        return (*grads, grad_of_sinks(grad_out, tensors[3:], call.sinks, call.grad_lse))

    return forward if direction == "forward" else backward


class Checks:
    """Checks each backend once for each kind of call, at small sizes, and caches the verdicts.

    Attributes:
        first_calls: seconds of the first call of a backend, by its name, the call and the direction.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first_calls: dict[tuple[str, AttentionSpec, Direction], float] = {}
        self._found: dict[tuple[object, ...], dict[Direction, Verdict] | Exception] = {}

    def of(self, entry: Entry, spec: AttentionSpec, direction: Direction) -> Verdict:
        """Return the verdict for a direction of the call's kind. The first time, checks both directions.

        If the backend raised an exception, raises it every time.
        """
        cases = small_cases(spec)
        kinds = kind_of(spec, "forward"), kind_of(spec, "backward")
        key = (entry.name, *kinds, cases[0].lens_q, cases[0].lens_k)
        if key not in self._found:
            try:
                self._found[key] = self._checked(entry, spec, cases)
            except Exception as error:  # noqa: BLE001 - raised below, for every call of the kind
                self._found[key] = error
        verdicts = self._found[key]
        if isinstance(verdicts, Exception):
            raise verdicts.with_traceback(None)
        return verdicts.get(direction, Verdict(0.0, "its backward can't be checked"))

    def forget_failures(self) -> None:
        """Forget the exceptions of backends, so that these are checked again: memory may be free now."""
        self._found = {
            key: verdicts for key, verdicts in self._found.items() if not isinstance(verdicts, Exception)
        }

    def _checked(
        self, entry: Entry, spec: AttentionSpec, cases: tuple[Case, ...]
    ) -> dict[Direction, Verdict]:
        for case in cases:
            small = case.spec(spec.device)
            if reasons(entry, small, "forward"):
                continue
            kernels = kernels_for(entry, small, case)
            if reasons(entry, small, "backward"):
                kernels = Kernels(kernels.forward)
            errors, _ = measure_taken(kernels, case, self._device)
            if not errors:
                continue
            verdicts = {
                direction: _verdict({name: errors[name] for name in names}, case)
                for direction, names in TENSORS.items()
                if names[0] in errors
            }
            if wrong := verdicts["forward"].wrong:
                # Its backward may undo that error, and be wrong after any other backend's forward.
                verdicts["backward"] = Verdict(0.0, f"its forward is: {wrong}")
            return verdicts
        return {"forward": Verdict(0.0, "it can't be checked: it refuses small calls of this kind")}


def _verdict(errors: Mapping[str, Error], case: Case) -> Verdict:
    wrong = [f"{name} of {case.name}: {error}" for name, error in errors.items() if not error.passed]
    return Verdict(0.0 if wrong else max(error.share for error in errors.values()), "; ".join(wrong))


class DeviceLostError(AttnregError, RuntimeError):
    """A kernel has left the GPU unusable to this process."""


class TimeIsUpError(AttnregError, RuntimeError):
    """The time was up before every backend had been measured."""


def no_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def failed(error: BaseException, device: torch.device) -> Measured:
    """Return the row of a backend that raised; raises `DeviceLostError` if the GPU can't be used any more."""
    check_alive(device, error)
    return Measured(failed=_summary(error))


def check_alive(device: torch.device, error: BaseException) -> None:
    """Free a device's cached memory after a backend has raised; raises `DeviceLostError` if it is lost."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise DeviceLostError(f"the GPU can't be used any more after {_summary(error)}") from lost
    with suppress(Exception):
        torch.cuda.empty_cache()


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
