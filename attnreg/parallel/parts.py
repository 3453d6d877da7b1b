"""The steps of a rank as packed calls on a device: which rows each takes, and where its results go.

Rows are taken and results put as runs, so that what follows each other isn't copied. A row may have results
of several calls. The plan says which comes first: it is written, later ones are merged with or added to it.
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

# So many results of a row may be rounded to its dtype one after the other, before they are summed in float32.
MOST_ROUNDED = 4


class Run(NamedTuple):
    """Rows that follow each other in a tensor: this rank's own, number 0, or what it received in a step."""

    source: int
    begin: int
    end: int


class Put(NamedTuple):
    """Where results go: rows `at` and after of a call's, as a run's first results or to those before."""

    run: Run
    at: int
    is_first: bool


class Part(NamedTuple):
    """One packed call of a step.

    Attributes:
        window: as a kernel is told.
        queries, keys: which rows it takes.
        outs: where output and LSE go, in a forward.
        grads_q, grads_k: where gradients go, in a backward.
        cu_q, cu_k, max_q, max_k: as of `varlen_attn`.
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
        """Whether its keys are received, or put together from several runs."""
        return len(self.keys) != 1 or self.keys[0].source != 0


class Move(NamedTuple):
    """What a step sends: own rows, in order of the ranks that get them, and how many go and come."""

    rows: tuple[Run, ...]
    sends: list[int]
    receives: list[int]


class Prepared(NamedTuple):
    """A step; `move` is None in one without communication."""

    move: Move | None
    parts: list[Part]


class Plan(NamedTuple):
    """All steps of a rank.

    Attributes:
        steps: in the order of the forward.
        backward: their numbers in the order of the backward.
        keeps: whether a backward has the keys of the forward's calls, or receives them once more.
        is_long: whether a row's output comes from more than `MOST_ROUNDED` calls.
        is_long_k: the same of the gradient of a key.
        kept: the parts, by step and place in it, whose keys a backward that keeps them finds copied.
        fills_all_rows: whether every query has a result of some call, so that nothing is cleared before.
        whole_k: of which rows, those received in a step or this rank's own, 0, every key has a gradient.
    """

    steps: list[Prepared]
    backward: list[int]
    keeps: bool
    is_long: bool
    is_long_k: bool
    kept: tuple[tuple[int, int], ...]
    fills_all_rows: bool
    whole_k: frozenset[int]


def taken(sources: dict[int, Tensor], runs: Sequence[Run]) -> Tensor:
    """Return rows one after the other; without a copy if they are one run."""
    dtype = sources[0].dtype
    if len(runs) < 2:
        return sources[runs[0].source][runs[0].begin : runs[0].end] if runs else sources[0][:0]
    if sources[0].dim() > 1:  # rows of others are elements
        sources = dict(zip(sources, in_large_elements(*sources.values()), strict=True))
    return torch.cat([sources[source][begin:end] for source, begin, end in runs]).view(dtype)


def prepared(
    steps: Sequence[Step], layout: Layout, rank: int, device: torch.device, keeps: bool = False
) -> Plan:
    """Return what a device has to know of steps.

    A backward that keeps the received keys begins with them, so that their gradients are on their way back
    while the rest is computed.
    """
    own = [(begin, end) for _, begin, end in layout.pieces[rank]]
    of_own, found = Places({0: own}), list[Prepared]()
    for number, step in enumerate(steps):
        received = list(itertools.chain.from_iterable(step.receives))
        of_keys = Places({0: own, number: received}) if received else of_own
        parts = [_part(window, spans, of_own, of_keys, device) for window, spans in grouped(step.spans)]
        move = None
        if step.sends:
            sends, receives = ([row_count(ranges) for ranges in x] for x in (step.sends, step.receives))
            rows = of_own.runs(itertools.chain.from_iterable(step.sends))
            move = Move(tuple(rows), sends, receives)
        found.append(Prepared(move, parts))
    backward = list(range(len(found)))[:: -1 if keeps else 1]
    return _with_puts(found, backward, keeps, row_count(own))


class Places:
    """Where rows of the whole batch are: in which tensor, and at which place there."""

    def __init__(self, tensors: dict[int, list[Range]]) -> None:
        self._held: list[tuple[int, int, int]] = []  # first row, tensor, place of that row
        for number, ranges in tensors.items():
            lengths = (end - begin for begin, end in ranges)
            places = itertools.accumulate(lengths, initial=0)
            self._held += [(begin, number, place) for (begin, _), place in zip(ranges, places, strict=False)]
        self._held.sort()

    def runs(self, ranges: Iterable[Range]) -> list[Run]:
        """Return ranges, all of whose rows are there, as runs; those are made one that follow each other."""
        found: list[Run] = []
        for begin, end in ranges:
            at = bisect_right(self._held, begin, key=operator.itemgetter(0)) - 1
            while begin < end:
                first, source, place = self._held[at]
                at += 1
                upto = min(end, self._held[at][0]) if at < len(self._held) else end
                run = Run(source, place + begin - first, place + upto - first)
                if found and found[-1].source == source and found[-1].end == run.begin:
                    run = run._replace(begin=found.pop().begin)
                found.append(run)
                begin = upto
        return found


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
    """Copy to a device; from pinned memory the host needn't wait for that."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _with_puts(steps: list[Prepared], backward: list[int], keeps: bool, rows: int) -> Plan:
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
    return Plan(steps, backward, keeps, is_long, is_long_k, kept if keeps else (), fills_all_rows, whole_k)


def _puts(
    runs_of_parts: Sequence[Sequence[Run]], sizes: dict[int, int]
) -> tuple[list[tuple[Put, ...]], dict[int, Tensor]]:
    """Return where the results of each part go, in their order, and how many each row then has."""
    counts = {source: torch.zeros(size, dtype=torch.int32) for source, size in sizes.items()}
    found = []
    for runs in runs_of_parts:
        puts, at = [], 0
        for source, begin, end in runs:
            before = counts[source][begin:end] > 0
            cuts = (before.diff().nonzero()[:, 0] + 1).tolist()
            for low, high in itertools.pairwise([0, *cuts, end - begin]):
                puts.append(Put(Run(source, begin + low, begin + high), at + low, not bool(before[low])))
            counts[source][begin:end] += 1
            at += end - begin
        found.append(tuple(puts))
    return found, counts
