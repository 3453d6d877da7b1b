"""What really ran: calls per backend and direction, fallbacks with their reasons, and failures.

The hot path has its counters and adds to them under one lock; names are looked up only when a
decision is made.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from torch import Tensor

from attnreg.core.contract.capabilities import one_line
from attnreg.core.contract.spec import Direction
from attnreg.core.registry.entry import SET_ASIDE
from attnreg.core.selection.decision import Decision
from attnreg.core.selection.render import fallback_line
from attnreg.core.torchlib import building, captured
from attnreg.core.torchlib.call_sites import call_site
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.locks import open_after_fork
from attnreg.errors import InvalidInputError

__all__ = ["Bypass", "Failure", "Fallback", "MaskSeen", "Stats", "reset_stats", "stats"]

# Reasons may contain numbers that change with every call, and classes of errors may be made at run time; a
# long run mustn't grow a row for each.
MOST_ROWS = 1000

# How much of an error's text is kept.
MOST_CHARACTERS = 300

# The shapes of some tensors. A size that isn't known while a graph is traced is a name.
Shapes = tuple[tuple[int | str, ...], ...]

log = logging.getLogger("attnreg")

_lock = open_after_fork(threading.RLock())
_calls: dict[tuple[str, Direction], Counter] = {}
_fallbacks: dict[tuple[str, str], Counter] = {}
_bypassed: dict[tuple[str, str, str], tuple[Counter, Shapes, str]] = {}
_masks: dict[str, Counter] = {}
_failures: dict[tuple[str, Direction, str], tuple[Counter, str]] = {}
_declined: dict[tuple[str, str], Direction] = {}
_elsewhere: list[Callable[[], list[tuple[Counter, int]]]] = []


class Counter:
    """A number that only `count` and `reset_stats` change.

    Attributes:
        level: the level of the log line about what is counted; 0 before there is one.
        call: the backend and the direction of a counter of calls; else None.
    """

    __slots__ = ("call", "level", "value")

    def __init__(self, call: tuple[str, Direction] | None = None) -> None:
        self.value = 0
        self.level = 0
        self.call = call


@dataclass(frozen=True, slots=True)
class Fallback:
    """A backend that was passed over, why, and how often."""

    backend: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a backend's kernels in one direction: its class, its first message, and its count."""

    backend: str
    direction: Direction
    error: str
    message: str
    count: int

    def __str__(self) -> str:
        times = f"{self.count} times" if self.count > 1 else "once"
        return f"failed {times} in a {self.direction} of this process: {self.error}: {self.message}"


@dataclass(frozen=True, slots=True)
class Bypass:
    """Calls that passed attnreg by, as kernels without a router ran them.

    Attributes:
        kernel: what ran them.
        reason: why.
        count: how many; a call in a compiled graph counts once, when the graph is made.
        op: the op or the function of torch's that they ended in.
        shapes: the shapes of query, key and value of the first.
        site: where in the program the first was made, as "file:line".
    """

    kernel: str
    reason: str
    count: int
    op: str = ""
    shapes: Shapes = ()
    site: str = ""


@dataclass(frozen=True, slots=True)
class MaskSeen:
    """What boolean masks were recognised as, or why they weren't, and of how many calls."""

    seen: str
    count: int


