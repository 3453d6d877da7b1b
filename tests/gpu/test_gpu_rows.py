"""On a GPU: the kernels that clear rows and state facts, compared with torch's ops."""

import threading

import pytest
import torch
from support import gpu
from support import rows as slow

from attnreg.core.launching import offsets, rows
from attnreg.core.torchlib.device_code import DeviceKernel
from attnreg.core.torchlib.layout import stream_of
from attnreg.core.torchlib.readback import AsyncReadback

pytestmark = pytest.mark.gpu

KERNELS = (rows.CLEAR_FORWARD, rows.CLEAR_BACKWARD, rows.BLANK, rows.FACTS, rows.APPEND)
SEEDS = pytest.mark.parametrize("seed", range(12))
SHAPES = pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        (torch.bfloat16, 64),
        (torch.float16, 20),
        (torch.bfloat16, 33),
        (torch.float32, 96),
        (torch.float32, 3),
    ],
)


@pytest.fixture(autouse=True)
def kernels():
    assert [kernel.available(torch.device("cuda")) for kernel in KERNELS] == [True] * len(KERNELS)


@pytest.fixture
def by_ops(monkeypatch):
    """Return a function that runs another with torch's ops."""

    def by_ops(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(rows, "_runs", lambda *_: False)
            return function(*arguments)

    return by_ops


def tensor(seed, tokens, heads, dim, dtype, pitch=0):
    """Return one of several layouts: rows or heads one after another, or a part of wider rows."""
    kind = seed % 3
    shape = (heads, tokens, dim) if kind == 1 else (tokens, heads, dim + (8 + pitch) * (kind == 2))
    x = torch.rand(shape, device="cuda").add_(1).to(dtype)
    return x.transpose(0, 1) if kind == 1 else x[..., :dim]


def memory(x):
    """Return all that is in a tensor's memory, also between its rows."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def clone(x):
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        storage, x.storage_offset(), x.shape, x.stride()
    )


def assert_same(function, by_ops, tensors, *rest):
    """Compare the kernel that changes tensors in place with torch's ops, in all of their memory."""
    wanted = [clone(x) for x in tensors]
    by_ops(function, *wanted, *rest)
    function(*tensors, *rest)
    for result, right in zip(tensors, wanted, strict=True):
        assert torch.equal(memory(result), memory(right))


def drawn(seed, **options):
    return slow.drawn(seed, device="cuda", longest=(6, 200)[seed % 2], **options)


@SEEDS
@SHAPES
def test_the_forwards_kernel_clears_the_rows_that_torchs_ops_do(seed, dtype, dim, by_ops):
    packed = drawn(seed)
    out = tensor(seed, packed.tokens_q, 3, dim, dtype, pitch=seed)
    lse = (
        torch.rand(packed.tokens_q, 3, device="cuda").T if seed % 4 else torch.rand(3, packed.tokens_q).cuda()
    )
    assert_same(
        rows.clear_forward, by_ops, (out, lse), packed.cu_seqlens_q, packed.cu_seqlens_k, packed.window
    )


@SEEDS
def test_with_counts_of_keys_the_forwards_kernel_clears_the_rows_that_torchs_ops_do(seed, by_ops):
    packed = drawn(seed)
    shares = torch.rand(len(packed.cu_seqlens_k) - 1, device="cuda")
    counts = (shares * 1.5 * packed.cu_seqlens_k.diff()).int().minimum(packed.cu_seqlens_k.diff())
    if seed % 2:
        counts = counts.repeat_interleave(2)[::2]
    out, lse = tensor(seed, packed.tokens_q, 3, 64, torch.bfloat16), torch.rand(3, packed.tokens_q).cuda()
    rest = packed.cu_seqlens_q, packed.cu_seqlens_k, packed.window, counts
    assert_same(rows.clear_forward, by_ops, (out, lse), *rest)


@SEEDS
@SHAPES
def test_the_backwards_kernel_clears_the_rows_that_torchs_ops_do(seed, dtype, dim, by_ops):
    packed = drawn(seed)
    dq = tensor(seed, packed.tokens_q, 4, dim, dtype)
    dk, dv = (tensor(seed + 1, packed.tokens_k, 2, width, dtype, pitch=seed) for width in (dim, 8))
    assert_same(rows.clear_backward, by_ops, (dq, dk, dv), packed.cu_seqlens_q, packed.cu_seqlens_k)


@SEEDS
@SHAPES
def test_a_blanked_copy_is_that_of_torchs_ops(seed, dtype, dim, by_ops):
    packed = drawn(seed)
    x = tensor(seed, packed.tokens_q, 3, dim, dtype, pitch=seed)
    x[int(packed.cu_seqlens_q[-1]) :] = torch.nan
    copy, wanted = rows.blanked(x, packed.cu_seqlens_q), by_ops(rows.blanked, x, packed.cu_seqlens_q)
    assert torch.equal(copy, wanted)
    assert copy.stride() == wanted.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("batch", [0, 1, 5, 3000])
@pytest.mark.parametrize("longest", [1, 2])
def test_facts_are_those_of_torchs_ops_on_the_device_and_on_the_host(batch, longest, by_ops):
    seen = set()
    for seed in range(20):
        packed = drawn(seed, batch=batch)
        if batch and seed % 3:  # lengths that are facts, of which one row at most is off
            queries = torch.randint(1, longest + 1, (batch,))
            keys = queries + (seed % 2)
            keys[seed % batch] += (seed % 5) - 2 if seed % 4 == 0 else 0
            ends = [
                torch.tensor([0, *x.clamp(min=0).tolist()]).cumsum(0).int().cuda() for x in (queries, keys)
            ]
            packed = slow.Batch(*ends, *(int(x[-1]) for x in ends), (-1, -1))
        on_device = []
        pending = AsyncReadback(
            lambda place, packed=packed, to=on_device: to.append(rows.facts(*packed[:4], place))
        )
        wanted = by_ops(rows.facts, *packed[:4]).tolist()
        assert on_device[0].tolist() == wanted  # waits for the device
        assert pending.read() == wanted
        seen.add(tuple(wanted))
    assert len(seen) > 1


def test_very_many_sequences_are_searched(by_ops):
    lengths = torch.arange(200_000) % 3
    queries = torch.cat((torch.zeros(1), lengths.cumsum(0))).int().cuda()
    keys = (
        torch.cat((torch.zeros(1), (lengths.roll(1) * (torch.arange(200_000) % 7 > 0)).cumsum(0)))
        .int()
        .cuda()
    )
    tokens_q, tokens_k = int(queries[-1]) + 100, int(keys[-1]) + 100
    out, lse = torch.ones(tokens_q, 2, 8, device="cuda").half(), torch.zeros(2, tokens_q, device="cuda")
    assert_same(rows.clear_forward, by_ops, (out, lse), queries, keys, (-1, 0))
    assert 0 < int((lse[0] == 0).sum()) < tokens_q
    grads = [torch.ones(tokens, 2, 8, device="cuda").half() for tokens in (tokens_q, tokens_k, tokens_k)]
    assert_same(rows.clear_backward, by_ops, grads, queries, keys)
    assert rows.facts(queries, queries, tokens_q - 100, tokens_q - 100).tolist() == [1, 1]
    assert rows.facts(queries, keys, tokens_q - 100, tokens_k - 100).tolist() == [0, 0]


def test_rows_beyond_two_billion_elements_are_cleared():
    tokens, heads, dim = 2**31 // (128 * 128) + 300, 128, 128
    out = torch.empty(tokens, heads, dim, device="cuda", dtype=torch.bfloat16).fill_(1)
    lse, ends = torch.zeros(heads, tokens, device="cuda"), torch.tensor([0, tokens - 200]).int().cuda()
    assert out.numel() > 2**31
    rows.clear_forward(out, lse, ends, ends, (-1, -1))
    assert [
        bool((x == value).all()) for x, value in ((out[-200:], 0), (out[-300:-200], 1), (out[:300], 1))
    ] == [True] * 3
    assert bool((lse[:, -200:] == -torch.inf).all()) and bool((lse[:, :-200] == 0).all())
    copy = rows.blanked(out[:, :, :64], ends - 50)
    assert [int(copy[-251:, 0, 0].sum()), int(copy[-300:, -1, -1].sum())] == [1, 50]


def test_a_graphs_replay_clears_by_the_offsets_of_then(by_ops):
    first, then = gpu.offsets_of((5, 0, 30)), gpu.offsets_of((2, 8, 11))
    ends = first.clone()
    out, lse = torch.empty(40, 2, 64, device="cuda"), torch.empty(2, 40, device="cuda")
    grads = [torch.empty(40, 2, 64, device="cuda") for _ in range(3)]

    def step():
        for x in (out, lse, *grads):
            x.fill_(1)
        rows.clear_forward(out, lse, ends, first, (-1, 0))
        rows.clear_backward(*grads, ends, first)
        return rows.blanked(grads[0] + 1, ends)

    graph, copy = gpu.capture(step)
    for offsets_then in (first, then):
        ends.copy_(offsets_then)
        graph.replay()
        got = [x.clone() for x in (out, lse, *grads, copy)]
        wanted_copy = by_ops(step)
        for result, right in zip(got, (out, lse, *grads, wanted_copy), strict=True):
            assert torch.equal(result, right)


def test_a_kernel_that_is_first_needed_in_a_capture_is_compiled_after_it():
    kernel, x = DeviceKernel("attnreg_facts", rows._SOURCE), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        assert not kernel.available(torch.device("cuda"))
    graph.replay()
    assert x.item() == 1
    assert kernel.available(torch.device("cuda"))


def test_kernels_are_launched_on_the_current_stream():
    ends, side = gpu.offsets_of((3, 2)), torch.cuda.Stream()
    out, lse = torch.ones(8, 2, 64, device="cuda"), torch.zeros(2, 8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        out.fill_(2)  # is cleared only if that comes first
        rows.clear_forward(out, lse, ends, ends, (-1, -1))
        assert not side.query()
    side.synchronize()
    assert out[:, 0, 0].tolist() == [2] * 5 + [0] * 3


def test_a_thread_that_has_used_no_gpu_yet_launches_them():
    ends, out = gpu.offsets_of((3, 2)), torch.ones(8, 2, 64, device="cuda")
    lse, errors = torch.zeros(2, 8, device="cuda"), []

    def clear():
        try:
            rows.clear_forward(out, lse, ends, ends, (-1, -1))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=clear)
    thread.start()
    thread.join()
    assert errors == []
    assert out[:, 0, 0].tolist() == [1] * 5 + [0] * 3


def test_new_offsets_cost_one_kernel_and_no_copy():
    all_ends = iter([gpu.offsets_of((3, 2, n)) for n in range(4)])
    made = []

    def step():
        ends = next(all_ends)
        tokens = 5 + len(made)
        made.append((ends, offsets.facts_of(ends, ends, tokens, tokens, stream_of(ends))))

    names = gpu.kernels_of(step)
    assert names == ["attnreg_facts"]
    _, known = made[-1]
    assert (known.no_unused_rows, known.every_row_sees_a_key) == (True, True)


def test_the_kernels_wait_for_nothing():
    ends, (out, lse) = gpu.offsets_of((3, 2)), (torch.ones(8, 2, 64).cuda(), torch.zeros(2, 8).cuda())
    with gpu.no_waiting():
        rows.clear_forward(out, lse, ends, ends, (-1, -1))
        rows.clear_backward(out, out, out, ends, ends)
        rows.blanked(out, ends)
        AsyncReadback(lambda place: rows.facts(ends, ends, 5, 5, place))
