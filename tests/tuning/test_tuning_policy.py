"""Promises of `policy = "measured"`: a table decides where nothing is preferred, and is the source."""

import dataclasses
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support.command_line import invoke, words
from support.known import know
from support.tuned import point, spec_with, table, took

import attnreg
from attnreg.backends import math as math_backend
from attnreg.core import registry
from attnreg.core.contract.lengths import Lengths
from attnreg.core.contract.spec import Device
from attnreg.core.dispatch import calls, planning, timed
from attnreg.core.dispatch.planning import Native
from attnreg.core.dispatch.state import FEW_SHAPES, Detail, state
from attnreg.core.dispatch.steps import Steps
from attnreg.core.policy import current as policy
from attnreg.core.registry.entry import Entry
from attnreg.core.times import tables
from attnreg.core.times.environments import environment
from attnreg.core.times.lookup import predict_both
from attnreg.core.times.points import Measured
from attnreg.core.times.tables import file_name
from attnreg.core.times.turns import MOST_CALLS
from attnreg.errors import ConfigError
from attnreg.tools.tuning.workload import unmeasurable

CPU = Device("cpu")
GPU = Device("cuda", (9, 0), 0, "NVIDIA Test 9000")


@pytest.fixture(autouse=True)
def known(monkeypatch, fake):
    """Know three fakes, the first preferred, and math."""
    ranks = (("first", 3), ("second", 2), ("third", 1))
    made = [fake(name, priority=rank, devices=("cpu", "cuda")).backend for name, rank in ranks]
    return know(monkeypatch, *made, math_backend.BACKEND)


@pytest.fixture
def here(tmp_path, known):
    """Save a table of this machine and return the settings file that names it."""

    def make(*points, device=CPU, changes=None, settings="", name="here", file="attnreg.toml", **times):
        spec = dataclasses.replace(spec_with(), device=device)
        found = points or (point(spec, **times), point(spec, "backward", **times))
        measured = dataclasses.replace(environment(device, known), **(changes or {}))
        dataclasses.replace(table(*found), environment=measured).save(tmp_path / f"{name}.json")
        (tmp_path / file).write_text(f'tuned = "{name}.json"\n{settings}')
        return tmp_path / file

    return make


