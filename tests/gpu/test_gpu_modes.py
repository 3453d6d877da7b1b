"""On a GPU: compiled, under autocast, checkpointed, deterministic; streams, threads, two devices."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from support import gpu, truth
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.varlen import varlen_attn as torch_varlen_attn
from torch.utils.checkpoint import checkpoint

import attnreg
from attnreg.core import registry
from attnreg.errors import UnsupportedInputError

pytestmark = [
    pytest.mark.gpu,
    # Inductor's advice, and no promise of attnreg's.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]


@pytest.fixture
def no_graph_trees():
    """Keep CUDA-graph trees: here they run, and know of the graphs of tests before."""


def sdpa(query, key, value, *_):
    """Attend over packed tensors that are one sequence."""
    batch = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(*batch)[0].transpose(0, 1)


# With the lengths of two batches.
ALL_FRONTS = pytest.mark.parametrize(
    ("front", "lengths"),
    [
        pytest.param(torch_varlen_attn, ((5, 300, 0, 42), (7, 129, 0, 64)), id="torch"),
        pytest.param(attnreg.varlen_attn, ((5, 300, 0, 42), (7, 129, 0, 64)), id="attnreg"),
        pytest.param(sdpa, ((347,), (200,)), id="SDPA"),
    ],
)


@pytest.fixture
def compiled():
    """Compile a function in one graph, as if nothing had been compiled before."""
    torch._dynamo.reset()
    yield functools.partial(torch.compile, fullgraph=True)
    torch._dynamo.reset()


# ---- torch.compile


def test_compiled_calls_choose_when_they_run(named, compiled, ran):
    inputs = gpu.bhsd()
    attnreg.install()

    def step(query, key, value):
        return F.scaled_dot_product_attention(query * 1, key, value)

    def results():
        out = step(*inputs)
        return out, *torch.autograd.grad(out, inputs, gpu.incoming(out))

    step = compiled(step)
    before = results()
    ran()
    with attnreg.register_backend(named):
        after = results()
    assert ran() == {named: (1, 1)}
    assert max(map(gpu.relative_error, after, before)) < 2e-2


@gpu.FRONTS
def test_varlen_attn_compiles_into_one_graph(named, front, compiled, ran):
    given = gpu.packed()
    step = compiled(lambda query, *rest: front(query * 1, *rest))
    with attnreg.register_backend(named):
        got = gpu.run(step, given)
    assert ran() == {named: (1, 1)}
    gpu.assert_near(got, gpu.expected(given)[0])


def test_a_dynamic_graph_serves_batches_of_every_size(named, compiled, ran):
    counter = CompileCounterWithBackend("inductor")
    step = compiled(lambda query, *rest: attnreg.varlen_attn(query * 1, *rest), dynamic=True, backend=counter)
    batches = [gpu.packed(lengths) for lengths in ((5, 300, 42, 0, 9), (7, 129), (64, 64, 64, 200))]
    with attnreg.register_backend(named):
        got = [gpu.run(step, given) for given in batches]
    assert ran() == {named: (3, 3)}
    assert counter.frame_count == 1
    for results, given in zip(got, batches, strict=True):
        gpu.assert_near(results, gpu.expected(given)[0])


@pytest.mark.filterwarnings("ignore:.*CUDA ?[Gg]raph")
def test_reduced_overhead_replays_the_backend_that_was_recorded(named, compiled, ran):
    given = gpu.packed()
    step = compiled(
        lambda query, *rest: attnreg.varlen_attn(query * 1, *rest, backend=named), mode="reduce-overhead"
    )
    outputs = []
    for _ in range(4):  # warmed up, recorded, replayed twice
        torch.compiler.cudagraph_mark_step_begin()
        outputs.append([x.clone() for x in gpu.run(step, given)])
    assert set(ran()) == {named}
    for results in outputs:
        gpu.assert_near(results, gpu.expected(given)[0])
    assert torch.equal(outputs[2][0], outputs[3][0])


@pytest.mark.filterwarnings("ignore:.*CUDA ?[Gg]raph")
def test_reduced_overhead_below_sdpa_is_right_where_two_layers_are_alike(named, compiled, ran):
    """Nothing that the first layer's call leaves behind may lie in the graph's memory."""

    def layers(query, key, value):
        first = F.scaled_dot_product_attention(query * 1, key, value)
        return first, F.scaled_dot_product_attention(key * 1, query, value)

    inputs = gpu.bhsd()
    query, key, value = (x.detach().cpu().double().requires_grad_() for x in inputs)
    right, other = truth.dense(query, key, value)[0], truth.dense(key, query, value)[0]
    step = compiled(layers, mode="reduce-overhead")
    with attnreg.register_backend(named):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            outs = step(*inputs)
            incoming = gpu.incoming(outs[0])
            grads = torch.autograd.grad(outs, inputs, (incoming, torch.zeros_like(incoming)))
            got = [x.clone() for x in (*outs, *grads)]
    assert set(ran()) == {named}
    right_grads = torch.autograd.grad(right, (query, key, value), incoming.cpu().double())
    gpu.assert_near(got, (right.detach(), other.detach(), *right_grads))


# ---- autocast, checkpointing, determinism


@pytest.mark.parametrize("front", [sdpa, attnreg.varlen_attn], ids=["SDPA", "varlen_attn"])
def test_autocast_reaches_attention_and_its_gradients_are_float32(named, front, ran):
    given = gpu.packed((300,), dtype=torch.float32)
    with torch.autocast("cuda", gpu.BF16), attnreg.register_backend(named):
        out = front(*given)
        grads = torch.autograd.grad(out, given.qkv, gpu.incoming(out))
    assert ran() == {named: (1, 1)}
    assert [x.dtype for x in (out, *grads)] == [gpu.BF16, *[torch.float32] * 3]
    gpu.assert_near((out, *grads), gpu.expected(given)[0])


@ALL_FRONTS
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("enter", [attnreg.register_backend, attnreg.use_backend])
def test_a_checkpoint_runs_the_forward_twice_on_the_same_backend(
    named, front, lengths, enter, reentrant, ran
):
    given = gpu.packed(lengths[0])
    with enter(named):
        out = checkpoint(front, *given, use_reentrant=reentrant)
        out.backward(gpu.incoming(out))
    # `torch_attn::_varlen_attn` gives its backward zeros in place of the random state, which has the choice.
    is_lost = enter is attnreg.use_backend and front not in (sdpa, attnreg.varlen_attn)
    assert ran() == {named: (2, 0 if is_lost else 1)}
    gpu.assert_near((out, *(x.grad for x in given.qkv)), gpu.expected(given)[0])


def test_a_checkpoint_in_a_compiled_block_repeats_its_dropout():
    def program(*given):
        with attnreg.use_backend("FA2"):
            dropped = functools.partial(F.scaled_dot_product_attention, dropout_p=0.5)
            return checkpoint(dropped, *given, use_reentrant=False)

    query, key, value = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    out = torch.compile(program, backend="aot_eager")(query, key, value.requires_grad_())
    (gradient,) = torch.autograd.grad(out, value, out.detach())
    # The output is linear in the value for one draw of dropout, and for that alone.
    torch.testing.assert_close((gradient * value).float().sum(), (out * out).float().sum(), rtol=0.02, atol=0)


@pytest.fixture
def deterministic(monkeypatch):
    # cuBLAS, which math's products go to, wants it said.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_repeat_bit_for_bit_or_are_refused(named, deterministic, ran):
    given = gpu.packed((700, 5, 1300))
    step = gpu.on(named)
    if named == "cuDNN" or not registry.find(named).backend.backward.deterministic:
        with pytest.raises(UnsupportedInputError, match=r"not deterministic, and|must be dense to be determ"):
            step(*given)
        return
    first = gpu.run(step, given)
    for _ in range(5):
        assert all(map(torch.equal, gpu.run(step, given), first))
    assert ran() == {named: (6, 6)}
    gpu.assert_near(first, gpu.expected(given)[0])


@pytest.mark.only_for("cuDNN")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "length", "dim"), [(4, 300, 64), (8, 1024, 128), (2, 256, 256)], ids=str)
def test_a_dense_backward_of_cudnn_repeats_bit_for_bit(named, deterministic, ran, heads, length, dim, causal):
    inputs = gpu.bhsd(heads=heads, length=length, dim=dim)
    with attnreg.register_backend(named):
        first = gpu.sdpa_and_back(inputs, is_causal=causal)
        for _ in range(7):
            assert all(map(torch.equal, gpu.sdpa_and_back(inputs, is_causal=causal), first))
    assert ran() == {named: (8, 8)}
    gpu.assert_near(first, gpu.expected_of_sdpa(inputs, window=(-1, 0) if causal else (-1, -1)))


@pytest.mark.only_for("cuDNN")
def test_a_backward_that_is_not_deterministic_goes_elsewhere_with_the_reason(named, deterministic, ran):
    given = gpu.packed((700, 5, 1300))
    with attnreg.register_backend(named):
        got = gpu.run(attnreg.varlen_attn, given)
    reasons = {row.reason for row in attnreg.stats().fallbacks if row.backend == named and row.count}
    calls = ran()
    assert [reason.partition(",")[0] for reason in reasons] == ["input must be dense to be deterministic"]
    assert calls.get(named, (0, 0))[1] == 0
    assert [sum(counts) for counts in zip(*calls.values(), strict=True)] == [1, 1]
    gpu.assert_near(got, gpu.expected(given)[0])


# ---- streams, threads, devices


@ALL_FRONTS
def test_a_side_stream_is_the_only_one_that_is_used(named, front, lengths, ran):
    there = gpu.packed(lengths[0])
    with attnreg.register_backend(named):
        gpu.run(front, there)  # compiles, plans
        zeros = [torch.zeros_like(x).requires_grad_() for x in there.qkv]
        given = gpu.Packed(*zeros, *there[3:])
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100_000_000)  # what doesn't wait for this stream finds zeros
            with torch.no_grad():
                for tensor, values in zip(given.qkv, there.qkv, strict=True):
                    tensor.copy_(values)
            got = gpu.run(front, given)
        torch.cuda.synchronize()
    assert ran() == {named: (2, 2)}
    gpu.assert_near(got, gpu.expected(there)[0])


@ALL_FRONTS
def test_a_backward_that_is_called_on_another_stream_waits_for_its_forward(named, front, lengths, ran):
    first = gpu.packed(lengths[0])
    given = gpu.Packed(*(x.detach().clone().requires_grad_() for x in first.qkv), *first[3:])
    with attnreg.register_backend(named):
        gpu.run(front, first)  # compiles, plans
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100_000_000)
            out = front(*given)
        with torch.cuda.stream(torch.cuda.Stream()):
            grads = torch.autograd.grad(out, given.qkv, gpu.incoming(given.query))
        torch.cuda.synchronize()
    assert ran() == {named: (2, 2)}
    gpu.assert_near((out, *grads), gpu.expected(given)[0])


@ALL_FRONTS
def test_two_threads_on_streams_of_their_own_get_their_own_results(named, front, lengths, ran):
    batches = [gpu.packed(one, seed=seed) for seed, one in enumerate(lengths)]
    start = threading.Barrier(2)

    def work(given):
        start.wait(60)
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [gpu.run(front, given) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        return results

    with attnreg.register_backend(named), ThreadPoolExecutor(2) as pool:
        alone = [gpu.run(front, given)[0] for given in batches]
        torch.cuda.synchronize()
        for given, first, results in zip(batches, alone, pool.map(work, batches), strict=True):
            assert all(torch.equal(out, first) for out, *_ in results)
            gpu.assert_near(results[-1], gpu.expected(given)[0])
    assert ran() == {named: (22, 22)}


def test_two_threads_may_run_new_kinds_of_calls_at_once(named):
    """Two compilations of flash-attn-4's at a time end the process; here neither kind has run before."""
    batches = [gpu.packed((300, 5, 42), dim=dim, seed=dim) for dim in (32, 88)]
    step = gpu.on(named, window_size=(9, 3))
    start = threading.Barrier(2)

    def work(given):
        start.wait(60)
        with torch.cuda.stream(torch.cuda.Stream()):
            results = gpu.run(step, given)
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(2) as pool:
        for given, results in zip(batches, pool.map(work, batches), strict=True):
            gpu.assert_near(results, gpu.expected(given, window=(9, 3))[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_is_served_while_the_first_is_current(named, ran):
    given = gpu.packed(device="cuda:1")
    wanted = gpu.expected(given)[0]
    for _ in range(4):  # the first calls, which are planned, and repeated ones
        got = gpu.run(gpu.on(named), given)
        torch.cuda.synchronize("cuda:1")
        assert {x.device for x in got} == {torch.device("cuda:1")}
        assert torch.cuda.current_device() == 0
        gpu.assert_near(got, wanted)
    assert ran() == {named: (4, 4)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_take_turns_at_the_same_call(named, ran):
    places = [gpu.packed((300, 5, 42), device=f"cuda:{index}") for index in (0, 1)]
    wanted = [gpu.expected(given)[0] for given in places]
    for _ in range(4):
        for given, right in zip(places, wanted, strict=True):
            gpu.assert_near(gpu.run(gpu.on(named), given), right)
    assert ran() == {named: (8, 8)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_repeated_calls_run_on_the_second_gpu(named, ran):
    """Packed and dense, while the first GPU is current."""
    packed = [gpu.packed((300, 5, 42), device=f"cuda:{index}") for index in (1, 0)]
    wanted = [gpu.expected(given)[0] for given in packed]
    dense = [torch.randn(2, 4, 128, 64, device="cuda:1", dtype=torch.bfloat16) for _ in "qkv"]
    right = F.scaled_dot_product_attention(*(x.double() for x in dense))
    with attnreg.register_backend(named):
        for _ in range(8):
            for given, expected in zip(packed, wanted, strict=True):
                got = gpu.run(attnreg.varlen_attn, given)
                torch.cuda.synchronize(given.query.device)
                gpu.assert_near(got, expected)
            out = F.scaled_dot_product_attention(*dense)
            assert out.device == torch.device("cuda:1")
            assert torch.cuda.current_device() == 0
            torch.testing.assert_close(out.double(), right, rtol=0.02, atol=0.02)
        assert ran() == {named: (24, 16)}
