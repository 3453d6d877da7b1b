"""Promises of the conformance kit: what it runs, what it says, and that refusing everything isn't passing."""

import dataclasses
import random
import re
from dataclasses import replace

import pytest
import torch
from support.length_kinds import draw_kind
from support.processes import forked
from support.sinks import Counting

import attnreg
from attnreg import Range
from attnreg.backends import math as math_backend
from attnreg.core import aten, registry
from attnreg.core.contract.spec import Device
from attnreg.errors import InvalidInputError, UnknownBackendError, UnsupportedInputError
from attnreg.testing import Conformance, check_backend
from attnreg.testing import kit as kit_module
from attnreg.testing.cases import ABILITIES, declared
from attnreg.tools.measure import Case, measure

# What it finds in decisions about lengths is in test_classes.py.
pytestmark = pytest.mark.usefixtures("no_other_lengths")

MATH = math_backend.BACKEND.load()
SMALL = Case(name="small", lens_q=(5,), lens_k=(7,), dtype="float32")


def double(*given):
    out, lse = MATH.forward(*given)
    return out * 2, lse


def test_one_line_holds_a_backend_and_returns_a_report(fake):
    report = check_backend(fake("mine").backend, device="cpu", cases=["drawn 1 ", "repeated", "heads 4:"])
    assert report.passed
    assert [str(outcome.check) for outcome in report.outcomes] == [
        *("heads 4:2 bfloat16", "heads 4:1 bfloat16"),
        *("packed heads 4:2 bfloat16", "packed heads 4:1 bfloat16"),
        *[text for text in map(str, Conformance("math", "cpu").checks) if text.startswith("drawn 1 ")],
        *[str(check) for check in Conformance("math", "cpu").checks if check.front],
    ]
    assert len(report.outcomes) == 10
    assert report.refused == {}


def test_a_failure_has_the_line_that_repeats_it(fake):
    kernels = MATH._replace(forward=double)
    wrong = fake("mine", load=lambda: kernels).backend
    with pytest.raises(AssertionError) as raised:
        check_backend(wrong, device="cpu", seed=7, cases=["drawn 3 ", "heads 4:2"])
    said = str(raised.value)
    assert said.startswith("mine on cpu: 3 checks: 0 right, 3 wrong\nheads 4:2 bfloat16: out ")
    lines = [line.strip() for line in said.splitlines() if "check_backend" in line]
    given = "device='cpu', seed=7, cases=['heads 4:2 bfloat16'])"
    imported = "from attnreg.testing import check_backend; "
    # No module has it, so what to write there is for the program to know.
    assert lines[0] == f"{imported}check_backend(<the Backend 'mine' that was given>, {given}"
    with attnreg.register_backend(wrong), pytest.raises(AssertionError) as raised:
        check_backend("mine", device="cpu", seed=7, cases=["drawn 3 ", "heads 4:2"])
    lines = [line.strip() for line in str(raised.value).splitlines() if "check_backend" in line]
    assert lines[0] == f"{imported}check_backend('mine', {given}"
    for line in lines:
        with attnreg.register_backend(wrong), pytest.raises(AssertionError, match=r"[12] wrong"):
            exec(line)  # noqa: S102


MODULE = """
from attnreg import Backend, Capabilities, Kernels
from attnreg.backends.math import BACKEND as MATH

def load():
    kernels = MATH.load()
    return Kernels(lambda *given: tuple(2 * x for x in kernels.forward(*given)))

MINE = Backend(name="mine", forward=Capabilities(devices=("cpu",), dtypes=("float32",)), load=load)
"""


@pytest.mark.slow
def test_the_line_that_repeats_a_failure_of_a_modules_backend_runs_anywhere(tmp_path):
    (tmp_path / "my_kernels.py").write_text(MODULE)
    here, case = "import sys; sys.path.insert(0, '.'); ", "length 33 float32"
    call = f"import my_kernels, attnreg.testing as kit; kit.check_backend(my_kernels.MINE, cases=[{case!r}])"
    first = forked(here + call, cwd=tmp_path)
    imports = "from attnreg.testing import check_backend; from my_kernels import MINE; "
    line = f"{imports}check_backend(MINE, device='cpu', cases=[{case!r}])"
    assert f"\n  {line}\n" in first.stderr
    for done in (first, forked(here + line, cwd=tmp_path)):
        assert "AssertionError: mine on cpu: 1 checks: 0 right, 1 wrong" in done.stderr


