"""Promises to models whose tokens are spread: checkpointing, torch.compile, FSDP2 and tensor parallelism."""

import pytest
from support import spread_models as work
from support.ranks import Ranks

METHODS = ["all_to_all", "all_gather", "ring"]


# Each method with what is around it; a graph takes seconds.
AROUND = [
    pytest.param(how, method, marks=[pytest.mark.slow] * (how == "compiled"))
    for how in ("plain", "checkpointed", "compiled", "fsdp")
    for method in METHODS
]


@pytest.mark.parametrize(("how", "method"), AROUND)
def test_gradients_of_a_model_are_those_of_one_process(two_ranks, how, method):
    for calls in two_ranks.run(work.trained, how, method):
        assert sum(count["backward"] for count in calls.values()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_model_of_transformers_takes_the_offsets_of_the_whole_batch(two_ranks, method):
    for calls in two_ranks.run(work.llama, method):
        assert sum(count["backward"] for count in calls.values()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_tensor_parallel_and_fsdp_share_a_mesh_with_it(tmp_path, method):
    started = Ranks(4, tmp_path / "store")
    try:
        started.run(work.trained, "tensor parallel", method)
        started.run(work.trained, "tensor parallel, fsdp", method)
    finally:
        started.close()
