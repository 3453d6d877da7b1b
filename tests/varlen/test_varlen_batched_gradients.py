"""Promises about batches of gradients, as by `is_grads_batched`: `varlen_attn` has them as SDPA does."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support import truth
from support.packed_calls import LSE, offsets

import attnreg
from attnreg.flash_attn import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

OFFSETS, LONGEST = offsets(5, 1, 8), 8
DOCUMENTS = torch.ones(14, 14, dtype=torch.bool).tril()
DOCUMENTS[6:, :6] = False


def attend(x, **options):
    return attnreg.varlen_attn(x, x, x, OFFSETS, OFFSETS, LONGEST, LONGEST, is_causal=True, **options)


def sdpa(x, mask=None):
    x = x.transpose(0, 1)[None]
    return F.scaled_dot_product_attention(x, x, x, mask, is_causal=mask is None)


def batches(out, x):
    """Return the gradients of x for a batch of gradients, in every way of torch's, and one by one."""
    grads = torch.randn(3, *out.shape, dtype=out.dtype)

    def gradient(one, **options):
        return torch.autograd.grad(out, x, one, retain_graph=True, **options)[0]

    return torch.stack([gradient(one) for one in grads]), {
        "is_grads_batched": gradient(grads, is_grads_batched=True),
        "vmap": torch.vmap(gradient)(grads),
        "both": torch.vmap(lambda one: gradient(one, is_grads_batched=True))(grads[None])[0],
    }


def test_each_gradient_of_a_batch_is_right_and_counted(front, ran):
    x = torch.randn(14, 2, 16, requires_grad=True)
    with attnreg.use_backend("math"):
        out = attend(x)
    expected, found = batches(out, x)
    assert ran() == {"math": (1, 12)}
    exact = x.detach().double().requires_grad_()
    given = torch.randn_like(out)
    truth.varlen(exact, exact, exact, OFFSETS, OFFSETS, window=(-1, 0))[0].backward(given.double())
    batch = torch.autograd.grad(out, x, torch.stack([given] * 2), is_grads_batched=True)[0]
    for one in batch:
        truth.assert_near(one, exact.grad)
    for how, grads in found.items():
        torch.testing.assert_close(grads, expected, msg=how)


def jacobian(function, x):
    return torch.autograd.functional.jacobian(function, x, vectorize=True)


@pytest.mark.each_value("front", "function")
@pytest.mark.parametrize("function", [attend, sdpa], ids=["varlen_attn", "SDPA"])
def test_a_vectorized_jacobian_is_right(front, function):
    x = torch.randn(14, 1, 2)
    with attnreg.register_backend("math"):
        expected = torch.autograd.functional.jacobian(function, x)
        torch.testing.assert_close(jacobian(function, x), expected)
        torch.testing.assert_close(torch.func.jacrev(function)(x), expected)


def with_lse(x, **options):
    out, lse = attend(x, return_aux=LSE, **options)
    return out + lse.t()[..., None]


CALLS = {
    "lse": with_lse,
    "dropout": lambda x: attend(x, dropout_p=0.3),
    "alibi": lambda x: attend(x, alibi_slopes=torch.tensor([0.5, 0.1])),
    "sinks": lambda x: attend(x, sinks=x[0, :, 0]),
    "sinks and lse": lambda x: with_lse(x, sinks=x[0, :, 0]),
    "sinks alone": lambda x: attend(x.detach(), sinks=x[0, :, 0]),
    "deterministic": lambda x: flash_attn_varlen_func(
        *(x, x, x, OFFSETS, OFFSETS, LONGEST, LONGEST), deterministic=True
    ),
    "dense": lambda x: flash_attn_func(x[None], x[None], x[None]),
    "masked": lambda x: sdpa(x, DOCUMENTS),
}


@pytest.mark.each_value("front", "name")
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_of_gradients_goes_through_calls_of_every_sort(front, name):
    if (front, name) == ("custom op", "dropout"):
        pytest.skip("the op has no dropout")
    attnreg.configure({"masks": "recognise"})
    x = torch.randn(14, 2, 16, requires_grad=True)
    expected, found = batches(CALLS[name](x), x)
    for how, grads in found.items():
        torch.testing.assert_close(grads, expected, msg=how)
    if name == "masked":
        assert [row.seen for row in attnreg.stats().masks] == ["causal, documents"]


def test_a_checkpoint_computes_what_a_batch_needs_once(front):
    x = torch.randn(14, 2, 16, requires_grad=True)

    def gradient(function):
        out = function(attend, x)
        return torch.autograd.grad(out, x, torch.stack([torch.ones_like(out)] * 2), is_grads_batched=True)

    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    torch.testing.assert_close(gradient(again), gradient(lambda call, x: call(x)))


def test_a_second_derivative_of_a_batch_is_an_error(front):
    x = torch.randn(14, 2, 16, requires_grad=True)
    out = attend(x)
    grads = torch.stack([out.detach()] * 2)
    (first,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, create_graph=True)
    said = (
        "no autograd formula was registered" if front == "custom op" else "differentiate twice what attnreg"
    )
    with pytest.raises(RuntimeError, match=said):
        torch.autograd.grad(first.sum(), x)
