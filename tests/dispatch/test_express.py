"""Promises of the shortest way: which calls take it, and that it changes nothing about them."""

import contextlib
import types

import numpy
import pytest
import torch
from support import truth

import attnreg
from attnreg.aten import express, flash
from attnreg.contract import offsets
from attnreg.contract.backend import Call
from attnreg.dispatch import counters, scope
from attnreg.dispatch.planning import Plan
from attnreg.dispatch.state import state


class Answered(offsets.Facts):
    no_unused_rows = every_row_sees_a_key = True


@pytest.fixture
def covered(monkeypatch):
    monkeypatch.setattr(express, "facts_of", lambda *_: Answered())
    monkeypatch.setattr(express, "stream_of", lambda tensor: 0)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Take tensors for those of a device whose memory the host doesn't read."""
    monkeypatch.setattr(express, "_on_host", lambda tensor: False)
    monkeypatch.setattr(express, "_capturing", lambda: False)


@pytest.fixture
def deterministic():
    @contextlib.contextmanager
    def mode():
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return mode


class Kernel:
    """Torch's own: keeps what it was given."""

    def __init__(self, results):
        self.results, self.calls = results, []

    def __call__(self, *args):
        self.calls.append(args)
        return self.results


def plan(direction, backend="FA2", kernel=None):
    return Plan(backend, kernel, False, (counters.call_counter(backend, direction),))


QUERY, KEY, VALUE = (torch.randn(6, 2, 8) for _ in "qkv")
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
GIVEN = (QUERY, KEY, VALUE, ENDS, ENDS, 4, 4, 0.0, True, False)
CALL = Call(0.5, 4, 4, (-1, 0), ENDS, ENDS)
RESULTS = tuple(torch.full((), float(number)) for number in range(5))


def backward_args(pin=scope.OWN, grad_out=QUERY):
    lse, rng_state = torch.zeros(2, 6), torch.zeros(2, dtype=torch.uint64)
    carrier = scope.stamp(pin, QUERY)
    return (grad_out, QUERY, KEY, VALUE, QUERY, lse, ENDS, ENDS, 4, 4, 0.0, True, rng_state, carrier)


def remember(direction, args, kwargs, plan, call, native, now):
    """Remember a call; returns what the front calls a forward like it from then on."""
    own = None
    if direction == "forward":
        own = scope.Own(express.known_as(*args))
        own.rest, own.options = args[5:], kwargs
    express.remember(direction, args, kwargs, plan, call, native, now, own)
    return own and now.express.get(own.known_as)


def test_a_forward_that_came_before_goes_straight_to_torchs_kernel(covered, ran):
    now, kernel = state(), Kernel(RESULTS)
    assert express.forward(kernel, GIVEN, {}, now, scope.Own(express.known_as(*GIVEN))) is None
    own = remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    out, lse, _, carrier, _ = express.forward(kernel, GIVEN, {}, now, own)
    assert kernel.calls == [GIVEN]
    assert (out, lse) == RESULTS[:2]
    assert scope.read_stamp(carrier) is scope.OWN
    assert ran() == {"FA2": (1, 0)}


def test_a_backward_that_came_before_does_too(covered, ran):
    now, kernel = state(), Kernel(RESULTS[:3])
    args = backward_args()
    assert express.backward(kernel, args, {}, now, None) is None
    remember("backward", args, {}, plan("backward"), CALL, "FA2", now)
    assert express.backward(kernel, args, {}, now, None) == RESULTS[:3]
    assert kernel.calls == [args]
    assert ran() == {"FA2": (0, 1)}


def sent(now, kernel):
    """Return the arguments of a backward whose forward came before."""
    own = remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    *_, carrier, _ = express.forward(kernel, GIVEN, {}, now, own)
    return (*backward_args()[:13], carrier)


def test_a_backward_that_its_forward_sent_is_looked_up_once(covered, ran, monkeypatch):
    now, kernel = state(), Kernel(RESULTS)
    args = sent(now, kernel)
    kernel.results = RESULTS[:3]
    assert express.backward(kernel, args, {}, now, None) is None
    remember("backward", args, {}, plan("backward"), CALL, "FA2", now)
    assert express.backward(kernel, args, {}, now, None) == RESULTS[:3]
    monkeypatch.setattr(express, "known_as", lambda *_: pytest.fail("looked at again"))
    assert express.backward(kernel, args, {}, now, None) == RESULTS[:3]
    assert kernel.calls[1:] == [args, args]
    assert ran() == {"FA2": (1, 2)}


