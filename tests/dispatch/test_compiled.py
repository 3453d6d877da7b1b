"""Promises of compiled routers: which calls they answer, and that it changes nothing about them."""

import ctypes
import dataclasses
import gc
import json
import re
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.fake_cudnn import memory
from support.processes import environment
from typer.testing import CliRunner

import attnreg
from attnreg import aten
from attnreg.aten import compiled, routing
from attnreg.cli import app
from attnreg.contract import offsets
from attnreg.contract.launchers import AddressLauncher
from attnreg.dispatch import scope
from attnreg.errors import BuildError, ConfigError, RegistrationError
from attnreg.torchlib import building, captured

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def installed(compiled_routers):
    """Install compiled routers for a test."""
    aten.restore()
    aten._kept_out = False
    aten.ensure()
    assert captured.compiled
    yield compiled_routers
    aten.restore()
    aten._kept_out = False
    assert not captured.compiled


def qkv(length=8, dtype=torch.float32, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, length, 16, generator=generator).to(dtype).requires_grad_(grad) for _ in "qkv"]


def attend(inputs, **options):
    return F.scaled_dot_product_attention(*inputs, **options)


def attend_and_back(inputs, **options):
    out = attend(inputs, **options)
    return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))


@pytest.fixture
def known(installed, monkeypatch):
    """Return whether a call is answered without the routers in Python."""
    original = routing.state

    def known(call):
        asked = []

        def state():
            asked.append(1)
            return original()

        monkeypatch.setattr(routing, "state", state)
        call()
        monkeypatch.setattr(routing, "state", original)
        return not asked

    return known


# ---- calls below torch's own entry points


def test_a_call_that_came_before_goes_straight_to_torchs_kernel_and_is_counted(known, ran):
    inputs = qkv(grad=True)
    wanted = attend_and_back(inputs)
    attnreg.register_backend("cpu")
    attnreg.reset_stats()
    for times in range(3):
        came_before = known(lambda: torch.testing.assert_close(attend_and_back(inputs), wanted))
        assert came_before == (times > 0)
    assert ran() == {"cpu": (3, 3)}


@pytest.mark.parametrize(
    "other",
    [
        lambda: attend(qkv(length=9)),
        lambda: attend(qkv(dtype=torch.bfloat16)),
        lambda: attend(qkv(), is_causal=True),
        lambda: attend(qkv(), scale=0.5),
        lambda: attend(qkv(), attn_mask=torch.zeros(8, 8)),
        lambda: attend(qkv(grad=True)),
    ],
    ids=["length", "dtype", "causal", "scale", "mask", "gradient"],
)
def test_a_call_that_differs_is_not_taken_for_it(known, other):
    attnreg.register_backend("cpu")
    attend(qkv())
    assert known(lambda: attend(qkv(seed=1)))
    assert not known(other)


