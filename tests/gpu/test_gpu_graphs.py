"""On a GPU: CUDA graphs, no wait for the GPU, no memory to speak of, few plans."""

import gc
import random
import time

import pytest
import torch
from support import gpu
from support.launchers import packed_arguments

from attnreg.backends import cudnn
from attnreg.backends.cudnn import rounding
from attnreg.backends.fa2 import native
from attnreg.backends.fa4 import compiled_kinds
from attnreg.core import registry
from attnreg.core.contract.backend import Call
from attnreg.core.launching.launchers import OpLauncher
from attnreg.core.torchlib.readback import AsyncReadback
from attnreg.errors import UnsupportedInputError

pytestmark = pytest.mark.gpu


def training_step(named, given):
    """Return a function that returns an output and gradients; the gradient that comes in is drawn before."""
    grad = gpu.incoming(given.query)

    def step():
        out = gpu.on(named)(*given)
        return [out.detach(), *torch.autograd.grad(out, given.qkv, grad)]

    return step


def allocated():
    """Return the bytes of tensors on the GPU; what cuBLAS keeps of the first matrix products isn't of any."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("length", [2003, 2004], ids=["first", "second"])
def test_what_a_first_call_compiles_or_plans_holds_no_tensor_of_it(named, length):
    given = gpu.packed((length, 7, 300), dim=96)
    gc.collect()
    torch.cuda.synchronize()
    before = allocated()
    gc.disable()
    try:
        gpu.run(gpu.on(named), given)
        torch.cuda.synchronize()
        # Autograd's thread may still hold the gradients for a moment after the caller has them.
        deadline = time.monotonic() + 5
        while (kept := allocated() - before) >= 2**16 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert kept < 2**16  # facts about the offsets; an output has 2**21 bytes


def test_a_read_back_may_be_released_while_its_stream_is_captured():
    """Were its memory given back to torch, an event in the capture would fail the next look at it."""
    stream = torch.cuda.Stream()
    source = torch.tensor([1, 0], dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(stream):
        readback = AsyncReadback(source)
    torch.cuda.synchronize()
    assert readback.read() == [1, 0]
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.zeros(1, device="cuda")
        del readback
    torch._C._host_emptyCache()  # looks at the events
    readback = AsyncReadback(source.flip(0))
    torch.cuda.synchronize()
    assert readback.read() == [0, 1]


def test_a_captured_forward_replays_bit_for_bit(named):
    given = gpu.packed().detached()
    graph, results = gpu.capture(lambda: (gpu.on(named)(*given),))
    (first,), (second,) = gpu.replay(graph, results), gpu.replay(graph, results)
    assert torch.equal(first, second)
    gpu.assert_near([first], gpu.expected(given)[0][:1])


@pytest.fixture
def deterministic(named, monkeypatch):
    """Ask for gradients that repeat bitwise, of those backends that have them."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    able = (
        registry.find(named).backend.backward.deterministic and named != "cuDNN"
    )  # whose dense calls repeat
    torch.use_deterministic_algorithms(able)
    yield able
    torch.use_deterministic_algorithms(False)


def test_a_captured_forward_and_backward_replay_bit_for_bit(named, deterministic):
    given = gpu.packed()
    graph, results = gpu.capture(training_step(named, given))
    first, second = gpu.replay(graph, results), gpu.replay(graph, results)
    assert torch.equal(first[0], second[0])
    if deterministic:
        assert all(map(torch.equal, first, second))
    for results in (first, second):
        gpu.assert_near(results, gpu.expected(given)[0])


def test_a_replay_follows_offsets_that_are_refilled(named):
    given = gpu.packed((5, 300, 0, 42))
    graph, results = gpu.capture(training_step(named, given))
    for lengths in ((300, 1, 29, 17), (0, 0, 300, 47), (100, 1, 1, 10), (5, 300, 0, 42)):
        given.cu_seqlens_q.copy_(gpu.offsets_of(lengths))
        gpu.assert_near(gpu.replay(graph, results), gpu.expected(given)[0])


@pytest.mark.only_for("cuDNN")
def test_a_replay_of_exact_and_shared_plans_follows_refilled_offsets(named, plans_of_either_kind):
    test_a_replay_follows_offsets_that_are_refilled(named)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.only_for("FA4", "cuDNN")
def test_a_first_call_while_capturing_is_refused_and_does_no_harm(named, ran):
    given = gpu.packed().detached()
    have_run = set(compiled_kinds.have_run)
    compiled_kinds.have_run.clear()
    cudnn.ExecutionPlans.cache_clear()
    try:
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(UnsupportedInputError, match="once before"),
        ):
            gpu.on(named)(*given)
    finally:
        compiled_kinds.have_run.update(have_run)
    assert ran() == {}
    gpu.assert_near([gpu.on(named)(*given)], gpu.expected(given)[0][:1])