def test_the_seed_decides_what_is_drawn_and_which_values():
    first, again, other = (Conformance("math", "cpu", seed=seed).checks for seed in (0, 0, 1))
    assert first == again
    changed = {one.case.name for one, two in zip(first, other, strict=True) if one != two}
    assert changed and all(name.startswith("drawn") for name in changed)
    errors = [measure(MATH, SMALL, seed=seed)["out"].kernel for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]


def test_a_dtype_changes_no_drawn_case_but_its_dtype():
    everything, one = (Conformance("math", "cpu", dtypes).checks for dtypes in ((), ["float16"]))
    drawn = [
        [dataclasses.replace(check.case, dtype="") for check in checks if check.case.name.startswith("drawn")]
        for checks in (everything, one)
    ]
    assert drawn[0] == drawn[1]


NARROW = {
    "head dims": {"head_dim": Range(96, 256, 32), "head_dim_v": Range(128, 128)},
    "heads": {"heads": Range(8, 16)},
    "pages": {"page_size": Range(256, 512, 256)},
    "one dtype": {"dtypes": ("float64",)},
    "packed only": {"dense": False, "bias": False},
    "dense only": {"varlen": False, "page_size": None},
    "one sequence": {"batch": Range(0, 1), "dropout": False, "seqused_k": False, "page_size": None},
}


@pytest.mark.parametrize("limits", NARROW.values(), ids=NARROW)
def test_what_is_declared_is_checked_however_narrow_it_is(fake, limits):
    backend = fake("mine", **limits).backend
    kit = Conformance(backend, "cpu")
    taken = [
        check.case for check in kit.checks if not backend.forward.unsupported(check.case.spec(Device("cpu")))
    ]
    asked = {name for name, asks in ABILITIES.items() if any(map(asks, taken))}
    assert asked >= set(declared(backend.forward))
    drawn = [case for case in taken if case.name.startswith("drawn")]
    assert len(drawn) == 24 or limits == NARROW["one sequence"]
    assert kit.run(next(check for check in kit.checks if check.case in drawn)).passed


def test_a_backend_that_refuses_what_it_declares_does_not_pass(fake):
    reason = "heads must be equal, got others"
    shy = fake(
        "mine",
        batch_invariant=True,
        sinks=True,
        **dict.fromkeys(("key_ranges", "score_mod", "mask_mod"), True),  # cases of these share heads, too
        refuses=lambda spec: (reason,) if spec.heads_q != spec.heads_k else (),
    ).backend
    kit = Conformance(shy, "cpu", ["float32"])
    ran = kit.run(SMALL)
    assert [*ran.errors] == ["out", "lse", "dq", "dk", "dv"]
    never = kit.never_ran(lambda check: kit.run(check) if check.case.heads[0] != check.case.heads[1] else ran)
    assert never == [
        f"its {direction} declares gqa, but never ran it: {reason}" for direction in ("forward", "backward")
    ]


@pytest.mark.slow
def test_a_backend_that_declares_sinks_is_given_them_and_held_by_the_rule_in_all_four_gradients(fake):
    kernels = Counting()
    report = check_backend(kernels.backend(fake), device="cpu", cases=["sinks", "drawn 13 "])
    counted = [outcome for outcome in report.outcomes if outcome.check.case.counts_sinks]
    assert {outcome.check.case.name.split()[0] for outcome in counted} == {"packed", "drawn"}
    assert all([*outcome.errors] == ["out", "lse", "dq", "dk", "dv", "dsinks"] for outcome in counted)
    assert {"given", "rescaled"} == set(kernels.seen())
    # A backend that doesn't declare them is asked for nothing.
    report = check_backend(fake("mine").backend, device="cpu", cases=["packed sinks", "packed counted sinks"])
    assert report.refused == {"sinks must be None": 3}


