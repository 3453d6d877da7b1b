"""On a GPU: FA4's calls of ever new lengths are right, and leave the package's Python out from the second on.

Each case draws other lengths for each call, so that a length that is left in a launch shows in the values.
"""

import pytest
import torch
from support import gpu, truth

from attnreg.backends.fa4 import adapter
from attnreg.core import registry
from attnreg.core.contract.backend import Call

pytestmark = [pytest.mark.gpu, pytest.mark.only_for("FA4")]

TIMES = 6
CAUSAL, OPEN, BAND = (-1, 0), (-1, -1), (40, 17)


@pytest.fixture
def through_package(monkeypatch):
    """Return a list of the directions that run through the package."""
    entered = []

    class Watched(adapter.PackageCall):
        def __call__(self):
            entered.append(self.direction)
            return super().__call__()

    monkeypatch.setattr(adapter, "PackageCall", Watched)
    return entered


def numbers(seed, low, high, count):
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def drawn(seed, *shape, dtype=gpu.BF16):
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def assert_right(out, lse, grads, given):
    right, right_lse, *right_grads = truth.of_call(*given)
    gpu.assert_near((out, *grads), (right, *right_grads))
    truth.assert_near(lse.cpu(), right_lse, torch.float32)


def dense_call(seed, heads=(4, 4), dim=64, **options):
    """Return query, key, value, gradient and call of new lengths, above those that fit into a tile."""
    (batch,), (len_q, more) = numbers(seed, 1, 4, 1), numbers(seed + 50, 200, 600, 2)
    query, grad = (drawn(seed + n, batch, len_q, heads[0], dim) for n in (0, 100))
    key, value = (drawn(seed + n, batch, more, heads[1], dim) for n in (200, 300))
    return query, key, value, grad, Call(dim**-0.5, len_q, more, **options)


def packed_call(seed, heads=(4, 4), dim=64, two=False, tail=0, count=(3, 8), longest=600, **options):
    """Return query, key, value, gradient and call of new lengths; the last `tail` rows hold NaN."""
    (batch,) = numbers(seed, *count, 1)
    lens_q = numbers(seed + 50, 0, longest, batch)
    lens_k = [length + n for length, n in zip(lens_q, numbers(seed + 60, 0, 90, batch), strict=True)]
    lens_k = lens_k if two else lens_q
    offsets = gpu.offsets_of(lens_q)
    others = gpu.offsets_of(lens_k) if two else offsets
    query, grad = (drawn(seed + n, sum(lens_q) + tail, heads[0], dim) for n in (0, 100))
    key, value = (drawn(seed + n, sum(lens_k) + tail, heads[1], dim) for n in (200, 300))
    if tail:
        for x in (query, key, value, grad):
            x[-tail:] = torch.nan
    ends = {"cu_seqlens_q": offsets, "cu_seqlens_k": others}
    return query, key, value, grad, Call(dim**-0.5, longest, longest + 90, **ends, **options)


DENSE = {
    "open": {},
    "causal": {"window": CAUSAL},
    "a window, shared heads": {"window": BAND, "heads": (8, 2), "dim": 128},
    "shared heads, deterministic": {"heads": (6, 2), "deterministic": True},
    "causal, deterministic": {"window": CAUSAL, "dim": 128, "deterministic": True},
    "head dim 256": {"dim": 256, "window": CAUSAL},
}


@pytest.mark.parametrize("options", DENSE.values(), ids=DENSE)
def test_dense_calls_of_new_lengths_are_launched_by_their_arguments(named, through_package, options):
    kernels = registry.find(named).kernels()
    for seed in range(TIMES):
        *given, call = dense_call(seed, **options)
        query, key, value, grad = given
        through_package.clear()
        out, lse = kernels.forward(query, key, value, call)
        grads = kernels.backward(grad, query, key, value, out, lse, call)
        torch.cuda.synchronize()  # so that the device has reported on the trial
        assert_right(out, lse, grads, (*given, call))
    assert through_package == []


