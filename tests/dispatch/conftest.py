"""Fixtures of the call cache's tests: what is planned in Python, and ops and plans of the tests' own."""

import contextlib
import functools
import warnings

import pytest
import torch
from support import plan_counts

import attnreg
from attnreg.core import aten
from attnreg.core.adaptation.sinks import grad_of_sinks
from attnreg.core.aten.routing import OpLayout
from attnreg.core.dispatch import call_cache, counters, state
from attnreg.core.dispatch.call_cache import Kept
from attnreg.core.launching.launchers import MAX_Q
from attnreg.core.torchlib import captured
from attnreg.core.varlen.sinks import with_sinks


@pytest.fixture
def installed(compiled_routers):
    """Install the routers for a test, with the compiled call cache."""
    aten.restore()
    aten.ensure()
    assert captured.call_cache_in_use
    yield compiled_routers
    aten.restore()
    assert captured.call_cache_in_use is None


@pytest.fixture(params=["python_routers", "compiled_routers"])
def router_kind(request):
    """Run a test with either kind of routers, which aren't installed yet."""
    request.getfixturevalue(request.param)
    aten.restore()


@pytest.fixture
def compiled(compiled_routers):
    """Have the compiled front of `varlen_attn` serve the calls of a test."""
    assert compiled_routers.load() is not None
    return compiled_routers


@pytest.fixture(params=["compiled", "python"])
def front(compiled, request):
    """Have calls come by the compiled front, or by the one in Python."""
    with call_cache.paused() if request.param == "python" else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def pair():
    """Return the offsets of sequences of 2 and 4 tokens."""
    return torch.tensor([0, 2, 6], dtype=torch.int32)


@pytest.fixture
def planned(monkeypatch):
    """Return how many plans in Python a function's calls took, forwards and backwards, dense and packed."""
    return plan_counts.counting(monkeypatch)


class Plan:
    """Runs the calls that aren't kept, and returns what is to be kept, as the tests set it.

    Attributes:
        made: "forward" or "backward" for each call that was planned.
        given: the arguments of the last one.
        forward, backward: the launchers that it returns; None for torch's own kernel.
        options: the other fields of `Kept`.
        keeps: whether it returns anything to be kept.
        meanwhile: called before it returns.
    """

    def __init__(self):
        self.made, self.given = [], None
        self.forward = self.backward = None
        self.options = {}
        self.keeps = True
        self.counter = counters.Counter()
        self.plan = state.Plan("tests", None, False, (self.counter,))

    def meanwhile(self):
        pass

    def kept(self, direction, **further):
        self.meanwhile()
        if not self.keeps:
            return None
        return Kept(getattr(self, direction), self.plan, **{**further, **self.options})

    def counted(self):
        counters.collect()
        value, self.counter.value = self.counter.value, 0
        return value


FORWARD = (
    "attnreg_tests(Tensor query, Tensor key, Tensor value, float scale=1.0, bool is_causal=False, "
    "Tensor? mask=None, int? window=None, *, float? dropout=None) "
    "-> (Tensor out, Tensor lse, Tensor state, Tensor token, SymInt length)"
)
BACKWARD = (
    "attnreg_tests_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor token) -> (Tensor, Tensor, Tensor)"
)


def planned_forward(query):
    """Return what a plan of the tests has for output, LSE and auxiliary outputs."""
    lse = query.sum(-1).transpose(1, 2).contiguous()
    return query + 1, lse, query.new_zeros(2), query.new_zeros(()), query.shape[1]


@functools.cache
def define_ops():
    """Define an op of the tests' own with kernels of "torch's", which add ten; it is there from then on."""
    defined = torch.library.Library("aten", "FRAGMENT")
    defined.define(FORWARD)
    defined.define(BACKWARD)
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("attnreg_tests", lambda q, *_, **__: (q + 10, *planned_forward(q)[1:]), "CPU")
    kernels.impl("attnreg_tests_backward", lambda g, *_: (g + 10, g + 20, g + 30), "CPU")
    return defined, kernels


