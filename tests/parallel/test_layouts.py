"""Promises of layouts: each token is on one rank, costs are counted right, and `balanced` balances them."""

import functools
import itertools
import random

import pytest
import torch

import attnreg
from attnreg.errors import InvalidInputError
from attnreg.parallel.balance import balanced, spread_documents
from attnreg.parallel.estimates import Rates
from attnreg.parallel.layout import Layout, Piece, contiguous, visible_pairs, zigzag
from attnreg.parallel.needs import Needs

BATCHES = {
    "one document": [0, 64],
    "several": [0, 5, 5, 37, 40, 64],
    "many": list(itertools.accumulate([0, 3, 1, 0, 9, 27, 2, 2, 31, 8])),
    "shorter than the ranks": [0, 2, 3],
    "empty": [0, 0],
    "none": [0],
}
MAKERS = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "balanced": balanced,
    "balanced causal": lambda cu_seq, ranks: balanced(cu_seq, ranks, is_causal=True, per_token=4.0),
}


@pytest.mark.each_value("cu_seq", "maker", "ranks")
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("cu_seq", BATCHES.values(), ids=BATCHES)
def test_every_token_is_on_one_rank_and_knows_its_position(cu_seq, maker, ranks):
    layout = MAKERS[maker](cu_seq, ranks)
    rows = torch.cat([layout.index(rank) for rank in range(ranks)])
    assert sorted(rows.tolist()) == list(range(cu_seq[-1]))
    assert layout.rows == tuple(len(layout.index(rank)) for rank in range(ranks))
    positions = [row - begin for begin, end in itertools.pairwise(cu_seq) for row in range(begin, end)]
    got = torch.cat([layout.positions(rank) for rank in range(ranks)])
    assert got.tolist() == [positions[row] for row in rows]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 5), (-1, 4), (0, 0), (99, 99)])
def test_visible_pairs_are_as_many_as_a_mask_shows(window):
    first, last = 3, 19
    rows = torch.arange(first, last)
    distance = rows[None] - rows[:, None]
    seen = (distance >= -(window[0] if window[0] >= 0 else 99)) & (
        distance <= (window[1] if window[1] >= 0 else 99)
    )
    for begin, end in itertools.combinations(range(first, last + 1), 2):
        counted = visible_pairs(begin, end, first, last, *window)
        assert counted == int(seen[begin - first : end - first].sum())


def test_zigzag_gives_all_ranks_the_same_work_of_a_causal_document():
    assert zigzag([0, 4096], 4).imbalance(right=0) < 1.001
    assert contiguous([0, 4096], 4).imbalance(right=0) > 1.7


def test_balanced_cuts_no_document_where_that_is_not_needed():
    layout = balanced([0, 10, 20, 30, 40], 2, is_causal=True)
    assert layout.cut == {}
    assert layout.imbalance(right=0) == 1.0


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_balanced_comes_near_the_mean_whatever_the_documents(ranks, is_causal):
    generator = torch.Generator().manual_seed(ranks)
    right = 0 if is_causal else -1
    for most in (50, 500, 5000):
        lengths = torch.randint(0, most, (12,), generator=generator).tolist()
        cu_seq = list(itertools.accumulate([0, 8000, *lengths]))
        layout = balanced(cu_seq, ranks, is_causal=is_causal)
        assert layout.imbalance(right=right) < 1.05
        assert len(layout.cut) <= 2 * ranks


def test_balanced_counts_what_tokens_cost_outside_of_attention():
    cu_seq = [0, *range(100, 1021, 10)]  # 5,050 pairs in one document, 5,060 in 92
    by_attention, by_both = (balanced(cu_seq, 2, is_causal=True, per_token=x) for x in (0.0, 1e6))
    assert sorted(by_attention.rows) == [100, 920]
    assert by_attention.imbalance(right=0) < 1.01
    assert sorted(by_both.rows) == [510, 510]


def test_balanced_takes_the_windows_that_varlen_attn_takes():
    layouts = [spread_documents([0, 30, 90], 3, window_size=window) for window in (None, (-1, -1))]
    assert layouts[0].pieces == layouts[1].pieces
    with pytest.raises(InvalidInputError, match=r"window_size: got \(3,\), expected \(left, right\)"):
        spread_documents([0, 30, 90], 3, window_size=(3,))


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([[Piece(0, 0, 4)], []], "got rows up to 4, expected all 8"),
        ([[Piece(0, 0, 4)], [Piece(1, 3, 8)]], "expected each row once"),
        ([[Piece(0, 0, 8)], []], "expected rows of one document"),
        ([[Piece(0, 0, 4), Piece(5, 4, 8)], []], "expected rows of one document"),
    ],
)
def test_a_layout_that_loses_or_repeats_a_row_is_refused(pieces, said):
    with pytest.raises(InvalidInputError, match=said):
        Layout((0, 4, 8), tuple(map(tuple, pieces)))


def test_a_layout_whose_offsets_decrease_is_refused():
    with pytest.raises(InvalidInputError, match="none less than before"):
        Layout((0, 5, 3, 8), ((Piece(0, 0, 5),), (Piece(2, 5, 8),)))


@pytest.mark.parametrize(
    "pieces", [None, 5, [(0, 0, 8)], [[5]], [[(0, 0.0, 8)]], [[(0, 0)]], [[(0, "0", 8)]]], ids=str
)
def test_pieces_that_are_none_are_refused_with_what_was_expected(pieces):
    with pytest.raises(InvalidInputError, match=r"pieces: got .*, expected for each rank some attnreg.Piece"):
        Layout((0, 8), pieces)


