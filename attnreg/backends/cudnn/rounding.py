"""Rounding packed problems, so that batches of different lengths share an execution plan.

cuDNN takes 0.04 to 0.9 s to build an execution plan. An execution plan for each batch of a ragged training
run would never be used twice. README.md has the cost of rounding up, the number of execution plans that
remain, and the sizes of workspaces.
"""

from __future__ import annotations

import functools
import math

from attnreg.backends.cudnn.problem import GIVEN, PlanKind, Problem, Strides
from attnreg.core.contract.capabilities import GRID

# The backward's workspace is a float32 gradient of the query. The smallest shared plan has room for
# PER_SEQUENCE tokens in each of its sequences. The limit of that is 256 MB of numbers or TOKENS, whichever is
# more. Larger plans grow by factors of 4, and of 2 from 256 MB on.
PER_SEQUENCE, TOKENS, NUMBERS = 512, 2**14, 2**26

# From this number on a power of two counts as the token budget of a packed training run. Smaller batches
# often have a power of two of tokens by chance: if lengths are multiples of 64, every few batches.
BUDGET = 2048

# How many kinds of problems `FirstTokens` remembers.
MOST_KINDS = 512

LEAST_LENGTH = 4096  # never 1: with a longest sequence of 1 and an empty one, cuDNN 9.19 writes a wrong LSE


def round_lengths(batch: int, max_q: int, max_k: int, tokens: int) -> tuple[int, int, int]:
    """Return the number of sequences and the longest lengths to build for; `tokens` are the query's."""
    # Rounding adds empty sequences. Next to long sequences these cost nothing. Each costs a third of a
    # sequence of 64 tokens, but few such sequences are soon done.
    mean = tokens / batch
    step = 4.0 if mean >= 512 else 2.0 if mean >= 128 or batch <= 64 else 2**0.5
    # A fast path for short lengths, because most are short and each new batch is rounded.
    return (
        _round_batch(batch, step),
        LEAST_LENGTH if max_q <= LEAST_LENGTH else _round_up(max_q, LEAST_LENGTH, 16),
        LEAST_LENGTH if max_k <= LEAST_LENGTH else _round_up(max_k, LEAST_LENGTH, 16),
    )


def exact(problem: Problem) -> Problem:
    """Return a packed problem with rounded lengths, still for exactly its tokens."""
    kind, batch, max_q, max_k, tokens_q, tokens_k, strides, square, _ = problem
    sizes = round_lengths(batch, max_q, max_k, tokens_q)
    return Problem(kind, *sizes, tokens_q, tokens_k, strides, square, True)


def shared(problem: Problem) -> Problem:
    """Return an exact problem with room for more tokens, so that other batches can share its execution plan.

    A problem whose number of query tokens is a budget keeps its exact execution plan.
    """
    kind, batch, max_q, max_k, tokens_q, tokens_k, strides, square, _ = problem
    budget = tokens_q >= BUDGET and tokens_q & (tokens_q - 1) == 0
    if budget and tokens_k in (tokens_q, 0):
        return problem
    if kind.direction == "forward":
        return Problem(kind, batch, max_q, max_k, 0, 0, any_tokens(kind, strides), square)
    width = kind.heads_q * kind.head_dim  # numbers of a token in the workspace
    least = min(PER_SEQUENCE * batch, max(TOKENS, NUMBERS // width))
    room_k = _round_tokens(tokens_k, least, width)
    if budget:
        return Problem(kind, batch, max_q, max_k, tokens_q, room_k, strides, square, True)
    room_q = _round_tokens(tokens_q, least, width)
    return Problem(kind, batch, max_q, max_k, room_q, room_k, any_tokens(kind, strides), square)


def any_tokens(kind: PlanKind, strides: tuple[Strides, ...]) -> tuple[Strides, ...]:
    """Return the strides that tensors need for any number of tokens.

    Where the heads of a tensor lie outside of its tokens, the head stride depends on the number of tokens.
    Such a tensor is copied, because an execution plan for each number of tokens would take far longer.
    """
    for token, head, _ in strides:
        if head > token:
            slots = zip(GIVEN[kind.direction], strides, strict=False)
            return tuple([kind.contiguous(slot) if own[1] > own[0] else own for slot, own in slots])
    return strides


class FirstTokens:
    """The numbers of tokens of the first batch of each kind of packed problem, without its lengths.

    Room for other batches costs memory, which is wasted in a run whose batches all have the same number of
    tokens. So the first number of tokens gets an exact execution plan. Later numbers share execution plans.
    """

    def __init__(self) -> None:
        self._tokens: dict[tuple[object, ...], tuple[int, int]] = {}

    def allow_exact(self, problem: Problem) -> bool:
        """Whether a problem has the first numbers of tokens of its kind, or is the first of its kind."""
        tokens = problem.tokens_q, problem.tokens_k
        return self._tokens.get(_kind(problem), tokens) == tokens

    def remember(self, problem: Problem) -> None:
        """Remember that an exact execution plan of this problem is about to be built.

        Remembered before the build: if cuDNN has no kernel for a kind, it is tried once, not for each number
        of tokens.
        """
        kind = _kind(problem)
        while kind not in self._tokens and len(self._tokens) >= MOST_KINDS:
            del self._tokens[next(iter(self._tokens))]
        self._tokens.setdefault(kind, (problem.tokens_q, problem.tokens_k))


def _kind(problem: Problem) -> tuple[object, ...]:
    return problem.kind, any_tokens(problem.kind, problem.strides), problem.square


@functools.lru_cache(maxsize=1024)
def _round_batch(batch: int, step: float) -> int:
    """Round up a number of sequences."""
    rounded = _round_up(batch, 8, step)
    return min(rounded, 64 if batch <= 64 else max(batch, GRID))


def _round_tokens(tokens: int, least: int, width: int) -> int:
    """Round up by a factor of 4 where the workspace is small, and of 2 where it is large."""
    size = least
    while size < tokens:
        size *= 2 if size * width >= NUMBERS else 4
    return size


def _round_up(number: int, least: int, step: float) -> int:
    """Round up to `least` times a power of `step`; sizes of a fine step include those of a coarse step."""
    size, power = least, 0
    while size < number:
        power += 1
        size = math.ceil(least * step**power - 1e-6)  # two steps of the root of 2 are exactly 2
    return size