class RoutedOp(Plan):
    """An op of the tests' own, of tensors (B, S, H, D), with a compiled router over it.

    A plan adds 1 to the query, to the gradient 1, 2 and 3; the op's native kernel ten times that.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module
        define_ops()
        layouts = OpLayout(query=0, token_result=3), OpLayout(query=1, token_argument=6)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            module.add_router("attnreg_tests", "CPU", tuple(layouts[0]), self.plan_forward)
            module.add_router("attnreg_tests_backward", "CPU", tuple(layouts[1]), self.plan_backward)
        self.run_forward = torch.ops.aten.attnreg_tests.default
        self.run_backward = torch.ops.aten.attnreg_tests_backward.default

    def plan_forward(self, *given, **options):
        self.made.append("forward")
        self.given = given, options
        models = torch.empty(2, device="meta"), torch.empty((), device="meta"), MAX_Q
        return planned_forward(given[0]), self.kept("forward", auxiliary=models)

    def plan_backward(self, grad, *given):
        self.made.append("backward")
        self.given = (grad, *given), {}
        return (grad + 1, grad + 2, grad + 3), self.kept("backward")

    def planned(self, *given, **options):
        """Run a forward; returns whether it was planned, and the results."""
        self.made.clear()
        results = self.run_forward(*given, **options)
        return bool(self.made), results

    def planned_back(self, *given):
        """Run a backward likewise."""
        self.made.clear()
        results = self.run_backward(*given)
        return bool(self.made), results


@pytest.fixture
def op(compiled_routers):
    """Return an op of the tests' own whose router is the only one."""
    aten.restore()
    made = RoutedOp(compiled_routers.load())
    yield made
    made.module.remove_routers()
    attnreg.core.registry.changed()


# What the front is given behind the tensors, in order.
REST = {
    "max_q": 4,
    "max_k": 4,
    "is_causal": False,
    "window_size": (-1, -1),
    "scale": None,
    "enable_gqa": False,
    "choice": 0,
    "returns_lse": True,
    "sinks": None,
    "seqused_k": None,
}


class PackedPlan(Plan):
    """The plan of `varlen_attn`, as the tests set it.

    An output is the query plus 1, an LSE the query's sum; gradients are the incoming one times 1, 2, 3.
    """

    def __init__(self, module):
        super().__init__()
        self.module = module
        module.set_plans(self.plan_forward, self.plan_backward, with_sinks, grad_of_sinks)

    def described(self, direction, cu_seqlens_q, cu_seqlens_k, *rest):
        self.made.append(direction)
        self.given = rest
        return self.kept(direction)

    def plan_forward(self, query, key, value, *rest):
        described = self.described("forward", *rest)
        return query + 1, query.sum(-1).t().contiguous(), described

    def plan_backward(self, grad, query, key, value, out, lse, *rest):
        described = self.described("backward", *rest)
        of_sinks = () if rest[-1] is None else (rest[-1] * 0,)
        return (grad * 1, grad * 2, grad * 3, *of_sinks), described

    def planned(self, *tensors, **options):
        """Call the front; returns whether the forward was planned, and output and LSE; None if it is left."""
        self.made.clear()
        results = self.module.varlen(*tensors, *{**REST, **options}.values())
        return results and (bool(self.made), results)

    def planned_back(self, out, inputs, grad=None):
        """Run a backward; returns whether it was planned, and the gradients."""
        self.made.clear()
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out) if grad is None else grad)
        return bool(self.made), grads


@pytest.fixture
def packed_plan(compiled_routers, monkeypatch):
    """Return the plan of `varlen_attn`'s calls, in the place of attnreg's own."""
    module = compiled_routers.load()
    attnreg.core.registry.changed()
    yield PackedPlan(module)
    module.set_plans(*call_cache._plans)
    attnreg.core.registry.changed()
