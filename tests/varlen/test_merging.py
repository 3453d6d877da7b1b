"""Promises of `attnreg.merge`: parts of the keys give what all keys give, and so do the gradients."""

import math

import pytest
import torch
from support import truth
from support.packed_calls import LSE
from torch.testing import assert_close

import attnreg
from attnreg.errors import InvalidInputError

HEADS, DIM = 2, 8


def attend(query, key, value, visible):
    """Return output (S, H, D) and LSE (H, S) by plain operations; `visible` is bool, (S, keys)."""
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(DIM)
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value), scores.logsumexp(-1)


def drawn(*lengths, dtype=torch.float64):
    return [torch.randn(length, HEADS, DIM, dtype=dtype) for length in lengths]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_of_the_keys_give_what_all_keys_give(count):
    query, key, value = drawn(7, 12, 12)
    visible = torch.rand(7, 12) < 0.5
    visible[0] = False  # a row that sees no key at all
    visible[1, :4] = False  # and a row that sees none of one part
    size = 12 // count
    parts = [slice(start, start + size) for start in range(0, 12, size)]
    results = [attend(query, key[part], value[part], visible[:, part]) for part in parts]
    out, lse = attnreg.merge(*zip(*results, strict=True))
    expected = attend(query, key, value, visible)
    assert_close((out, lse), expected)
    assert lse[:, 0].tolist() == [-torch.inf] * HEADS
    assert out[0].abs().max() == 0.0


def test_gradients_reach_outputs_and_lses():
    query, first, second = drawn(3, 2, 4)
    sees_first, sees_second = torch.zeros(3, 2, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool)
    sees_first[1:], sees_second[2:] = True, True  # row 0 sees nothing, row 1 a single part, row 2 both
    results = attend(query, first, first, sees_first), attend(query, second, second, sees_second)
    outs, lses = zip(*results, strict=True)
    inputs = [x.detach().requires_grad_() for x in (*outs, *lses)]

    def by_softmax(*inputs):
        scores = torch.stack(inputs[2:])
        weights = scores.softmax(0).nan_to_num(0.0).transpose(-1, -2).unsqueeze(-1)
        return (torch.stack(inputs[:2]) * weights).sum(0), scores.logsumexp(0)

    out, lse = attnreg.merge(inputs[:2], inputs[2:])
    grads = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), inputs, grads)
    assert all(x.isfinite().all() for x in found)
    seen = [x[1:].detach().requires_grad_() for x in inputs[:2]]
    seen += [x[:, 1:].detach().requires_grad_() for x in inputs[2:]]
    results = by_softmax(*(x.masked_fill(x == -torch.inf, -1e300) for x in seen))
    wanted = torch.autograd.grad(results, seen, (grads[0][1:], grads[1][:, 1:]))
    assert_close([*(x[1:] for x in found[:2]), *(x[:, 1:] for x in found[2:])], list(wanted))
    assert not any(x[0].any() for x in found[:2])


def test_documents_with_a_shared_prefix_are_a_merge_of_two_calls():
    """What the page shows: the prefix is one sequence for all queries, each document sees its own tokens."""
    lengths, shared = [4, 1, 6], 5
    total = sum(lengths)
    inputs = [x.requires_grad_() for x in drawn(total, total, total, shared, shared, dtype=torch.float32)]
    query, key, value, shared_key, shared_value = inputs
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    everyone, prefix = (torch.tensor([0, n], dtype=torch.int32) for n in (total, shared))
    own = attnreg.varlen_attn(
        query, key, value, ends, ends, 6, 6, window_size=(-1, 0), return_aux=LSE, backend="math"
    )
    before = attnreg.varlen_attn(
        query, shared_key, shared_value, everyone, prefix, total, shared, return_aux=LSE, backend="math"
    )
    out, lse = attnreg.merge(*zip(own, before, strict=True))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    visible = (document[:, None] == document) & torch.ones(total, total, dtype=torch.bool).tril()
    visible = torch.cat([torch.ones(total, shared, dtype=torch.bool), visible], 1)
    expected = attend(exact[0], torch.cat([exact[3], exact[1]]), torch.cat([exact[4], exact[2]]), visible)
    grads = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), inputs, grads)
    wanted = torch.autograd.grad(expected, exact, [x.double() for x in grads])
    for one, other in zip((out, lse, *found), (*expected, *wanted), strict=True):
        truth.assert_near(one, other)