def with_bias_gradient(fake, change=lambda of_bias: (of_bias,), **options):
    """Return a made-up backend that declares the gradient of a bias in its backward, and what it gives."""
    recorder = fake("mine")

    def backward(*given):
        *grads, last = recorder.backward(*given)
        return (*grads, *change(last)) if given[-1].bias_gradient else (*grads, last)

    kernels = attnreg.Kernels(recorder.forward, backward)
    backend = fake("mine", load=lambda: kernels, **options).backend
    limits = dataclasses.replace(backend.forward, bias_gradient=True)
    return dataclasses.replace(backend, backward=limits), recorder


def test_a_backend_that_declares_the_gradient_of_a_bias_is_held_by_the_rule_in_it(fake):
    backend, ran = with_bias_gradient(fake)
    report = check_backend(backend, device="cpu", cases=["gradient of a bias", "drawn 7 "])
    of_bias = [outcome for outcome in report.outcomes if outcome.case.bias_gradient]
    assert {outcome.case.name.split()[0] for outcome in of_bias} == {"gradient", "drawn"}
    assert all([*outcome.errors] == ["out", "lse", "dq", "dk", "dv", "dbias"] for outcome in of_bias)
    assert any(call.bias_gradient for *_, call in ran.backwards)
    assert not any(call.bias_gradient for *_, call in ran.forwards)  # which has it with dropout alone


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (
            lambda of_bias: (of_bias * 0.5,),
            r"gradient of a bias bfloat16: dbias .* > .*first dbias\[0, 1, 2\] \(head 0, row 1, key 2\): ",
        ),
        (lambda of_bias: (), r"got 3 values, expected the tuple \(grad_q, grad_k, grad_v, grad_attn_bias\)"),
        (lambda of_bias: (of_bias[None],), r"grad_attn_bias: got \(1, 2, 63, 113\) torch.bfloat16, expected"),
    ],
    ids=["wrong", "none", "shape"],
)
def test_a_wrong_gradient_of_a_bias_is_found(fake, change, failure):
    backend, _ = with_bias_gradient(fake, change)
    with pytest.raises(AssertionError, match=re.compile(failure, re.DOTALL)):
        check_backend(backend, device="cpu", cases=["gradient of a bias bfloat16"])


def test_a_gradient_of_a_bias_that_is_declared_and_refused_never_ran(fake):
    reason = "attn_bias must have no gradient, got one"
    backend, _ = with_bias_gradient(fake, refuses=lambda spec: (reason,) if spec.bias_gradient else ())
    kit = Conformance(backend, "cpu", ["float32"])
    asked = [check for check in kit.checks if check.case.bias_gradient]
    outcomes = dict(zip(asked, map(kit.run, asked), strict=True))
    right = kit.run(SMALL)
    never = kit.never_ran(lambda check: outcomes.get(check, right))
    assert never == [f"its backward declares bias_gradient, but never ran it: {reason}"]
    assert all([*outcome.errors] == ["out", "lse"] for outcome in outcomes.values())


def test_a_backend_that_refuses_everything_does_not_pass(fake, monkeypatch):
    def decline(*given):
        raise UnsupportedInputError("no kernel for it")

    broken = MATH._replace(forward=decline, backward=decline)
    reason = "batch must be 5, got 2"
    few = [check for check in Conformance("math", "cpu").checks if sum(check.case.lens_q) < 40][:8]
    with monkeypatch.context() as patch:
        patch.setattr(kit_module, "checks_for", lambda *given: few)
        for options, said in (
            ({"refuses": lambda spec: (reason,)}, reason),
            ({"load": lambda: broken}, "no kernel for it"),
        ):
            with pytest.raises(AssertionError) as raised:
                check_backend(fake("mine", **options).backend, device="cpu")
            expected = f"8 checks: 0 right, 0 wrong\nits forward declares dense, but never ran it: {said}\n"
            assert expected in str(raised.value)
    needing = fake(
        "mine", refuses=lambda spec: ("alibi_slopes need a package",) if spec.alibi else ()
    ).backend
    kit = Conformance(needing, "cpu")
    outcomes = [kit.run(check) for check in kit.checks if check.case.alibi]
    assert outcomes and all(outcome.refused for outcome in outcomes)
    assert not any("alibi" in text for text in kit.never_ran(lambda check: outcomes[0]))


