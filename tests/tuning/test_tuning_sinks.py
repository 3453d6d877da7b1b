"""Promises of tables about calls with sinks: recorded, measured as they run, looked up, and shown."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from support.command_line import invoke, words
from support.known import know
from support.packed_calls import LSE
from support.sinks import Counting
from support.tuned import CPU, off_by, point, slowed, spec_with, table, watched

import attnreg
from attnreg.core import registry
from attnreg.core.contract.spec import Device
from attnreg.core.policy import current as policy
from attnreg.core.registry.entry import Entry
from attnreg.core.times import tables, traces
from attnreg.core.times.environments import environment
from attnreg.core.times.lookup import predict
from attnreg.core.times.table import load
from attnreg.core.times.traces import spec_from, spec_to
from attnreg.core.times.turns import MOST_TURNS
from attnreg.tools.tuning.checks import Checks
from attnreg.tools.tuning.measure import Measurement

LENGTHS, HEADS = (5, 9), 4
PACKED = spec_with(32, batch=3, varlen=True, tokens_q=80, tokens_k=80, needs_backward=True)
SINKS = dataclasses.replace(PACKED, sinks=True)
# What `packed(LENGTHS)` is, without sinks.
CALLED = dataclasses.replace(
    PACKED, dtype="float32", batch=2, max_q=9, max_k=9, tokens_q=14, tokens_k=14, head_dim=16, head_dim_v=16
)
GIVEN, RESCALED = "given", "rescaled"


def sinks(grad=True):
    return torch.linspace(-1.0, 2.0, HEADS).requires_grad_(grad)


def recorded(file):
    return [(one.spec.sinks, one.spec.grad_lse, one.forward, one.backward) for one in traces.read(file)]


# Recorded


@pytest.mark.usefixtures("routers")
def test_calls_with_sinks_are_recorded_apart_from_those_without(tmp_path, packed):
    file = tmp_path / "trace.jsonl"
    with attnreg.record(file):
        for _ in range(3):
            attnreg.varlen_attn(*packed(LENGTHS), sinks=sinks()).sum().backward()
        attnreg.varlen_attn(*packed(LENGTHS)).sum().backward()
    assert recorded(file) == [(True, False, 3, 3), (False, False, 1, 1)]
    assert traces.read(file)[1].spec == CALLED
    assert dataclasses.replace(CALLED, sinks=True) == traces.read(file)[0].spec


@pytest.mark.usefixtures("routers")
def test_where_no_kernel_is_given_sinks_a_call_is_recorded_as_one_without(tmp_path, packed):
    """Its results are rescaled, whichever backend runs it: here forwards, as the program gets the LSE."""
    file = tmp_path / "trace.jsonl"
    with attnreg.record(file):
        out, _ = attnreg.varlen_attn(*packed(LENGTHS), sinks=sinks(), return_aux=LSE)
        out.sum().backward()
        with torch.no_grad():
            attnreg.varlen_attn(*packed(LENGTHS, grad=False), sinks=sinks(False), return_aux=LSE)
    assert recorded(file) == [(False, False, 1, 0), (True, False, 0, 1), (False, False, 1, 0)]


def test_traces_and_tables_from_before_mean_calls_without_sinks(tmp_path):
    before = {name: value for name, value in spec_to(SINKS).items() if name != "sinks"}
    assert spec_from(before, SINKS.device) == PACKED
    table(point(PACKED, a=1.0), point(SINKS, a=2.0)).save(tmp_path / "t.json")
    old, new = load(tmp_path / "t.json").points
    assert (old.kind.extras, new.kind.extras) == ((), ("sinks",))
    assert str(new.kind) == "bfloat16, head dim 64, 1:1 heads, no mask, packed, sinks, forward"


# Measured


@pytest.fixture
def counting():
    return Counting()


@pytest.fixture
def counts(counting, fake, clock):
    """Make an entry whose kernels count sinks, and take a millisecond on the clock of the test."""

    def make(change=lambda kernels: kernels, **limits):
        kernels = change(attnreg.Kernels(counting.forward, counting.backward))
        recorder = fake("counting", load=lambda: kernels, **{"sinks": True, **limits})
        return Entry("counting", "a test", slowed(recorder, clock, 1e-3))

    return make


def measured(clock, spec, *entries):
    points = Measurement(spec, ("forward", "backward"), entries, Checks(CPU), clock, CPU, 1e9).points()
    return {one.kind.direction: one for one in points}


def test_a_backend_that_counts_sinks_is_given_them_and_the_results_of_others_are_rescaled(
    clock, counting, counts, entry
):
    found = measured(clock, SINKS, counts(), entry("other", 3.0))
    assert set(counting.seen()) == {GIVEN}
    for one in found.values():
        assert one.kind.extras == ("sinks",)
        assert one.backends["counting"].gpu_us == pytest.approx(1000)
        assert one.backends["other"].gpu_us == pytest.approx(3000)
        assert all(0 < result.error <= 1 for result in one.backends.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"max_q": 48, "tokens_q": 120},  # rows that see no key
        {"deterministic": True},
        {"sinks": False},
    ],
    ids=str,
)
def test_a_backend_that_counts_sinks_is_given_none_where_calls_are_rescaled(clock, counting, counts, changes):
    spec = dataclasses.replace(SINKS, **changes)
    found = measured(clock, spec, counts(deterministic=True))
    assert set(counting.seen()) == {RESCALED}
    assert all(one.backends["counting"].gpu_us for one in found.values())
    assert ("sinks" in found["forward"].kind.extras) is spec.gives_sinks


def test_a_backend_that_counts_sinks_in_one_direction_is_rescaled_in_the_other(clock, counting, counts, fake):
    made = counts()
    made.backend = dataclasses.replace(made.backend, backward=fake("plain").backend.backward)
    found = measured(clock, SINKS, made)
    assert set(counting.seen()) == {GIVEN, RESCALED}
    assert all(one.backends["counting"].gpu_us for one in found.values())


def dropping(kernels, most=0):
    """Have forwards of more queries than that drop sinks."""

    def forward(query, key, value, call):
        return kernels.forward(query, key, value, call._replace(sinks=None) if len(query) > most else call)

    return kernels._replace(forward=forward)


def test_kernels_that_drop_sinks_or_count_them_wrongly_are_wrong(clock, counts):
    both = measured(clock, SINKS, counts(dropping))
    assert both["forward"].backends["counting"].wrong.startswith("out of bfloat16 32 x 32: ")
    assert both["backward"].backends["counting"].wrong.startswith("its forward is: ")
    later = measured(clock, SINKS, counts(off_by(0.5, forward=False)))
    assert later["forward"].backends["counting"].gpu_us
    assert later["backward"].backends["counting"].wrong.startswith("dq of bfloat16 32 x 32: ")


@pytest.mark.slow
def test_kernels_that_drop_sinks_only_at_the_size_itself_are_wrong_there(clock, counts):
    long = dataclasses.replace(SINKS, batch=1, max_q=500, max_k=500, tokens_q=500, tokens_k=500)
    found = measured(clock, long, counts(functools.partial(dropping, most=400)))["forward"]
    assert found.backends["counting"].wrong.startswith("out of sequence 0, key head ")


def test_kernels_are_measured_with_the_softcap_of_the_call(clock, entry):
    caps = set()
    capped = dataclasses.replace(PACKED, softcap=20.0)
    watching = entry("a", change=watched(lambda *given: caps.add(given[3].softcap)))
    found = measured(clock, capped, watching)
    assert caps == {20.0}
    assert [one.backends["a"].trouble for one in found.values()] == ["", ""]
    assert found["forward"].kind.extras == ("softcap",)


def test_backwards_are_measured_with_a_gradient_of_the_lse_and_forwards_without(clock, entry, fake):
    given = {"forward": set(), "backward": set()}

    def watching(kernels):
        def forward(*arguments):
            given["forward"].add(arguments[-1].grad_lse is not None)
            return kernels.forward(*arguments)

        def backward(*arguments):
            given["backward"].add(arguments[-1].grad_lse is not None)
            return kernels.backward(*arguments)

        return kernels._replace(forward=forward, backward=backward)

    of_lse = dataclasses.replace(PACKED, grad_lse=True)
    found = measured(clock, of_lse, entry("a", change=watching), entry("b", 2.0, grad_lse=False))
    assert found["backward"].kind.extras == ("grad_lse",)
    assert found["forward"].kind == measured(clock, PACKED, entry("a"))["forward"].kind
    assert found["backward"].backends["a"].gpu_us == pytest.approx(1000)
    assert list(found["backward"].backends) == ["a"]  # the other has no way to take one


def test_a_backward_that_drops_the_gradient_of_the_lse_is_wrong(clock, entry):
    def dropping(kernels):
        def backward(*given):
            return kernels.backward(*given[:-1], given[-1]._replace(grad_lse=None))

        return kernels._replace(backward=backward)

    of_lse = dataclasses.replace(PACKED, grad_lse=True)
    found = measured(clock, of_lse, entry("a"), entry("b", change=dropping))
    assert found["forward"].backends["b"].gpu_us
    assert found["backward"].backends["b"].wrong.startswith("dq of bfloat16 32 x 32: ")


# Looked up


@pytest.fixture
def known(monkeypatch, fake):
    made = [fake(name, priority=rank).backend for name, rank in (("first", 3), ("second", 2), ("third", 1))]
    return know(monkeypatch, *made)


@pytest.fixture
def in_force(tmp_path, known):
    """Have a table of these points in force."""

    def make(*points):
        measured = environment(CALLED.device, known)
        dataclasses.replace(table(*points), environment=measured).save(tmp_path / "here.json")
        attnreg.configure({"tuned": tmp_path / "here.json"})

    return make


def both(spec, **times):
    return [point(spec, direction, **times) for direction in ("forward", "backward")]


WITH = dataclasses.replace(CALLED, sinks=True)
PLAIN = both(CALLED, first=10.0, second=20.0, third=30.0)


@pytest.mark.usefixtures("routers")
def test_what_runs_with_sinks_is_what_was_fastest_with_sinks(in_force, packed, ran):
    in_force(*PLAIN, *both(WITH, first=30.0, second=10.0, third=20.0))
    for _ in range(3):
        attnreg.varlen_attn(*packed(LENGTHS)).sum().backward()
        assert ran() == {"first": (1, 1)}
        attnreg.varlen_attn(*packed(LENGTHS), sinks=sinks()).sum().backward()
        assert ran() == {"second": (1, 1)}
    found = attnreg.explain(*packed(LENGTHS), sinks=sinks())
    assert (found.backend, found.backward.backend, found.spec.sinks) == ("second", "second", True)
    assert found.source == found.backward.source == "measured table here.json (configure(...))"
    text = found.text(verbose=True)
    assert "this very call" in text and "results are rescaled for the sinks" in text
    assert attnreg.explain(*packed(LENGTHS)).backend == "first"


@pytest.mark.usefixtures("routers")
def test_forwards_of_programs_that_get_the_lse_go_by_the_times_without_sinks(in_force, packed, ran):
    in_force(*PLAIN, *both(WITH, first=30.0, second=10.0))
    for _ in range(2):
        attnreg.varlen_attn(*packed(LENGTHS), sinks=sinks(), return_aux=LSE)[0].sum().backward()
        assert ran() == {"first": (1, 0), "second": (0, 1)}
        with torch.no_grad():
            given = packed(LENGTHS, grad=False)
            attnreg.varlen_attn(*given, sinks=sinks(False), return_aux=LSE)
            assert ran() == {"first": (1, 0)}
            assert attnreg.explain(*given, return_aux=LSE, sinks=sinks(False)).backend == "first"
    assert attnreg.explain(*packed(LENGTHS), return_aux=LSE, sinks=sinks()).backend == "first"


def test_without_points_with_sinks_those_without_decide_and_explain_says_so(in_force):
    in_force(*both(CALLED, first=30.0, second=10.0))
    found = attnreg.explain(WITH)
    assert (found.backend, found.backward.backend) == ("second", "second")
    for one in (found.forward, found.backward):
        (note,) = one.predicted.notes
        assert note.startswith("nothing of this kind was measured; these are of ")
        assert note.endswith(", without sinks")
    assert "nothing of this kind was measured" in found.text(verbose=True)
    without = attnreg.explain(CALLED)
    assert without.forward.predicted.notes == ()
    assert found.forward.predicted.candidates == without.forward.predicted.candidates


@pytest.mark.parametrize("name", ["nvidia-h200", "nvidia-h100-80gb-hbm3"])
def test_by_a_table_without_sinks_calls_have_the_host_times_of_those_without(name):
    """One that ships with attnreg, which has times of fronts: results aren't rescaled in either."""
    path = Path(attnreg.__file__).parent / "core" / "times" / "shipped" / f"{name}.json"
    kinds = tables.Named(load(path)).kinds
    spec = dataclasses.replace(
        CALLED, device=Device("cuda", (9, 0)), dtype="bfloat16", batch=2, max_q=20, max_k=20, heads_q=16,
        heads_k=4, head_dim=128, head_dim_v=128, tokens_q=40, tokens_k=40, window=(-1, 0),
        needs_backward=False,
    )  # fmt: skip
    without, found = (
        predict(kinds, dataclasses.replace(spec, sinks=given), "forward", "shipped")
        for given in (False, True)
    )
    assert found.candidates == without.candidates != ()