@pytest.fixture
def other(here, monkeypatch):
    """Have the environment name another table in `other.toml`, a stronger one."""

    def make(**options):
        monkeypatch.setenv("ATTNREG_CONFIG", str(here(name="other", file="other.toml", **options)))
        attnreg.reload()

    return make


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Take this folder for that of the tables that ship with attnreg."""
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    yield tmp_path
    tables._read.cache_clear()


def decided(**changes):
    found = attnreg.explain(spec_with(**changes))
    return found.backend, found.source


TABLE = "measured table here.json (attnreg.toml:1)"

# Who is stronger


def test_what_really_runs_is_what_the_table_says_of_each_direction(here, routers, ran):
    spec = spec_with()
    attnreg.configure(
        here(
            point(spec, cpu=90.0, first=30.0, second=10.0),  # "cpu" is torch's own kernel here
            point(spec, "backward", cpu=90.0, first=10.0, third=5.0),
        )
    )
    query = torch.randn(2, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(query, query, query).sum().backward()
    assert ran() == {"second": (1, 0), "third": (0, 1)}


def test_a_backward_with_a_gradient_of_the_lse_is_priced_as_one_of_eight_more_columns(here, routers):
    wide = spec_with(head_dim=72, head_dim_v=72)
    attnreg.configure(
        here(
            point(spec_with(), "backward", first=10.0, second=20.0, third=30.0),
            point(wide, "backward", first=40.0, second=35.0, third=30.0),
        )
    )
    usual = attnreg.explain(spec_with(needs_backward=True)).backward
    assert (usual.backend, usual.source) == ("first", TABLE)
    found = attnreg.explain(spec_with(needs_backward=True, grad_lse=True)).backward
    assert (found.backend, found.source) == ("third", TABLE)
    assert found.predicted.of("second").gpu_us == 35.0


def test_where_backwards_with_a_gradient_of_the_lse_were_measured_they_decide(here, routers):
    of_lse = spec_with(grad_lse=True, needs_backward=True)
    wide = spec_with(head_dim=72, head_dim_v=72)
    times = {"first": 40.0, "second": 35.0, "third": 30.0}
    attnreg.configure(
        here(point(wide, "backward", **times), point(of_lse, "backward", first=8.0, second=7.0))
    )
    found = attnreg.explain(of_lse).backward
    assert (found.backend, found.predicted.of("second").gpu_us) == ("second", 7.0)
    assert found.predicted.points[0].itself
    assert unmeasurable(of_lse) == ""


def test_every_preference_is_stronger_than_a_table(here, routers, monkeypatch):
    times = {"first": 30.0, "second": 10.0, "third": 20.0}
    assert decided() == ("first", "default order for cpu")
    attnreg.configure(here(**times))
    assert decided() == ("second", TABLE)
    attnreg.configure(here(**times, settings='[devices.cpu]\norder = ["third"]\n'))
    assert decided() == ("third", "attnreg.toml:3")
    with attnreg.register_backend("first"):
        assert decided() == ("first", "register_backend('first')")
        monkeypatch.setenv("ATTNREG_BACKEND", "math")
        attnreg.reload()
        assert decided() == ("math", "ATTNREG_BACKEND")
        with attnreg.use_backend("third"):
            assert decided()[0] == "third"


def test_a_table_decides_what_preferred_backends_cannot_run(here, routers, known, fake):
    known["picky"] = Entry("picky", "a test", fake("picky", dtypes=("float64",)).backend)
    attnreg.configure(here(first=30.0, second=10.0, settings='[devices.cpu]\norder = ["picky"]\n'))
    assert decided() == ("second", TABLE)


def test_a_wrong_backend_is_not_chosen_unless_it_is_preferred(here, routers):
    attnreg.configure(here(first=Measured(wrong="out is off"), second=50.0))
    assert decided() == ("second", TABLE)
    with attnreg.use_backend("first"):
        assert decided()[0] == "first"


def test_policy_order_leaves_the_table_out_wherever_it_is_said(here, routers, monkeypatch):
    attnreg.configure(here(first=30.0, second=10.0, settings='policy = "order"\n'))
    assert decided() == ("first", "default order for cpu")
    monkeypatch.setenv("ATTNREG_POLICY", "Measured")
    attnreg.reload()
    assert decided() == ("second", TABLE)
    monkeypatch.setenv("ATTNREG_POLICY", "order")
    attnreg.reload()
    assert decided()[0] == "first"


@pytest.mark.parametrize(("second", "backend"), [(10.0, "second"), (11.9, "third")])
def test_torchs_own_kernel_is_measured_under_the_name_of_its_backend(here, known, routers, second, backend):
    attnreg.configure(here(first=30.0, second=second, third=12.0))
    entries = planning.entries_with_native(Native("third"), known)
    decision = planning.decide(spec_with(), "forward", entries, state().policy, "third")
    assert (decision.backend, decision.source) == (backend, TABLE)


@pytest.fixture
def building(known, monkeypatch):
    """Know a backend, the first, that builds something for each new shape, and the second and math."""
    first = dataclasses.replace(known["first"].backend, builds=lambda spec: True)
    know(monkeypatch, first, *(known[name].backend for name in ("second", "math")))


@pytest.fixture
def decided_in_full(monkeypatch):
    """Return the longest queries of the calls that are decided in full, as they come."""
    longest, make_plan = [], calls.make_plan
    monkeypatch.setattr(
        calls, "make_plan", lambda *given: longest.append(given[3].max_q) or make_plan(*given)
    )
    return longest


@pytest.fixture
def lengths_decided(building, decided_in_full):
    """The same, where the first backend builds something for each new shape."""
    return decided_in_full


def call(length, mask=None):
    tensors = (torch.randn(1, 4, length, 64).bfloat16() for _ in "qkv")
    F.scaled_dot_product_attention(*tensors, attn_mask=mask)


@pytest.mark.parametrize("masked", [False, True])
def test_calls_of_ever_new_shapes_leave_a_backend_that_builds_something_for_each(
    here, building, routers, ran, masked
):
    """Calls with a mask, too: times without a mask stand in for theirs."""
    # "cpu" is torch's own kernel here.
    attnreg.configure(here(cpu=90.0, first=took(10.0, 0.0, 0.05), second=took(40.0)))

    def call_as_asked(length):
        call(length, torch.ones(length, length, dtype=torch.bool) if masked else None)

    for length in range(230, 230 + FEW_SHAPES):
        call_as_asked(length)
    assert ran() == {"first": (FEW_SHAPES, 0)}
    for length in range(250 - FEW_SHAPES, 250):
        call_as_asked(length)
    ran()  # some of these are still among the few
    for length in (250, 255, 256):
        call_as_asked(length)
    assert ran() == {"second": (3, 0)}


def test_which_lengths_a_class_looks_at_is_found_out_at_its_first_shape(
    here, building, routers, ran, monkeypatch
):
    watched, unnamed_reads = [], Entry.unnamed_reads

    def watching(entry, spec, *rest, **options):
        watched.append(spec.max_q)
        return unnamed_reads(entry, spec, *rest, **options)

    monkeypatch.setattr(Entry, "unnamed_reads", watching)
    attnreg.configure(here(cpu=90.0, first=took(10.0, 0.0, 0.05), second=took(40.0)))
    for length in (230, 231, 232):
        call(length)
    assert ran() == {"first": (3, 0)}
    assert set(watched) == {230}


@pytest.mark.parametrize("builds", [False, True])
def test_which_lengths_a_class_looks_at_is_found_out_again_once_another_backend_has_loaded(
    here, known, fake, python_routers, monkeypatch, builds
):
    """Torch's own kernel is replaced for odd lengths alone, by a backend that names no cuts."""
    recorder = fake("cpu", priority=0, devices=("cpu",))
    kernels = attnreg.Kernels(
        recorder.forward, recorder.backward, replaces_native=lambda direction, spec: spec.max_q % 2 == 1
    )
    first = dataclasses.replace(known["first"].backend, builds=(lambda spec: True) if builds else None)
    cpu = dataclasses.replace(recorder.backend, load=lambda: kernels)
    know(monkeypatch, first, cpu, known["math"].backend)
    sizes = {128: (10.0, 40.0), 1024: (900.0, 200.0)}
    attnreg.configure(here(*crossing(sizes, "first", "cpu")))
    call(200)  # by the first
    for length in range(901, 931):
        call(length)
    (kind,) = state().kinds.values()
    natives = {
        length: plan.is_native
        for length in range(915, 931)
        if (plan := kind.plans.get(kind.key(Lengths(1, length, length, length, length)))) is not None
    }
    assert natives == {length: length % 2 == 0 for length in range(915, 931)}


@pytest.mark.parametrize("longer", [0, 700], ids=["all built for", "every second one on another backend"])
def test_of_ever_new_shapes_a_few_are_decided_one_by_one(here, lengths_decided, routers, ran, longer):
    """Each that is built for is decided in full. Of others, and of steps later, the times are looked up."""
    sizes = {128: (took(10.0, 0.0, 0.05), took(40.0)), 1024: (took(900.0, 0.0, 0.05), took(200.0))}
    points = [
        point(spec_with(max_q=length, max_k=length), cpu=990.0, first=first, second=second)
        for length, (first, second) in sizes.items()
    ]
    attnreg.configure(here(*points))
    for length in range(200, 200 + FEW_SHAPES):
        call(length + longer * (length % 2))
    assert lengths_decided == ([200, 901, 202, 204, 206] if longer else [*range(200, 200 + FEW_SHAPES)])
    assert ran() == ({"first": (4, 0), "second": (4, 0)} if longer else {"first": (FEW_SHAPES, 0)})
    lengths_decided.clear()
    for length in range(210, 240):
        call(length + longer * (length % 2))
    assert ran() == {"second": (30, 0)}
    call(300)
    assert ran() == {"second": (1, 0)}
    assert lengths_decided == [210]


