"""Promises of calls spread over 2 and 3 processes: each way gives what the whole batch gives."""

import itertools

import pytest
import torch
from support import flash
from support import ranks as work

METHODS = ["all_to_all", "all_gather", "ring"]
BATCH = list(itertools.accumulate([0, 5, 0, 32, 3, 21]))
WINDOWS = [(-1, 0), (-1, -1), (7, 0), (3, 2)]

by_each_method = pytest.mark.parametrize("method", METHODS)
# What two ranks do is held by the other tests.
on_three_ranks = pytest.mark.parametrize(
    "ranks", [pytest.param("two_ranks", marks=pytest.mark.slow), "three_ranks"], indirect=True
)


@pytest.fixture(params=["two_ranks", "three_ranks"])
def ranks(request):
    return request.getfixturevalue(request.param)


def assert_ran(counts, named):
    """All ranks that have rows ran both directions, on no other backend."""
    assert {name for one in counts for name in one} == {named}
    assert all(min(one[named].values()) for one in counts if one)


@pytest.mark.pairwise("ranks", "method", "window")
@pytest.mark.parametrize("window", WINDOWS)
@by_each_method
def test_results_and_gradients_are_those_of_the_whole_batch(ranks, method, window):
    heads = 2 * len(ranks)
    for how in ("contiguous", "zigzag", "balanced"):
        counts = ranks.run(work.compare, method, BATCH, how=how, window=window, heads=(heads, heads // 2))
        assert_ran(counts, "math")


@pytest.mark.each_value("ranks", "method", "dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@by_each_method
def test_results_are_as_precise_as_the_dtype(ranks, method, dtype):
    heads = 2 * len(ranks)
    options = {"window": (-1, 0), "how": "zigzag", "heads": (heads, heads), "dtype": dtype}
    assert_ran(ranks.run(work.compare, method, BATCH, **options), "math")


@on_three_ranks
@by_each_method
def test_the_cpu_backend_computes_for_each_rank(ranks, method):
    """Its backward rests on the LSE and the output that it is given: those of all keys."""
    heads = 2 * len(ranks)
    for window in ((-1, 0), (7, 0)):
        options = {"window": window, "how": "zigzag", "heads": (heads, heads), "dims": (16, 16)}
        counts = ranks.run(work.compare, method, BATCH, backend="cpu", with_lse=False, **options)
        assert_ran(counts, "cpu")


@pytest.mark.each_value("ranks", "method", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@by_each_method
def test_a_gradient_of_the_lse_reaches_kernels_that_are_given_it_in_columns(ranks, method, dtype):
    """Also beside head dims that are padded for them."""
    options = {"window": (-1, 0), "how": "balanced", "heads": (2 * len(ranks), len(ranks)), "dtype": dtype}
    for dims in ((16, 16), (13, 13)):
        assert_ran(ranks.run(flash.spread, method, BATCH, dims=dims, **options), "flash-like")


@pytest.mark.pairwise("ranks", "method", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@by_each_method
def test_the_cpu_backend_serves_sinks_of_each_rank(ranks, method, dtype):
    """Without a gradient of the LSE; in 16 bits also where a rank computes few of a row's keys."""
    heads = 2 * len(ranks)
    options = {"window": (-1, 0), "how": "zigzag", "heads": (heads, heads), "dims": (16, 16), "dtype": dtype}
    counts = ranks.run(work.compare, method, BATCH, backend="cpu", with_lse=False, sinks=True, **options)
    assert_ran(counts, "cpu")


@on_three_ranks
@by_each_method
def test_options_reach_every_part(ranks, method):
    heads = 2 * len(ranks)
    options = {"how": "balanced", "window": (-1, 0), "heads": (heads, 1), "dims": (8, 6)}
    assert_ran(ranks.run(work.compare, method, BATCH, softcap=2.0, sinks=True, **options), "math")


@by_each_method
def test_a_program_may_write_to_its_ranks_output(two_ranks, method):
    assert two_ranks.run(work.written_to, method) == [(True, True)] * 2


def test_heads_in_groups_come_back_in_their_places(ranks):
    """As large messages are cut; here each head of a rank is a group."""
    options = {"how": "zigzag", "window": (-1, 0), "heads": (8 * len(ranks), 4 * len(ranks)), "dims": (8, 6)}
    counts = ranks.run(work.compare, "all_to_all", BATCH, enough=1, **options)
    assert [one["math"] for one in counts] == [{"forward": 4, "backward": 4}] * len(ranks)


@pytest.mark.each_value("ranks", "how", "window")
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (5, 2)], ids=str)
@pytest.mark.parametrize("how", ["contiguous", "zigzag"])
def test_all_gather_computes_heads_in_groups_where_keys_are_received(ranks, how, window):
    """As large messages are cut; what needs no keys of others stays one call."""
    options = {"how": how, "window": window, "heads": (8, 4), "dims": (8, 6), "sinks": True}
    whole, grouped = (
        [one["math"] for one in ranks.run(work.compare, "all_gather", BATCH, **options, **more)]
        for more in ({}, {"enough": 1, "most_rounded": 1})
    )
    further = [one["forward"] - other["forward"] for one, other in zip(grouped, whole, strict=True)]
    assert all(one["backward"] == one["forward"] for one in grouped)
    assert all(count % 3 == 0 for count in further)  # 4 calls in place of one
    assert max(further) >= 3


@on_three_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_rows_with_many_results_are_summed_in_float32(ranks, method, dtype):
    """As those of many ranks are; here it is done from the second result on."""
    options = {"how": "zigzag", "window": (-1, -1), "dtype": dtype, "most_rounded": 1}
    assert_ran(ranks.run(work.compare, method, BATCH, **options), "math")


@pytest.mark.pairwise("ranks", "method", "cu_seq")
@pytest.mark.parametrize("cu_seq", [[0, 2, 3], [0, 0, 1, 1], [0, 0], [0]], ids=str)
@by_each_method
def test_ranks_may_have_no_tokens(ranks, method, cu_seq):
    heads = len(ranks)
    for how in ("contiguous", "zigzag", "balanced"):
        options = {"how": how, "window": (-1, 0), "heads": (heads, heads), "with_lse": cu_seq[-1] > 0}
        ranks.run(work.compare, method, cu_seq, **options)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name != "all_gather")) for name in METHODS]
)
@pytest.mark.parametrize("heads", [(12, 3), pytest.param((12, 12), marks=pytest.mark.slow)], ids=str)
def test_a_rank_takes_no_more_memory_than_its_share_and_what_is_said(three_ranks, method, heads):
    """Its share are its results. What is said may be too much by a factor, as keys aren't needed at once."""
    for cu_seq, how, window in (
        ([0, 6144], "zigzag", (-1, 0)),
        ([0, 2500, 2500, 4000, 9000], "balanced", (-1, 0)),
        ([0, 6144], "contiguous", (1024, 0)),
    ):
        options = {"how": how, "window": window, "heads": heads, "slack": 1.15}
        measured = three_ranks.run(work.memory, method, cu_seq, **options)
        assert [
            (peak, results, estimate)
            for peak, results, estimate in measured
            if peak > 1.15 * results + estimate
        ] == []
        assert max(peak for peak, _, _ in measured) > 0.5 * measured[0][2]