def counted_call(seed, heads=(8, 2), dim=64, dim_v=None, page=None, longest=600, count=(3, 8), **options):
    """Return query, key, value and call of new lengths, with NaN in all keys and values that don't count."""
    (batch,) = numbers(seed, *count, 1)
    lens_q, lens_k = numbers(seed + 50, 1, 5, batch), numbers(seed + 60, 1, longest, batch)
    used = [0 if n % 5 == 4 else x for n, x in enumerate(numbers(seed + 70, 1, min(lens_k) + 1, batch))]
    query = drawn(seed, sum(lens_q), heads[0], dim)
    rows = [drawn(seed + n, sum(lens_k) + 9, heads[1], d) for n, d in ((200, dim), (300, dim_v or dim))]
    starts, table, more = gpu.offsets_of(lens_k)[:-1].tolist(), None, {}
    if page is not None:
        pages = -(-longest // page)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed)).cuda()
        table = order.view(batch, pages).int()
        rows = [
            drawn(seed + n, batch * pages, page, heads[1], d) for n, d in ((200, dim), (300, dim_v or dim))
        ]
        more = {"block_table": table}
        starts = [number * pages * page for number in range(batch)]
    else:
        more = {"cu_seqlens_k": gpu.offsets_of(lens_k)}
    flat = [x if table is None else x[table.long()].flatten(0, 2) for x in rows]
    own = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, used, strict=True)]).cuda()
    kept = [x[own].clone() for x in flat]
    hidden = torch.ones(len(flat[0]), dtype=torch.bool, device="cuda")
    hidden[own] = False
    for x in flat:
        x[hidden] = torch.nan
    if table is not None:
        for x, whole in zip(flat, rows, strict=True):
            whole[table.long()] = x.unflatten(0, (batch, -1, page))
    else:
        rows = flat
    call = Call(
        dim**-0.5, max(lens_q), longest, cu_seqlens_q=gpu.offsets_of(lens_q),
        seqused_k=torch.tensor(used, dtype=torch.int32, device="cuda"), **more, **options,
    )  # fmt: skip
    right = truth.varlen(
        *(x.double().cpu() for x in (query, *kept)), call.cu_seqlens_q.cpu(),
        torch.tensor([0, *used]).cumsum(0), scale=call.scale, window=call.window,
    )  # fmt: skip
    return (query, *rows, call), right


COUNTED = {
    "open": {},
    "causal": {"window": CAUSAL, "dim": 128},
    "a window": {"window": (40, 0), "heads": (4, 4)},
    "head dims (192, 128)": {"dim": 192, "dim_v": 128},
    "head dim 256, causal": {"dim": 256, "window": CAUSAL, "heads": (4, 2)},
    "up to a tile": {"longest": 128, "dim": 128},
    "hundreds of sequences": {"count": (260, 300), "longest": 40},
    "pages of 16": {"page": 16},
    "pages of 256, causal": {"page": 256, "window": CAUSAL, "dim": 128},
    "pages of a row": {"page": 1},
    "pages of 7, a window": {"page": 7, "window": (40, 0)},
    "pages of 300, head dims (192, 128)": {"page": 300, "dim": 192, "dim_v": 128},
    "pages longer than a sequence, causal": {"page": 4096, "window": CAUSAL, "dim": 128},
    "pages of 64, hundreds of sequences": {"page": 64, "count": (260, 300), "longest": 100},
}


@pytest.mark.parametrize("options", COUNTED.values(), ids=COUNTED)
def test_keys_of_which_not_all_count_are_launched_by_their_arguments(named, through_package, options):
    kernels = registry.find(named).kernels()
    for seed in range(TIMES):
        (query, key, value, call), (right, right_lse) = counted_call(seed, **options)
        through_package.clear()
        out, lse = kernels.forward(query, key, value, call)
        torch.cuda.synchronize()  # so that the device has reported on the trial
        gpu.assert_near((out,), (right,))
        truth.assert_near(lse.cpu(), right_lse, torch.float32)
    assert through_package == []


