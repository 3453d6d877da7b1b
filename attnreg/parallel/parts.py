"""The steps of a rank as packed calls on a device: the rows that each reads, and where its results go.

Rows are read and written as runs, so that consecutive rows aren't copied. A row may have results of several
calls. The plan says which result comes first: it is written, later results are merged with or added to it.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.core.torchlib.layout import in_large_elements
from attnreg.parallel.layout import Layout
from attnreg.parallel.spans import Range, Span, grouped, row_count
from attnreg.parallel.steps import Step

# Up to so many results of a row are added in its dtype, with rounding after each; more are added in float32.
MOST_ROUNDED = 4


class Run(NamedTuple):
    """Consecutive rows of a tensor: `source` 0 is this rank's own rows, else the step that received them."""

    source: int
    begin: int
    end: int


class Put(NamedTuple):
    """Where results go: a call's rows from `at` on to `run`, as first results or added to earlier ones."""

    run: Run
    at: int
    is_first: bool


class Part(NamedTuple):
    """One packed call of a step.

    Attributes:
        window: the window that the kernel computes.
        queries, keys: the rows that it reads.
        cu_q, cu_k, max_q, max_k: as for `varlen_attn`; the offsets are int32 (sequences + 1,).
        outs: where the forward's output and LSE go.
        grads_q, grads_k: where the backward's gradients go.
    """

    window: tuple[int, int]
    queries: tuple[Run, ...]
    keys: tuple[Run, ...]
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    outs: tuple[Put, ...] = ()
    grads_q: tuple[Put, ...] = ()
    grads_k: tuple[Put, ...] = ()

    @property
    def copies_keys(self) -> bool:
        """Whether its keys are received, or copied from several runs."""
        return len(self.keys) != 1 or self.keys[0].source != 0


class Move(NamedTuple):
    """The exchange of a step: own rows in the order of their target ranks, and row counts by rank."""

    rows: tuple[Run, ...]
    sends: list[int]
    receives: list[int]


class PreparedStep(NamedTuple):
    """A step; `move` is None if it needs no communication."""

    move: Move | None
    parts: list[Part]


class StepPlan(NamedTuple):
    """All steps of a rank.

    Attributes:
        steps: in the order of the forward.
        backward: the numbers of the steps, in the order of the backward.
        keeps: whether the backward keeps the keys of the forward's calls, or receives them once more.
        is_long: whether some row's output is the sum of more than `MOST_ROUNDED` results.
        is_long_k: the same for the gradient of a key.
        kept: the parts, by step and place in it, whose copied keys are saved for the backward.
        fills_all_rows: whether every query gets a result of some call, so that nothing is cleared first.
        whole_k: the sources (see `Run`) whose keys all get a gradient.
    """

    steps: list[PreparedStep]
    backward: list[int]
    keeps: bool
    is_long: bool
    is_long_k: bool
    kept: tuple[tuple[int, int], ...]
    fills_all_rows: bool
    whole_k: frozenset[int]


def taken(sources: dict[int, Tensor], runs: Sequence[Run]) -> Tensor:
    """Return the rows of runs, concatenated; a single run isn't copied.

    `sources` are tensors (rows, ...) of one dtype, by their numbers (see `Run`); number 0 is among them.
    """
    dtype = sources[0].dtype
    if len(runs) < 2:
        return sources[runs[0].source][runs[0].begin : runs[0].end] if runs else sources[0][:0]
    if sources[0].dim() > 1:  # one-dimensional rows are single elements
        sources = dict(zip(sources, in_large_elements(*sources.values()), strict=True))
    return torch.cat([sources[source][begin:end] for source, begin, end in runs]).view(dtype)


def prepared(
    steps: Sequence[Step], layout: Layout, rank: int, device: torch.device, keeps: bool = False
) -> StepPlan:
    """Return the plan of a rank's steps, with its tensors on a device.

    A backward that keeps the received keys begins with them, so that their gradients travel back while the
    rest is computed.
    """
    own = [(begin, end) for _, begin, end in layout.pieces[rank]]
    of_own, prepared_steps = Places({0: own}), list[PreparedStep]()
    for number, step in enumerate(steps):
        received = list(itertools.chain.from_iterable(step.receives))
        of_keys = Places({0: own, number: received}) if received else of_own
        parts = [_part(window, spans, of_own, of_keys, device) for window, spans in grouped(step.spans)]
        move = None
        if step.sends:
            sends, receives = ([row_count(ranges) for ranges in x] for x in (step.sends, step.receives))
            rows = of_own.runs(itertools.chain.from_iterable(step.sends))
            move = Move(tuple(rows), sends, receives)
        prepared_steps.append(PreparedStep(move, parts))
    backward = list(range(len(prepared_steps)))[:: -1 if keeps else 1]
    return _with_puts(prepared_steps, backward, keeps, row_count(own))