def test_a_mode_that_capabilities_read_makes_another_call_of_it(known):
    attnreg.register_backend("cpu")
    attend(qkv())
    torch.use_deterministic_algorithms(True)
    try:
        assert not known(lambda: attend(qkv()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert known(lambda: attend(qkv()))


def test_another_backend_takes_over_at_once_and_gives_back_at_once(installed, ran):
    inputs = qkv()
    attnreg.register_backend("cpu")
    for _ in range(3):
        attend(inputs)
    with attnreg.register_backend("math"):
        attend(inputs)
    attend(inputs)
    assert ran() == {"cpu": (4, 0), "math": (1, 0)}


def test_a_scope_is_obeyed_by_calls_that_came_before_and_by_no_other_thread(known, ran):
    inputs = qkv()
    attnreg.register_backend("cpu")
    attend(inputs)
    with attnreg.use_backend("math"):
        attend(inputs)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(attend, inputs).result()
    assert known(lambda: attend(inputs))
    assert ran() == {"cpu": (3, 0), "math": (1, 0)}


def test_a_forward_in_a_scope_tells_its_backward(installed, ran):
    inputs = qkv(grad=True)
    attnreg.register_backend("cpu")
    attend_and_back(inputs)
    with attnreg.use_backend("math"):
        out = attend(inputs)
    torch.autograd.grad(out.sum(), inputs)
    assert ran() == {"cpu": (1, 1), "math": (1, 1)}


def test_while_nothing_is_registered_calls_pass_uncounted(known, ran):
    inputs = qkv(grad=True)
    attend_and_back(inputs)
    assert known(lambda: attend_and_back(inputs))
    assert known(lambda: attend(qkv(length=5)))
    assert ran() == {}
    attnreg.register_backend("math")
    attend(inputs)
    assert ran() == {"math": (1, 0)}


def test_settings_that_change_are_heeded_at_once(installed, ran):
    attnreg.register_backend("cpu")
    attend(qkv())
    attnreg.configure({"disabled": ["cpu"]})
    attend(qkv())
    assert ran() == {"cpu": (1, 0), "math": (1, 0)}


def test_counts_go_to_a_recording_too(installed, tmp_path):
    file = tmp_path / "trace.jsonl"
    attnreg.register_backend("cpu")
    with attnreg.record(file):
        for _ in range(4):
            attend(qkv())
    assert json.loads(file.read_text())["forward"] == 4


def test_a_reset_takes_what_compiled_routers_have_counted(installed):
    attnreg.register_backend("cpu")
    for _ in range(3):
        attend(qkv())
    attnreg.reset_stats()
    assert attnreg.stats().calls == {}


def test_counters_of_a_recording_go_with_it(installed, tmp_path):
    attnreg.register_backend("cpu")

    def record(number):
        with attnreg.record(tmp_path / f"{number}.jsonl"):
            attend(qkv())

    record(0)
    attnreg.stats()
    before = counters_alive()
    for number in range(1, 6):
        record(number)
    attnreg.stats()
    assert counters_alive() == before


def counters_alive():
    gc.collect()
    return sum(type(x) is attnreg.dispatch.counters.Counter for x in gc.get_objects())


def test_idle_ones_pass_everything_to_those_in_python(known):
    attnreg.register_backend("cpu")
    attend(qkv())
    with compiled.idle():
        attend(qkv())
        assert not known(lambda: attend(qkv()))
    attend(qkv())
    assert known(lambda: attend(qkv()))


def test_idle_while_they_are_taken_out_and_put_in_again(known):
    attnreg.register_backend("cpu")
    with compiled.idle():
        with compiled.idle():
            pass
        assert not captured.compiled
        aten.restore()
        assert not captured.compiled
    assert not captured.compiled
    aten._kept_out = False
    with compiled.idle():
        aten.ensure()
        assert not captured.compiled
    assert captured.compiled
    attend(qkv())
    assert known(lambda: attend(qkv()))


def test_more_calls_than_are_kept_begin_anew(op):
    ended = []

    class Run:
        def __call__(self, q, k, v):
            return q, q, k, v, 3

        def __del__(self):
            op.module.forget()  # what goes may do anything, as nothing waits for it
            ended.append(1)

    op.then = lambda module: module.accept(Run(), ())
    op.forward(Q, K, V, None, None)
    op.then = lambda module: module.accept(None, ())
    for number in range(4096):
        op.forward(Q, K, V, None, None, float(number + 2))
    assert ended == [1]


def test_uninstalling_leaves_torchs_kernels_and_installing_brings_them_back(known, ran):
    inputs = qkv()
    wanted = attend(inputs)
    attnreg.register_backend("math")
    attnreg.uninstall()
    assert not captured.compiled
    assert torch.equal(attend(inputs), wanted)
    assert ran() == {}
    attnreg.install()
    attnreg.register_backend("cpu")
    attend(inputs)
    assert known(lambda: attend(inputs))
    assert ran() == {"cpu": (2, 0)}


def test_threads_that_call_while_registrations_change_lose_no_call(installed, ran):
    inputs, calls = qkv(), 300
    wanted = attend(inputs)
    over = threading.Event()

    def switch():
        while not over.is_set():
            with attnreg.register_backend("math"):
                pass

    def work():
        return all(torch.allclose(attend(inputs), wanted, atol=1e-5) for _ in range(calls))

    with attnreg.register_backend("cpu"), ThreadPoolExecutor(5) as pool:
        switching = pool.submit(switch)
        done = [pool.submit(work) for _ in range(4)]
        right = [one.result() for one in done]
        over.set()
        switching.result()
    assert right == [True] * 4
    assert sum(forward for forward, _ in ran().values()) == 4 * calls


ONCE = """
import sys, torch, attnreg
from torch.nn import functional as F
from attnreg import aten
from attnreg.torchlib import building
from attnreg.dispatch import scope
building.built = lambda: __import__("pathlib").Path(sys.argv[1])
q = torch.randn(1, 2, 8, 16)
"""
OWN = """
aten.ensure()
F.scaled_dot_product_attention(q, q, q)
assert attnreg.stats().calls == {}
for _ in range(2):
    token = scope.enter(scope.OWN)
    aten.compiled.extension.announce(scope.UNKNOWN)
    F.scaled_dot_product_attention(q, q, q)
    scope.leave(token)
assert attnreg.stats().calls == {"cpu": {"forward": 2, "backward": 0}}, attnreg.stats()
F.scaled_dot_product_attention(q, q, q)
assert attnreg.stats().calls == {"cpu": {"forward": 2, "backward": 0}}, attnreg.stats()
"""
LATE = """
attnreg.register_backend("cpu")
F.scaled_dot_product_attention(q, q, q)
"""
LATER = """
import atexit

def last():
    ones = torch.ones(1, 1, 3, 8)
    print(F.scaled_dot_product_attention(ones, ones, ones).sum())

atexit.register(last)
"""
UNTOUCHED = """
import warnings
warnings.simplefilter("ignore")
import torch
q = torch.randn(1, 2, 8, 16)
torch.nn.functional.scaled_dot_product_attention(q, q, q)
"""


def process(script, file, **variables):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(file)],
        capture_output=True, text=True, check=False, env=environment(**variables),
    )  # fmt: skip


def test_the_fronts_calls_do_not_pass_where_nothing_is_registered_and_nobody_ever_chose(built_routers):
    result = process(ONCE + OWN, built_routers)
    assert result.returncode == 0, result.stderr


def test_calls_at_the_very_end_of_the_process_are_answered(built_routers):
    result = process(LATER + ONCE + LATE, built_routers)
    assert (result.stdout, result.returncode) == ("tensor(24.)\n", 0), result.stderr


def test_with_the_variable_and_nothing_built_a_program_nobody_touched_is_refused(tmp_path):
    variables = {"XDG_CACHE_HOME": str(tmp_path), "ATTNREG_ROUTERS": "compiled", "ATTNREG_BACKEND": "math"}
    result = process(UNTOUCHED, "", **variables)
    assert result.returncode == 1
    assert (
        "ConfigError: ATTNREG_ROUTERS=compiled: the call cache isn't compiled for this torch" in result.stderr
    )


FORKED = """
import os, sys, torch, attnreg
from torch.nn import functional as F
from attnreg.torchlib import building
building.built = lambda: __import__("pathlib").Path(sys.argv[1])
attnreg.register_backend("cpu")
q = torch.randn(1, 2, 8, 16)
torch.set_num_threads(1)
for _ in range(3):
    F.scaled_dot_product_attention(q, q, q)
child = os.fork()
for _ in range(2):
    F.scaled_dot_product_attention(q, q, q)
assert attnreg.stats().calls["cpu"]["forward"] == 5
with attnreg.register_backend("math"):
    F.scaled_dot_product_attention(q, q, q)
assert attnreg.stats().calls["math"]["forward"] == 1
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print("both")
os._exit(0) if not child else None
"""


def test_a_forked_process_goes_on_with_them(built_routers):
    result = subprocess.run(
        [sys.executable, "-c", FORKED, str(built_routers)], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.returncode) == ("both\n", 0), result.stderr


