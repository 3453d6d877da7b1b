"""Promises of loading a backend: once per process, with the cause kept, also with many threads."""

import contextlib
import dataclasses
import errno
import importlib
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.policies import SPEC
from support.refusals import refusal

import attnreg
from attnreg import AttentionSpec, Device
from attnreg.core import registry
from attnreg.core.registry.discovery import discover
from attnreg.core.registry.entry import Entry
from attnreg.errors import BackendUnavailableError, RegistrationError


def counted(outcome, seconds=0.0):
    """Return a function that does as it was set up to, and a list that grows with every call of it."""
    calls = []

    def called(*_):
        calls.append(None)
        time.sleep(seconds)  # gives every other thread the time to come by
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return called, calls


def test_a_backend_is_probed_and_loaded_once_per_process(fake):
    kernels = attnreg.Kernels(print, print)
    (load, loads), (probe, probes) = counted(kernels), counted(None)
    entry = Entry("mine", "a test", fake("mine", load=load, unavailable=probe).backend)
    assert entry.kernels() is entry.kernels() is kernels
    assert entry.kernel("forward") is entry.kernel("backward") is print
    assert [entry.unavailable() for _ in range(3)] == ["", "", ""]
    assert (len(loads), len(probes)) == (1, 1)


@pytest.mark.parametrize("failure", [ImportError("no _C"), SystemExit(2), RuntimeError("driver too old")])
def test_a_failing_load_is_tried_once_per_process_and_keeps_its_cause(fake, failure):
    load, calls = counted(failure)
    entry = Entry("mine", "a test", fake("mine", load=load).backend)
    assert entry.unavailable() == ""
    assert entry.reasons(SPEC, "forward") == ()
    reason = f"failed to load: {type(failure).__name__}: {failure}"
    for _ in range(3):
        with pytest.raises(BackendUnavailableError) as error:
            entry.kernels()
        assert str(error.value) == f"mine {reason}"
        assert error.value.__cause__ is failure
    assert len(calls) == 1
    assert (entry.unavailable(), entry.reasons(SPEC, "forward")) == (reason, (reason,))


def test_a_failing_load_is_tried_once_however_many_ways_ask(fake, routers, ran):
    load, calls = counted(ImportError("no _C"))
    inputs = torch.randn(3, 1, 2, 8, 16)
    backend = fake("mine", load=load).backend
    with attnreg.register_backend(backend, required=False):
        for _ in range(2):
            with pytest.raises(BackendUnavailableError):
                attnreg.register_backend("mine")
            with pytest.raises(BackendUnavailableError):
                attnreg.use_backend("mine")
        attnreg.install()
        F.scaled_dot_product_attention(*inputs)
    assert len(calls) == 1
    assert "mine" not in ran()


def test_an_interrupt_during_a_load_passes_and_the_load_is_tried_again(fake):
    outcomes = [KeyboardInterrupt(), attnreg.Kernels(print, print)]

    def load():
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    entry = Entry("mine", "a test", fake("mine", load=load).backend)
    with pytest.raises(KeyboardInterrupt):
        entry.kernels()
    assert entry.kernels().forward is print


LACKING = [
    MemoryError(),
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.mark.parametrize("lacking", LACKING, ids=repr)
@pytest.mark.parametrize("function", ["load", "unavailable", "refuses"])
def test_what_the_process_lacks_for_a_moment_leaves_no_backend_out(fake, routers, ran, function, lacking):
    made = fake("mine")
    real, errors = getattr(made.backend, function), [lacking]

    def fail_once(*arguments):
        if errors:
            raise errors.pop()
        return real(*arguments) if real else ()

    backend = dataclasses.replace(made.backend, **{function: fail_once})
    query = torch.randn(1, 2, 8, 16)

    def call():
        with attnreg.register_backend(backend):
            return F.scaled_dot_product_attention(query, query, query)

    with pytest.raises(type(lacking)):
        call()
    call()
    assert ran() == {"mine": (1, 0)}


def test_a_first_call_in_a_deep_recursion_leaves_no_backend_out_and_an_endless_one_does(fake):
    def deep(count, run):
        return deep(count - 1, run) if count else run()

    calls = []

    def load():
        calls.append(deep(100, lambda: None))
        return attnreg.Kernels(print, print)

    entry = Entry("mine", "a test", fake("mine", load=load).backend)
    room = sys.getrecursionlimit() - sum(1 for _ in traceback.walk_stack(None))
    with pytest.raises(RecursionError):
        deep(room - 80, entry.kernels)
    assert entry.kernels().forward is print and len(calls) == 1
    endless = Entry("mine", "a test", fake("mine", load=lambda: deep(-1, print)).backend)
    with pytest.raises(BackendUnavailableError, match="failed to load: RecursionError"):
        endless.kernels()


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (None, "got None, expected Kernels"),
        ((print, print), "got (<built-in function print>, <built-in function print>), expected Kernels"),
        (attnreg.Kernels(print), "got no backward, but it declares one"),
    ],
)
def test_a_load_that_returns_the_wrong_thing_makes_the_backend_unavailable(fake, loaded, reason):
    entry = Entry("mine", "a test", fake("mine", load=lambda: loaded).backend)
    with pytest.raises(BackendUnavailableError) as error:
        entry.kernels()
    assert str(error.value) == f"mine failed to load: RegistrationError: load() of mine: {reason}"
    assert isinstance(error.value.__cause__, RegistrationError)