@pytest.mark.parametrize("lengths", [(16, 17), (17, 16)], ids=str)
def test_lengths_that_a_table_covers_are_decided_by_it_whatever_lengths_came_first(here, ran, lengths):
    """Times of many queries say nothing of packed calls of few, so the default order decides about these."""
    attnreg.configure(here(point(spec_with(varlen=True), first=90.0, second=10.0)))
    for length in lengths:
        x = torch.randn(2 * length, 4, 64, dtype=torch.bfloat16)
        ends = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        for _ in range(3):
            attnreg.varlen_attn(x, x, x, ends, ends, length, length)
        assert ran() == {"first" if length == 16 else "second": (3, 0)}


def crossing(sizes, *names, **others):
    """Return points whose times depend on the length: `{length: times of the names}`."""
    return [
        point(spec_with(length), **dict(zip(names, times, strict=True)), **others)
        for length, times in sizes.items()
    ]


STEPS = 120, 150, 200, 900, 1100, 1600, 60  # each another


def test_what_a_step_of_lengths_chooses_is_checked_once_for_all_steps_with_that_choice(
    here, routers, ran, monkeypatch, decided_in_full
):
    looked_up, plan_for = [], Steps.plan_for

    def looking_up(steps, lengths):
        looked_up.append(lengths.max_q)
        return plan_for(steps, lengths)

    monkeypatch.setattr(Steps, "plan_for", looking_up)
    checked, check = [], planning.checked_against_contract

    def checking(kernel, direction, backend, *rest):
        checked.append(backend)
        return check(kernel, direction, backend, *rest)

    monkeypatch.setattr(planning, "checked_against_contract", checking)
    attnreg.configure(
        here(*crossing({128: (10.0, 40.0), 1024: (900.0, 200.0)}, "first", "second", cpu=990.0))
    )
    for length in STEPS:
        call(length)
        call(length)
    assert ran() == {"first": (8, 0), "second": (6, 0)}
    # Of all others the times alone are looked up, once.
    assert decided_in_full == [120, 900]
    assert [length for length in looked_up if length != 900] == [150, 200, 1100, 1600, 60]
    assert checked == ["first", "second"]


def test_further_steps_that_torchs_own_kernel_runs_are_not_decided_in_full(
    here, routers, ran, decided_in_full
):
    attnreg.configure(
        here(*crossing({128: (10.0, 40.0), 1024: (900.0, 200.0)}, "cpu", "first", second=990.0))
    )
    for length in STEPS:
        call(length)
    assert ran() == {"cpu": (4, 0), "first": (3, 0)}
    assert decided_in_full == [120, 900]


def test_torchs_own_kernel_keeps_its_place_before_measured_backends_in_further_steps(
    here, routers, ran, decided_in_full
):
    """If it has no times, it comes first, as torch's selector has chosen it."""
    attnreg.configure(here(first=10.0, second=20.0))
    for length in STEPS:
        call(length)
    assert ran() == {"cpu": (7, 0)}
    assert decided_in_full == [120]


def test_further_steps_count_the_fallback_from_what_is_asked_for(here, routers, ran, fake, decided_in_full):
    attnreg.configure(here(cpu=90.0, first=10.0, second=40.0))
    with attnreg.register_backend(fake("narrow", head_dim=attnreg.Range(8, 8)).backend):
        for length in STEPS:
            call(length)
    assert [(row.backend, row.count) for row in attnreg.stats().fallbacks] == [("narrow", 7)]
    assert ran() == {"first": (7, 0)}
    assert decided_in_full == [120]


def test_further_steps_count_the_fallback_from_a_scoped_choice(
    here, known, routers, ran, fake, monkeypatch, decided_in_full
):
    narrow = fake("narrow", head_dim=attnreg.Range(8, 8)).backend
    know(monkeypatch, *(entry.backend for entry in known.values()), narrow)
    attnreg.configure(here(cpu=90.0, first=10.0, second=40.0))
    with attnreg.use_backend("narrow"):
        for length in STEPS:
            call(length)
    assert [(row.backend, row.count) for row in attnreg.stats().fallbacks] == [("narrow", 7)]
    assert ran() == {"first": (7, 0)}
    assert decided_in_full == [120]


def test_further_steps_have_turns_of_their_own(here, routers, ran):
    """By `policy = "adaptive"`, also where a table predicts their times."""
    attnreg.configure(here(cpu=9.0, first=10.0, second=10.0, third=10.0, settings='policy = "adaptive"\n'))
    for _ in range(MOST_CALLS):
        call(120)
    ran()
    for _ in range(4):
        call(900)
    assert ran() == dict.fromkeys(("cpu", "first", "second", "third"), (1, 0))


def test_further_steps_of_timed_calls_have_rows_of_their_own(here, routers, monkeypatch, tmp_path):
    monkeypatch.setattr(timed, "_plans", {})
    monkeypatch.setenv("ATTNREG_REPORT", str(tmp_path / "report.jsonl"))
    attnreg.configure(here(cpu=90.0, first=10.0, second=40.0))
    for length in STEPS:
        call(length)
        call(length)
    rows = timed.to_dict()["plans"]
    assert [(row["spec"]["max_q"], row["calls"]) for row in rows] == [(length, 2) for length in STEPS]
    monkeypatch.delenv("ATTNREG_REPORT")
    attnreg.reload()
    state()
    assert not timed.is_on


