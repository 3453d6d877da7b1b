"""Promises of the look-up: what a table says of a call that was measured, lies between points, or beyond."""

import dataclasses
import math
import random
from typing import NamedTuple

import pytest
from support.tuned import point, spec_with, took

from attnreg.core.selection.predictions import MARGIN, Candidate, Prediction, reordered
from attnreg.core.times.index import Kinds
from attnreg.core.times.kinds import (
    FEW,
    LONG,
    MANY,
    ONE,
    SHARED,
    coordinates,
    host_shapes_of,
    kind_of,
    size_of,
    work,
)
from attnreg.core.times.lookup import CALLS_PER_SHAPE, USUAL_HOST, predict, predict_both
from attnreg.core.times.points import Front, Measured


def said(points, spec, direction="forward"):
    return predict(Kinds(points), spec, direction, "measured table here.json")


def fastest(points, spec):
    return said(points, spec).candidates[0].backend


def costs(points, spec, direction="forward"):
    found = said(points, spec, direction)
    return None if found is None else {one.backend: one.cost_us for one in found.candidates}


# Where it was measured


def test_at_a_measured_point_the_times_are_those_measured():
    points = [point(spec_with(n), fast=took(n / 7, n / 9), slow=n / 3.0) for n in (64, 128, 256, 512, 1024)]
    found = said(points, spec_with(256))
    times = [(one.backend, one.gpu_us, one.host_us) for one in found.candidates]
    assert times == [("fast", 256 / 7, 256 / 9), ("slow", 256 / 3.0, 0.0)]
    assert [(source.size, source.distance) for source in found.points] == [("B 2, 256 x 256, H 4", 0.0)]
    assert found.notes == ()


def test_in_eager_the_larger_of_host_and_gpu_time_counts_and_in_a_graph_the_gpu_time():
    points = [point(a=took(10.0, 60.0), b=took(25.0, 15.0))]
    assert costs(points, spec_with()) == {"b": 25.0, "a": 60.0}
    assert list(costs(points, spec_with(capturing=True)).items()) == [("a", 10.0), ("b", 25.0)]


def test_what_a_new_shape_costs_first_is_shared_by_its_calls_but_not_in_a_graph():
    points = [point(a=took(10.0, 0.0, 0.5))]
    assert costs(points, spec_with())["a"] == pytest.approx(10.0 + 0.5e6 / CALLS_PER_SHAPE)
    assert costs(points, spec_with(capturing=True)) == {"a": 10.0}


# Between points


