"""Promises of the look-up: what a table says of a call that was measured, lies between points, or beyond."""

import math
import random

import pytest
from support.tuned import asked, point, took

from attnreg.tuning.index import Kinds
from attnreg.tuning.kinds import coordinates, kind_of, size_of, work
from attnreg.tuning.lookup import CALLS_PER_SHAPE, MARGIN, USUAL_HOST, predict, reordered
from attnreg.tuning.points import Front, Measured

CAUSAL = {"window": (-1, 0)}


def said(points, spec, direction="forward"):
    return predict(Kinds(points), spec, direction, "measured table here.json")


def costs(points, spec, direction="forward"):
    found = said(points, spec, direction)
    return None if found is None else {one.backend: one.cost_us for one in found.candidates}


# Where it was measured


def test_at_a_measured_point_the_times_are_those_measured():
    points = [point(asked(n), fast=took(n / 7, n / 9), slow=n / 3.0) for n in (64, 128, 256, 512, 1024)]
    found = said(points, asked(256))
    assert [(one.backend, one.gpu_us, one.host_us) for one in found.candidates] == [
        ("fast", 256 / 7, 256 / 9),
        ("slow", 256 / 3.0, 0.0),
    ]
    assert [(source.size, source.distance) for source in found.points] == [("B 2, 256 x 256, H 4", 0.0)]
    assert found.notes == ()


def test_in_eager_the_larger_of_host_and_gpu_time_counts_and_in_a_graph_the_gpu_time():
    points = [point(a=took(10.0, 60.0), b=took(25.0, 15.0))]
    assert costs(points, asked()) == {"b": 25.0, "a": 60.0}
    assert costs(points, asked(capturing=True)) == {"a": 10.0, "b": 25.0}
    assert [one.backend for one in said(points, asked(capturing=True)).candidates] == ["a", "b"]


def test_what_a_new_shape_costs_first_is_shared_by_its_calls_but_not_in_a_graph():
    points = [point(a=took(10.0, 0.0, 0.5))]
    assert costs(points, asked())["a"] == pytest.approx(10.0 + 0.5e6 / CALLS_PER_SHAPE)
    assert costs(points, asked(capturing=True)) == {"a": 10.0}


def test_forward_and_backward_are_looked_up_separately():
    points = [point(a=1.0), point(asked(), "backward", a=9.0)]
    assert costs(points, asked(), "backward") == {"a": 9.0}


# Between points


