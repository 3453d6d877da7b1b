"""Promises of selection: a spec, the backends and what was asked for give one decision, with its reasons."""

import dataclasses

import pytest

from attnreg import AttentionSpec, Device
from attnreg.core.registry.entry import Entry
from attnreg.core.selection.decision import Decision, Policy, Preference, select, tied_to
from attnreg.core.selection.render import refuse
from attnreg.errors import UnsupportedInputError

SPEC = AttentionSpec(
    device=Device("cpu"), dtype="float32", batch=2, max_q=16, max_k=16, heads_q=4, heads_k=4, head_dim=64,
    head_dim_v=64,
)  # fmt: skip
CAUSAL = dataclasses.replace(SPEC, window=(-1, 0))
NOT_CAUSAL = "is_causal must be False, got True"


def asked(**changes):
    return dataclasses.replace(SPEC, **changes)


@pytest.fixture
def known(fake):
    """Make entries: `known(a={}, b={"causal": False})`, each a fake backend with those limits."""
    return lambda **backends: {
        name.casefold(): Entry(name, "a test", fake(name, **limits).backend)
        for name, limits in backends.items()
    }


@pytest.fixture
def decide(known):
    """Decide about the forward of a call among such entries."""
    return lambda spec, asks, **backends: select(spec, "forward", known(**backends), asks)


def prefers(*names, **options):
    return Preference(f"asks for {','.join(names)}", names, **options)


def policy(*preferences, **options):
    return Policy(preferences, **options)


# The order


def test_with_nothing_asked_for_the_priority_decides_and_then_the_name(decide):
    backends = {"low": {"priority": -1}, "beta": {}, "Alpha": {}, "high": {"priority": 7}}
    assert decide(SPEC, Policy(), **backends) == Decision(
        direction="forward",
        backend="high",
        source="default order for cpu",
        rejected={},
        order=("high", "Alpha", "beta", "low"),
    )


def test_a_priority_may_depend_on_the_call(decide):
    backends = {"one": {"priority": lambda spec: 9 if spec.max_q > 1 else -1}, "other": {}}
    assert decide(SPEC, Policy(), **backends).order == ("one", "other")
    assert decide(dataclasses.replace(SPEC, max_q=1), Policy(), **backends).order == ("other", "one")