def test_dense_results_are_merged_alike_and_sums_are_in_float32():
    torch.manual_seed(0)  # a sum at the middle of two numbers of bfloat16 may be rounded to either
    outs = torch.randn(3, 2, 5, HEADS, DIM).bfloat16()
    lses = torch.randn(3, 2, HEADS, 5)
    out, lse = attnreg.merge(outs.unbind(), lses.unbind())
    weights = lses.double().softmax(0).transpose(-1, -2).unsqueeze(-1)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, (outs.double() * weights).sum(0).float().bfloat16())
    assert_close(lse, lses.double().logsumexp(0).float())


def test_what_lies_in_rows_that_see_no_key_counts_nothing():
    outs, lses = drawn(3, 3), [torch.zeros(HEADS, 3, dtype=torch.float64) for _ in range(2)]
    lses[1][:, 2] = -torch.inf
    expected = attnreg.merge(outs, lses)
    outs[1][2] = torch.nan
    assert_close(attnreg.merge(outs, lses), expected)


def test_a_lse_that_is_nan_is_not_hidden():
    lses = torch.zeros(2, HEADS, 3)
    lses[1, 0, 2] = torch.nan
    out, lse = attnreg.merge(drawn(3, 3, dtype=torch.float32), lses.unbind())
    assert lse.isnan().nonzero().tolist() == [[0, 2]]
    assert out[2, 0].isnan().all()
    assert out[:2].isfinite().all()


def test_a_compiled_program_keeps_one_graph():
    outs, lses = drawn(5, 5), [torch.randn(HEADS, 5) for _ in range(2)]
    compiled = torch.compile(lambda *x: attnreg.merge(x[:2], x[2:]), fullgraph=True, backend="eager")
    assert_close(compiled(*outs, *lses), attnreg.merge(outs, lses))


def test_as_many_lses_as_outputs_are_needed():
    outs, lses = drawn(5, 5), [torch.zeros(HEADS, 5)] * 2
    for given in ((outs, lses[:1]), ([], [])):
        counts = f"got {len(given[0])} outputs and {len(given[1])} LSEs, expected as many LSEs as outputs"
        with pytest.raises(InvalidInputError, match=counts):
            attnreg.merge(*given)


@pytest.mark.parametrize(
    ("name", "change", "got", "expected"),
    [
        ("outs", lambda out: None, "None", "a floating-point tensor"),
        ("lses", lambda lse: lse.int(), "torch.int32", "a floating-point tensor"),
        ("outs", lambda out: out[:3], r"\(3, 2, 8\), .*", r"\(5, 2, 8\)"),
        ("lses", lambda lse: lse.t(), r"\(5, 2\), .*", r"\(2, 5\)"),
        ("outs", lambda out: out.half(), ".*float16 on cpu", ".*float32 on cpu"),
        ("lses", lambda lse: lse.to("meta"), ".*on meta", ".*on cpu"),
    ],
)
def test_a_result_unlike_the_others_is_an_error(name, change, got, expected):
    results = {"outs": drawn(5, 5, dtype=torch.float32), "lses": [torch.zeros(HEADS, 5) for _ in range(2)]}
    results[name][1] = change(results[name][1])
    with pytest.raises(InvalidInputError, match=rf"{name}\[1\]: got {got}, expected {expected}"):
        attnreg.merge(**results)


def test_all_outputs_or_lses_may_be_wrong():
    outs, lses = drawn(5, dtype=torch.float32), [torch.zeros(HEADS, 5)]
    with pytest.raises(InvalidInputError, match=r"outs\[0\]: got shape \(2, 8\), expected \(T, H, D_v\)"):
        attnreg.merge([outs[0][0]], lses)
    with pytest.raises(InvalidInputError, match=r"lses\[0\]: got device meta, expected .* cpu"):
        attnreg.merge(outs, [lses[0].to("meta")])
