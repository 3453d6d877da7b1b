"""Every backend that runs on a CPU, held to the whole input matrix, and tests of the accuracy rule."""

import math

import pytest
import torch

from attnreg.backends import cpu as cpu_backend
from attnreg.backends import math as math_backend
from attnreg.backends.cpu import bfloat16
from attnreg.contract.backend import Backend, Kernels
from attnreg.contract.capabilities import Capabilities
from attnreg.measure import CASES, QUICK, measure, verify

MATRIX = [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * case.heavy) for case in CASES]
BY_NAME = {str(case): case for case in QUICK}

BACKENDS = {"math": math_backend.BACKEND, "cpu": cpu_backend.BACKEND}
MATH = math_backend.BACKEND.load()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", MATRIX)
def test_a_backend_is_at_most_twice_as_wrong_as_plain_pytorch(name, case):
    (outcome,) = verify(BACKENDS[name], "cpu", [case])
    assert not outcome.failure
    assert {tensor: str(error) for tensor, error in outcome.errors.items() if not error.passed} == {}
    if name == "math":
        assert not outcome.reasons
        assert outcome.errors.keys() == {"out", "lse", "dq", "dk", "dv"}
    elif not outcome.errors:
        pytest.skip("; ".join(outcome.reasons))


@pytest.mark.parametrize("default", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_computes_in_the_dtypes_of_its_inputs_whatever_torchs_default_is(
    name, default, monkeypatch
):
    monkeypatch.setattr(bfloat16, "_is_fast", lambda: True)
    cases = [BY_NAME[f"{case} bfloat16"] for case in ("heads 6:3", "varlen heads 6:3", "window (4, 0)")]
    torch.set_default_dtype(default)
    try:
        outcomes = list(verify(BACKENDS[name], "cpu", cases))
    finally:
        torch.set_default_dtype(torch.float32)
    for outcome in outcomes:
        assert not outcome.failure
        assert len(outcome.errors) == 5
        assert all(error.passed for error in outcome.errors.values())


@pytest.mark.parametrize("forward", BACKENDS)
@pytest.mark.parametrize("backward", BACKENDS)
@pytest.mark.parametrize(
    "name", ["length 127 float32", "heads 6:3 bfloat16", "causal lengths 64 and 1 float32"]
)
def test_any_forward_pairs_with_any_backward(forward, backward, name):
    pair = Kernels(BACKENDS[forward].load().forward, BACKENDS[backward].load().backward)
    assert all(error.passed for error in measure(pair, BY_NAME[name]).values())


def log2_lse(q, k, v, call):
    out, lse = MATH.forward(q, k, v, call)
    return out, lse / math.log(2)


def called_with(change):
    """Return a forward that runs another call than it is given."""
    return lambda q, k, v, call: MATH.forward(q, k, v, call._replace(**change(call)))


FEWER_KEYS = "causal lengths 64 and 32 float16"


def half_the_heads_wrong(q, k, v, call):
    out, lse = MATH.forward(q, k, v, call)
    out[..., ::2, :] *= 1.02
    return out, lse


def nan_for_unseeing_rows(q, k, v, call):
    out, lse = MATH.forward(q, k, v, call)
    unseeing = (lse == -torch.inf).transpose(-1, -2)[..., None]
    return out.masked_fill(unseeing, torch.nan), lse


@pytest.mark.parametrize(
    ("wrong", "name", "tensor"),
    [
        (log2_lse, "length 127 bfloat16", "lse"),
        # Aligned top-left, a window of one key more, and no bias.
        (called_with(lambda call: {"window": (-1, call.max_q - call.max_k)}), FEWER_KEYS, "out"),
        (called_with(lambda call: {"window": (call.window[0] + 1, 0)}), "window (4, 0) float32", "out"),
        (called_with(lambda call: {"attn_bias": None}), "additive bias bfloat16", "out"),
        (half_the_heads_wrong, "heads 12:4 float32", "out"),
        (nan_for_unseeing_rows, "causal lengths 256 and 8 bfloat16", "out"),
    ],
)
def test_the_rule_catches_a_kernel_that_is_wrong(wrong, name, tensor):
    errors = measure(Kernels(wrong), BY_NAME[name])
    assert not errors[tensor].passed
    assert errors.keys() == {"out", "lse"}


class Specializing:
    """A `specialize` for `math`, whose launchers multiply their results by what a test wants to be found."""

    def __init__(self, forward=1.0, backward=1.0):
        self.factors, self.directions = (forward, backward), []

    def __call__(self, direction, tensors, call):
        self.directions.append(direction)
        factor = self.factors[direction == "backward"]
        kernel = MATH.forward if direction == "forward" else MATH.backward

        def launch(*given):
            assert len(given) == len(tensors) + 2 * call.varlen
            results = kernel(*given[: len(tensors)], call)
            return results[0] * factor, *results[1:]

        return launch


@pytest.mark.parametrize("name", ["length 127 bfloat16", "varlen heads 6:3 float32"])
def test_the_rule_holds_launchers_as_well(name):
    def wrong(specialize):
        errors = measure(MATH._replace(specialize=specialize), BY_NAME[name])
        assert specialize.directions == ["forward", "backward"]
        return {name for name, error in errors.items() if not error.passed}

    assert wrong(Specializing()) == set()
    assert "out" in wrong(Specializing(forward=1.1))
    assert wrong(Specializing(backward=1.1)) == {"dq"}


@pytest.mark.parametrize(
    "start", ["varlen seqused_k", "varlen no ", "varlen tail", "causal lengths 256 and 8", "no keys"]
)
def test_no_launcher_is_asked_for_where_rows_see_no_key_or_belong_to_no_sequence(start):
    case = next(case for case in QUICK if str(case).startswith(start))
    specialize = Specializing(2.0, 2.0)
    errors = measure(MATH._replace(specialize=specialize), case)
    assert specialize.directions == []
    assert all(error.passed for error in errors.values())


def test_a_kernel_that_returns_another_shape_is_wrong():
    def transposed(q, k, v, call):
        out, lse = MATH.forward(q, k, v, call)
        return out.transpose(1, 2), lse

    error = measure(Kernels(transposed), BY_NAME["length 127 float32"])["out"]
    assert error.kernel == math.inf
    assert not error.passed


def test_what_a_backend_refuses_is_reported_and_not_run():
    def never(q, k, v, call):
        raise AssertionError("refused, yet run")

    narrow = Capabilities(devices=("cpu",), dtypes=("float16",))
    refusing = Backend(name="narrow", forward=narrow, load=lambda: Kernels(never))
    (outcome,) = verify(refusing, "cpu", [BY_NAME["varlen heads 6:3 float32"]])
    assert outcome.errors == {}
    assert "dtype must be float16, got float32" in outcome.reasons
    assert "input must be dense, got varlen" in outcome.reasons


def test_a_kernel_that_raises_does_not_end_the_run():
    def raising(q, k, v, call):
        raise RuntimeError("no such kernel")

    broken = Backend(name="broken", forward=math_backend.EVERYTHING, load=lambda: Kernels(raising))
    outcomes = list(verify(broken, "cpu", QUICK[:2]))
    assert [outcome.failure for outcome in outcomes] == ["RuntimeError: no such kernel"] * 2
    assert not any(outcome.passed for outcome in outcomes)


def test_case_names_are_unique():
    assert len({str(case) for case in CASES}) == len(CASES)