def test_a_refusal_without_what_was_got_is_a_failure(fake):
    for reason, passes in (("no", False), ("head_dim must be 64, got 80", True), ("it needs torch 9", True)):
        outcome = Conformance(fake("mine", refuses=lambda spec, said=reason: (said,)).backend, "cpu").run(
            SMALL
        )
        assert (outcome.passed, outcome.reasons, outcome.errors) == (passes, (reason,), {})
    crashing = fake("mine", refuses=lambda spec: spec.no_such_field).backend
    assert "check failed: AttributeError" in Conformance(crashing, "cpu").run(SMALL).failure


def test_ten_wrong_checks_are_shown_in_full_and_the_others_by_name(fake):
    wrong = fake("mine", refuses=lambda spec: ("no",)).backend
    with pytest.raises(AssertionError) as raised:
        check_backend(wrong, device="cpu", dtypes=["float32"], cases=["heads", "drawn"])
    said = str(raised.value)
    count = int(re.search(r"(\d+) checks: 0 right, \1 wrong", said)[1])
    assert said.count("from attnreg.testing import check_backend") == kit_module.SHOWN < count
    more = re.search(r"(\d+) more are wrong: (.*)", said)
    assert int(more[1]) == len(more[2].split("; ")) == count - kit_module.SHOWN


def test_the_reasons_of_one_direction_have_to_be_sentences_too(fake):
    def of_forward(refuses):
        backend = fake("mine").backend
        return replace(backend, forward=replace(backend.forward, refuses=refuses))

    outcome = Conformance(of_forward(lambda spec: ("no",)), "cpu").run(SMALL)
    assert outcome.failure == "refusal: got 'no', expected a sentence such as 'head_dim must be 64, got 80'"
    outcome = Conformance(of_forward(lambda spec: spec.no_such_field), "cpu").run(SMALL)
    assert outcome.failure.startswith("check failed: AttributeError: ")


@pytest.mark.parametrize("name", registry.entries())
def test_reasons_of_built_in_backends_are_sentences_on_every_device(name):
    draw, device = random.Random(name), list(map(Device.parse, ("sm_75", "sm_90", "sm_100", "sm_120", "cpu")))
    backend = registry.entries()[name].backend
    directions = [limits for limits in (backend.forward, backend.backward) if limits]
    functions = list(filter(None, [backend.refuses, *(limits.refuses for limits in directions)]))
    reasons = set()
    for _ in range(500):
        spec = draw_kind(draw).but(device=draw.choice(device), batch_invariant=draw.random() < 0.2)
        spec = spec.but(sinks=draw.random() < 0.2, key_ranges=spec.varlen and draw.random() < 0.2)
        if not any(limits.against(spec) for limits in directions):
            reasons.update(reason for refuses in functions for reason in refuses(spec))
    assert [reason for reason in reasons if not kit_module.CLEAR.search(reason)] == []
    assert bool(reasons) == bool(functions)


def test_what_a_backend_refuses_is_not_run(fake):
    narrow = fake("narrow", dtypes=("float16",), varlen=False)
    case = dataclasses.replace(SMALL, varlen=True)
    outcome = Conformance(narrow.backend, "cpu").run(case)
    assert outcome.refused
    assert outcome.reasons == ("dtype must be float16, got float32", "input must be dense, got packed")
    assert narrow.forwards == []


def test_a_kernel_that_raises_does_not_end_the_run(fake):
    def crash(*given):
        raise RuntimeError("no such kernel")

    kit = Conformance(fake("broken", load=lambda: MATH._replace(forward=crash)).backend, "cpu")
    outcomes = list(map(kit.run, kit.checks[:2]))
    line = crash.__code__.co_firstlineno + 1
    assert [outcome.failure for outcome in outcomes] == [
        f"test_kit.py:{line}: RuntimeError: no such kernel"
    ] * 2


