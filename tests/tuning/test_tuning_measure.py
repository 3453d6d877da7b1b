"""Promises of `attnreg tune`: right before fast, saved at every step, and never longer than asked."""

import dataclasses
import json
import re

import pytest
import torch
from support.tuned import CPU, SPEC, Clock, asked, slowed
from typer.testing import CliRunner

import attnreg
from attnreg import _registry, cli
from attnreg.backends import math as math_backend
from attnreg.cli import tuned, tunings
from attnreg.contract.discovery import Entry
from attnreg.contract.spec import Device
from attnreg.errors import ConfigError
from attnreg.selection import policy
from attnreg.torchlib import captured
from attnreg.tuning import failures, traces
from attnreg.tuning import measure as measuring
from attnreg.tuning.checks import Checks
from attnreg.tuning.failures import DeviceLostError
from attnreg.tuning.grids import coarse_to_fine, grid
from attnreg.tuning.kinds import size_of
from attnreg.tuning.measure import measured
from attnreg.tuning.points import Front
from attnreg.tuning.session import Session, kept
from attnreg.tuning.table import Environment, Table, load
from attnreg.tuning.workload import copies, lengths, small_cases, unmeasurable

SMALL = asked(32)
BOTH = dataclasses.replace(SMALL, needs_backward=True)
HERE = Environment(device="a test")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def entry(fake, clock):
    """Make an entry whose kernels take so many milliseconds on the clock of the test."""

    def make(name, milliseconds=1.0, change=None, **limits):
        backend = slowed(fake(name, **limits), clock, milliseconds / 1e3)
        if change is not None:
            kernels = backend.load()
            backend = dataclasses.replace(backend, load=lambda: change(kernels))
        return Entry(name, "a test", backend)

    return make


@pytest.fixture
def session(clock, tmp_path):
    def make(*entries, **options):
        file = tmp_path / "table.json"
        return Session(file, HERE, entries, CPU, Checks(CPU), clock, **options)

    return make


def run(spec, clock, *entries, directions=("forward", "backward"), deadline=1e9):
    return list(measured(spec, entries, directions, Checks(CPU), clock, CPU, deadline))


def off_by(amount, forward=True):
    """Make kernels wrong by so much in their forward or their backward."""

    def change(kernels):
        def wrong(kernel):
            def run(*arguments):
                first, *rest = kernel(*arguments)
                return (first + amount, *rest)

            return run

        if forward:
            return kernels._replace(forward=wrong(kernels.forward))
        return kernels._replace(backward=wrong(kernels.backward))

    return change


def raising(error, forward=True):
    def change(kernels):
        def fail(*arguments):
            raise error

        return kernels._replace(forward=fail) if forward else kernels._replace(backward=fail)

    return change


# One call


def test_each_backend_and_direction_gets_its_time(clock, entry):
    forward, backward = run(BOTH, clock, entry("fast", 1.0), entry("slow", 3.0))
    assert [point.kind.direction for point in (forward, backward)] == ["forward", "backward"]
    for point in (forward, backward):
        assert point.backends["fast"].gpu_us == pytest.approx(1000)
        assert point.backends["slow"].gpu_us == pytest.approx(3000)
        assert point.backends["slow"].first_call_s == pytest.approx(0.003)
        assert 0 < point.backends["fast"].error <= 1


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_wrong_kernel_is_marked_wrong_in_its_direction_and_not_timed(clock, entry, forward):
    found = run(BOTH, clock, entry("right"), entry("off", change=off_by(0.5, forward)))
    wrong, other = (found[0], found[1]) if forward else (found[1], found[0])
    assert wrong.backends["off"].wrong.startswith(f"{'out' if forward else 'dq'} of bfloat16 32 x 32: ")
    assert wrong.backends["off"].gpu_us is None
    assert wrong.backends["right"].gpu_us
    # A wrong forward may be wrong in its LSE, and a backward that undoes that is wrong for all others.
    told = other.backends["off"]
    assert told.wrong.startswith("its forward is: out of bfloat16") if forward else told.gpu_us


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
def test_a_kernel_that_goes_astray_only_at_the_size_itself_is_wrong_too(clock, entry, forward):
    def change(kernels):
        def wrong(kernel):
            def run(*arguments):
                first, *rest = kernel(*arguments)
                return (first * 2 if first.shape[1] > 400 else first, *rest)

            return run

        name = "forward" if forward else "backward"
        return kernels._replace(**{name: wrong(getattr(kernels, name))})

    long = dataclasses.replace(asked(500, batch=1), needs_backward=True)
    found = run(long, clock, entry("right"), entry("large", change=change))[0 if forward else 1]
    assert found.backends["large"].wrong.startswith(
        f"{'out' if forward else 'dq'} of sequence 0, key head 0: "
    )
    assert found.backends["right"].gpu_us