def test_between_two_points_a_time_rises_from_one_to_the_other():
    points = [point(asked(n), a=took) for n, took in ((128, 8.0), (256, 14.0), (512, 40.0), (1024, 150.0))]
    found = [costs(points, asked(n))["a"] for n in range(128, 1025, 16)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (8.0, 150.0)


def test_the_nearest_points_count_most():
    points = [point(asked(128), a=10.0, b=20.0), point(asked(1024), a=800.0, b=400.0)]
    near_small, near_large = costs(points, asked(160)), costs(points, asked(900))
    assert near_small["a"] < near_small["b"]
    assert near_large["a"] > near_large["b"]


def test_the_nearest_points_are_found_among_many_as_by_looking_at_all():
    draw = random.Random(0)
    sizes = {(draw.randrange(1, 64), draw.randrange(1, 9000), draw.randrange(1, 9000)) for _ in range(600)}
    points = [point(asked(batch=b, max_q=q, max_k=k), a=1.0) for b, q, k in sizes]
    index = Kinds(points).index_for(points[0].kind)
    for _ in range(50):
        at = tuple(draw.uniform(low, high) for low, high in zip(index.low, index.high, strict=True))
        found = [near.distance for near in index.nearest(at)]
        every = sorted(
            sum((x - y) ** 2 for x, y in zip(place.at, at, strict=True)) ** 0.5 for place in index.places
        )
        assert found == pytest.approx(every[:8])


# What the fronts take


def test_backends_are_compared_by_the_points_that_know_them_all_where_most_do():
    whole = [point(asked(n), a=float(n), b=2.0 * n) for n in (64, 128, 512, 1024)]
    odd = [point(asked(n), b=1.0) for n in (250, 260)]
    found = said(whole + odd, asked(256))
    assert [one.backend for one in found.candidates] == ["a", "b"]
    assert all(source.point in whole for source in found.points)
    # Far from those, the points at hand count.
    far = [point(asked(n), b=1.0) for n in (16000, 17000)]
    assert said(whole + far, asked(16500)).candidates[0].backend == "b"
    # Where most lack one, that rule would leave too little.
    many = [point(asked(n), b=1.0) for n in (250, 255, 260, 270)]
    assert said(whole + many, asked(256)).candidates[0].backend == "b"


def test_in_eager_a_call_takes_what_it_takes_through_its_front_where_that_was_measured():
    points = [point(a=took(10.0, 60.0), b=took(25.0, 15.0)), point(asked(), "backward", a=1.0, b=2.0)]
    fronts = [
        Front("a", False, "forward", 20.0),
        Front("b", False, "forward", 30.0),
        Front("b", True, "forward", 900.0),
        Front("a", False, "backward", 5.0),
        Front("b", False, "backward", 900.0),
    ]
    kinds = Kinds(points, fronts)

    def costs(direction="forward", **changes):
        found = predict(kinds, asked(**changes), direction, "t")
        return {one.backend: one.cost_us for one in found.candidates}

    usual = {name: took * USUAL_HOST for name, took in {"a": 20.0, "b": 30.0}.items()}
    assert costs() == usual
    assert costs(capturing=True) == {"a": 10.0, "b": 25.0}
    assert costs("backward") == {"a": 5.0 * USUAL_HOST, "b": 900.0 * USUAL_HOST}
    assert usual["a"] > 20.0


def test_with_compiled_routers_their_times_count_where_every_candidate_has_one():
    points = [point(a=took(1.0, 1.0), b=took(1.0, 1.0))]
    python = [Front("a", False, "forward", 20.0), Front("b", False, "forward", 30.0)]
    fast = [Front("a", False, "forward", 19.0, True), Front("b", False, "forward", 10.0, True)]

    def fastest(fronts, compiled):
        found = predict(Kinds(points, fronts), asked(), "forward", "t", compiled)
        return found.candidates[0].backend, found.candidates[0].host_us / USUAL_HOST

    assert fastest(python + fast, False) == ("a", pytest.approx(20.0))
    assert fastest(python + fast, True) == ("b", pytest.approx(10.0))
    assert fastest(python + fast[:1], True) == ("a", pytest.approx(20.0))


def test_host_times_of_fronts_count_only_if_every_candidate_has_one():
    points = [point(a=took(10.0, 60.0), b=took(25.0, 15.0))]
    kinds = Kinds(points, [Front("b", False, "forward", 200.0)])
    found = predict(kinds, asked(), "forward", "t")
    assert {one.backend: one.cost_us for one in found.candidates} == {"a": 60.0, "b": 25.0}


# Beyond the measured range


def test_outside_the_measured_range_the_nearest_edge_decides_and_that_is_said():
    points = [point(asked(n), a=n / 10.0, b=n / 5.0) for n in (256, 1024)]
    found = said(points, asked(4096))
    assert found.candidates[0].backend == "a"
    assert found.candidates[0].cost_us > 102.4
    assert found.notes == (
        "outside the measured range, its edge decides: max_q 4096 is above 1024",
        "outside the measured range, its edge decides: max_k 4096 is above 1024",
    )
    assert found.points[0].size == "B 2, 1024 x 1024, H 4"
    assert found.points[0].distance == pytest.approx(8**0.5)


def test_below_the_measured_range_too():
    points = [point(asked(n), a=n / 10.0) for n in (256, 1024)]
    assert said(points, asked(64, batch=1)).notes == tuple(
        f"outside the measured range, its edge decides: {what}"
        for what in ("batch x heads 4 is below 8", "max_q 64 is below 256", "max_k 64 is below 256")
    )


# Another kind


def test_a_table_says_nothing_of_a_call_with_nothing_to_compute():
    assert said([point(a=1.0)], asked(batch=0)) is None


@pytest.mark.parametrize(
    "changes",
    [
        CAUSAL,
        {"window": (8, 0)},
        {"varlen": True},
        {"dtype": "float32"},
        {"head_dim": 128, "head_dim_v": 128},
        {"dropout": 0.1},
        {"bias": True},
        {"alibi": True},
        {"seqused_k": True},
        {"page_size": 16},
        {"num_splits": 2},
    ],
    ids=str,
)
def test_a_table_has_no_opinion_on_another_mask_layout_precision_option_or_larger_head_dim(changes):
    assert said([point(a=1.0)], asked(**changes)) is None


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"head_dim": 48, "head_dim_v": 48}], ids=str)
def test_the_other_half_precision_and_larger_head_dims_stand_in(changes):
    found = said([point(a=100.0, b=200.0)], asked(**changes))
    assert [one.backend for one in found.candidates] == ["a", "b"]
    assert found.notes[0].startswith("nothing of this kind was measured; these are of bfloat16, head dim 64")