def few_call(seed, queries=1, heads=(8, 2), dim=64, dim_v=None, tail=0, longest=600, count=(3, 8), **options):
    """Return query, key, value and call of few queries a sequence and new lengths of keys, and the truth.

    A sequence in five has no keys. The last `tail` rows of keys and values, in no sequence, hold NaN.
    """
    lens_k = options.pop("lens_k", None)
    (batch,) = numbers(seed, *count, 1)
    lens_k = lens_k or [0 if n % 5 == 3 else x for n, x in enumerate(numbers(seed + 60, 1, longest, batch))]
    query = drawn(seed, queries * len(lens_k), heads[0], dim)
    rows = [drawn(seed + n, sum(lens_k) + tail, heads[1], d) for n, d in ((200, dim), (300, dim_v or dim))]
    ends, others = gpu.offsets_of([queries] * len(lens_k)), gpu.offsets_of(lens_k)
    call = Call(dim**-0.5, queries, max(lens_k), cu_seqlens_q=ends, cu_seqlens_k=others)
    call = call._replace(**options)
    right = truth.varlen(
        query.cpu(), *(x[: sum(lens_k)].cpu() for x in rows), ends.cpu(), others.cpu(),
        scale=call.scale, window=call.window,
    )  # fmt: skip
    for x in rows:
        x[sum(lens_k) :] = torch.nan
    return (query, *rows, call), right


FEW = {
    "open": {},
    "causal, a tail": {"window": CAUSAL, "dim": 128, "tail": 70},
    "a window": {"window": (40, 0), "heads": (4, 4), "tail": 3},
    "4 queries, causal": {"queries": 4, "window": CAUSAL, "dim": 128},
    "16 queries, a tail": {"queries": 16, "heads": (4, 4), "tail": 200},
    "16 queries, heads beyond a tile": {"queries": 16, "heads": (16, 1), "dim": 128, "window": CAUSAL},
    "head dims (192, 128)": {"dim": 192, "dim_v": 128, "tail": 9},
    "head dim 256": {"dim": 256, "heads": (4, 2), "tail": 9},
    "one sequence": {"count": (1, 2), "tail": 50},
    "hundreds of sequences": {"count": (260, 300), "longest": 40},
    "a longest length beyond all keys": {"max_k": 30_000, "tail": 5},
    "a longest length that is too short": {"max_k": 1},
}


@pytest.mark.parametrize("options", FEW.values(), ids=FEW)
def test_few_queries_of_new_lengths_of_keys_are_launched_by_their_arguments(named, through_package, options):
    kernels = registry.find(named).kernels()
    for seed in range(TIMES):
        (query, key, value, call), (right, right_lse) = few_call(seed, **options)
        through_package.clear()
        for _ in range(2):  # once by counts that are derived, then by the same
            out, lse = kernels.forward(query, key, value, call)
            gpu.assert_near((out,), (right,))
            truth.assert_near(lse.cpu(), right_lse, torch.float32)
        torch.cuda.synchronize()  # so that the device has reported on the trial
    assert through_package == []


def test_as_many_keys_as_a_tile_has_are_right_also_behind_them(named, through_package):
    kernels = registry.find(named).kernels()
    for seed, lens_k in enumerate(((127,), (128,), (129,), (100, 28), (1, 127), (64, 0, 64), (128,))):
        given, (right, right_lse) = few_call(seed, lens_k=lens_k)
        out, lse = kernels.forward(*given)
        torch.cuda.synchronize()
        gpu.assert_near((out,), (right,))
        truth.assert_near(lse.cpu(), right_lse, torch.float32)


PACKED = {
    "open": {},
    "causal, shared heads": {"window": CAUSAL, "heads": (8, 2), "dim": 128},
    "a window": {"window": BAND},
    "two tensors of offsets": {"window": CAUSAL, "two": True},
    "two, shared heads, a window": {"window": BAND, "two": True, "heads": (8, 4)},
    "deterministic, shared heads": {"window": CAUSAL, "deterministic": True, "heads": (4, 1)},
    "hundreds of sequences": {"window": CAUSAL, "count": (260, 300), "longest": 30},
    "hundreds of sequences, shared heads": {"count": (260, 300), "longest": 30, "heads": (8, 2)},
    "head dim 256, shared heads": {"dim": 256, "heads": (4, 2)},
    "rows of no sequence": {"window": CAUSAL, "tail": 33},
    "rows of no sequence, two, shared heads": {"two": True, "tail": 150, "heads": (8, 2), "dim": 128},
}


