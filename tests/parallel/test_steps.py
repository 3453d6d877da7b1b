"""Promises of the steps: done one after the other they give each rank what the whole batch gives its rows.

All ranks of a group are worked out in one process, in float64, without communication.
"""

import functools
import itertools

import pytest
import torch

import attnreg
from attnreg.parallel.balance import balanced
from attnreg.parallel.layout import contiguous, zigzag
from attnreg.parallel.needs import Needs
from attnreg.parallel.parts import Run, prepared, taken
from attnreg.parallel.spans import grouped, row_count
from attnreg.parallel.steps import gathering, rotating
from attnreg.tools.measure.reference import attend

HEADS, DIM = 2, 4
WINDOWS = [(-1, -1), (-1, 0), (5, 0), (0, 0), (3, 2), (-1, 3), (4, -1), (0, 9), (40, 40)]
# Every window over three ranks; one rank and an even number of them with a window of each kind.
SPREAD = [*((window, 3) for window in WINDOWS), *itertools.product([(-1, 0), (3, 2), (4, -1)], (1, 4))]
BATCHES = {
    "one document": [0, 48],
    "several": [0, 5, 5, 37, 40, 61],
    "many": list(itertools.accumulate([0, 3, 1, 0, 9, 27, 2, 2, 31, 8])),
    "shorter than the ranks": [0, 2, 3],
}
MAKERS = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "balanced": lambda cu_seq, ranks: balanced(cu_seq, ranks, is_causal=True),
}
CPU = torch.device("cpu")


@functools.cache
def whole_batch(cu_seq, window):
    """Return query, key, value, and the output and LSE that the whole batch has."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, cu_seq[-1], HEADS, DIM, generator=generator, dtype=torch.float64)
    outs, lses = [], []
    for begin, end in itertools.pairwise(cu_seq):
        if end > begin:
            out, lse = attend(*(x[None, begin:end] for x in (query, key, value)), DIM**-0.5, window)
            outs.append(out[0])
            lses.append(lse[0].mT)
    return query, key, value, torch.cat(outs), torch.cat(lses)


def computed(layout, rank, steps, query, key, value):
    """Return output and LSE of a rank's rows, with the rows that its steps say it receives."""
    own = layout.index(rank)
    out = torch.zeros(len(own), HEADS, DIM, dtype=torch.float64)
    lse = torch.full((len(own), HEADS), -torch.inf, dtype=torch.float64)
    for number, (step, ready) in enumerate(zip(steps, prepared(steps, layout, rank, CPU).steps, strict=True)):
        received = [torch.arange(*one) for ranges in step.receives for one in ranges]
        rows = {0: own, number: torch.cat([own[:0], *received]) if number else own}
        for part in ready.parts:
            of_keys = taken(rows, part.keys)
            inputs = query[taken(rows, part.queries)], key[of_keys], value[of_keys]
            new, new_lse = attnreg.varlen_attn(
                *inputs, part.cu_q, part.cu_k, part.max_q, part.max_k, window_size=part.window,
                return_aux=attnreg.AuxRequest(lse=True), backend="math",
            )  # fmt: skip
            places = taken({0: torch.arange(len(own))}, part.queries)
            before = lse[places]
            total = torch.logaddexp(before, new_lse.mT)
            shares = ((x - total).exp()[..., None] for x in (before, new_lse.mT))
            out[places] = sum(share * x for share, x in zip(shares, (out[places], new), strict=True))
            lse[places] = total
    return out, lse


@pytest.mark.each_value("cu_seq", "maker", "way")
@pytest.mark.parametrize("way", [gathering, rotating])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("cu_seq", BATCHES.values(), ids=BATCHES)
def test_the_steps_of_each_rank_give_what_the_whole_batch_gives(cu_seq, maker, way):
    for window, ranks in SPREAD:
        query, key, value, out, lse = whole_batch(tuple(cu_seq), window)
        layout = MAKERS[maker](cu_seq, ranks)
        needs = Needs(layout, *window)
        got = [computed(layout, rank, way(needs, rank), query, key, value) for rank in range(ranks)]
        rows = torch.cat([layout.index(rank) for rank in range(ranks)])
        # `varlen_attn` returns the LSE in float32, by which results are merged here.
        for mine, truth in zip(map(torch.cat, zip(*got, strict=True)), (out, lse), strict=True):
            torch.testing.assert_close(mine, truth[rows], rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("way", [gathering, rotating])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2)])
def test_ranks_send_what_others_receive_in_as_many_steps(window, way):
    for maker, cu_seq in itertools.product(MAKERS.values(), BATCHES.values()):
        layout = maker(cu_seq, 4)
        of_ranks = [way(Needs(layout, *window), rank) for rank in range(4)]
        assert len({len(steps) for steps in of_ranks}) == 1
        for steps in zip(*of_ranks, strict=True):
            for sender, receiver in itertools.product(range(4), range(4)):
                if steps[sender].sends:
                    assert steps[sender].sends[receiver] == steps[receiver].receives[sender]


def test_only_keys_that_are_seen_are_moved():
    layout = contiguous([0, 100, 400], 4)  # each rank has 100 tokens, the first a document
    for way in (gathering, rotating):
        causal, windowed = (
            [
                sum(
                    row_count(ranges)
                    for step in way(Needs(layout, left, 0), rank)
                    for ranges in step.receives
                )
                for rank in range(4)
            ]
            for left in (-1, 10)
        )
        assert causal == [0, 0, 100, 200]
        assert windowed == [0, 0, 10, 10]
    assert len(rotating(Needs(layout, 10, 0), 3)) == 2  # no more than to the next rank


def test_a_document_with_a_window_is_cut_so_that_few_keys_move():
    layout = balanced([0, 40000], 4, is_causal=True, window_size=(1000, 0))
    assert layout.imbalance(1000, 0) < 1.01
    needs = Needs(layout, 1000, 0)
    moved = [sum(row_count(needs.of(rank, source)) for source in range(4)) for rank in range(4)]
    assert moved == [0, 1000, 1000, 1000]


def test_documents_that_are_whole_need_no_communication():
    layout = balanced([0, 10, 20, 30, 40], 2, is_causal=True)
    for way in (gathering, rotating):
        (step,) = way(Needs(layout, -1, 0), 1)
        assert step.sends == ()
        assert [part.queries for part in prepared([step], layout, 1, CPU).steps[0].parts] == [
            (Run(0, 0, 20),)
        ]


def test_a_causal_batch_takes_one_call_a_step_without_windows():
    layout = zigzag([0, 128], 4)
    for rank in range(4):
        here, others = gathering(Needs(layout, -1, 0), rank)
        assert len(grouped(here.spans)) + len(grouped(others.spans)) <= 2
        assert [len(grouped(step.spans)) for step in rotating(Needs(layout, -1, 0), rank)] == [1, 1, 1, 1]