# ---- what the routers in Python tell, with ops of the tests' own

SIGNATURE = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, float scale=1.0)"
)
BACK = (
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, Tensor carrier)"
)


class Op:
    """A forward and a backward of the tests' own, each with a kernel of "torch's" and a router."""

    def __init__(self, module):
        self.module = module
        self.told = []
        self.then = lambda module: None
        self.libraries = [torch.library.Library("attnreg_compiled", "DEF")]
        self.libraries[0].define(f"forward{SIGNATURE} -> (Tensor, Tensor, Tensor, Tensor, SymInt)")
        self.libraries[0].define(f"backward{BACK} -> (Tensor, Tensor, Tensor)")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            self._register("torch", self._torchs_forward, self._torchs_backward)
            assert module.capture("attnreg_compiled", "forward", "CPU", 0, -1)
            assert module.capture("attnreg_compiled", "backward", "CPU", 1, 8)
            self._register("router", self._forward, self._backward)
        module.cover()
        self.forward = torch.ops.attnreg_compiled.forward.default
        self.backward = torch.ops.attnreg_compiled.backward.default

    def close(self):
        self.module.uncover()
        for library in reversed(self.libraries):
            library._destroy()

    def _register(self, name, forward, backward):
        library = torch.library.Library("attnreg_compiled", "IMPL")
        library.impl("forward", forward, "CPU")
        library.impl("backward", backward, "CPU")
        self.libraries.append(library)

    def _torchs_forward(self, query, *_, **__):
        self.told.append("torch")
        return query + 1, query.sum(-1), query.new_zeros(2), query.new_zeros(()), 7

    def _torchs_backward(self, grad, *_):
        self.told.append("torch")
        return grad + 1, grad + 2, grad + 3

    def _forward(self, query, *_, **__):
        self.told.append("router")
        self.then(self.module)
        return query + 1, query.sum(-1), query.new_zeros(2), query.new_zeros(()), 7

    def _backward(self, grad, *_):
        self.told.append("router")
        self.then(self.module)
        return grad + 1, grad + 2, grad + 3


@pytest.fixture
def op(compiled_routers):
    aten.restore()
    module = compiled_routers._module()
    module.uncover()
    module.forget()
    made = Op(module)
    yield made
    made.close()
    module.announce(0)
    module.forget()
    aten._kept_out = False


Q, K, V = (torch.randn(6, 2, 8) for _ in "qkv")
CARRIER = torch.zeros(3)[1:2]


@pytest.fixture
def ends():
    return torch.tensor([0, 2, 6], dtype=torch.int32)


def test_a_function_of_pythons_answers_with_tensors_numbers_and_undefined_tensors(op):
    op.then = lambda module: module.accept(lambda q, k, v: (q * 2, None, k, v, 3), ())
    op.forward(Q, K, V, None, None)
    out, lse, third, fourth, number = op.forward(Q, K, V, None, None)
    assert op.told == ["router"]
    assert torch.equal(out, Q * 2)
    assert lse is None
    assert third is K
    assert fourth is V
    assert number == 3


def test_a_function_that_returns_none_leaves_the_call_to_the_router(op):
    op.then = lambda module: module.accept(lambda *_: None, ())
    op.forward(Q, K, V, None, None)
    out, *_ = op.forward(Q, K, V, None, None)
    assert op.told == ["router", "router"]
    assert torch.equal(out, Q + 1)


def test_an_error_of_a_function_is_the_callers_and_not_counted(op):
    counter = attnreg.dispatch.counters.Counter()

    def fails(*_):
        raise LookupError("of a kernel")

    op.then = lambda module: module.accept(fails, (counter,))
    op.forward(Q, K, V, None, None)
    with pytest.raises(LookupError, match="of a kernel"):
        op.forward(Q, K, V, None, None)
    attnreg.dispatch.counters.collect()
    assert counter.value == 0


def test_what_is_told_after_a_change_is_not_kept(op):
    def tell(module):
        module.forget()
        module.accept(None, ())
        module.accept_passing()

    op.then = tell
    for _ in range(2):
        op.forward(Q, K, V, None, None)
    assert op.told == ["router", "router"]


def test_what_is_told_outside_a_call_is_not_kept(op):
    op.module.accept(None, ())
    op.module.accept_passing()
    op.module.accept_returned(CARRIER, None, ())
    op.forward(Q, K, V, None, None)
    op.backward(Q, Q, K, V, Q, Q, Q, Q, CARRIER)
    assert op.told == ["router", "router"]


BESIDE = tuple(torch.full((2,), float(number)) for number in range(3))


def ends_of(ends):
    """Return the offsets of queries and of keys: a pair, or one tensor for both."""
    return ends if isinstance(ends, tuple) else (ends, ends)


class Front:
    """Calls the op as `varlen_attn` does, and has its router tell what it tells of such calls."""

    def __init__(self, op, run, back, saved=False):
        self.op, self.run, self.back, self.saved = op, run, back, saved
        self.counter = attnreg.dispatch.counters.Counter()

    def forward(self, ends, tensors=(Q, K, V)):
        """Return who answered, and the results."""

        def tell(module):
            beside = (BESIDE[0], CARRIER, BESIDE[2])
            module.accept_sent(self.run, (self.counter,), beside, self.saved)
            module.accept_offsets(*ends_of(ends), 6, 6)

        self.op.then = tell
        self.op.told.clear()
        self.op.module.announce(scope.KNOWN)
        results = self.op.forward(*tensors, *ends_of(ends))
        return self.op.told or ["function"], results

    def backward(self, ends, grad=Q, carrier=CARRIER):
        self.op.then = lambda module: module.accept_returned(carrier, self.back, (self.counter,))
        self.op.told.clear()
        results = self.op.backward(grad, Q, K, V, Q, Q, *ends_of(ends), carrier)
        return self.op.told or ["function"], results

    def counted(self):
        attnreg.dispatch.counters.collect()
        value, self.counter.value = self.counter.value, 0
        return value


