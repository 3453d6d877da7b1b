"""Promises of `context_parallel` itself: what its block covers, modes, and what wrong uses say."""

import re

import pytest
import torch
from support import ranks as work

from attnreg.parallel.batch import MOST_OFFSETS


def test_calls_are_spread_inside_of_the_block_alone(two_ranks):
    assert two_ranks.run(work.inside_and_outside) == [[True] * 4] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_keep_nothing_and_give_the_same(two_ranks, mode):
    assert max(two_ranks.run(work.without_gradients, mode)) < 1e-5


def test_what_is_kept_is_bounded_and_what_is_handed_out_is_the_callers(two_ranks):
    assert two_ranks.run(work.in_a_long_run, 40) == [(MOST_OFFSETS, True)] * 2


def test_autocast_reaches_spread_calls_and_gradients_are_float32(two_ranks):
    expected = [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    assert two_ranks.run(work.under_autocast) == [expected] * 2


def test_wrong_uses_say_what_was_got_and_expected_on_every_rank(two_ranks):
    expected = {
        "mesh": r"InvalidInputError: group: got a mesh of dimensions \('a', 'b'\), expected one",
        "no rank": r"InvalidInputError: group: got one that this process isn't in",
        "elsewhere": r"InvalidInputError: group: got one that this process isn't in",
        "no group": r"InvalidInputError: group: got 'world', expected a process group .* or a mesh",
        "method": r"InvalidInputError: method: got 'rin', expected one of .*did you mean 'ring'",
        "rates": r"InvalidInputError: rates: got 5, expected attnreg.parallel.estimates.Rates",
        "memory": r"InvalidInputError: memory: got '8GB', expected a number of bytes",
        "memory, a bool": r"InvalidInputError: memory: got True, expected a number of bytes",
        "unused window": r"InvalidInputError: window_size: got \(3,\) with how='contiguous', expected none",
        "unused mask": r"InvalidInputError: is_causal: got 'yes' with how='zigzag', expected none",
        "unused width": r"InvalidInputError: width: got 99 with how='zigzag', expected none: 'balanced'",
        "window": r"InvalidInputError: window_size: got 'abc', expected \(left, right\), integers",
        "object": r"InvalidInputError: how: got <Anywhere object at 0x7f0[01]>, expected one of",
        "device of explain": r"InvalidInputError: device: got 'cuda:99', expected one of this machine \(",
        "layout and how": r"InvalidInputError: how: got 'zigzag' with a Layout, expected none",
        "layout and mask": r"InvalidInputError: is_causal: got False with a Layout, expected none",
        "ranks": r"InvalidInputError: batch: got a layout for 7 ranks, expected 2: the group has so many",
        "how": r"InvalidInputError: how: got 'zigzags', expected one of .*did you mean 'zigzag'",
        "group": r"InvalidInputError: group: got .*, expected what attnreg.context_parallel\(group, cu_seq\)",
        "mesh=": r"InvalidInputError: mesh: got DeviceMesh\(.*give it to attnreg.context_parallel\(mesh",
        "rows": r"InvalidInputError: query: got shape \(20, 4, 8\), expected \(10, heads, head dim\)",
        "offsets": r"InvalidInputError: cu_seq_q: got \(0, 8, 20\), expected .* whole batch, \(0, 7, 20\)",
        "keys of their own": r"InvalidInputError: cu_seq_k: got \(0, 8, 20\), expected .* \(0, 7, 20\)",
        "int64": r"InvalidInputError: cu_seq_q: got shape \(3,\), torch.int64 on cpu, expected .*, int32",
        "one number": r"InvalidInputError: cu_seq_q: got shape \(\), torch.int64 on cpu, expected",
        "short": r"InvalidInputError: max_q: got 12, expected at least 13, the longest sequence",
        "no number": r"InvalidInputError: max_k: got '20', expected an integer",
        "sparse": r"InvalidInputError: query: got shape \(10, 4, 8\), torch.sparse_coo, expected \(10, heads",
        "list": r"InvalidInputError: cu_seq_q: got \[0, 7, 20\], expected a tensor",
        "device": r"InvalidInputError: device: got query on cpu, key on meta, .*, expected one device",
        "transform": r"UnsupportedInputError: group: got a call in a function transform",
        "dropout": r"UnsupportedInputError: dropout_p: got 0.5, expected none",
        "heads": r"InvalidInputError: heads: got 4 for query and 2 for key, expected equal numbers",
        "shard": r"InvalidInputError: tensor: got 3 tokens, expected the 20 of the whole batch",
        "shard a list": r"InvalidInputError: tensor: got \[1, 2\], expected a tensor",
        "shard a dim": r"InvalidInputError: dim: got 1, expected a dimension of shape \(20,\)",
        "gather": r"InvalidInputError: tensor: got 3 tokens, expected .*10",
        "gradient": r"InvalidInputError: tensor: got one that needs a gradient, expected .*tensor.detach\(\)",
    }
    for said in two_ranks.run(work.refusals):
        assert said.keys() == expected.keys()
        assert {name: text for name, text in said.items() if not re.match(expected[name], text)} == {}


@pytest.mark.parametrize("name", ["layout", "method", "heeds"])
def test_explain_names_itself_where_it_does_not_take_an_argument(two_ranks, name):
    said = two_ranks.run(work.explained_with, **{name: 1})
    assert all(
        f"ContextParallel.explain() got an unexpected keyword argument '{name}'" in one for one in said
    )


def test_a_wrong_call_after_a_right_one_is_an_error_at_once(two_ranks):
    """The others don't wait for this rank's word then, and what it does next is what they do."""
    others, here = two_ranks.run(work.wrong_later)
    assert others == []
    expected = (
        "query: got shape (9, 4, 8)",
        "softcap: got -1.0",
        "dropout_p: got 0.5",
        "tensor: got 9 tokens",
    )
    assert len(here) == len(expected)
    assert [one for one, other in zip(here, expected, strict=True) if other not in one] == []
    assert max(two_ranks.run(work.without_gradients, torch.no_grad)) < 1e-5


@pytest.mark.parametrize("mode", ["grad", "vmap", pytest.param("jvp", marks=pytest.mark.slow), "fake"])
def test_a_call_in_a_transform_on_one_rank_is_an_error_on_every_rank(two_ranks, mode):
    """The other rank doesn't wait for its timeout."""
    said = two_ranks.run(work.in_a_mode_on_one_rank, mode)
    assert len(set(said)) == 1
    what = "query: got a FakeTensor" if mode == "fake" else "group: got a call in a function transform"
    assert said[0].startswith(f"RanksDifferError: context parallel: rank 1's call is wrong: {what}")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.bool, torch.uint8, torch.int16, torch.complex64, torch.bfloat16],
    ids=str,
)
def test_tensors_of_any_dtype_are_gathered(two_ranks, dtype, dim):
    assert two_ranks.run(work.gathered, dtype, dim) == [True] * 2
