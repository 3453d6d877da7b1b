"""Promises of the parts of `attnreg bench`: shapes, sides, contexts, and what it makes of figures."""

import contextlib
import importlib
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import attnreg
from attnreg.core import aten, registry
from attnreg.core.contract.spec import Device
from attnreg.core.dispatch import call_cache
from attnreg.core.policy import current as policy
from attnreg.core.policy.sources import Sources, without_implementation
from attnreg.core.times import tables
from attnreg.core.times.kinds import MANY, ONE, kind_of, size_of
from attnreg.core.times.table import load
from attnreg.core.torchlib import captured
from attnreg.errors import ConfigError
from attnreg.tools import drawing
from attnreg.tools.bench import compare, fronts, overhead, sdpa, selection, shapes, sides
from attnreg.tools.bench.compare import Batch
from attnreg.tools.bench.report import Job
from attnreg.tools.bench.selection import ADAPTIVE, CHOSEN, TORCH
from attnreg.tools.bench.shapes import BOTH, FORWARD, dense, flops, packed, trains
from attnreg.tools.bench.sides import called_directly, wrong_backend
from attnreg.tools.measure.timing import Timer
from attnreg.tools.tuning.workload import grid

CPU = torch.device("cpu")
SHIPPED = tables.SHIPPED

pytestmark = pytest.mark.usefixtures("one_thread")


def test_autograd_runs_in_the_callers_thread_only_while_that_side_is_measured():
    enabled = torch._C._is_multithreading_enabled
    assert enabled()
    with sides.in_the_callers_thread(contextlib.nullcontext):
        assert not enabled()
    assert enabled()


def test_a_side_that_ran_another_backend_is_wrong():
    assert wrong_backend("FA4", {"forward": "FA4", "backward": "FA4"}) == ""
    assert wrong_backend("FA4", {"forward": "FA4", "backward": "FA2"}) == "ran FA4 (forward), FA2 (backward)"


def usual(device):
    """Return the shapes of `bench selection` without `--random`."""
    counts = selection.GPU_COUNTS if device == "cuda" else selection.COUNTS
    return [shapes.drawn(selection.SEED, number, device) for number in range(counts[0])]


@pytest.mark.slow
def test_shapes_without_random_are_in_no_grid_and_in_no_table_that_ships():
    for device in (Device.parse("sm_90"), Device.parse("cpu")):
        kept = {(kind_of(spec, FORWARD), size_of(spec)) for spec in grid("full", device)}
        for file in SHIPPED.glob("*.json"):
            kept |= {(point.kind._replace(direction=FORWARD), point.size) for point in load(file).points}
        specs = [shape.spec(device, needs_backward=trains(shape)) for shape in usual(device.type)]
        assert not kept & {(kind_of(spec, FORWARD), size_of(spec)) for spec in specs}
        assert len(set(specs)) == len(specs)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_seed_draws_the_shapes_without_random(device):
    fixed = {shape.name for shape in usual(device)}
    drawn = {shapes.drawn(seed, number, device).name for seed in range(100) for number in range(6)}
    assert fixed and not fixed & drawn