class Places:
    """For rows of the whole batch: which tensor has them, and at which place."""

    def __init__(self, tensors: dict[int, list[Range]]) -> None:
        self._held: list[tuple[int, int, int]] = []  # first row, tensor, place of that row
        for number, ranges in tensors.items():
            lengths = (end - begin for begin, end in ranges)
            places = itertools.accumulate(lengths, initial=0)
            self._held += [(begin, number, place) for (begin, _), place in zip(ranges, places, strict=False)]
        self._held.sort()

    def runs(self, ranges: Iterable[Range]) -> list[Run]:
        """Return ranges, all of whose rows the tensors have, as runs; consecutive runs are merged."""
        runs: list[Run] = []
        for begin, end in ranges:
            at = bisect_right(self._held, begin, key=operator.itemgetter(0)) - 1
            while begin < end:
                first, source, place = self._held[at]
                at += 1
                upto = min(end, self._held[at][0]) if at < len(self._held) else end
                run = Run(source, place + begin - first, place + upto - first)
                if runs and runs[-1].source == source and runs[-1].end == run.begin:
                    run = run._replace(begin=runs.pop().begin)
                runs.append(run)
                begin = upto
        return runs


def _part(
    window: tuple[int, int], spans: Sequence[Span], own: Places, keys: Places, device: torch.device
) -> Part:
    queries = own.runs((span.begin, span.end) for span in spans)
    runs_k = keys.runs(itertools.chain.from_iterable(span.keys for span in spans))
    lengths_q, lengths_k = [span.end - span.begin for span in spans], [span.key_count for span in spans]
    cu_q = cu_k = on_device(torch.tensor([0, *lengths_q]).cumsum(0).int(), device)
    if lengths_k != lengths_q:
        cu_k = on_device(torch.tensor([0, *lengths_k]).cumsum(0).int(), device)
    return Part(window, tuple(queries), tuple(runs_k), cu_q, cu_k, max(lengths_q), max(lengths_k))


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of any shape to a device, to a GPU from pinned memory, so that the host doesn't wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _with_puts(steps: list[PreparedStep], backward: list[int], keeps: bool, rows: int) -> StepPlan:
    sizes = {0: rows} | {n: sum(step.move.receives) for n, step in enumerate(steps) if step.move is not None}
    places = [(n, m) for n, step in enumerate(steps) for m in range(len(step.parts))]
    outs, results = _puts([steps[n].parts[m].queries for n, m in places], sizes)
    for (n, m), puts in zip(places, outs, strict=True):
        steps[n].parts[m] = steps[n].parts[m]._replace(outs=puts)
    places = [(n, m) for n in backward for m in range(len(steps[n].parts))]
    grads_q, _ = _puts([steps[n].parts[m].queries for n, m in places], sizes)
    grads_k, counts = _puts([steps[n].parts[m].keys for n, m in places], sizes)
    for (n, m), puts_q, puts_k in zip(places, grads_q, grads_k, strict=True):
        steps[n].parts[m] = steps[n].parts[m]._replace(grads_q=puts_q, grads_k=puts_k)
    whole_k = frozenset(source for source, count in counts.items() if bool((count > 0).all()))
    for step in steps:
        for _, begin, end in step.move.rows if step.move is not None else ():
            counts[0][begin:end] += 1
    longest = (int(x[0].max()) if rows else 0 for x in (results, counts))
    is_long, is_long_k = (count > MOST_ROUNDED for count in longest)
    kept = tuple(
        (n, m) for n, step in enumerate(steps) for m, part in enumerate(step.parts) if part.copies_keys
    )
    fills_all_rows = bool((results[0] > 0).all())
    return StepPlan(
        steps, backward, keeps, is_long, is_long_k, kept if keeps else (), fills_all_rows, whole_k
    )


def _puts(
    runs_of_parts: Sequence[Sequence[Run]], sizes: dict[int, int]
) -> tuple[list[tuple[Put, ...]], dict[int, Tensor]]:
    """Return where the results of each part go, in order, and the number of results of each row."""
    counts = {source: torch.zeros(size, dtype=torch.int32) for source, size in sizes.items()}
    puts_of_parts = []
    for runs in runs_of_parts:
        puts, at = [], 0
        for source, begin, end in runs:
            before = counts[source][begin:end] > 0
            cuts = (before.diff().nonzero()[:, 0] + 1).tolist()
            for low, high in itertools.pairwise([0, *cuts, end - begin]):
                puts.append(Put(Run(source, begin + low, begin + high), at + low, not bool(before[low])))
            counts[source][begin:end] += 1
            at += end - begin
        puts_of_parts.append(tuple(puts))
    return puts_of_parts, counts
