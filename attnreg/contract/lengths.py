"""A stand-in for the module of this name that comes with the rest of this change; replace it by that."""

from __future__ import annotations

from typing import NamedTuple, Self

from attnreg.contract.spec import AttentionSpec


class Cut(NamedTuple):
    """Where a decision may change: where a sum of products of lengths reaches a number."""

    terms: tuple[tuple[int, tuple[str, ...]], ...]
    at: int

    @classmethod
    def of(cls, *lengths: str, at: int) -> Self:
        """Return the cut where the product of some lengths reaches `at`."""
        return cls(((1, lengths),), at)


def cut_of_decoding(spec: AttentionSpec) -> int:
    """Return the longest query from which on a call of a spec's kind doesn't decode: see `decodes`."""
    return -(-1024 * spec.heads_k // max(spec.heads_q, 1))
