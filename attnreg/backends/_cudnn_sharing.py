"""Which packed problems share a cuDNN plan.

A plan takes cuDNN 0.04 to 0.9 s, so packed problems are rounded up. What was measured on an H200: a
longer longest sequence costs nothing; an empty sequence more costs 11 ns per head in the forward and 23
in the backward; more tokens cost the backward memory; and an LSE whose place doesn't depend on the tokens
has to be turned round, which takes the device 5 µs in either direction. A longest sequence of 1, which is
never planned, with an empty one beside it gave a wrong LSE.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attnreg.capabilities import GRID

if TYPE_CHECKING:
    from attnreg.backends._cudnn_problem import Problem

__all__ = ["Sharing", "rounded", "with_room"]

# The backward's workspace is a float32 gradient of the query. One with room has it for so many tokens of each
# sequence that is planned for, at most for 256 MB of numbers or for `TOKENS`, whichever are more; then it
# grows in steps of 4, from 256 MB on in steps of 2.
PER_SEQUENCE, TOKENS, NUMBERS = 512, 2**14, 2**26

# Of smaller batches, whose sequences are multiples of 64 long, one in a few has a power of two by chance.
BUDGET = 2048

# Kinds that are remembered. A program that has more of them, a scale for each call say, forgets them.
MOST = 512


def rounded(batch: int, max_q: int, max_k: int, tokens: int) -> tuple[int, int, int]:
    """Return the batch and the lengths that a packed problem of so many query tokens is planned for."""
    return _sequences(batch, tokens / batch), _up(max_q, 4096, 16), _up(max_k, 4096, 16)


class Sharing:
    """Decides which plan a problem gets: its own, or one with room for others.

    Room is the price of few plans, which a run whose batches all have as many tokens needn't pay. So the
    tokens that are met first of a kind get a plan of their own, and so does a power of two, as the
    budgets of packed training mostly are.
    """

    def __init__(self) -> None:
        self._first: dict[Problem, tuple[int, int]] = {}

    def planned(self, problem: Problem) -> Problem:
        """Return the problem that is planned for one with these tokens."""
        if not problem.packed:
            return problem
        tokens = problem.tokens_q, problem.tokens_k
        kind = problem._replace(batch=0, max_q=0, max_k=0, tokens_q=0, tokens_k=0)
        if kind not in self._first and len(self._first) >= MOST:
            self._first.clear()
        if self._first.setdefault(kind, tokens) == tokens or _budget(*tokens):
            return problem._replace(own=True)
        return with_room(problem)


def _budget(tokens_q: int, tokens_k: int) -> bool:
    return tokens_q >= BUDGET and tokens_q & (tokens_q - 1) == 0 and tokens_k in (tokens_q, 0)


def with_room(problem: Problem) -> Problem:
    """Return the packed problem that is planned for this one and others of about as many tokens or fewer."""
    if problem.direction == "forward":
        return problem._replace(tokens_q=0)
    width = problem.heads_q * problem.head_dim  # what a token costs in the workspace
    least = min(PER_SEQUENCE * problem.batch, max(TOKENS, NUMBERS // width))
    return problem._replace(
        tokens_q=_total(problem.tokens_q, least, width), tokens_k=_total(problem.tokens_k, least, width)
    )


def _sequences(batch: int, mean: float) -> int:
    """Round up a number of sequences of so many tokens."""
    # One more costs nothing beside long ones, and a third of itself beside those of 64 tokens, of which
    # few are soon done.
    if batch <= 64:
        return min(_up(batch, 8, 4.0 if mean >= 512 else 2.0), 64)
    step = 4.0 if mean >= 512 else 2.0 if mean >= 128 else 2**0.5
    return min(_up(batch, 8, step), max(batch, GRID))


def _total(tokens: int, least: int, width: int) -> int:
    """Round up coarsely where the workspace is small, to keep the plans few."""
    size = least
    while size < tokens:
        size *= 2 if size * width >= NUMBERS else 4
    return size


def _up(number: int, least: int, step: float) -> int:
    """Round up to a power of `step` times `least`; sizes of a coarse step are among those of a fine one."""
    size, power = least, 0
    while size < number:
        power += 1
        size = math.ceil(least * step**power - 1e-6)  # two steps of the root of 2 are to be 2
    return size
