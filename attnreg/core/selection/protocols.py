"""What decisions need of measured tables, of the policy "adaptive" and of lockfiles, all of rooms above."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from attnreg.core.contract.lengths import Cut
from attnreg.core.contract.spec import AttentionSpec, Device, Direction
from attnreg.core.selection.predictions import Prediction

T = TypeVar("T")


class Times(Protocol):
    """Measured times of backends."""

    def predict(
        self, spec: AttentionSpec, direction: Direction, builders: frozenset[str] = frozenset()
    ) -> Prediction | None:
        """Return the predicted times of one direction of a call; None where nothing of its kind was measured.

        `builders` are names in lower case of backends whose first call of each shape counts in full.
        """

    def cuts(self, device: Device) -> tuple[Cut, ...]:
        """Return the lengths at which a kind of calls may begin to have a prediction, or end to have one."""


class Tables(Times, Protocol):
    """The measured tables that settings name, and the tables that ship with attnreg."""

    def notes(self, device: Device) -> tuple[str, ...]:
        """Return sentences about the table in force on a device, and why others aren't."""

    def identity(self, device: Device) -> tuple[str, str]:
        """Return a digest of the table in force on a device, and its name or why there is none."""

    def gap(self, spec: AttentionSpec, direction: Direction) -> str:
        """Return the sentence that the table in force has no call of such a kind; empty if it has."""


class Turn(Protocol):
    """One call that a backend runs to be timed; a turn without a `backend` times nothing."""

    backend: str
    source: str

    def timed(self, run: Callable[[], T], tensor: Any) -> T:
        """Return the result of `run`, and record its time."""

    def give_up(self, reason: str) -> None:
        """Let the backend have no further turns."""


class Adaptive(Times, Protocol):
    """The policy under which backends take turns at the first calls of a kind."""

    def begin(self, spec: AttentionSpec, direction: Direction) -> None:
        """Collect the times of earlier turns, before a call is decided about."""

    def turn(
        self,
        spec: AttentionSpec,
        direction: Direction,
        able: Sequence[str],
        predicted: Prediction | None,
        left_out: frozenset[str] = frozenset(),
    ) -> Turn | None:
        """Return the turn that a call is; None if it is none.

        `left_out` are names in lower case of backends that get no turns.
        """

    def notes(self, spec: AttentionSpec, direction: Direction) -> Iterator[str]:
        """Yield how many turns of such calls each backend has had."""


class Row(Protocol):
    """The locked decision of one direction of a call."""

    @property
    def backend(self) -> str:
        """The name of the locked backend."""

    def beginning(self, name: str) -> str:
        """Return the beginning of an error about the row; `name` is the row's."""


class Lock(Protocol):
    """A lockfile in force."""

    @property
    def digest(self) -> str:
        """A hash of its contents."""

    def problem(self, device: Device) -> str:
        """Return why it refuses all calls of a device; empty if it doesn't."""

    def cuts(self, spec: AttentionSpec, direction: Direction) -> tuple[Cut, ...] | None:
        """Return where the rows for calls of a spec's kind change with lengths.

        None if some are for exact lengths, and if there are none.
        """

    def expected(self, spec: AttentionSpec, direction: Direction) -> tuple[Row, str]:
        """Return the row of one direction of a call, and the row's name for messages.

        Raises:
            UnsupportedInputError: there is no row, or it was locked in another environment.
        """
