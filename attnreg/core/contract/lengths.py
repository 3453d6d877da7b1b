"""Lengths of a call, and the classes of lengths that decide alike.

A program has a dozen kinds of calls and ever new lengths. A decision depends on lengths only where a limit
lies. A `Cut` says where, as data: so a class of lengths is decided once, whatever lengths come later. A limit
that reads a length which no cut names has its calls decided one by one (`reads_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple, Self

from attnreg.core.contract.spec import FEW_ROWS, LENGTHS, AttentionSpec
from attnreg.core.torchlib.isolation import raise_if_of_program
from attnreg.errors import RegistrationError

__all__ = ["LENGTHS", "Cut", "Lengths", "reads_of"]

# The largest numbers: of sequences and of the longest as kernels count them, of tokens as memory has them.
MOST_SEQUENCES, LONGEST, MOST_TOKENS = 2**20, 2**31 - 1, 2**40
LIMITS = {
    "batch": MOST_SEQUENCES,
    **dict.fromkeys(("max_q", "max_k", "ranges"), LONGEST),
    **dict.fromkeys(("tokens_q", "tokens_k"), MOST_TOKENS),
}

# Products of lengths end below 2**53 wherever a limit lies: C++ computes them as doubles.
LARGEST_LIMIT = 2**53


class Lengths(NamedTuple):
    """The lengths of a call: sequences, the longest and all tokens of each side, `key_ranges` of a query."""

    batch: int
    max_q: int
    max_k: int
    tokens_q: int
    tokens_k: int
    ranges: int = 0

    @classmethod
    def of(cls, spec: AttentionSpec) -> Self:
        """Return the lengths of a spec."""
        return cls(*(getattr(spec, name) for name in LENGTHS))


# Pairs of a coefficient and the lengths that are multiplied, by their names in `LENGTHS`: their sum.
Terms = tuple[tuple[int, tuple[str, ...]], ...]


class Cut(NamedTuple):
    """Where a decision may change: where a sum of products of lengths reaches a number.

    Attributes:
        terms: the sum.
        at: the number; lengths below it are another class than the rest.
    """

    terms: Terms
    at: int

    @classmethod
    def of(cls, *lengths: str, at: int) -> Self:
        """Return the cut where the product of some lengths reaches `at`."""
        return cls(((1, lengths),), at)

    @classmethod
    def beyond(cls, length: str, other: str, at: int = 1) -> Self:
        """Return the cut where one length is larger than another by `at`."""
        return cls(((1, (length,)), (-1, (other,))), at)

    @property
    def names(self) -> frozenset[str]:
        """The lengths that it is about."""
        return frozenset(name for _, product in self.terms for name in product)

    def is_reached(self, lengths: Lengths) -> bool:
        """Whether a call of these lengths lies at the cut or above it."""
        return sum_of(self.terms, lengths) >= self.at


def sum_of(terms: Terms, lengths: Lengths) -> int:
    """Return the sum of products of lengths that a `Cut` compares with a number."""
    total = 0
    for coefficient, product in terms:
        amount = coefficient
        for name in product:
            amount *= getattr(lengths, name)
        total += amount
    return total


def check_cuts(cuts: Any, backend: str) -> tuple[Cut, ...]:
    """Return what a backend's `cuts` returned as a tuple; raises RegistrationError if these are no cuts."""
    if isinstance(cuts, Cut):  # which is a tuple itself
        raise RegistrationError(f"cuts() of {backend}: got a single Cut, expected a tuple of them")
    checked: tuple[Cut, ...] = tuple(cuts) if isinstance(cuts, Iterable) else (cuts,)
    for cut in checked:
        fine = isinstance(cut, Cut) and isinstance(cut.at, int) and abs(cut.at) < LARGEST_LIMIT
        if not fine or not cut.names <= {*LENGTHS}:
            raise RegistrationError(
                f"cuts() of {backend}: got {cut!r}, expected a Cut of {', '.join(LENGTHS)} at a whole number"
            )
    return checked


class _WatchedSpec(AttentionSpec):
    """A spec that notes which of its lengths are read; `dataclasses.replace` reads all of them."""

    __slots__ = ("_reads",)

    def __getattribute__(self, name: str) -> Any:
        if name in LENGTHS:
            object.__getattribute__(self, "_reads").add(name)
        return object.__getattribute__(self, name)

    def but(self, **changes: Any) -> AttentionSpec:
        """Return a copy with some fields changed, watched as well: what is copied isn't read."""
        values = {name: object.__getattribute__(self, name) for name in _FIELDS}
        changed = AttentionSpec(**values | changes)
        return _watched(changed, object.__getattribute__(self, "_reads"))


