"""On two GPUs, over NCCL: calls that are spread over ranks, each way, against float64 of the whole batch."""

import itertools
import math

import pytest
import torch
from support import rank_batches, spread_models
from support import ranks as work

from attnreg.parallel.estimates import Rates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

METHODS = ["all_to_all", "all_gather", "ring"]
DOCUMENTS = list(itertools.accumulate([0, 300, 5, 0, 1042, 64, 129, 700]))
ON_GPU = {"device": "cuda", "dtype": torch.bfloat16, "heads": (8, 4), "dims": (64, 64)}

# Here 200 queries of rank 0 see 140 keys of rank 1, limited by the left edge of the window: wrong on FA2.
OPEN_TO_THE_RIGHT = ("FA2", "ring", (200, 0), "zigzag")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = work.Ranks(2, tmp_path_factory.mktemp("ranks") / "store", "nccl")
    yield started
    started.close()


def assert_ran(counts, named):
    """Both ranks ran both directions, and on no other backend."""
    for one in counts:
        assert set(one) == {named}
        assert min(one[named].values()) >= 1


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (200, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_results_and_gradients_are_those_of_the_whole_batch(ranks, named, method, window):
    for how in ("contiguous", "zigzag", "balanced"):
        options = ON_GPU | {"how": how, "window": window, "backend": named, "with_lse": False}
        if (named, method, window, how) == OPEN_TO_THE_RIGHT:
            with pytest.raises(AssertionError, match="a window that is open to the right hides keys where"):
                ranks.run(work.compare, method, DOCUMENTS, **options)
            continue
        assert_ran(ranks.run(work.compare, method, DOCUMENTS, **options), named)


@pytest.mark.parametrize("method", METHODS)
def test_one_long_document_of_equal_heads(ranks, named, method):
    options = ON_GPU | {"heads": (4, 4), "dims": (128, 128)}
    counts = ranks.run(
        work.compare,
        method,
        [0, 2048],
        how="zigzag",
        window=(-1, 0),
        backend=named,
        with_lse=False,
        **options,
    )
    assert_ran(counts, named)


def test_groups_of_heads_travel_while_others_are_computed(ranks, named):
    options = ON_GPU | {"heads": (16, 8), "enough": 1}
    counts = ranks.run(
        work.compare, "all_to_all", DOCUMENTS, how="zigzag", window=(-1, 0), backend=named, with_lse=False,
        **options,
    )  # fmt: skip
    assert counts == [{named: {"forward": 4, "backward": 4}}] * 2


@pytest.mark.parametrize("method", METHODS)
def test_sinks_and_the_gradient_of_the_lse_pass_through(ranks, named, method):
    options = {"window": (-1, 0), "how": "balanced", "backend": named, "sinks": True}
    assert_ran(ranks.run(work.compare, method, DOCUMENTS, **options, **ON_GPU), named)


@pytest.mark.only_for("FA2")
def test_ranks_measure_their_link_before_their_first_call_and_agree(ranks, named):
    """Rounded to the defaults, of two H200s, times powers of two; no GPU is ten times slower or faster."""
    usual = Rates()
    found = ranks.run(rank_batches.measured_on_gpus, named)
    rates = found[0][1]
    assert found == [(found[0][0], rates, found[0][2])] * 2
    for name in ("flops", "link", "latency"):
        step = math.log2(getattr(rates, name) / getattr(usual, name))
        assert step.is_integer()
        assert abs(step) <= 3
    assert sum(found[0][2].values()) == 1


@pytest.mark.only_for("FA2", "FA4", "cuDNN", "math")
def test_sdpa_of_dtensors_runs_on_each_ranks_heads(ranks, named):
    assert_ran(ranks.run(spread_models.sdpa_of_shards, named), named)


@pytest.mark.only_for("FA2", "FA4", "cuDNN", "math")
@pytest.mark.parametrize("rotation", ["alltoall", "allgather"])
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_torchs_own_context_parallel_runs_on_a_backend(ranks, named, kernel, rotation):
    assert_ran(ranks.run(spread_models.torchs_context_parallel, named, kernel, rotation), named)
