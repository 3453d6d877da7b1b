"""Offsets of equally long sequences: the same tensor each time, with a length that the host knows."""

import gc

import torch
from torch.utils.flop_counter import FlopCounterMode

from attnreg.core.launching import regular
from attnreg.core.launching.regular import fills, regular_length, regular_offsets


def test_equal_sizes_have_one_tensor():
    """What is known of it is known. In a dispatch mode they are new; none is an inference tensor."""
    like = torch.empty(1)
    first = regular_offsets(3, 5, like)
    assert first.tolist() == [0, 5, 10, 15]
    assert regular_offsets(3, 5, like) is first
    assert regular_offsets(3, 6, like).tolist() == [0, 6, 12, 18]
    with FlopCounterMode(display=False):
        assert regular_offsets(3, 5, like) is not first
    with torch.inference_mode():
        assert not regular_offsets(3, 7, like).is_inference()


def test_their_length_is_known_and_no_others():
    like = torch.empty(1)
    offsets = regular_offsets(4, 9, like)
    assert regular_length(offsets) == 9
    assert [fills(offsets, rows) for rows in (35, 36, 37)] == [False, True, False]
    assert not fills(offsets.clone(), 36)
    assert regular_length(offsets.clone()) is None
    assert regular_length(offsets[:]) is None  # a view of some of them needn't begin at 0
    with FlopCounterMode(display=False):  # a tensor of a mode may not have these values
        assert regular_length(regular_offsets(4, 9, like)) is None


def test_a_tensor_that_is_gone_leaves_nothing():
    gc.collect()
    before = len(regular._lengths)
    offsets = regular._noted(torch.arange(3), 1)
    assert len(regular._lengths) == before + 1
    del offsets
    gc.collect()
    assert len(regular._lengths) == before