@on_three_ranks
def test_ranks_that_disagree_all_get_an_error_that_names_both(ranks):
    """None waits for the others: the next call, on which they agree, goes through."""
    last = len(ranks) - 1
    offsets = ranks.run(work.disagree, cu_seq={last: [0, 6, 12]})
    heads = ranks.run(work.disagree, heads={last: 2 * len(ranks)})
    backends = ranks.run(work.disagree, backend={last: "cpu"})
    methods = ranks.run(work.disagree, method={last: "ring"})
    dtypes = ranks.run(work.disagree, dtype={last: torch.float64})
    gradients = ranks.run(work.disagree, gradient={last: False})
    wrong = ranks.run(work.disagree, softcap={last: -1.0})
    no_batch = ranks.run(work.disagree, cu_seq={last: [0, 7, 5]})
    first = ranks.run(work.disagree, memory={0: "much"})
    no_offsets = ranks.run(work.disagree, ends={last: torch.tensor(5)})
    sides = (
        (offsets, "(0, 5, 12)", "(0, 6, 12)"),
        (heads, str(len(ranks)), str(2 * len(ranks))),
        (backends, "math", "cpu"),
        (methods, "all_gather", "ring"),
        (dtypes, "float32", "float64"),
        (gradients, "True, True, True", "False, False, False"),
    )
    for said, here, there in sides:
        assert len(set(said)) == 1
        assert said[0].startswith("RanksDifferError: context parallel: ranks differ in ")
        before, after = said[0].split(f", rank {last} has ")
        assert here in before.partition("rank 0 has")[2]
        assert there in after
    for said, rank, text in (
        (wrong, last, "softcap: got -1.0"),
        (no_batch, last, "cu_seq: got [0, 7, 5]"),
        (first, 0, "memory: got 'much'"),
        (no_offsets, last, "cu_seq_q: got shape ()"),
    ):
        assert len(set(said)) == 1
        assert said[0].startswith(f"RanksDifferError: context parallel: rank {rank}'s call is wrong: {text}")
    both = ranks.run(work.disagree, softcap={0: -1.0}, memory={last: -1})
    assert len(set(both)) == 1
    assert both[0].startswith("RanksDifferError: context parallel: rank 0's call is wrong: softcap: got -1.0")
    assert f"\nrank {last}'s call is wrong: memory: got -1" in both[0]


