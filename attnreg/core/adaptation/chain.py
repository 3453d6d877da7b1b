"""The list of adaptations, and which of them apply to a call and the limits of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from attnreg.core.adaptation.lse_columns import LseColumns
from attnreg.core.adaptation.padded_dims import PaddedDims
from attnreg.core.contract.capabilities import Capabilities
from attnreg.core.contract.spec import AttentionSpec, Direction


class Adaptation(Protocol):
    """A way to run a call on a kernel whose limits refuse the call as it comes."""

    def applies(self, spec: AttentionSpec, direction: Direction, limits: Capabilities) -> bool:
        """Whether the kernel is given an adapted call; false where its limits take the call as it is."""

    def adapted(self, spec: AttentionSpec) -> AttentionSpec:
        """Return the spec of the call that the kernel is given."""

    def plain(self, spec: AttentionSpec) -> AttentionSpec | None:
        """Return the spec without what is adapted: a reason against it has nothing to do with the adaptation.

        None if no call is without it.
        """

    def in_reason(self, spec: AttentionSpec) -> str:
        """Return the words before a reason against the adapted call."""

    def described(self, spec: AttentionSpec) -> str:
        """Return what `explain` says of an adapted call."""

    def wrap(self, kernel: Callable[..., Any], direction: Direction) -> Callable[..., Any]:
        """Return a kernel for the call as it comes, from the kernel for the adapted call."""


# The outermost first: head dims are padded before columns are added to them.
ADAPTATIONS: tuple[Adaptation, ...] = (PaddedDims(), LseColumns())


def first_adaptation(spec: AttentionSpec, direction: Direction, limits: Capabilities) -> Adaptation | None:
    """Return the outermost adaptation that applies to a call; None if the kernel runs it as it is."""
    return next(
        (adaptation for adaptation in ADAPTATIONS if adaptation.applies(spec, direction, limits)), None
    )


def adaptations_of(
    spec: AttentionSpec, direction: Direction, limits: Capabilities
) -> list[tuple[Adaptation, AttentionSpec]]:
    """Return the adaptations that apply, the outermost first, each with the spec that it is applied to."""
    steps: list[tuple[Adaptation, AttentionSpec]] = []
    while (adaptation := first_adaptation(spec, direction, limits)) is not None:
        steps.append((adaptation, spec))
        spec = adaptation.adapted(spec)
    return steps
