"""flash-attn's functions compared with float64: the options, the layouts, the signatures."""

import inspect

import pytest
import torch
from support import dense, flash, truth
from support.packed_calls import offsets

import attnreg
from attnreg import InvalidInputError, flash_attn

DTYPES = (torch.float32, torch.bfloat16)
CAUSAL = (-1, 0)

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
# As flash-attn 2.8 has them: programs pass these by place as well as by name.
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{OPTIONS}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{OPTIONS}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_takes_what_flash_attns_takes_in_the_same_places(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert ", ".join(str(one.replace(annotation=one.empty)) for one in parameters) == SIGNATURES[name]


def batch(length_q, length_k, heads=(4, 4), dims=(16, 16), dtype=torch.float32):
    """Return q, k and v of a dense batch, (B, S, H, D)."""
    (heads_q, heads_k), (dim, dim_v) = heads, dims
    shapes = (2, length_q, heads_q, dim), (2, length_k, heads_k, dim), (2, length_k, heads_k, dim_v)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def assert_right(results, inputs, **options):
    """Compare output, LSE and gradients of a dense batch with float64."""
    q, k, v = inputs
    group = q.shape[2] // k.shape[2]
    seen = (q, *(x.repeat_interleave(group, dim=2) for x in (k, v)))
    expected, lse = truth.dense(*(x.transpose(1, 2) for x in seen), **options)
    out, found, probabilities = results
    dense.assert_near(dense.with_gradients(out, inputs), inputs, expected.transpose(1, 2))
    truth.assert_near(found, lse, q.dtype, truth.FAST_EXP if q.dtype.itemsize == 2 else 0.0)
    assert probabilities.numel() == 0


@pytest.mark.each_value("lengths", "given", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"causal": True}, {"window": CAUSAL}),
        ({"window_size": (3, 2)}, {"window": (3, 2)}),
        ({"window_size": (3, -1), "causal": True}, {"window": (3, 0)}),
        ({"softmax_scale": 0.7}, {"scale": 0.7}),
    ],
)
@pytest.mark.parametrize("lengths", [(9, 9), (5, 12), (1, 7)])
def test_a_dense_batch_is_right_forward_and_backward(given, meant, lengths, dtype):
    inputs = batch(*lengths, dtype=dtype)
    results = flash_attn.flash_attn_func(*inputs, **given, return_attn_probs=True)
    assert_right(results, inputs, **meant)


def test_a_causal_row_that_sees_no_key_is_zero():
    out = flash_attn.flash_attn_func(*batch(7, 3), causal=True)
    assert out[:, :4].eq(0).all() and out[:, 4:].ne(0).any()


@pytest.mark.parametrize(("heads", "dims"), [((6, 2), (16, 16)), ((4, 1), (16, 24))])
def test_query_heads_share_key_heads_and_values_may_be_wider(heads, dims):
    inputs = batch(6, 6, heads, dims)
    assert_right(flash_attn.flash_attn_func(*inputs, return_attn_probs=True), inputs)


def test_packed_tensors_are_the_same_call_and_get_one_gradient():
    qkv = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    expected = flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)
    gradient = torch.autograd.grad(expected.square().sum(), qkv)[0]
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out.square().sum(), qkv)[0], gradient)
    out = flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True)
    assert torch.equal(out, expected)


def test_packed_sequences_are_right_in_each_form(ran):
    lengths = (5, 1, 8)
    qkv, cu_seqlens = torch.randn(14, 3, 4, 16, requires_grad=True), offsets(*lengths)
    parts = [x.detach().requires_grad_() for x in qkv.unbind(1)]
    rows = cu_seqlens, cu_seqlens, 8, 8
    with attnreg.use_backend("math"):
        out, lse, _ = flash_attn.flash_attn_varlen_func(*parts, *rows, causal=True, return_attn_probs=True)
        whole = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 8, causal=True)
        half = flash_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], *rows, causal=True)
    expected, expected_lse = truth.varlen(*parts, cu_seqlens, cu_seqlens, window=CAUSAL)
    dense.assert_near(dense.with_gradients(out, parts), parts, expected)
    truth.assert_near(lse, expected_lse, torch.float32)
    assert torch.equal(whole, out) and torch.equal(half, out)
    assert ran() == {"math": (3, 1)}


