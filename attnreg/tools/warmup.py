"""First calls made ahead of a program's own: `attnreg.warmup`, and what the command of that name runs.

A kernel is called as a plan calls it, but past the plans and counters, which are for the program's calls.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attnreg.core import registry
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.dispatch import planning, scope
from attnreg.core.dispatch.declined import with_reasons
from attnreg.core.dispatch.state import state
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Policy
from attnreg.core.selection.render import refuse
from attnreg.core.torchlib import building
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.isolation import raise_if_of_program
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.tools.measure.timing import timer_for
from attnreg.tools.tuning import representatives
from attnreg.tools.tuning.representatives import RepresentedKind

__all__ = ["FirstCall", "warmup"]

log = logging.getLogger("attnreg")

# A GPU takes less for a call of a few hundred tokens, unless something is compiled, built or loaded for it.
PREPARING_S = 0.03


class FirstCall(NamedTuple):
    """The result of a first call: a direction of a kind, on a backend.

    Attributes:
        kind: the call that was run for the kind, with its lengths.
        direction: `"forward"` or `"backward"`.
        backend: the backend that ran it, or was to; None if none can run it.
        seconds: what the call took, with loading and compiling; None if it didn't run.
        error: why it didn't run, or failed; None if it ran.
        refused: whether a backend's limits, or its kernel, say that it can't run such calls.
    """

    kind: AttentionSpec
    direction: Direction
    backend: str | None
    seconds: float | None = None
    error: str | None = None
    refused: bool = False

    @property
    def prepared(self) -> bool:
        """Whether a GPU's call took so long that a kernel was compiled, built or loaded for it."""
        return self.kind.device.type == "cuda" and (self.seconds or 0.0) >= PREPARING_S

    def __str__(self) -> str:
        name = self.backend or "no backend"
        if self.error is not None:
            return f"{name} didn't run the {self.direction} of {self.kind}: {self.error}"
        did = "compiled, built or loaded, and ran" if self.prepared else "ran"
        return f"{name} {did} the {self.direction} of {self.kind} in {self.seconds or 0.0:.2f} s"


def warmup(
    *kinds: AttentionSpec | Mapping[str, Any],
    backend: str | None = None,
    device: str | torch.device | None = None,
) -> list[FirstCall]:
    """Run each kind of call once, so that no later call of these kinds waits for a compiler.

        attnreg.warmup({"dtype": "bf16", "heads_q": 32, "heads_k": 8, "head_dim": 128, "varlen": True,
                        "window": (-1, 0), "needs_backward": True})

    What is compiled stays in this process. A backend that caches kernels on disk, as FA4 does, also writes
    them to its cache folder. cuDNN's execution plans last as long as the process. A dense plan runs only
    its exact shape. No counter and no recording includes the calls. Each is logged at level info.

    Args:
        kinds: an `AttentionSpec`, which is run with its own lengths; or a dict of its fields: `dtype`
            (str or torch.dtype), `heads_q` and `head_dim` (int), and any others. Without `heads_k` and
            `head_dim_v` it has those of the query. Without `max_q` and `max_k` they are chosen: the kind
            runs at a few hundred tokens, on each backend that runs it at some usual length. With
            `needs_backward` its backward is run as well.
        backend: the backend to run, in any case; by default the backends that would run such calls here.
        device: where to run: "cpu", "cuda", "cuda:1". Unless given, the kind's device, else the GPU if
            the machine has one.

    Returns:
        A result for each kind, direction and backend, in order. A kind that can't run has the
        reasons in the result's `error`; nothing is raised for it, and the other kinds run.

    Raises:
        UnknownBackendError: there is no such backend; lists the known ones and the nearest.
        BackendUnavailableError: it, or one that settings ask for, can't load here; says why.
        InvalidInputError: a field of a kind is unknown, missing or wrong, or the device isn't there.
            Nothing has run then.
        ConfigError: the environment or a settings file can't be read.
    """
    if not kinds:
        raise InvalidInputError("warmup: got no kind, expected at least one AttentionSpec or dict")
    wanted = [_kind(kind, device) for kind in kinds]
    entry = None if backend is None else registry.find(backend)
    if entry is not None:
        entry.kernels()  # raises if it can't load
    building.ensure_built()
    results = []
    for kind in wanted:
        for direction in kind.directions:
            for result in run_decided(kind, direction) if entry is None else [_run(kind, direction, entry)]:
                log.log(logging.INFO if result.error is None else logging.WARNING, "warmup: %s", result)
                results.append(result)
    return results


def run_decided(kind: RepresentedKind, direction: Direction) -> list[FirstCall]:
    """Run one direction of a kind on each backend that would run one of its calls now.

    A backend that doesn't run it after all makes way for the next, as it does in calls.
    """
    now, choice = state(), scope.current()
    policy = now.policy.with_first(None if choice is None else choice.preference)
    results: dict[str | None, FirstCall] = {}
    against: dict[str, str] = {}
    for call in kind.calls:
        while True:
            name = _decided(policy.applied_to(call), direction, policy, with_reasons(now.entries, against))
            if isinstance(name, UnsupportedInputError):
                results.setdefault(None, FirstCall(kind.spec, direction, None, None, str(name), refused=True))
                break
            if name not in results:
                entry = now.entries[name.casefold()]
                results[name] = run_once(policy.applied_to(kind.spec), direction, entry)
            if (error := results[name].error) is None:
                break
            against[name] = error
    return list(results.values())