def test_both_directions_of_a_call_with_sinks_are_looked_up_once(in_force, monkeypatch):
    in_force(*both(CALLED, first=30.0, second=10.0))
    looked_up, real = [], tables.predict_both

    def counting(kinds, spec, *rest):
        looked_up.append(spec)
        return real(kinds, spec, *rest)

    monkeypatch.setattr(tables, "predict_both", counting)
    found = policy.current().tables
    for direction in ("backward", "forward"):
        assert found.predict(WITH, direction).candidates
    assert looked_up == [WITH]


def test_with_points_with_sinks_alone_they_decide_for_calls_without_and_explain_says_so(in_force):
    """As of a program that was recorded in training, and runs in a capture."""
    in_force(*both(WITH, first=30.0, second=10.0))
    for spec in (CALLED, dataclasses.replace(WITH, capturing=True)):
        found = attnreg.explain(spec)
        assert (found.backend, found.backward.backend) == ("second", "second")
        assert "these are of" in found.text(verbose=True) and "sinks" in found.forward.predicted.notes[0]


def test_exact_times_without_sinks_count_more_than_those_with_sinks_of_another_head_dim(in_force):
    larger = dataclasses.replace(WITH, head_dim=2 * WITH.head_dim, head_dim_v=2 * WITH.head_dim)
    in_force(*both(CALLED, first=30.0, second=10.0), *both(larger, first=10.0, second=30.0))
    assert attnreg.explain(WITH).backend == "second"