class OnAddresses:
    """The tests' kernels, run on addresses: a forward or a backward of tensors that lie like `Q`."""

    def __init__(self, backward=False, **options):
        first = ((*Q.shape,), Q.stride(), torch.float32)
        others = [first] * 2 if backward else [((6, 2), (1, 6), torch.float32)]
        self.launched, self.derived, self.can, self.keep = [], [], True, True
        self.vectors = []
        given = 6 if backward else 3
        operands = 0, *range(given, given + len(others) + 1), given + len(others) + 1
        self.lse = given - 1 if backward else None
        described = AddressLauncher(
            None, self.launch, operands + ((self.lse,) if backward else ()), (first, *others), 48, None,
            self.derive,
        )  # fmt: skip
        self.described = dataclasses.replace(described, **options).described()

    def derive(self, *ends):
        self.derived.append(ends)
        if self.can is None:
            return None
        vector = ends[0].double()
        if self.keep:
            vector = offsets.derived_from(list(ends), 0, (id(self),), lambda: vector)
        self.vectors.append(weakref.ref(vector))
        return [vector]

    def launch(self, addresses, workspace, stream):
        pointers = (ctypes.c_void_p * 6).from_address(addresses)
        self.launched.append((workspace, stream))
        memory(workspace, torch.uint8, (48,), (1,)).fill_(1)
        if not self.can:
            return False
        source = memory(pointers[0], torch.float32, Q.shape, Q.stride())
        memory(pointers[1], torch.float32, Q.shape, Q.stride()).copy_(source + 1)
        if self.lse is None:
            memory(pointers[2], torch.float32, (6, 2), (1, 6)).copy_(source.sum(-1))
            self.vector = memory(pointers[3], torch.float64, (3,), (1,)).tolist()
        else:
            for place in (2, 3):
                memory(pointers[place], torch.float32, Q.shape, Q.stride()).copy_(source + place)
            self.vector = memory(pointers[4], torch.float64, (3,), (1,)).tolist()
            self.lse_read = memory(pointers[5], torch.float32, (Q.numel(),), (1,)).clone()
        return True


@pytest.fixture(params=["torch", "function", "addresses"])
def front(op, ends, request):
    """Return a front whose calls came before, and who answers them."""
    if request.param == "torch":
        made = Front(op, None, None)
    elif request.param == "addresses":
        made = Front(op, OnAddresses().described, OnAddresses(backward=True).described)
    else:
        made = Front(
            op,
            lambda q, k, v, cu_seqlens_q, cu_seqlens_k: (q + 1, q.sum(-1)),
            lambda grad, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k: (grad + 1, grad + 2, grad + 3),
        )
    assert made.forward(ends)[0] == ["router"]
    assert made.backward(ends)[0] == ["router"]
    return made, ["torch" if request.param == "torch" else "function"]


def test_a_packed_call_that_came_before_is_answered_with_what_lies_beside(front, ends):
    made, who = front
    answered_by, (out, lse, rng_state, carrier, last) = made.forward(ends)
    assert answered_by == who
    assert torch.equal(out, Q + 1)
    assert torch.equal(lse, Q.sum(-1))
    assert rng_state is BESIDE[0]
    assert carrier is CARRIER
    assert torch.equal(last, BESIDE[2])
    assert made.counted() == 1


def test_its_backward_is_known_by_what_it_was_handed(front, ends):
    made, who = front
    answered_by, grads = made.backward(ends)
    assert answered_by == who
    assert all(torch.equal(grad, Q + (1 + number)) for number, grad in enumerate(grads))
    assert made.counted() == 1
    assert made.backward(ends, carrier=torch.zeros(3)[1:2])[0] == ["router"]


def test_a_backward_in_another_mode_goes_to_the_router(front, ends):
    made, who = front
    torch.use_deterministic_algorithms(True)
    try:
        assert made.backward(ends)[0] == ["router"]
    finally:
        torch.use_deterministic_algorithms(False)
    made.backward(ends)  # the router has told of the other mode meanwhile
    assert made.backward(ends)[0] == who


def test_offsets_that_nobody_has_looked_at_go_to_the_router_once(front):
    made, who = front
    others = torch.tensor([0, 3, 6], dtype=torch.int32)
    assert made.forward(others)[0] == ["router"]
    assert made.forward(others)[0] == who
    others[1] = 0  # a sequence without anything in it
    assert made.forward(others)[0] == ["router"]


def test_offsets_where_others_have_been_are_not_taken_for_them(front):
    made, _ = front
    for _ in range(200):  # sixty-four are kept, then what they hold goes and others come to lie there
        fresh = torch.tensor([0, 3, 6], dtype=torch.int32)
        assert made.forward(fresh)[0] == ["router"]
        del fresh


def test_offsets_of_inference_mode_always_go_to_the_router(front):
    made, _ = front
    with torch.inference_mode():
        ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    assert [made.forward(ends)[0] for _ in range(2)] == [["router"]] * 2


def test_calls_are_told_apart_by_how_their_tensors_lie(front, ends):
    made, who = front
    unaligned = torch.randn(6 * 2 * 8 + 1)[1:].view(6, 2, 8)
    turned = torch.randn(2, 6, 8).transpose(0, 1)
    for other in (unaligned, turned):
        assert made.forward(ends, (other, K, V))[0] == ["router"]
        assert made.backward(ends, grad=other)[0] == ["router"]
    for other in (unaligned, turned):
        assert made.forward(ends, (other, K, V))[0] == who
        assert made.backward(ends, grad=other)[0] == who
    assert made.forward(ends)[0] == who
    assert made.backward(ends)[0] == who


def test_calls_are_told_apart_by_whether_their_offsets_are_one_tensor(front, ends):
    made, who = front
    apart = ends, ends.clone()
    assert made.forward(apart)[0] == ["router"]
    assert made.forward(apart)[0] == who
    assert made.backward(apart)[0] == ["router"]
    assert made.backward(apart)[0] == who
    assert made.forward(ends)[0] == who
    assert made.backward(ends)[0] == who