@dataclass(frozen=True)
class Stats:
    """A copy of the counters.

    Attributes:
        calls: backend name to `{"forward": n, "backward": n}`, kernels that really ran. Where nothing asks
            for a backend, and calls are recorded or timed, torch's kernel has its name of `bypassed`.
        fallbacks: backends that would have come first but couldn't run a call, with the reason. Beyond a
            thousand rows a last row, of the backend "*", counts the rest.
        failures: errors of kernels, also if another backend then ran the call. Beyond a thousand rows as for
            `fallbacks`.
        bypassed: calls that passed attnreg by, with kernel, reason, op, shapes and place in the program. They
            are counted as soon as anything asks for a backend; docs/passed-by.md says which can't be seen.
        masks: what boolean masks of its calls were recognised as, with `masks = "recognise"`.
        overridden: sentences about other code that lies above attnreg's routers now. Calls of the ops that it
            overrides aren't counted.
        slow_paths: a sentence for each compiled library that these calls ran without, with what that costs.
    """

    calls: dict[str, dict[str, int]]
    fallbacks: tuple[Fallback, ...]
    failures: tuple[Failure, ...] = ()
    bypassed: tuple[Bypass, ...] = ()
    masks: tuple[MaskSeen, ...] = ()
    overridden: tuple[str, ...] = ()
    slow_paths: tuple[str, ...] = field(default=(), compare=False)  # it depends on the machine

    def to_dict(self) -> dict[str, object]:
        """Return the same as plain data, for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }


def call_counter(backend: str, direction: Direction) -> Counter:
    """Return the counter of a backend's calls in one direction."""
    with _lock:
        return _calls.setdefault((backend, direction), Counter((backend, direction)))


def fallback_counter(backend: str, reason: str) -> Counter:
    """Return the counter of one fallback."""
    with _lock:
        full = len(_fallbacks) >= MOST_ROWS and (backend, reason) not in _fallbacks
        return _fallbacks.setdefault(("*", "(further reasons)") if full else (backend, reason), Counter())


def bypassed(
    op: str, kernel: str, reason: str, tensors: Iterable[Tensor], find_site: Callable[[], str] = call_site
) -> Counter:
    """Count a call that went to a kernel of torch's own that isn't routed; return its counter.

    `tensors` are its query, key and value, of any shapes and dtypes. `find_site` is called for the first call
    of its kind only.
    """
    place = op, kernel, reason
    with _lock:
        if place not in _bypassed and len(_bypassed) >= MOST_ROWS:
            place = "*", "*", "(further reasons)"
        counter, *_ = _bypassed.get(place, (Counter(),))
        if not counter.value:  # the first, also the first after `reset_stats`
            _bypassed[place] = counter, tuple(map(_shape_of, tensors)), find_site()
        counter.value += 1
    return counter


def _shape_of(x: Tensor) -> tuple[int | str, ...]:
    """Return the shape of a tensor, without reading symbolic sizes: that would add guards to their graph."""
    try:
        return tuple(size if type(size) is int else str(size) for size in x.shape)
    except RuntimeError:  # a nested tensor of torch's C++ has no shape
        return ("nested",)


def mask_seen(structure: str) -> None:
    """Count a call with a boolean mask, where masks are recognised."""
    with _lock:
        _masks.setdefault(structure, Counter()).value += 1


def failed(call: Counter, error: BaseException, level: int = logging.WARNING) -> None:
    """Count an error of the kernel whose calls a counter counts; logs the first of each class."""
    # Wrong arguments are no fault of the kernel that finds them, nor is Ctrl-C.
    if call.call is None or isinstance(error, InvalidInputError) or not isinstance(error, Exception):
        return
    name, message = type(error).__name__, "its text can't be read"
    with contextlib.suppress(Exception):
        message = one_line([str(error)])[:MOST_CHARACTERS] or "no message"
    if isinstance(error, RecursionError):
        message += "; if the kernel calls PyTorch's attention, that call is sent to it again"
    row = (*call.call, name)
    with _lock:
        if len(_failures) >= MOST_ROWS and row not in _failures:
            row = ("*", call.call[1], "(further errors)")
        counter, message = _failures.setdefault(row, (Counter(), message))
        counter.value += 1
    if not_yet_logged(counter, level):
        text = "%s failed in a %s: %s: %s (said once; attnreg.stats() counts all failures)"
        log.log(level, text, *call.call, name, message)


def declined(call: Counter, reason: str) -> None:
    """Remember that the kernel whose calls a counter counts has declined one, for `declined_in`."""
    if call.call is not None and len(_declined) < MOST_ROWS:
        _declined[call.call[0], reason] = call.call[1]


