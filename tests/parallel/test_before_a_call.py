"""Promises about what is looked at before a call: kernels, scales, masks, and what isn't spread."""

import math
from dataclasses import replace

import pytest
import torch
from support import rank_batches as work
from support.known import know

import attnreg
from attnreg.core.contract.backend import Call
from attnreg.core.dispatch import scope
from attnreg.core.selection.decision import Preference
from attnreg.errors import InvalidInputError
from attnreg.parallel.balance import spread_documents
from attnreg.parallel.calls import problem_of
from attnreg.parallel.estimates import Rates
from attnreg.parallel.stepwise import KernelOptions


def test_auto_leaves_out_a_method_whose_calls_no_kernel_of_a_rank_can_run(three_ranks):
    """The ring would take the least memory; its calls without a mask are refused on the last rank."""
    found = three_ranks.run(work.where_kernels_refuse, "auto", work.refuses_what_the_ring_needs)
    assert found[0] in ({"all_gather": 1}, {"all_to_all": 1})
    assert found == found[:1] * 3
    by_name = three_ranks.run(work.where_kernels_refuse, "ring", work.refuses_what_the_ring_needs)
    none = three_ranks.run(work.where_kernels_refuse, "auto", work.refuses_all)
    start = "RanksDifferError: context parallel: rank 2's call is wrong: no attention backend can run this"
    for said in (by_name, none):  # every rank gets the reasons of that one
        assert len(set(said)) == 1
        assert said[0].startswith(start)
        assert "no such window" in said[0]


def problem(length, choice):
    tensors = [torch.zeros(length, 2, 16) for _ in "qkv"]
    ends = torch.tensor([0, length], dtype=torch.int32)
    options = KernelOptions(None, 0.0, choice, True, lambda: None)
    return problem_of([(*tensors, Call(1.0, length, length, (-1, 0), ends, ends))], options)


def only(name):
    return scope.make_choice(Preference("a test", (name,), exclusive=True, required=False))


def test_calls_of_ever_new_lengths_are_decided_about_once_and_refused_with_their_own(decided_alone):
    assert [problem(length, None) for length in range(40, 50)] == [None] * 10
    assert [spec.max_q for spec in decided_alone] == [40]
    for length in (50, 51):
        assert f"({length}, 2, 16)" in str(problem(length, only("FA4")))


def test_a_call_is_refused_for_its_backward_alone(fake, monkeypatch):
    know(monkeypatch, replace(fake("first").backend, backward=None))
    assert "no backward" in str(problem(40, None))


def test_sinks_need_no_kernel_with_a_gradient_of_the_lse(two_ranks):
    assert two_ranks.run(work.sinks_without_a_gradient_of_the_lse) == [["no error"] * 4] * 2


def test_a_scale_that_is_a_tensor_is_a_number_like_others(two_ranks):
    assert two_ranks.run(work.scales) == [(1, 0.0)] * 2


def test_a_context_explains_what_its_calls_take_and_counts_what_they_took(three_ranks):
    for (little, took_little), (much, took_much), (usual, took_usual) in three_ranks.run(work.explained):
        assert little != much == usual
        assert (took_little, took_much, took_usual) == ({little: 2}, {much: 2}, {much: 2})


def test_ranks_with_gpus_of_different_memory_choose_by_the_least(three_ranks):
    """They learn it once for a group, in one exchange more before its first call."""
    little = three_ranks.run(work.explained)[0][0][0]
    found = three_ranks.run(work.unequal_memory, rates=Rates())
    much, little_first = found[0][0][0][0], found[2][0][0][0]
    assert (little_first, found[1][0][0][0]) == (little, much)
    assert much != little
    for rank, (first, second) in enumerate(found):
        assert first == ([little if rank == 2 else much, little], {little: 2}, 2, Rates())
        assert second == ([little, little], {little: 2}, 1, Rates())


@pytest.mark.slow
def test_ranks_choose_by_what_the_slowest_of_them_has_measured(three_ranks):
    """Rounded to the defaults times powers of two, so that noise doesn't change the choice."""
    usual, taken = Rates(), set()
    for link in (1e7, 1e8, 1e9, 1e10, 1e11):
        found = three_ranks.run(work.as_measured, flops=usual.flops / 0.8 * 1.3, link=link, latency=1e-5)
        said, calls, comparisons, rates = found[0]
        steps = (getattr(rates, name) / getattr(usual, name) for name in ("flops", "link", "latency"))
        assert [math.log2(step).is_integer() for step in steps] == [True] * 3
        assert 2**-0.5 < rates.link / link < 2**0.5
        assert (rates.flops, rates.latency, comparisons) == (usual.flops, usual.latency / 4, 3)
        assert [(calls, said[1], rates)] * 3 == [(one[1], one[0][1], one[3]) for one in found]
        assert calls == {said[1]: 2}
        expected = spread_documents([0, 3000, 6000], 3, "zigzag")
        options = {"heads": 12, "head_dim": 8, "dtype": "float32", "rates": rates}
        assert said[1] == attnreg.explain_context_parallel(expected, **options).method
        taken.add(said[1])
    assert len(taken) > 1


def test_what_ranks_measure_is_the_same_on_all_and_leaves_random_numbers_alone(three_ranks):
    found = three_ranks.run(work.measured)
    (_, _, comparisons, rates), _ = found[0]
    usual = Rates()
    assert [(one[3], kept) for one, kept in found] == [(rates, True)] * 3
    assert comparisons == 3
    assert rates.flops < usual.flops  # a CPU's
    assert rates.link < usual.link
    assert (rates.cut, rates.memory, rates.launch) == (usual.cut, usual.memory, usual.launch)