@pytest.mark.parametrize("inside", ["", "math"], ids=["on itself", "on another backend"])
def test_a_load_that_runs_attention_itself_has_to_name_another_backend(
    fake, monkeypatch, routers, ran, inside
):
    inputs = torch.randn(3, 1, 2, 8, 16)
    usual = fake("mine")

    def load():
        with attnreg.use_backend(inside) if inside else contextlib.nullcontext():
            F.scaled_dot_product_attention(*inputs)
        return usual.backend.load()

    entry = registry.add(dataclasses.replace(usual.backend, load=load), "a test")
    monkeypatch.setenv("ATTNREG_BACKEND", "mine")
    attnreg.reload()
    try:
        if inside:
            F.scaled_dot_product_attention(*inputs)
            assert ran() == {"math": (1, 0), "mine": (1, 0)}
        else:
            said = refusal(F.scaled_dot_product_attention, *inputs, kind=BackendUnavailableError)
            assert said == (
                "ATTNREG_BACKEND: mine failed to load: RegistrationError: mine is being loaded: its load() "
                "has registered it, or called attention that would run on it, expected another backend "
                "there, as in use_backend('math')"
            )
    finally:
        registry.discard(entry)


def test_a_backend_that_declares_no_backward_loads_without_one(fake):
    entry = Entry("mine", "a test", fake("mine", backward=False).backend)
    assert entry.kernels().backward is None
    assert entry.reasons(SPEC, "forward") == ()
    assert entry.reasons(SPEC, "backward") == ("has no backward",)
    assert refusal(entry.kernel, "backward", kind=BackendUnavailableError) == "mine has no backward"