def test_between_points_a_time_rises_from_one_to_the_next_and_the_nearest_count_most():
    points = [
        point(spec_with(n), a=took) for n, took in ((128, 8.0), (256, 14.0), (512, 40.0), (1024, 150.0))
    ]
    found = [costs(points, spec_with(n))["a"] for n in range(128, 1025, 16)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (8.0, 150.0)
    points = [point(spec_with(128), a=10.0, b=20.0), point(spec_with(1024), a=800.0, b=400.0)]
    assert (fastest(points, spec_with(160)), fastest(points, spec_with(900))) == ("a", "b")


def test_the_nearest_points_are_found_among_many_as_by_looking_at_all():
    draw = random.Random(0)
    sizes = {(draw.randrange(1, 64), draw.randrange(1, 9000), draw.randrange(1, 9000)) for _ in range(600)}
    points = [point(spec_with(batch=b, max_q=q, max_k=k), a=1.0) for b, q, k in sizes]
    index = Kinds(points).index_for(points[0].kind, 100)
    for _ in range(50):
        at = tuple(draw.uniform(low, high) for low, high in zip(index.low, index.high, strict=True))
        every = sorted(math.dist(place.at, at) for place in index.places)
        assert [distance for distance, _ in index.nearest(at)] == pytest.approx(every[:8])


# What the fronts take


def test_backends_are_compared_by_the_points_that_know_them_all_where_most_do():
    whole = [point(spec_with(n), a=float(n), b=2.0 * n) for n in (64, 128, 512, 1024)]
    found = said(whole + [point(spec_with(n), b=1.0) for n in (250, 260)], spec_with(256))
    assert [one.backend for one in found.candidates] == ["a", "b"]
    assert all(source.point in whole for source in found.points)
    # Far from those, the points at hand count; and where most lack one, that rule would leave too little.
    for at_hand, length in (((16000, 17000), 16500), ((250, 255, 260, 270), 256)):
        assert fastest(whole + [point(spec_with(n), b=1.0) for n in at_hand], spec_with(length)) == "b"


def fronts_of(direction, varlen=False, compiled=False, **times):
    return [Front(name, varlen, direction, time, compiled) for name, time in times.items()]


def test_in_eager_a_call_takes_what_it_takes_through_its_front_where_that_was_measured():
    points = [point(a=took(10.0, 60.0), b=took(25.0, 15.0)), point(spec_with(), "backward", a=1.0, b=2.0)]
    fronts = [
        *fronts_of("forward", a=20.0, b=30.0),
        *fronts_of("forward", varlen=True, b=900.0),
        *fronts_of("backward", a=5.0, b=900.0),
    ]
    kinds = Kinds(points, fronts)

    def costs(direction="forward", **changes):
        found = predict(kinds, spec_with(**changes), direction, "t")
        return {one.backend: one.cost_us for one in found.candidates}

    assert USUAL_HOST > 1
    assert costs() == {"a": 20.0 * USUAL_HOST, "b": 30.0 * USUAL_HOST}
    assert costs(capturing=True) == {"a": 10.0, "b": 25.0}
    assert costs("backward") == {"a": 5.0 * USUAL_HOST, "b": 900.0 * USUAL_HOST}


def test_a_forward_alone_takes_what_it_takes_without_a_graph_where_that_was_measured():
    points = [point(a=took(1.0, 60.0), b=took(1.0, 15.0))]
    fronts = fronts_of("forward", a=20.0, b=30.0)
    alone = [one._replace(host_us=50.0 - one.host_us, recorded=False) for one in fronts]

    def first(fronts, needs_backward):
        spec = dataclasses.replace(spec_with(), needs_backward=needs_backward)
        found = predict(Kinds(points, fronts), spec, "forward", "t").candidates[0]
        return found.backend, pytest.approx(found.host_us)

    assert first(fronts + alone, True) == ("a", 20.0 * USUAL_HOST)
    assert first(fronts + alone, False) == ("b", 20.0 * USUAL_HOST)
    # In older tables there are none.
    assert first(fronts, False) == first(fronts + alone[:1], False) == ("a", 20.0 * USUAL_HOST)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (MANY, {"batch": 2, "max_q": 256, "max_k": 256}),  # one tile of keys
        (FEW, {"batch": 2, "max_q": 257, "max_k": 257}),
        (FEW, {"batch": 10, "max_q": 257, "max_k": 257}),
        (MANY, {"batch": 11, "max_q": 257, "max_k": 257}),  # as many blocks as a GPU runs at once
        (MANY, {"batch": 2, "max_q": 257, "max_k": 257, "varlen": True}),
        (FEW, {"batch": 2, "max_q": 129, "max_k": 129, "head_dim": 128}),
        (FEW, {"max_q": 4, "max_k": 9000}),
        (MANY + SHARED, {"batch": 2, "max_q": 256, "max_k": 256, "heads_k": 2}),
        (FEW + SHARED, {"batch": 2, "max_q": 257, "max_k": 257, "heads_k": 2}),
        (ONE, {"max_q": 1, "max_k": 100}),
        (ONE, {"max_q": 1, "max_k": 512}),
        (LONG, {"max_q": 1, "max_k": 513}),
        (LONG, {"batch": 16, "max_q": 1, "max_k": 513}),
        (ONE, {"batch": 17, "max_q": 1, "max_k": 513}),  # a block for half of the multiprocessors
        (LONG, {"batch": 17, "max_q": 1, "max_k": 513, "heads_k": 2}),  # its heads share blocks
        (MANY, {"max_q": 1, "max_k": 513, "varlen": True}),
    ],
)
def test_a_call_launches_the_kernels_of_one_of_the_shapes_whose_host_times_are_measured(shape, changes):
    spec = spec_with(**changes)
    assert host_shapes_of(kind_of(spec, "forward"), size_of(spec))[0] == shape