def test_a_backward_that_its_forward_sent_goes_the_long_way_in_another_mode(covered, deterministic):
    now, kernel = state(), Kernel(RESULTS)
    args = sent(now, kernel)
    remember("backward", args, {}, plan("backward"), CALL, "FA2", now)
    assert express.backward(kernel, args, {}, now, None) is not None
    with deterministic():
        assert express.backward(kernel, args, {}, now, None) is None
    assert express.backward(kernel, args, {}, now, None) is not None


def test_a_call_that_keeps_going_the_long_way_leaves_one_carrier(covered):
    now = state()
    for _ in range(50):
        remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    assert (len(now.express), len(now.returns)) == (1, 1)


def test_forwards_that_differ_send_different_carriers(covered):
    now, kernel = state(), Kernel(RESULTS)
    longer = (*GIVEN[:5], 6, *GIVEN[6:])
    carriers = []
    for given in (GIVEN, longer):
        own = remember("forward", given, {}, plan("forward"), CALL, "FA2", now)
        carriers.append(express.forward(kernel, given, {}, now, own)[3])
    assert carriers[0] is not carriers[1]
    assert now.returns.keys() == {id(carrier) for carrier in carriers}


@pytest.mark.parametrize(
    "change",
    [
        {0: torch.randn(7, 2, 8)},
        {0: QUERY.half()},
        {5: 5},
        {7: 0.1},
        {8: False},
        {3: torch.tensor([0, 6], dtype=torch.int32)},
        {3: ENDS.long(), 4: ENDS.long()},
        {0: torch.randn(6, 2, 8, requires_grad=True)},
    ],
    ids=["length", "dtype", "max_q", "dropout", "mask", "batch", "wide offsets", "gradient"],
)
def test_another_call_goes_the_long_way(covered, change):
    now = state()
    own = remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    other = tuple(change.get(place, value) for place, value in enumerate(GIVEN))
    assert now.express.get(express.known_as(*GIVEN)) is own
    assert express.known_as(*other) not in now.express


OTHERS = {
    "query": ((QUERY[:3], *GIVEN[1:]), {}),
    "dtype of the value": ((*GIVEN[:2], VALUE.half(), *GIVEN[3:]), {}),
    "mask": ((*GIVEN[:8], False, False), {}),
    "longest": ((*GIVEN[:5], 5, *GIVEN[6:]), {}),
    "scale": (GIVEN, {"scale": 9.0}),
}


@pytest.mark.parametrize(("args", "kwargs"), OTHERS.values(), ids=OTHERS)
def test_another_call_that_a_dispatch_mode_made_of_it_is_neither_known_nor_kept(covered, args, kwargs):
    now, kernel = state(), Kernel(RESULTS)
    own = remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    assert express.forward(kernel, args, kwargs, now, own) is None
    assert kernel.calls == []
    fresh = scope.Own(express.known_as(*GIVEN, "another"))
    fresh.rest, fresh.options = GIVEN[5:], {}
    express.remember("forward", args, kwargs, plan("forward"), CALL, "FA2", now, fresh)
    assert fresh.express is None
    assert fresh.known_as not in now.express


def test_rows_that_may_see_no_key_go_the_long_way(monkeypatch):
    monkeypatch.setattr(express, "facts_of", lambda *_: offsets.Facts())
    monkeypatch.setattr(express, "stream_of", lambda tensor: 0)
    now, kernel = state(), Kernel(RESULTS)
    own = remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    assert express.forward(kernel, GIVEN, {}, now, own) is None
    args = backward_args()
    remember("backward", args, {}, plan("backward"), CALL, "FA2", now)
    assert express.backward(kernel, args, {}, now, None) is None


def test_whoever_asks_for_a_backend_goes_the_long_way(covered):
    now, kernel = state(), Kernel(RESULTS)
    remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    other = scope.pin(None, "another")
    assert express.forward(kernel, GIVEN, {}, now, None) is None
    remember("backward", backward_args(), {}, plan("backward"), CALL, "FA2", now)
    assert express.backward(kernel, backward_args(other), {}, now, None) is None
    assert express.backward(kernel, backward_args(None), {}, now, None) is None


