"""flash-attn's private functions, a forward or a backward alone: right, also of parts, or refused."""

import inspect

import pytest
import torch
from support import dense, truth
from support.packed_calls import offsets
from torch.utils._python_dispatch import TorchDispatchMode

import attnreg
from attnreg.errors import InvalidInputError, UnsupportedInputError
from attnreg.flash_attn import directions, flash_attn_func, functions, private

CAUSAL = (-1, 0)

# As flash-attn 2.8 has them: programs pass these by place as well as by name.
OPTIONS = "dropout_p, softmax_scale, causal, window_size_left"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
SIGNATURES = {
    "_flash_attn_forward": f"q, k, v, {OPTIONS}, window_size_right, softcap, alibi_slopes, return_softmax",
    "_flash_attn_varlen_forward": f"q, k, v, {LENGTHS}, {OPTIONS}=-1, window_size_right=-1, softcap=0.0, "
    "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
    "zero_tensors=False",
    "_flash_attn_backward": f"{GRADIENTS}, {OPTIONS}, window_size_right, softcap, alibi_slopes, "
    "deterministic, rng_state=None",
    "_flash_attn_varlen_backward": f"{GRADIENTS}, {LENGTHS}, {OPTIONS}, window_size_right, softcap, "
    "alibi_slopes, deterministic, rng_state=None, zero_tensors=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_private_function_takes_what_flash_attns_takes_in_the_same_places(name):
    function = private.NAMES[name]
    assert function is private.NAMES[f"_wrapped{name}"]
    parameters = inspect.signature(function).parameters.values()
    assert ", ".join(str(one.replace(annotation=one.empty)) for one in parameters) == SIGNATURES[name]
    # Ring attention asks for the defaults in this way, which follows no wrapper.
    assert inspect.getfullargspec(function).args == [one.name for one in parameters]


def batch(length_q=6, length_k=9, heads=(4, 2), dim=16, dtype=torch.float32):
    """Return q, k and v of a dense batch, (B, S, H, D)."""
    shapes = (2, length_q, heads[0], dim), *[(2, length_k, heads[1], dim)] * 2
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def forward(q, k, v, *, dropout=0.0, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    return directions.flash_attn_forward(q, k, v, dropout, 0.3, causal, *window, softcap, slopes, False)


def backward(
    dout, q, k, v, out, lse, state=None, *, dropout=0.0, causal=False, window=(-1, -1), softcap=0.0,
    slopes=None, deterministic=False,
):  # fmt: skip
    """Return the gradients, written into every other row of larger tensors."""
    rows = [x.new_full((2 * len(x), *x.shape[1:]), torch.nan).detach() for x in (q, k, v)]
    grads = [x[::2] for x in rows]
    row_sums = directions.flash_attn_backward(
        dout, q, k, v, out, lse, *grads, dropout, 0.3, causal, *window, softcap, slopes, deterministic, state
    )
    assert all(x[1::2].isnan().all() for x in rows)
    torch.testing.assert_close(row_sums.mT, (dout.float() * out.float()).sum(-1))
    return grads


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"causal": True, "window": (3, -1)}, {"window": (3, 0)}),
        ({"softcap": 2.0, "slopes": SLOPES}, {"softcap": 2.0, "slopes": SLOPES}),
    ],
)
def test_a_dense_batch_is_right_in_both_directions(given, meant, dtype, ran):
    inputs = batch(dtype=dtype)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    expected, expected_lse = truth.dense(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), scale=0.3, **meant
    )
    out, lse, weights, state = forward(*inputs, **given)
    assert not out.requires_grad and not lse.requires_grad
    assert (weights.numel(), state.shape, state.dtype) == (0, (2,), torch.int64)
    truth.assert_near(lse, expected_lse, dtype, truth.FAST_EXP if dtype.itemsize == 2 else 0.0)
    grads = backward(dense.random_like(out), *inputs, out, lse, state, **given)
    dense.assert_near([out, *grads], inputs, expected.transpose(1, 2))
    (counts,) = ran().values()
    assert counts == (1, 1)