def test_another_call_than_the_one_announced_goes_to_the_router(front, ends):
    made, who = front
    longer = torch.randn(7, 2, 8)
    assert made.forward(ends, (longer, K, V))[0] == ["router"]
    assert made.forward(ends)[0] == who


def test_a_call_that_its_front_doesnt_know_goes_to_the_router(front, ends):
    made, who = front
    made.op.then = lambda module: module.accept_sent(None, (), (), False)
    made.op.told.clear()
    made.op.module.announce(scope.UNKNOWN)
    made.op.forward(Q, K, V, ends, ends)
    assert made.op.told == ["router"]
    made.op.module.announce(scope.UNKNOWN)
    made.op.forward(Q, K, V, ends, ends)
    assert made.op.told == ["router", "router"]
    assert made.forward(ends)[0] == who


def test_dense_calls_are_told_apart_by_how_their_tensors_lie(op):
    op.then = lambda module: module.accept(lambda q, k, v: (q * 2, q, k, v, 3), ())
    turned = torch.randn(2, 6, 8).transpose(0, 1)
    for query in (Q, turned, Q, turned):
        op.forward(query, K, V, None, None)
    assert op.told == ["router", "router"]


def test_an_announcement_is_of_one_call_only(front, ends):
    made, _ = front
    made.forward(ends)
    made.op.then = lambda module: None
    made.op.told.clear()
    made.op.forward(Q, K, V, ends, ends)
    assert made.op.told == ["router"]


def test_a_change_forgets_packed_calls(front, ends):
    made, who = front
    made.op.module.forget()
    assert made.forward(ends)[0] == ["router"]
    assert made.backward(ends)[0] == ["router"]
    assert made.forward(ends)[0] == who
    assert made.backward(ends)[0] == who


# ---- kernels that are run on addresses


@pytest.mark.parametrize("saved", [False, True])
def test_a_kernel_is_run_on_addresses_alone(op, ends, saved):
    kernel, back = OnAddresses(), OnAddresses(backward=True)
    front = Front(op, kernel.described, back.described, saved)
    front.forward(ends)
    front.backward(ends)
    (_, (out, lse, *_)), (_, (again, *_)) = front.forward(ends), front.forward(ends)
    assert torch.equal(out, Q + 1)
    assert out.data_ptr() != again.data_ptr()
    assert torch.equal(lse, Q.sum(-1))
    assert lse.stride() == ((2, 1) if saved else (1, 6))
    assert kernel.vector == [0, 2, 6]
    assert [(workspace != 0, stream) for workspace, stream in kernel.launched] == [(True, 0)] * 2
    answered_by, grads = front.backward(ends)
    assert answered_by == ["function"]
    assert all(torch.equal(grad, Q + (1 + number)) for number, grad in enumerate(grads))
    assert front.counted() == 3
    assert len(back.launched) == 1


def test_an_lse_is_copied_to_where_a_kernel_wants_it(op, ends):
    kernel = OnAddresses(backward=True, lse_strides=(1, 6, 12))
    front = Front(op, None, kernel.described)
    front.backward(ends)
    assert front.backward(ends)[0] == ["function"]
    wanted = torch.empty_strided(Q.shape, (1, 6, 12)).copy_(Q)
    assert torch.equal(kernel.lse_read, wanted.as_strided((Q.numel(),), (1,)))


def test_what_is_derived_of_offsets_is_kept_while_they_are_unchanged(op, ends):
    kernel, others = OnAddresses(), torch.tensor([0, 3, 6], dtype=torch.int32)
    front = Front(op, kernel.described, None)
    for number in range(3):
        given = others if number == 1 else ends
        for _ in range(4):
            front.forward(given)
        assert kernel.vector == given.tolist()
        assert [pair[0] is others for pair in kernel.derived] == [False, True, False][: number + 1]
    ends[1] = 1
    front.forward(ends)
    assert front.forward(ends)[0] == ["function"]
    assert kernel.vector == [0, 1, 6]


def test_what_a_backward_derives_follows_what_is_written_to_offsets(op, ends):
    kernel = OnAddresses(backward=True)
    front = Front(op, None, kernel.described)
    front.backward(ends)
    for first in (2, 2, 1, 1):
        if ends[1] != first:
            ends[1] = first
        assert front.backward(ends)[0] == ["function"]
        assert kernel.vector == [0, first, 6]
    assert len(kernel.derived) == 2


def test_what_is_derived_goes_with_the_offsets_that_it_was_derived_of(op):
    kernel = OnAddresses()
    front = Front(op, kernel.described, None)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    for _ in range(3):
        front.forward(ends)
    kernel.derived.clear()
    (vector,) = kernel.vectors
    assert vector() is not None
    op.then = None  # has them in hand
    del ends
    gc.collect()
    assert vector() is None


def test_what_nobody_keeps_is_derived_anew(op, ends):
    kernel = OnAddresses()
    kernel.keep = False
    front = Front(op, kernel.described, None)
    for _ in range(4):
        front.forward(ends)
    assert len(kernel.derived) == 3
    assert kernel.vector == [0, 2, 6]


@pytest.mark.parametrize("can", [False, None], ids=["launch", "derive"])
def test_a_kernel_that_cant_be_run_after_all_leaves_the_call_to_the_router(op, ends, can):
    kernel = OnAddresses()
    front = Front(op, kernel.described, None)
    front.forward(ends)
    kernel.can = can
    assert front.forward(ends)[0] == ["router"]
    assert len(kernel.launched) == (can is False)
    assert front.counted() == 0
    kernel.can = True
    assert front.forward(ends)[0] == ["function"]