def test_layouts_of_lists_and_tuples_are_the_same():
    by_hand, made = Layout([0, 8], [[(0, 0, 4)], [(0, 4, 8)]]), contiguous([0, 8], 2)
    assert (by_hand.cu_seq, by_hand.pieces) == (made.cu_seq, made.pieces)
    assert by_hand.rows == (4, 4)


@pytest.mark.parametrize("rank", [2, -1, "a"])
def test_a_rank_that_there_is_not_is_refused(rank):
    layout = contiguous([0, 8], 2)
    for call in (layout.index, layout.positions, layout.cost):
        with pytest.raises(InvalidInputError, match=f"rank: got {rank!r}, expected one from 0 to 1"):
            call(rank)


@pytest.mark.parametrize("bound", [-2, "a", 1.5])
def test_a_window_that_is_none_is_refused(bound):
    for call in (contiguous([0, 8], 2).imbalance, functools.partial(contiguous([0, 8], 2).cost, 1)):
        with pytest.raises(InvalidInputError, match=r"window_size: got .*, expected \(left, right\)"):
            call(bound)


@pytest.mark.parametrize("width", [-1, "a", None, float("nan")])
def test_a_width_that_is_none_is_refused(width):
    for how in ("balanced", "zigzag"):
        with pytest.raises(
            InvalidInputError, match=f"width: got {width!r}, expected the width of a model, or 0"
        ):
            spread_documents([0, 8], 2, how, width=width)


@pytest.mark.parametrize("cu_seq", [[1, 4], [0, 4, 3], [], ["a"], [0, 1.5]])
def test_offsets_that_are_none_are_refused_with_what_was_expected(cu_seq):
    with pytest.raises(InvalidInputError, match=r"cu_seq: got .*expected integers from 0 on"):
        contiguous(cu_seq, 2)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True])
def test_a_number_of_ranks_that_is_none_is_refused(ranks):
    with pytest.raises(InvalidInputError, match="ranks: got"):
        zigzag([0, 4], ranks)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"how": ["zigzag"]}, r"how: got \['zigzag'\], expected one of .*; did you mean 'zigzag'"),
        ({"how": None}, "how: got None, expected one of "),
        ({"width": "64"}, "width: got '64', expected the width of a model, or 0"),
        ({"width": -1}, "width: got -1, expected"),
        ({"width": float("nan")}, "width: got nan, expected"),
        ({"width": True}, "width: got True, expected"),
        ({"method": "rin"}, r"method: got 'rin', expected one of .*did you mean 'ring'"),
        ({"how": "zigzag", "window_size": "abc"}, "window_size: got 'abc', expected"),
    ],
)
def test_arguments_of_spread_documents_that_are_wrong_are_refused(given, said):
    with pytest.raises(InvalidInputError, match=f"^{said}"):
        spread_documents([0, 4], 2, **given)


@pytest.mark.parametrize("window", [(-1, 0), (4096, 0)], ids=["causal", "window of 4,096"])
@pytest.mark.parametrize(("ranks", "link"), [(2, 231e9), (8, 231e9), (16, 45e9), (64, 45e9)])
def test_balanced_takes_hardly_longer_than_contiguous_by_the_estimate(ranks, link, window):
    """Of drawn documents; on many ranks slices of them that even out the work may need too many keys."""
    draw, shorter = random.Random(ranks), 0
    for each in (256, 2048, 4096, 16384):
        lengths = [0]
        while sum(lengths) < ranks * each:
            lengths.append(min(draw.randint(500, 20000), ranks * each - sum(lengths)))
        seconds = []
        for how in ("balanced", "contiguous"):
            layout = spread_documents(list(itertools.accumulate(lengths)), ranks, how, window_size=window)
            found = attnreg.explain_context_parallel(
                layout, heads=64, heads_k=8, head_dim=128, window_size=window, rates=Rates(link=link)
            )
            seconds.append(min(one.seconds for one in found.methods if not one.refusal))
        assert 0.9 * seconds[0] <= seconds[1]  # by less than a tenth, equal work is preferred
        shorter += seconds[0] < 0.97 * seconds[1]
    assert shorter


@pytest.mark.parametrize("method", ["auto", "all_to_all", "all_gather", "ring"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("ends", [[0, 4096], [0, 65536], [0, 500, 20500, 21000, 65536]], ids=str)
def test_balanced_gives_ranks_of_a_node_equal_work(ends, ranks, method):
    assert spread_documents(ends, ranks, method=method).imbalance(-1, 0) < 1.06


def test_over_nodes_tokens_that_are_few_stay_in_order_but_for_a_method_that_waits_for_the_slowest():
    """By all_to_all ranks have the same work in any layout, and needn't put rows in order."""
    ends = [0, *range(1000, 512 * 64, 1000), 512 * 64]
    usual = spread_documents(ends, 64)
    assert usual.pieces == contiguous(ends, 64).pieces
    assert usual.imbalance(-1, 0) > 1.4
    assert spread_documents(ends, 64, method="ring").imbalance(-1, 0) < 1.1


def test_consecutive_tokens_of_equal_cost_need_few_keys_with_a_window():
    cu_seq, window = [0, 30_000, 30_700, 70_000], (1000, 0)
    layout = spread_documents(cu_seq, 16, window_size=window)
    assert layout.imbalance(*window) < 1.05
    assert all(one.end == other.begin for one, other in itertools.pairwise(itertools.chain(*layout.pieces)))
    moved = Needs(layout, *window).moved
    assert int(moved.sum(0).max()) <= 1000
    assert int(moved.sum(1).max()) <= 1000