def test_the_host_time_of_a_call_is_that_of_its_shape_or_else_of_many_queries():
    decoding = spec_with(max_q=1, max_k=4096, needs_backward=False)
    kinds = [point(spec, a=took(1.0, 60.0), b=took(1.0, 15.0)) for spec in (spec_with(), decoding)]
    many = fronts_of("forward", a=20.0, b=30.0)
    long = [one._replace(host_us=50.0 - one.host_us, recorded=False, shape=LONG) for one in many]

    def first(fronts, spec):
        found = predict(Kinds(kinds, fronts), spec, "forward", "t").candidates[0]
        return found.backend, pytest.approx(found.host_us)

    assert first(many + long, decoding) == ("b", 20.0 * USUAL_HOST)
    assert first(many + long, spec_with()) == first(many, decoding) == ("a", 20.0 * USUAL_HOST)
    assert first(many + long[:1], decoding) == ("a", 20.0 * USUAL_HOST)


def test_a_backend_without_a_time_of_a_shape_does_not_keep_the_others_from_theirs():
    """As one that can't run calls whose heads share keys, by which decoding is measured."""
    decoding = spec_with(max_q=1, max_k=4096, needs_backward=False)
    points = [point(decoding, a=took(1.0, 60.0), b=took(1.0, 15.0), c=took(1.0, 15.0))]
    many = [one._replace(recorded=False) for one in fronts_of("forward", a=20.0, b=30.0, c=40.0)]
    long = [one._replace(host_us=50.0 - one.host_us, shape=LONG) for one in many[:2]]
    found = predict(Kinds(points, many + long), decoding, "forward", "t").candidates
    assert [(one.backend, one.host_us) for one in found] == [
        (name, pytest.approx(host * USUAL_HOST)) for name, host in (("b", 20.0), ("a", 30.0), ("c", 40.0))
    ]


def test_the_host_time_of_shared_heads_is_their_own_or_else_that_of_such_a_shape_without_them():
    points = [point(a=took(1.0, 60.0), b=took(1.0, 15.0))]
    few = [one._replace(shape=FEW) for one in fronts_of("forward", a=30.0, b=25.0)]
    shared = [one._replace(shape=FEW + SHARED) for one in fronts_of("forward", a=21.0, b=22.0)]
    many = fronts_of("forward", a=20.0, b=40.0)

    def first(fronts):
        spec = spec_with(batch=2, max_q=257, max_k=257, heads_k=2)
        found = predict(Kinds(points, fronts), spec, "forward", "t").candidates[0]
        return found.backend, pytest.approx(found.host_us)

    assert first(many + few + shared) == ("a", 21.0 * USUAL_HOST)
    assert first(many + few) == ("b", 25.0 * USUAL_HOST)
    assert first(many) == ("a", 20.0 * USUAL_HOST)


class Far(NamedTuple):
    """A source of a prediction, at a distance in powers of two."""

    distance: float
    size: str = ""
    itself: bool = False


def level_order(a, b, both=None, distances=()):
    """Return the first of two backends, by GPU and host times; `both` are costs with a gradient."""
    candidates = [
        Candidate(name, max(times), *times, both_us=cost, by_host=times[1] > times[0])
        for name, times, cost in zip("ab", (a, b), both or (None, None), strict=True)
    ]
    prediction = Prediction("t", tuple(candidates), tuple(map(Far, distances)))
    return reordered(["a", "b"], {"a", "b"}, prediction)[0]


def test_of_backends_that_take_as_long_the_first_takes_the_host_least_or_with_a_gradient_is_the_default():
    assert level_order((100.0, 30.0), (101.0, 20.0)) == "b"
    assert level_order((100.0, 20.0), (99.0, 30.0)) == "a"
    assert level_order((10.0, 40.5), (40.0, 20.0)) == "b"  # a slower host would make it 80
    assert level_order((40.0, 20.0), (10.0, 40.5)) == "a"
    assert level_order((100.0, 30.0), (103.0, 20.0)) == "a"  # not as fast
    assert level_order((100.0, 30.0), (101.0, 20.0), both=(300.0, 299.0)) == "a"
    assert level_order((100.0, 30.0), (101.0, 20.0), both=(300.0, 290.0)) == "b"


