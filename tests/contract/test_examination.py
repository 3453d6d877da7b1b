"""A backend that doesn't return what the contract says is an error at its first call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core.contract.capabilities import Range
from attnreg.core.dispatch.state import state


def backend(forward=None, backward=None, **fields):
    kernels = math_backend.BACKEND.load()
    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32", "float64"), varlen=True, **fields)
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


ELSEWHERE = {
    "another device": (
        lambda x: x.to("meta"),
        "{shape} torch.float32 on meta, expected {shape} torch.float32 on cpu",
    ),
    "sparse": (
        torch.Tensor.to_sparse,
        "{shape} torch.float32 torch.sparse_coo, expected {shape} torch.float32",
    ),
    "nested": (lambda x: torch.nested.nested_tensor([x]), "a nested tensor, expected {shape} torch.float32"),
    "negated": (torch._neg_view, "{shape} torch.float32 lazily negated, expected {shape} torch.float32"),
    "no memory": (
        lambda x: torch._efficientzerotensor(x.shape),
        "{shape} torch.float32 without memory, expected {shape} torch.float32",
    ),
    "array": (torch.Tensor.numpy, "array("),
    "list": (torch.Tensor.tolist, "[["),
}


@pytest.mark.parametrize("front", ["packed", "dense", "padded"])
@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_result_that_is_no_memory_on_the_device_is_named(kind, front):
    change, got = ELSEWHERE[kind]
    query = torch.randn(1, 2, 5, 12)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    limits = {"head_dim": Range(16, 16, 8)} if front == "padded" else {}
    for place, name in enumerate(("out", "lse")):

        def forward(*arguments, place=place):
            results = list(math_backend.BACKEND.load().forward(*arguments))
            results[place] = change(results[place])
            return tuple(results)

        with (
            attnreg.register_backend(backend(forward, **limits)),
            pytest.raises(attnreg.RegistrationError) as caught,
        ):
            if front == "dense":
                F.scaled_dot_product_attention(query, query, query)
            else:
                attnreg.varlen_attn(*3 * [query[0].transpose(0, 1)], ends, ends, 5, 5)
        out = (1, 5, 2, 12) if front == "dense" else (5, 2, 16 if front == "padded" else 12)
        shape = out if name == "out" else (1, 2, 5) if front == "dense" else (2, 5)
        expected = f"plugin breaks the contract in its forward: {name}: got {got.format(shape=shape)}"
        assert str(caught.value).startswith(expected) and len(str(caught.value)) < 200


def test_a_gradient_elsewhere_is_named(packed):
    kernels = math_backend.BACKEND.load()

    def moved(*arguments):
        *grads, last = kernels.backward(*arguments)
        return *grads, last.to("meta")

    for limits in ({}, {"delta_from_out": True}):
        with attnreg.register_backend(backend(backward=moved, **limits)):
            out, lse = attnreg.varlen_attn(*packed([3, 4]), return_aux=attnreg.AuxRequest(lse=True))
            expected = r"plugin breaks .*: grad_v: got \(7, 4, \d+\) torch.float32 on meta"
            with pytest.raises(attnreg.RegistrationError, match=expected):
                (out.sum() + lse.sum() if limits else out.sum()).backward()


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