@pytest.mark.parametrize("what", ["launch", "derive"])
def test_an_error_of_a_kernel_on_addresses_is_the_callers(op, ends, what):
    def fails(*_):
        raise LookupError("of a kernel")

    front = Front(op, OnAddresses(**{what: fails}).described, None)
    front.forward(ends)
    with pytest.raises(LookupError, match="of a kernel"):
        front.forward(ends)
    assert front.counted() == 0


def test_an_operand_that_there_isnt_is_an_error(op, ends):
    front = Front(op, OnAddresses(operands=(0, 9)).described, None)
    front.forward(ends)
    with pytest.raises(IndexError, match=r"AddressLauncher.operands has 9, expected less than 6"):
        front.forward(ends)


@pytest.mark.parametrize(
    ("what", "returned", "told"),
    [
        ("launch", None, "AddressLauncher.launch returned a NoneType, expected True or False"),
        ("derive", (1,), "AddressLauncher.derive returned a tuple, expected a list of tensors or None"),
        ("derive", [3], "AddressLauncher.derive returned a list with a int, expected tensors"),
    ],
)
def test_what_breaks_the_contract_of_addresses_is_an_error_that_says_so(op, ends, what, returned, told):
    front = Front(op, OnAddresses(**{what: lambda *_: returned}).described, None)
    front.forward(ends)
    with pytest.raises(TypeError, match=re.escape(told)):
        front.forward(ends)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"operands": [0, 1]}, "AddressLauncher.operands: got [0, 1], expected a tuple"),
        ({"operands": (0, -1)}, "AddressLauncher: got -1, expected whole numbers from 0"),
        ({"lse_strides": 0}, "AddressLauncher.lse_strides: got 0, expected a tuple"),
        ({"workspace": 0.5}, "AddressLauncher: got 0.5, expected whole numbers from 0"),
    ],
)
def test_an_address_call_that_makes_no_sense_is_refused(changes, told):
    with pytest.raises(RegistrationError) as error:
        AddressLauncher(**{"run": None, "launch": None, "operands": (), "results": ()} | changes)
    assert str(error.value) == told


# ---- the front of varlen_attn


class Sender:
    """Sends calls as `varlen_attn` does, to the tests' own op."""

    def __init__(self, op):
        self.module, self.op = op.module, op
        self.module.lead_to("attnreg_compiled::forward", scope.variable)
        self.own = scope.Own(())
        self.scopes = []
        op.then = lambda module: self.scopes.append(scope.current())

    def __call__(self, *tensors, rest=(4, 4, False, (-1, -1), None, False)):
        return self.module.varlen(*tensors, *rest)

    def learn(self, *tensors, given=(), options=None, **rest):
        """Have a call known, sent with these arguments behind the tensors."""
        known_by = self(*tensors, **rest)
        assert type(known_by) is bytes
        self.module.accept_sending(known_by, self.own, given, options or {})
        return known_by


@pytest.fixture
def sender(op):
    return Sender(op)


def test_a_call_that_came_before_is_sent_on_in_its_scope(sender, ends):
    sender.learn(Q, K, V, ends, ends)
    out, lse = sender(Q, K, V, ends, ends)
    assert torch.equal(out, Q + 1)
    assert torch.equal(lse, Q.sum(-1))
    assert sender.scopes == [sender.own]
    assert scope.current() is None


def test_it_is_sent_with_what_lies_behind_the_tensors(op, ends):
    seen = []
    library = torch.library.Library("attnreg_compiled", "FRAGMENT")
    arguments = (
        "Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? e, int f, bool g, *, float? h=None, int? i=7"
    )
    library.define(f"rest({arguments}) -> (Tensor, Tensor)")
    try:
        library.impl("rest", lambda *args, **kwargs: seen.append((args[5:], kwargs)) or args[:2], "CPU")
        op.module.lead_to("attnreg_compiled::rest", scope.variable)
        tensors = Q, K, V, ends, ends
        calls = [((3, True), {}), ((-1, False), {"h": 0.25, "i": None})]
        for number, (given, options) in enumerate(calls):
            rest = (number, 4, False, (-1, -1), None, False)
            op.module.accept_sending(op.module.varlen(*tensors, *rest), scope.Own(()), given, options)
            assert op.module.varlen(*tensors, *rest)[1] is K
        assert seen == [((3, True), {}), ((-1, False), {"h": 0.25, "i": None})]
    finally:
        library._destroy()


OTHER = {
    "shape": lambda q, k, v, a, b: (q[:5].clone(), k, v, a, b),
    "dtype": lambda q, k, v, a, b: (q.double(), k, v, a, b),
    "one more dimension": lambda q, k, v, a, b: (q[None], k, v, a, b),
    "sequences": lambda q, k, v, a, b: (q, k, v, a, b[:2].clone()),
    "a gradient": lambda q, k, v, a, b: (q, k, v.clone().requires_grad_(), a, b),
}
REST = [
    (5, 4, False, (-1, -1), None, False),
    (4, 5, False, (-1, -1), None, False),
    (4, 4, True, (-1, -1), None, False),
    (4, 4, False, (3, -1), None, False),
    (4, 4, False, (-1, 0), None, False),
    (4, 4, False, (-1, -1), 0.0, False),
    (4, 4, False, (-1, -1), 0.5, False),
    (4, 4, False, (-1, -1), None, True),
]


def test_calls_that_differ_in_anything_that_decides_are_told_apart(sender, ends):
    tensors = Q, K, V, ends, ends
    known_by = {sender.learn(*tensors)}
    for other in OTHER.values():
        known_by.add(sender(*other(*tensors)))
    for rest in REST:
        known_by.add(sender(*tensors, rest=rest))
    torch.use_deterministic_algorithms(True)
    try:
        known_by.add(sender(*tensors))
        torch.use_deterministic_algorithms(True, warn_only=True)
        known_by.add(sender(*tensors))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(type(one) is bytes for one in known_by)
    assert len(known_by) == 1 + len(OTHER) + len(REST) + 2
    with torch.no_grad():
        assert type(sender(*OTHER["a gradient"](*tensors))) is tuple  # it needs none there


