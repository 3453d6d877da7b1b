"""Promises of the look-up about a kernel's blocks: they compute whole tiles, and run in waves."""

import pytest
from support.tuned import point, spec_with

from attnreg.core.times.index import Kinds
from attnreg.core.times.kinds import SPREADS, kind_of, size_of, works
from attnreg.core.times.lookup import predict


def times(points, processors, **changes):
    found = predict(Kinds(points, (), processors), spec_with(**changes), "forward", "t")
    return {one.backend: one.gpu_us for one in found.candidates}


def test_one_query_takes_two_waves_where_there_is_one_block_more_than_multiprocessors():
    def one(batch, **took):
        return point(spec_with(batch=batch, max_q=1, max_k=8192, heads_q=4, heads_k=4), **took)

    # 33 x 4 blocks on 132 multiprocessors, and 66 x 4; the fixed cost is 10 us. Who shares the keys among all
    # multiprocessors has no waves.
    points = [
        one(33, waves=110.0, parts=110.0),
        one(66, waves=210.0, parts=210.0),
        one(17, waves=110.0, parts=10 + 100 * 17 / 33),
        one(50, waves=210.0, parts=10 + 100 * 50 / 33),
    ]
    found = times(points, 132, batch=34, max_q=1, max_k=8192, heads_q=4, heads_k=4)
    assert found == pytest.approx({"waves": 210.0, "parts": 10 + 100 * 34 / 33})


def test_a_few_queries_of_which_each_head_reads_the_keys_cost_by_query_heads_in_parts_as_well():
    def few(batch, heads_k, took):
        return point(spec_with(batch=batch, max_q=4, max_k=8192, heads_q=16, heads_k=heads_k), a=took)

    # As long with four key heads as with sixteen, and a batch of three takes three times one's.
    points = [few(1, 4, 110.0), few(3, 4, 310.0), few(1, 16, 110.0), few(3, 16, 310.0)]
    found = times(points, 132, batch=2, max_q=4, max_k=8192, heads_q=16, heads_k=2)
    assert found == pytest.approx({"a": 210.0})


def test_a_call_costs_whole_tiles_and_what_a_block_takes_before_its_first_key():
    def square(length, start):
        tiles = -(-length // 128) * 128
        # 2 sequences of 4 heads; 10 us are the fixed cost. On two multiprocessors all waves are full.
        return 10.0 + 1e-2 * (4 * tiles * tiles + start * (4 * tiles + 4 * length)) / 100

    lengths = (256, 512, 1024, 2048)
    points = [point(spec_with(n), short=square(n, 30), long=square(n, 300)) for n in lengths]
    for length in (300, 700, 1100):
        found = times(points, 2, max_q=length, max_k=length)
        assert found == pytest.approx({"short": square(length, 30), "long": square(length, 300)})


def test_without_a_mask_blocks_run_in_waves_and_under_a_causal_mask_they_fill_the_gaps():
    # Two sequences of four heads of two tiles are 16 blocks: one wave of 16 multiprocessors. Three are 24.
    def took_at(batch, causal):
        window = (-1, 0 if causal else -1)
        points = [point(spec_with(256, batch=2, window=window), a=110.0)]
        return times(points, 16, max_q=256, max_k=256, batch=batch, window=window)["a"]

    assert took_at(4, causal=False) == pytest.approx(210.0, rel=1e-2)
    assert took_at(3, causal=False) > 0.9 * took_at(4, causal=False)
    assert took_at(3, causal=True) == pytest.approx(160.0, rel=1e-2)


def worked(processors=10**6, **changes):
    """Return what a call costs whose blocks take 30 keys' time to start, in pairs of a query and a key."""
    spec = spec_with(**({"batch": 1, "heads_q": 1, "heads_k": 1} | changes))
    found = works(kind_of(spec, "forward"), size_of(spec), processors)[len(SPREADS)]
    read = -(-spec.max_q // 128) * 128 + spec.max_k
    return found / (2 * spec.head_dim + 1) - 30 * read


@pytest.mark.parametrize(
    ("sizes", "window", "pairs"),
    [
        ((256, 256), (-1, 0), 128 * 128 * 3),
        ((257, 257), (-1, 0), 128 * 128 * 6),
        ((128, 512), (-1, 0), 128 * 512),
        ((512, 1024), (100, 0), 512 * (101 + 128)),
        ((512, 256), (1000, 1000), 512 * 256),
    ],
)
def test_tiles_that_a_mask_leaves_are_whole_ones(sizes, window, pairs):
    assert worked(max_q=sizes[0], max_k=sizes[1], window=window) == pytest.approx(pairs)


def test_packed_sequences_have_half_full_last_tiles_and_no_waves_unless_they_are_of_one_length():
    ragged = {"varlen": True, "batch": 2, "max_q": 384, "max_k": 384, "tokens_q": 512, "tokens_k": 512}
    spec = spec_with(heads_q=1, heads_k=1, **ragged)
    found = works(kind_of(spec, "forward"), size_of(spec), 4)[len(SPREADS)] / (2 * spec.head_dim + 1)
    assert found == pytest.approx(2 * (320 * 320 + 30 * (320 + 256)))
    same = {"varlen": True, "batch": 3, "max_q": 128, "max_k": 128}
    packed, dense = (
        works(kind_of(one, "forward"), size_of(one), 4)[len(SPREADS)]
        for one in (
            spec_with(heads_q=1, heads_k=1, **same),
            spec_with(heads_q=1, heads_k=1, **same | {"varlen": False}),
        )
    )
    assert packed == dense


def test_on_a_cpu_and_among_calls_of_nearly_one_size_only_multiplications_count():
    points = [point(spec_with(128), a=110.0)]
    assert times(points, 1, max_q=129, max_k=128)["a"] == pytest.approx(110.0, rel=1e-2)
    assert times(points, 8, max_q=129, max_k=128)["a"] > 150.0


def test_a_call_without_heads_costs_something():
    spec = spec_with(heads_q=0, heads_k=1)
    assert all(work > 0 for work in works(kind_of(spec, "forward"), size_of(spec), 132)[len(SPREADS) :])


def test_what_is_kept_of_a_growth_serves_no_other():
    """Few queries and many have other growths; one table has predictions for both, in either order."""

    def looked_up(kinds, max_q):
        found = predict(kinds, spec_with(batch=3, max_q=max_q, max_k=3000), "forward", "t")
        return {one.backend: one.gpu_us for one in found.candidates}

    points = [
        point(spec_with(batch=batch, max_q=max_q, max_k=4096), a=100.0 * batch + max_q, b=90.0 * batch**2)
        for batch in (1, 2, 8)
        for max_q in (1, 4, 64, 512)
    ]
    alone = {max_q: looked_up(Kinds(points, (), 132), max_q) for max_q in (1, 3, 400)}
    for order in ((1, 3, 400), (400, 3, 1)):
        kinds = Kinds(points, (), 132)
        assert [looked_up(kinds, max_q) for max_q in order] == [alone[max_q] for max_q in order]