@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
def test_packed_calls_of_new_lengths_are_launched_by_their_arguments(named, through_package, options):
    kernels = registry.find(named).kernels()
    tail = options.get("tail", 0)
    for seed in range(TIMES):
        *given, call = packed_call(seed, **options)
        query, key, value, grad = given
        through_package.clear()
        out, lse = kernels.forward(query, key, value, call)
        grads = kernels.backward(grad, query, key, value, out, lse, call)
        torch.cuda.synchronize()
        if tail:
            assert not any(x[-tail:].any() for x in (out, *grads))
            assert (lse[:, -tail:] == -torch.inf).all()
            out, lse, *grads = out[:-tail], lse[:, :-tail], *(x[:-tail] for x in grads)
            given = [x[:-tail] for x in given]
        assert_right(out, lse, grads, (*given, call))
    assert through_package == []


@pytest.mark.parametrize("window", [CAUSAL, BAND], ids=str)
def test_calls_with_a_softcap_are_launched_on_both_sides_of_their_own_tile(named, through_package, window):
    kernels = registry.find(named).kernels()
    for seed in range(2 * TIMES):
        query, key, value, grad, call = dense_call(seed, dim=128, window=window, softcap=8.0)
        if seed % 2:
            query, grad, call = query[:, :100], grad[:, :100], call._replace(max_q=100)
        through_package.clear()
        out, lse = kernels.forward(query, key, value, call)
        grads = kernels.backward(grad, query, key, value, out, lse, call)
        torch.cuda.synchronize()
        assert_right(out, lse, grads, (query, key, value, grad, call))
    assert through_package == []


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("options", [{}, {"heads": (8, 2), "dim": 128, "window": CAUSAL}], ids=str)
def test_launchers_run_other_lengths_than_those_that_they_were_made_after(
    named, through_package, options, known
):
    kernels = registry.find(named).kernels()
    for seed in range(3):
        query, key, value, grad, call = packed_call(seed, **options)
        out, lse = kernels.forward(query, key, value, call)
        kernels.backward(grad, query, key, value, out, lse, call)
        torch.cuda.synchronize()
    forward = kernels.specialize("forward", (query, key, value), call)
    backward = kernels.specialize("backward", (grad, query, key, value, out, lse), call)
    through_package.clear()
    for seed in range(10, 13):
        *given, call = packed_call(seed, **options)
        query, key, value, grad = given
        further = call.cu_seqlens_q, call.cu_seqlens_k, call.max_q, call.max_k, known
        out, lse = forward(query, key, value, *further)
        assert_right(out, lse, backward(grad, query, key, value, out, lse, *further), (*given, call))
    assert through_package == []


@pytest.mark.parametrize("options", [{}, {"tail": 40, "heads": (8, 2)}], ids=str)
def test_a_graph_holds_launches_that_follow_refilled_offsets(named, through_package, options):
    kernels = registry.find(named).kernels()
    query, key, value, grad, call = packed_call(1, window=CAUSAL, count=(4, 5), **options)
    tail = options.get("tail", 0)
    for _ in range(3):
        out, lse = kernels.forward(query, key, value, call)
        kernels.backward(grad, query, key, value, out, lse, call)
        torch.cuda.synchronize()
    through_package.clear()

    def step():
        out, lse = kernels.forward(query, key, value, call)
        return [out, lse, *kernels.backward(grad, query, key, value, out, lse, call)]

    graph, results = gpu.capture(step)
    assert through_package == []
    tokens, lengths = len(query) - tail, call.cu_seqlens_q.diff().tolist()
    for n in (1, 2):
        call.cu_seqlens_q.copy_(gpu.offsets_of(lengths[n:] + lengths[:n]))
        out, lse, *grads = gpu.replay(graph, results)
        rows = slice(0, tokens)
        given = [x[rows] for x in (query, key, value, grad)]
        assert_right(out[rows], lse[:, rows], [x[rows] for x in grads], (*given, call))
        assert not any(x[tokens:].any() for x in (out, *grads))
