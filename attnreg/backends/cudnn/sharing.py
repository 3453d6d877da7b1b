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

from attnreg.contract.capabilities import GRID

if TYPE_CHECKING:
    from attnreg.backends.cudnn.problem import Problem

__all__ = ["Firsts", "exact", "rounded", "shared"]

# The backward's workspace is a float32 gradient of the query. One with room has it for so many tokens of each
# sequence that is planned for, at most for 256 MB of numbers or for `TOKENS`, whichever are more; then it
# grows in steps of 4, from 256 MB on in steps of 2.
PER_SEQUENCE, TOKENS, NUMBERS = 512, 2**14, 2**26

# Of smaller batches, whose sequences are multiples of 64 long, one in a few has a power of two by chance.
BUDGET = 2048

# Kinds that are remembered.
MOST = 512


def rounded(batch: int, max_q: int, max_k: int, tokens: int) -> tuple[int, int, int]:
    """Return the batch and the lengths that a packed problem of so many query tokens is planned for."""
    return _sequences(batch, tokens / batch), _up(max_q, 4096, 16), _up(max_k, 4096, 16)


def exact(problem: Problem) -> Problem:
    """Return the packed problem that is planned for just as many query tokens."""
    return problem._replace(own=True)


def shared(problem: Problem) -> Problem:
    """Return the packed problem that is planned for this one and for others.

    Of queries it has room for more tokens, unless they are a power of two, as the budgets of packed training
    mostly are: those have plans of their own.
    """
    budget = problem.tokens_q >= BUDGET and problem.tokens_q & (problem.tokens_q - 1) == 0
    if budget and problem.tokens_k in (problem.tokens_q, 0):
        return exact(problem)
    width = problem.heads_q * problem.head_dim  # what a token costs in the workspace
    least = min(PER_SEQUENCE * problem.batch, max(TOKENS, NUMBERS // width))
    tokens_k = _total(problem.tokens_k, least, width) if problem.direction == "backward" else 0
    if budget:
        return exact(problem._replace(tokens_k=tokens_k))
    tokens_q = _total(problem.tokens_q, least, width) if problem.direction == "backward" else 0
    return problem._replace(tokens_q=tokens_q, tokens_k=tokens_k)


class Firsts:
    """Which tokens were planned for first of each kind of packed problem.

    Room for others is the price of few plans, which a run whose batches all have as many tokens needn't pay:
    the first ones get a plan of their own. A kind is all but the lengths.
    """

    def __init__(self) -> None:
        self._tokens: dict[Problem, tuple[int, int]] = {}

    def may_be(self, problem: Problem) -> bool:
        """Whether a problem's tokens are the first ones of its kind, or could be."""
        tokens = problem.tokens_q, problem.tokens_k
        return self._tokens.get(_kind(problem), tokens) == tokens

    def met(self, problem: Problem) -> None:
        """Remember that this is to be planned, one that is `exact`.

        It may fail: where cuDNN has no kernel for a kind, it isn't asked about each number of tokens.
        """
        kind = _kind(problem)
        while kind not in self._tokens and len(self._tokens) >= MOST:
            del self._tokens[next(iter(self._tokens))]
        self._tokens.setdefault(kind, (problem.tokens_q, problem.tokens_k))


def _kind(problem: Problem) -> Problem:
    return problem._replace(batch=0, max_q=0, max_k=0, tokens_q=0, tokens_k=0, own=False)


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