_FIELDS = tuple(field.name for field in fields(AttentionSpec))


def _watched(spec: AttentionSpec, reads: set[str]) -> AttentionSpec:
    watched = object.__new__(_WatchedSpec)
    for name in _FIELDS:
        object.__setattr__(watched, name, getattr(spec, name))
    object.__setattr__(watched, "_reads", reads)
    return watched


def reads_of(look: Callable[[AttentionSpec], object], spec: AttentionSpec) -> frozenset[str]:
    """Return the names of the lengths that a function reads of a spec; none of what it raises counts."""
    reads: set[str] = set()
    try:
        outcome = look(_watched(spec, reads))
        if isinstance(outcome, Iterator):
            tuple(outcome)
    except BaseException as error:  # noqa: BLE001 - a fault of a check is a reason, as `Entry.reasons` says
        raise_if_of_program(error)
    return frozenset(reads)


def step_of(length: int) -> int:
    """Return the number of the step that a length lies in. Steps begin at powers of 2, and at 1.5 of them.

    It is computed in whole numbers, so that C++ has the same.
    """
    bits = length.bit_length()
    return 2 * bits + (length >> max(bits - 2, 0) & 1 if bits > 1 else 0)


def steps_of(lengths: Lengths) -> tuple[int, ...]:
    """Return the steps that lengths lie in. In place of all tokens the mean of a sequence counts.

    All tokens of a dense call are the product of its other lengths: their steps would only be further ones.
    """
    sequences = max(lengths.batch, 1)
    tokens_q, tokens_k = lengths.tokens_q // sequences, lengths.tokens_k // sequences
    return tuple(map(step_of, lengths._replace(tokens_q=tokens_q, tokens_k=tokens_k)))


# A call of nothing is decided by itself; the mask of a single row, or of more rows than keys, by lengths.
OF_ALL = (
    *(Cut.of(name, at=1) for name in LENGTHS if name != "ranges"),
    Cut.of("max_q", at=2),
    Cut.of("max_k", at=2),
    Cut.beyond("max_q", "max_k", at=0),
    Cut.beyond("max_q", "max_k", at=1),
)


def bounds(window: tuple[int, int], causal: bool, max_q: int, max_k: int) -> tuple[int, int]:
    """Return the one way to write a window: -1 where a bound excludes nothing, causal as `(left, 0)`.

    A left bound of `max_k - 1` reaches the first key from every row, a right bound of `max_q - 1`
    the last key; for one query row causal is no mask at all.
    """
    left, right = window[0], 0 if causal else window[1]
    return (-1 if left < 0 or left >= max_k - 1 else left, -1 if right < 0 or right >= max_q - 1 else right)


def cuts_of_window(left: int, right: int) -> tuple[Cut, ...]:
    """Return where a bound of a window begins to hide something: see `bounds`."""
    by_left = (Cut.of("max_k", at=left + 2),) if left >= 0 else ()
    return (*by_left, Cut.of("max_q", at=right + 2)) if right >= 0 else by_left


def cut_of_decoding(spec: AttentionSpec) -> int:
    """Return the longest query from which on a call of a spec's kind doesn't decode: see `decodes`."""
    return -(-FEW_ROWS * spec.heads_k // max(spec.heads_q, 1))


def with_lengths(spec: AttentionSpec, **lengths: int) -> AttentionSpec:
    """Return a spec of other lengths; a dense call's follow from three of them, and with pages the keys'."""
    changed = {name: lengths.get(name, getattr(spec, name)) for name in LENGTHS}
    if not spec.varlen:
        changed["tokens_q"] = changed["batch"] * changed["max_q"]
    if not spec.varlen or spec.page_size is not None:
        changed["tokens_k"] = changed["batch"] * changed["max_k"]
    return spec.but(**changed)


def changes_at(spec: AttentionSpec, cut: Cut, name: str) -> int | None:
    """Return from which number of one length on a cut tells the calls apart; None if it doesn't.

    All further lengths stay as in `spec`.
    """
    low, high = 0, LIMITS[name]

    def is_reached(number: int) -> bool:
        return cut.is_reached(Lengths.of(with_lengths(spec, **{name: number})))

    at_first = is_reached(low)
    if is_reached(high) is at_first:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_reached(middle) is at_first else (low, middle)
    return high