def test_a_step_keeps_its_plan_whatever_its_other_lengths_would_choose(here, ran):
    """Also if the call cache asks again: bits must not depend on alignment, or on what was dropped."""
    attnreg.configure(here(*crossing({192: (10.0, 20.0), 255: (20.0, 10.0)}, "first", "second", cpu=990.0)))
    call(130)
    call(195)
    (steps,) = (steps for kind in state().kinds.values() for steps in kind.steps.values())
    assert attnreg.explain(spec_with(250, batch=1, tokens_q=250, tokens_k=250)).backend == "second"
    assert steps(1, 250, 250, 250, 250)[0].call == ("first", "forward")
    call(250)
    assert ran() == {"first": (3, 0)}


def test_further_steps_run_on_what_replaces_torchs_kernel_at_their_lengths(
    here, known, python_routers, routers, fake, ran
):
    """Also if the backend reads lengths that it doesn't declare, and hadn't loaded for the first step."""
    own = fake("cpu")
    kernels = own.backend.load()._replace(replaces_native=lambda direction, spec: spec.max_q >= 200)
    known["cpu"] = Entry("cpu", "a test", dataclasses.replace(own.backend, load=lambda: kernels))
    sizes = {24: (10.0, 40.0), 64: (40.0, 10.0), 512: (400.0, 100.0)}
    attnreg.configure(here(*crossing(sizes, "first", "cpu")))
    for length in (24, 64, 80, 250, 300, 420):
        call(length)
    assert ran() == {"first": (1, 0), "cpu": (5, 0)}
    assert [given[0].shape[1] for given in own.forwards] == [250, 300, 420]


def test_further_steps_know_of_a_backend_that_turned_out_not_to_load(
    here, known, routers, ran, fake, decided_in_full
):
    def load():
        raise ImportError("no module of that name")

    known["first"] = Entry("first", "a test", fake("first", load=load).backend)
    attnreg.configure(
        here(*crossing({128: (40.0, 10.0), 1024: (200.0, 900.0)}, "first", "second", cpu=990.0))
    )
    for length in STEPS:
        call(length)
    assert ran() == {"second": (7, 0)}
    assert decided_in_full == [120, 900]


def test_captured_calls_have_no_further_steps(here, monkeypatch, ran):
    """None of their plans is kept, so that each would look for one."""
    attnreg.configure(here(cpu=90.0, first=10.0, second=40.0))
    described = calls.spec_of
    monkeypatch.setattr(calls, "spec_of", lambda *given: described(*given).but(capturing=True))
    call(120)
    call(200)
    assert ran() == {"first": (2, 0)}
    assert [kind.steps for kind in state().kinds.values()] == [{}]


def test_where_more_than_steps_counts_by_now_no_further_step_is_chosen(here, ran):
    """The call cache may ask about such a class until it has an entry of it."""
    attnreg.configure(here(cpu=90.0, first=10.0, second=40.0))
    call(120)
    (kind,) = (kind for kind in state().kinds.values() if kind.steps)
    ((place, steps),) = kind.steps.items()
    lengths = Lengths(1, 200, 200, 200, 200)
    assert steps(*lengths)[0].call == ("first", "forward")
    kind.details[place] = Detail.EXACT
    call(150)
    assert {plan.key[1] for plan in kind.plans.values()} == {Detail.STEPS, Detail.EXACT}
    assert steps(*lengths) is None


def test_what_is_decided_without_a_call_follows_the_times_of_each_step(here, decided_alone):
    attnreg.configure(here(*crossing({128: (10.0, 40.0), 1024: (900.0, 200.0)}, "first", "second")))
    for length in (130, 150, 1100, 1200, 140, 1300):
        [decision] = calls.decided(spec_with(length), None)
        assert decision.backend == ("first" if length < 1000 else "second")
    assert [spec.max_q for spec in decided_alone] == [130, 1100]  # each the first of its step


def test_steps_of_training_are_chosen_by_the_times_of_both_directions(here, ran, decided_in_full):
    """Packed calls of ever new lengths, forward and backward: values, and which backend ran."""
    sizes = {24: (10.0, 40.0), 200: (900.0, 200.0)}
    attnreg.configure(
        here(*(
            point(spec_with(length, varlen=True, needs_backward=True), direction, first=first, second=second)
            for length, (first, second) in sizes.items()
            for direction in ("forward", "backward")
        ))
    )  # fmt: skip

    def gradients(length, backend=None):
        generator = torch.Generator().manual_seed(length)
        made = [torch.randn(2 * length, 4, 64, generator=generator) for _ in range(3)]
        inputs = [x.bfloat16().requires_grad_() for x in made]
        ends = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        out = attnreg.varlen_attn(*inputs, ends, ends, length, length, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, inputs, out.detach())]

    steps = 20, 30, 40, 180, 220, 300, 50  # each another
    results = {length: gradients(length) for length in steps}
    assert ran() == {"first": (4, 4), "second": (3, 3)}
    assert decided_in_full == [20, 20, 180, 180]
    for length in (20, 40, 300):
        torch.testing.assert_close(results[length], gradients(length, backend="math"))


def test_a_step_whose_choice_builds_for_each_shape_is_decided_by_its_shape(
    here, lengths_decided, routers, ran
):
    """Also if other steps of the class have come before, and what it builds takes no time."""
    sizes = {128: (took(40.0, 0.0, 1e-9), took(10.0)), 1024: (took(200.0, 0.0, 1e-9), took(900.0))}
    attnreg.configure(here(*crossing(sizes, "first", "second", cpu=990.0)))
    first = [*range(120, 121 + FEW_SHAPES)]
    for length in (*first, 200, 900, 901, 250):
        call(length)
        call(length)
    assert ran() == {"first": (4, 0), "second": (6 + 2 * FEW_SHAPES, 0)}
    assert lengths_decided == [120, 900, 901, 250]


