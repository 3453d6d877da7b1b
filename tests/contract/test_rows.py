"""Promises of what clears rows, by torch's ops, and by its kernels, compiled for the CPU."""

import itertools

import pytest
import torch
from support import host_kernels
from support import rows as slow

from attnreg.core.launching import rows

BY_OPS, BY_KERNELS = "by ops", "by kernels"
SEEDS = pytest.mark.parametrize(
    ("how", "seed"),
    [*[(BY_OPS, seed) for seed in range(16)], *[(BY_KERNELS, seed) for seed in range(0, 16, 3)]],
    indirect=["how"],
)

HOWS = pytest.mark.parametrize("how", [BY_OPS, BY_KERNELS], indirect=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return host_kernels.compiled(rows.CLEAR_FORWARD.source, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def how(request, monkeypatch):
    """Have rows cleared by torch's ops, or by the kernels."""
    if request.param == BY_OPS:
        yield BY_OPS
        return
    with host_kernels.kernels_on_host(request.getfixturevalue("library"), rows, monkeypatch) as ran:
        yield BY_KERNELS
    assert ran


def numbers(*shape):
    """Return numbers none of which is 0, and NaN among them: what a kernel may leave in a row."""
    return torch.where(torch.rand(shape) < 0.2, torch.nan, torch.rand(shape) + 1)


def same(one, other):
    return torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


@SEEDS
def test_exactly_the_rows_that_see_no_key_get_0_and_minus_infinity(how, seed):
    packed = slow.drawn(seed)
    out, lse = numbers(packed.tokens_q, 2, 3), numbers(2, packed.tokens_q)
    lse[:, ::3] = torch.inf  # as FA2 marks rows without a key
    wanted, wanted_lse = out.clone(), lse.clone()
    for row in range(packed.tokens_q):
        if not slow.sees_a_key(row, packed):
            wanted[row], wanted_lse[:, row] = 0.0, -torch.inf
    rows.clear_forward(out, lse, packed.cu_seqlens_q, packed.cu_seqlens_k, packed.window)
    assert same(out, wanted)
    assert same(lse, wanted_lse)


@SEEDS
def test_with_counts_of_keys_rows_see_as_many_keys_as_count(how, seed):
    packed = slow.drawn(seed)
    counts = torch.tensor(
        [int(torch.randint(0, max(int(n), 0) + 1, ())) for n in packed.cu_seqlens_k.diff()],
        dtype=torch.int32,
    )
    shorter = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    results, expected = ((torch.ones(packed.tokens_q, 2, 3), torch.ones(2, packed.tokens_q)) for _ in "ab")
    rows.clear_forward(*results, packed.cu_seqlens_q, packed.cu_seqlens_k, packed.window, counts)
    rows.clear_forward(*expected, packed.cu_seqlens_q, shorter, packed.window)
    assert all(map(torch.equal, results, expected))


@SEEDS
def test_exactly_the_gradients_of_rows_without_partners_get_0(how, seed):
    packed = slow.drawn(seed)
    dq, dk, dv = (
        numbers(packed.tokens_q, 4, 3),
        numbers(packed.tokens_k, 2, 3),
        numbers(packed.tokens_k, 2, 5),
    )
    wanted = [x.clone() for x in (dq, dk, dv)]
    for row in range(packed.tokens_q):
        if not slow.has_partners(row, packed.cu_seqlens_q, packed.cu_seqlens_k):
            wanted[0][row] = 0.0
    for row in range(packed.tokens_k):
        if not slow.has_partners(row, packed.cu_seqlens_k, packed.cu_seqlens_q):
            wanted[1][row], wanted[2][row] = 0.0, 0.0
    rows.clear_backward(dq, dk, dv, packed.cu_seqlens_q, packed.cu_seqlens_k)
    assert all(map(same, (dq, dk, dv), wanted))


def test_the_drawn_batches_have_rows_of_every_kind():
    batches = [slow.drawn(seed) for seed in range(16)]
    seen = [[slow.sees_a_key(row, packed) for row in range(packed.tokens_q)] for packed in batches]
    assert {any(one) and not all(one) for one in seen} == {True, False}
    assert any(packed.cu_seqlens_q.shape[0] == 1 for packed in batches)
    assert any(packed.tokens_q == 0 for packed in batches)
    assert any(not packed.cu_seqlens_k.is_contiguous() for packed in batches)
    inside = [
        (slow.has_partners(row, packed.cu_seqlens_q, packed.cu_seqlens_k), slow.sees_a_key(row, packed))
        for packed in batches
        for row in range(packed.tokens_q)
    ]
    assert (True, False) in inside  # a window leaves it none


@SEEDS
def test_a_blanked_copy_has_zeros_past_the_last_offset_and_leaves_the_original(how, seed):
    packed = slow.drawn(seed)
    x = numbers(2, packed.tokens_q, 3).transpose(0, 1)
    before = x.clone()
    copy = rows.blanked(x, packed.cu_seqlens_q)
    end = int(packed.cu_seqlens_q[-1])
    assert same(copy[:end], before[:end])
    assert copy[end:].count_nonzero() == 0
    assert same(x, before)
    assert copy.stride() == torch.empty_like(x).stride()
    assert copy.data_ptr() != x.data_ptr() or not x.numel()


def slow_facts(packed):
    queries, keys = (x.tolist() for x in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    covers = [x[0] == 0 and x[-1] == tokens for x, tokens in ((queries, packed[2]), (keys, packed[3]))]
    lengths = [[b - a for a, b in itertools.pairwise(x)] for x in (queries, keys)]
    pairs = list(zip(*lengths, strict=True))
    no_unused = all(covers) and all((q > 0) == (k > 0) and min(q, k) >= 0 for q, k in pairs)
    return [no_unused, no_unused and all(k >= q for q, k in pairs)]


@HOWS
def test_facts_are_those_of_a_loop_over_the_sequences(how):
    seen = set()
    for seed in range(0 if how == BY_OPS else 200, 400):
        packed = slow.drawn(seed, batch=seed % 4, longest=2)
        result = rows.facts(*packed[:4])
        assert result.dtype == torch.uint8
        assert result.tolist() == slow_facts(packed)
        seen.add(tuple(result.tolist()))
    assert seen == {(0, 0), (1, 0), (1, 1)}


@HOWS
def test_facts_of_offsets_that_fall_are_false(how):
    falling, rising = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 3, 8], [0, 3, 5, 8]))
    assert rows.facts(rising, rising, 8, 8).tolist() == [1, 1]
    assert rows.facts(falling, falling, 8, 8).tolist() == [0, 0]
    assert rows.facts(rising, falling, 8, 8).tolist() == [0, 0]


