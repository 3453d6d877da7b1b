"""On two GPUs or four, over NCCL: calls that are spread over ranks, against float64 of the whole batch."""

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
    count = 4 if torch.cuda.device_count() >= 4 else 2
    started = work.Ranks(count, tmp_path_factory.mktemp("ranks") / "store", "nccl")
    yield started
    started.close()


def assert_ran(counts, named):
    """All ranks ran both directions, and on no other backend."""
    for one in counts:
        assert set(one) == {named}
        assert min(one[named].values()) >= 1


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (200, 0)])
@pytest.mark.parametrize("method", METHODS)
def test_results_and_gradients_are_those_of_the_whole_batch(ranks, named, method, window):
    for how in ("contiguous", "zigzag", "balanced"):
        options = ON_GPU | {"how": how, "window": window, "backend": named, "with_lse": False}
        if (named, method, window, how) == OPEN_TO_THE_RIGHT and len(ranks) == 2:
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
    options = ON_GPU | {"heads": (8 * len(ranks), 4 * len(ranks)), "enough": 1}
    counts = ranks.run(
        work.compare, "all_to_all", DOCUMENTS, how="zigzag", window=(-1, 0), backend=named, with_lse=False,
        **options,
    )  # fmt: skip
    assert counts == [{named: {"forward": 4, "backward": 4}}] * len(ranks)


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
    assert found == [(found[0][0], rates, found[0][2])] * len(ranks)
    for name in ("flops", "link", "latency"):
        step = math.log2(getattr(rates, name) / getattr(usual, name))
        assert step.is_integer()
        assert abs(step) <= 3
    assert sum(found[0][2].values()) == 1


@pytest.mark.only_for("math")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled", "fsdp"])
def test_gradients_of_a_model_are_those_of_one_process(ranks, named, how, method):
    """In float32, which no other kernel takes."""
    for calls in ranks.run(spread_models.trained, how, method, "cuda"):
        assert calls[named]["backward"] >= 2


@pytest.mark.only_for("math")
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("method", METHODS)
def test_tensor_parallel_and_fsdp_share_a_mesh_of_four(ranks, named, method):
    for how in ("tensor parallel", "tensor parallel, fsdp"):
        for calls in ranks.run(spread_models.trained, how, method, "cuda"):
            assert calls[named]["backward"] >= 2


@pytest.mark.only_for("math")
def test_ranks_that_disagree_all_get_an_error_that_names_both(ranks, named):
    """None waits for the others: the next call, on which they agree, goes through."""
    last = len(ranks) - 1
    offsets = ranks.run(work.disagree, "cuda", cu_seq={last: [0, 6, 12]})
    heads = ranks.run(work.disagree, "cuda", heads={last: 2 * len(ranks)})
    backends = ranks.run(work.disagree, "cuda", backend={last: "efficient"})
    wrong = ranks.run(work.disagree, "cuda", softcap={last: -1.0})
    for said, names in (
        (offsets, ("(0, 5, 12)", "(0, 6, 12)")),
        (heads, (str(len(ranks)), str(2 * len(ranks)))),
        (backends, ("math", "efficient")),
        (wrong, ("softcap", "-1.0")),
    ):
        assert len(set(said)) == 1
        assert said[0].startswith("RanksDifferError")
        assert all(name in said[0] for name in (*names, f"rank {last}"))


@pytest.mark.only_for("FA2", "FA4", "cuDNN", "math")
def test_sdpa_of_dtensors_runs_on_each_ranks_heads(ranks, named):
    assert_ran(ranks.run(spread_models.sdpa_of_shards, named), named)


@pytest.mark.only_for("FA2", "FA4", "cuDNN", "math")
@pytest.mark.parametrize("rotation", ["alltoall", "allgather"])
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_torchs_own_context_parallel_runs_on_a_backend(ranks, named, kernel, rotation):
    assert_ran(ranks.run(spread_models.torchs_context_parallel, named, kernel, rotation), named)