def _run(kind: RepresentedKind, direction: Direction, entry: Entry) -> FirstCall:
    """Run one direction of a kind on the backend that the program names."""
    policy = state().policy
    disabled_by = policy.disabled.get(entry.name.casefold(), "")
    against = f"disabled by {disabled_by}" if disabled_by else ""
    return run_once(policy.applied_to(kind.spec), direction, entry, against)


def _decided(
    spec: AttentionSpec, direction: Direction, policy: Policy, entries: Mapping[str, Entry]
) -> str | UnsupportedInputError:
    """Return the backend that would run a call, or the error that such a call gets."""
    try:
        decision = planning.decide(spec, direction, entries, policy)
        return decision.backend if decision.backend is not None else refuse(spec, decision)
    except UnsupportedInputError as error:
        return error


def run_once(spec: AttentionSpec, direction: Direction, entry: Entry, against: str = "") -> FirstCall:
    """Run one direction of a call on a backend, unless its limits, or what is given, are against it."""
    # A call with sinks that a backend doesn't count runs without them, and is rescaled.
    if against := against or "; ".join(entry.reasons(spec.unscaled, direction)):
        return FirstCall(spec, direction, entry.name, None, against, refused=True)
    device = torch.device(spec.device.place)
    timer = timer_for(device)
    try:
        with (
            torch.no_grad(),
            torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(),
        ):
            calls = list(_calls(spec, direction, entry, device))
            timer.wait()
            started = time.perf_counter()
            for kernel_spec, arguments in calls:
                entry.kernel(direction, kernel_spec)(*arguments)
            timer.wait()
            took = time.perf_counter() - started
    except UnsupportedInputError as error:
        return FirstCall(spec, direction, entry.name, None, str(error), refused=True)
    except BaseException as error:  # noqa: BLE001 - the others are still run
        raise_if_of_program(error)
        return FirstCall(spec, direction, entry.name, None, f"{type(error).__name__}: {error}")
    return FirstCall(spec, direction, entry.name, took)


def _calls(
    spec: AttentionSpec, direction: Direction, entry: Entry, device: torch.device
) -> Iterator[tuple[AttentionSpec, tuple[Any, ...]]]:
    """Yield each call of a kernel that a program makes for such a call, and the kernel's arguments."""
    query, key, value, grad_out, call = representatives.tensors_of(spec, device)
    call = call.of(direction)
    arguments: tuple[Any, ...] = (query, key, value)
    if direction == "backward":
        heads, rows = spec.heads_q, query.shape[:-2]
        shape = (heads, *rows) if spec.varlen else (rows[0], heads, rows[1])
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.zeros(shape, dtype=dtype, device=device)
        arguments = (grad_out, *arguments, torch.zeros_like(grad_out), lse)
    # The first call of a plan is given no sinks, so both kernels run.
    yield spec.unscaled, (*arguments, call._replace(sinks=None))
    if call.sinks is not None and entry.counts_sinks(spec, direction):
        yield spec, (*arguments, call)


def _kind(described: AttentionSpec | Mapping[str, Any], device: str | torch.device | None) -> RepresentedKind:
    """Return the kind that a program describes, on a device of this machine."""
    if not isinstance(described, AttentionSpec | Mapping):
        raise InvalidInputError(f"kind: got {described!r}, expected an AttentionSpec or a dict of its fields")
    own = described.device if isinstance(described, AttentionSpec) else described.get("device")
    if isinstance(own, Device):
        own = own.arch if own.simulated else own.place
    place = planning.device_of(_present(own if device is None else device))
    if isinstance(described, AttentionSpec):
        kind = representatives.one_call(replace(described, device=place))
    else:
        kind = representatives.without_lengths(described, place)
    if not isinstance(getattr(torch, kind.spec.dtype, None), torch.dtype):
        raise InvalidInputError(f"kind: got dtype {kind.spec.dtype!r}, expected that of a tensor")
    return kind


def _present(named: object) -> torch.device:
    """Return a device of this machine; the GPU, else the CPU, for None."""
    gpus = torch.cuda.device_count()
    if named is None:
        named = "cuda" if gpus else "cpu"
    try:
        place: torch.device = torch.device(named)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        place = torch.device("meta")
    if place.type == "cuda" and gpus and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if place.type == "meta" or (place.type == "cuda" and place.index not in range(gpus)):
        raise InvalidInputError(
            f"device: got {str(named)!r}, expected one of this machine: cpu, cuda or cuda:N"
        )
    return place


leave_module_uncompiled(__name__)