@pytest.mark.only_for("FA2")
def test_a_first_backward_while_capturing_leaves_nothing_of_the_graphs_memory_behind(named, monkeypatch):
    kernels = registry.find(named).kernels()
    given = gpu.packed().detached()
    call = Call(64**-0.5, given.max_q, given.max_k, (-1, -1), given.cu_seqlens_q, given.cu_seqlens_k)
    grad = gpu.incoming(given.query)

    def step(launcher=None):
        """Return a launcher, made before the backward, and results, also those of a launcher of before."""
        out, lse = kernels.forward(*given.qkv, call)
        tensors = grad, *given.qkv, out, lse
        offered = kernels.specialize("backward", tensors, call)
        launched = launcher(*tensors, *packed_arguments(call)) if launcher is not None else ()
        return offered, [out, *kernels.backward(*tensors, call), *launched]

    monkeypatch.setattr(native, "_rng_states", {})
    launcher, _ = step()
    assert isinstance(launcher, OpLauncher)
    assert len(native._rng_states) == 1
    monkeypatch.setattr(native, "_rng_states", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        offered, results = step(launcher)
    assert offered is None  # it would keep what lies in the graph's memory
    assert native._rng_states == {}
    got, right = gpu.replay(graph, results), gpu.expected(given)[0]
    gpu.assert_near(got[:4], right)
    gpu.assert_near(got[4:], right[1:])


def test_no_host_sync_in_forward_or_backward(named):
    step = training_step(named, gpu.packed())
    step()
    with gpu.no_waiting():
        step()


def peak(step):
    """Return how much device memory a step takes at most, its results included."""
    # Until FA4's launches are tried, calls are kept, and the device has reported on the offsets.
    for _ in range(8):
        step()
        torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = step()
    torch.cuda.synchronize()
    assert len(results) >= 4
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("lengths", [(4096, 1024, 2048, 1024), (4095, 1024, 2048, 1000)], ids=sum)
def test_memory_is_that_of_the_kernels_and_an_lse(named, lengths, monkeypatch):
    cudnn.ExecutionPlans.cache_clear()  # the first batch of a kind gets a plan of its own
    given, tokens = gpu.packed(lengths, heads=(8, 8)), sum(lengths)
    grad = gpu.incoming(given.query)
    kernels = registry.find(named).kernels()
    call = Call(64**-0.5, given.max_q, given.max_k, (-1, -1), given.cu_seqlens_q, given.cu_seqlens_k)
    inputs = given.detached().qkv

    def directly():
        with torch.no_grad():
            out, lse = kernels.forward(*inputs, call)
            return out, lse, *kernels.backward(grad, *inputs, out, lse, call)

    def through():
        out = gpu.on(named)(*given)
        return out, *torch.autograd.grad(out, given.qkv, grad)

    taken = peak(through)
    with monkeypatch.context() as patched:
        patched.setattr(rounding, "round_lengths", lambda *sizes: sizes[:3])
        exactly = peak(directly)
    assert taken <= exactly + 8 * tokens * 4 + 2**12


@pytest.mark.only_for("cuDNN")
def test_a_first_batch_has_a_plan_of_its_own_and_others_share_one_with_room(named, ran):
    cudnn.ExecutionPlans.cache_clear()
    built = registry.find(named).kernels().forward.args[0].built
    drawn = random.Random(0)
    counts = []
    for total in (2500, 2400, 2300, 2500, 2600):
        ends = sorted(drawn.randint(0, total) for _ in range(99))
        lengths = [end - start for start, end in zip([0, *ends], [*ends, total], strict=True)]
        given = gpu.packed(lengths, heads=(4, 2))
        got = gpu.run(gpu.on(named), given, enable_gqa=True, window_size=(-1, 0))
        gpu.assert_near(got, gpu.expected(given, window=(-1, 0))[0])
        counts.append((built["forward"], built["backward"]))
    assert counts == [(1, 1), (2, 2), (2, 2), (2, 2), (2, 2)]
    assert ran() == {named: (5, 5)}


@pytest.mark.only_for("cuDNN")
def test_a_thousand_ragged_batches_take_few_plans(named):
    drawn = random.Random(0)
    cudnn.ExecutionPlans.cache_clear()  # the plans of earlier tests
    kernels = registry.find(named).kernels()
    most = gpu.packed((65536,), grad=False)
    grad = gpu.incoming(most.query)
    for _ in range(1000):
        count, longest = drawn.randint(1, 64), drawn.choice((64, 256, 1024))
        lengths = [drawn.randint(1, longest) for _ in range(count)]
        tokens, offsets = sum(lengths), gpu.offsets_of(lengths)
        query, key, value, given = (x[:tokens] for x in (*most.qkv, grad))
        call = Call(64**-0.5, max(lengths), max(lengths), (-1, 0), offsets, offsets)
        out, lse = kernels.forward(query, key, value, call)
        kernels.backward(given, query, key, value, out, lse, call)
    torch.cuda.synchronize()
    built = kernels.forward.args[0].built
    assert set(built) == {"forward", "backward"}
    assert max(built.values()) <= 24, built
