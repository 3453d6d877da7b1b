"""Rotation by positions compared with a loop over tokens and pairs of dims."""

import pytest
import torch
from support import truth

from attnreg import InvalidInputError
from attnreg.flash_attn.rotary import apply_rotary, apply_rotary_emb

POSITIONS, HALF = 20, 3


def tables():
    angles = torch.rand(POSITIONS, HALF, dtype=torch.float64)
    return angles.cos(), angles.sin()


def by_pairs(head, position, cos, sin, interleaved):
    """Return one token's heads (H, D) rotated, in float64."""
    out = head.double().clone()
    for n in range(HALF):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + HALF)
        c, s = cos[position, n], sin[position, n]
        out[:, a], out[:, b] = head[:, a] * c - head[:, b] * s, head[:, a] * s + head[:, b] * c
    return out


@pytest.mark.parametrize(
    "offsets", [0, 4, torch.tensor([3, 0], dtype=torch.int32)], ids=["0", "4", "of each"]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_token_is_rotated_by_its_position_with_its_gradient(interleaved, offsets):
    cos, sin = tables()
    x = torch.randn(2, 5, 2, 8, requires_grad=True)
    out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
    firsts = [offsets] * 2 if isinstance(offsets, int) else offsets.tolist()
    leaf = x.detach().double().requires_grad_()
    expected = torch.stack([
        torch.stack([by_pairs(leaf[b, t], firsts[b] + t, cos, sin, interleaved) for t in range(5)])
        for b in range(2)
    ])  # fmt: skip
    truth.assert_near(out.detach(), expected.detach(), torch.float32)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    truth.assert_near(x.grad, leaf.grad, torch.float32)


def test_packed_sequences_begin_anew_and_rows_of_none_stay_as_they_are():
    cos, sin = tables()
    x, offsets = torch.randn(9, 2, 8), torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    out = apply_rotary_emb(
        x, cos, sin, cu_seqlens=offsets, seqlen_offsets=torch.tensor([1, 0, 2]), max_seqlen=4
    )
    places = [1, 2, 3, 2, 3, 4, 5]
    expected = torch.stack([by_pairs(x[t], place, cos, sin, False) for t, place in enumerate(places)])
    truth.assert_near(out[:7], expected, torch.float32)
    assert torch.equal(out[7:], x[7:])


def test_in_place_the_tensor_itself_is_returned():
    x, (cos, sin) = torch.randn(2, 5, 2, 8), tables()
    expected = apply_rotary_emb(x, cos, sin)
    assert not torch.equal(x, expected)
    assert apply_rotary_emb(x, cos, sin, inplace=True) is x
    assert torch.equal(x, expected)


WRONG = {
    "cos and sin: got position 22 of sequence 0, expected 0 to 19": {"seqlen_offsets": 18},
    "cos and sin: got position -1 of sequence 0, expected 0 to 19": {"seqlen_offsets": -1},
    "cos and sin: got position 20 of sequence 1, expected 0 to 19": {"seqlen_offsets": torch.tensor([0, 16])},
    "seqlen_offsets: got torch.int64 of shape (3,), expected integers of shape (2,)": {
        "seqlen_offsets": torch.zeros(3, dtype=torch.int64)
    },
    "seqlen_offsets: got 1.5, expected a whole number or a tensor": {"seqlen_offsets": 1.5},
    "cu_seqlens: got [0, 5], expected a tensor": {"cu_seqlens": [0, 5]},
    "cu_seqlens: got torch.float32 of shape (2,), expected int32 of shape (sequences + 1,)": {
        "cu_seqlens": torch.tensor([0.0, 5.0])
    },
    "x, cos and sin: got shapes (2, 5, 2, 8), (20, 3) and (20, 3), expected 3 dimensions, equal tables "
    "(positions, rotary dim / 2) of at most the head dim": {"cu_seqlens": torch.tensor([0, 5])},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_refused(message):
    with pytest.raises(InvalidInputError) as error:
        apply_rotary_emb(torch.randn(2, 5, 2, 8), *tables(), **WRONG[message])
    assert str(error.value) == message


def test_a_position_of_packed_tokens_names_its_sequence():
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    with pytest.raises(InvalidInputError) as error:
        apply_rotary_emb(
            torch.randn(9, 2, 8), *tables(), cu_seqlens=offsets, seqlen_offsets=torch.tensor([1, 0, 17])
        )
    assert str(error.value) == "cos and sin: got position 20 of sequence 2, expected 0 to 19"


def test_tables_on_another_device_are_refused():
    (cos, sin), x = tables(), torch.randn(2, 5, 2, 8)
    with pytest.raises(InvalidInputError) as error:
        apply_rotary_emb(x, cos, sin.to("meta"))
    assert str(error.value) == "cos and sin: got tensors on cpu and meta, expected cpu, where x is"


@pytest.mark.parametrize("first", [-1, POSITIONS - 4])
def test_compiled_on_a_cpu_a_position_that_the_tables_lack_is_an_error(first):
    torch._dynamo.reset()
    x, offsets = torch.randn(2, 5, 2, 8), torch.tensor([0, first], dtype=torch.int32)
    rotate = torch.compile(apply_rotary_emb, backend="aot_eager")
    with pytest.raises(RuntimeError, match="cos and sin, by position: got a number below 0, or one that is"):
        rotate(x, *tables(), seqlen_offsets=offsets)
    torch._dynamo.reset()


def test_the_kernels_function_has_no_gradient_and_rotates_back_on_request():
    cos, sin = tables()
    x = torch.randn(2, 5, 2, 8, requires_grad=True)
    out = apply_rotary(x, cos, sin, 3, None, None, True)
    assert torch.equal(out, apply_rotary_emb(x, cos, sin, True, seqlen_offsets=3)) and not out.requires_grad
    back = apply_rotary(out, cos, sin, seqlen_offsets=3, interleaved=True, inplace=True, conjugate=True)
    assert back is out
    torch.testing.assert_close(back, x.detach())