def test_a_kernel_that_ends_the_program_is_a_failure_like_any_other(clock, entry):
    bad = entry("bad", change=raising(SystemExit(3)))
    (found,) = run(SMALL, clock, bad, entry("good"), directions=("forward",))
    assert found.backends["bad"].failed == "SystemExit: 3"
    assert found.backends["good"].gpu_us


def test_a_backend_that_raises_is_marked_failed_and_the_others_go_on(clock, entry):
    bad = entry("bad", change=raising(RuntimeError("no kernel image\nmore"), forward=False))
    (found,) = run(BOTH, clock, bad, entry("good"), directions=("backward",))
    assert found.backends["bad"].failed == "RuntimeError: no kernel image"
    assert found.backends["good"].gpu_us


def test_a_backend_that_raises_later_is_marked_failed_too(clock, entry):
    calls = []

    def change(kernels):
        def forward(*arguments):
            calls.append(1)
            if len(calls) > 4:
                raise RuntimeError("tired")
            return kernels.forward(*arguments)

        return kernels._replace(forward=forward)

    (found,) = run(SMALL, clock, entry("bad", change=change), entry("good"), directions=("forward",))
    assert found.backends["bad"].failed == "RuntimeError: tired"
    assert found.backends["good"].gpu_us == pytest.approx(1000)


def test_what_a_backend_refuses_is_not_measured_on_it(clock, entry):
    (found,) = run(SMALL, clock, entry("a"), entry("b", dtypes=("float64",)), directions=("forward",))
    assert list(found.backends) == ["a"]


def test_backends_take_turns_and_a_hopeless_one_is_timed_once(clock, entry):
    order = []

    def noting(name):
        def change(kernels):
            def forward(*arguments):
                order.append(name)
                return kernels.forward(*arguments)

            return kernels._replace(forward=forward)

        return change

    entries = [entry(name, ms, change=noting(name)) for name, ms in (("a", 2.0), ("b", 2.0), ("c", 60.0))]
    (found,) = run(SMALL, clock, *entries, directions=("forward",))
    assert order.count("c") == 4  # to be checked, first, once to settle, as it takes long, and once more
    rounds = "".join(order[-2 * measuring.ROUNDS :])
    assert set(rounds) == {"a", "b"}
    assert "aaa" not in rounds
    assert "bbb" not in rounds
    assert found.backends["c"].gpu_us == pytest.approx(60_000)


def test_what_a_second_call_takes_is_not_taken_for_what_calls_take(clock, entry):
    """FA4 watches it, to do the third faster."""
    calls = []

    def change(kernels):
        def forward(*arguments):
            if arguments[0].shape[1] == SMALL.max_q and len(calls) < 3:  # checked, first, second
                clock.seconds += 0.1
            calls.append(1)
            return kernels.forward(*arguments)

        return kernels._replace(forward=forward)

    (found,) = run(SMALL, clock, entry("a", 1.0), entry("b", 1.0, change=change), directions=("forward",))
    assert len(calls) > measuring.ROUNDS
    assert found.backends["b"].gpu_us == pytest.approx(1000)


def test_past_the_deadline_a_call_gets_as_few_rounds_as_will_do(clock, entry):
    def calls(deadline):
        started = clock.seconds
        run(SMALL, clock, entry("a", 5.0), directions=("forward",), deadline=deadline)
        return round((clock.seconds - started) * 200)

    assert calls(1e9) - calls(clock.seconds) == measuring.ROUNDS - 1


def test_a_gpu_that_is_lost_stops_everything(monkeypatch):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLostError, match="the GPU can't be used any more after RuntimeError: boom"):
        failures.failed(RuntimeError("boom"), torch.device("cuda"))


# The inputs and the clock