def test_far_from_measured_calls_a_backend_that_takes_the_host_less_needs_a_larger_lead_to_lose():
    for distances, first in (((), "a"), ((0.5, 2.0), "a"), ((0.9, 2.0), "b"), ((2.0,), "b")):
        assert level_order((100.0, 30.0), (106.5, 20.0), distances=distances) == first
    far = (9.0,)
    assert level_order((100.0, 30.0), (109.0, 20.0), distances=far) == "b"
    assert level_order((100.0, 30.0), (111.0, 20.0), distances=far) == "a"  # at most a tenth is chance
    assert level_order((106.5, 20.0), (100.0, 30.0), distances=far) == "a"
    # It has to take the host less, and the GPU no longer: on a fast host the first takes 12.
    assert level_order((100.0, 30.0), (106.5, 30.0), distances=far) == "a"
    assert level_order((12.0, 39.0), (42.0, 20.0), distances=far) == "a"
    assert level_order((100.0, 30.0), (106.5, 20.0), both=(300.0, 320.0), distances=far) == "a"


def test_in_a_cuda_graph_the_host_orders_nothing():
    points = [point(a=took(100.0, 30.0), b=took(101.0, 20.0)), point(spec_with(64), a=took(9.0, 30.0), b=9.0)]
    for capturing, length, first in ((False, 256, "b"), (True, 256, "a"), (True, 900, "a")):
        spec = dataclasses.replace(spec_with(length), capturing=capturing)
        found = said(points, spec)
        assert reordered(["a", "b"], {"a", "b"}, found)[0] == first
        assert [one.host_us for one in found.candidates] == [0.0, 0.0] or not capturing


def test_of_times_on_the_device_two_percent_count_also_in_a_capture():
    points = [point(a=took(105.0, 100.0), b=took(100.0, 100.0))]
    for capturing in (False, True):
        found = predict(Kinds(points), dataclasses.replace(spec_with(), capturing=capturing), "forward", "t")
        assert reordered(["a", "b"], {"a", "b"}, found)[0] == "b"


def test_host_times_of_fronts_count_only_if_every_candidate_has_one_best_with_compiled_routers():
    points = [point(a=took(1.0, 60.0), b=took(1.0, 15.0))]
    python = fronts_of("forward", a=20.0, b=30.0)
    fast = fronts_of("forward", compiled=True, a=19.0, b=10.0)

    def first(fronts, compiled):
        found = predict(Kinds(points, fronts), spec_with(), "forward", "t", compiled)
        return found.candidates[0].backend, pytest.approx(found.candidates[0].host_us)

    assert first(python + fast, False) == ("a", 20.0 * USUAL_HOST)
    assert first(python + fast, True) == ("b", 10.0 * USUAL_HOST)
    assert first(python + fast[:1], True) == ("a", 20.0 * USUAL_HOST)
    assert first(python[1:], False) == ("b", 15.0)  # that of the kernels' functions


# Beyond the measured range


def test_outside_the_measured_range_the_nearest_edge_decides_and_that_is_said():
    points = [point(spec_with(n), a=n / 10.0, b=n / 5.0) for n in (256, 1024)]
    outside = "outside the measured range, its edge decides: "
    found = said(points, spec_with(4096))
    assert found.candidates[0].backend == "a"
    assert found.candidates[0].cost_us > 102.4
    assert found.notes == (f"{outside}max_q 4096 is above 1024", f"{outside}max_k 4096 is above 1024")
    assert found.points[0].size == "B 2, 1024 x 1024, H 4"
    assert found.points[0].distance == pytest.approx(8**0.5)
    below = ("batch x heads 4 is below 8", "max_q 64 is below 256", "max_k 64 is below 256")
    assert said(points, spec_with(64, batch=1)).notes == tuple(outside + what for what in below)
    shared = said(points, spec_with(256, heads_k=1))
    assert shared.notes == (f"{outside}heads for each key head 4 is above 1",)


