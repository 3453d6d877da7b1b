"""Every backend that runs on a CPU, held to the contract by the conformance kit."""

import itertools
import zlib
from collections import Counter

import pytest
import torch
from support import gpu
from support.chosen_cases import ALIKE, is_among_fewer, is_chosen

from attnreg.backends import cpu as cpu_backend
from attnreg.backends import math as math_backend
from attnreg.core import registry
from attnreg.core.contract.backend import Kernels
from attnreg.core.contract.options import OPTIONS
from attnreg.core.contract.spec import Device
from attnreg.testing import Conformance
from attnreg.tools.measure import CASES, QUICK, measure

CPU = Device("cpu")
BY_NAME = {str(case): case for case in QUICK}
BACKENDS = {"math": math_backend.BACKEND, "cpu": cpu_backend.BACKEND}
KITS = {name: Conformance(backend, "cpu", full=True) for name, backend in BACKENDS.items()}


def is_slow(name, case):
    """Float16 and float64 take the ways of bfloat16 and float32, and long ones in bfloat16 those of 587.

    Of `cpu` in float32 those cases run that stand for others, else few of each kind: the tests of `cpu` draw
    more lengths, and `math` takes one way. In bfloat16 `cpu` runs those of these that differ in more than a
    number, in the other dtypes a quarter, in one dtype each. Of `math` a sixth runs, and none of the longest.
    """
    if case.heavy or (name == "cpu" and case.dtype == "float32"):
        return case.heavy or not is_chosen(case)
    if name == "cpu" and case.dtype == "bfloat16" and ALIKE.search(case.name):
        return True
    if case.dtype == "float32" or (name == "cpu" and case.dtype == "bfloat16"):
        return case.max_q > 600 or not is_among_fewer(case)
    if not is_among_fewer(case) or (name == "math" and sum(case.lens_q) > 450):
        return True
    dtypes = ("float16", "float64", "bfloat16")[: 3 if name == "math" else 2]
    number = zlib.crc32(case.name.encode()) % (2 * len(dtypes) ** 2)
    return dtypes[number :: len(dtypes)][:1] != (case.dtype,)


CHECKS = [
    pytest.param(name, check, id=f"{name}-{check}", marks=[pytest.mark.slow] * is_slow(name, check.case))
    # Both backends' checks of a case next to each other: see support/references.py.
    for checks in itertools.zip_longest(*(kit.checks for kit in KITS.values()))
    for name, check in zip(KITS, checks, strict=True)
    if check
]

# What each backend may refuse, and how often in one dtype; a front's calls and drawn ones are never refused.
NO_CPU = {row.name for row in OPTIONS} - {
    "dropout", "attn_bias", "alibi_slopes", "seqused_k", "block_table", "num_splits", "softcap", "grad_lse",
}  # fmt: skip


def refused_options(names):
    """Return the reasons against options, and how many cases of one dtype have each."""
    cases = [case for case in QUICK if case.dtype == "bfloat16"]
    return {
        row.reason.partition(", got")[0]: sum(case.has(row) for case in cases)
        for row in OPTIONS
        if row.name in names
    }


REFUSED = {
    "math": Counter(refused_options({"sinks"})),
    "cpu": Counter(
        refused_options(NO_CPU)
        | {f"head_dim of the value must be that of the query, {dim}": 1 for dim in (5, 32, 40, 64, 192)}
    ),
}
# What it refuses beyond its limits: calls with an option that only the compiled kernel has.
FURTHER = {
    "math": set(),
    "cpu": {
        reason
        for option in ("softcap", "grad_lse", "alibi_slopes", "dropout_p")
        for reason in (
            f"dtype must be float32, bfloat16 or float16 with {option}",
            f"attn_bias must be None with {option}",
            f"{option} needs the compiled kernel, which `attnreg build` makes",
        )
    },
}
TENSORS = {
    "": ["out", "lse", "dq", "dk", "dv"],
    "SDPA": ["out", "dq", "dk", "dv"],
    "of a bias": ["out", "lse", "dq", "dk", "dv", "dbias"],
}


@pytest.mark.parametrize(("name", "check"), CHECKS)
def test_a_backend_keeps_the_contract(name, check):
    outcome = KITS[name].run(check)
    assert outcome.passed, outcome
    reasons = {reason.partition(", got")[0] for reason in outcome.reasons}
    assert reasons <= {*REFUSED[name], *FURTHER[name]}
    if not outcome.refused:
        of_bias = "of a bias" if check.case.bias_gradient else ""
        names = TENSORS["SDPA" if check.front.startswith("SDPA") else of_bias]
        # A backward alone may be refused.
        assert list(outcome.errors) == (names[:2] if reasons else names)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_refuses_no_more_than_it_is_known_to(name):
    backend = BACKENDS[name]
    refused = Counter(
        reason.partition(", got")[0]
        for check in Conformance(backend, "cpu", ["bfloat16"]).checks
        for reason in backend.forward.unsupported(check.case.spec(CPU))
    )
    assert refused == REFUSED[name]
    assert backend.backward == backend.forward
    specs = [check.case.spec(CPU) for check in KITS[name].checks]
    further = {reason for spec in specs for reason in (backend.refuses(spec) if backend.refuses else ())}
    assert {reason.partition(", got")[0] for reason in further} <= set(FURTHER[name])


H200 = Device("cuda", (9, 0), name="NVIDIA H200", simulated=True)


@pytest.mark.parametrize("name", gpu.ADMITTED)
def test_the_limits_of_gpu_backends_admit_as_many_cases_as_the_gpu_tests_count(name):
    entry = registry.find(name)
    for admitted, cases in (
        (gpu.ADMITTED, QUICK),
        (gpu.HEAVY_ADMITTED, [case for case in CASES if case.heavy]),
    ):
        specs = [case.spec(H200) for case in cases]
        reasons = [entry.reasons(spec, "forward") + entry.reasons(spec, "backward") for spec in specs]
        assert sum(map(gpu.admitted, reasons)) == admitted[name]


@pytest.mark.each_value("name", "default")
@pytest.mark.parametrize("default", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_computes_in_the_dtypes_of_its_inputs_whatever_torchs_default_is(name, default):
    wanted = {f"{case} bfloat16" for case in ("heads 6:3", "packed heads 6:3", "window (4, 0)")}
    checks = [check for check in KITS[name].checks if not check.front and str(check.case) in wanted]
    assert len(checks) == len(wanted)
    torch.set_default_dtype(default)
    try:
        outcomes = [KITS[name].run(check) for check in checks]
    finally:
        torch.set_default_dtype(torch.float32)
    for outcome in outcomes:
        assert outcome.passed, outcome
        assert list(outcome.errors) == TENSORS[""]


@pytest.mark.parametrize("forward", BACKENDS)
@pytest.mark.parametrize("backward", BACKENDS)
@pytest.mark.parametrize(
    "name", ["length 127 float32", "heads 6:3 bfloat16", "causal lengths 64 and 1 float32"]
)
def test_any_forward_pairs_with_any_backward(forward, backward, name):
    pair = Kernels(BACKENDS[forward].load().forward, BACKENDS[backward].load().backward)
    assert all(error.passed for error in measure(pair, BY_NAME[name]).values())
