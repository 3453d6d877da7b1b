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

# Longer sequences and larger totals don't occur: kernels count in 32 bits.
MOST = 2**31 - 1

LEAST_LENGTH = 4096  # never 1: with a longest sequence of 1 and an empty one, cuDNN 9.19 writes a wrong LSE


def round_lengths(batch: int, max_q: int, max_k: int, tokens: int) -> tuple[int, int, int]:
    """Return the number of sequences and the longest lengths to build for; `tokens` are the query's."""
    # Rounding adds empty sequences. Next to long sequences these cost nothing. Each costs a third of a
    # sequence of 64 tokens, but few such sequences are soon done.
    step, _, _ = _step_of(batch, tokens)
    # A fast path for short lengths, because most are short and each new batch is rounded.
    return (
        _round_batch(batch, step),
        LEAST_LENGTH if max_q <= LEAST_LENGTH else _round_up(max_q, LEAST_LENGTH, 16),
        LEAST_LENGTH if max_k <= LEAST_LENGTH else _round_up(max_k, LEAST_LENGTH, 16),
    )


def _step_of(batch: int, tokens: int) -> tuple[float, int, int]:
    """Return the factor between numbers of sequences, and from and below which mean length it is that."""
    mean = tokens / batch
    if mean >= 512:
        return 4.0, 512, MOST
    if batch <= 64:
        return 2.0, 0, 512
    return (2.0, 128, 512) if mean >= 128 else (2**0.5, 0, 128)


def exact(problem: Problem) -> Problem:
    """Return a packed problem with rounded lengths, still for exactly its tokens."""
    kind, batch, max_q, max_k, tokens_q, tokens_k, strides, square, *_ = problem
    sizes = round_lengths(batch, max_q, max_k, tokens_q)
    return Problem(kind, *sizes, tokens_q, tokens_k, strides, square, True)


def shared(problem: Problem) -> Problem:
    """Return an exact problem with room for more tokens, so that other batches can share its execution plan.

    A problem whose number of query tokens is a budget keeps its exact execution plan.
    """
    kind, batch, max_q, max_k, tokens_q, tokens_k, strides, square, *_ = problem
    budget = tokens_q >= BUDGET and tokens_q & (tokens_q - 1) == 0
    if budget and tokens_k in (tokens_q, 0):
        return problem
    if kind.direction == "forward":
        return Problem(kind, batch, max_q, max_k, 0, 0, any_tokens(kind, strides), square)
    width = kind.heads_q * kind.head_dim  # numbers of a token in the workspace
    least = _least_tokens(batch, width)
    room_k = _round_tokens(tokens_k, least, width)
    if budget:
        return Problem(kind, batch, max_q, max_k, tokens_q, room_k, strides, square, True)
    room_q = _round_tokens(tokens_q, least, width)
    return Problem(kind, batch, max_q, max_k, room_q, room_k, any_tokens(kind, strides), square)


def lengths_served(
    problem: Problem, selected: Problem, first: tuple[int, int] | None
) -> tuple[tuple[int, int], ...]:
    """Return for which lengths a packed problem of the same kind and strides has the same execution plan.

    Args:
        problem: as a call has it.
        selected: the problem of its execution plan.
        first: the first numbers of tokens of its kind, which have an execution plan of their own.

    Returns:
        The least and the most of batch, max_q, max_k, tokens_q and tokens_k. Not all such lengths lie
        between these.
    """
    _, batch, max_q, max_k, tokens_q, tokens_k, *_ = problem
    step, mean, below = _step_of(batch, tokens_q)
    least, most = _batches_like(batch, step)
    least, most = max(least, tokens_q // below + 1), min(most, tokens_q // mean) if mean else most
    longest = _between_steps(max_q, LEAST_LENGTH, 16), _between_steps(max_k, LEAST_LENGTH, 16)
    # Between these numbers of tokens the mean length stays on the same side for each such batch.
    tokens = max(mean * most, 1), min(below * least - 1, MOST)
    if selected.exact:
        tokens, keys = (tokens_q, tokens_q), (tokens_k, tokens_k)
    else:
        tokens, keys = _tokens_like(problem, selected, first, tokens)
    return (least, most), *longest, tokens, keys if selected.tokens_k else (1, MOST)


def _tokens_like(
    problem: Problem, selected: Problem, first: tuple[int, int] | None, within: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return which numbers of tokens, the query's within some, share a problem's execution plan."""
    kind, tokens_q, tokens_k = problem.kind, problem.tokens_q, problem.tokens_k
    # No budget lies between two powers of two.
    power = 1 << tokens_q.bit_length()
    ranges = [within, (power // 2 + 1, power - 1) if tokens_q >= BUDGET else (1, BUDGET - 1)]
    keys = tokens_k, tokens_k
    if kind.direction == "backward":
        width = kind.heads_q * kind.head_dim
        least = _least_tokens(selected.batch, width)
        ranges.append(_tokens_between(tokens_q, least, width))
        keys = _tokens_between(tokens_k, least, width)
    if first is not None and first[0] == tokens_q:
        return (tokens_q, tokens_q), (tokens_k, tokens_k)
    if first is not None:
        ranges.append((first[0] + 1, MOST) if first[0] < tokens_q else (1, first[0] - 1))
    return (max(low for low, _ in ranges), min(high for _, high in ranges)), keys


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

    def of(self, problem: Problem) -> tuple[int, int] | None:
        """Return the first numbers of tokens of a problem's kind; None before the first."""
        return self._tokens.get(_kind(problem))

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


def _least_tokens(batch: int, width: int) -> int:
    """Return the room of the smallest shared plan; a token has `width` numbers in the workspace."""
    return min(PER_SEQUENCE * batch, max(TOKENS, NUMBERS // width))


@functools.lru_cache(maxsize=1024)
def _batches_like(batch: int, step: float) -> tuple[int, int]:
    """Return the least and the most number of sequences that are rounded to the same."""
    if batch > max(64, GRID):
        return batch, batch
    least, _ = _between_steps(batch, 8, step)
    return max(least, 65 if batch > 64 else 1), _round_batch(batch, step)


@functools.lru_cache(maxsize=1024)
def _round_batch(batch: int, step: float) -> int:
    """Round up a number of sequences."""
    rounded = _round_up(batch, 8, step)
    return min(rounded, 64 if batch <= 64 else max(batch, GRID))


def _round_tokens(tokens: int, least: int, width: int) -> int:
    """Round up by a factor of 4 where the workspace is small, and of 2 where it is large."""
    return _tokens_between(tokens, least, width)[1]


def _tokens_between(tokens: int, least: int, width: int) -> tuple[int, int]:
    """Return the least and the most number of tokens that are rounded to the same."""
    before, size = 0, least
    while size < tokens:
        before, size = size, size * (2 if size * width >= NUMBERS else 4)
    return before + 1, size


def _round_up(number: int, least: int, step: float) -> int:
    """Round up to `least` times a power of `step`; sizes of a fine step include a coarse step's."""
    return _between_steps(number, least, step)[1]


def _between_steps(number: int, least: int, step: float) -> tuple[int, int]:
    """Return the least and the most number that `_round_up` rounds to the same."""
    before, size, power = 0, least, 0
    while size < number:
        power += 1
        # Two steps of the root of 2 are exactly 2.
        before, size = size, math.ceil(least * step**power - 1e-6)
    return before + 1, size