def test_directions_of_which_one_was_measured_with_sinks_are_still_ranked_by_both(in_force):
    """As a trace of a program with sinks that are frozen has them."""
    forward, _ = both(WITH, first=10.0, second=15.0)
    _, backward = both(CALLED, first=30.0, second=10.0)
    in_force(forward, backward)
    found = attnreg.explain(WITH)
    assert (found.backend, found.backward.backend) == ("second", "second")


@pytest.mark.parametrize("changes", [{"capturing": True}, {"deterministic": True}], ids=str)
def test_where_no_kernel_is_given_sinks_the_times_without_decide(in_force, changes):
    without = dataclasses.replace(CALLED, deterministic="deterministic" in changes)
    times = {"first": 10.0, "second": 20.0}
    in_force(*both(without, **times), *both(WITH, first=20.0, second=10.0))
    found = attnreg.explain(dataclasses.replace(WITH, **changes))
    assert (found.backend, found.backward.backend) == ("first", "first")
    assert found.forward.predicted.notes == ()


@pytest.mark.usefixtures("routers")
def test_by_the_adaptive_policy_calls_with_sinks_take_the_turns_of_those_without(known, packed, ran):
    attnreg.configure({"policy": "adaptive"})
    for number in range(MOST_TURNS):
        attnreg.varlen_attn(*packed(LENGTHS, grad=False), **({"sinks": sinks(False)} if number % 2 else {}))
    assert set(ran()) == {"first", "second", "third"}
    chosen = attnreg.explain(dataclasses.replace(CALLED, needs_backward=False))
    found = attnreg.explain(dataclasses.replace(WITH, needs_backward=False))
    assert found.backend == chosen.backend
    assert found.forward.predicted.points == chosen.forward.predicted.points != ()


