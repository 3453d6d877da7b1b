"""What `verify` found out about each backend: who is held to the cases, and the outcomes in sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg import _registry
from attnreg.cli.output import finite
from attnreg.errors import BackendUnavailableError
from attnreg.measure import verify
from attnreg.selection import policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from attnreg.contract.discovery import Entry
    from attnreg.measure import Case, Error, Outcome

__all__ = ["TENSORS", "Verdict", "Worst", "candidates", "state"]

TENSORS = ("out", "lse", "dq", "dk", "dv")


class Worst(NamedTuple):
    """The largest error over that of plain PyTorch, where that has one, and where it was."""

    ratio: float
    tensor: str
    case: str


@dataclass(slots=True)
class Verdict:
    """One backend, and what became of its cases so far.

    Attributes:
        entry: the backend.
        reason: why it isn't held to any case; empty if it is.
        outcomes: one for each case, the refused ones included.
    """

    entry: Entry
    reason: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, device: torch.device, cases: Iterable[Case]) -> Iterator[Outcome]:
        """Hold the backend to the cases, one at a step; keeps what was found if that is broken off."""
        if self.entry.backend is not None and not self.reason:
            for outcome in verify(self.entry.backend, device, cases):
                self.outcomes.append(outcome)
                yield outcome

    def count(self, wanted: str) -> int:
        """Return how many cases are "right", "WRONG" or "skipped"."""
        return sum(state(outcome) == wanted for outcome in self.outcomes)

    @property
    def worst(self) -> Worst | None:
        """The worst error, or None where nothing was measured."""
        found = (
            Worst(error.ratio, tensor, str(outcome.case))
            for outcome in self.outcomes
            for tensor, error in outcome.errors.items()
            if error.math or not error.passed
        )
        return max(found, key=lambda worst: worst.ratio, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data, for JSON."""
        worst = self.worst
        return {
            "name": self.entry.name,
            "version": self.entry.version(),
            "reason": self.reason,
            "right": self.count("right"),
            "wrong": self.count("WRONG"),
            "skipped": self.count("skipped"),
            "worst": None if worst is None else {**worst._asdict(), "ratio": finite(worst.ratio)},
            "rows": [_row(outcome) for outcome in self.outcomes],
        }


def state(outcome: Outcome) -> str:
    """Return "right", "WRONG", or "skipped" for what the backend says that it can't run."""
    if not outcome.errors and not outcome.failure:
        return "skipped"
    return "right" if outcome.passed else "WRONG"


def candidates(asked: tuple[str, ...], device: torch.device, files: bool = True) -> list[Verdict]:
    """Return the backends asked for, else all, each with why it can't be held to anything here.

    Without `files`, the table and the lockfile that settings name needn't be there: one may be about to
    be made.

    Raises:
        UnknownBackendError: no backend has one of the names.
        ConfigError: the environment or a settings file can't be read.
    """
    named = dict.fromkeys(_registry.find(name) for name in asked)
    disabled = policy.current().disabled if files else policy.disabled_backends()
    return [
        Verdict(entry, _against(entry, device, disabled.get(entry.name.casefold(), "")))
        for entry in named or _registry.entries().values()
    ]


def _against(entry: Entry, device: torch.device, disabled_by: str) -> str:
    if disabled_by:
        return f"disabled by {disabled_by}"
    if entry.backend is not None and device.type not in entry.backend.devices:
        return f"serves {', '.join(entry.backend.devices)}"
    try:
        entry.kernels()
    except BackendUnavailableError:
        return entry.unavailable()
    return ""


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "case": outcome.case.name,
        "dtype": outcome.case.dtype,
        "state": state(outcome).lower(),
        "reasons": list(outcome.reasons),
        "failure": outcome.failure,
        "errors": {tensor: _numbers(error) for tensor, error in outcome.errors.items()},
    }


def _numbers(error: Error) -> dict[str, Any]:
    named = {"error": error.kernel, "math": error.math, "allowed": error.allowed, "ratio": error.ratio}
    return {"passed": error.passed, **{name: finite(number) for name, number in named.items()}}
