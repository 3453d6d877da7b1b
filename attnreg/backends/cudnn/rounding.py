"""Rounding packed problems, so that batches of different lengths share an execution plan.

cuDNN takes 0.04 to 0.9 s to build an execution plan, and one for each batch of a ragged training run would
never be used twice. README.md says what rounding up costs, how many execution plans that leaves, and how
large workspaces are.
"""

from __future__ import annotations

import math

from attnreg.backends.cudnn.problem import Problem
from attnreg.contract.capabilities import GRID

# The backward's workspace is a float32 gradient of the query. A shared plan has room for PER_SEQUENCE tokens
# in each of its sequences, but not for more than 256 MB of numbers or for TOKENS, whichever is more. Beyond
# that it grows in steps of 4, and of 2 from 256 MB on.
PER_SEQUENCE, TOKENS, NUMBERS = 512, 2**14, 2**26

# From here on a power of two is taken for the token budget of a packed training run. Smaller batches often
# have one by chance: where lengths are multiples of 64, one in a few.
BUDGET = 2048

# How many kinds of problems are remembered.
MOST_KINDS = 512


def round_lengths(batch: int, max_q: int, max_k: int, tokens: int) -> tuple[int, int, int]:
    """Return the number of sequences and the longest lengths to build for, given the query tokens."""
    # Never 1: with a longest sequence of 1 and an empty one, cuDNN 9.19 writes a wrong LSE.
    return _round_batch(batch, tokens / batch), _round_up(max_q, 4096, 16), _round_up(max_k, 4096, 16)


def exact(problem: Problem) -> Problem:
    """Return a packed problem with rounded lengths, still for exactly its tokens."""
    sizes = round_lengths(problem.batch, problem.max_q, problem.max_k, problem.tokens_q)
    batch, max_q, max_k = sizes
    return problem._replace(batch=batch, max_q=max_q, max_k=max_k, exact=True)


def shared(problem: Problem) -> Problem:
    """Return what `exact` has returned, with room for more tokens, so that other batches can share it.

    A number of query tokens that is a budget keeps its exact execution plan.
    """
    budget = problem.tokens_q >= BUDGET and problem.tokens_q & (problem.tokens_q - 1) == 0
    if budget and problem.tokens_k in (problem.tokens_q, 0):
        return problem
    if problem.direction == "forward":
        return problem._replace(tokens_q=0, tokens_k=0, exact=False)
    width = problem.heads_q * problem.head_dim  # numbers of a token in the workspace
    least = min(PER_SEQUENCE * problem.batch, max(TOKENS, NUMBERS // width))
    tokens_k = _round_tokens(problem.tokens_k, least, width)
    if budget:
        return problem._replace(tokens_k=tokens_k)
    tokens_q = _round_tokens(problem.tokens_q, least, width)
    return problem._replace(tokens_q=tokens_q, tokens_k=tokens_k, exact=False)


class FirstTokens:
    """How many tokens the first batch of each kind of packed problem had; a kind is all but the lengths.

    Room for other batches costs memory, which a run needn't pay if all its batches have as many tokens.
    So the first number of tokens gets an exact execution plan, and only later ones share.
    """

    def __init__(self) -> None:
        self._tokens: dict[Problem, tuple[int, int]] = {}

    def allow_exact(self, problem: Problem) -> bool:
        """Whether a problem has the first tokens of its kind, or is the first."""
        tokens = problem.tokens_q, problem.tokens_k
        return self._tokens.get(_kind(problem), tokens) == tokens

    def remember(self, problem: Problem) -> None:
        """Remember that an exact execution plan of this problem is about to be built.

        It may fail: where cuDNN has no kernel for a kind, it is tried once, not for each number of tokens.
        """
        kind = _kind(problem)
        while kind not in self._tokens and len(self._tokens) >= MOST_KINDS:
            del self._tokens[next(iter(self._tokens))]
        self._tokens.setdefault(kind, (problem.tokens_q, problem.tokens_k))


def _kind(problem: Problem) -> Problem:
    return problem._replace(batch=0, max_q=0, max_k=0, tokens_q=0, tokens_k=0, exact=False)


def _round_batch(batch: int, mean: float) -> int:
    """Round up a number of sequences, which have `mean` tokens on average."""
    # An empty sequence costs nothing next to long ones, and a third of a sequence of 64 tokens, of which
    # a few are soon done.
    if batch <= 64:
        return min(_round_up(batch, 8, 4.0 if mean >= 512 else 2.0), 64)
    step = 4.0 if mean >= 512 else 2.0 if mean >= 128 else 2**0.5
    return min(_round_up(batch, 8, step), max(batch, GRID))


def _round_tokens(tokens: int, least: int, width: int) -> int:
    """Round up in coarse steps where the workspace is small, and in finer ones where it is large."""
    size = least
    while size < tokens:
        size *= 2 if size * width >= NUMBERS else 4
    return size


def _round_up(number: int, least: int, step: float) -> int:
    """Round up to `least` times a power of `step`; sizes of a coarse step are among those of a fine one."""
    size, power = least, 0
    while size < number:
        power += 1
        size = math.ceil(least * step**power - 1e-6)  # two steps of the root of 2 are exactly 2
    return size
