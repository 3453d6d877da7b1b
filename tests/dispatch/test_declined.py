"""Promises about declined calls: the next backend runs them, for the reason that the kernel gave."""

from __future__ import annotations

import dataclasses
import gc
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from support import truth
from support.dense import assert_right, qkv, with_gradients

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core.contract.lengths import Lengths
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.dispatch.declined import retry_on_decline
from attnreg.core.dispatch.planning import Native, make_plan
from attnreg.core.dispatch.state import CallKind, state
from attnreg.core.registry.entry import Entry
from attnreg.testing import Conformance
from attnreg.tools.measure import Case
from attnreg.tools.tuning.checks import Checks

REASON = "no engine for calls of this size"
MATH = math_backend.BACKEND.load()


LIMITS = attnreg.Capabilities(
    devices=("cpu",), dtypes=("float32", "float64"), varlen=True, causal=True, seqused_k=True, dropout=True
)


class Choosy:
    """A backend whose kernels decline every call of the directions in `declining`; keeps what was called."""

    def __init__(self, name="choosy", *directions):
        self.declining = set(directions)
        self.called = []
        kernels = attnreg.Kernels(self.kernel("forward"), self.kernel("backward"))
        self.backend = attnreg.Backend(name=name, forward=LIMITS, backward=LIMITS, load=lambda: kernels)

    def kernel(self, direction):
        def run(*arguments):
            self.called.append(direction)
            if direction in self.declining:
                raise attnreg.UnsupportedInputError(REASON)
            return getattr(MATH, direction)(*arguments)

        return run


def forward_only(name, run):
    return attnreg.Backend(name=name, forward=LIMITS, load=lambda: attnreg.Kernels(run))


def reasons():
    return [(one.backend, one.reason, one.count) for one in attnreg.stats().fallbacks]


def dense():
    return qkv(5, 5, heads=3)


def assert_sdpa_right(inputs):
    assert_right(with_gradients(F.scaled_dot_product_attention(*inputs), inputs), inputs)


def varlen_results(inputs, **options):
    return with_gradients(attnreg.varlen_attn(*inputs, **options), inputs[:3])


def test_explain_names_the_backend_that_runs_what_the_first_one_has_declined():
    inputs, others = [x.detach() for x in dense()], [x.detach() for x in qkv(6, 6, heads=3)]
    with attnreg.register_backend(Choosy("choosy", "forward").backend):
        assert attnreg.explain(*inputs).backend == "choosy"  # that its kernel declines isn't known before
        for times in ("a call", "2 calls"):
            F.scaled_dot_product_attention(*inputs)
            found = attnreg.explain(*inputs)
            assert (found.backend, found.rejected["choosy"]) == ("cpu", (REASON,))
            assert not [one for one in found.notes if "declined" in one]
            # Of other lengths it hasn't declined a call.
            found, note = attnreg.explain(*others), f"choosy declined the forward of {times} in this process"
            assert found.backend == "choosy"
            assert [one for one in found.notes if "declined" in one] == [f"{note}: {REASON}"]
    assert list(attnreg.stats().calls) == ["cpu"]
    assert "declined" not in str(attnreg.explain(*inputs))  # that names another backend


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_explain_of_a_declined_direction_names_the_backend_that_runs_that_one(packed, direction):
    inputs = packed([3, 4])
    with attnreg.register_backend(Choosy("choosy", direction).backend):
        varlen_results(inputs)
        found = attnreg.explain(*inputs)
    named = {"forward": found.forward.backend, "backward": found.backward.backend}
    assert named.pop(direction) != "choosy"
    assert list(named.values()) == ["choosy"]


@pytest.mark.usefixtures("router_kind")
@pytest.mark.parametrize(
    ("declining", "ran_there"),
    [(("forward",), (0, 3)), (("backward",), (3, 0)), (("forward", "backward"), (0, 0))],
    ids=["forward", "backward", "both"],
)
def test_the_next_backend_runs_a_declined_call_of_sdpa_and_repeated_ones(declining, ran_there, ran, caplog):
    choosy, inputs = Choosy("choosy", *declining), dense()
    with caplog.at_level(logging.WARNING, "attnreg"), attnreg.register_backend(choosy.backend):
        for _ in range(3):
            assert_sdpa_right(inputs)
    assert reasons() == [("choosy", REASON, 3 * len(declining))]
    what_ran = ran()
    assert what_ran.get("choosy", (0, 0)) == ran_there
    assert what_ran["cpu"] == (3 - ran_there[0], 3 - ran_there[1])
    assert [choosy.called.count(direction) for direction in declining] == [1] * len(declining)
    message = f"choosy can't run this call, cpu runs it: {REASON}"
    assert [record.message for record in caplog.records] == [message]