def test_inputs_are_as_the_spec_says_and_more_than_the_cache_holds():
    spec = asked(varlen=True, batch=3, max_q=64, max_k=96, tokens_q=120, tokens_k=200, heads_k=2)
    found = copies(spec, CPU)
    assert 1 < len(found) <= 16
    q, k, v, grad, call = found[1]
    assert (q.shape, k.shape, v.shape, grad.shape) == ((120, 4, 64), (200, 2, 64), (200, 2, 64), (120, 4, 64))
    assert (call.cu_seqlens_q[-1], call.cu_seqlens_k[-1]) == (120, 200)
    assert (call.cu_seqlens_q.diff().max(), call.cu_seqlens_k.diff().max()) == (64, 96)
    assert not torch.equal(found[0].q, q)


@pytest.mark.parametrize(
    ("batch", "tokens", "longest"),
    [(1, 7, 7), (8, 8 * 64, 64), (8, 300, 64), (5, 64, 64), (3, 70, 64), (4, 9, 4), (3, 40, 64)],
)
def test_lengths_are_ragged_and_fill_the_tokens(batch, tokens, longest):
    found = lengths(batch, tokens, longest)
    assert len(found) == batch
    assert (max(found), min(found) >= 0, sum(found)) == (min(longest, tokens), True, tokens)


def test_a_small_case_is_of_the_kind_of_its_spec():
    spec = asked(max_q=1, max_k=32768, heads_q=32, heads_k=8)
    case = small_cases(spec)[0]
    assert (case.max_q, case.max_k, case.heads, case.dims) == (1, 192, (8, 2), (64, 64))
    assert len(set(small_cases(asked(4096, varlen=True))[0].lens_q)) == 3


@pytest.mark.parametrize(
    "changes", [{"dropout": 0.1}, {"bias": True}, {"page_size": 16}, {"batch": 0}], ids=str
)
def test_what_no_tensors_can_be_made_for_says_so(changes):
    assert unmeasurable(asked(**changes))
    assert not unmeasurable(SPEC)


# The grids


@pytest.mark.parametrize("device", [Device("cpu"), Device("cuda", (9, 0), 0, "X")], ids=str)
def test_the_quick_grid_is_small_and_the_full_one_has_more_of_everything(device):
    quick, full = grid("quick", device), grid("full", device)
    assert len(quick) <= 60 < len(full)
    assert {spec.varlen for spec in quick} == {True, False} == {spec.causal for spec in quick}
    assert len(set(full)) == len(full)


