"""Promises of `attnreg.varlen_attn`: output, LSE and gradients are right with every option and input."""

import numpy as np
import pytest
import torch
from support import truth
from support.options import NUMBERS, number_of
from support.packed_calls import (
    CAUSAL,
    LENGTHS_K,
    LENGTHS_Q,
    LSE,
    UNBOUNDED,
    assert_right,
    integers,
    offsets,
    random_like,
    run_and_compare,
    total,
)

import attnreg

# ---- options

SLOPES, BY_SEQUENCE = torch.tensor([0.5, 0.25, 0.1, -1.0]), torch.tensor([[1.0], [2.0], [3.0], [4.0]])

# The options, and what of them the reference has to know.
OPTIONS = {
    "none": ({}, {}),
    "is_causal": ({"is_causal": True}, {"window": CAUSAL}),
    "causal window": ({"window_size": CAUSAL}, {"window": CAUSAL}),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1)}),
    "window as a list": ({"window_size": [2, 1]}, {"window": (2, 1)}),
    "no window": ({"window_size": None}, {}),
    "left window": ({"window_size": (2, -1)}, {"window": (2, -1)}),
    "right window": ({"window_size": (-1, 1)}, {"window": (-1, 1)}),
    "causal and left window": ({"window_size": (2, -1), "is_causal": True}, {"window": (2, 0)}),
    "own key alone": ({"window_size": (0, 0)}, {"window": (0, 0)}),
    "window beyond all keys": ({"window_size": (100, 100)}, {}),
    "window of NumPy integers": ({"window_size": (np.int64(2), np.int32(1))}, {"window": (2, 1)}),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "scale 0": ({"scale": 0.0}, {"scale": 0.0}),
    "negative scale": ({"scale": -0.4}, {"scale": -0.4}),
    "causal, scale 0": ({"is_causal": True, "scale": 0.0}, {"window": CAUSAL, "scale": 0.0}),
    "causal, negative scale": ({"is_causal": True, "scale": -0.4}, {"window": CAUSAL, "scale": -0.4}),
    "num_splits": ({"num_splits": 2}, {}),
    "softcap": ({"softcap": 0.8}, {"softcap": 0.8}),
    "slopes": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES}),
    "slopes of each sequence": (
        {"alibi_slopes": SLOPES * BY_SEQUENCE, "window_size": CAUSAL},
        {"slopes": SLOPES * BY_SEQUENCE, "window": CAUSAL},
    ),
    "slopes, softcap and scale": (
        {"alibi_slopes": SLOPES, "softcap": 0.8, "scale": 0.7},
        {"slopes": SLOPES, "softcap": 0.8, "scale": 0.7},
    ),
    "no softcap": ({"softcap": None}, {}),
    "softcap, scale and window": (
        {"softcap": 2, "scale": -1.5, "window_size": (2, 1)},
        {"softcap": 2.0, "scale": -1.5, "window": (2, 1)},
    ),
}


@pytest.mark.parametrize(("options", "meant"), OPTIONS.values(), ids=OPTIONS)
def test_every_option_gives_the_right_output_lse_and_gradients(front, packed, options, meant):
    run_and_compare(packed(LENGTHS_Q, LENGTHS_K, dtype=torch.float64), meant, **options)


@pytest.mark.parametrize("row", [row for row in NUMBERS if row.argument], ids=lambda row: row.name)
def test_a_number_counts_in_each_call_whatever_the_call_before_had(front, packed, row):
    given, options = packed(LENGTHS_Q, LENGTHS_K), {row.argument: number_of(row)}

    def out(**options):
        torch.manual_seed(0)
        return attnreg.varlen_attn(*given, **options)

    if front == "custom op" and not row.in_op:
        with pytest.raises(attnreg.UnsupportedInputError):
            out(**options)
        return
    plain, other = out(), out(**options)
    assert torch.equal(plain, other) == (row.name == "num_splits")  # which changes no result
    for _ in range(3):
        assert torch.equal(out(), plain)
        assert torch.equal(out(**options), other)


@pytest.mark.each_value("front", "window", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [UNBOUNDED, CAUSAL])
def test_every_dtype_is_right(front, packed, dtype, window):
    given = packed(LENGTHS_Q, LENGTHS_K, dtype=dtype)
    out, _ = run_and_compare(given, {"window": window}, window_size=window)
    assert out.dtype == dtype


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3)])
def test_several_query_heads_share_a_key_head(front, packed, heads):
    run_and_compare(packed(LENGTHS_Q, LENGTHS_K, heads=heads[0], heads_k=heads[1]), enable_gqa=True)