def test_a_backend_that_builds_for_each_shape_is_not_tried_late_by_a_program_of_ever_new_shapes(
    here, lengths_decided, routers, ran
):
    """Shapes count from the first call on, as times of other lengths choose it.

    No decision is lost once the shapes are too many: nothing was built.
    """
    sizes = {128: (took(40.0, 0.0, 0.05), took(10.0)), 1024: (took(200.0, 0.0, 0.05), took(900.0))}
    attnreg.configure(here(*crossing(sizes, "first", "second", cpu=990.0)))
    first = [*range(120, 121 + FEW_SHAPES)]
    for length in (*first, 200, 900, 901, 250):
        call(length)
        call(length)
    assert ran() == {"second": (2 * (len(first) + 4), 0)}
    assert lengths_decided == [120]


@pytest.mark.parametrize("builds", [False, True])
def test_a_backend_runs_no_length_that_it_refuses_whatever_is_built_for_shapes(
    here, known, routers, ran, monkeypatch, builds
):
    """It declares no cut for the lengths that it looks at."""

    def refuses(spec):
        return ("max_k must be even",) * (spec.max_k % 2)

    first = dataclasses.replace(known["first"].backend, builds=(lambda spec: True) if builds else None)
    second = dataclasses.replace(known["second"].backend, refuses=refuses)
    know(monkeypatch, first, second, known["third"].backend, known["math"].backend)
    sizes = {128: (40.0, 10.0, 20.0), 1024: (400.0, 100.0, 200.0)}
    attnreg.configure(here(*crossing(sizes, "first", "second", "third", cpu=990.0)))
    for length in range(120, 140):
        call(length)
        assert ran() == {"third" if length % 2 else "second": (1, 0)}, length


def test_a_recording_has_each_length_also_where_shapes_count(here, building, routers, tmp_path):
    sizes = {128: (40.0, 10.0), 1024: (400.0, 100.0)}
    attnreg.configure(here(*crossing(sizes, "first", "second", cpu=990.0)))
    with attnreg.record(tmp_path / "calls.jsonl"):
        for length in [*range(100, 124)] * 2:
            call(length)
    rows = (tmp_path / "calls.jsonl").read_text().splitlines()
    assert len(rows) == 24


@pytest.mark.parametrize("why", ["disabled", "unable", "wrong", "another is asked for"])
def test_shapes_do_not_count_for_a_backend_that_runs_no_such_call(
    here, lengths_decided, known, routers, ran, monkeypatch, why
):
    sizes = {128: (took(40.0, 0.0, 0.05), took(10.0)), 1024: (took(200.0, 0.0, 0.05), took(900.0))}
    if why == "unable":
        first = dataclasses.replace(
            known["first"].backend, builds=lambda spec: True, refuses=lambda spec: ["not such a call"]
        )
        know(monkeypatch, first, *(known[name].backend for name in ("second", "math")))
    if why == "wrong":
        sizes = {length: (Measured(wrong="out is off"), second) for length, (_, second) in sizes.items()}
    settings = {
        "disabled": 'disabled = ["first"]\n', "another is asked for": '[devices.cpu]\norder = ["second"]\n'
    }.get(why, "")  # fmt: skip
    attnreg.configure(here(*crossing(sizes, "first", "second", cpu=990.0), settings=settings))
    for length in range(120, 128):
        call(length)
    assert ran() == {"second": (8, 0)}
    assert lengths_decided == [120]
    assert len(state().plans()) < 8  # of shapes each has its own


def test_a_step_that_comes_after_a_change_is_decided_by_the_change(here, routers, ran):
    attnreg.configure(here(cpu=90.0, first=10.0, second=40.0))
    call(120)
    with attnreg.register_backend("third"):
        call(200)
    with attnreg.use_backend("second"):
        call(300)
    call(400)
    assert ran() == {"first": (2, 0), "third": (1, 0), "second": (1, 0)}


@pytest.fixture
def decided_for(here, lengths_decided):
    """Have times choose the backend that builds for each shape; return a list of the lengths decided for."""
    attnreg.configure(here(cpu=90.0, first=took(10.0, 0.0, 0.05), second=took(40.0)))
    return lengths_decided


def test_shapes_that_two_threads_bring_at_once_are_counted_past_the_few(
    decided_for, routers, ran, monkeypatch
):
    for length in range(200, 199 + FEW_SHAPES):
        call(length)
    inner, both = planning._decide_and_load, threading.Barrier(2, timeout=30)

    def decide_together(*given):
        settled = inner(*given)
        both.wait()
        return settled

    with monkeypatch.context() as patch:
        patch.setattr(planning, "_decide_and_load", decide_together)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(call, (220, 221)))
    ran()
    del decided_for[:]
    for length in range(222, 250):
        call(length)
    assert ran() == {"second": (28, 0)}
    assert decided_for == [222]


def test_a_decision_that_began_before_the_plans_were_forgotten_is_made_again(
    decided_for, routers, ran, monkeypatch
):
    for length in range(200, 199 + FEW_SHAPES):
        call(length)
    inner, waits, go_on = planning._decide_and_load, threading.Event(), threading.Event()

    def decide_late(*given):
        settled = inner(*given)
        if given[2].max_q == 230 and not waits.is_set():
            waits.set()
            assert go_on.wait(30)
        return settled

    monkeypatch.setattr(planning, "_decide_and_load", decide_late)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(call, 230)
        assert waits.wait(30)
        call(231)
        call(232)  # the first beyond the few: all is forgotten
        go_on.set()
        late.result()
    assert ran() == {"first": (FEW_SHAPES, 0), "second": (2, 0)}
    del decided_for[:]
    for length in range(233, 250):
        call(length)
    assert ran() == {"second": (17, 0)}
    assert decided_for == []


