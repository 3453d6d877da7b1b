"""Promises about the gradient of a bias, of the kernels and fakes of each backend that declares it."""

import dataclasses

import pytest
import torch
from support import efficient_ops, fake_cudnn, truth

from attnreg.backends import cudnn, efficient, math
from attnreg.core.contract.backend import Call
from attnreg.core.registry.entry import Entry
from attnreg.core.torchlib import captured
from attnreg.errors import UnsupportedInputError

BIASES = {
    "full": (2, 4, 40, 24),
    "rows that aren't multiples of sixteen bytes": (2, 4, 40, 23),
    "of all batches": (4, 40, 24),
    "of all heads": (2, 1, 40, 24),
    "of all": (40, 24),
    "of the keys": (2, 1, 1, 24),
    "a single query": (2, 4, 1, 24),
    "square": (2, 4, 24, 24),
}


@pytest.fixture(params=["math", "efficient", "cuDNN"])
def kernels(request, monkeypatch):
    """Return a backend's kernels as they run here."""
    if request.param == "math":
        return math.BACKEND.load()
    if request.param == "efficient":
        fakes = efficient_ops.native_kernels()
        monkeypatch.setattr(captured, "kernel", lambda op, key: fakes[op])
        return efficient.BACKEND.load()
    fake_cudnn.install(monkeypatch)
    return cudnn.BACKEND.load()


def drawn(bias, heads_k=4, dtype=torch.bfloat16):
    """Return query, key, value and gradient (B, S, H, D), and a bias of a shape."""
    generator = torch.Generator().manual_seed(3)
    length_q, length_k = (bias[-2] if bias[-2] > 1 or bias[1:2] == (4,) else 40), bias[-1]
    shapes = (2, length_q, 4, 16), *[(2, length_k, heads_k, 16)] * 2, (2, length_q, 4, 16), bias
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_right(kernels, q, k, v, grad, bias, window=(-1, -1), model=None):
    """Hold output, LSE and all four gradients to float64; `model` is the bias as the program has it."""
    call = Call(0.25, q.shape[1], k.shape[1], window, attn_bias=bias)
    out, lse = kernels.forward(q, k, v, call)
    found = kernels.backward(grad, q, k, v, out, lse, call._replace(bias_gradient=True))
    alone = kernels.backward(grad, q, k, v, out, lse, call)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v, bias)]
    assert [x.dtype for x in found] == [q.dtype] * 4
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=False))
    assert len(alone) == 3
    leaves = [x.double().requires_grad_() for x in (q, k, v, bias)]
    expected, expected_lse = truth.dense(*(x.transpose(1, 2) for x in leaves[:3]), leaves[3], scale=0.25,
                                         window=window)  # fmt: skip
    truth.assert_near(out, expected.transpose(1, 2), q.dtype)
    truth.assert_near(lse, expected_lse, torch.float32)
    right = torch.autograd.grad(expected, leaves, grad.transpose(1, 2).double())
    for one, other in zip(found, right, strict=True):
        truth.assert_near(one, other, q.dtype)


@pytest.mark.each_value("kernels", "shape")
@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_it_is_right_for_every_shape_that_broadcasts(kernels, shape, request):
    if "cuDNN" in request.node.name and (shape[-1] % 8 or shape == BIASES["of the keys"]):
        with pytest.raises(UnsupportedInputError):  # see cudnn/test_cudnn_bias.py
            assert_right(kernels, *drawn(shape))
    else:
        assert_right(kernels, *drawn(shape))


def test_it_is_right_under_a_causal_mask_of_a_square(kernels, request):
    if "efficient" not in request.node.name:  # which has no bias with a mask
        assert_right(kernels, *drawn((2, 4, 24, 24)), window=(-1, 0))


def test_it_is_right_where_heads_share_keys(kernels, request):
    if "efficient" not in request.node.name:  # which shares heads from torch 2.14 on
        assert_right(kernels, *drawn((1, 4, 40, 24), heads_k=2))


def test_it_is_right_where_the_bias_is_expanded_or_lies_across(kernels):
    q, k, v, grad, bias = drawn((1, 4, 40, 24))
    assert_right(kernels, q, k, v, grad, bias.expand(2, 4, 40, 24))
    assert_right(kernels, q, k, v, grad, bias.transpose(2, 3).contiguous().transpose(2, 3))


def test_hidden_scores_and_rows_without_a_key_have_none(kernels):
    q, k, v, grad, bias = drawn((2, 4, 40, 24))
    bias[bias > 0.5] = -torch.inf
    bias[:, :, ::5] = -torch.inf
    assert_right(kernels, q, k, v, grad, bias)


def test_calls_without_queries_have_a_gradient_of_zeros(kernels):
    q, k, v, grad, bias = drawn((4, 40, 24))
    call = Call(0.25, 0, 24, attn_bias=bias[:, :0], bias_gradient=True)
    out, lse = kernels.forward(q[:, :0], k, v, call)
    found = kernels.backward(grad[:, :0], q[:, :0], k, v, out, lse, call)
    assert [x.shape for x in found] == [(2, 0, 4, 16), k.shape, v.shape, (4, 0, 24)]
    assert not any(x.any() for x in found)


def test_a_backend_that_does_not_declare_it_says_so():
    without = dataclasses.replace(math.BACKEND.backward, bias_gradient=False)
    entry = Entry("plain", "a test", dataclasses.replace(math.BACKEND, name="plain", backward=without))
    from support.packages import gpu_spec

    spec = gpu_spec(bias=True, bias_gradient=True)
    assert entry.reasons(spec, "backward") == ("attn_bias must need no gradient",)
