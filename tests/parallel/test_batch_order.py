"""Promises to programs with several batches: ranks that use them in different orders get an error."""

import datetime
import re

import pytest
from support import rank_batches as work
from support.ranks import Ranks

METHODS = ["all_to_all", "all_gather", "ring"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_known_batches_in_another_order_are_an_error_on_every_rank(two_ranks, method, what):
    (here, difference), (there, _) = two_ranks.run(work.out_of_order, method, what)
    assert here == there
    assert here.startswith("RanksDifferError: context parallel: ranks differ in offsets: rank 0 has (0, ")
    assert difference < 1e-5


def test_parts_of_batches_are_not_gathered_in_another_order(three_ranks):
    for said, difference in three_ranks.run(work.out_of_order, "ring", "gather"):
        assert said.startswith("RanksDifferError: context parallel: ranks differ in offsets")
        assert difference < 1e-5


@pytest.mark.parametrize("what", ["forward", "backward", "gather"])
def test_batches_of_the_same_lengths_are_told_apart(two_ranks, what):
    """By a number that they get when ranks first compare them."""
    for said, _ in two_ranks.run(work.out_of_order, "all_gather", what, second=(0, 7, 20)):
        assert said.startswith(
            "RanksDifferError: context parallel: ranks differ in batch: rank 0 has number "
        )
        assert "of those compared before, rank 1 has number " in said


@pytest.mark.slow
def test_a_rank_that_turns_to_another_batch_alone_waits_for_the_timeout_as_the_others_do(tmp_path):
    """The first to give up closes its connections."""
    started = Ranks(2, tmp_path / "store", patience=1.0)
    said = started.run(work.another_batch_alone)
    assert all(re.search("Timed out waiting 1000ms|timeout caused|closed by peer", one) for one in said), said
    compared = "context parallel: this rank compares its forward with the others', and not all came: "
    assert sum(one.startswith(compared) for one in said) == 1
    started.close()


def test_a_wrong_call_of_one_rank_where_ranks_compare_is_an_error_on_every_rank(three_ranks):
    said = three_ranks.run(work.wrong_where_ranks_compare)
    assert len(set(said)) == 1
    assert said[0].startswith("RanksDifferError: context parallel: rank 2's call is wrong: query: got shape")


def test_ranks_compare_only_where_the_batch_is_another_one(two_ranks):
    assert two_ranks.run(work.exchanges) == [[0, 6]] * 2


def test_ranks_compare_before_each_call_where_torch_does(two_ranks):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL: six forwards and backwards."""
    assert two_ranks.run(work.exchanges, detail=True) == [[12, 12]] * 2


def test_ranks_that_compare_wait_as_long_as_the_group_does(two_ranks):
    assert two_ranks.run(work.timeouts) == [[datetime.timedelta(seconds=30)] * 2] * 2


@pytest.mark.slow
def test_ranks_compare_where_a_gather_of_the_others_does_not_reach(tmp_path):
    """Gloo takes a message that is shorter than what is awaited: rows would be those of the comparison."""
    started = Ranks(2, tmp_path / "store", patience=1.0)
    said = started.run(work.another_batch_alone, gathers=True)
    assert all(re.search("Timed out waiting 1000ms|timeout caused|closed by peer", one) for one in said), said
    started.close()
