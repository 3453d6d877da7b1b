"""On a GPU: offsets that are written to between calls, also where torch doesn't count the write."""

import time

import pytest
import torch
import torch.distributed as dist
from support import gpu, truth

import attnreg
from attnreg.core.dispatch import call_cache

pytestmark = pytest.mark.gpu

FIRST = (300, 5, 0, 42)
REORDERED = (42, 300, 5, 0)
SHORTER = (300, 1, 1, 10)  # leaves rows to no sequence


def test_results_follow_offsets_that_are_changed_in_place(named):
    given = gpu.packed((300, 5, 0, 42))
    gpu.run(gpu.on(named), given)
    torch.cuda.synchronize()  # the device has reported on the old ones
    for lengths in ((42, 300, 5, 0), (300, 1, 1, 10)):  # the second leaves rows to no sequence
        given.cu_seqlens_q.copy_(gpu.offsets_of(lengths))
        gpu.assert_near(gpu.run(gpu.on(named), given), gpu.expected(given)[0])


def test_results_follow_offsets_in_an_inference_tensor(named):
    with torch.inference_mode():
        given = gpu.packed((300, 5, 0, 42), grad=False)
        for lengths in ((300, 5, 0, 42), (42, 300, 5, 0), (300, 1, 1, 10)):
            given.cu_seqlens_q.copy_(gpu.offsets_of(lengths))
            out = attnreg.varlen_attn(*given, backend=named)
            torch.cuda.synchronize()
            right, _ = truth.varlen(*(x.cpu() for x in given.qkv), *[given.cu_seqlens_q.cpu()] * 2)
            truth.assert_near(out.cpu(), right, gpu.BF16)


# ---- writes that torch doesn't count


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_data(offsets, new):
    return lambda: offsets.data.copy_(new)


def by_a_collective(offsets, new):
    return lambda: dist.all_gather_into_tensor(offsets, new)


def by_a_replay(offsets, new):
    before, graph = offsets.clone(), torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events meanwhile, in a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        offsets.copy_(new)
    offsets.copy_(before)
    return lambda: (graph.replay(), new)  # which the graph reads


WRITES = pytest.mark.parametrize("prepare", [by_data, by_a_collective, by_a_replay])


def written(named, prepare, lengths):
    """Return inputs of which calls know the offsets, which then get others, and `varlen_attn`."""
    given, front = gpu.packed(FIRST), gpu.on(named)
    write = prepare(given.cu_seqlens_q, gpu.offsets_of(lengths))
    for _ in range(3):
        gpu.run(front, given)
        torch.cuda.synchronize()  # the device has reported on them
    version = given.cu_seqlens_q._version
    write()
    assert given.cu_seqlens_q._version == version
    return given, front


def finds_a_write(named, lengths):
    """Whether something known of the old offsets isn't so of the new ones, and calls of a backend use it.

    cuDNN's kernels read lengths that were derived. Whether every row sees a key the call cache knows, and FA4
    without it. All else reads the offsets at each call.
    """
    knows_rows = call_cache.load() is not None or named == "FA4"
    return named == "cuDNN" or (knows_rows and lengths == SHORTER)


@WRITES
@pytest.mark.parametrize("lengths", [SHORTER, REORDERED])
def test_calls_with_the_old_offsets_are_an_error_and_those_after_it_are_right(
    named, prepare, lengths, nccl, trust_offsets
):
    trust_offsets(0.0)
    given, front = written(named, prepare, lengths)
    errors = []
    for _ in range(5):
        try:
            got = gpu.run(front, given)
        except attnreg.InvalidInputError as error:
            errors.append(str(error))
        torch.cuda.synchronize()
    assert ["increment_version" in error for error in errors] == [True] * finds_a_write(named, lengths)
    gpu.assert_near(got, gpu.expected(given)[0])


@pytest.mark.only_for("FA2", "FA4", "cuDNN")
def test_a_write_is_found_with_the_times_of_the_default(named, trust_offsets):
    trust_offsets(0.05)  # as long as the product; a run of tests sets an hour
    given, front = written(named, by_data, SHORTER)
    errors = []
    # One of the first two has the device look at the offsets again. The next one sees the answer.
    for _ in range(4):
        time.sleep(0.2)
        try:
            gpu.run(front, given)
        except attnreg.InvalidInputError as error:
            errors.append(str(error))
        torch.cuda.synchronize()
    assert ["increment_version" in error for error in errors] == [True] * finds_a_write(named, SHORTER)
    gpu.assert_near(gpu.run(front, given), gpu.expected(given)[0])


@WRITES
def test_a_write_that_is_reported_is_followed_at_once(named, prepare, nccl):
    for lengths in (SHORTER, REORDERED):
        given, front = written(named, prepare, lengths)
        torch.autograd.graph.increment_version(given.cu_seqlens_q)
        gpu.assert_near(gpu.run(front, given), gpu.expected(given)[0])