def test_the_grids_of_a_gpu_cover_what_models_ask():
    quick, full = (grid(name, Device("cuda", (9, 0))) for name in ("quick", "full"))
    assert {spec.head_dim for spec in quick} == {64, 128}
    assert {spec.head_dim for spec in full} == {32, 64, 96, 128, 192, 256}
    assert {spec.heads_q // spec.heads_k for spec in full} == {1, 4, 8}
    assert {spec.max_q for spec in full} >= {1, 16, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
    assert max(spec.max_k for spec in full) == 32768
    assert {spec.dtype for spec in full} == {"bfloat16"}


def test_the_coarse_comes_first_and_every_kind_has_its_turn():
    assert list(coarse_to_fine([[1, 2, 3, 4, 5], ["a", "b"], []])) == [3, "b", 1, "a", 5, 2, 4]
    first = grid("full", Device("cuda", (9, 0)))[:20]
    assert {spec.varlen for spec in first} == {True, False}
    assert {spec.head_dim for spec in first} == {64, 128}
    assert min(spec.max_k for spec in first) >= 1024


# A session


def test_a_session_saves_after_every_call_and_has_nothing_left(session, entry):
    made = session(entry("a", 1.0), entry("b", 2.0))
    specs = [asked(16), dataclasses.replace(asked(32), needs_backward=True)]
    sizes = [len(load(made.out).points) for _ in made.run(specs, 1e9)]
    assert sizes == [1, 3]
    assert not any(made.todo(spec) for spec in specs)


def test_what_a_table_has_is_not_measured_again_but_a_new_backend_is(session, entry):
    made = session(entry("a"))
    list(made.run([BOTH], 1e9))
    known = {point.place: point for point in kept(made.out, HERE).points}
    again = session(entry("a"), points=dict(known))
    assert again.todo(BOTH) == ()
    assert (list(again.run([BOTH], 1e9)), again.fresh) == ([BOTH], [])
    more = session(entry("a"), entry("b"), points=known)
    assert more.todo(BOTH) == ("forward", "backward")


def test_what_failed_is_tried_once_more_by_every_run(session, entry):
    bad = entry("tired", change=raising(RuntimeError("out of memory")))
    made = session(bad, entry("a"))
    list(made.run([SMALL], 1e9))
    assert made.todo(SMALL) == ()  # it had its turn
    (point,) = kept(made.out, HERE).points
    assert point.backends["tired"].failed
    again = session(entry("tired", 2.0), entry("a"), points={point.place: point})
    assert again.todo(SMALL) == ("forward",)
    list(again.run([SMALL], 1e9))
    (found,) = kept(made.out, HERE).points
    assert found.backends["tired"].gpu_us == pytest.approx(2000.0)


def test_what_another_backend_took_stays_when_one_is_measured_later(session, entry):
    made = session(entry("a", 1.0))
    list(made.run([SMALL], 1e9))
    more = session(entry("b", 2.0), points=dict(made.points))
    list(more.run([SMALL], 1e9))
    (found,) = kept(made.out, HERE).points
    assert {name: one.gpu_us for name, one in found.backends.items()} == pytest.approx(
        {"a": 1000.0, "b": 2000.0}
    )


def test_a_forward_that_goes_astray_at_the_size_spoils_no_other_backends_backward(clock, entry):
    def change(kernels):
        def forward(*arguments):
            out, lse = kernels.forward(*arguments)
            return (out * float("nan") if out.shape[1] > 400 else out), lse

        return kernels._replace(forward=forward)

    long = dataclasses.replace(asked(500, batch=1), needs_backward=True)
    _, found = run(long, clock, entry("bad", change=change), entry("good"))
    assert found.backends["good"].gpu_us


def test_what_fronts_take_is_saved_with_the_points_and_measured_anew_for_a_new_backend_only(session, entry):
    made = session(entry("a"))
    made.add_fronts([Front("a", True, "forward", 20.0)])
    list(made.run([BOTH], 1e9))
    made.add_fronts([Front("b", True, "forward", 30.0), Front("a", True, "forward", 21.0)])
    found = kept(made.out, HERE)
    assert len(found.points) == 2
    assert found.fronts == (Front("a", True, "forward", 21.0), Front("b", True, "forward", 30.0))


def test_a_table_of_another_environment_is_not_continued(session, entry):
    made = session(entry("a"))
    made.save()
    with pytest.raises(ConfigError, match=r"measured with device a test, here it is another: .* --fresh"):
        kept(made.out, Environment(device="another"))
    assert kept(made.out.with_name("none.json"), HERE) == Table(HERE, (), "none.json")


def test_a_budget_stops_before_it_is_spent(session, entry, clock):
    made = session(entry("a", 10.0))
    specs = [asked(n) for n in range(16, 80, 4)]
    done = list(made.run(specs, 0.5))
    assert 0 < len(done) < len(specs)
    assert clock.seconds <= 0.5
    assert list(session(entry("a")).run(specs, 0.0)) == []


def test_a_budget_stops_between_backends_and_keeps_no_half_point(session, entry, clock):
    made = session(*(entry(name, 400.0) for name in "abcdefgh"))
    assert list(made.run([SMALL, asked(48)], 3.0)) == []
    assert clock.seconds < 5.0
    assert (made.fresh, made.points) == ([], {})


def test_a_call_that_nobody_can_run_is_skipped_with_what_speaks_against_each(session, entry):
    made = session(entry("a", dtypes=("float32",)), entry("b", dtypes=("float16",)))
    assert list(made.run([SMALL], 1e9)) == [SMALL]
    ((spec, told),) = made.skipped
    assert spec == SMALL
    assert told == "a: dtype must be float32, got bfloat16; b: dtype must be float16, got bfloat16"


def test_what_cannot_be_measured_is_skipped_with_the_reason(session, entry, monkeypatch):
    made = session(entry("a"))
    list(made.run([asked(16, dropout=0.5)], 1e9))
    assert made.skipped[0][1] == "dropout can't be measured: the default order decides"

    def full(*arguments):
        raise torch.cuda.OutOfMemoryError("no 80 GiB")

    monkeypatch.setattr(measuring, "copies", full)
    list(made.run([asked(16)], 1e9))
    assert made.skipped[1][1] == "its inputs need more memory than there is: no 80 GiB"


def test_what_a_cpu_has_no_memory_for_is_skipped_and_the_rest_measured(session, entry, monkeypatch):
    made, real = session(entry("a")), measuring.copies

    def full(spec, *arguments, **options):
        if spec.max_q == 16:
            torch.empty(2**60)
        return real(spec, *arguments, **options)

    monkeypatch.setattr(measuring, "copies", full)
    assert list(made.run([asked(16), SMALL], 1e9)) == [asked(16), SMALL]
    ((spec, told),) = made.skipped
    assert spec == asked(16)
    assert re.match("its inputs need more memory than there is: .*can't allocate memory", told)
    assert [point.size for point in made.fresh] == [size_of(SMALL)]


def test_an_error_of_its_own_ends_a_run(session, entry, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(measuring, "copies", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        list(session(entry("a")).run([SMALL], 1e9))


# The command


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Run `attnreg tune` on the CPU with a table in the test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*options, out="table.json"):
        place = ["--out", out] if out else []
        result = CliRunner().invoke(cli.app, ["tune", "--device", "cpu", *place, *options], obj=[])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def backends(monkeypatch, entry, clock):
    """Know a slow, a fast and a wrong backend, on the clock of the test."""
    made = {
        "slow": entry("slow", 3.0, priority=9),
        "fast": entry("fast", 1.0, priority=5),
        "off": entry("off", 0.1, change=off_by(0.5)),
        "math": Entry("math", "a test", math_backend.BACKEND),
    }
    monkeypatch.setattr(_registry, "_entries", made)
    monkeypatch.setattr(tunings, "timer_for", lambda device: clock)
    _registry.changed()
    return made


SHAPE = ("--q", "2,32,4,64")


@pytest.mark.parametrize("variable", ["ATTNREG_CONFIG", "ATTNREG_LOCK"])
def test_tune_makes_the_table_that_settings_name_already(tune, backends, monkeypatch, tmp_path, variable):
    (tmp_path / "settings.toml").write_text('tuned = "table.json"\ndisabled = ["fast"]\n')
    (tmp_path / "lock.json").write_text("no lock")
    monkeypatch.setenv(variable, {"ATTNREG_CONFIG": "settings.toml", "ATTNREG_LOCK": "lock.json"}[variable])
    monkeypatch.setattr(policy, "_sources", None)
    assert tune(*SHAPE).exit_code == 0
    (point, *_) = json.loads((tmp_path / "table.json").read_text())["points"]
    measured = {"slow", "off", "math", *(["fast"] if variable == "ATTNREG_LOCK" else [])}
    assert point["backends"].keys() == measured  # what is disabled isn't run, whatever else is wrong


def test_tune_takes_no_backend_from_settings_that_nobody_has(tune, backends, monkeypatch, tmp_path):
    (tmp_path / "settings.toml").write_text('disabled = ["fats"]\n')
    monkeypatch.setenv("ATTNREG_CONFIG", "settings.toml")
    monkeypatch.setattr(policy, "_sources", None)
    result = tune(*SHAPE)
    assert result.exit_code == 2
    assert "got 'fats', expected one of" in result.stderr
    assert "did you mean 'fast'?" in result.stderr


def test_tune_asks_what_fronts_take_of_those_backends_only_of_which_the_table_does_not_say(
    session, entry, monkeypatch, python_routers
):
    asked_of = []

    def host_costs(device, names):
        asked_of.append((device.type, names))
        return [Front(name, False, "forward", 9.0) for name in names]

    monkeypatch.setattr("attnreg.bench.fronts.host_costs", host_costs)
    made = session(entry("a"), entry("b"))
    tunings.measure_fronts(made)  # a CPU has no host beside it
    made.device = torch.device("cuda")
    made.fronts = (Front("a", False, "forward", 8.0),)
    tunings.measure_fronts(made)
    tunings.measure_fronts(made)
    assert asked_of == [("cuda", ["b"])]
    assert [one.backend for one in made.fronts] == ["a", "b"]
    made.fronts += (Front("a", False, "backward", 30.0),)
    made.fronts += (Front("a", False, "backward", 29.0, compiled=True),)
    assert tuned._host(made.fronts) == [
        ("a", "SDPA", "Python", "8.0", "30.0"),
        ("b", "SDPA", "Python", "9.0", "-"),
        ("a", "SDPA", "compiled", "-", "29.0"),
    ]


def test_where_routers_are_compiled_tune_asks_again_of_what_was_measured_without(
    session, entry, monkeypatch, routers
):
    asked_of = []
    monkeypatch.setattr("attnreg.bench.fronts.host_costs", lambda device, names: asked_of.append(names) or [])
    monkeypatch.setattr(captured, "compiled", True)
    made = session(entry("a"), entry("b"))
    made.device = torch.device("cuda")
    made.fronts = (Front("a", False, "forward", 8.0), Front("b", False, "forward", 8.0, compiled=True))
    tunings.measure_fronts(made)
    assert asked_of == [["a"]]


def test_tune_on_a_cpu_makes_a_table_that_then_decides(tune, backends, tmp_path, routers):
    result = tune(*SHAPE, "--backend", "slow,fast,off")
    assert result.exit_code == 0, result.output
    assert len(load(tmp_path / "table.json").points) == 2
    spec = dataclasses.replace(asked(32), needs_backward=True)
    assert attnreg.explain(spec).backend == "slow"
    attnreg.configure({"tuned": tmp_path / "table.json"})
    found = attnreg.explain(spec)
    assert (found.backend, found.backward.backend) == ("fast", "fast")
    assert found.forward.predicted.of("off").trouble.startswith("wrong: out of bfloat16 32 x 32")


def test_tune_measures_with_the_real_backends_and_the_real_clock(tune, tmp_path):
    result = tune("--q", "1,16,2,32", "--dtype", "fp32", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["end"], data["measured"], data["left"], data["table_points"]) == ("finished", 2, 0, 2)
    assert set(data["points"][0]["backends"]) == {"cpu", "math"}
    assert all(one["gpu_us"] > 0 for point in data["points"] for one in point["backends"].values())


def test_tune_prints_times_troubles_and_where_the_table_is(tune, backends):
    result = tune(*SHAPE, "--backend", "slow,fast,off")
    text = " ".join(result.output.split())
    assert "bfloat16, head dim 64, 1:1 heads, no mask, dense, forward" in text
    assert "B 2, 32 x 32, H 4 3000.0 µs 1000.0 µs wrong fast" in text
    assert "Never chosen for these" in text
    assert "measured 2 points; 0 of 1 calls are left" in text
    assert max(map(len, result.output.splitlines())) <= 80


def test_tune_goes_on_where_it_ended_and_begins_anew_with_fresh(tune, backends):
    def measured(*options):
        return json.loads(tune(*options, "--backend", "slow", "--json").stdout)

    assert measured(*SHAPE)["measured"] == 2
    more = measured(*SHAPE, "--q", "2,16,4,64")
    assert (more["measured"], more["table_points"]) == (2, 4)
    again = measured(*SHAPE, "--fresh")
    assert (again["measured"], again["table_points"]) == (2, 2)


def test_tune_leaves_the_old_table_until_it_has_something_new(tune, backends, entry, tmp_path):
    assert tune(*SHAPE, "--backend", "fast").exit_code == 0
    before = (tmp_path / "table.json").read_bytes()
    backends["slow"] = entry("slow", change=raising(KeyboardInterrupt()))
    assert tune(*SHAPE, "--backend", "slow", "--fresh").exit_code == 130
    assert (tmp_path / "table.json").read_bytes() == before


def test_tune_takes_a_recorded_workload_that_is_measured_by_what_it_costs(tune, backends, tmp_path):
    file = tmp_path / "trace.jsonl"
    counts = {(asked(16), "forward"): 1, (asked(48), "forward"): 900, (asked(48), "backward"): 900}
    traces.merge(file, counts)
    data = json.loads(tune("--from", str(file), "--backend", "slow", "--json").stdout)
    assert [(point["max_q"], point["direction"]) for point in data["points"]] == [
        (48, "forward"),
        (48, "backward"),
        (16, "forward"),
    ]


def test_tune_stops_in_time_and_says_what_is_left(tune, backends, clock):
    result = tune("--grid", "quick", "--budget", "0.4s", "--backend", "slow", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["end"]) == (0, "budget spent")
    assert 0 < data["left"] < data["calls"]
    assert clock.seconds <= 0.4


def test_tune_keeps_what_it_has_when_it_is_interrupted(tune, backends, entry, tmp_path):
    done = []

    def change(kernels):
        def forward(*arguments):
            done.append(arguments[0].shape)
            if len(done) > 3 and arguments[0].shape[1] == 16:
                raise KeyboardInterrupt
            return kernels.forward(*arguments)

        return kernels._replace(forward=forward)

    backends["slow"] = entry("slow", 3.0, change=change)
    result = tune(*SHAPE, "--q", "2,16,4,64", "--no-backward", "--backend", "slow", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["end"], data["left"]) == (130, "interrupted", 1)
    assert [point.size.max_q for point in load(tmp_path / "table.json").points] == [32]


def test_tune_stops_with_1_when_the_gpu_is_lost(tune, backends, monkeypatch):
    def lost(*arguments):
        raise DeviceLostError("the GPU can't be used any more after X")

    monkeypatch.setattr("attnreg.tuning.session.measured", lost)
    result = tune(*SHAPE)
    assert result.exit_code == 1
    assert "attnreg: the GPU can't be used any more after X; what was measured before is in" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--grid quik", "--grid: got 'quik', expected quick or full; did you mean 'quick'?"),
        ("--budget soon", "--budget: got 'soon', expected a time: 60s, 5m or 1h"),
        ("--budget 0s", "--budget: got '0s'"),
        ("--q 2,64", "--q: got '2,64', expected whole numbers"),
        ("--from none.jsonl", "none.jsonl: can't be read: No such file"),
        (
            "--grid quick --dtype fp16 --causal",
            "--dtype and --causal: describes a call of --q, and there is none",
        ),
        ("--window 16,0", "--window: describes a call of --q, and there is none"),
        ("--out no/such/folder.json", "--out: "),
        ("--backend maht", "no backend is named 'maht'"),
    ],
)
def test_tune_refuses_a_bad_value_before_it_measures_anything(tune, backends, options, message):
    result = tune(*options.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"attnreg: {message}")


def test_tune_refuses_a_file_that_is_no_table_and_an_empty_trace(tune, backends, tmp_path):
    (tmp_path / "table.json").write_text('{"precious": 1}')
    assert tune(*SHAPE).exit_code == 2
    assert (tmp_path / "table.json").read_text() == '{"precious": 1}'
    (tmp_path / "empty.jsonl").write_text("")
    assert (
        "expected a file with at least one recorded call" in tune("--from", "empty.jsonl", "--fresh").stderr
    )


def test_tune_writes_over_nothing_that_is_no_table_and_over_no_trace(tune, backends, tmp_path):
    (tmp_path / "table.json").write_text('{"precious": 1}')
    assert tune(*SHAPE, "--fresh").exit_code == 2
    (tmp_path / "trace.jsonl").write_text("")
    result = tune("--from", "trace.jsonl", "--fresh", out="trace.jsonl")
    assert result.exit_code == 2
    assert "--out: got trace.jsonl, expected another file than that of --from" in result.stderr
    assert (tmp_path / "table.json").read_text() == '{"precious": 1}'


def test_tune_measures_no_call_of_another_device_as_its_own(tune, backends, tmp_path, caplog):
    gpu = dataclasses.replace(SMALL, device=Device("cuda", (9, 0)))
    traces.merge(tmp_path / "trace.jsonl", {(gpu, "forward"): 3})
    result = tune("--from", "trace.jsonl")
    assert result.exit_code == 2
    assert "--from: got calls on cuda, expected some on cpu, which --device sets" in result.stderr
    traces.merge(tmp_path / "trace.jsonl", {(SMALL, "forward"): 1})
    result = tune("--from", "trace.jsonl", "--backend", "slow", "--json")
    assert json.loads(result.stdout)["calls"] == 1
    assert "--from: 1 calls on cuda are left out: this is cpu" in caplog.text


def test_tune_that_has_no_time_says_so(tune, backends):
    result = tune(*SHAPE, "--backend", "slow,fast", "--budget", "0.001s")
    assert result.exit_code == 1
    assert "the time was spent before a single call was measured: give it more" in result.stderr


def test_a_table_knows_the_versions_of_what_was_measured_alone(tune, backends, tmp_path):
    assert tune(*SHAPE, "--backend", "slow").exit_code == 0
    assert set(load(tmp_path / "table.json").environment.backends) == {"slow"}


def test_tune_is_1_when_a_backend_that_was_named_cannot_be_measured(tune, backends):
    backends["gone"] = Entry("gone", "a test", cause=ImportError("no"))
    result = tune(*SHAPE, "--backend", "gone")
    assert result.exit_code == 1
    assert "--backend: gone failed to load: ImportError: no" in result.stderr


def test_the_table_is_named_after_the_device_unless_it_is_given_a_name(tune, backends, tmp_path):
    assert tune(*SHAPE, "--backend", "slow", out="").exit_code == 0
    assert len(list(tmp_path.glob("*.json"))) == 1