def test_the_lse_of_a_dense_batch_has_a_gradient_on_a_backend_that_is_given_it_in_columns(fake, ran):
    inputs, seen = batch(6, 9, heads=(4, 2)), []
    limits = {"grad_lse": False, "delta_from_out": True}
    with attnreg.register_backend(fake("mine", load=lambda: flash.kernels(seen), **limits).backend):
        _, lse, _ = flash_attn.flash_attn_func(*inputs, causal=True, return_attn_probs=True)
        grads = torch.autograd.grad(lse.square().sum(), inputs, materialize_grads=True)
    q, k, v = inputs
    pairs = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
    _, expected = truth.dense(q.transpose(1, 2), *pairs, window=CAUSAL)
    wanted = torch.autograd.grad(expected.square().sum(), inputs, materialize_grads=True)
    for one, other in zip(grads, wanted, strict=True):
        truth.assert_near(one, other.double())
    assert wanted[0].any() and wanted[1].any()
    assert ran() == {"mine": (1, 1)}
    assert {x.shape[-1] for x in seen[0][:5]} == {24}


def test_a_table_of_pages_says_where_keys_are():
    q, pool = torch.randn(5, 4, 16), torch.randn(2, 6, 4, 4, 16)
    table = torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)
    cu_q, cu_k = offsets(2, 3), offsets(7, 3)
    out = flash_attn.flash_attn_varlen_func(q, *pool, cu_q, cu_k, 3, 7, causal=True, block_table=table)
    flat = [torch.cat([x[[4, 0]].flatten(0, 1)[:7], x[2, :3]]) for x in pool]
    truth.assert_near(out, truth.varlen(q, *flat, cu_q, cu_k, window=CAUSAL)[0])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_batch_without_rows_is_taken(shape):
    q = torch.randn(*shape, 4, 16, requires_grad=True)
    out = flash_attn.flash_attn_func(q, q, q)
    out.sum().backward()
    assert out.shape == q.grad.shape == q.shape


def test_what_was_made_in_inference_mode_serves_training_as_well():
    q = torch.randn(3, 17, 2, 16)
    with torch.inference_mode():
        flash_attn.flash_attn_func(q, q, q)
    flash_attn.flash_attn_func(q.requires_grad_(), q, q).sum().backward()
    assert q.grad.isfinite().all()


WRONG = {
    "q: got shape (5, 4, 16), expected 4 dimensions (batch, length, heads, head_dim)": lambda q: (
        q[0], q, q, {}
    ),
    "batch: got 2 for q and 1 for k, expected equal ones": lambda q: (q, q[:1], q[:1], {}),
    "batch: got 2 for q and 1 for v, expected equal ones": lambda q: (q, q, q[:1], {}),
    "alibi_slopes: got [1.0], expected a tensor": lambda q: (q, q, q, {"alibi_slopes": [1.0]}),
    "dropout_p: got 1.5, expected 0 to 1": lambda q: (q, q, q, {"dropout_p": 1.5}),
    "softcap: got None, expected 0 for none, or a number above 0 that float32 can hold": lambda q: (
        q, q, q, {"softcap": None}
    ),
    "softcap: got nan, expected 0 for none, or a number above 0 that float32 can hold": lambda q: (
        q, q, q, {"softcap": float("nan")}
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_refused_with_what_was_got_and_expected(message):
    q, k, v, options = WRONG[message](torch.randn(2, 5, 4, 16))
    with pytest.raises(InvalidInputError) as error:
        flash_attn.flash_attn_func(q, k, v, **options)
    assert str(error.value) == message


def test_a_packed_tensor_of_another_shape_is_refused():
    with pytest.raises(InvalidInputError) as error:
        flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 5, 2, 4, 16))
    assert str(error.value) == "qkv: got shape (2, 5, 2, 4, 16), expected (batch, length, 3, heads, head_dim)"