def test_a_check_of_the_backends_own_that_raises_is_said_as_it_is(fake):
    outcome = Conformance(fake("mine", refuses=lambda spec: None).backend, "cpu").run(SMALL)
    assert outcome.failure == "check failed: TypeError: refuses() returned None, expected a tuple of reasons"


def test_a_front_leaves_the_registry_and_torch_as_they_were(fake):
    mine = fake("mine").backend
    installed, known = aten.installed(), attnreg.list_backends()
    kit = Conformance(mine, "cpu")
    for check in kit.checks:
        if check.front:
            assert kit.run(check).passed
            assert (aten.installed(), attnreg.list_backends()) == (installed, known)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_call_that_another_backend_serves_is_a_failure(fake, monkeypatch):
    """SDPA's own kernel runs where the routers don't reach the backend."""
    monkeypatch.setattr(aten, "ensure", lambda: None)
    if aten.installed():
        aten.restore()
    kit = Conformance(fake("mine").backend, "cpu")
    (check,) = (check for check in kit.checks if check.front == "SDPA in use_backend")
    failure = kit.run(check).failure
    assert failure == (
        "RegistrationError: calls by backend: got {}, expected {'mine': {'forward': 1, 'backward': 1}}"
    )


def test_arguments_that_mean_nothing_are_errors(fake):
    with pytest.raises(UnknownBackendError, match="no backend is named 'mien'"):
        check_backend("mien")
    with pytest.raises(InvalidInputError, match=r"cases: got .'no such'., expected parts of names"):
        check_backend("math", cases=["no such"])
    for given, said in {
        "cases": ("dim 8", "cases: got 'dim 8', expected a list of parts of names"),
        "dtypes": ("float32", "dtypes: got 'float32', expected a list of names of dtypes"),
        "seed": ("1", "seed: got '1', expected an integer"),
        "device": ("gpu", "device: got 'gpu', expected 'cpu', 'cuda' or 'cuda:N'"),
    }.items():
        with pytest.raises(InvalidInputError) as error:
            check_backend("math", **{given: said[0]})
        assert str(error.value) == said[1]
    for name, near in (("bf17", "; did you mean 'bfloat16'?"), ("int32", "; did you mean 'float32'?")):
        with pytest.raises(InvalidInputError) as error:
            check_backend("math", dtypes=[name])
        assert str(error.value) == f"dtypes: got {name!r}, expected floating-point dtypes{near}"
    assert check_backend("math", dtypes=["bf16"], cases=["dim 8 "]).passed


class Specializing:
    """A `specialize` for `math`, whose launchers multiply their results by what a test wants to be found."""

    def __init__(self, forward=1.0, backward=1.0):
        self.factors, self.directions = (forward, backward), []

    def __call__(self, direction, tensors, call):
        self.directions.append(direction)
        factor = self.factors[direction == "backward"]
        kernel = getattr(MATH, direction)

        def launch(*given):
            offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), given[len(tensors) :], strict=False))
            results = kernel(*given[: len(tensors)], call._replace(**offsets))
            return results[0] * factor, *results[1:]

        return launch


def wrong(specialize, case):
    errors = measure(MATH._replace(specialize=specialize), case)
    return {name for name, error in errors.items() if not error.passed}


PACKED = dataclasses.replace(SMALL, lens_q=(9, 3), lens_k=(12, 4), varlen=True, window=(-1, 0))


@pytest.mark.parametrize("case", [SMALL, PACKED], ids=["dense", "packed"])
def test_launchers_are_held_to_the_rule_as_well(case):
    right = Specializing()
    assert wrong(right, case) == set()
    assert right.directions[:2] == ["forward", "backward"]
    assert "out" in wrong(Specializing(forward=1.1), case)
    assert wrong(Specializing(backward=1.1), case) == {"dq"}


@pytest.mark.parametrize(
    "changes",
    [{"seqused_k": (7, 1)}, {"tail": 3}, {"lens_k": (12, 0)}, {"lens_q": (30, 3)}, {"num_splits": 2}],
    ids=str,
)
def test_specialize_is_called_only_where_the_call_cache_calls_it(changes):
    specialize = Specializing(2.0, 2.0)
    assert wrong(specialize, dataclasses.replace(PACKED, **changes)) == set()
    assert specialize.directions == []
