"""`return_attn_probs` with dropout: the weights, which were dropped, and that the call drops just these."""

import dataclasses

import pytest
import torch
from support import truth
from support.packed_calls import offsets

import attnreg
from attnreg import UnsupportedInputError, flash_attn
from attnreg.backends import math
from attnreg.tools.measure.reference import attend

HEADS, KEY_HEADS, DIM, DIM_V, P = 4, 2, 8, 6, 0.3
SLOPES = torch.tensor([[0.5, 0.25, 0.125, 2.0], [1.0, 0.0, 0.3, 0.7]])
OPTIONS = {
    "nothing": ({}, {}),
    "causal": ({"causal": True}, {"window": (-1, 0)}),
    "window": ({"window_size": (3, 1)}, {"window": (3, 1)}),
    "softcap": ({"softcap": 0.8}, {"softcap": 0.8}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
}


def batch(length_q=7, length_k=17, dtype=torch.float32):
    """Return q, k and v of a dense batch of two; the keys take three calls to show."""
    shapes = (length_q, HEADS, DIM), (length_k, KEY_HEADS, DIM), (length_k, KEY_HEADS, DIM_V)
    return [torch.randn(2, *shape).to(dtype).requires_grad_() for shape in shapes]


def expected_of(copies, weights, **meant):
    """Return magnitudes, output and LSE (float64, differentiable) of one dense batch, with these dropped."""
    q, k, _ = copies
    eye = torch.eye(k.shape[1]).double()[None, :, None].expand(len(k), -1, KEY_HEADS, -1)
    probabilities = attend(q.detach(), k.detach(), eye, DIM**-0.5, **meant)[0].transpose(1, 2)
    magnitudes = (probabilities / probabilities.amax(-1, keepdim=True)).nan_to_num(0.0)
    return magnitudes, *attend(*copies, DIM**-0.5, kept=(weights >= 0).double() / (1 - P), **meant)


def assert_near(results, inputs, copies, expected):
    """Compare results and gradients."""
    (out, lse, weights), (magnitudes, out_64, lse_64) = results, expected
    dtype = inputs[0].dtype
    truth.assert_near(weights.abs(), magnitudes, dtype)
    assert torch.equal(weights != 0, magnitudes != 0)
    assert weights.dtype == dtype and not weights.requires_grad
    assert 0.15 < (weights < 0).sum() / (weights != 0).sum() < 0.45
    truth.assert_near(lse, lse_64, torch.float32)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    right = torch.autograd.grad(out_64, copies, grad.double())
    for one, other in zip((out, *found), (out_64, *right), strict=True):
        truth.assert_near(one, other, dtype)


@pytest.mark.each_value("lengths", "option")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths", [(7, 17), (19, 4)])
def test_a_dense_calls_weights_say_what_it_has_dropped(ran, lengths, option):
    inputs, (given, meant) = batch(*lengths), OPTIONS[option]
    results = flash_attn.flash_attn_func(*inputs, P, **given, return_attn_probs=True)
    assert results[2].shape == (2, HEADS, *lengths)
    copies = [x.detach().double().requires_grad_() for x in inputs]
    assert_near(results, inputs, copies, expected_of(copies, results[2], **meant))
    assert ran() == {"math": (1 + -(-lengths[1] // DIM_V), 1)}


def _with_a_strided_lse():
    """Return the kernels of `math`, whose LSE lies in memory as that of `cpu` does."""
    kernels = math.BACKEND.load()

    def forward(*given):
        out, lse, *rest = kernels.forward(*given)
        return out, lse.mT.contiguous().mT, *rest

    return kernels._replace(forward=forward, specialize=None)


def test_the_lse_has_its_gradient_beside_the_weights(ran):
    inputs = [torch.randn(2, 9, 2, 8, requires_grad=True) for _ in range(3)]
    strided = dataclasses.replace(math.BACKEND, name="strided", load=_with_a_strided_lse)
    with attnreg.register_backend(strided):
        out, lse, weights = flash_attn.flash_attn_func(*inputs, P, return_attn_probs=True)
        copies = [x.detach().double().requires_grad_() for x in inputs]
        kept = (weights >= 0).double() / (1 - P)
        out_64, lse_64 = attend(*copies, 8**-0.5, kept=kept)
        grads = torch.randn_like(out), torch.randn_like(lse)
        found = torch.autograd.grad((out, lse), inputs, grads)
    right = torch.autograd.grad((out_64, lse_64), copies, [x.double() for x in grads])
    for one, other in zip(found, right, strict=True):
        truth.assert_near(one, other, torch.float32)
    assert ran() == {"strided": (3, 1)}


def test_slopes_that_round_weights_to_0_drop_none(ran):
    """Which weights are dropped is seen without slopes, of weights that are all equal."""
    inputs = batch()
    steep = torch.full((HEADS,), 50.0)
    weights = flash_attn.flash_attn_func(*inputs, P, alibi_slopes=steep, return_attn_probs=True)[2]
    assert 0.15 < (weights < 0).double().mean() < 0.45


@pytest.mark.parametrize("option", OPTIONS)
def test_packed_sequences_weights_are_a_batch_that_is_0_beyond_each_sequence(option):
    given, meant = OPTIONS[option]
    parts = (7, 4, 2), (17, 9, 1)
    shapes = (13, HEADS, DIM), (27, KEY_HEADS, DIM), (27, KEY_HEADS, DIM_V)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    slopes = torch.cat((SLOPES, SLOPES[:1]))
    given, meant = (
        {**one, **({"alibi_slopes": slopes} if option == "alibi" else {})} for one in (given, meant)
    )
    cu_seqlens = [offsets(*lengths) for lengths in parts]
    results = flash_attn.flash_attn_varlen_func(
        *inputs, *cu_seqlens, 8, 20, P, **given, return_attn_probs=True
    )
    weights = results[2]
    assert weights.shape == (3, HEADS, 8, 20)

    copies, expected, magnitudes = [x.detach().double().requires_grad_() for x in inputs], [], []
    sequences = zip(*(x.split(parts[n > 0]) for n, x in enumerate(copies)), strict=True)
    for at, one in enumerate(sequences):
        of_one = meant | ({"alibi_slopes": slopes[at]} if option == "alibi" else {})
        of_sequence = weights[at : at + 1, :, : parts[0][at], : parts[1][at]]
        shown, *rest = expected_of([x[None] for x in one], of_sequence, **of_one)
        magnitudes.append(torch.nn.functional.pad(shown[0], (0, 20 - parts[1][at], 0, 8 - parts[0][at])))
        expected.append([x[0] for x in rest])
    outs, lses = zip(*expected, strict=True)
    assert_near(results, inputs, copies, (torch.stack(magnitudes), torch.cat(outs), torch.cat(lses, -1)))


def test_the_call_drops_what_it_would_without_its_weights_and_leaves_the_generator_alike():
    inputs, states = batch(), []
    for shows in (False, True):
        torch.manual_seed(3)
        results = flash_attn.flash_attn_func(*inputs, P, return_attn_probs=shows)
        states.append((results[0] if shows else results, torch.get_rng_state()))
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


def test_a_dropped_weight_too_small_for_float16_is_below_0_and_a_kept_one_is_not():
    q, k, v = batch(3, 12, torch.float16)
    with torch.no_grad():
        q.fill_(5.0)
        k.copy_(-torch.arange(12.0)[None, :, None, None].expand_as(k))  # score j is -14 * j
    weights = flash_attn.flash_attn_func(q, k, v, P, return_attn_probs=True)[2]
    assert (weights.abs() < 1e-7).sum() > weights.numel() // 2
    assert 0.15 < (weights < 0).sum() / weights.numel() < 0.45
    assert not weights[..., 2:][weights[..., 2:] > 0].any()


def test_the_backend_that_has_shown_the_mask_runs_the_call(fake, ran):
    inputs, tried = batch(), []
    first = fake("first")

    def declines_once(*given):
        tried.append(given)
        if len(tried) == 1:
            raise UnsupportedInputError("not today")
        return first.forward(*given)

    kernels = attnreg.Kernels(declines_once, first.backward)
    with attnreg.register_backend(fake("first", load=lambda: kernels).backend):
        results = flash_attn.flash_attn_func(*inputs, P, return_attn_probs=True)
    assert ran() == {"math": (4, 0)}
    assert len(tried) == 1
    copies = [x.detach().double().requires_grad_() for x in inputs]
    assert_near(results, inputs, copies, expected_of(copies, results[2]))


def test_the_weights_of_a_compiled_call_are_right():
    inputs = batch()

    @torch.compile(backend="eager")
    def compiled(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, P, return_attn_probs=True)

    copies = [x.detach().double().requires_grad_() for x in inputs]
    results = compiled(*inputs)
    assert_near(results, inputs, copies, expected_of(copies, results[2]))


def test_without_dropout_there_are_no_weights_and_pages_with_dropout_are_refused():
    inputs = batch()
    assert flash_attn.flash_attn_func(*inputs, return_attn_probs=True)[2].numel() == 0
    pages = torch.randn(2, 4, KEY_HEADS, DIM)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    given = torch.randn(3, HEADS, DIM), pages, pages, offsets(3), offsets(8), 3, 8, P
    with pytest.raises(
        UnsupportedInputError, match=r"^return_attn_probs: got True with dropout_p 0\.3 and a bl"
    ):
        flash_attn.flash_attn_varlen_func(*given, block_table=table, return_attn_probs=True)


def test_what_a_call_with_weights_lacks_is_named_as_without_them():
    q, k, v = batch()
    with pytest.raises(
        attnreg.InvalidInputError, match=r"^batch: got 2 for q and 1 for k, expected equal ones"
    ):
        flash_attn.flash_attn_func(q, k[:1], v, P, return_attn_probs=True)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(attnreg.InvalidInputError, match=r"^cu_seqlens_k: got None"):
        flash_attn.flash_attn_varlen_func(*packed, offsets(7, 7), None, 7, 17, P, return_attn_probs=True)
    with pytest.raises(UnsupportedInputError, match=r"^dropout_p must be 0 in dispatch modes, in function"):
        torch.func.vmap(lambda x: flash_attn.flash_attn_func(x, k, v, P, return_attn_probs=True)[0])(q[None])