def test_the_plan_of_a_step_of_lengths_runs_no_call_whose_exact_lengths_are_those_numbers(
    here, building, routers, ran
):
    times = {(20, 24): (1.0, 50.0), (100, 500): (10.0, 50.0), (600, 2500): (900.0, 100.0)}
    points = [
        point(
            spec_with(batch=8, max_q=n, max_k=n, tokens_q=tokens, tokens_k=tokens, varlen=True),
            cpu=9999.0, first=took(first, 0.0, 1e-9), second=took(second),
        )
        for (n, tokens), (first, second) in times.items()
    ]  # fmt: skip
    attnreg.configure(here(*points, settings='policy = "measured"\n'))
    for lengths, longest, backend in (
        ([600, *[271] * 6, 274], 600, "second"),
        ([100, *[57] * 6, 58], 100, "first"),
        ([17, *[1] * 7], 20, "first"),  # 20 and 24 are the steps of 600 and 2,500
    ):
        tokens, offsets = (
            torch.randn(sum(lengths), 4, 64).bfloat16(),
            torch.tensor([0, *lengths]).cumsum(0).int(),
        )
        attnreg.varlen_attn(*[tokens] * 3, *[offsets] * 2, longest, longest)
        assert ran() == {backend: (1, 0)}


def test_only_shapes_that_have_run_count(here, known, routers, ran, monkeypatch):
    """Not a first call that fails, as for want of memory: the shape is decided anew, by the same costs."""
    first, fails = known["first"].backend, []
    kernels = first.load()

    def forward(*given):
        if fails:
            raise torch.OutOfMemoryError
        return kernels.forward(*given)

    building = dataclasses.replace(
        first, builds=lambda spec: True, load=lambda: attnreg.Kernels(forward, kernels.backward)
    )
    know(monkeypatch, building, *(known[name].backend for name in ("second", "math")))
    attnreg.configure(here(cpu=90.0, first=took(10.0, 0.0, 0.05), second=took(40.0)))
    call(200)
    fails.append(True)
    for _ in range(2 * FEW_SHAPES):
        with pytest.raises(torch.OutOfMemoryError):
            call(201)
    fails.clear()
    ran()
    call(201)
    assert ran() == {"first": (1, 0)}


def test_explain_says_that_another_backend_may_run_many_shapes(decided_for):
    explained = attnreg.explain(spec_with())
    assert explained.backend == "first"
    (note,) = [note for note in explained.notes if "each new shape" in note]
    assert note == (
        "first is set up for each new shape of such a forward: after 8 shapes what that takes counts in "
        "full, and another backend may run it"
    )


# Which table


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"cuda": "1.0"}, "measured with CUDA 1.0, here it is none: a table of a CPU is no prior"),
        (
            {"backends": {"second": "0.9"}},
            "measured with second 0.9, here it is 1.0: a table of a CPU is no prior",
        ),
    ],
    ids=["CUDA", "a backend"],
)
def test_a_table_of_another_environment_is_refused_whole_and_that_is_said(
    here, routers, caplog, changes, difference
):
    caplog.set_level(logging.WARNING, "attnreg")
    attnreg.configure(here(first=30.0, second=10.0, changes=changes))
    reason = f"{TABLE} is refused: {difference}"
    for _ in range(2):
        found = attnreg.explain(spec_with())
        assert (found.backend, found.source) == ("first", "default order for cpu")
        assert found.forward.predicted is None
        assert reason in found.notes
    logged = [record.message for record in caplog.records]
    assert logged == [f"{reason}; the default order decides until `attnreg tune` has run here"]


def test_the_warning_says_what_decides_in_its_place(here, other, routers, caplog):
    caplog.set_level(logging.WARNING, "attnreg")
    other(first=30.0, second=10.0, changes={"cuda": "1.0"})
    attnreg.configure(here(first=30.0, second=10.0))
    assert attnreg.explain(spec_with()).backend == "second"
    (message,) = [record.message for record in caplog.records]
    assert "other.json (other.toml:1) is refused: measured with CUDA 1.0, here it is none: " in message
    assert message.endswith(f"; {TABLE} decides until `attnreg tune` has run here")


def test_a_table_for_another_kind_of_device_says_nothing_and_that_is_no_fault(here, other, caplog):
    attnreg.configure(here(first=30.0))
    found = attnreg.explain(spec_with(device=Device("xpu")))
    assert (found.forward.predicted, found.notes) == (None, ())
    attnreg.configure(here(device=GPU, first=30.0, second=10.0))
    found = attnreg.explain(spec_with())
    assert (found.backend, caplog.records) == ("first", [])
    assert found.notes == (f"{TABLE} was measured on a GPU: it doesn't apply to cpu",)
    # Nor is it mentioned where a weaker one, of a CPU, is in force.
    other(device=GPU, first=30.0, second=10.0)
    attnreg.configure(here(first=30.0, second=10.0))
    found = attnreg.explain(spec_with())
    assert found.backend == "second"
    assert not any("of a GPU" in note for note in found.notes)


def test_explain_notes_that_a_table_lacks_a_kind(here):
    attnreg.configure(here(first=30.0, second=10.0))
    found = attnreg.explain(spec_with(head_dim=24, head_dim_v=24, window=(5, 0), needs_backward=True))
    assert (found.backend, found.source) == ("first", "default order for cpu")
    assert found.forward.predicted is None
    notes = [note for note in found.notes if "has nothing of this kind" in note]
    assert [note.rpartition(", ")[2] for note in notes] == ["forward", "backward"]
    assert notes[0].startswith(f"{TABLE} has nothing of this kind: ")
    assert "head dim 24, 1:1 heads, window" in notes[0]
    assert not any("nothing of this kind" in note for note in attnreg.explain(spec_with()).notes)


