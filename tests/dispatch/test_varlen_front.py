"""Promises of the compiled front of `varlen_attn`: what it leaves to Python, and what autograd gets of it."""

import warnings

import pytest
import torch
from support import truth
from support.launcher_kinds import PACKED, tensors
from support.varlen_calls import LENGTHS, assert_right, attend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnreg
from attnreg.core.dispatch import call_cache

pytestmark = pytest.mark.usefixtures("one_thread", "no_graph_trees")
# torch's own, of traces and of forward-mode AD; FutureWarning from torch 2.15 on.
jit_is_deprecated = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:`torch.jit:FutureWarning"
)

# ---- which calls the compiled front leaves to Python


class Subclass(torch.Tensor):
    pass


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Seen(TorchDispatchMode):
    """Keep the names of attnreg's ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "attnreg":
            self.names.append(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_q": 4.0}, {"max_k": True}, {"max_q": 2**70}, {"is_causal": 1}, {"window_size": [-1, -1]},
        {"window_size": (-1,)}, {"window_size": (-1, None)}, {"window_size": None}, {"scale": 1},
        {"enable_gqa": None},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_other_types_are_left_to_python(packed_plan, pair, wrong):
    assert packed_plan.planned(*tensors(PACKED), pair, pair, **wrong) is None


@jit_is_deprecated
def test_tensors_that_are_more_than_memory_are_left_to_python(packed_plan, pair):
    q, k, v = tensors(PACKED)
    dual = torch.autograd.forward_ad
    for other in (None, 3, q.as_subclass(Subclass), torch._neg_view(q), torch.empty_like(q, device="meta")):
        assert packed_plan.planned(other, k, v, pair, pair) is None
    with dual.dual_level():
        assert packed_plan.planned(dual.make_dual(q, q), k, v, pair, pair) is None
    assert packed_plan.planned(torch.nn.Parameter(q), k, v, pair, pair) is not None


def test_modes_that_are_to_see_ops_are_left_to_python(packed_plan, pair):
    q, k, v = tensors(PACKED)

    def is_left():
        return packed_plan.planned(q, k, v, pair, pair) is None

    assert not is_left()
    for mode in (FunctionMode(), Seen(), FakeTensorMode(), torch.autocast("cpu"), call_cache.paused()):
        with mode:
            assert is_left(), mode
    found = []
    torch.vmap(lambda x: found.append(is_left()) or x)(q)
    torch.func.grad(lambda x: found.append(is_left()) or x.sum())(q)
    assert found == [True, True]
    with torch.autocast("cpu", torch.bfloat16):
        assert packed_plan.planned(*[x.bfloat16() for x in (q, k, v)], pair, pair) is not None
    assert not is_left()


def test_dispatch_modes_see_the_custom_op(front, packed):
    inputs = packed(LENGTHS)
    attend(inputs)
    with Seen() as seen:
        attend(inputs).sum().backward()
    assert seen.names == ["attnreg::_varlen_attn", "attnreg::_varlen_attn_backward"]


@jit_is_deprecated
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_computes_with_its_own_inputs(front, packed):
    query, *rest = packed(LENGTHS, grad=False)
    traced = torch.jit.trace(lambda q: attnreg.varlen_attn(q, *rest), (query,), check_trace=False)
    torch.testing.assert_close(traced(query * 2), attend((query * 2, *rest)))


def test_function_transforms_are_right(front, packed, ran):
    query, *rest = packed(LENGTHS)
    values = [x.detach() for x in rest[:2]] + rest[2:]

    def total(q):
        return attend((q, *values)).square().sum()

    queries = torch.stack([query.detach(), query.detach() * 2])
    exact = [x.detach().double().requires_grad_() for x in (query, *rest[:2])]
    wanted = torch.autograd.grad(truth.varlen(*exact, *rest[2:4])[0].square().sum(), exact[:1])[0]
    for _ in range(4):
        truth.assert_near(torch.func.grad(total)(query.detach()), wanted)
        with attnreg.use_backend("math"):
            truth.assert_near(torch.func.vjp(total, query.detach())[1](torch.ones(()))[0], wanted)
    assert ran()["math"] == (4, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        truth.assert_near(torch.vmap(torch.func.grad(total))(queries)[0], wanted)
        truth.assert_near(torch.func.grad(lambda q: torch.vmap(total)(q).sum())(queries)[0], wanted)
    with pytest.raises(NotImplementedError, match="varlen_attn is not differentiable"):
        torch.func.grad(lambda q: torch.func.grad(total)(q).sum())(query.detach())


@jit_is_deprecated
def test_forward_mode_ad_is_an_error_not_a_lost_tangent(front, packed):
    query, *rest = packed(LENGTHS, grad=False)
    for _ in range(3):
        attend((query, *rest))
    refusal = r"attnreg\.varlen_attn is not differentiable in forward mode \(jvp"
    for transform in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises(NotImplementedError, match=refusal):
            transform(lambda q: attend((q, *rest)).sum())(query)
    with pytest.raises(NotImplementedError, match=refusal):
        torch.func.jvp(lambda q: attend((q, *rest)), (query,), (query,))
    dual = torch.autograd.forward_ad
    for needs_gradient in (False, True):
        leaf = query.clone().requires_grad_(needs_gradient)
        with dual.dual_level(), pytest.raises(NotImplementedError, match=refusal):
            attend((dual.make_dual(leaf, query), *rest))


def test_subclasses_are_right(front, packed):
    query, *rest = packed(LENGTHS, grad=False)
    for _ in range(4):
        out = attend((query.as_subclass(Subclass), *rest))
        torch.testing.assert_close(out.as_subclass(torch.Tensor), attend((query, *rest)))


# ---- autocast and inference mode


def test_under_autocast_tensors_in_its_dtype_take_the_call_cache(compiled, packed, planned):
    half = packed(LENGTHS, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert_right(half, dtype=torch.bfloat16)
        assert planned(lambda: assert_right(half, dtype=torch.bfloat16)) == 0


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_before_and_after_training(compiled, packed, planned, first):
    inputs = packed(LENGTHS)

    def infer():
        with torch.inference_mode():
            out = attend(inputs)
            assert out.is_inference()
            return out

    for in_inference in (first, not first) * 3:
        infer() if in_inference else assert_right(inputs)
    assert planned(infer) == 0
    assert planned(lambda: assert_right(inputs)) == 0
    assert not infer().requires_grad
