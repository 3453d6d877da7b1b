"""Taking padding out of a batch and putting it back."""

import sys
from types import ModuleType

import pytest
import torch

from attnreg import InvalidInputError
from attnreg.flash_attn import bert_padding
from attnreg.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    pad_input,
    unpad_input,
)

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


def test_rows_and_all_rows_for_a_residual_have_one_gradient():
    given = torch.randn(6, 2, 3, requires_grad=True)
    indices = torch.tensor([4, 0, 3])
    rows, residual = index_first_axis_residual(given, indices)
    assert torch.equal(rows, given[indices])
    assert torch.equal(residual, given) and residual.data_ptr() == given.data_ptr()
    of_rows, of_residual = torch.randn_like(rows), torch.randn_like(residual)
    (gradient,) = torch.autograd.grad((rows, residual), given, (of_rows, of_residual))
    expected = of_residual.clone()
    expected[indices] += of_rows
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", ["rearrange", "repeat"])
def test_einops_functions_are_passed_on_where_einops_is_installed(name, monkeypatch):
    einops = ModuleType("einops")
    setattr(einops, name, function := object())
    monkeypatch.setitem(sys.modules, "einops", einops)
    assert getattr(bert_padding, name) is function
    monkeypatch.setitem(sys.modules, "einops", None)  # as where it isn't installed
    with pytest.raises(ImportError) as error:
        getattr(bert_padding, name)
    assert str(error.value) == (
        f"flash_attn.bert_padding.{name} is a function of einops, which can't be imported (import of "
        "einops halted; None in sys.modules); install it with pip install einops"
    )


def test_what_neither_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'attnreg\.flash_attn\.bert_padding' has no attribute"):
        _ = bert_padding.einops