class Subclass(torch.Tensor):
    pass


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_calls_that_take_more_than_sending_are_left_to_python(sender, ends):
    sender.learn(Q, K, V, ends, ends)
    good = (4, 4, False, (-1, -1), None, False)
    for place, wrong in [
        (0, 4.0),
        (1, True),
        (2, 1),
        (3, [-1, -1]),
        (3, (-1,)),
        (3, (-1, None)),
        (4, 1),
        (5, None),
    ]:
        assert sender(Q, K, V, ends, ends, rest=(*good[:place], wrong, *good[place + 1 :])) is None
    assert sender(Q, K, V, ends, ends, rest=(2**70, *good[1:])) is None
    for other in (None, 3, Q.as_subclass(Subclass), torch._neg_view(Q), torch.empty_like(Q, device="meta")):
        assert sender(other, K, V, ends, ends) is None
    with Mode():
        assert sender(Q, K, V, ends, ends) is None
    with torch.autocast("cpu"):
        assert sender(Q, K, V, ends, ends) is None
    assert torch.vmap(lambda q: q if sender(q, K, V, ends, ends) is None else q * 0)(Q[None]).equal(Q[None])
    assert type(sender(Q, K, V, ends, ends)) is tuple
    with attnreg.use_backend("math"):
        assert sender(Q, K, V, ends, ends) is None
    with compiled.idle():
        assert sender(Q, K, V, ends, ends) is None
    sender.module.lead_to("attnreg_compiled::forward", scope.variable)
    sender.learn(Q, K, V, ends, ends)
    sender.module.uncover()
    assert sender(Q, K, V, ends, ends) is None


def test_a_change_forgets_them_and_what_was_found_out_before(sender, ends):
    sender.own = ends.clone()  # whatever can be watched
    told = weakref.ref(sender.own)
    before = sender.learn(Q, K, V, ends, ends)
    sender.own = None
    sender.module.forget()
    assert told() is None
    assert type(sender(Q, K, V, ends, ends)) is bytes
    sender.module.accept_sending(before, scope.Own(()), (), {})
    assert type(sender(Q, K, V, ends, ends)) is bytes


def test_an_error_is_the_callers_and_leaves_no_scope_and_no_announcement(sender, ends):
    def fail(_):
        raise LookupError("of a kernel")

    sender.learn(Q, K, V, ends, ends)
    sender.op.then = lambda module: module.accept(None, ())
    sender.op.forward(Q, K, V, ends, ends)
    sender.op.then = fail
    with pytest.raises(LookupError, match="of a kernel"):
        sender(Q, K, V, ends, ends)
    assert scope.current() is None
    sender.op.told.clear()
    sender.op.forward(Q, K, V, ends, ends)
    assert sender.op.told == ["torch"]  # known, as nothing is announced


def test_gradients_flow_through_what_is_sent(sender, ends):
    library = torch.library.Library("attnreg_compiled", "IMPL")
    query = Q.clone().requires_grad_()

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return q + 1

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    def forward(q, *_, **__):
        return Function.apply(q), q.sum(-1), q, q, 7

    try:
        library.impl("forward", forward, "AutogradCPU")
        sender.learn(query, K, V, ends, ends)
        out, _ = sender(query, K, V, ends, ends)
        (grad,) = torch.autograd.grad(out.sum(), query)
        assert torch.equal(grad, torch.full_like(Q, 3.0))
    finally:
        library._destroy()


def test_a_backward_known_by_a_carrier_that_nobody_holds_is_not_kept(op, ends):
    op.then = lambda module: module.accept(None, ())
    for _ in range(2):
        op.backward(Q, Q, K, V, Q, Q, ends, ends, CARRIER)
    assert op.told == ["router", "router"]
    op.then = lambda module: module.accept_returned(torch.zeros(3)[1:2], None, ())
    op.backward(Q, Q, K, V, Q, Q, ends, ends, CARRIER)
    op.then = lambda module: module.accept_returned(CARRIER, None, ())
    op.backward(Q, Q, K, V, Q, Q, ends, ends, CARRIER)
    assert op.told == ["router"] * 4
    op.backward(Q, Q, K, V, Q, Q, ends, ends, CARRIER)
    assert op.told[4:] == ["torch"]


def test_dense_backwards_whose_lse_begins_inside_a_storage_obey_scopes(installed, ran):
    """There the LSE carries the forward's choice, by where it begins, and addresses come back."""
    attnreg.register_backend("cpu")
    q, k, v = qkv()
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, lse = forward(q, k, v)
    ran()
    for _ in range(100):
        inside = torch.empty(lse.numel() + 64).as_strided(lse.shape, lse.stride(), 16).copy_(lse)
        backward(out, q, k, v, out, inside, 0.0, False)
        del inside
        with attnreg.use_backend("math"):
            results = forward(q, k, v)
        backward(results[0], q, k, v, *results, 0.0, False)
        del results
    assert ran() == {"cpu": (0, 100), "math": (100, 100)}


# ---- building, and asking for them


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """Have nothing built on this machine; returns where it would be."""
    aten.restore()
    aten._kept_out = False
    monkeypatch.setattr(building.caches, "folder", lambda purpose: tmp_path / purpose)
    monkeypatch.setattr(building, "built", BUILT)
    monkeypatch.setattr(compiled, "_loaded", None)
    building.target.cache_clear()
    yield tmp_path / "routers"
    building.target.cache_clear()
    aten.restore()
    aten._kept_out = False


BUILT = building.built


