"""Promises of the look-up about a kernel's blocks: they compute whole tiles, and run in waves."""

import pytest
from support.tuned import point, spec_with

from attnreg.tuning.index import Kinds
from attnreg.tuning.lookup import predict


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
        # 2 sequences of 4 heads; 10 us are the fixed cost. On one multiprocessor waves are of one block.
        return 10.0 + 1e-2 * (4 * tiles * tiles + start * (4 * tiles + 4 * length)) / 100

    lengths = (256, 512, 1024, 2048)
    points = [point(spec_with(n), short=square(n, 30), long=square(n, 300)) for n in lengths]
    for length in (300, 700, 1100):
        found = times(points, 1, max_q=length, max_k=length)
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