def test_a_table_for_a_simulated_device_is_taken_at_its_word(here):
    attnreg.configure(here(device=GPU, first=30.0, second=10.0))
    found = attnreg.explain(spec_with(device=Device.parse("sm_90")))
    assert (found.backend, found.source) == ("second", TABLE)
    assert any("assumes that the device is NVIDIA Test 9000" in note for note in found.notes)
    other = attnreg.explain(spec_with(device=Device.parse("sm_100")))
    assert other.backend == "first"
    assert any("measured with compute capability 9.0, here it is 10.0" in note for note in other.notes)


def test_a_table_that_cannot_be_read_is_an_error_that_changes_nothing(here, tmp_path):
    attnreg.configure(here(first=30.0, second=10.0))
    broken = tmp_path / "broken.toml"
    broken.write_text('tuned = "none.json"')
    with pytest.raises(ConfigError) as error:
        attnreg.configure(broken)
    assert str(error.value).startswith(f"broken.toml:1: tuned: {tmp_path / 'none.json'}: can't be read")
    assert decided()[0] == "second"


def test_the_table_that_ships_for_a_gpu_is_used_there_by_default(shipped, known):
    spec = dataclasses.replace(spec_with(), device=GPU)
    found = table(point(spec, first=9.0, second=4.0))
    found = dataclasses.replace(found, environment=environment(GPU, known))
    found.save(shipped / "nvidia-test-9000.json")
    decision = planning.decide(spec, "forward", known, state().policy)
    assert (decision.backend, decision.source) == ("second", "measured table nvidia-test-9000.json")
    assert not state().active  # without settings it serves no call
    assert attnreg.explain(spec_with()).source == "default order for cpu"


def ship(shipped, known, name, **changes):
    """Have a table ship, in which the fake `second` is the fastest, measured in another environment."""
    measured = dataclasses.replace(environment(GPU, known), **changes)
    found = table(point(dataclasses.replace(spec_with(), device=GPU), first=9.0, second=4.0))
    dataclasses.replace(found, environment=measured).save(shipped / file_name(name))


def decided_on_the_gpu(known):
    policy = state().policy
    decision = planning.decide(dataclasses.replace(spec_with(), device=GPU), "forward", known, policy)
    return decision.backend, decision.source, policy.tables.report(GPU)


def test_the_table_of_a_related_gpu_is_a_prior_and_named_so(shipped, known, caplog):
    ship(shipped, known, "NVIDIA Test 8000", device="NVIDIA Test 8000", torch="2.0.0")
    backend, source, report = decided_on_the_gpu(known)
    assert (backend, source) == ("second", "measured table nvidia-test-8000.json, as a prior")
    note = (
        "measured with device NVIDIA Test 8000, here it is NVIDIA Test 9000; measured with torch 2.0.0, here"
    )
    assert report.notes[0].startswith(f"measured table nvidia-test-8000.json is only a prior: {note}")
    assert (report.refused, caplog.records) == ((), [])  # no setting names it
    ship(shipped, known, "NVIDIA Test 9000")
    attnreg.reload()
    assert decided_on_the_gpu(known)[:2] == ("second", "measured table nvidia-test-9000.json")


def test_the_gpus_own_table_of_near_versions_is_a_nearer_prior_than_that_of_another(shipped, known):
    ship(shipped, known, "NVIDIA Test 8000", device="NVIDIA Test 8000")
    ship(shipped, known, "NVIDIA Test 9000", torch="2.0.0")
    assert decided_on_the_gpu(known)[1] == "measured table nvidia-test-9000.json, as a prior"


def test_the_table_of_another_architecture_is_no_prior(shipped, known):
    ship(shipped, known, "NVIDIA Test 8000", device="NVIDIA Test 8000", compute_capability="8.0")
    assert decided_on_the_gpu(known) == ("first", "default order for sm_90", tables.TableReport())


def test_a_named_table_that_is_a_prior_is_said_once_and_leads_those_that_ship(here, shipped, known, caplog):
    ship(shipped, known, "NVIDIA Test 8000", device="NVIDIA Test 8000")
    caplog.set_level(logging.WARNING, "attnreg")
    attnreg.configure(here(device=GPU, first=9.0, third=4.0, changes={"torch": "2.0.0"}))
    for _ in range(2):
        assert decided_on_the_gpu(known)[:2] == ("third", f"{TABLE}, as a prior")
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"{TABLE} is only a prior: measured with torch 2.0.0, here it is ")
    assert message.endswith("; it decides until `attnreg tune` has run here")


def test_a_shipped_table_that_is_broken_is_no_error_of_a_call(shipped, known, caplog):
    (shipped / "nvidia-test-9000.json").write_text("{}")
    decision = planning.decide(spec_with(device=GPU), "forward", known, state().policy)
    assert decision.backend == "first"
    assert "format: got None" in caplog.text


def test_the_file_of_a_device_is_named_after_it():
    assert file_name("NVIDIA H200") == "nvidia-h200.json"
    assert file_name("NVIDIA RTX PRO 6000 (Blackwell)") == "nvidia-rtx-pro-6000-blackwell.json"


# What explain and info say


