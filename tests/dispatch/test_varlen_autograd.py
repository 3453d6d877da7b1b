"""Promises of `varlen_attn` towards autograd, with the node in C++ and with the function in Python.

What holds for its custom op as well is in tests/varlen/test_varlen_interface.py.
"""

import gc
import weakref

import pytest
import torch
from support import truth
from support.dense import WithoutGradient
from support.varlen_calls import LENGTHS, assert_right, attend
from torch._dynamo import compiled_autograd
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

import attnreg

pytestmark = pytest.mark.usefixtures("one_thread", "no_graph_trees", "front")


class Logged(torch.Tensor):
    """A tensor with memory whose ops are seen, and give plain tensors."""

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return op(*args, **(kwargs or {}))


@pytest.fixture
def inputs(packed):
    """Return inputs of a call that is kept, where calls are."""
    made = packed(LENGTHS)
    for _ in range(3):
        assert_right(made)
    return made


def gradients(out, inputs, **options):
    return torch.autograd.grad(out, inputs[:3], torch.ones_like(out), **options)


@pytest.mark.parametrize("place", range(5), ids=["query", "key", "value", "offsets", "output"])
def test_what_is_written_to_between_forward_and_backward_is_an_error(inputs, place):
    values = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs[:4]]
    out = attend((*values, values[3], *inputs[5:]))
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        with torch.no_grad():
            (*values, out)[place].add_(0)
        gradients(out, values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["cpu", "math"])
def test_compiled_autograd_computes_the_same_gradients_with_the_same_backend(inputs, name, ran):
    ran()
    for scale in (None, 0.3):  # a scale is part of the graph that compiled autograd keeps
        with attnreg.use_backend(name):
            out = attend(inputs, scale=scale)
        expected = gradients(out, inputs, retain_graph=True)
        for x in inputs[:3]:
            x.grad = None
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            out.backward(torch.ones_like(out))
        torch.testing.assert_close([x.grad for x in inputs[:3]], expected, rtol=0, atol=0)
        assert ran() == {name: (1, 2)}


def test_gradients_flow_further_into_what_made_the_inputs(inputs):
    leaf = torch.randn(3, requires_grad=True)
    query, key, value = (x.detach() * factor for x, factor in zip(inputs[:3], leaf, strict=True))
    attend((query, key, value, *inputs[3:])).square().sum().backward()
    factors = leaf.detach().double().requires_grad_()
    exact = [x.detach().double() * factor for x, factor in zip(inputs[:3], factors, strict=True)]
    truth.varlen(*exact, *inputs[3:5])[0].square().sum().backward()
    torch.testing.assert_close(leaf.grad.double(), factors.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["zeros without memory", "a lazy negative"])
def test_a_gradient_that_is_no_plain_memory_is_read_as_its_values(inputs, how):
    out = attend(inputs)
    if how == "zeros without memory":
        given = torch._efficientzerotensor(out.shape)
    else:
        given = torch.complex(torch.zeros_like(out), torch.ones_like(out)).conj().imag
        assert given.is_neg()
    grads = torch.autograd.grad(out, inputs[:3], given, retain_graph=True)
    values = torch.zeros_like(out) if how == "zeros without memory" else -torch.ones_like(out)
    torch.testing.assert_close(grads, torch.autograd.grad(out, inputs[:3], values), rtol=0, atol=0)


def test_a_gradient_without_memory_of_its_own_is_refused(inputs):
    out = attend(inputs)
    given = TwoTensor(out.detach(), out.detach())
    with pytest.raises(RuntimeError, match="a gradient must be a plain tensor, got a tensor subclass"):
        torch.autograd.grad(out, inputs[:3], given)


def test_the_gradient_of_a_collective_that_nobody_has_waited_for_is_waited_for(inputs):
    out = attend(inputs)
    plain = torch.randn_like(out)
    for lazy in (AsyncCollectiveTensor(plain), torch.Tensor._make_subclass(Logged, plain)):
        assert type(lazy) is not torch.Tensor
        grads = torch.autograd.grad(out, inputs[:3], lazy, retain_graph=True)
        torch.testing.assert_close(
            grads, torch.autograd.grad(out, inputs[:3], plain, retain_graph=True), rtol=0, atol=0
        )


def test_zeros_without_memory_are_read_as_zeros(inputs):
    given = [*(x.detach() for x in inputs[:3]), *inputs[3:]]
    for place in range(3):
        zeros = torch._efficientzerotensor(given[place].shape)
        one, other = (attend((*given[:place], x, *given[place + 1 :])) for x in (zeros, zeros.clone()))
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_gradient_of_nothing_is_nothing(inputs):
    out = attend(inputs)
    other = torch.ones(3, requires_grad=True)
    grads = torch.autograd.grad(other.sum() + 0 * out.detach().sum(), inputs[:3], allow_unused=True)
    assert grads == (None,) * 3
    (grad,) = torch.autograd.grad(WithoutGradient.apply(out).sum(), inputs[:1], allow_unused=True)
    assert grad is None or not grad.any()


def test_hooks_that_copy_what_is_saved_change_nothing(inputs, ran):
    wanted = gradients(attend(inputs), inputs)
    for name in ("math", None):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            if name is None:
                out = attend(inputs)
            else:
                with attnreg.use_backend(name):
                    out = attend(inputs)
        ran()
        grads = gradients(out, inputs)
        assert ran() == {name or "cpu": (0, 1)}
        torch.testing.assert_close(grads, wanted)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(gradients(attend(inputs), inputs), wanted, rtol=0, atol=0)


def test_hooks_that_are_forbidden_or_fail_are_the_callers_errors(inputs):
    def fails(_):
        raise LookupError("of a hook")

    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(fails, fails), pytest.raises(LookupError, match="of a hook"):
        attend(inputs)
    with hooks(lambda x: x, fails):
        out = attend(inputs)
    with pytest.raises(LookupError, match="of a hook"):
        gradients(out, inputs)
    assert_right(inputs)


def test_what_a_graph_saved_goes_with_it(packed):
    def step(keep_graph):
        inputs = packed(LENGTHS)
        held = [weakref.ref(x) for x in inputs[:5]]
        out = attend(inputs)
        if not keep_graph:
            gradients(out, inputs)
        return held, out

    for _ in range(2):
        held, out = step(keep_graph=False)
        gc.collect()
        assert [x() is None for x in held[3:]] == [True] * 2  # released by the backward
        held, out = step(keep_graph=True)
        gc.collect()
        assert held[0]() is not None
        del out
        gc.collect()
        assert [x() for x in held] == [None] * 5


def test_inference_tensors_cannot_be_saved_which_torch_says(inputs):
    with torch.inference_mode():
        query, key, value = (x.detach().clone() for x in inputs[:3])
    leaf = inputs[0]
    torch.testing.assert_close(attend((query, key, value, *inputs[3:])), attend(inputs).detach())
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        attend((leaf, key, value, *inputs[3:]))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_and_the_profiler_name_the_call(inputs):
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_right(inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        attend(inputs).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert any("arlenAtt" in name for name in names), names