@pytest.mark.usefixtures("routers")
def test_a_lockfile_holds_calls_with_sinks_apart_from_those_without(
    in_force, packed, ran, tmp_path, monkeypatch
):
    def run():
        for lse in ({}, {"return_aux": LSE}):
            results = attnreg.varlen_attn(*packed(LENGTHS), sinks=sinks(), **lse)
            results = results if lse else (results,)
            sum(one.sum() for one in results).backward()
        attnreg.varlen_attn(*packed(LENGTHS)).sum().backward()
        return ran()

    in_force(*PLAIN, *both(WITH, first=30.0, second=10.0, third=20.0))
    trace, lock = str(tmp_path / "trace.jsonl"), str(tmp_path / "lock.json")
    with attnreg.record(trace):
        before = run()
    assert before == {"first": (2, 2), "second": (1, 1)}
    assert invoke("lock", "--from", trace, "--out", lock).exit_code == 0
    attnreg.configure({})
    monkeypatch.setenv("ATTNREG_LOCK", lock)
    attnreg.reload()
    assert run() == before


@pytest.mark.usefixtures("routers")
@pytest.mark.parametrize("locked", [None, True], ids=["locked without", "locked with"])
def test_a_lockfile_of_calls_with_or_without_sinks_holds_for_the_others(
    in_force, packed, ran, tmp_path, monkeypatch, locked
):
    """As one from before sinks were told apart, and one of a program that got the LSE or has frozen sinks."""
    in_force(*both(CALLED, first=30.0, second=10.0, third=20.0))
    trace, lock = str(tmp_path / "trace.jsonl"), str(tmp_path / "lock.json")
    with attnreg.record(trace):
        attnreg.varlen_attn(*packed(LENGTHS), sinks=locked and sinks()).sum().backward()
    ran()
    assert invoke("lock", "--from", trace, "--out", lock).exit_code == 0
    attnreg.configure({})
    monkeypatch.setenv("ATTNREG_LOCK", lock)
    attnreg.reload()
    for given in ({}, {"sinks": sinks()}, {"sinks": sinks(False)}):
        attnreg.varlen_attn(*packed(LENGTHS), **given).sum().backward()
        assert ran() == {"second": (1, 1)}
    attnreg.varlen_attn(*packed(LENGTHS), sinks=sinks(), return_aux=LSE)[0].sum().backward()
    assert ran() == {"second": (1, 1)}