def test_a_strided_gradient_goes_to_the_backend_that_puts_it_right(covered):
    now, kernel, backend = state(), Kernel(RESULTS[:3]), Kernel(RESULTS[:3])
    remember("backward", backward_args(), {}, plan("backward", kernel=backend), CALL, "FA2", now)
    expanded = torch.ones(()).expand(6, 2, 8)
    express.backward(kernel, backward_args(grad_out=expanded), {}, now, None)
    assert (len(kernel.calls), len(backend.calls)) == (0, 1)


def test_any_backends_call_is_known_again_with_its_offsets_of_now(covered, ran):
    now, kernel = state(), Kernel(RESULTS[:2])
    own = remember("forward", GIVEN, {"scale": 0.5}, plan("forward", "mine", kernel), CALL, "FA2", now)
    ends = ENDS.clone()
    args = (*GIVEN[:3], ends, ends, *GIVEN[5:])
    assert express.forward(None, args, {"scale": 0.3}, now, own) is None
    assert express.forward(None, args, {"scale": 0.5}, now, own)[:2] == RESULTS[:2]
    ((query, key, value, call),) = kernel.calls
    assert (query, key, value) == (QUERY, KEY, VALUE)
    assert call._replace(cu_seqlens_q=None, cu_seqlens_k=None) == Call(0.5, 4, 4, (-1, 0))
    assert call.cu_seqlens_q is call.cu_seqlens_k is ends
    assert ran() == {"mine": (1, 0)}


def test_tensors_that_lie_badly_go_to_the_backend_that_puts_them_right(covered):
    now, kernel, backend = state(), Kernel(RESULTS), Kernel(RESULTS[:2])
    query = torch.randn(97)[1:].view(6, 2, 8)
    own = remember("forward", GIVEN, {}, plan("forward", kernel=backend), CALL, "FA2", now)
    express.forward(kernel, (query, *GIVEN[1:]), {}, now, own)
    assert (len(kernel.calls), len(backend.calls)) == (0, 1)


def test_what_a_first_call_in_inference_mode_leaves_can_be_saved_by_autograd_later(covered):
    now, kernel = state(), Kernel(RESULTS)
    own = remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    with torch.inference_mode():
        *_, rng_state, carrier, debug_mask = express.forward(kernel, GIVEN, {}, now, own)
    assert not any(x.is_inference() for x in (rng_state, carrier, debug_mask))


def test_nothing_is_known_again_while_a_graph_is_captured(covered, monkeypatch):
    now, kernel = state(), Kernel(RESULTS)
    own = remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    monkeypatch.setattr(express, "_capturing", lambda: True)
    assert express.forward(kernel, GIVEN, {}, now, own) is None


def test_nothing_is_remembered_that_would_lie_in_a_graphs_memory(covered, monkeypatch):
    monkeypatch.setattr(express, "needs_graph_memory", lambda offsets: offsets is ENDS)
    now = state()
    remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", now)
    assert (now.express, now.returns) == ({}, {})


@pytest.mark.parametrize(
    ("kwargs", "call"),
    [
        ({"seqused_k": ENDS}, CALL),
        ({}, CALL._replace(cu_seqlens_q=None)),
        ({}, CALL._replace(dropout=0.1)),
    ],
    ids=["a tensor by keyword", "dense", "dropout"],
)
def test_what_the_short_way_is_not_for_is_not_remembered(kwargs, call):
    now = state()
    remember("forward", GIVEN, kwargs, plan("forward"), call, "FA2", now)
    assert now.express == {}


@pytest.fixture
def told(monkeypatch):
    """Stand in for compiled routers; returns the functions that they are told of, by what tells them."""
    heard = {}
    names = ("accept_sent", "accept_offsets", "accept_returned")
    tell = {name: lambda *given, name=name: heard.setdefault(name, given) for name in names}
    monkeypatch.setattr(express.compiled, "extension", types.SimpleNamespace(**tell))
    return heard


def token_first(query, *_):
    """Return results of which the LSE, (H, T), lies with the token first."""
    return query + 1, query.sum(-1).t()