def test_of_several_kinds_that_stand_in_the_nearest_does():
    points = [point(asked(head_dim=d, head_dim_v=d), a=float(d)) for d in (64, 96, 128)]
    assert "head dim 96" in said(points, asked(head_dim=80, head_dim_v=80)).notes[0]


def test_the_ratio_of_heads_is_one_more_direction_in_which_a_point_may_be_near():
    by_ratio = [point(asked(heads_q=16, heads_k=n), a=took, b=10.0) for n, took in ((16, 30.0), (2, 3.0))]
    near_8, near_1 = (said(by_ratio, asked(heads_q=16, heads_k=n)) for n in (4, 8))
    assert near_8.candidates[0].backend == "a"
    assert near_1.candidates[0].backend == "b"
    assert near_8.notes == ()
    assert [point.size for point in near_8.points] == [
        "B 2, 256 x 256, H 16, 8:1 heads",
        "B 2, 256 x 256, H 16, 1:1 heads",
    ]
    assert [point.distance for point in near_8.points] == [0.5, 1.0]


def test_a_ratio_of_heads_beyond_those_measured_is_said():
    found = said([point(a=1.0)], asked(heads_k=1))
    assert found.notes == (
        "outside the measured range, its edge decides: heads for each key head 4 is above 1",
    )


def test_the_host_takes_what_it_mostly_takes_but_at_a_measured_point_what_it_took_there():
    points = [point(asked(n), a=took(1.0, host)) for n, host in ((64, 20.0), (256, 22.0), (1024, 300.0))]
    assert costs(points, asked(512)) == {"a": 22.0}
    assert costs(points, asked(1024)) == {"a": 300.0}


def test_a_deterministic_backward_is_a_kind_of_its_own_and_a_deterministic_forward_is_not():
    points = [point(a=1.0), point(asked(), "backward", a=1.0)]
    assert said(points, asked(deterministic=True)) is not None
    assert said(points, asked(deterministic=True), "backward") is None


# Work and place


def test_work_grows_with_every_size_and_masks_take_some_away():
    least = work(kind_of(asked(), "forward"), size_of(asked()))
    for changes in ({"batch": 4}, {"max_q": 512}, {"max_k": 512}, {"heads_q": 8, "heads_k": 8}):
        assert work(kind_of(asked(), "forward"), size_of(asked(**changes))) > least
    causal, window = asked(1024, window=(-1, 0)), asked(1024, window=(16, 0))
    whole = work(kind_of(asked(1024), "forward"), size_of(asked(1024)))
    half = work(kind_of(causal, "forward"), size_of(causal))
    assert work(kind_of(window, "forward"), size_of(window)) < half < whole


@pytest.mark.parametrize(
    "changes",
    [{"max_q": 0}, {"max_k": 0}, {"max_q": 9, "max_k": 4, "window": (-1, 0)}, {"batch": 0}],
    ids=str,
)
def test_odd_sizes_have_a_place_and_some_work(changes):
    spec = asked(**changes)
    kind = kind_of(spec, "forward")
    assert all(map(math.isfinite, coordinates(kind, size_of(spec))))
    assert work(kind, size_of(spec)) > 0


# Wrong and failing backends


