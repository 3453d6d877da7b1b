"""Promises of `context_parallel` itself: what its block covers, modes, and what wrong uses say."""

import re

import pytest
import torch
from support import ranks as work

from attnreg.parallel.context import MOST_OFFSETS


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
        "ranks": r"InvalidInputError: batch: got a layout for 7 ranks, expected 2: the group has so many",
        "how": r"InvalidInputError: how: got 'zigzags', expected one of .*did you mean 'zigzag'",
        "group": r"InvalidInputError: group: got .*, expected what attnreg.context_parallel returns",
        "rows": r"InvalidInputError: query: got shape \(20, 4, 8\), expected \(10, heads, head dim\)",
        "offsets": r"InvalidInputError: cu_seq_q: got \(0, 8, 20\), expected .* whole batch, \(0, 7, 20\)",
        "list": r"InvalidInputError: cu_seq_q: got \[0, 7, 20\], expected a tensor",
        "device": r"InvalidInputError: device: got query on cpu, key on meta, .*, expected one device",
        "transform": r"UnsupportedInputError: group: got a call in a function transform",
        "dropout": r"UnsupportedInputError: dropout_p: got 0.5, expected none",
        "heads": r"InvalidInputError: heads: got 4 for query and 2 for key, expected equal numbers",
        "shard": r"InvalidInputError: tensor: got 3 tokens, expected the 20 of the whole batch",
        "gather": r"InvalidInputError: tensor: got 3 tokens, expected .*10",
        "gradient": r"InvalidInputError: tensor: got one that needs a gradient, expected .*tensor.detach\(\)",
    }
    for said in two_ranks.run(work.refusals):
        assert said.keys() == expected.keys()
        assert {name: text for name, text in said.items() if not re.match(expected[name], text)} == {}