@pytest.mark.parametrize("short", [False, True], ids=["long way", "shorter way"])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_what_autograd_may_save_lies_as_torchs_own_kernels_expect_it(covered, told, needs_gradient, short):
    now, args = state(), (QUERY.clone().requires_grad_(needs_gradient), *GIVEN[1:])
    again = (lambda tensors, call: token_first) if short else None
    made = plan("forward", "cuDNN", token_first)._replace(again=again)
    own = remember("forward", args, {}, made, CALL, "FA2", now)
    results = [express.forward(Kernel(RESULTS), args, {}, now, own)[:2]]
    run, *_ = told["accept_sent"]
    results += [run(*args[:5]) for _ in range(3)]
    for out, lse in results:
        assert torch.equal(out, QUERY + 1)
        assert torch.equal(lse, QUERY.sum(-1).t())
        assert lse.is_contiguous() is needs_gradient


def test_what_a_former_state_has_decided_is_not_told_to_compiled_routers(covered, told):
    own = remember("forward", GIVEN, {}, plan("forward"), CALL, "FA2", state())
    attnreg.register_backend("math", required=False)
    assert express.forward(Kernel(RESULTS), GIVEN, {}, state(), own) is None
    assert told == {}


def test_a_backward_with_an_lse_that_lies_otherwise_is_not_handed_to_torchs_kernel_as_it_is(covered):
    now, kernel, ran = state(), Kernel(RESULTS[:3]), []
    args = list(backward_args())
    args[5] = torch.zeros(6, 2).t()
    made = plan("backward", "FA2", lambda *given: ran.append(given) or RESULTS[:3])
    remember("backward", tuple(args), {}, made, CALL, "FA2", now)
    assert express.backward(kernel, tuple(args), {}, now, None) == RESULTS[:3]
    assert kernel.calls == []
    assert len(ran) == 1


# ---- on a CPU


@pytest.fixture
def on_a_cpu(monkeypatch, as_on_a_gpu):
    monkeypatch.setattr(express, "_on_host", lambda tensor: True)


def assert_right(query, offsets, window=(-1, -1), **options):
    """Call `varlen_attn`, forward and backward, and hold it to float64."""
    leaves = [query.detach().clone().requires_grad_() for _ in "qkv"]
    out = attnreg.varlen_attn(*leaves, offsets, offsets, 6, 6, window_size=window, **options)
    grad = torch.ones_like(out)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right, _ = truth.varlen(*exact, offsets, offsets, window=window)
    got, wanted = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(right, exact, grad.double())
    for one, other in zip((out, *got), (right, *wanted), strict=True):
        truth.assert_near(one.detach(), other.detach())


@pytest.mark.parametrize("name", ["cpu", "math"])
def test_calls_on_a_cpu_are_known_and_their_offsets_looked_at_each_time(on_a_cpu, ran, monkeypatch, name):
    memory = numpy.array([0, 2, 6], dtype=numpy.int32)
    offsets = torch.from_numpy(memory)
    with attnreg.register_backend(name):
        for _ in range(4):
            assert_right(QUERY, offsets)
        assert len(state().express) == 1
        monkeypatch.setattr(flash, "prepare", lambda *_: pytest.fail("looked up again"))
        assert_right(torch.randn(6, 2, 8), offsets)
        memory[1] = 5  # which leaves no trace in the tensor
        assert_right(QUERY, offsets)
        memory[1] = 7
        with pytest.raises(attnreg.InvalidInputError, match="no decrease"):
            assert_right(QUERY, offsets)
        monkeypatch.undo()
    assert ran() == {name: (6, 6)}


def test_what_is_known_on_a_cpu_gives_way_to_scopes_and_registrations(on_a_cpu, ran):
    for _ in range(4):
        assert_right(QUERY, ENDS)
    assert ran() == {"cpu": (4, 4)}
    with attnreg.use_backend("math"):
        assert_right(QUERY, ENDS)
    assert_right(QUERY, ENDS, backend="math")
    with attnreg.register_backend("math"):
        assert_right(QUERY, ENDS)
    assert ran() == {"math": (3, 3)}
    assert_right(QUERY, ENDS)
    assert_right(QUERY, ENDS, window=(1, 0))
    assert ran() == {"cpu": (2, 2)}