def declined_in(row: Fallback) -> Direction | None:
    """Return the direction whose kernel gave a fallback's reason; None if the backend's limits did."""
    return _declined.get((row.backend, row.reason))


def not_yet_logged(counter: Counter, level: int) -> bool:
    """Whether to log what is counted: once, and again if it gets more severe. It counts as logged then."""
    with _lock:
        before, counter.level = counter.level, max(counter.level, level)
        return level > before


def for_decision(decision: Decision) -> tuple[tuple[Counter, ...], Callable[[], None]]:
    """Return the counters of a decision's call and fallbacks, and what logs each fallback, once."""
    name = decision.backend or ""
    of_decision = [call_counter(name, decision.direction)]
    fallbacks = []
    for passed in decision.passed_over:
        reason = "; ".join(decision.rejected[passed])
        broken = reason.startswith(SET_ASIDE)
        level = logging.WARNING if broken or passed in decision.asked_for else logging.INFO
        of_decision.append(fallback_counter(passed, reason))
        fallbacks.append((of_decision[-1], level, fallback_line(passed, reason, name)))

    def log_fallbacks() -> None:
        for counter, level, line in fallbacks:
            if not_yet_logged(counter, level):
                log.log(level, "%s", line)

    return tuple(of_decision), log_fallbacks


def count(counters: tuple[Counter, ...]) -> None:
    """Add one to each."""
    with _lock:
        for counter in counters:
            counter.value += 1


def count_also(drain: Callable[[], list[tuple[Counter, int]]]) -> None:
    """Count calls that don't come to `count` as well: `drain` returns those since it was last called."""
    _elsewhere.append(drain)


def collect() -> None:
    """Add what was counted elsewhere, before counters are read."""
    counted = [row for drain in _elsewhere for row in drain()]
    with _lock:
        for counter, times in counted:
            counter.value += times


def call_counts() -> dict[str, dict[str, int]]:
    """Return the `calls` of `stats`, which also looks for overrides: how often each backend ran."""
    collect()
    with _lock:
        return _call_counts()


def _call_counts() -> dict[str, dict[str, int]]:
    calls: dict[str, dict[str, int]] = {}
    for (backend, direction), counter in _calls.items():
        if counter.value:
            calls.setdefault(backend, {"forward": 0, "backward": 0})[direction] = counter.value
    return calls


def stats() -> Stats:
    """Return what ran since the start or the last `reset_stats`."""
    collect()
    with _lock:
        calls = _call_counts()
        rows = (Fallback(backend, reason, c.value) for (backend, reason), c in _fallbacks.items() if c.value)
        failures = (Failure(*of, text, c.value) for of, (c, text) in _failures.items() if c.value)
        passed = (
            Bypass(kernel, reason, counter.value, op, shapes, site)
            for (op, kernel, reason), (counter, shapes, site) in _bypassed.items()
            if counter.value
        )
        masks = (MaskSeen(structure, c.value) for structure, c in _masks.items() if c.value)
        rest = tuple(rows), tuple(failures), tuple(passed), tuple(masks)
    return Stats(calls, *rest, captured.shadow_notes(), _slow_paths(calls))


def _slow_paths(calls: dict[str, dict[str, int]]) -> tuple[str, ...]:
    """Return what the counted calls cost without the compiled libraries that this process hasn't loaded."""
    return tuple(
        building.slow_path(library)
        for library in building.LIBRARIES
        if (library.backend in calls if library.backend else calls) and not building.is_loaded(library)
    )


def reset_stats() -> None:
    """Set every counter to zero."""
    collect()
    with _lock:
        failures = (counter for counter, _ in _failures.values())
        passed = (counter for counter, *_ in _bypassed.values())
        for several in (_calls.values(), _fallbacks.values(), failures, passed, _masks.values()):
            for counter in several:
                counter.value = 0


leave_module_uncompiled(__name__)
