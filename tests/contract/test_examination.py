"""A backend that doesn't return what the contract says is an error at its first call."""

from __future__ import annotations

import pytest
import torch

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core.dispatch.state import state


def backend(forward=None, backward=None):
    kernels = math_backend.BACKEND.load()
    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32", "float64"), varlen=True)
    return attnreg.Backend(
        name="plugin",
        forward=limits,
        backward=limits,
        load=lambda: attnreg.Kernels(forward or kernels.forward, backward or kernels.backward),
    )


def with_lse(change):
    def forward(*arguments):
        out, lse = math_backend.BACKEND.load().forward(*arguments)
        return out, change(lse)

    return forward


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (with_lse(lambda lse: lse.mT), "lse: got (7, 4) torch.float32, expected (4, 7) torch.float32"),
        (with_lse(torch.Tensor.half), "lse: got (4, 7) torch.float16, expected (4, 7) torch.float32"),
        (lambda q, k, v, call: q, "got Tensor, expected the tuple (out, lse)"),
        (lambda q, k, v, call: (q, None), "lse: got None <class 'NoneType'>, expected (4, 7) torch.float32"),
        (lambda q, k, v, call: (q, q, q), "got 3 values, expected the tuple (out, lse)"),
    ],
)
def test_a_wrong_forward_result_is_named_and_nothing_is_counted(forward, problem, packed, ran):
    inputs = packed([3, 4])
    with attnreg.register_backend(backend(forward)):
        for _ in range(2):
            with pytest.raises(attnreg.RegistrationError) as caught:
                attnreg.varlen_attn(*inputs)
            assert str(caught.value) == f"plugin breaks the contract in its forward: {problem}"
    assert ran() == {}


def test_a_wrong_gradient_is_named(packed, ran):
    def swapped(*arguments):
        grads = math_backend.BACKEND.load().backward(*arguments)
        return grads[0], grads[1].double(), grads[2]

    inputs = packed([3, 4])
    with attnreg.register_backend(backend(backward=swapped)):
        out = attnreg.varlen_attn(*inputs)
        with pytest.raises(attnreg.RegistrationError, match=r"grad_k: got \(7, 4, 16\) torch.float64, ex"):
            out.sum().backward()
    assert ran() == {"plugin": (1, 0)}


def test_a_right_backend_is_looked_at_once_and_then_called_directly(packed, fake):
    inputs = packed([3, 4], grad=False)
    recorder = fake("plugin")
    with attnreg.register_backend(recorder.backend):
        for _ in range(3):
            attnreg.varlen_attn(*inputs)
        kernels = {plan.kernel for plan in state().plans()}
    assert len(recorder.forwards) == 3
    assert kernels == {recorder.forward}


def test_float64_promises_a_float64_lse_inside_and_float32_outside(packed):
    inputs = packed([3, 4], dtype=torch.float64)
    _, lse = attnreg.varlen_attn(*inputs, return_aux=attnreg.AuxRequest(lse=True), backend="math")
    assert lse.dtype == torch.float32