def test_ranks_that_gather_what_differs_all_get_an_error_that_names_both(ranks):
    """None gets rows in a wrong order, or is ended by gloo as it receives more than it has asked for."""
    last = len(ranks) - 1
    for different, here, there in (
        (
            {"how": "zigzag"},
            "rank by rank from 0 to 5 and 5 to 12, ",
            "rank by rank from 0 to 5 and 5 to 6, ",
        ),
        ({"width": 3}, "shape of a row: rank 0 has (2,)", "(3,)"),
        ({"dtype": torch.float64}, "torch.float32", "torch.float64"),
    ):
        options = {name: {last: value} for name, value in different.items()}
        said = ranks.run(work.gather_what_differs, **options)
        assert len(set(said)) == 1
        assert said[0].startswith("RanksDifferError: context parallel: ranks differ in ")
        before, after = said[0].split(f", rank {last} has ")
        assert here in before
        assert there in after
    said = ranks.run(work.gather_what_differs, more={last: 1})
    text = f"rank {last}'s call is wrong: tensor: got 13 tokens, expected the 12 of this rank"
    assert said == [f"RanksDifferError: context parallel: {text}"] * len(ranks)


def test_a_call_that_is_wrong_on_every_rank_is_an_error_on_every_rank(ranks):
    everywhere = range(len(ranks))
    said = ranks.run(work.disagree, softcap=dict.fromkeys(everywhere, -1.0))
    assert all(one.startswith("InvalidInputError: softcap") for one in said)
    said = ranks.run(work.disagree, method=dict.fromkeys(everywhere, "rings"))
    assert all("method: got 'rings', expected one of" in one and "ring" in one for one in said)


@on_three_ranks
@by_each_method
def test_a_call_that_some_ranks_have_no_kernel_for_is_an_error_on_every_rank(ranks, method):
    """Ranks without tokens call no kernel; they would go on and wait for the others for ever."""
    said = ranks.run(work.where_kernels_are_few, method, causal=False, backward=True)
    if method == "all_to_all":  # all ranks compute all tokens
        assert all(one.startswith("UnsupportedInputError: no attention backend can run this") for one in said)
        return
    last = len(ranks) - 1
    assert len(set(said)) == 1
    start = (
        f"RanksDifferError: context parallel: rank {last}'s call is wrong: no attention backend can run this"
    )
    assert said[0].startswith(start)
    assert "few" in said[0].partition("\n")[2]  # with the reasons, on every rank


@on_three_ranks
@by_each_method
def test_a_backend_without_a_backward_serves_where_no_gradient_is_recorded(ranks, method):
    options = {"causal": True, "backward": False}
    shapes = ranks.run(work.where_kernels_are_few, method, mode=torch.no_grad, **options)
    assert shapes == [(0, 2 * len(ranks), 8)] * (len(ranks) - 1) + [(12, 2 * len(ranks), 8)]
    said = ranks.run(work.where_kernels_are_few, method, **options)
    assert ["no attention backend can run this" in one for one in said] == [True] * len(ranks)


def test_a_rank_whose_kernel_raises_gets_its_error_and_the_others_the_timeout(tmp_path):
    started = work.Ranks(2, tmp_path / "store", patience=1.0)
    waiting, failing = started.run(work.a_kernel_raises)
    assert failing == "out of memory, or so"
    assert "Timed out waiting 1000ms" in waiting
    started.close()


def test_a_rank_that_dies_ends_the_others(tmp_path):
    started = work.Ranks(2, tmp_path / "store", patience=4.0)
    started.run(work.compare, "ring", BATCH)
    started.kill(1)
    with pytest.raises(AssertionError, match=r"rank 0: (.|\n)*Connection closed by peer"):
        started.run(work.compare, "ring", BATCH, only=[0])
    started.close()