def test_a_backend_that_is_wrong_at_one_size_is_not_chosen_at_any_of_that_kind():
    points = [point(asked(64), a=1.0, b=Measured(wrong="dq is off")), point(asked(1024), a=90.0, b=3.0)]
    found = said(points, asked(1024))
    assert [(one.backend, one.cost_us) for one in found.candidates] == [("a", 90.0), ("b", None)]
    assert found.candidates[1].trouble == "wrong: dq is off at B 2, 64 x 64, H 4"


def test_one_that_is_wrong_with_one_ratio_of_heads_may_be_chosen_with_another():
    shared = asked(heads_k=1)
    points = [point(a=9.0, b=Measured(wrong="off")), point(shared, a=9.0, b=3.0)]
    assert said(points, shared).candidates[0].backend == "b"
    assert said(points, asked(64)).candidates[0].backend == "a"


def test_one_that_is_wrong_with_shared_heads_is_not_chosen_with_ratios_that_were_not_measured():
    off = Measured(wrong="off")
    ratios = {n: asked(heads_q=16, heads_k=16 // n) for n in (1, 2, 4, 8, 16)}
    points = [point(ratios[1], a=1.0, b=9.0), *(point(ratios[n], a=off, b=9.0) for n in (4, 8))]
    chosen = {n: said(points, spec).candidates[0].backend for n, spec in ratios.items()}
    assert chosen == {1: "a", 2: "b", 4: "b", 8: "b", 16: "b"}


def test_of_points_that_differ_in_no_coordinate_the_call_itself_counts():
    near, far = asked(window=(8, 0)), asked(window=(64, 0))
    points = [point(near, a=1.0, b=2.0), point(far, a=9.0, b=3.0)]
    for ordered_points in (points, points[::-1]):
        assert costs(ordered_points, far) == {"b": 3.0, "a": 9.0}
        assert costs(ordered_points, near) == {"a": 1.0, "b": 2.0}


def test_a_backend_that_failed_where_the_call_is_nearest_is_not_chosen_there_but_elsewhere():
    failed = Measured(failed="OutOfMemoryError: no")
    points = [point(asked(64), a=9.0, b=1.0), point(asked(4096), a=90.0, b=failed)]
    assert said(points, asked(4000)).of("B").trouble == "failed: OutOfMemoryError: no"
    assert said(points, asked(80)).candidates[0].backend == "b"


# The order that comes of it


def ordered(default, able=None, **times):
    found = said([point(**times)], asked())
    return reordered(default, default if able is None else able, found)


def test_the_fastest_comes_first_and_the_others_by_their_times():
    assert ordered(["a", "b", "c"], a=30.0, b=20.0, c=10.0) == ["c", "b", "a"]


def test_a_difference_under_two_percent_does_not_change_the_default_order():
    assert ordered(["a", "b"], a=100.0, b=100.0 / (1 + MARGIN) + 0.01) == ["a", "b"]
    assert ordered(["a", "b"], a=100.0, b=100.0 / (1 + MARGIN) - 0.1) == ["b", "a"]


def test_of_several_within_two_percent_of_the_best_the_first_by_default_comes_first():
    assert ordered(["a", "b", "c"], a=110.0, b=100.0, c=99.0) == ["b", "c", "a"]


def test_the_default_that_is_spared_is_the_first_that_can_run_the_call():
    assert ordered(["x", "a", "b"], able=["a", "b"], x=500.0, a=100.0, b=99.5) == ["a", "b", "x"]


def test_a_backend_that_was_not_measured_keeps_its_place():
    assert ordered(["new", "a", "b", "math"], a=30.0, b=20.0) == ["new", "b", "a", "math"]


def test_what_was_wrong_or_failed_comes_after_everything_else():
    wrong, failed = Measured(wrong="off"), Measured(failed="Error")
    assert ordered(["a", "b", "c", "math"], a=wrong, b=failed, c=10.0) == ["c", "math", "a", "b"]


def test_with_nothing_right_the_default_order_of_the_unmeasured_stands():
    assert ordered(["a", "math"], a=Measured(wrong="off")) == ["math", "a"]