@HOWS
def test_facts_are_written_to_the_place_as_well(how):
    offsets, place = torch.tensor([0, 3, 5], dtype=torch.int32), torch.full((2,), 7, dtype=torch.uint8)
    longer = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert rows.facts(offsets, longer, 5, 5, place).tolist() == [1, 0]
    assert place.tolist() == [1, 0]


@HOWS
def test_no_window_is_too_wide(how):
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    keys = torch.tensor([0, 2], dtype=torch.int32)
    out, lse = torch.ones(3, 1, 1), torch.ones(1, 3)
    rows.clear_forward(out, lse, offsets, keys, (2**31 - 1, 2**31 - 1))
    assert out.flatten().tolist() == [1, 1, 1]
    rows.clear_forward(out, lse, offsets, keys, (2**31 - 1, 0))
    assert out.flatten().tolist() == [0, 1, 1]
    assert lse.flatten().tolist() == [-torch.inf, 1, 1]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_that_appends_writes_each_new_row_to_its_place(library, paged, seed):
    torch.manual_seed(seed)
    batch, count, size, width, heads = 3, 1 + seed % 3, 4, 2 if paged else 1, 2
    dims, dtype = (3, 5), (torch.float16, torch.float32)[seed % 2]
    pages = batch * width + 2
    caches = [torch.randn(pages, size, heads, dim).to(dtype).transpose(0, seed // 3) for dim in dims]
    caches = [x.transpose(0, seed // 3) for x in caches]
    news = [torch.randn(heads, batch, count, dim).to(dtype).permute(1, 2, 0, 3) for dim in dims]
    used = torch.randint(0, size * width - count + 1, (batch,), dtype=torch.int32)
    table = torch.randperm(pages, dtype=torch.int32)[: batch * width].view(batch, width).contiguous()
    expected = [x.clone() for x in caches]
    for sequence in range(batch):
        for number in range(count):
            token = int(used[sequence]) + number
            page = int(table[sequence, token // size]) if paged else sequence
            for cache, new in zip(expected, news, strict=True):
                cache[page, token % size] = new[sequence, number]
    counts = torch.zeros(batch, dtype=torch.int32)
    assert append(library, counts, used, table if paged else None, width, caches, news)
    assert all(map(torch.equal, caches, expected))
    assert counts.tolist() == (used + count).tolist()


def test_the_kernel_that_appends_stops_at_numbers_out_of_range(library):
    caches, news = [torch.zeros(2, 4, 1, 2) for _ in "kv"], [torch.ones(2, 1, 1, 2) for _ in "kv"]
    good, counts = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for used, table in (([0, 4], None), ([-1, 0], None), (good, [[0], [2]]), (good, [[-1], [1]])):
        used, table = (None if x is None else torch.as_tensor(x, dtype=torch.int32) for x in (used, table))
        assert not append(library, counts, used, table, 1, caches, news)
    assert append(library, counts, good, None, 1, caches, news)


def append(library, counts, used, table, width, caches, news):
    """Launch the kernel that appends as `dispatch/csrc/decode.h` does; return whether no thread trapped."""
    (batch, count, heads, _), (pages, size) = news[0].shape, caches[0].shape[:2]
    numbers = [1, 0 if table is None else table, width, size, pages, batch, count, heads]
    for cache, new in zip(caches, news, strict=True):
        bytes_of = cache.element_size()
        steps = [step * bytes_of for step in (*cache.stride()[:3], *new.stride()[:3])]
        numbers += [cache, new, cache.shape[3] * bytes_of, *steps]
    blocks = -(-2 * batch * count * 32 // rows.BLOCK)
    return host_kernels.launch(library, "attnreg_append", blocks, rows.BLOCK, counts, used, *numbers)
