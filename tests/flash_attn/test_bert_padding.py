"""Taking padding out of a batch and putting it back."""

import pytest
import torch

from attnreg import InvalidInputError
from attnreg.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize("mask", [MASK, MASK.bool()])
def test_rows_that_count_come_one_after_the_other_and_go_back_to_their_places(mask):
    padded = torch.randn(4, 4, 2, 3, requires_grad=True)
    rows, indices, offsets, longest, used = unpad_input(padded, mask)
    assert torch.equal(rows, padded[MASK.bool()])
    assert torch.equal(indices, MASK.flatten().nonzero().flatten())
    assert (offsets.dtype, offsets.tolist(), longest, used.tolist()) == (
        torch.int32,
        [0, 3, 5, 5, 9],
        4,
        [3, 2, 0, 4],
    )
    assert torch.equal(index_first_axis(padded.flatten(0, 1), indices), rows)
    back = pad_input(rows, indices, 4, 4)
    assert torch.equal(back, padded * MASK[:, :, None, None])
    assert torch.equal(
        torch.autograd.grad(back.sum(), padded)[0], MASK[:, :, None, None].expand_as(padded).float()
    )


def test_rows_that_are_kept_without_being_used_are_told_from_those_that_are():
    unused = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    padded = torch.randn(4, 4, 3)
    rows, _, offsets, longest, used = unpad_input(padded, MASK, unused)
    assert torch.equal(rows, padded[(MASK + unused).bool()])
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 4, 7, 8, 12], 4, [3, 2, 0, 4])


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(InvalidInputError) as error:
        unpad_input(torch.randn(4, 5, 3), MASK)
    assert str(error.value) == "attention_mask: got shape (4, 4), expected (4, 5), as hidden_states has"