@pytest.mark.parametrize(
    ("unavailable", "install", "reason"),
    [
        (lambda: "needs a GPU", "", "needs a GPU"),
        (lambda: "not installed", "pip install x", "not installed; install it with: pip install x"),
        (lambda: "torch finds no CUDA GPU here", "pip install x", "torch finds no CUDA GPU here"),
        (lambda: importlib.util.find_spec("no_such_parent.child"), "",
         "availability check failed: ModuleNotFoundError: No module named 'no_such_parent'"),
        (lambda: {}["x"], "", "availability check failed: KeyError: 'x'"),
        (lambda: True, "pip install x",
         "availability check failed: TypeError: unavailable() returned True, expected a reason as text, or "
         "none; install it with: pip install x"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_with_what_to_install_and_nothing_is_loaded(
    fake, unavailable, install, reason
):
    load, loads = counted(None)
    entry = Entry("mine", "a test", fake("mine", load=load, unavailable=unavailable, install=install).backend)
    assert entry.unavailable() == f"can't load here: {reason}"
    assert refusal(entry.kernels, kind=BackendUnavailableError) == f"mine {entry.unavailable()}"
    assert loads == []


def test_what_is_missing_here_is_no_reason_against_a_simulated_device_but_a_failed_load_is(fake):
    there = dataclasses.replace(SPEC, device=attnreg.Device.parse("sm_90"))
    absent = fake("mine", devices=("cuda", "cpu"), unavailable=lambda: "needs a GPU").backend
    entry = Entry("mine", "a test", absent)
    assert entry.reasons(SPEC, "forward") == ("can't load here: needs a GPU",)
    assert entry.reasons(there, "forward") == ()
    broken = Entry("mine", "a test", absent, cause=ImportError("no _C"))
    assert broken.reasons(there, "forward") == ("failed to load: ImportError: no _C",)


def test_why_it_cannot_load_stands_before_why_it_cannot_run_the_call(fake):
    backend = fake("mine", dtypes=("float16",), gqa=False, unavailable=lambda: "needs a GPU").backend
    spec = dataclasses.replace(SPEC, heads_k=1)
    assert Entry("mine", "a test", backend).reasons(spec, "forward") == (
        "can't load here: needs a GPU",
        "dtype must be float16, got float32",
        "query and key must have the same number of heads, got 2 and 1",
    )


def refuse_long(spec):
    return (f"max_q must be at most 4, got {spec.max_q}",) if spec.max_q > 4 else ()


def fail(spec):
    raise KeyError("max_q")


@pytest.mark.parametrize(
    ("refuses", "reasons"),
    [
        (None, ()),
        (lambda spec: (), ()),
        (lambda spec: [], ()),
        (refuse_long, ("max_q must be at most 4, got 8",)),
        (fail, ("check failed: KeyError: 'max_q'",)),
        (lambda spec: iter(("too long", "too wide")), ("too long", "too wide")),
        (lambda spec: (True,),
         ("check failed: TypeError: refuses() returned (True,), expected a tuple of reasons",)),
        (lambda spec: None,
         ("check failed: TypeError: refuses() returned None, expected a tuple of reasons",)),
        (lambda spec: "too long",
         ("check failed: TypeError: refuses() returned 'too long', expected a tuple of reasons",)),
    ],
)  # fmt: skip
def test_a_backends_own_check_adds_its_reasons_and_a_failing_one_is_a_reason(fake, refuses, reasons):
    entry = Entry("mine", "a test", fake("mine", refuses=refuses).backend)
    assert entry.reasons(SPEC, "forward") == reasons


@pytest.mark.parametrize(
    ("version", "shown"),
    [(lambda: "2.8.3", "2.8.3"), (lambda: None, ""), (lambda: 1 // 0, ""), (lambda: (2, 8), "(2, 8)")],
)
def test_a_version_is_text_or_nothing_and_never_an_error(fake, version, shown):
    assert Entry("mine", "a test", fake("mine", version=version).backend).version() == shown


def in_threads(function, count=8):
    """Return what `function` returned in each of many threads that start at once."""
    barrier = threading.Barrier(count)

    def run():
        barrier.wait()
        return function()

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(run) for _ in range(count)]]


def test_eight_threads_that_load_at_once_get_one_object_of_one_load(fake):
    load, calls = counted(attnreg.Kernels(print, print), 0.05)
    entry = Entry("mine", "a test", fake("mine", load=load).backend)
    assert len({id(found) for found in in_threads(entry.kernels)}) == 1
    assert len(calls) == 1


def test_eight_threads_that_discover_at_once_get_one_whole_registry(monkeypatch):
    found, calls = counted(discover(), 0.05)
    monkeypatch.setattr(registry, "discover", found)
    seen = in_threads(registry.entries)
    assert len({id(entries) for entries in seen}) == 1
    assert "math" in seen[0]
    registry.entries()
    assert 1 <= len(calls) <= 8


def test_eight_threads_can_make_the_first_call_at_once(fake, routers, ran):
    recorder = fake("mine")
    load, calls = counted(attnreg.Kernels(recorder.forward, recorder.backward), 0.05)
    inputs = torch.randn(3, 1, 2, 8, 16)
    expected = F.scaled_dot_product_attention(*inputs)
    ran()
    with attnreg.register_backend(dataclasses.replace(recorder.backend, load=load)):
        for out in in_threads(lambda: F.scaled_dot_product_attention(*inputs)):
            torch.testing.assert_close(out, expected)
    assert len(calls) == 1
    assert ran() == {"mine": (8, 0)}


# ---- sinks

PACKED = AttentionSpec(
    device=Device("cpu"), dtype="float32", batch=2, max_q=8, max_k=8, heads_q=4, heads_k=4, head_dim=16,
    head_dim_v=16, varlen=True,
)  # fmt: skip
RESCALED = {
    "varlen": False, "dropout": 0.5, "grad_lse": True, "deterministic": True, "batch_invariant": True,
    "capturing": True, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), RESCALED.items())
def test_of_which_calls_a_backend_that_declares_sinks_is_given_none(fake, field, value):
    def refuses(spec):
        return ("head_dim must be 16 with sinks",) if spec.sinks and spec.head_dim != 16 else ()

    declared = fake("mine", sinks=True, batch_invariant=True, refuses=refuses).backend
    spec = dataclasses.replace(PACKED, **{field: value})
    for backend, counts in ((declared, True), (fake("other", batch_invariant=True).backend, False)):
        entry = Entry(backend.name, "tests", backend)
        assert entry.reasons(spec, "backward") == entry.reasons(PACKED, "backward") == ()
        for direction in ("forward", "backward"):
            assert entry.counts_sinks(PACKED, direction) is counts
            # A program with a gradient of the LSE gets it from the forward, too.
            assert not entry.counts_sinks(spec, direction)


def test_a_direction_counts_sinks_if_it_declares_them_itself(fake):
    backend = dataclasses.replace(fake("mine", sinks=True).backend, forward=fake("plain").backend.forward)
    entry = Entry("mine", "tests", backend)
    assert [entry.counts_sinks(PACKED, direction) for direction in ("forward", "backward")] == [False, True]
    assert not Entry("mine", "tests", fake("mine", sinks=True, backward=False).backend).counts_sinks(
        PACKED, "backward"
    )