def test_shapes_without_random_vary_in_everything_early():
    found = usual("cuda")
    assert len(found) == 58
    for some in (found, found[:20], found[: selection.GPU_COUNTS[1]]):
        assert {shape.name.split()[0] for shape in some} == {"dense", "packed", "decode"}
        assert {shape.dims[0] for shape in some} == {64, 96, 128} and {s.is_causal for s in some} == {
            True,
            False,
        }
        assert {shape.heads[0] // shape.heads[1] for shape in some} >= {1, 4, 8}
        assert {len(shape.lens_q) % 2 for shape in some} == {0, 1}


def test_bench_varlen_has_the_shapes_of_pytorchs_pull_request():
    found = shapes.pull_request("cuda")
    assert [(s.dims[0], s.is_causal) for s in found] == [*itertools.product((64, 128), (False, True))]
    for shape in found:
        assert (len(shape.lens_q), shape.max_q, shape.heads) == (8, 2048, (16, 16))
        assert all(length % 64 == 0 for length in shape.lens_q) and shape.dtype == "bfloat16"
    assert {sum(shape.lens_q) for shape in shapes.sdpa_grid("cuda")} == {16384}


def test_flops_are_four_for_each_pair_and_dimension():
    shape = packed([3, 5], 2, 2, 8, causal=False)
    assert flops(shape, FORWARD) == 4 * 8 * 2 * (9 + 25)
    assert flops(shape, BOTH) / flops(shape, FORWARD) == 3.5
    assert flops(packed([3, 5], 2, 2, 8, causal=True), FORWARD) == flops(shape, FORWARD) / 2


def test_settings_have_no_effect_during_a_measurement_and_are_as_before_after_it(monkeypatch):
    monkeypatch.setenv("ATTNREG_BACKEND", "math")
    before = policy.sources()
    assert before.environment.backend == ("math",)
    with sides.untouched():
        assert without_implementation(policy.sources()) == Sources()
    assert policy.sources() is before
    monkeypatch.setenv("ATTNREG_BACKEND", "unknown")
    monkeypatch.setattr(policy, "_sources", None)
    for _ in range(2):
        with pytest.raises(ConfigError, match="unknown"):
            policy.sources()
        with sides.untouched():
            assert policy.current().preferences == ()


@pytest.mark.parametrize("compared", [("cpu", "math"), ("math",)])
def test_a_strategy_runs_what_its_name_says_out_of_the_compared_backends(routers, compared):
    batch = Batch(dense(2, 16, 2, 2, 16, True, "float32"), CPU)
    found = {}
    with sides.untouched():
        for name, side in selection.ways(batch, Job(CPU, compared, rounds=1)).items():
            attnreg.reset_stats()
            side.results()
            found[name] = sides.ran()["backward"]
    led = {f"always {name}": name for name in compared}
    by_choice = dict.fromkeys((CHOSEN, "attnreg, order", ADAPTIVE), compared[0])
    assert found == {**by_choice, **led, TORCH: "torch"}


def test_views_that_the_ablation_makes_in_python_have_the_layout_of_kernels(compiled_routers, monkeypatch):
    monkeypatch.syspath_prepend(Path(attnreg.__file__).parents[1] / "benchmarks")
    ablation, shapes_seen = importlib.import_module("ablation"), []
    original = call_cache.kept_for

    def noting(*given):
        kept = original(*given)

        def run(*tensors):
            shapes_seen.append(tuple(tensors[0].shape))
            return kept.launcher(*tensors)

        return kept and kept._replace(launcher=run)

    monkeypatch.setattr(call_cache, "kept_for", noting)
    inputs = torch.randn(3, 2, 4, 9, 8).unbind()
    with attnreg.register_backend("math"):
        wanted = F.scaled_dot_product_attention(*inputs)
        with ablation.off(ablation.views_in_python):
            found = [F.scaled_dot_product_attention(*inputs) for _ in range(6)]
    assert attnreg.stats().calls.keys() == {"math"}
    # From the third call on C++ calls the launcher, which has the contract's layout.
    assert shapes_seen == [(2, 9, 4, 8)] * 4
    assert all(torch.equal(out, wanted) for out in found)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["python", "compiled"])
def test_the_host_time_of_each_front_is_measured_for_each_backend_and_kind_of_router(
    wanted, compiled_routers, monkeypatch
):
    aten.restore()
    monkeypatch.setattr(compiled_routers, "_wanted", lambda: wanted)
    monkeypatch.setattr(fronts, "LAYERS", 2)
    monkeypatch.setattr(fronts, "SHAPES", (packed([5, 3], 2, 2, 8, False), dense(2, 5, 2, 2, 8, False)))
    monkeypatch.setattr(fronts, "OTHERS", ((ONE, shapes.decode(2, 1, 7, 2, 2, 8)),))
    aten.ensure()
    found = fronts.host_costs(torch.device("cpu"), ["cpu", "math"], rounds=1)
    assert [one.place for one in found] == [
        (name, varlen, direction, compiled, recorded, like)
        for compiled in ((False, True) if wanted == "compiled" else (False,))
        for varlen, like in ((True, MANY), (False, MANY), (False, ONE))
        for name in ("cpu", "math")
        for direction, recorded in (("forward", True), ("backward", True), ("forward", False))
        if like == MANY or not recorded
    ]
    in_use = fronts.host_costs(torch.device("cpu"), ["math"], rounds=1, as_used=True)
    assert {one.compiled for one in in_use} == {wanted == "compiled"}
    assert captured.call_cache_in_use is (wanted == "compiled")
    aten.restore()
    assert all(one.host_us > 0 for one in found if one.direction == "forward")
    assert without_implementation(policy.sources()) == Sources()


def test_calls_of_one_graph_have_the_gradients_of_each(routers):
    batch = Batch(packed([5, 3], 2, 2, 8, False, "float32"), CPU, sets=3)
    found = sides.layers_backward(sides.layers(batch.with_attnreg, batch.sets), batch.sets)
    alone = [x for one in batch.sets for x in sides.forward_backward(batch.with_attnreg, one)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, alone, strict=True))
    assert len({x.data_ptr() for x in found}) == 9


def test_a_call_of_a_graph_is_a_share_of_it(routers, monkeypatch):
    ran = []

    def clock(timer, run, calls):
        ran.append(calls)
        return 6.0

    monkeypatch.setattr(Timer, "back_to_back", clock)
    batch = Batch(packed([5, 3], 2, 2, 8, False, "float32"), CPU, sets=3)
    side = sides.Side(batch.with_attnreg, batch.sets, sides.by_default)
    assert compare.SideTimer(side, side.runs_of_model(True), 0.01, 100).measure() == {FORWARD: 6.0, BOTH: 2.0}
    assert ran == [2, 1] * 2