# Another kind


@pytest.mark.parametrize(
    "changes",
    [
        {"window": (-1, 0)}, {"window": (8, 0)}, {"varlen": True}, {"dtype": "float32"},
        {"head_dim": 128, "head_dim_v": 128}, {"dropout": 0.1}, {"alibi": True},
        {"seqused_k": True}, {"page_size": 16}, {"num_splits": 2}, {"softcap": 9.0}, {"batch": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_table_has_no_opinion_on_another_mask_layout_precision_option_or_larger_head_dim(changes):
    assert said([point(a=1.0)], spec_with(**changes)) is None


@pytest.mark.parametrize(
    "changes", [{"dtype": "float16"}, {"head_dim": 48, "head_dim_v": 48}, {"bias": True}], ids=str
)
def test_the_other_half_precision_larger_head_dims_and_calls_without_a_bias_stand_in(changes):
    found = said([point(a=100.0, b=200.0)], spec_with(**changes))
    assert [one.backend for one in found.candidates] == ["a", "b"]
    assert found.notes[0].startswith("nothing of this kind was measured; these are of bfloat16, head dim 64")


def test_of_several_kinds_that_stand_in_the_nearest_does():
    points = [point(spec_with(head_dim=d, head_dim_v=d), a=float(d)) for d in (64, 96, 128)]
    points.append(point(spec_with(head_dim=96, head_dim_v=80), a=1.0))
    assert "head dim 96/80," in said(points, spec_with(head_dim=80, head_dim_v=80)).notes[0]


def test_the_ratio_of_heads_is_one_more_direction_in_which_a_point_may_be_near():
    by_ratio = [point(spec_with(heads_q=16, heads_k=n), a=took, b=10.0) for n, took in ((16, 30.0), (2, 3.0))]
    assert [fastest(by_ratio, spec_with(heads_q=16, heads_k=n)) for n in (4, 8)] == ["a", "b"]
    near_8 = said(by_ratio, spec_with(heads_q=16, heads_k=4))
    assert near_8.notes == ()
    assert [(source.size, source.distance) for source in near_8.points] == [
        ("B 2, 256 x 256, H 16, 8:1 heads", 0.5),
        ("B 2, 256 x 256, H 16, 1:1 heads", 1.0),
    ]


def test_the_host_takes_what_it_mostly_takes_but_at_a_measured_point_what_it_took_there():
    points = [point(spec_with(n), a=took(1.0, host)) for n, host in ((64, 20.0), (256, 22.0), (1024, 300.0))]
    assert (costs(points, spec_with(512)), costs(points, spec_with(1024))) == ({"a": 22.0}, {"a": 300.0})


def test_a_deterministic_backward_is_a_kind_of_its_own_and_a_deterministic_forward_is_not():
    points = [point(a=1.0), point(spec_with(), "backward", a=1.0)]
    assert said(points, spec_with(deterministic=True)) is not None
    assert said(points, spec_with(deterministic=True), "backward") is None


# Work and place


def test_work_grows_with_every_size_and_masks_take_some_away():
    def amount(*length, **changes):
        spec = spec_with(*length, **changes)
        return work(kind_of(spec, "forward"), size_of(spec))

    for changes in ({"batch": 4}, {"max_q": 512}, {"max_k": 512}, {"heads_q": 8, "heads_k": 8}):
        assert amount(**changes) > amount()
    assert amount(1024, window=(16, 0)) < amount(1024, window=(-1, 0)) < amount(1024)


@pytest.mark.parametrize(
    "changes",
    [{"max_q": 0}, {"max_k": 0}, {"max_q": 9, "max_k": 4, "window": (-1, 0)}, {"batch": 0}],
    ids=str,
)
def test_odd_sizes_have_a_place_and_some_work(changes):
    spec = spec_with(**changes)
    kind = kind_of(spec, "forward")
    assert all(map(math.isfinite, coordinates(kind, size_of(spec))))
    assert work(kind, size_of(spec)) > 0


# Wrong and failing backends


def test_a_backend_that_is_wrong_at_one_size_is_not_chosen_at_any_of_that_kind():
    points = [
        point(spec_with(64), a=1.0, b=Measured(wrong="dq is off")),
        point(spec_with(1024), a=90.0, b=3.0),
    ]
    found = said(points, spec_with(1024))
    assert [(one.backend, one.cost_us) for one in found.candidates] == [("a", 90.0), ("b", None)]
    assert found.candidates[1].trouble == "wrong: dq is off at B 2, 64 x 64, H 4"


def test_one_that_is_wrong_with_shared_heads_is_not_chosen_with_ratios_that_were_not_measured():
    off = Measured(wrong="off")
    ratios = {n: spec_with(heads_q=16, heads_k=16 // n) for n in (1, 2, 4, 8, 16)}
    points = [point(ratios[1], a=1.0, b=9.0), *(point(ratios[n], a=off, b=9.0) for n in (4, 8))]
    chosen = {n: fastest(points, spec) for n, spec in ratios.items()}
    assert chosen == {1: "a", 2: "b", 4: "b", 8: "b", 16: "b"}


def test_of_points_that_differ_in_no_coordinate_the_call_itself_counts():
    near, far = spec_with(window=(8, 0)), spec_with(window=(64, 0))
    points = [point(near, a=1.0, b=2.0), point(far, a=9.0, b=3.0)]
    for ordered_points in (points, points[::-1]):
        assert costs(ordered_points, far) == {"b": 3.0, "a": 9.0}
        assert costs(ordered_points, near) == {"a": 1.0, "b": 2.0}


def test_a_backend_that_failed_where_the_call_is_nearest_is_not_chosen_there_but_elsewhere():
    failed = Measured(failed="OutOfMemoryError: no")
    points = [point(spec_with(64), a=9.0, b=1.0), point(spec_with(4096), a=90.0, b=failed)]
    assert said(points, spec_with(4000)).of("B").trouble == "failed: OutOfMemoryError: no"
    assert fastest(points, spec_with(80)) == "b"


# The order that comes of it


WRONG, FAILED = Measured(wrong="off"), Measured(failed="Error")
JUST_FASTER, FASTER = 100.0 / (1 + MARGIN) + 0.01, 100.0 / (1 + MARGIN) - 0.1
ORDERS = {
    "the fastest first": ("a b c", {"a": 30.0, "b": 20.0, "c": 10.0}, "c b a"),
    "under two percent": ("a b", {"a": 100.0, "b": JUST_FASTER}, "a b"),
    "over two percent": ("a b", {"a": 100.0, "b": FASTER}, "b a"),
    "of those as fast as the best the first by default": (
        "a b c", {"a": 110.0, "b": 100.0, "c": 99.0}, "b c a",
    ),
    "one that was not measured keeps its place": (
        "new a b math", {"a": 30.0, "b": 20.0}, "new b a math",
    ),
    "wrong and failed ones last": ("a b c math", {"a": WRONG, "b": FAILED, "c": 10.0}, "c math a b"),
    "nothing right": ("a math", {"a": WRONG}, "math a"),
    "the default that is spared can run the call": (
        "(x) a b", {"x": 500.0, "a": 100.0, "b": 99.5}, "a b x",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("default", "times", "order"), ORDERS.values(), ids=ORDERS)
def test_the_order_is_that_of_times_where_they_differ_by_more_than_chance(default, times, order):
    able = [name for name in default.split() if "(" not in name]
    names = [name.strip("()") for name in default.split()]
    assert reordered(names, able, said([point(**times)], spec_with())) == order.split()


# Forward and backward together


def ranked_for_both(forward, backward):
    """Return the first choice for each direction of a call whose gradient is wanted."""
    kinds = Kinds([point(**forward), point(spec_with(), "backward", **backward)])
    found = predict_both(kinds, spec_with(needs_backward=True), "t")
    able = {"forward": set(forward), "backward": set(backward)}
    ranked = {one: reordered([*forward], able[one], found[one]) for one in able}
    return tuple(next(name for name in ranked[one] if name in able[one]) for one in able)


@pytest.mark.parametrize(
    ("forward", "backward", "chosen"),
    [
        ({"a": 10.0, "b": 12.0}, {"a": 60.0, "b": 50.0}, ("b", "b")),
        ({"a": 10.0, "b": 30.0}, {"a": 60.0, "b": 50.0}, ("a", "a")),
        # Within chance of the best in the sum, though not in the forward, is the first by default.
        ({"a": 11.0, "b": 10.0}, {"a": 60.0, "b": 60.0}, ("a", "a")),
        # One without a backward leaves it to the one that is chosen for the backward.
        ({"a": 10.0, "b": 30.0, "c": 19.0}, {"b": 55.0, "c": 60.0}, ("a", "c")),
        ({"a": 10.0, "b": 30.0, "c": 7.0}, {"b": 55.0, "c": 60.0}, ("c", "c")),
        ({"a": 10.0, "b": 30.0}, {"a": Measured(wrong="dq"), "b": 50.0}, ("a", "b")),
        ({"a": Measured(failed="boom"), "b": 30.0}, {"a": 10.0, "b": 50.0}, ("b", "a")),
        # Of the hosts' times a lead of less than a twentieth in the sum is chance, too.
        (
            {"a": took(1.0, 21.0), "b": took(1.0, 20.0)},
            {"a": took(9.0, 83.0), "b": took(9.0, 80.0)},
            ("a", "a"),
        ),
        (
            {"a": took(1.0, 21.0), "b": took(1.0, 20.0)},
            {"a": took(9.0, 86.0), "b": took(9.0, 80.0)},
            ("b", "b"),
        ),
    ],
)
def test_where_a_gradient_is_wanted_the_backend_that_takes_least_for_both_directions_runs_both(
    forward, backward, chosen
):
    assert ranked_for_both(forward, backward) == chosen


def test_both_directions_are_ranked_together_where_the_forward_alone_has_an_option():
    given = spec_with(num_splits=1, needs_backward=True)
    kinds = Kinds(
        [
            point(spec_with(num_splits=1), a=100.0, b=120.0),
            point(spec_with(), "backward", a=500.0, b=200.0),
        ]
    )
    found = predict_both(kinds, given, "t")
    assert [found[one].candidates[0].backend for one in ("forward", "backward")] == ["b", "b"]


def test_without_times_of_the_other_direction_each_is_ranked_by_its_own():
    found = predict_both(Kinds([point(a=20.0, b=10.0)]), spec_with(needs_backward=True), "t")
    assert [one.backend for one in found["forward"].candidates] == ["b", "a"]
    assert found["backward"] is None and found["forward"].candidates[0].both_us is None


@pytest.mark.parametrize(
    ("able", "building", "gpu_us", "expected"),
    [
        ("cudnn efficient math", {"cudnn"}, 60.0, "efficient"),
        ("cudnn efficient math", {"cudnn"}, 9000.0, "cudnn"),  # building is a small part
        ("cudnn efficient math", set(), 60.0, "cudnn"),  # shapes come again
        ("cudnn math", {"cudnn"}, 60.0, "cudnn"),  # math is slow without a limit
        ("fa2 cudnn efficient math", {"cudnn"}, 60.0, "fa2"),  # it was measured, and builds nothing
    ],
)
def test_an_unmeasured_backend_goes_before_one_that_builds_for_longer(able, building, gpu_us, expected):
    seconds = 0.05 if building else 0.0
    cudnn = Candidate("cuDNN", gpu_us + seconds * 1e6, gpu_us, 30.0, seconds)
    prediction = Prediction("a table", (Candidate("FA2", 200.0, 200.0), cudnn), building=frozenset(building))
    default = ["fa2", "cudnn", "efficient", "math", "flex"]
    order = reordered(default, {*able.split(), "flex"}, prediction)
    assert next(name for name in order if name in able.split()) == expected
    assert sorted(order) == sorted(default)