def test_explain_shows_times_points_and_choice_for_each_direction(here):
    spec = spec_with(needs_backward=True)
    attnreg.configure(
        here(
            point(spec, first=took(30.0, 12.0, 0.25), second=10.0, third=Measured(failed="RuntimeError: no")),
            point(spec, "backward", first=7.0, second=10.0),
        )
    )
    found = attnreg.explain(spec)
    usual = str(found).splitlines()
    assert usual[0] == f"second forward and backward, by {TABLE}"
    assert usual[2:7] == [
        "  second  runs it, 0.020 ms forward + backward",
        "  first   could run it, 0.040 ms forward + backward",
        "  math    could run it",
        "  third   forward: could run it, but failed: RuntimeError: no; backward: could run it",
        f"  times by {TABLE}",
    ]
    lines = found.text(verbose=True).splitlines()
    assert f"forward on cpu: second, by {TABLE}" in lines
    start = lines.index(f"  predicted by {TABLE}, in eager mode")
    assert "  third   could run it, but failed: RuntimeError: no" in lines
    assert lines[start + 1 : start + 6] == [
        "    second  0.010 ms (first call 0.000 ms), forward + backward 0.020 ms",
        "    first   0.033 ms (first call 250.0 ms), forward + backward 0.040 ms",
        "    third   failed: RuntimeError: no",
        "    math    not measured",
        "    from B 2, 256 x 256, H 4, this very call",
    ]
    narrow = found.text(verbose=True, width=60).splitlines()
    start = next(number for number, line in enumerate(narrow) if line.endswith("in eager mode"))
    assert narrow[start + 1 : start + 6] == [
        "    second  0.010 ms (first call 0.000 ms), forward +",
        "              backward 0.020 ms",
        "    first   0.033 ms (first call 250.0 ms), forward +",
        "              backward 0.040 ms",
        "    third   failed: RuntimeError: no",
    ]
    assert f"backward on cpu: second, by {TABLE}" in lines
    data = json.loads(json.dumps(found.to_dict()))
    assert data["forward"]["predicted"]["candidates"][0]["backend"] == "second"
    assert data["backward"]["predicted"]["points"] == [{"size": "B 2, 256 x 256, H 4", "distance": 0.0}]


def test_explain_says_which_of_the_measured_backends_cannot_run_the_call(here, known, fake):
    spec = spec_with()
    narrow = fake("second", priority=2, devices=("cpu",), dtypes=("float32",)).backend
    known["second"] = Entry("second", "a test", narrow)
    registry.changed()
    attnreg.configure(here(point(spec, first=30.0, second=10.0)))
    lines = attnreg.explain(spec).text(verbose=True).splitlines()
    assert "    second  0.010 ms (first call 0.000 ms); it can't run this call" in lines


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"batch": 4, "heads_q": 2, "heads_k": 2}, "from B 2, 256 x 256, H 4, at distance 0.00"),
        ({"max_q": 512, "max_k": 512}, "from B 2, 256 x 256, H 4, at distance 1.41"),
        ({"max_q": 512}, "outside the measured range, its edge decides: max_q 512 is above 256"),
    ],
    ids=["another call at the same place", "a distance", "outside"],
)
def test_explain_says_from_how_far_away_a_prediction_comes(here, changes, line):
    attnreg.configure(here(first=30.0, second=10.0))
    assert f"    {line}" in attnreg.explain(spec_with(**changes)).text(verbose=True).splitlines()


@pytest.mark.parametrize(("second", "is_said"), [(99.0, True), (90.0, False)])
def test_explain_says_why_the_fastest_predicted_is_not_chosen_where_its_lead_is_too_small(
    here, second, is_said
):
    attnreg.configure(here(first=100.0, second=second))
    found = attnreg.explain(spec_with())
    line = "second's lead may be chance: first comes before it by default"
    assert found.backend == ("first" if is_said else "second")
    assert (f"  {line}" in str(found).splitlines()) == is_said
    assert (f"    {line}" in found.text(verbose=True).splitlines()) == is_said


def test_explain_says_that_of_backends_that_take_as_long_the_host_decided(here):
    attnreg.configure(here(first=took(100.0, 30.0), second=took(101.0, 20.0)))
    found = attnreg.explain(spec_with())
    assert found.backend == "second"
    assert "  first's lead may be chance: second takes the host less" in str(found).splitlines()


def test_in_a_graph_the_gpu_times_alone_are_compared(here):
    attnreg.configure(here(first=took(5.0, 50.0), second=took(10.0, 10.0)))
    assert decided()[0] == "second"
    assert decided(capturing=True)[0] == "first"
    assert "in a CUDA graph" in attnreg.explain(spec_with(capturing=True)).text(verbose=True)


def test_a_call_that_nothing_can_run_is_refused_without_times(here, known):
    attnreg.configure(here(first=30.0))
    found = attnreg.explain(spec_with(), backend=None)
    assert "predicted by" in found.text(verbose=True) and "times by" in str(found)
    known["none"] = Entry("none", "a test", cause=ImportError("no"))
    with pytest.raises(attnreg.BackendUnavailableError):
        attnreg.use_backend("none")
    refused = attnreg.explain(spec_with(), backend="none")
    assert "predicted by" not in refused.text(verbose=True) and "times by" not in str(refused)


def test_info_shows_the_table_in_force_or_why_there_is_none(here):
    def of_cpu():
        return json.loads(invoke("info", "--json").stdout)["tables"][0]

    nothing = {"device": "cpu", "in_force": None, "points": 0, "notes": [], "refused": []}
    assert of_cpu() == nothing
    attnreg.configure(here(first=30.0, changes={"driver": "1.2"}))
    found = of_cpu()
    assert (found["in_force"], found["points"]) == (TABLE, 2)
    assert found["notes"][0] == f"{TABLE}: measured with driver 1.2, here it is none"
    assert f"{TABLE}, 2 points" in words(invoke("info"))
    attnreg.configure(here(first=30.0, changes={"device": "abacus"}))
    found = of_cpu()
    assert found["in_force"] is None
    assert found["refused"][0].startswith(f"{TABLE} is refused: measured with device abacus, here")


def test_both_directions_of_a_call_are_looked_up_once(here, routers, monkeypatch):
    attnreg.configure(
        here(point(first=30.0, second=10.0), point(spec_with(), "backward", first=9.0, second=9.0))
    )
    looked_up = []

    def counting(kinds, spec, *rest):
        looked_up.append(spec.max_q)
        return predict_both(kinds, spec, *rest)

    monkeypatch.setattr(tables, "predict_both", counting)
    found = policy.current().tables
    for length in (256, 300):
        for direction in ("backward", "forward"):
            predicted = found.predict(spec_with(length, needs_backward=True), direction)
            assert [one.backend for one in predicted.candidates] == ["second", "first"]
    assert looked_up == [256, 300]
