"""Promises of launchers: functions, torch's own kernels and kernels on addresses, run by the call cache."""

import gc
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.dense import assert_right, with_gradients
from support.launcher_kinds import (
    KINDS,
    PACKED,
    SEEN,
    SHAPE,
    InC,
    OnAddresses,
    assert_equal,
    backward_function,
    backward_tensors,
    define_kernels,
    forward_function,
    lse_of,
    op_launcher,
    tensors,
)

import attnreg
from attnreg.core.dispatch import counters
from attnreg.core.launching.launchers import (
    MAX_K,
    MAX_Q,
    AddressLauncher,
    FunctionLauncher,
    NativeLauncher,
    OpLauncher,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- each kind


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_kind_runs_dense_calls_and_is_counted(op, make):
    op.forward, op.backward = make(SHAPE)
    for seed in range(4):
        q, k, v = tensors(seed=seed)
        planned, (out, lse, state, _, length) = op.planned(q, k, v)
        assert planned == (seed == 0)
        assert_equal((out, lse), (q + 1, lse_of(q)) if planned else forward_function(q, k, v))
        assert (state.shape, length, lse.is_contiguous()) == ((2,), 6, True)
        given = backward_tensors(seed=seed)
        planned, grads = op.planned_back(*given, torch.zeros(()))
        assert planned == (seed == 0)
        assert_equal(grads, [given[0] + n for n in (1, 2, 3)] if planned else backward_function(*given))
    assert op.counted() == 6


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_kind_runs_packed_calls_and_is_counted(packed_plan, pair, make):
    packed_plan.forward, packed_plan.backward = make(PACKED)
    for seed in range(4):
        q, k, v = tensors(PACKED, seed)
        q.requires_grad_()
        planned, (out, lse) = packed_plan.planned(q, k, v, pair, pair)
        assert planned == (seed == 0)
        assert_equal((out, lse), (q + 1, lse_of(q)) if planned else forward_function(q, k, v))
        # What autograd keeps of a plan's forward may lie otherwise in memory than what a launcher returns.
        planned, (grad,) = packed_plan.planned_back(out, [q])
        assert planned <= (seed < 2)
        assert torch.equal(grad, torch.ones_like(q) * (1 if planned else 2))
    assert packed_plan.counted() >= 5


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_kind_runs_dense_calls_of_whatever_lengths(op, make):
    op.forward, op.backward = make(SHAPE)
    for number, (batch, rows) in enumerate([(2, 8), (3, 12), (5, 4), (2, 512), (7, 20)]):
        given = backward_tensors((batch, rows, 2, 8), number)
        _, q, k, v, *_ = given
        planned, (out, lse, *_, length) = op.planned(q, k, v)
        assert (planned, length) == (number == 0, rows)
        assert_equal((out, lse), (q + 1, lse_of(q)) if planned else forward_function(q, k, v))
        planned, grads = op.planned_back(*given, torch.zeros(()))
        assert planned == (number == 0)
        assert_equal(grads, [given[0] + n for n in (1, 2, 3)] if planned else backward_function(*given))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_kind_runs_packed_calls_of_whatever_lengths(packed_plan, make):
    packed_plan.forward, packed_plan.backward = make(PACKED)
    for number, lengths in enumerate([(2, 6), (5, 6, 9), (8, 4), (30, 70), (2, 3, 2, 2, 3)]):
        ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        q, k, v = tensors((sum(lengths), 2, 8), number)
        q.requires_grad_()
        options = {"max_q": max(lengths), "max_k": max(lengths)}
        planned, (out, lse) = packed_plan.planned(q, k, v, ends, ends, **options)
        assert planned == (number == 0)
        assert_equal((out, lse), (q + 1, lse_of(q)) if planned else forward_function(q, k, v))
        planned, (grad,) = packed_plan.planned_back(out, [q])
        assert planned <= (number < 2)  # see above
        assert torch.equal(grad, torch.ones_like(q) * (1 if planned else 2))


def test_launchers_are_given_the_lengths_of_each_packed_call(packed_plan):
    """Functions behind the tensors, torch's kernels in their places, C functions and kernels on addresses."""
    given, in_c, on_addresses = [], InC(), OnAddresses("forward", PACKED)
    forward = {
        "function": lambda *all_given: given.append(all_given[3:]) or forward_function(*all_given),
        "op": op_launcher(MAX_Q, MAX_K, op="attnreg_packed"),
        "C": in_c.launcher,
        "addresses": on_addresses.launcher,
    }
    SEEN.clear()
    for launcher in forward.values():
        packed_plan.module.drop()
        packed_plan.forward = launcher
        for lengths in ((2, 4), (3, 6, 5), (9, 2)):
            ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
            options = {"max_q": max(lengths), "max_k": max(lengths) + 1}
            packed_plan.planned(*tensors((sum(lengths), 2, 8)), ends, ends, **options)
    assert [(list(map(torch.Tensor.tolist, one[:2])), *one[2:]) for one in given] == [
        ([[0, 3, 9, 14]] * 2, 6, 7, False),
        ([[0, 9, 11]] * 2, 9, 10, False),
    ]
    assert [rest for rest, _ in SEEN] == [(6, 7), (9, 10)]
    pairs = [0, 3, 9, 14], [0, 9, 11]
    assert in_c.calls == [(3, 6, 7, pairs[0], pairs[0], 7), (2, 9, 10, pairs[1], pairs[1], 7)]
    strides = ((16, 8, 1),) * 3
    assert on_addresses.prepared == [((3, 6, 7, 14, 14), strides), ((2, 9, 10, 11, 11), strides)]


def test_results_of_a_launcher_are_laid_out_as_torchs_own_kernels_lay_theirs_out(op):
    op.forward = lambda q, k, v: (torch.empty_strided(q.shape, (96, 8, 48, 1)).copy_(q), lse_of(q))
    q, k, v = tensors()
    op.planned(q, k, v)
    planned, (out, *_) = op.planned(q, k, v)
    assert not planned
    assert out.stride() == q.stride()
    assert torch.equal(out, q)


# ---- a launcher that can't run a call, or asks for a better one


def test_one_that_returns_none_sends_the_call_to_a_new_plan_and_is_dropped(op):
    able, called = [True], []

    def launcher(q, k, v):
        called.append(1)
        return forward_function(q, k, v) if able[0] else None

    op.forward = launcher
    q, k, v = tensors()
    assert [op.planned(q, k, v)[0] for _ in range(2)] == [True, False]
    able[0] = op.keeps = False  # it gets no successor: every call is left to the plan
    op.counted()
    for _ in range(3):
        planned, (out, *_) = op.planned(q, k, v)
        assert planned
        assert torch.equal(out, q + 1)
    assert op.counted() == 0
    op.forward, op.keeps = forward_function, True
    assert [op.planned(q, k, v)[0] for _ in range(3)] == [True, False, False]
    assert len(called) == 2


def test_a_better_launcher_is_looked_for_ever_more_rarely_and_once_found_stays(op):
    op.forward, op.options = forward_function, {"is_final": False}
    inputs = tensors()
    asked = [number for number in range(64) if op.planned(*inputs)[0]]
    assert asked == [0, 1, 2, 4, 8, 16, 32]  # the first, and after so many uses
    op.forward, op.options = (lambda q, k, v: (q * 5, lse_of(q))), {}
    assert op.planned(*inputs)[0]
    for _ in range(70):
        planned, (out, *_) = op.planned(*inputs)
        assert not planned
        assert torch.equal(out, inputs[0] * 5)


def test_a_c_function_that_has_done_nothing_leaves_the_call_to_a_new_plan(op, packed_plan, pair):
    in_c = InC()
    op.forward = packed_plan.forward = in_c.launcher
    dense, packed = tensors(), tensors(PACKED)
    op.planned(*dense)
    packed_plan.planned(*packed, pair, pair)
    in_c.status = 3
    planned, (out, *_) = op.planned(*dense)
    assert planned
    assert torch.equal(out, dense[0] + 1)
    planned, (out, _) = packed_plan.planned(*packed, pair, pair)
    assert planned
    assert torch.equal(out, packed[0] + 1)
    in_c.status = 0
    assert not op.planned(*dense)[0]
    assert not packed_plan.planned(*packed, pair, pair)[0]
    assert (op.counted(), packed_plan.counted()) == (1, 1)


def test_a_c_function_reads_contiguous_offsets_of_32_bits_only(packed_plan, pair):
    in_c = InC()
    packed_plan.forward = in_c.launcher
    inputs = tensors(PACKED)
    strided = torch.tensor([0, 9, 2, 9, 6, 9], dtype=torch.int32)[::2]
    for given in (pair.long(), strided):
        for _ in range(3):
            assert packed_plan.planned(*inputs, given, given)[0]
    assert in_c.calls == []


# ---- errors


def fails(*_):
    raise LookupError("of a kernel")


def test_an_error_of_a_launcher_or_a_plan_is_the_callers_and_is_not_counted(op):
    op.forward = fails
    inputs = tensors()
    op.planned(*inputs)
    for of_the_plan in (False, True):
        for _ in range(2):
            with pytest.raises(LookupError, match="of a kernel"):
                op.planned(*inputs)
            assert bool(op.made) is of_the_plan
        op.forward, op.meanwhile = forward_function, fails
        op.module.drop()
    op.meanwhile = lambda: None
    assert op.planned(*inputs)[0]
    assert op.counted() == 0


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_error_holds_no_tensor_once_it_is_handled(op, in_thread):
    op.forward = fails
    op.planned(*tensors())
    held = []

    def call():
        inputs = tensors()
        held.extend(weakref.ref(x) for x in inputs)
        with pytest.raises(LookupError):
            op.planned(*inputs)

    if in_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()
    else:
        call()
    op.given = None
    gc.collect()
    assert [one() for one in held] == [None] * 3


WRONG = {
    "number": (lambda q: (q,), "a launcher breaks the contract: got 1 results, expected 2"),
    "shape": (lambda q: (q[:, :5], lse_of(q)), "got the output [2, 5, 2, 8] Float, expected [2, 6"),
    "dtype": (lambda q: (q.double(), lse_of(q)), "Double, expected [2, 6, 2, 8] Float"),
    "LSE's shape": (lambda q: (q, q.sum(-1)), "got the LSE [2, 6, 2] Float, expected [2, 2, 6]"),
    "LSE's dtype": (lambda q: (q, lse_of(q).half()), "got the LSE [2, 2, 6] Half, expected"),
    "device": (lambda q: (q.to("meta"), lse_of(q)), "on meta, expected [2, 6, 2, 8] Float on cpu"),
    "layout": (lambda q: (q.to_sparse(), lse_of(q)), "got the output [2, 6, 2, 8] Float Sparse, expected"),
    "nested": (lambda q: (torch.nested.nested_tensor([q]), lse_of(q)), "got the output a nested tensor, exp"),
    "negated": (
        lambda q: (q, torch._neg_view(lse_of(q))),
        "the LSE [2, 2, 6] Float lazily negated, expected",
    ),
    "no tensor but an array": (
        lambda q: (q.numpy(), lse_of(q)),
        "a tuple with a numpy.ndarray, expected tensors: number 1",
    ),
    "no tuple": (lambda q: q, "a launcher returned a Tensor, expected a tuple of tensors or None"),
    "no tensor": (lambda q: (q, 3), "a launcher returned a tuple with a int, expected tensors"),
}
WRONG_GRADIENTS = {
    "number of gradients": (lambda g: (g, g), "got 2 results, expected 3"),
    "gradient": (
        lambda g: (g, g[:1], g),
        "got a gradient [1, 6, 2, 8] Float, expected [2, 6, 2, 8] Float, for the key",
    ),
    "gradient's device": (
        lambda g: (g, g, g.to("meta")),
        "got a gradient [2, 6, 2, 8] Float on meta, expected [2, 6, 2, 8] Float on cpu, for the value",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", {**WRONG, **WRONG_GRADIENTS})
def test_a_wrong_result_is_an_error_that_says_so(op, what):
    returns, message = {**WRONG, **WRONG_GRADIENTS}[what]
    op.forward = op.backward = lambda first, *_: returns(first)
    given, run = tensors(), op.planned
    if what in WRONG_GRADIENTS:
        given, run = (*backward_tensors(), torch.zeros(())), op.planned_back
    run(*given)
    expected = TypeError if what.startswith("no ") else RuntimeError
    with pytest.raises(expected, match=re.escape(message)) as caught:
        run(*given)
    assert str(caught.value).endswith("(backend tests)")


def test_wrong_results_of_packed_calls_are_errors_too(packed_plan, pair):
    q, k, v = tensors(PACKED)
    q.requires_grad_()
    packed_plan.forward = lambda *given: (given[0][:5], lse_of(given[0]))
    packed_plan.planned(q, k, v, pair, pair)
    message = "got the output [5, 2, 8] Float, expected [6, 2, 8] Float (backend tests)"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        packed_plan.planned(q, k, v, pair, pair)
    packed_plan.module.drop()
    packed_plan.forward, packed_plan.backward = None, lambda grad, *_: (grad, grad[:5], grad)
    for attempt in range(2):
        packed_plan.keeps = attempt == 0
        _, (out, _) = packed_plan.planned(q, k, v, pair, pair)
        if attempt == 0:
            packed_plan.planned_back(out, [q])
    with pytest.raises(RuntimeError, match=re.escape("got a gradient [5, 2, 8] Float, expected [6, 2, 8]")):
        packed_plan.planned_back(out, [q])


def specializing(fake, specialize):
    """Return a backend that offers launchers."""
    mine = fake("mine")
    kernels = attnreg.Kernels(mine.forward, mine.backward, lambda *given: specialize(mine, *given))
    return fake("mine", load=lambda: kernels).backend


def exits(*_):
    raise SystemExit(3)


def no_function(form, **fields):
    """Return a launcher with a wrong field."""
    right = {"run": forward_function, "function": 1, "prepare": forward_function, "window": (-1, -1)}
    return form(**{name: right[name] for name in form.__dataclass_fields__ if name in right} | fields)


UNUSABLE = {
    "raises": (fails, "LookupError: of a kernel"),
    "ends the program": (exits, "SystemExit: 3"),
    "no function": (lambda *_: 7, "TypeError: returned 7, expected a launcher or None"),
    "no address": (
        lambda *_: no_function(NativeLauncher, function="f"),
        "TypeError: function: got a str, expected an address",
    ),
    "address 0": (lambda *_: no_function(NativeLauncher, function=0), "got 0, expected an address"),
    "nothing to run": (lambda *_: no_function(FunctionLauncher, run=7), "got a int, expected a function"),
    "nothing to prepare": (
        lambda *_: no_function(AddressLauncher, prepare=7),
        "got a int, expected a function",
    ),
    "no window": (
        lambda *_: no_function(AddressLauncher, window=3),
        "TypeError: window: got a int, expected a tuple",
    ),
}


@pytest.mark.parametrize("specialize", UNUSABLE)
@pytest.mark.parametrize("front", ["dense", "packed"])
def test_an_unusable_launcher_costs_no_call_and_is_counted_under_its_backend(
    compiled_routers, fake, caplog, ran, specialize, front, pair
):
    specialize, said = UNUSABLE[specialize]
    q, k, v = (x.transpose(1, 2) for x in tensors())
    with attnreg.register_backend(specializing(fake, lambda *_: specialize())):
        for _ in range(4):
            if front == "dense":
                F.scaled_dot_product_attention(q, k, v)
            else:
                attnreg.varlen_attn(*tensors(PACKED), pair, pair, 4, 4)
    (row,) = attnreg.stats().failures
    assert (row.backend, row.direction, row.error) == ("mine", "forward", "RegistrationError")
    assert row.count > 1 and row.message.startswith("mine offers no launcher: ") and said in row.message
    assert [row.message in line for line in caplog.messages] == [True]
    assert ran() == {"mine": (4, 0)}


def test_an_interrupt_in_specialize_is_the_programs(compiled_routers, fake):
    def interrupted(*_):
        raise KeyboardInterrupt

    q, k, v = (x.transpose(1, 2) for x in tensors())
    with attnreg.register_backend(specializing(fake, interrupted)):
        F.scaled_dot_product_attention(q, k, v)
        with pytest.raises(KeyboardInterrupt):
            F.scaled_dot_product_attention(q, k, v)


def test_specialize_is_given_what_the_kernel_was_and_its_launcher_runs_further_calls(
    compiled_routers, fake, ran
):
    attnreg.core.aten.restore()
    asked, launched = [], []

    def specialize(mine, direction, given, call):
        asked.append((direction, [x.shape for x in given], call))
        kernel = mine.forward if direction == "forward" else mine.backward
        return lambda *tensors: launched.append(direction) or kernel(*tensors, call)

    with attnreg.register_backend(specializing(fake, specialize)):
        for seed in range(4):
            inputs = [x.transpose(1, 2).requires_grad_() for x in tensors(seed=seed)]
            assert_right(with_gradients(F.scaled_dot_product_attention(*inputs), inputs), inputs)
    attnreg.core.aten.restore()
    assert ran() == {"mine": (4, 4)}
    assert launched == ["forward", "backward"] * 2
    assert [direction for direction, *_ in asked] == ["forward", "backward"]
    assert asked[0][1] == [SHAPE] * 3
    assert asked[1][1] == [SHAPE] * 5 + [(2, 2, 6)]
    assert asked[0][2].scale == pytest.approx(8**-0.5)


# ---- torch's own kernels


GIVEN = [  # arguments of a launcher behind the tensors, by keyword, and what the kernel gets
    ((0.25,), {}, ((0.25,), {})),
    ((2, True), {}, ((2.0, True), {})),
    ((0.5,), {"window": 3, "cap": 1.5}, ((0.5,), {"window": 3, "cap": 1.5})),
    ((0.5,), {"window": None}, ((0.5,), {"window": None})),
    ((), {"scale": 0.75}, ((0.75,), {})),
]


@pytest.mark.parametrize(("rest", "options", "seen"), GIVEN)
def test_a_kernel_of_torchs_is_given_the_rest_by_place_by_name_and_by_default(op, rest, options, seen):
    define_kernels()
    op.forward = OpLauncher("attnreg_kernel", "CPU", rest, options, 2)
    inputs = tensors()
    op.planned(*inputs)
    SEEN.clear()
    planned, (out, *_) = op.planned(*inputs)
    assert not planned
    assert torch.equal(out, inputs[0] * 2)
    assert [seen] == SEEN
    assert_equal(op.forward(*inputs), forward_function(*inputs))


@pytest.mark.parametrize(
    ("rest", "options", "message"),
    [
        ((), {}, "got no scale"),
        ((0.5, True, 3, 1.0, 4), {}, "got arguments that it doesn't take"),
        ((0.5,), {"scales": 1}, "got arguments that it doesn't take"),
    ],
)
def test_a_launcher_with_arguments_that_an_op_does_not_take_costs_no_call(op, rest, options, message):
    define_kernels()
    op.forward = OpLauncher("attnreg_kernel", "CPU", rest, options, 2)
    op.plan = op.plan._replace(counters=(counters.call_counter("tests", "forward"),))
    for _ in range(2):
        assert op.planned(*tensors())[0]
    (row,) = attnreg.stats().failures
    assert (row.backend, row.count) == ("tests", 2)
    assert re.match(f"tests offers no launcher: RuntimeError: .*aten::attnreg_kernel {message}", row.message)
