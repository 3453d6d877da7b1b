"""Promises of calls spread over 2 and 3 processes: each way gives what the whole batch gives."""

import itertools

import pytest
from support import ranks as work

METHODS = ["all_to_all", "all_gather", "ring"]
BATCH = list(itertools.accumulate([0, 5, 0, 32, 3, 21]))
WINDOWS = [(-1, 0), (-1, -1), (7, 0), (3, 2)]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    started = work.Ranks(request.param, tmp_path_factory.mktemp("ranks") / "store")
    yield started
    started.close()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("method", METHODS)
def test_results_and_gradients_are_those_of_the_whole_batch(ranks, method, window):
    heads = 2 * len(ranks)
    for how in ("contiguous", "zigzag", "balanced"):
        ran = ranks.run(work.compare, method, BATCH, how=how, window=window, heads=(heads, heads // 2))
        assert all(set(one) <= {"math"} for one in ran)
        assert sum(one["math"]["backward"] for one in ran if one) >= len(ranks) - 1