@pytest.mark.parametrize(
    ("priority", "reason"),
    [
        (lambda spec: 1 // 0, "check failed: ZeroDivisionError: integer division or modulo by zero"),
        (lambda spec: None, "check failed: TypeError: priority() returned None, expected a whole number"),
    ],
)
def test_a_priority_that_fails_is_a_reason_against_the_backend(decide, priority, reason):
    decision = decide(SPEC, Policy(), faulty={"priority": priority}, other={"priority": -1})
    assert (decision.backend, decision.rejected) == ("other", {"faulty": (reason,)})


def test_preferred_backends_come_first_in_their_order_the_strongest_source_first_then_the_others(decide):
    asks = policy(prefers("D", "gone", "b"), prefers("c", "d"))  # "gone" has left the registry
    decision = decide(SPEC, asks, a={}, b={}, c={}, d={}, e={"priority": 9})
    assert decision.order == ("d", "b", "c", "e", "a")
    assert (decision.backend, decision.source) == ("d", "asks for D,gone,b")
    assert decision.asked_for == ("d", "b", "c")


def test_the_source_is_the_strongest_that_names_the_backend_whatever_the_case(decide):
    asks = policy(prefers("fa4"), prefers("CUDNN"), prefers("FA4", "cuDNN"))
    decision = decide(CAUSAL, asks, FA4={"causal": False}, cuDNN={})
    assert (decision.backend, decision.source) == ("cuDNN", "asks for CUDNN")
    assert decision.order == decision.asked_for == ("FA4", "cuDNN")


def test_a_preference_for_other_devices_says_nothing_here(known):
    entries = known(a={}, b={"devices": ("cpu", "cuda")})
    only_cuda = policy(prefers("b", devices=("cuda",)))
    here = select(SPEC, "forward", entries, only_cuda)
    assert (here.backend, here.source, here.asked_for) == ("a", "default order for cpu", ())
    there = select(asked(device=Device("cuda")), "forward", entries, only_cuda)
    assert (there.backend, there.source, there.asked_for) == ("b", "asks for b", ("b",))


@pytest.mark.parametrize(
    ("device", "governed"),
    [
        (Device.parse("sm_90"), True),
        (Device("cuda", (9, 0), 1, "NVIDIA H200"), True),
        (Device.parse("sm_100"), False),
        (Device("cuda"), False),
        (Device("cpu"), False),
    ],
)
def test_a_preference_for_an_architecture_governs_that_one_only(device, governed):
    assert prefers("a", devices=("sm_90",)).applies_to(device) is governed
    assert prefers("a", devices=("cpu", "sm_90")).applies_to(device) is (governed or device.type == "cpu")
    assert prefers("a", devices=("cuda",)).applies_to(device) is (device.type == "cuda")
    assert prefers("a").applies_to(device)


def test_torchs_own_kernel_comes_first_in_the_default_order_only(known):
    entries = known(native={"priority": -5}, other={"priority": 5}, third={})
    assert select(SPEC, "forward", entries, Policy(), "NATIVE").order == ("native", "other", "third")
    led = select(SPEC, "forward", entries, policy(prefers("third")), "native")
    assert led.order == ("third", "native", "other")
    assert select(SPEC, "forward", entries, Policy()).order == ("other", "third", "native")


def test_a_policy_with_one_more_preference_keeps_the_others(known):
    before = policy(prefers("a"), disabled={"b": "x"}, strict="y")
    led = before.with_first(prefers("c"))
    assert led == Policy((prefers("c"), prefers("a")), {"b": "x"}, "y")
    assert before.with_first(None) is before


# What can't run


def test_what_cannot_run_a_call_gives_way_to_the_next_with_every_reason_kept(decide):
    backends = {
        "a": {"causal": False, "dtypes": ("float16", "bfloat16")},
        "b": {"devices": ("cuda",)},
        "c": {},
        "d": {"causal": False},  # after the chosen one, so it isn't passed over
    }
    assert decide(CAUSAL, policy(prefers("a")), **backends) == Decision(
        direction="forward",
        backend="c",
        source="default order for cpu",
        rejected={
            "a": ("dtype must be float16 or bfloat16, got float32", NOT_CAUSAL),
            "b": ("device must be cuda, got cpu",),
            "d": (NOT_CAUSAL,),
        },
        passed_over=("a",),
        order=("a", "b", "c", "d"),
        asked_for=("a",),
    )


def test_without_an_able_backend_the_decision_names_none_and_has_the_reasons_of_all(decide):
    decision = decide(CAUSAL, Policy(), a={"causal": False}, b={"causal": False, "dtypes": ("float16",)})
    assert (decision.backend, decision.source, decision.refusal) == (None, "", "")
    assert decision.rejected == {"a": (NOT_CAUSAL,), "b": ("dtype must be float16, got float32", NOT_CAUSAL)}
    assert decision.passed_over == ("a", "b")
    assert decide(SPEC, policy(prefers("a"))) == Decision("forward", None, "", {})


# Passed over


def test_one_that_serves_another_kind_of_device_is_passed_over_only_if_it_was_asked_for(decide):
    backends = {"a": {"devices": ("cuda",)}, "b": {}}
    assert decide(SPEC, Policy(), **backends).passed_over == ()
    assert decide(SPEC, policy(prefers("a")), **backends).passed_over == ("a",)


def test_a_broken_backend_is_passed_over_whatever_it_may_have_served(known):
    entries = {"broken": Entry("broken", "a test", cause=ImportError("no _C")), **known(b={"priority": -1})}
    decision = select(SPEC, "forward", entries, Policy())
    assert (decision.backend, decision.passed_over) == ("b", ("broken",))
    assert decision.rejected == {"broken": ("failed to load: ImportError: no _C",)}


def test_a_disabled_backend_never_runs_and_its_reason_names_who_disabled_it(decide):
    off = Policy((prefers("a"),), {"a": "ATTNREG_DISABLE", "b": "attnreg.toml:2"})
    decision = decide(CAUSAL, off, a={"causal": False}, b={})
    assert decision.backend is None
    assert decision.rejected == {
        "a": ("disabled by ATTNREG_DISABLE", NOT_CAUSAL),
        "b": ("disabled by attnreg.toml:2",),
    }


# Exclusive


def test_an_exclusive_preference_is_obeyed(decide):
    only = prefers("b", exclusive=True)
    decision = decide(SPEC, policy(only, prefers("a")), a={"priority": 9}, b={})
    assert (decision.backend, decision.source, decision.refusal) == ("b", "asks for b", "")
    elsewhere = prefers("b", exclusive=True, devices=("cuda",))
    assert decide(SPEC, policy(elsewhere), a={}, b={}).backend == "a"


def test_an_exclusive_preference_is_refused_rather_than_replaced(decide):
    only = prefers("b", exclusive=True)
    decision = decide(CAUSAL, policy(only, prefers("a")), a={}, b={"causal": False})
    assert (decision.backend, decision.source) == (None, "")
    assert decision.refusal == "asks for b allows no other backend"
    assert (decision.rejected, decision.passed_over) == ({"b": (NOT_CAUSAL,)}, ("b",))
    left = decide(SPEC, policy(prefers("gone", exclusive=True)), a={})  # the registry
    assert (left.backend, left.refusal) == (None, "asks for gone allows no other backend")


# Strict


STRICT_ERROR = "no backend of asks for a can run it, and strict (ATTNREG_STRICT) makes that an error"


@pytest.mark.parametrize(
    ("spec", "names", "strict", "backend", "refusal"),
    [
        (CAUSAL, ("a", "b"), "ATTNREG_STRICT", None, STRICT_ERROR),
        (SPEC, ("a", "b"), "ATTNREG_STRICT", "a", ""),
        (CAUSAL, ("a", "b"), "", "b", ""),
        (CAUSAL, ("a b",), "ATTNREG_STRICT", "b", ""),  # any that the strongest names will do
        (CAUSAL, (), "ATTNREG_STRICT", "b", ""),  # without a preference it has no effect
        (asked(window=(-1, 0), dtype="float16"), ("a",), "ATTNREG_STRICT", None, STRICT_ERROR),  # none can
    ],
)
def test_in_strict_mode_a_preference_that_cannot_serve_is_an_error_that_names_both_sources(
    decide, spec, names, strict, backend, refusal
):
    asks = policy(*(prefers(*one.split()) for one in names), strict=strict)
    limits = {"dtypes": ("float32",)}
    decision = decide(spec, asks, a={"causal": False, **limits}, b=limits)
    assert (decision.backend, decision.refusal) == (backend, refusal)
    elsewhere = policy(prefers("a", devices=("cuda",)), strict="ATTNREG_STRICT")
    assert decide(CAUSAL, elsewhere, a={"causal": False}, b={}).backend == "b"


# Both directions


def test_with_dropout_a_forward_without_its_own_backward_is_passed_over(decide):
    backends = {"a": {"backward": False}, "b": {}}
    decision = decide(asked(needs_backward=True, dropout=0.5), Policy(), **backends)
    assert (decision.backend, decision.passed_over) == ("b", ("a",))
    assert decision.rejected == {"a": ("backward: has no backward",)}
    assert decide(asked(dropout=0.5), Policy(), **backends).backend == "a"


def test_with_dropout_the_reasons_of_both_directions_are_listed_each_once(known, fake):
    narrow = fake("a", dtypes=("float16",), gqa=False).backend
    also = fake("a", dtypes=("float16",), dropout=False).backend
    both = Entry("a", "a test", dataclasses.replace(narrow, backward=also.forward))
    decision = select(
        asked(needs_backward=True, dropout=0.5, heads_k=2), "forward", {"a": both, **known(b={})}, Policy()
    )
    assert decision.rejected["a"] == (
        "dtype must be float16, got float32",
        "query and key must have the same number of heads, got 4 and 2",
        "backward: dropout_p must be 0, got 0.5",
    )


def test_a_backward_tied_to_its_forwards_dropout_runs_there_or_nowhere(known):
    training = asked(needs_backward=True, dropout=0.5)
    entries = known(a={}, b={})
    tied = policy(prefers("a")).with_first(tied_to("b"))
    decision = select(training, "backward", entries, tied)
    assert (decision.backend, decision.source) == ("b", "the forward's dropout mask")
    refused = select(training, "backward", known(a={}, b={"backward": False}), tied)
    assert (refused.backend, refused.refusal) == (None, "the forward's dropout mask allows no other backend")


# Text


def test_the_error_of_a_refused_call_has_a_headline_the_input_and_an_aligned_row_for_every_reason(decide):
    backends = {
        "cuDNN": {"causal": False, "dtypes": ("float16",)},
        "b": {"causal": False},
        "ok": {"priority": -1},
    }
    decision = decide(CAUSAL, policy(prefers("b", exclusive=True)), **backends)
    with pytest.raises(UnsupportedInputError) as error:
        refuse(CAUSAL, decision)
    assert str(error.value) == (
        "no attention backend can run this forward on cpu: asks for b allows no other backend\n"
        "  query (2, 16, 4, 64) · key (2, 16, 4, 64) · value (2, 16, 4, 64) · float32 · causal\n"
        "  b      is_causal must be False, got True\n"
        "  cuDNN  dtype must be float16, got float32\n"
        "         is_causal must be False, got True\n"
        "  ok     could run it"
    )
    assert error.value.rejected == decision.rejected


def test_selecting_calls_no_kernel_loads_nothing_and_leaves_its_arguments_alone(known):
    entries, asks = known(a={"load": lambda: pytest.fail("loaded")}), policy(prefers("a"))
    assert select(SPEC, "forward", entries, asks).backend == "a"
    assert (list(entries), asks) == (["a"], policy(prefers("a")))