@pytest.mark.parametrize("used", [None, (4, 1, 3)], ids=["all keys", "some keys"])
def test_packed_sequences_are_right_in_both_directions(used, ran):
    rows, most = (offsets(5, 1, 8), offsets(6, 1, 3)), (8, 6)
    q, k, v = inputs = [torch.randn(n, h, 16, requires_grad=True) for n, h in ((14, 4), (10, 4), (10, 4))]
    counts = None if used is None else torch.tensor(used, dtype=torch.int32)
    out, lse, _, state = directions.flash_attn_varlen_forward(
        q, k, v, *rows, *most, 0.0, None, True, seqused_k=counts, zero_tensors=True
    )
    expected, expected_lse = truth.varlen(*inputs, *rows, used=counts, window=CAUSAL)
    truth.assert_near(lse, expected_lse, torch.float32)
    truth.assert_near(out, expected)
    if used is not None:
        return  # flash-attn's backward isn't given them
    dout, (dq, dv) = dense.random_like(out), (torch.empty_like(x) for x in (q, v))
    directions.flash_attn_varlen_backward(
        dout, q, k, v, out, lse, dq, None, dv, *rows, *most, 0.0, None, True, -1, 0, 0.0, None, True, state
    )
    of_q, of_v = torch.autograd.grad(expected, (q, v), dout.double())
    truth.assert_near(dq, of_q.double())
    truth.assert_near(dv, of_v.double())
    assert [n for _, n in ran().values()] == [1]


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_parts_of_the_keys_are_merged_by_their_lse_as_in_a_ring(backend, ran):
    inputs = q, k, v = batch(6, 10)
    expected = flash_attn_func(*inputs, softmax_scale=0.3)
    dout = dense.random_like(expected)
    right = torch.autograd.grad(expected, inputs, dout)
    parts = [(k[:, :4], v[:, :4]), (k[:, 4:], v[:, 4:])]
    with attnreg.use_backend(backend):
        ran()
        outs, lses = zip(*(forward(q, *part)[:2] for part in parts), strict=True)
        lse = torch.logaddexp(*lses)
        out = sum(x * (one - lse).exp().mT[..., None] for x, one in zip(outs, lses, strict=True))
        (dq, *of_first), (more, *of_second) = (backward(dout, q, *part, out, lse) for part in parts)
    torch.testing.assert_close(out, expected)
    of_keys = [torch.cat(pair, 1) for pair in zip(of_first, of_second, strict=True)]
    for got, one in zip((dq + more, *of_keys), right, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)
    assert ran() == {backend: (2, 2)}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_random_state_brings_the_backward_its_forwards_mask_and_backend(dropout, ran):
    inputs = batch()
    torch.manual_seed(3)
    with attnreg.use_backend("math"):
        expected = flash_attn_func(*inputs, dropout, 0.3, True)
    right = torch.autograd.grad(expected, inputs, dense.random_like(expected))
    torch.manual_seed(3)
    with attnreg.use_backend("math"):
        out, lse, _, state = forward(*inputs, dropout=dropout, causal=True)
    given = dense.random_like(out), *inputs, out, lse
    grads = backward(*given, state, dropout=dropout, causal=True)
    assert ran() == {"math": (2, 2)}
    for got, one in zip((out, *grads), (expected, *right), strict=True):
        assert torch.equal(got, one)
    for wrong, said in ((None, "None"), (state.clone(), "a tensor that carries no backend, such as a copy")):
        if dropout:
            with pytest.raises(InvalidInputError) as error:
                backward(*given, wrong, dropout=dropout, causal=True)
            assert str(error.value) == (
                f"rng_state: got {said} with dropout_p 0.4, expected the forward's fourth result"
            )


def both(q, k, v, dout):
    out, lse, _, state = forward(q, k, v, causal=True)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    directions.flash_attn_backward(
        dout, q, k, v, out, lse, *grads, 0.0, 0.3, True, -1, -1, 0.0, None, False, state
    )
    return out, *grads


def test_compiled_code_has_both_in_one_graph(ran):
    inputs = [x.detach() for x in batch()]
    given = *inputs, dense.random_like(inputs[0])
    expected = both(*given)
    with attnreg.use_backend("math"):
        ran()
        got = torch.compile(both, backend="aot_eager", fullgraph=True)(*given)
        assert ran() == {"math": (1, 1)}
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


PLAIN = {"dropout_p": 0.0, "softmax_scale": None, "causal": False}
BACKWARD = 0.0, None, False, -1, -1, 0.0, None, False