# By the commands


@pytest.fixture
def tune(tmp_path, monkeypatch, entry, counts, clock):
    """Run `attnreg tune` with a backend that counts sinks, and one that comes before it by default."""
    made = {"counting": counts(priority=1), "other": entry("other", 3.0, priority=2)}
    monkeypatch.setattr(registry, "_entries", made)
    monkeypatch.setattr("attnreg.tools.measure.timing.timer_for", lambda device: clock)
    registry.changed()
    monkeypatch.chdir(tmp_path)
    return lambda *options: invoke("tune", "--device", "cpu", "--out", "t.json", *options)


@pytest.mark.usefixtures("routers")
def test_tune_measures_a_call_with_sinks_and_its_table_then_decides(tune, tmp_path):
    result = tune("--q", "2,32,4,64", "--varlen", "--sinks")
    assert result.exit_code == 0, result.output
    assert "packed, sinks, forward" in words(result) and "packed, sinks, backward" in words(result)
    assert [one.kind.extras for one in load(tmp_path / "t.json").points] == [("sinks",)] * 2
    described = spec_with(32, varlen=True, sinks=True, needs_backward=True)
    assert attnreg.explain(described).backend == "other"
    attnreg.configure({"tuned": tmp_path / "t.json"})
    found = attnreg.explain(described)
    assert (found.backend, found.backward.backend) == ("counting", "counting")
    assert "sinks counted by the kernel" in str(found)
    shown = invoke("explain", "--q", "2,32,4,64", "--varlen", "--sinks", "--device", "cpu", "--backward")
    assert "counting forward and backward, by measured table t.json" in words(shown)


@pytest.mark.usefixtures("routers")
def test_a_recorded_run_with_sinks_is_tuned_and_the_fastest_with_sinks_runs(tune, tmp_path, packed, ran):
    with attnreg.record(tmp_path / "trace.jsonl"):
        attnreg.varlen_attn(*packed(LENGTHS), sinks=sinks()).sum().backward()
    ran()
    result = tune("--from", "trace.jsonl", "--json")
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    assert [(one["extras"], one["direction"]) for one in points] == [
        (["sinks"], "forward"),
        (["sinks"], "backward"),
    ]
    attnreg.configure({"tuned": tmp_path / "t.json"})
    attnreg.varlen_attn(*packed(LENGTHS), sinks=sinks()).sum().backward()
    assert ran() == {"counting": (1, 1)}
    attnreg.varlen_attn(*packed(LENGTHS)).sum().backward()  # nothing nearer was measured
    assert ran() == {"counting": (1, 1)}


def test_sinks_of_dense_calls_are_refused_and_need_a_call(tune):
    result = tune("--q", "2,32,4,64", "--sinks")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "attnreg: --sinks: got no --varlen, expected both: only packed calls have"
    )
    result = tune("--q", "2,32,4,64", "--varlen", "--sinks", "--deterministic")
    assert result.stderr.startswith("attnreg: --sinks: got --deterministic, expected one: no kernel is given")
    assert tune("--sinks").stderr.startswith("attnreg: --sinks: got no --q, expected the call")