def test_the_mean_of_a_single_case_is_said_in_the_singular():
    row = {"step": FORWARD, "side": CHOSEN, "times_yardstick": 1.25}
    line = "forward: 1.25 x torch SDPA in the geometric mean of 1 case, 1.25 at worst"
    assert sdpa._mean_gains([row]) == [line]
    assert "of 2 cases, 1.25 at worst" in sdpa._mean_gains([row, row | {"times_yardstick": 5.0}])[0]


def test_a_backend_has_the_same_colour_in_every_picture():
    for names in (["torch SDPA", "attnreg, measured", "attnreg, FA2"], ["always cuDNN", "always FA2"]):
        found = drawing.colours_of(names)
        assert found[names[-1]] == drawing.OF_BACKENDS["FA2"]
        assert len(set(found.values())) == len(names)


def test_every_way_to_choose_has_a_colour_of_its_own_where_all_backends_of_a_gpu_are_compared():
    backends = ("cuDNN", "efficient", "FA2", "FA3", "FA4", "flex", "math")
    ways = [CHOSEN, selection.ORDER, *(selection.FIXED + name for name in backends), ADAPTIVE, TORCH]
    found = drawing.colours_of(ways)
    assert len(set(found.values())) == len(ways) and "#000000" not in found.values()
    assert (found[CHOSEN], found[TORCH]) == (drawing.OURS, drawing.GREYS[0])


def test_functions_that_are_joined_by_the_least_autograd_are_those_that_run():
    kernels, directions = registry.find("math").kernels(), []

    def noting(direction):
        def run(*given):
            directions.append(direction)
            return getattr(kernels, direction)(*given)

        return run

    *inputs, grad = (torch.randn(1, 5, 2, 8, requires_grad=name != "g") for name in "qkvg")
    call = attnreg.Call(0.5, 5, 5, (-1, 0))
    attention = called_directly(noting("forward"), noting("backward"), call)
    out = attention(*inputs)
    plain = [x.detach() for x in inputs]
    right, lse = kernels.forward(*plain, call)
    wanted = right, *kernels.backward(grad, *plain, right, lse, call)
    assert all(map(torch.equal, (out, *torch.autograd.grad(out, inputs, grad)), wanted))
    with torch.no_grad():
        assert torch.equal(attention(*inputs), right)
    assert directions == ["forward", "backward", "forward"]
    assert attnreg.stats().calls == {}


# What a call costs the host


def test_overhead_on_a_cpu_measures_both_fronts(monkeypatch, routers):
    monkeypatch.setattr(overhead, "QUICK_CPU_SECONDS", 1e-6)
    job = Job(CPU, ("cpu",), rounds=1, quick=True)
    overhead.measure(job)
    found = job.kept
    ours = {"attnreg", "attnreg, cpu", "attnreg, cpu, use_backend()", "called directly, cpu"}
    ours |= {"autograd, nothing"}
    assert set(found["varlen_attn"]) == ours | {"attnreg, cpu, backend="}
    assert set(found["SDPA"]) == ours | {"torch", overhead.UNASKED, "aten op, C++ autograd"}
    steps = {"forward, no grad", "forward, grad", BOTH}
    assert all(set(one) == steps for name in overhead.FRONTS for one in found[name].values())
    assert all(time > 0 for name in overhead.FRONTS for one in found[name].values() for time in one.values())
    assert job.left_out == []


def test_nothing_of_attnreg_is_active_below_routers_that_nothing_asks(routers):
    found = overhead.sides(Batch(overhead.CPU_SHAPES[1], CPU), Job(CPU, ("cpu",), rounds=1))
    found["attnreg"].results()
    with found[overhead.UNASKED].within():
        assert aten.installed() and not policy._active


def test_overhead_on_a_gpu_measures_both_fronts_with_and_without_autograds_thread(routers):
    job = Job(torch.device("cuda"), ("cpu",), rounds=1)
    both = {
        "torch", "attnreg", "attnreg, cpu", "attnreg, cpu, use_backend()", "called directly, cpu",
        f"torch, {overhead.ALONE}", f"attnreg, {overhead.ALONE}", overhead.OP, overhead.NOTHING,
    }  # fmt: skip
    for shape, only in zip(fronts.SHAPES, ({"attnreg, cpu, backend="}, {overhead.UNASKED}), strict=True):
        batch = Batch(shape, CPU)
        batch.device = job.device
        assert set(overhead.sides(batch, job)) == both | only


def test_each_way_to_name_a_backend_runs_it(routers):
    job = Job(CPU, ("math",), rounds=1)
    for shape in overhead.CPU_SHAPES:
        for name, side in overhead.sides(Batch(shape, CPU), job).items():
            if name.startswith("attnreg, math"):
                attnreg.reset_stats()
                side.results()
                assert sides.ran() == {"forward": "math", "backward": "math"}, name
