"""Stand-in for the module of the same name on the main branch: cuts of lengths."""

from __future__ import annotations

from typing import NamedTuple, Self


class Cut(NamedTuple):
    """Where a decision may change: where a sum of products of lengths reaches a number."""

    terms: tuple[tuple[int, tuple[str, ...]], ...]
    at: int

    @classmethod
    def of(cls, *lengths: str, at: int) -> Self:
        """Return the cut where the product of some lengths reaches `at`."""
        return cls(((1, lengths),), at)

    @classmethod
    def beyond(cls, length: str, other: str, at: int = 1) -> Self:
        """Return the cut where one length is larger than another by `at`."""
        return cls(((1, (length,)), (-1, (other,))), at)