def in_a_mode(call):
    """Call a function below a dispatch mode, which sees ops as a graph has them."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        return call()


def wrong_results(name, change):
    """Return a backward one of whose arguments is another."""
    inputs = batch()
    out, lse, _, _ = forward(*inputs)
    dq, dk, dv = (torch.empty_like(x) for x in inputs)
    given = {"dout": out, "out": out, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv}
    given |= dict(zip("qkv", inputs, strict=True)) | PLAIN | {"softcap": 0.0, "alibi_slopes": None}
    given |= dict.fromkeys(("window_size_left", "window_size_right"), -1) | {"deterministic": False}
    return lambda: directions.flash_attn_backward(**given | {name: change(given[name])})


def packed(**options):
    rows = offsets(2, 3)
    return directions.flash_attn_varlen_forward(*torch.randn(3, 5, 2, 8), rows, rows, 3, 3, **options)


COMPILED = "in compiled code, in dispatch modes and for tensor subclasses"
REFUSED = {
    "another shape of the lse": (
        wrong_results("softmax_lse", lambda x: x.mT),
        "softmax_lse: got (2, 6, 4), torch.float32 on cpu, expected (2, 4, 6), torch.float32 on cpu",
    ),
    "another dtype of the output": (
        wrong_results("out", lambda x: x.half()),
        "out: got (2, 6, 4, 16), torch.float16 on cpu, expected (2, 6, 4, 16), torch.float32 on cpu",
    ),
    "too short a gradient": (
        wrong_results("dk", lambda x: x[:, 1:]),
        "dk: got (2, 8, 2, 16), torch.float32 on cpu, expected (2, 9, 2, 16), torch.float32 on cpu",
    ),
    "a query without heads": (
        lambda: directions.flash_attn_varlen_backward(
            *torch.randn(5, 5), torch.randn(5), None, None, None, *[offsets(2, 3)] * 2, 3, 3, *BACKWARD
        ),
        "q: got shape (5,), expected 3 dimensions (tokens, heads, head_dim)",
    ),
    "no tensor": (wrong_results("dout", lambda x: 3), "dout: got 3, expected a tensor"),
    "weights with dropout": (
        lambda: packed(**PLAIN | {"dropout_p": 0.1, "return_softmax": True}),
        "return_softmax: got True with dropout_p 0.1, expected False, or flash_attn_func with "
        "return_attn_probs=True",
    ),
    "padding of a cache": (
        lambda: packed(**PLAIN, leftpad_k=torch.zeros(2)),
        "leftpad_k: got a tensor, expected None, or flash_attn_with_kvcache with cache_leftpad",
    ),
    "packed offsets of another dtype": (
        lambda: directions.flash_attn_varlen_forward(
            *torch.randn(3, 5, 2, 8), *[torch.tensor([0, 5])] * 2, 5, 5, **PLAIN
        ),
        "cu_seqlens_q: got torch.int64, expected torch.int32",
    ),
    "dropout where ops are seen": (
        lambda: in_a_mode(lambda: forward(*batch(), dropout=0.1)),
        f"dropout_p: got 0.1 {COMPILED}, expected 0",
    ),
    "deterministic where ops are seen": (
        lambda: in_a_mode(wrong_results("deterministic", lambda _: True)),
        f"deterministic: got True {COMPILED}, expected False, or torch.use_deterministic_algorithms(True)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(call, message):
    with pytest.raises((InvalidInputError, UnsupportedInputError)) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("is_grad_enabled", [(), (True,), (False,)], ids=str)
def test_the_autograd_functions_are_applied_as_flash_attns(is_grad_enabled):
    rows = offsets(2, 3)
    q, k, v = torch.randn(3, 5, 2, 8, requires_grad=True)
    given = q, k, v, rows, rows, 3, 3, 0.0, None, True, (-1, -1), 0.0, None, False, False, None
    out = private.NAMES["FlashAttnVarlenFunc"].apply(*given, *is_grad_enabled)
    assert torch.equal(out, functions.flash_attn_varlen_func(*given))
    assert out.requires_grad is all(is_grad_enabled)
    qkv = torch.stack((q, k, v), 1)[None]
    dense_out, lse, _ = private.NAMES["FlashAttnQKVPackedFunc"].apply(
        qkv, 0.0, None, True, (-1, -1), 0.0, None, False, True, *is_grad_enabled
    )
    assert torch.equal(dense_out, functions.flash_attn_qkvpacked_func(qkv, causal=True))
    assert lse.shape == (1, 2, 5)


def test_the_helpers_are_flash_attns():
    x = torch.randn(4, 6)
    contiguous = private.NAMES["maybe_contiguous"]
    assert contiguous(x) is x and contiguous(None) is None
    assert contiguous(x.T).is_contiguous() and torch.equal(contiguous(x.T), x.T)
    assert [private.NAMES["round_multiple"](n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