def test_the_values_may_have_another_head_dim(front, packed):
    query, key, value, *rest = packed(LENGTHS_Q, LENGTHS_K)
    run_and_compare((query, key, value.detach()[..., :5].requires_grad_(), *rest))


@pytest.mark.parametrize("window", [UNBOUNDED, CAUSAL, (2, 1)])
def test_a_longest_length_that_is_too_large_changes_nothing(front, packed, window):
    *inputs, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K)
    exact = attnreg.varlen_attn(*inputs, max_q, max_k, window_size=window)
    # As NumPy's integers, which lengths may be as well.
    roomy = attnreg.varlen_attn(*inputs, np.int64(max_q + 9), np.int32(max_k + 9), window_size=window)
    assert torch.equal(exact, roomy)


@pytest.mark.parametrize("used", [(7, 4, 8, 1), (3, 0, 8, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("window", [UNBOUNDED, CAUSAL])
def test_seqused_k_counts_keys_forward_and_backward(front, packed, used, window):
    meant = {"used": used, "window": window}
    run_and_compare(packed(LENGTHS_Q, LENGTHS_K), meant, seqused_k=integers(*used), window_size=window)


TABLE, USED = integers(6, 2, 0, 0, 1, 3, 5, 4).view(4, 2), (7, 4, 0, 5)


@pytest.mark.parametrize("options", [{}, {"window_size": CAUSAL}, {"num_splits": 2}], ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_a_block_table_reads_pages(front, packed, ran, options, grad):
    query, _, _, cu_q, _, max_q, _ = packed(LENGTHS_Q, grad=grad)
    generator = torch.Generator().manual_seed(3)
    pools = [torch.randn(7, 4, 4, 16, generator=generator).requires_grad_(grad) for _ in range(2)]
    flat = [torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(TABLE, USED, strict=True)]) for x in pools]
    options = options | {"seqused_k": integers(*USED), "block_table": TABLE}
    results = attnreg.varlen_attn(query, *pools, cu_q, None, max_q, 8, return_aux=LSE, **options)
    expected = truth.varlen(query, *flat, cu_q, offsets(*USED), window=options.get("window_size", UNBOUNDED))
    if grad:
        assert_right((query, *pools), results, expected)
    else:
        truth.assert_near(results[0], expected[0])
        truth.assert_near(results[1], expected[1])
    assert total(ran()) == (1, int(grad))


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_a_block_table_without_pages_gives_zeros(routers, ran, backend):
    """Also among calls of the kind that have pages, which the call cache repeats."""
    query, ends = torch.randn(5, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    pages = [torch.randn(3, 8, 2, 16) for _ in "kv"]
    for width in (2, 2, 2, 0, 0, 2):
        table, used = torch.ones(2, width, dtype=torch.int32), torch.tensor([3, 9] if width else [0, 0])
        options = {"seqused_k": used.int(), "block_table": table, "enable_gqa": True, "backend": backend}
        out = attnreg.varlen_attn(query, *pages, ends, None, 3, 8 * width, **options)
        rows = [x[table.long()].flatten(0, 2).repeat_interleave(2, 1) for x in pages]
        right, _ = truth.varlen(query, *rows, ends, torch.arange(3) * 8 * width, used=used)
        truth.assert_near(out, right)
    assert ran() == {backend: (6, 0)}


def test_a_page_past_the_used_ones_may_be_anything(packed):
    query, _, _, cu_q, *_ = packed((3, 4), grad=False)
    pool, table = torch.randn(4, 4, 4, 16), integers(0, 99, 2, -1).view(2, 2)
    used = integers(4, 3)
    out = attnreg.varlen_attn(query, pool, pool, cu_q, None, 4, 8, seqused_k=used, block_table=table)
    keys = torch.cat((pool[0], pool[2][:3]))
    truth.assert_near(out, truth.varlen(query, keys, keys, cu_q, offsets(4, 3))[0])


# ---- strides

LAYOUTS = {
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other element": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "rows of odd bytes": lambda x: torch.cat((x, x.new_zeros(*x.shape[:2], 1)), -1)[..., :-1],
    "one key head for all": lambda x: x[:, :1].expand_as(x),
    "one token for all": lambda x: x[:1].expand_as(x),
    "one number for all": lambda x: x[:1, :1, :1].expand_as(x),  # as the gradient of a sum is
    "part of a fused projection": lambda x: torch.stack((x, x, x), 1)[:, 1],
}


@pytest.mark.each_value("front", "layout")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides_give_what_contiguous_tensors_do(front, packed, layout):
    *plain, cu_q, cu_k, max_q, max_k = packed(LENGTHS_Q, LENGTHS_K, grad=False)
    laid_out = [layout(x).requires_grad_() for x in plain]
    contiguous = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in laid_out]
    pairs = list(zip(laid_out, contiguous, strict=True))
    assert any(x.stride() != y.stride() or x.storage_offset() for x, y in pairs)
    out = attnreg.varlen_attn(*laid_out, cu_q, cu_k, max_q, max_k, window_size=CAUSAL)
    expected, _ = truth.varlen(*contiguous, cu_q, cu_k, window=CAUSAL)
    truth.assert_near(out, expected)
    grad = layout(random_like(out))
    got = torch.autograd.grad(out, laid_out, grad)
    for one, other in zip(got, torch.autograd.grad(expected, contiguous, grad.double()), strict=True):
        truth.assert_near(one, other.double())


# ---- empty sequences, hidden rows and unused tokens

EMPTY = {
    "no sequence": ((), ()),
    "a sequence without queries": ((3, 0, 4), (3, 2, 4)),
    "a sequence without keys": ((3, 2, 4), (3, 0, 4)),
    "a sequence without either": ((3, 0, 4), (3, 0, 4)),
    "the first empty": ((0, 4), (0, 4)),
    "the last empty": ((4, 0), (4, 0)),
    "all empty": ((0, 0, 0), (0, 0, 0)),
    "no query at all": ((0, 0), (3, 4)),
    "no key at all": ((3, 4), (0, 0)),
    "more queries than keys": ((6, 3), (2, 3)),  # with a causal mask the first four see none
}


@pytest.mark.pairwise("front", "window", "lengths_q")
@pytest.mark.parametrize(("lengths_q", "lengths_k"), EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("window", [UNBOUNDED, CAUSAL])
def test_rows_that_see_no_key_give_zeros_and_take_no_gradient(front, packed, lengths_q, lengths_k, window):
    given = packed(lengths_q, lengths_k)
    out, lse = run_and_compare(given, {"window": window}, window_size=window)
    unseeing = lse[0] == -torch.inf
    attnreg.varlen_attn(*given, window_size=window).sum().backward()
    assert not out[unseeing].any() and not given[0].grad[unseeing].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unused", [torch.nan, torch.inf])
def test_tokens_past_the_last_offset_give_and_take_nothing(front, packed, dtype, unused):
    *inputs, cu_q, cu_k, max_q, max_k = packed((*LENGTHS_Q, 3), (*LENGTHS_K, 2), dtype=dtype, grad=False)
    cu_q, cu_k = cu_q[:-1], cu_k[:-1]
    ends = [int(cu[-1]) for cu in (cu_q, cu_k, cu_k)]
    for tensor, end in zip(inputs, ends, strict=True):
        tensor[end:] = unused
        tensor.requires_grad_()
    out, lse = attnreg.varlen_attn(*inputs, cu_q, cu_k, max_q, max_k, return_aux=LSE, window_size=CAUSAL)
    assert (lse[:, ends[0] :] == -torch.inf).all()
    grad = random_like(out)
    grad[ends[0] :] = unused
    got = torch.autograd.grad(out, inputs, grad)
    kept = [x.detach()[:end].requires_grad_() for x, end in zip(inputs, ends, strict=True)]
    expected, _ = truth.varlen(*kept, cu_q, cu_k, window=CAUSAL)
    wanted = torch.autograd.grad(expected, kept, grad[: ends[0]].double())
    for one, end, other in zip((out, *got), (ends[0], *ends), (expected, *wanted), strict=True):
        assert torch.equal(one[end:], torch.zeros_like(one[end:]))
        truth.assert_near(one[:end], other.double())


def test_nan_in_a_token_that_counts_is_not_hidden(front, packed):
    given = packed((3, 4), grad=False)
    given[2][1] = torch.nan
    out = attnreg.varlen_attn(*given)
    assert out[:3].isnan().all()
    assert not out[3:].isnan().any()