def test_a_compiler_that_is_missing_or_fails_is_told(unbuilt, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 1
    assert "there is no C++ compiler, looked for CXX=no-such-compiler" in result.output
    monkeypatch.setenv("CXX", "g++ '-O2")
    assert "CXX=g++ '-O2: No closing quotation" in CliRunner().invoke(app, ["build"]).output
    monkeypatch.setenv("CXX", "false")
    result = CliRunner().invoke(app, ["build", "--json"])
    assert result.exit_code == 1
    assert "says\nexit status 1" in json.loads(result.stdout)["error"]["message"]
    assert list(unbuilt.iterdir()) == []


def test_build_makes_files_that_load_and_tells_where(
    unbuilt, built_routers, built_cpu_kernel, monkeypatch, tmp_path
):
    script = tmp_path / "compiler"
    # What a compiler would take half a minute for was made before.
    script.write_text(
        f"""#!/bin/sh
while [ "$1" != -o ]; do shift; done
case "$2" in *attnreg_cpu*) cp {built_cpu_kernel} "$2";; *) cp {built_routers} "$2";; esac
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} --an-option")
    result = CliRunner().invoke(app, ["build", "--json"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["file"] == str(building.target())
    assert made["cpu_kernel"] == str(building.target(building.CPU_KERNEL))
    assert building.loaded_cpu_kernel()
    assert list(unbuilt.iterdir()) == [building.target()]
    assert building.built() == building.target()
    info = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert info["routers"]["compiled"] == {"file": str(building.target()), "problem": None}
    monkeypatch.setenv("ATTNREG_ROUTERS", "python")
    result = CliRunner().invoke(app, ["info"])
    assert "not used: ATTNREG_ROUTERS=python leaves them out" in " ".join(result.output.split())


def test_what_was_compiled_and_does_not_load_is_not_kept(unbuilt, monkeypatch, tmp_path):
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo junk > "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 1
    assert "ImportError" in result.output
    assert list(unbuilt.iterdir()) == []


def test_where_one_of_both_can_not_be_compiled_the_other_is_kept(
    unbuilt, built_routers, monkeypatch, tmp_path
):
    script = tmp_path / "compiler"
    script.write_text(
        f"""#!/bin/sh
while [ "$1" != -o ]; do shift; done
case "$2" in *attnreg_cpu*) echo no such instructions >&2; exit 1;; *) cp {built_routers} "$2";; esac
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    result = CliRunner().invoke(app, ["build", "--json"])
    assert result.exit_code == 1
    assert "the CPU kernel can't be compiled" in result.stderr and "no such instructions" in result.stderr
    made = json.loads(result.stdout)
    assert made["file"] == str(building.target()) and "cpu_kernel" not in made
    assert "the CPU kernel can't be compiled" in made["error"]["message"]
    assert building.built() == building.target()
    result = CliRunner().invoke(app, ["build"])
    assert result.exit_code == 1
    assert "built" in result.stdout and "the CPU kernel" in result.stderr


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_can_write_to_is_not_run(unbuilt, built_routers, caplog, mode):
    unbuilt.mkdir(parents=True)
    building.target().write_bytes(built_routers.read_bytes())
    unbuilt.chmod(mode)
    with attnreg.register_backend("cpu"):
        assert not captured.compiled
    assert "others may write to it" in caplog.text
    unbuilt.chmod(0o700)
    building.target().chmod(mode)
    with pytest.raises(BuildError, match="others may write to it"):
        building.loaded()


@pytest.mark.parametrize(("asked", "used"), [("", True), ("compiled", True), ("Python", False)])
def test_they_are_used_where_built_unless_the_variable_says_otherwise(
    asked, used, unbuilt, built_routers, monkeypatch
):
    monkeypatch.setattr(building, "built", lambda: built_routers)
    monkeypatch.setenv("ATTNREG_ROUTERS", asked)
    with attnreg.register_backend("cpu"):
        assert captured.compiled is used
        assert (compiled.extension is not None) is used


def test_asked_for_and_not_built_is_an_error_that_says_what_to_do(unbuilt, monkeypatch, ran):
    monkeypatch.setenv("ATTNREG_ROUTERS", "compiled")
    with pytest.raises(ConfigError) as error:
        attnreg.register_backend("cpu")
    assert str(error.value) == (
        "ATTNREG_ROUTERS=compiled: the call cache isn't compiled for this torch and Python; "
        "`attnreg build` does it"
    )
    assert not aten.installed()
    assert attnreg._registry.registrations() == ()


def test_not_built_and_not_asked_for_is_no_matter(unbuilt, caplog):
    with attnreg.register_backend("cpu"):
        attend(qkv())
        assert not captured.compiled
    assert caplog.messages == []


def test_a_file_that_does_not_load_is_a_warning_and_python_serves(unbuilt, caplog, ran):
    unbuilt.mkdir(parents=True)
    building.target().write_bytes(b"no library")
    with attnreg.register_backend("cpu"):
        attend(qkv())
    assert ran() == {"cpu": (1, 0)}
    assert len(caplog.messages) == 1
    assert "can't be loaded" in caplog.messages[0]
    assert "`attnreg build` makes it anew" in caplog.messages[0]


def test_before_the_routers_are_in_tables_are_looked_up_as_if_they_were(unbuilt, built_routers, monkeypatch):
    assert not attnreg.selection.policy.current().tables.compiled
    monkeypatch.setattr(building, "built", lambda: built_routers)
    assert captured.compiled is None
    assert attnreg.selection.policy.current().tables.compiled
    monkeypatch.setenv("ATTNREG_ROUTERS", "python")
    attnreg.reload()
    assert not attnreg.selection.policy.current().tables.compiled
    monkeypatch.delenv("ATTNREG_ROUTERS")
    attnreg.reload()
    aten.ensure()
    assert attnreg.selection.policy.current().tables.compiled
    with compiled.idle():
        assert not attnreg.selection.policy.current().tables.compiled


def test_the_variable_alone_has_nothing_served(monkeypatch):
    monkeypatch.setenv("ATTNREG_ROUTERS", "python")
    attnreg.reload()
    assert not attnreg.selection.policy.is_active()


def test_a_table_from_before_there_were_any_has_the_times_of_those_in_python():
    front = attnreg.tuning.points.Front
    found = front.from_dict({"backend": "a", "varlen": True, "direction": "forward", "host_us": 3.0})
    assert found == front("a", True, "forward", 3.0, compiled=False)