def test_with_given_rates_and_memory_ranks_tell_each_other_nothing(three_ranks):
    for (_, _, comparisons, rates), _ in three_ranks.run(work.measured, rates=Rates(link=1e9), memory=10**9):
        assert (comparisons, rates) == (1, Rates(link=1e9))


@pytest.mark.parametrize("how", [pytest.param("mode", marks=pytest.mark.slow), "memory"])
def test_where_a_rank_cannot_measure_all_go_by_the_defaults_from_then_on(three_ranks, how):
    found = three_ranks.run(work.cannot_measure, how)
    for first, second in found:
        assert (first[2:], second[2:]) == ((2, Rates()), (1, Rates()))
        assert (first[1], second[1]) == (found[0][0][1], found[0][1][1])


@pytest.mark.parametrize(
    ("name", "values"),
    [("memory", (10**9, 10)), ("memory", (None, 10)), ("rates", (Rates(link=1e9), Rates()))],
)
def test_ranks_that_are_to_choose_by_different_estimates_get_an_error_that_names_them(
    two_ranks, name, values
):
    said = two_ranks.run(work.other_estimates, name, *values)
    assert len(set(said)) == 1
    assert said[0].startswith(f"RanksDifferError: context parallel: ranks differ in {name}: rank 0 has ")
    assert "any, rank 1 has 10 bytes" in said[0] or values[0] is not None


def test_one_rank_warns_once_where_calls_have_another_window_than_was_given_for_the_balance(two_ranks):
    expected = (
        "context parallel: got a call with the window (-1, 0), but its batch is balanced for (2, 0): the "
        "call is computed by its own window, and ranks may have unequal work"
    )
    assert two_ranks.run(work.warnings_of_another_window, window_size=(2, 0)) == [[expected], []]
    assert two_ranks.run(work.warnings_of_another_window) == [[], []]


def test_a_context_balances_by_the_window_and_the_width_that_it_is_given(two_ranks):
    cu_seq = [0, *range(4000, 44_001, 1000)]
    plain, windowed, wide = (
        two_ranks.run(work.balance, **options)[0]
        for options in ({}, {"window_size": (50, 0)}, {"width": 4096})
    )
    assert windowed.pieces == spread_documents(cu_seq, 2, window_size=(50, 0)).pieces != plain.pieces
    assert windowed.imbalance(50, 0) < 1.05 < 1.2 < plain.imbalance(50, 0)
    assert wide.pieces == spread_documents(cu_seq, 2, width=4096).pieces
    assert max(wide.rows) - min(wide.rows) < max(plain.rows) - min(plain.rows)


def test_attention_that_is_not_spread_is_an_error_inside_of_a_block(two_ranks):
    """It would be of a rank's own tokens alone, without a word."""
    expected = {
        "dense": "flash_attn_varlen_func with the offsets of the whole batch",
        "qkv": "flash_attn_varlen_func with the offsets of the whole batch",
        "cache": "a call without a cache",
        "deterministic": "deterministic=False",
        "transformers": "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of the whole batch",
        "mask": "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of the whole batch",
    }
    for inside, outside, written in two_ranks.run(work.dense_in_a_block):
        start = (
            "InvalidInputError: context parallel: got a call on this rank's own tokens inside of the `with`"
        )
        for name, text in expected.items():
            assert inside[name].startswith(start), name
            assert text in inside[name]
        assert inside["packed"] == inside["transformers, packed"] == "no error"
        assert set(outside.values()) == {"no error"}
        assert written == 0.0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_call_outside_of_the_block_is_an_error_that_says_so(two_ranks, checkpointed):
    """On a GPU nobody would look how far its offsets reach. A call of the whole batch is no mistake."""
    for said in two_ranks.run(work.after_the_block, checkpointed):
        assert said.startswith(
            "InvalidInputError: cu_seq_q: got the offsets of a batch of 20 tokens that is spread over ranks, "
            "for 10 rows, expected a call inside of the `with` block, which has to last until the backward"
        )


@pytest.mark.parametrize("method", ["all_to_all", "all_gather", "ring"])
def test_a_default_device_changes_nothing(two_ranks, method):
    assert max(two_ranks.run(work.with_another_default_device, method)) < 1e-5


def test_the_end_of_a_block_that_has_not_begun_is_an_error(two_ranks):
    assert (
        two_ranks.run(work.end_without_a_begin)
        == ["InvalidInputError: context: got the end of a `with` block, expected its begin before"] * 2
    )


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), ()])
def test_offsets_in_other_than_one_dimension_are_an_error_that_says_so(shape):
    with pytest.raises(InvalidInputError, match=r"cu_seq: got shape \(.*, in one dimension"):
        spread_documents(torch.zeros(shape, dtype=torch.int32), 2)


@pytest.mark.parametrize("backend", [pytest.param("math", marks=pytest.mark.slow), "cpu"])
def test_heads_dealt_to_ranks_have_the_bits_of_the_whole_batch(two_ranks, backend):
    """Where the policy asks for bits that depend on no batch. Results that are merged have others."""
    assert two_ranks.run(work.bits_of_the_whole_batch, "all_to_all", backend) == [[True] * 4] * 2
    assert not all(map(all, two_ranks.run(work.bits_of_the_whole_batch, "ring", backend)))
