"""Promises of the look-up about few queries: a call takes as long as its kernel spreads them over a GPU."""

import dataclasses
from pathlib import Path

import pytest
from support.tuned import point, spec_with

import attnreg
from attnreg.core.contract.spec import AttentionSpec, Device
from attnreg.core.times import tables
from attnreg.core.times.index import Kinds
from attnreg.core.times.lookup import predict
from attnreg.core.times.table import load


def fastest(points, spec):
    return predict(Kinds(points), spec, "forward", "a table").candidates[0].backend


def test_a_few_queries_are_compared_by_points_with_as_few_of_a_larger_head_dim_if_there_are_none_of_theirs():
    wide = {"head_dim": 128, "head_dim_v": 128}
    points = [
        point(spec_with(), a=1.0, b=2.0),
        point(spec_with(**wide), a=1.0, b=2.0),
        point(spec_with(max_q=1, **wide), a=2.0, b=1.0),
    ]
    assert fastest(points, spec_with(max_q=4)) == fastest(points, spec_with(max_q=16)) == "b"
    assert fastest(points, spec_with(max_q=17)) == "a"
    assert fastest(points[:2], spec_with(max_q=4)) == "a"  # nobody has any


def test_a_block_that_reads_all_keys_takes_as_long_with_few_others_as_with_many():
    def took_at(batch, processors, **changes):
        kinds = Kinds([point(spec_with(max_q=1, max_k=4096, **changes), a=1000.0)], (), processors)
        found = predict(kinds, spec_with(max_q=1, max_k=4096, batch=batch, **changes), "forward", "t")
        return round(found.candidates[0].gpu_us)

    # Of the point's 1000 us, 10 are a fixed cost. It has 2 x 4 blocks, or 2 x 1 with one key head.
    assert took_at(1, processors=100) == took_at(25, processors=100) == 1000
    assert took_at(50, processors=100) == 10 + 2 * 990
    assert took_at(50, processors=100, heads_k=1) == 1000
    assert took_at(1, processors=1) == round(10 + 990 / 2)


def test_a_few_queries_take_as_long_as_the_way_in_which_a_backends_points_say_that_it_spreads_them():
    def few(batch, **times):
        return point(spec_with(batch=batch, max_q=4, max_k=4096, heads_q=16, heads_k=4), **times)

    # On 64 multiprocessors, with a fixed cost of 10 us. 16 sequences have 64 key heads and 256 query heads.
    spreads = {"key_heads": (100.0, 100.0), "query_heads": (100.0, 370.0), "parts": (100.0, 1450.0)}
    points = [
        few(batch, **{name: two[i] for name, two in spreads.items()}) for i, batch in enumerate((1, 16))
    ]
    kinds = Kinds(points, (), 64)

    def at(batch, **changes):
        spec = spec_with(batch=batch, max_q=4, max_k=4096, heads_q=16, heads_k=4, **changes)
        return {one.backend: one.gpu_us for one in predict(kinds, spec, "forward", "t").candidates}

    assert at(8) == pytest.approx({"key_heads": 100.0, "query_heads": 190.0, "parts": 730.0})
    # Points of another head dim have learned it for those of which one size was measured.
    other = [
        *points,
        point(spec_with(batch=1, max_q=4, max_k=4096, heads_q=16, heads_k=4, head_dim=32), parts=50.0),
    ]
    kinds = Kinds(other, (), 64)
    assert at(16, head_dim=32) == pytest.approx({"parts": 10.0 + 40.0 * 16})


@pytest.mark.parametrize("name", ["nvidia-h200", "nvidia-h100-80gb-hbm3"])
def test_packed_calls_of_few_queries_are_not_predicted_by_points_of_many(name):
    """The tables that ship with attnreg have no packed points of few queries: the default order decides."""
    path = Path(attnreg.__file__).parent / "core" / "times" / "shipped" / f"{name}.json"
    kinds = tables.Named(load(path)).kinds
    spec = AttentionSpec(
        device=Device("cuda", (9, 0)), dtype="bfloat16", batch=8, max_q=1, max_k=600, heads_q=32, heads_k=8,
        head_dim=128, head_dim_v=128, tokens_q=8, tokens_k=4800, varlen=True, needs_backward=False,
    )  # fmt: skip
    assert predict(kinds, spec, "forward", "shipped") is None
    many = dataclasses.replace(spec, max_q=600, tokens_q=4800)
    assert predict(kinds, many, "forward", "shipped").candidates != ()
    dense = dataclasses.replace(spec, varlen=False)
    assert predict(kinds, dense, "forward", "shipped").candidates != ()