@pytest.mark.usefixtures("router_kind")
@pytest.mark.parametrize("used", [None, (2, 4)], ids=["plain", "seqused_k"])
def test_the_next_backend_runs_a_declined_call_of_varlen_attn_and_repeated_ones(used, packed, ran):
    choosy, inputs = Choosy("choosy", "forward"), packed([3, 4])
    options = {} if used is None else {"seqused_k": torch.tensor(used, dtype=torch.int32)}
    expected = varlen_results(inputs, **options, backend="math")
    attnreg.reset_stats()
    with attnreg.register_backend(choosy.backend):
        for _ in range(3):
            torch.testing.assert_close(varlen_results(inputs, **options), expected)
    what_ran = ran()
    assert what_ran["choosy"] == (0, 3)
    assert sum(forwards for forwards, _ in what_ran.values()) == 3
    assert choosy.called.count("forward") == 1


@pytest.mark.usefixtures("router_kind")
@pytest.mark.parametrize("call", ["sdpa", "varlen"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_repeated_call_may_be_declined(call, direction, packed, ran):
    """As cuDNN may, whose plan goes by strides, too."""
    choosy, inputs = Choosy(), packed([3, 4]) if call == "varlen" else dense()
    attend = attnreg.varlen_attn if call == "varlen" else F.scaled_dot_product_attention
    with attnreg.register_backend(choosy.backend):
        expected = with_gradients(attend(*inputs), inputs[:3])
        for repetition in range(1, 12):
            if repetition == 5:
                choosy.declining.add(direction)
            torch.testing.assert_close(with_gradients(attend(*inputs), inputs[:3]), expected)
    what_ran = ran()
    assert what_ran["choosy"] == ((5, 12) if direction == "forward" else (12, 5))
    assert sum(map(sum, what_ran.values())) == 24
    # The cache's launcher declines, then the plan's kernel, and at most once more before neither is used.
    assert choosy.called.count(direction) <= 5 + 3


def test_where_the_next_backend_declines_too_the_one_after_it_runs_the_call(ran, caplog):
    first, second, inputs = Choosy("first", "forward"), Choosy("second", "forward"), dense()
    with attnreg.register_backend(second.backend), attnreg.register_backend(first.backend):
        assert_sdpa_right(inputs)
    assert reasons() == [("first", REASON, 1), ("second", REASON, 1)]
    assert ran() == {"first": (0, 1), "cpu": (1, 0)}
    messages = [f"{name} can't run this call, cpu runs it: {REASON}" for name in ("first", "second")]
    assert [record.message for record in caplog.records] == messages


def test_a_backend_of_the_call_that_declines_is_an_error_with_the_kernels_reason(packed, ran):
    choosy, inputs = Choosy("choosy", "forward"), packed([3, 4])
    with attnreg.register_backend(choosy.backend):
        for _ in range(2):
            with pytest.raises(attnreg.UnsupportedInputError) as caught:
                attnreg.varlen_attn(*inputs, backend="choosy")
            assert caught.value.rejected["choosy"] == (REASON,)
            assert f"choosy {REASON}" in " ".join(str(caught.value).split())
    assert ran() == {}


def test_dropout_ties_the_backward_to_the_forward_that_drew(packed):
    choosy = Choosy("choosy", "backward")
    query, key, value = (torch.randn(2, 5, 3, 8, requires_grad=True) for _ in "qkv")
    with attnreg.register_backend(choosy.backend):
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, None, None, 5, 5, 0.5, False, False
        )
        with pytest.raises(attnreg.UnsupportedInputError, match=REASON):
            torch.ops.aten._flash_attention_backward(
                out, query, key, value, out, lse, None, None, 5, 5, 0.5, False, rng_state, unused
            )


def test_a_declined_call_is_not_kept_alive_and_others_still_go_to_that_backend(ran):
    choosy, inputs = Choosy("choosy", "forward"), dense()
    gone = [weakref.ref(x) for x in inputs]
    gc.disable()
    try:
        with attnreg.register_backend(choosy.backend):
            F.scaled_dot_product_attention(*inputs)
            inputs.clear()
            assert [one() for one in gone] == [None] * 3
            choosy.declining.clear()
            F.scaled_dot_product_attention(*(torch.randn(1, 2, 3, 8) for _ in "qkv"))
    finally:
        gc.enable()
    assert ran() == {"choosy": (1, 0), "cpu": (1, 0)}


def test_a_dropout_mask_is_the_same_whether_another_backend_declined_before_or_not():
    """As checkpointing needs it, which repeats a forward from the generator's state of the first time."""
    first, second = Choosy("first", "forward"), Choosy("second")
    inputs = [torch.randn(2, 5, 3, 8) for _ in "qkv"]
    drawn = []
    with attnreg.register_backend(second.backend), attnreg.register_backend(first.backend):
        for _ in range(3):
            torch.manual_seed(1)
            out, _, rng_state, *_ = torch.ops.aten._flash_attention_forward(
                *inputs, None, None, 5, 5, 0.5, False, False
            )
            drawn.append((out, rng_state.view(torch.int64), torch.rand(3)))
    assert first.called == ["forward"]
    for one in drawn[1:]:
        assert all(map(torch.equal, one, drawn[0]))


def test_a_backend_that_declined_a_call_may_run_another_inside_of_it(ran):
    """The kernel that runs the declined call instead may call attention itself."""
    inputs = dense()

    def one_at_a_time(query, key, value, call):
        if len(query) > 1:
            raise attnreg.UnsupportedInputError(REASON)
        return MATH.forward(query, key, value, call)

    def nesting(query, key, value, call):
        F.scaled_dot_product_attention(*(x[:1].transpose(1, 2) for x in (query, key, value)))
        return MATH.forward(query, key, value, call)

    first, second = forward_only("first", one_at_a_time), forward_only("second", nesting)
    with attnreg.register_backend(second), attnreg.register_backend(first), torch.no_grad():
        out = F.scaled_dot_product_attention(*inputs)
    truth.assert_near(out, truth.dense(*inputs)[0])
    assert ran() == {"first": (1, 0), "second": (1, 0)}


def test_an_error_of_a_call_inside_of_a_kernel_is_a_reason_of_one_line():
    def forward(query, key, value, call):
        ends, halves = torch.tensor([0, 1], dtype=torch.int32), (x.half()[0, :1] for x in (query, key, value))
        attnreg.varlen_attn(*halves, ends, ends, 1, 1, backend="no half")

    with attnreg.register_backend(forward_only("no half", forward)), torch.no_grad():
        F.scaled_dot_product_attention(*dense())
    ((backend, reason, count),) = reasons()
    assert (backend, count) == ("no half", 1)
    assert reason.startswith("no attention backend can run this forward on cpu")
    assert "\n" not in reason


@pytest.mark.parametrize("native", [None, Native("cpu")], ids=["no kernel of torch's", "one of torch's"])
def test_a_call_declined_in_a_capture_is_tried_again_in_the_next(native):
    """After a run outside of a graph the next capture may have the backend that this one lacked."""
    choosy = Choosy("choosy", "forward")
    spec = AttentionSpec(
        device=Device("cpu"), dtype="float32", batch=1, max_q=3, max_k=3, heads_q=2, heads_k=2, head_dim=8,
        head_dim_v=8, capturing=True,
    )  # fmt: skip
    limits = dataclasses.replace(LIMITS, capture=True)
    inputs = [torch.randn(1, 3, 2, 8) for _ in "qkv"]

    kind, lengths = CallKind(), Lengths.of(spec)

    def capture():
        """Return the backend that runs a call of this spec."""

        def run(declined):
            key, options = kind.key(lengths), {"native": native, "declined": declined}
            plan = kind.plans.get(key) or make_plan(state(), kind, key, spec, "forward", **options)
            if not plan.is_native:
                plan.run(*inputs, attnreg.Call(1.0, 3, 3))
            return plan.backend

        return retry_on_decline(run)

    with attnreg.register_backend(dataclasses.replace(choosy.backend, forward=limits)):
        assert capture() != "choosy"
        choosy.declining.clear()
        assert capture() == "choosy"


def test_verify_says_that_a_kernel_declines_and_not_that_it_is_wrong():
    for declining, measured in ((("backward",), {"out", "lse"}), (("forward",), set())):
        outcome = Conformance(Choosy("choosy", *declining).backend, "cpu").run(
            Case(name="small", lens_q=(3,), lens_k=(3,), dtype="float32")
        )
        assert (outcome.reasons, outcome.failure) == ((REASON,), "")
        assert outcome.errors.keys() == measured
        assert all(error.passed for error in outcome.errors.values())


UNCHECKED = "it can't be checked: it refuses small calls of this kind"


@pytest.mark.parametrize(("declining", "forward"), [("backward", ""), ("forward", UNCHECKED)])
def test_tune_says_what_it_cannot_check_as_a_kernel_declines(declining, forward):
    entry = Entry("choosy", "a test", Choosy("choosy", declining).backend)
    spec = Case(name="any", lens_q=(64,), lens_k=(64,), dtype="float32").spec(Device("cpu"))
    checks = Checks(torch.device("cpu"))
    assert checks.of(entry, spec, "forward").wrong == forward
    assert checks.of(entry, spec, "backward").wrong == "its backward can't be checked"
