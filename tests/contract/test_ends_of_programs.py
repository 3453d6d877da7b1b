"""One rule for errors of a backend's functions that aren't Exceptions, such as SystemExit.

They are faults of the backend. Ctrl-C is the program's, and so is what a signal handler raises.
"""

from __future__ import annotations

import signal

import pytest

import attnreg
from attnreg.backends import math as math_backend
from attnreg.testing import Conformance
from attnreg.tools.measure import Case


class OwnError(BaseException):
    """Like the errors by which frameworks end a task."""


FAULTS = [SystemExit(3), GeneratorExit(), OwnError("of its own")]
# What is wrong with a backend is a reason against it, or costs nothing but what the function is for.
CHECKS = "unavailable", "load", "refuses", "priority"
EXTRAS = "version", "cuts", "builds"


def raising(error):
    def run(*_):
        raise error

    return run


def by_signal(*_):
    signal.raise_signal(signal.SIGUSR1)


def backend_with(function, run):
    kernels = math_backend.BACKEND.load()
    limits = attnreg.Capabilities(devices=("cpu",), dtypes=("float32",), varlen=True)
    fields = {"load": lambda: kernels}
    if function in ("forward", "backward", "replaces_native"):
        fields["load"] = lambda: kernels._replace(**{function: run})
    else:
        fields[function] = run
    return attnreg.Backend(name="faulty", forward=limits, backward=limits, **fields)


@pytest.fixture
def ended_by_signals(monkeypatch):
    """Have SIGUSR1 end the program, as handlers of SIGTERM do."""

    def handler(number, frame):
        raise SystemExit(number)

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", FAULTS, ids=repr)
@pytest.mark.parametrize("function", [*CHECKS, *EXTRAS])
def test_a_fault_of_a_function_ends_no_program(packed, ran, function, error):
    inputs = packed([3, 4])
    handle = None
    try:
        handle = attnreg.register_backend(backend_with(function, raising(error)))
    except attnreg.BackendUnavailableError as failed:
        assert function in ("unavailable", "load") and f"{type(error).__name__}: {error}" in str(failed)
    attnreg.varlen_attn(*inputs).sum().backward()
    runs = function in EXTRAS
    assert ("faulty" in ran()) is runs
    if handle is not None and not runs:
        shown = attnreg.explain(*inputs[:3], *inputs[3:])
        assert f"check failed: {type(error).__name__}: {error}".rstrip() in str(shown)


@pytest.mark.parametrize("error", FAULTS, ids=repr)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_that_ends_the_program_breaks_the_contract(packed, ran, direction, error):
    inputs = packed([3, 4])
    said = f"faulty breaks the contract in its {direction}: raised {type(error).__name__}: {error}, expected"
    with attnreg.register_backend(backend_with(direction, raising(error))):
        for _ in range(3):
            with pytest.raises(attnreg.RegistrationError) as caught:
                attnreg.varlen_attn(*inputs).sum().backward()
            assert str(caught.value).startswith(said) and caught.value.__cause__ is error
    (row,) = attnreg.stats().failures
    assert (row.backend, row.direction, row.count) == ("faulty", direction, 3)


@pytest.mark.parametrize("function", [*CHECKS, *EXTRAS, "forward", "backward"])
@pytest.mark.parametrize("by", ["Ctrl-C", "a signal handler"])
def test_what_ends_the_program_passes(packed, ended_by_signals, function, by):
    expected, run = {
        "Ctrl-C": (KeyboardInterrupt, raising(KeyboardInterrupt())),
        "a signal handler": (SystemExit, by_signal),
    }[by]
    inputs = packed([3, 4])
    with pytest.raises(expected), attnreg.register_backend(backend_with(function, run)):
        attnreg.varlen_attn(*inputs).sum().backward()
        attnreg.explain(*inputs)
        attnreg.core.registry.find("faulty").version()
        attnreg.core.registry.find("faulty").builds(None)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("error", [*FAULTS[:2], KeyboardInterrupt(), None], ids=repr)
def test_a_launcher_has_the_same_rule(compiled_routers, packed, ended_by_signals, direction, error):
    run, calls = by_signal if error is None else raising(error), []
    kernel = getattr(math_backend.BACKEND.load(), direction)
    expected = {None: SystemExit, KeyboardInterrupt: KeyboardInterrupt}.get(error and type(error))

    def later(*arguments):
        calls.append(arguments)
        return kernel(*arguments) if len(calls) < 4 else run()

    inputs = packed([3, 4])
    with attnreg.register_backend(backend_with(direction, later)):
        for _ in range(3):
            attnreg.varlen_attn(*inputs).sum().backward()
        with pytest.raises(
            expected or attnreg.RegistrationError, match=None if expected else "faulty breaks the con"
        ):
            attnreg.varlen_attn(*inputs).sum().backward()
    assert len(attnreg.stats().failures) == (not expected)


def test_the_kit_reports_a_kernel_that_would_end_the_program():
    case = Case(name="one", dtype="float32", dims=(16, 16), lens_q=(3, 4), lens_k=(3, 4), varlen=True)
    outcome = Conformance(backend_with("forward", raising(FAULTS[0])), "cpu").run(case)
    assert not outcome.passed and "SystemExit: 3" in str(outcome)
