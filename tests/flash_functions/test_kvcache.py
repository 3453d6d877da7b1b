"""Decoding with a cache compared with attention over what a loop puts into one."""

import contextlib
import functools
import math
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from support import truth

import attnreg
from attnreg import InvalidInputError, UnsupportedInputError
from attnreg.backends.cpu import compiled
from attnreg.core.dispatch import call_cache
from attnreg.core.torchlib import modes
from attnreg.flash_attn import attention, flash_attn_with_kvcache, kvcache
from attnreg.tools.measure.reference import attend

BATCH, ROOM, HEADS, KEY_HEADS, DIM = 3, 12, 4, 2, 16
LENGTHS = torch.tensor([5, 0, 9], dtype=torch.int32)


def cache(sequences=BATCH):
    return torch.randn(2, sequences, ROOM, KEY_HEADS, DIM).unbind()


def attended(q, keys, values, window=(-1, -1)):
    """Return output and LSE of each sequence over its own keys."""
    group = HEADS // KEY_HEADS
    outs, lses = [], []
    for row, key, value in zip(q, keys, values, strict=True):
        seen = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
        out, lse = truth.attention(row.double(), *seen, window=window)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def rotated(x, position, cos, sin, interleaved):
    """Return one token's heads (H, D) rotated, pair by pair."""
    x, half = x.double().clone(), cos.shape[1]
    for n in range(half):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + half)
        c, s = cos[position, n].double(), sin[position, n].double()
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x


@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_new_keys_are_appended_in_place_and_seen(new, causal):
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 2, HEADS, DIM)
    k, v = torch.randn(2, BATCH, new, KEY_HEADS, DIM).unbind()
    lengths, before = LENGTHS + 2 * (new == 0), (k_cache.clone(), v_cache.clone())
    appended = (k, v) if new else (None, None)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, *appended, cache_seqlens=lengths, causal=causal, return_softmax_lse=True
    )
    keys, values = (
        [torch.cat((old[i, :n], fresh[i])) for i, n in enumerate(lengths.tolist())]
        for old, fresh in zip(before, (k, v), strict=True)
    )
    expected, expected_lse = attended(q, keys, values, (-1, 0) if causal else (-1, -1))
    truth.assert_near(out, expected, torch.float32)
    truth.assert_near(lse, expected_lse, torch.float32)
    for i, n in enumerate(lengths.tolist()):
        assert torch.equal(k_cache[i, : n + new], keys[i]) and torch.equal(v_cache[i, : n + new], values[i])
        assert torch.equal(k_cache[i, n + new :], before[0][i, n + new :])


@pytest.mark.parametrize("routers_of", ["compiled_routers", "python_routers"])
@pytest.mark.parametrize("with_lse", [True, False])
def test_a_program_may_write_to_results(routers_of, with_lse, request, ran):
    request.getfixturevalue(routers_of)
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    wanted = attended(q, k_cache, v_cache)
    for _ in range(2):  # the call cache runs the second call
        ran()
        with attnreg.use_backend("math"):
            results = flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=with_lse)
        assert ran() == {"math": (1, 0)}
        for result, other in zip(results if with_lse else (results,), wanted, strict=with_lse):
            added = torch.ones(1, requires_grad=True)
            result += added
            truth.assert_near(result - 1, other, torch.float32)
            assert torch.autograd.grad(result.sum(), added)[0] == result.numel()


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("layout", ["by place", "one sequence", "within a larger one"])
def test_new_keys_are_written_into_a_cache_of_any_layout(new, layout):
    batch = 1 if layout == "one sequence" else BATCH
    (k_cache, v_cache), q = cache(batch), torch.randn(batch, new, HEADS, DIM)
    k, v = torch.randn(2, batch, new, KEY_HEADS, DIM).unbind()
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS[:batch], causal=True)
    if layout == "by place":
        held = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k_cache, v_cache)]
    else:
        held = [torch.cat((x, torch.ones_like(x)), 1)[:, :ROOM] for x in (k_cache, v_cache)]
    for one, fresh in zip(held, (k, v), strict=True):
        for row, used in enumerate(LENGTHS[:batch].tolist()):
            one[row, used : used + fresh.shape[1]] = 0.0  # what is to be written
    out = flash_attn_with_kvcache(q, *held, k, v, cache_seqlens=LENGTHS[:batch], causal=True)
    torch.testing.assert_close(out, expected)
    for one, other in zip(held, (k_cache, v_cache), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_queries_and_new_keys_are_rotated_by_their_positions(interleaved, masked):
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 2, HEADS, DIM)
    k, v = torch.randn(2, BATCH, 2, KEY_HEADS, DIM).unbind()
    angles = torch.rand(ROOM, 4)
    cos, sin, old = angles.cos(), angles.sin(), k_cache.clone()
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, LENGTHS, causal=masked, rotary_interleaved=interleaved
    )
    keys, values, queries = [], [], []
    for i, n in enumerate(LENGTHS.tolist()):
        new = [rotated(k[i, j], n + j, cos, sin, interleaved) for j in range(2)]
        keys.append(torch.cat((old[i, :n].double(), torch.stack(new))))
        values.append(v_cache[i, : n + 2])
        queries.append([rotated(q[i, j], n + masked * j, cos, sin, interleaved) for j in range(2)])
    q = torch.stack([torch.stack(row) for row in queries])
    truth.assert_near(out, attended(q, keys, values, (-1, 0) if masked else (-1, -1))[0], torch.float32)


def test_a_sequence_may_be_anywhere_in_the_cache():
    (k_cache, v_cache), q = cache(5), torch.randn(BATCH, 1, HEADS, DIM)
    places = torch.tensor([4, 0, 2], dtype=torch.int32)
    k, v = torch.randn(2, BATCH, 1, KEY_HEADS, DIM).unbind()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, cache_batch_idx=places)
    seen = [(place, n + 1) for place, n in zip(places.tolist(), LENGTHS.tolist(), strict=True)]
    keys, values = ([x[place, :n] for place, n in seen] for x in (k_cache, v_cache))
    truth.assert_near(out, attended(q, keys, values)[0], torch.float32)
    assert torch.equal(k_cache[0, 0], k[1, 0])


def test_a_cache_may_have_pages():
    pages = torch.randn(2, 8, 4, KEY_HEADS, DIM).unbind()
    table = torch.tensor([[3, 1, 0], [7, 2, 5], [6, 4, 0]], dtype=torch.int32)
    q, (k, v) = torch.randn(BATCH, 1, HEADS, DIM), torch.randn(2, BATCH, 2, KEY_HEADS, DIM).unbind()
    lengths = torch.tensor([3, 0, 6], dtype=torch.int32)  # the first goes on on its next page
    out = flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=lengths, block_table=table)
    keys, values = (
        [x[row.long()].flatten(0, 1)[: n + 2] for row, n in zip(table, lengths.tolist(), strict=True)]
        for x in pages
    )
    truth.assert_near(out, attended(q, keys, values)[0], torch.float32)
    assert torch.equal(pages[0][1, 0], k[0, 1])


def test_what_pads_the_left_of_a_cached_sequence_is_not_seen():
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 2, HEADS, DIM)
    lengths, pad = torch.tensor([5, 12, 9], dtype=torch.int32), torch.tensor([1, 0, 6], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, cache_leftpad=pad, causal=True)
    seen = list(zip(pad.tolist(), lengths.tolist(), strict=True))
    keys, values = ([x[i, first:last] for i, (first, last) in enumerate(seen)] for x in (k_cache, v_cache))
    truth.assert_near(out, attended(q, keys, values, (-1, 0))[0], torch.float32)


@pytest.mark.parametrize("given", [None, 7])
def test_all_sequences_may_have_one_length(given):
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM, requires_grad=True)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=given)
    keys, values = ([row[:given] for row in x] for x in (k_cache, v_cache))
    truth.assert_near(out, attended(q.detach(), keys, values)[0], torch.float32)
    assert not out.requires_grad


def test_a_window_a_softcap_and_slopes_hold_over_the_cache():
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 2, HEADS, DIM)
    lengths, slopes = torch.tensor([5, 12, 9], dtype=torch.int32), torch.rand(BATCH, HEADS)
    options = {"window_size": (3, 0), "softcap": 0.7, "alibi_slopes": slopes, "softmax_scale": 0.5}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, num_splits=1, return_softmax_lse=True, **options
    )
    for i, n in enumerate(lengths.tolist()):
        inputs = (x[None].double() for x in (q[i], k_cache[i, :n], v_cache[i, :n]))
        expected, expected_lse = attend(*inputs, 0.5, (3, 0), softcap=0.7, alibi_slopes=slopes[i])
        truth.assert_near(out[i], expected[0], torch.float32)
        truth.assert_near(lse[i], expected_lse[0], torch.float32)


# What says where keys are, or is added to scores; the last two need the compiled kernel.
DECODED = {
    "pages": {"block_table": torch.tensor([[2, 0], [1, 0], [0, 1]], dtype=torch.int32)},
    "places": {"cache_batch_idx": torch.tensor([2, 0, 1], dtype=torch.int32)},
    "leftpad": {"cache_leftpad": torch.tensor([1, 0, 6], dtype=torch.int32)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.4, HEADS)},
    "slopes and leftpad": {
        "alibi_slopes": torch.linspace(0.1, 0.4, HEADS),
        "cache_leftpad": torch.tensor([1, 0, 6], dtype=torch.int32),
    },
}


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("given", DECODED)
def test_on_a_cpu_its_own_backend_decodes_whatever_form_the_cache_has(given, registered, ran):
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    k, v = torch.randn(2, BATCH, 1, KEY_HEADS, DIM).unbind()
    expected = "cpu" if compiled.load() is not None or "slopes" not in given else "math"

    def decode():
        return flash_attn_with_kvcache(
            q, k_cache.clone(), v_cache.clone(), k, v, cache_seqlens=LENGTHS, **DECODED[given]
        )

    with attnreg.register_backend("cpu") if registered else contextlib.nullcontext():
        out = decode()
        assert ran() == {expected: (1, 0)}
    with attnreg.use_backend("math"):
        truth.assert_near(out, decode().double(), torch.float32)


def test_explain_says_that_pages_are_read_on_a_cpu_by_its_own_backend():
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, HEADS, DIM)
    table, rows = torch.zeros(BATCH, 1, dtype=torch.int32), torch.arange(BATCH + 1, dtype=torch.int32)
    found = attnreg.explain(
        q, k_cache, v_cache, rows, None, 1, ROOM, seqused_k=LENGTHS, block_table=table, enable_gqa=True
    )
    assert found.forward.backend == "cpu" and found.spec.page_size == ROOM


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_step_of_decoding_compiles_to_one_graph_and_writes_into_the_cache():
    def step(q, k_cache, v_cache, k, v):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, causal=True)

    torch._dynamo.reset()
    caches, q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    k, v = torch.randn(2, BATCH, 1, KEY_HEADS, DIM).unbind()
    copies = [x.clone() for x in caches]
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(q, *copies, k, v)
    truth.assert_near(out, step(q, *caches, k, v).double(), torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(caches, copies, strict=True))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_compiled_decoding_is_one_graph_however_far_it_is_and_however_many_sequences(as_tensor):
    def step(q, k_cache, v_cache, k, used):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=used, causal=True)

    torch._dynamo.reset()
    compiled_step = torch.compile(step, backend="eager", fullgraph=True)
    for batch in (1, 2, 3):
        caches = cache(batch)
        copies = [x.clone() for x in caches]
        for used in range(4):
            q, k = torch.randn(batch, 1, HEADS, DIM), torch.randn(batch, 1, KEY_HEADS, DIM)
            given = torch.full((batch,), used, dtype=torch.int32) if as_tensor else used
            expected = step(q, *caches, k, given).double()
            truth.assert_near(compiled_step(q, *copies, k, given), expected, torch.float32)
        assert all(torch.equal(one, other) for one, other in zip(caches, copies, strict=True))
    torch._dynamo.reset()


def test_how_far_a_cache_is_may_be_a_number_of_numpy():
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=numpy.int64(4))
    torch.testing.assert_close(
        out, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4), rtol=0, atol=0
    )


def test_shapes_of_a_call_are_known_without_memory():
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    given = [x.to("meta") for x in (q, k_cache, v_cache, TENSOR, TENSOR)]
    out = flash_attn_with_kvcache(*given, cache_seqlens=3)
    assert (out.shape, out.device.type) == (q.shape, "meta")


def test_a_position_beyond_the_rotary_tables_is_refused_by_their_names():
    (k_cache, v_cache), q, table = cache(), torch.randn(BATCH, 1, HEADS, DIM), torch.randn(ROOM, 4)
    given = {"rotary_cos": table, "rotary_sin": table, "cache_seqlens": ROOM}
    with pytest.raises(InvalidInputError) as error:
        flash_attn_with_kvcache(q, k_cache, v_cache, **given)
    assert str(error.value) == "rotary_cos and rotary_sin: got position 12 of sequence 0, expected 0 to 11"


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (11, "11"),
        (2**40, "1099511627776"),
        (torch.tensor([3, 11, 12], dtype=torch.int32), "11 at index 1"),
        (torch.tensor([3, 0, 2**32 + 1]), "4294967297 at index 2"),
    ],
)
def test_new_keys_that_the_cache_has_no_room_for_are_refused_and_nothing_is_written(given, got):
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 2, HEADS, DIM)
    k, v = torch.randn(2, BATCH, 2, KEY_HEADS, DIM).unbind()
    before = k_cache.clone()
    with pytest.raises(InvalidInputError) as error:
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=given)
    assert str(error.value) == (
        f"cache_seqlens: got {got}, expected 0 to 10, as the cache has room for 12 tokens, 2 of them new"
    )
    assert torch.equal(k_cache, before)


TENSOR = torch.zeros(3, 1, KEY_HEADS, DIM)
TABLES = "rotary_cos and rotary_sin: got shapes"
OF_ROTARY = (
    "expected equal ones: (positions, rotary dim / 2), at least 12 positions and at most 16 rotary dims"
)


def rotary(*shape):
    """Return the arguments of a call with tables of a shape."""
    tables = {"rotary_cos": torch.ones(shape), "rotary_sin": torch.ones(shape)}
    return {"k": TENSOR, "v": TENSOR, "cache_seqlens": 3, **tables}


OF_K = "the batch of q, heads and head_dim of k_cache"
OF_V = "the batch of q, the length of k, heads and head_dim of v_cache"
DIMS, PAGES = "(batch, length, heads, head_dim)", "(pages, page size, heads, head_dim)"
WRONG = {
    f"q: got shape (3, 4, 16), expected 4 dimensions {DIMS}": {"q": torch.zeros(BATCH, HEADS, DIM)},
    f"k: got shape (3, 2, 16), expected 4 dimensions {DIMS}": {
        "k": TENSOR[:, 0], "v": TENSOR, "cache_seqlens": 3
    },
    f"v: got shape (), expected 4 dimensions {DIMS}": {
        "k": TENSOR, "v": TENSOR[0, 0, 0, 0], "cache_seqlens": 3
    },
    f"k_cache: got shape (3, 2, 16), expected 4 dimensions {PAGES}": {
        "k_cache": TENSOR[:, 0], "block_table": LENGTHS[:, None]
    },
    "k: got 13 tokens, expected at most 12, the room of the cache": {
        "k": torch.zeros(3, 13, KEY_HEADS, DIM), "v": torch.zeros(3, 13, KEY_HEADS, DIM), "cache_seqlens": 0
    },
    "cache_seqlens: got 13 at index 2, expected 0 to 12, as the cache has room for 12 tokens": {
        "cache_seqlens": LENGTHS + 4
    },
    "k and v: got one of the two, expected both or none": {"k": TENSOR},
    "cache_seqlens: got None, expected the lengths before k and v are appended": {"k": TENSOR, "v": TENSOR},
    "cache_seqlens: got [3, 4], expected a tensor or one number": {"cache_seqlens": [3, 4]},
    "rotary_cos and rotary_sin: got one of the two, expected both or none": {"rotary_cos": torch.ones(9, 4)},
    f"k: got shape (3, 1, 1, 16), expected (3, 1, 2, 16): {OF_K}": {
        "k": TENSOR[:, :, :1], "v": TENSOR, "cache_seqlens": 3
    },
    f"k: got shape (1, 1, 2, 16), expected (3, 1, 2, 16): {OF_K}": {
        "k": TENSOR[:1], "v": TENSOR, "cache_seqlens": 3
    },
    f"v: got shape (3, 1, 2, 16), expected (3, 2, 2, 16): {OF_V}": {
        "k": torch.zeros(3, 2, KEY_HEADS, DIM), "v": TENSOR, "cache_seqlens": 3
    },
    f"{TABLES} (9, 4) and (9, 4), {OF_ROTARY}": rotary(9, 4),
    f"{TABLES} (12, 9) and (12, 9), {OF_ROTARY}": rotary(12, 9),
    "k_cache: got 3 sequences for 4 of q, expected at least as many": {"q": torch.zeros(4, 1, HEADS, DIM)},
    "cache_batch_idx: got a tensor, expected None, as block_table says where keys are": {
        "cache_batch_idx": LENGTHS, "block_table": LENGTHS[:, None]
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_contradict_each_other_are_refused(message):
    q = torch.randn(BATCH, 1, HEADS, DIM)
    with pytest.raises(InvalidInputError) as error:
        flash_attn_with_kvcache(
            **dict(zip(("q", "k_cache", "v_cache"), (q, *cache()), strict=True)) | WRONG[message]
        )
    assert str(error.value) == message


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


OF_BATCH = "expected int32 of shape (3,) on cpu"
OF_ROOM = "as the cache has room for 12 tokens, 1 of them new"
OF_ROW = "as a row of block_table (3, {}) has room for 12 tokens, 1 of them new"
TABLES_ELSEWHERE = {"rotary_cos": torch.ones(12, 4), "rotary_sin": torch.ones(12, 4, device="meta")}
REFUSED = {
    "window_size: got (-2, 0), expected (left, right), integers of -1 or more": {"window_size": (-2, 0)},
    "softcap: got nan, expected 0 for none, or a number above 0 that float32 can hold": {"softcap": math.nan},
    "softcap: got None, expected 0 for none, or a number above 0 that float32 can hold": {"softcap": None},
    "softmax_scale: got nan, expected a finite number": {"softmax_scale": math.nan},
    "num_splits: got -1, expected an integer of 0 or more": {"num_splits": -1},
    "dtype: got q torch.float64, k_cache torch.float32, v_cache torch.float32, expected one dtype": {
        "q": torch.randn(BATCH, 1, HEADS, DIM, dtype=torch.float64)
    },
    "heads: got 3 for q and 2 for k_cache, expected a multiple of k_cache's": {
        "q": torch.randn(BATCH, 1, 3, DIM)
    },
    f"cache_seqlens: got -1 at index 1, expected 0 to 11, {OF_ROOM}": {"cache_seqlens": ints(5, -1, -2)},
    f"cache_seqlens: got -3, expected 0 to 11, {OF_ROOM}": {"cache_seqlens": -3},
    f"cache_seqlens: got torch.int32 of shape (1,) on cpu, {OF_BATCH}": {"cache_seqlens": ints(5)},
    f"cache_seqlens: got torch.float32 of shape (3,) on cpu, {OF_BATCH}": {"cache_seqlens": torch.ones(3)},
    f"cache_batch_idx: got torch.float32 of shape (3,) on cpu, {OF_BATCH}": {
        "cache_batch_idx": torch.ones(3)
    },
    "k: got torch.float64 on cpu, expected torch.float32, as of the cache, on cpu": {"k": TENSOR.double()},
    "v: got torch.int64 on cpu, expected torch.float32, as of the cache, on cpu": {"v": TENSOR.long()},
    "v: got torch.float32 on meta, expected torch.float32, as of the cache, on cpu": {"v": TENSOR.to("meta")},
    "cache_batch_idx: got -1 at index 1, expected 0 to 2": {"cache_batch_idx": ints(0, -1, 2)},
    "cache_batch_idx: got 7 at index 2, expected 0 to 2": {"cache_batch_idx": ints(0, 1, 7)},
    f"cache_leftpad: got 2, expected a tensor, {OF_BATCH.removeprefix('expected ')}": {"cache_leftpad": 2},
    "cache_leftpad: got 5 at index 0, expected 0 to 4": {"cache_leftpad": ints(5, 0, 0)},
    "block_table[1]: got -1 at index 0, expected 0 to 2": {"block_table": ints(0, -1, 2)[:, None]},
    "block_table: got torch.sparse_coo, expected torch.strided": {
        "block_table": ints(0, 1, 2)[:, None].to_sparse()
    },
    "cache_seqlens: got torch.sparse_coo, expected torch.strided": {
        "cache_seqlens": ints(0, 1, 2).to_sparse()
    },
    "cache_batch_idx: got torch.sparse_coo, expected torch.strided": {
        "cache_batch_idx": ints(0, 1, 2).to_sparse()
    },
    "cache_leftpad: got torch.sparse_coo, expected torch.strided": {
        "cache_leftpad": ints(0, 1, 2).to_sparse()
    },
    "k: got torch.sparse_coo, expected torch.strided": {"k": TENSOR.to_sparse()},
    "device: got q meta, k_cache cpu, v_cache cpu, expected one device": {
        "q": torch.zeros(BATCH, 1, HEADS, DIM, device="meta"), "cache_seqlens": LENGTHS
    },
    "rotary_cos and rotary_sin: got tensors on cpu and meta, expected cpu, where q is": TABLES_ELSEWHERE,
    "rotary_cos and rotary_sin: got position 12 of sequence 2, expected 0 to 11": rotary(12, 4) | {
        "q": torch.zeros(BATCH, 4, HEADS, DIM), "cache_seqlens": LENGTHS, "causal": True
    },
    f"cache_seqlens: got 12, expected 0 to 11, {OF_ROW.format(1)}": {
        "block_table": ints(0, 1, 2)[:, None], "cache_seqlens": 12
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_a_call_that_is_refused_has_written_nothing_and_names_its_arguments(message):
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    before = k_cache.clone(), v_cache.clone()
    arguments = {"q": q, "k": TENSOR + 1, "v": TENSOR + 1, "cache_seqlens": 3} | REFUSED[message]
    with pytest.raises(InvalidInputError) as error:
        flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **arguments)
    assert str(error.value) == message
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


def test_a_call_that_no_backend_may_run_has_written_nothing(fake):
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    before = k_cache.clone()
    arguments = {"k": TENSOR + 1, "v": TENSOR + 1, "cache_seqlens": 3, "alibi_slopes": torch.rand(HEADS)}
    attnreg.configure({"strict": True})
    lone = fake("lone", alibi=False).backend
    with attnreg.register_backend(lone), pytest.raises(UnsupportedInputError):
        flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    assert torch.equal(k_cache, before)


def test_under_autocast_the_check_of_a_call_copies_no_cache(monkeypatch):
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    cast = []
    monkeypatch.setattr(attention, "autocast", lambda *given: cast.append(given) or modes.autocast(*given))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, TENSOR + 1, TENSOR + 1, cache_seqlens=3)
    assert out.dtype == torch.bfloat16
    # The first is the check, the second the call itself.
    assert [[x.numel() for x in given] for given in cast] == [
        [1, 1, 1],
        [x.numel() for x in (q, k_cache, v_cache)],
    ]


def test_a_page_that_no_token_lies_on_may_be_any_number():
    pages, q = torch.randn(2, 4, 4, KEY_HEADS, DIM).unbind(), torch.randn(BATCH, 1, HEADS, DIM)
    table = torch.tensor([[0, -1], [1, -1], [2, 9]], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, *pages, TENSOR, TENSOR, cache_seqlens=3, block_table=table)
    keys, values = ([x[i] for i in range(BATCH)] for x in pages)
    truth.assert_near(out, attended(q, keys, values)[0], torch.float32)


def test_a_cache_that_is_no_tensor_is_refused():
    with pytest.raises(InvalidInputError, match=r"^v_cache: got None, expected a tensor"):
        flash_attn_with_kvcache(torch.randn(BATCH, 1, HEADS, DIM), cache()[0], None)


OUT_OF_RANGE = {
    "cache_seqlens": [
        {"cache_seqlens": torch.tensor([3, -1, 0], dtype=torch.int32)},
        {"cache_seqlens": torch.tensor([3, 12, 0], dtype=torch.int32)},
    ],
    "block_table or cache_batch_idx": [
        {"cache_seqlens": 3, "cache_batch_idx": torch.tensor([2, 1, 3], dtype=torch.int32)},
        {"cache_seqlens": 3, "cache_batch_idx": torch.tensor([2, -1, 0], dtype=torch.int32)},
    ],
}


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        pytest.param(name, cases, id=name, marks=[pytest.mark.slow] * (name == "cache_seqlens"))
        for name, cases in OUT_OF_RANGE.items()
    ],
)
def test_compiled_on_a_cpu_a_place_out_of_range_is_an_error_before_anything_is_written(name, cases):
    torch._dynamo.reset()
    step = torch.compile(flash_attn_with_kvcache, backend="aot_eager")
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    before = k_cache.clone()
    for given in cases:
        with pytest.raises(RuntimeError, match=f"^{name}: got a number below 0, or one that is too large"):
            step(q, k_cache, v_cache, TENSOR, TENSOR, **given)
        assert torch.equal(k_cache, before)
    torch._dynamo.reset()


@pytest.mark.parametrize("wrong", [{"softcap": "x"}, {"window_size": (-3, 0)}, {"causal": 3}], ids=str)
def test_compiled_a_wrong_option_is_refused_before_anything_is_written(wrong):
    torch._dynamo.reset()
    (k_cache, v_cache), q = cache(), torch.randn(BATCH, 1, HEADS, DIM)
    before = k_cache.clone()
    compiled_step = torch.compile(flash_attn_with_kvcache, backend="aot_eager")
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        compiled_step(q, k_cache, v_cache, TENSOR, TENSOR, cache_seqlens=3, **wrong)
    assert torch.equal(k_cache, before)
    torch._dynamo.reset()


def test_a_table_of_int64_says_the_same_as_one_of_int32():
    pages, q = torch.randn(2, 4, 4, KEY_HEADS, DIM).unbind(), torch.randn(BATCH, 1, HEADS, DIM)
    table = torch.tensor([[2], [1], [3]])
    outs = [
        flash_attn_with_kvcache(q, *pages, cache_seqlens=3, block_table=one) for one in (table, table.int())
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 3)], ids=["no query", "no sequence"])
def test_nothing_to_attend_from_gives_empty_results_of_the_right_shape(batch, length):
    q, keys = torch.randn(batch, length, HEADS, DIM), torch.randn(batch, ROOM, KEY_HEADS, DIM)
    out, lse = flash_attn_with_kvcache(q, keys, keys, cache_seqlens=3, return_softmax_lse=True)
    assert (out.shape, lse.shape) == ((batch, length, HEADS, DIM), (batch, HEADS, length))
    torch._dynamo.reset()
    out = torch.compile(attention.attend_dense, backend="aot_eager")(q, keys, keys, attention.Options())[0]
    assert out.shape == (batch, length, HEADS, DIM)
    torch._dynamo.reset()


# ---- steps that the call cache repeats


@pytest.fixture
def in_python(compiled_routers, monkeypatch, no_graph_trees):
    """Return a function: how many steps a function took in Python, where the call cache may repeat steps."""
    taken, run = [], kvcache._run

    def counted(*arguments):
        taken.append(arguments)
        return run(*arguments)

    monkeypatch.setattr(kvcache, "_run", counted)

    def count(function):
        taken.clear()
        function()
        return len(taken)

    assert compiled_routers.load() is not None
    return count


def assert_step(q, caches, new, used, **options):
    """Run a step, and compare output, LSE and cache with what its keys and values say."""
    before = [x.clone() for x in caches]
    counts = used.tolist() if isinstance(used, torch.Tensor) else [used] * len(q)
    results = flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=used, return_softmax_lse=True, **options
    )
    count = 0 if new[0] is None else new[0].shape[1]
    for cache, old, rows in zip(caches, before, new, strict=True):
        for place, length in enumerate(counts):
            if rows is not None:
                old[place, length : length + count] = rows[place]
        assert torch.equal(cache, old)
    keys, values = ([x[i, : n + count] for i, n in enumerate(counts)] for x in before)
    window = (-1, 0) if options.get("causal") else (-1, -1)
    for found, expected in zip(results, attended(q, keys, values, window), strict=True):
        truth.assert_near(found, expected, torch.float32)
    out = flash_attn_with_kvcache(q, *caches, cache_seqlens=used + count, **options)
    torch.testing.assert_close(out, results[0])


def test_any_true_value_asks_for_the_lse_in_repeated_steps_as_well(in_python):
    q, caches = torch.randn(BATCH, 1, HEADS, DIM), cache()
    steps = [flash_attn_with_kvcache(q, *caches, cache_seqlens=3, return_softmax_lse=1) for _ in range(3)]
    assert all(torch.equal(lse, steps[0][1]) for _, lse in steps)


@pytest.mark.parametrize("name", ["cpu", "math"])
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_steps_of_a_kind_that_has_run_are_repeated_without_python(in_python, ran, name, new, causal):
    caches = cache()

    def step(seed, lengths):
        torch.manual_seed(seed)
        q = torch.randn(BATCH, max(new, 1), HEADS, DIM)
        appended = torch.randn(2, BATCH, new, KEY_HEADS, DIM).unbind() if new else (None, None)
        assert_step(q, caches, appended, lengths, causal=causal)

    with attnreg.register_backend(name):
        for seed in range(2):
            step(seed, torch.tensor([5, 0, 2], dtype=torch.int32))
        for seed, lengths in enumerate(([5, 0, 9], [0, 1, 2], [9, 9, 9], [6, 5, 4]), 2):
            given = torch.tensor(lengths, dtype=torch.int32)
            # A launcher that a backend doesn't offer is asked for now and then, of Python's plan.
            assert in_python(lambda: step(seed, given)) == 0  # noqa: B023
        assert in_python(lambda: step(9, 4)) == 0
        assert ran() == {name: (14, 0)}


def test_results_of_repeated_steps_are_theirs_whatever_changes_between_them(in_python):
    """Batches, rooms and lengths of queries alternate; more of them than offsets are kept for."""
    kinds = [(batch, room, rows) for batch in (1, 2, 3) for room in (8, 12) for rows in (1, 2, 3)]
    for number in range(3):
        for batch, room, rows in kinds:
            caches = [x[:, :room].contiguous() for x in cache(batch)]
            q, used = torch.randn(batch, rows, HEADS, DIM), torch.arange(batch, dtype=torch.int32) + number
            new = torch.randn(2, batch, rows, KEY_HEADS, DIM).unbind()
            assert_step(q, caches, new, used, causal=True)
    assert in_python(lambda: assert_step(q, caches, new, used, causal=True)) == 0


@pytest.mark.parametrize(
    "layout", ["by place", "by head", "within a larger one", "more sequences", "dims apart"]
)
def test_repeated_steps_write_into_a_cache_of_any_layout(in_python, layout):
    def laid_out(x):
        if layout == "by place":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "by head":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "within a larger one":
            return torch.cat((x, torch.ones_like(x)), 1)[:, :ROOM]
        if layout == "dims apart":
            return torch.stack((x, x), -1)[..., 0]
        return torch.cat((x, torch.ones_like(x)))

    caches = [laid_out(x) for x in cache()]
    expected_copies = [x.clone() for x in caches]
    for number in range(5):
        q, new = torch.randn(BATCH, 1, HEADS, DIM), torch.randn(2, BATCH, 1, KEY_HEADS, DIM).unbind()
        new = tuple(laid_out(x)[:BATCH] for x in new) if layout == "dims apart" else new
        assert_step(q, caches, new, LENGTHS + (number > 2))
    for one, other in zip(caches, expected_copies, strict=True):
        assert torch.equal(one[BATCH:], other[BATCH:])


@pytest.mark.parametrize("name", ["cpu", "math"])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_steps_over_pages_are_repeated_without_python(in_python, ran, name, new):
    pages = [torch.randn(11, 4, KEY_HEADS, DIM) for _ in "kv"]
    tables = [torch.randperm(11)[:9].view(3, 3).int() for _ in range(6)]

    def step(number, lengths):
        torch.manual_seed(number)
        q, rows = torch.randn(BATCH, max(new, 1), HEADS, DIM), torch.randn(2, BATCH, new, KEY_HEADS, DIM)
        expected = [x[tables[number].long()].flatten(1, 2) for x in pages]  # (B, room, H_k, D)
        results = flash_attn_with_kvcache(
            q, *pages, *(rows if new else ()), cache_seqlens=lengths, block_table=tables[number], causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        for x, fresh in zip(expected, rows, strict=True):
            for place, count in enumerate(lengths.tolist()):
                x[place, count : count + new] = fresh[place]
        keys, values = ([x[i, : n + new] for i, n in enumerate(lengths.tolist())] for x in expected)
        for found, right in zip(results, attended(q, keys, values, (-1, 0)), strict=True):
            truth.assert_near(found, right, torch.float32)
        for x, right in zip(pages, expected, strict=True):
            assert torch.equal(x[tables[number].long()].flatten(1, 2), right)

    with attnreg.register_backend(name):
        for number in range(2):
            step(number, ints(5, 0, 2))
        for number, lengths in enumerate(([5, 0, 9], [4, 8, 2], [9, 9, 9], [6, 5, 4]), 2):
            assert in_python(lambda: step(number, ints(*lengths))) == 0  # noqa: B023
        assert ran() == {name: (6, 0)}


PAGED = {
    "block_table[1]: got 12 at index 1, expected 0 to 10": ([[0, 1, 2], [3, 12, 5], [6, 7, 8]], (1, 4, 1)),
    "block_table[1]: got -1 at index 0, expected 0 to 10": ([[0, 1, 2], [-1, 4, 5], [6, 7, 8]], (1, 0, 1)),
    f"cache_seqlens: got 12 at index 1, expected 0 to 11, {OF_ROW.format(3)}": (
        [[0, 1, 2], [3, 4, 5], [6, 7, 8]], (1, 12, 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", PAGED)
def test_a_step_over_pages_of_a_known_kind_is_refused_as_the_first_is(in_python, message):
    pages, q = [torch.randn(11, 4, KEY_HEADS, DIM) for _ in "kv"], torch.randn(BATCH, 1, HEADS, DIM)
    table = torch.arange(9, dtype=torch.int32).view(3, 3)
    for _ in range(3):
        flash_attn_with_kvcache(q, *pages, TENSOR, TENSOR, cache_seqlens=LENGTHS, block_table=table)
    before, (wrong, lengths) = [x.clone() for x in pages], PAGED[message]
    given = {"cache_seqlens": ints(*lengths), "block_table": torch.tensor(wrong, dtype=torch.int32)}
    with pytest.raises(InvalidInputError) as error:
        flash_attn_with_kvcache(q, *pages, TENSOR + 1, TENSOR + 1, **given)
    assert str(error.value) == message
    assert all(map(torch.equal, pages, before))


def test_steps_of_sequences_anywhere_in_the_cache_are_repeated_without_python(in_python):
    caches = [torch.randn(6, ROOM, KEY_HEADS, DIM) for _ in "kv"]

    def step(places, lengths):
        q, new = torch.randn(BATCH, 1, HEADS, DIM), torch.randn(2, BATCH, 1, KEY_HEADS, DIM)
        expected = [x.clone() for x in caches]
        for x, rows in zip(expected, new, strict=True):
            for row, (place, count) in enumerate(zip(places, lengths, strict=True)):
                x[place, count] = rows[row, 0]
        out = flash_attn_with_kvcache(
            q, *caches, *new, cache_seqlens=ints(*lengths), cache_batch_idx=ints(*places)
        )
        assert all(map(torch.equal, caches, expected))
        keys, values = (
            [x[place, : count + 1] for place, count in zip(places, lengths, strict=True)] for x in expected
        )
        truth.assert_near(out, attended(q, keys, values)[0], torch.float32)

    for _ in range(2):
        step((0, 1, 2), (3, 0, 5))
    assert in_python(lambda: step((5, 3, 0), (0, 11, 4))) == 0
    assert in_python(lambda: step((2, 4, 1), (7, 1, 2))) == 0
    for given, message in {
        (0, 9, 1): "cache_batch_idx: got 9 at index 1, expected 0 to 5",
        (0, -1, 1): "cache_batch_idx: got -1 at index 1, expected 0 to 5",
    }.items():
        before = [x.clone() for x in caches]
        with pytest.raises(InvalidInputError) as error:
            flash_attn_with_kvcache(
                torch.randn(BATCH, 1, HEADS, DIM), *caches, TENSOR, TENSOR, cache_seqlens=ints(3, 0, 2),
                cache_batch_idx=ints(*given),
            )  # fmt: skip
        assert str(error.value) == message
        assert all(map(torch.equal, caches, before))


def known(**options):
    """Run a kind of steps until the call cache repeats it; returns its arguments."""
    caches, q = [x.clone() for x in cache()], torch.randn(BATCH, 1, HEADS, DIM)
    for _ in range(3):
        flash_attn_with_kvcache(q, *caches, TENSOR + 1, TENSOR + 1, cache_seqlens=LENGTHS, **options)
    return q, caches


AFTERWARDS = {
    f"cache_seqlens: got -1 at index 1, expected 0 to 11, {OF_ROOM}": {"cache_seqlens": ints(5, -1, -2)},
    f"cache_seqlens: got 12 at index 1, expected 0 to 11, {OF_ROOM}": {"cache_seqlens": ints(5, 12, 0)},
    f"cache_seqlens: got -3, expected 0 to 11, {OF_ROOM}": {"cache_seqlens": -3},
    f"cache_seqlens: got torch.int32 of shape (2,) on cpu, {OF_BATCH}": {"cache_seqlens": ints(5, 3)},
    f"k: got shape (3, 1, 1, 16), expected (3, 1, 2, 16): {OF_K}": {"k": TENSOR[:, :, :1]},
    f"v: got shape (3, 2, 2, 16), expected (3, 1, 2, 16): {OF_V}": {"v": torch.zeros(3, 2, KEY_HEADS, DIM)},
    "k and v: got one of the two, expected both or none": {"v": None},
    "v: got torch.float64 on cpu, expected torch.float32, as of the cache, on cpu": {"v": TENSOR.double()},
    "window_size: got (-2, 0), expected (left, right), integers of -1 or more": {"window_size": (-2, 0)},
    "softcap: got nan, expected 0 for none, or a number above 0 that float32 can hold": {"softcap": math.nan},
}


@pytest.mark.parametrize("message", AFTERWARDS)
def test_a_step_of_a_known_kind_is_refused_as_the_first_is_and_has_written_nothing(in_python, message):
    q, caches = known()
    before = [x.clone() for x in caches]
    given = {"k": TENSOR, "v": TENSOR, "cache_seqlens": LENGTHS, **AFTERWARDS[message]}
    with pytest.raises(InvalidInputError) as error:
        flash_attn_with_kvcache(q, *caches, **given)
    assert str(error.value) == message
    assert all(map(torch.equal, caches, before))


def test_writes_of_a_repeated_step_are_counted(in_python):
    """Autograd compares the counts; the results have no gradient."""
    q, caches = known()
    leaf = q.clone().requires_grad_()
    versions = [x._version for x in caches]

    def step():
        out = flash_attn_with_kvcache(leaf, *caches, TENSOR, TENSOR, cache_seqlens=LENGTHS)
        assert not out.requires_grad

    assert in_python(step) == 0
    assert [x._version for x in caches] == [version + 1 for version in versions]
    assert torch.is_grad_enabled()


INT64 = {
    "cache_seqlens": {"cache_seqlens": LENGTHS},
    "cache_batch_idx": {"cache_batch_idx": ints(2, 0, 1)},
    "cache_leftpad": {"cache_leftpad": ints(1, 0, 2)},
    "block_table": {"block_table": ints(2, 0, 1)[:, None]},
}


@pytest.mark.parametrize("name", INT64)
def test_a_step_with_int64_is_the_same_and_runs_in_python_each_time(in_python, name):
    q, caches = torch.randn(BATCH, 1, HEADS, DIM), [x.clone() for x in cache()]
    given = {"cache_seqlens": 3} | INT64[name]
    found = []

    def step(given):
        found.append(flash_attn_with_kvcache(q, *caches, TENSOR + 1, TENSOR + 2, **given))

    for _ in range(3):
        step(given)
    assert in_python(lambda: step(given)) == (name == "cache_leftpad")  # that is left to Python in any dtype
    wide = given | {name: given[name].long()}
    assert [in_python(lambda: step(wide)) for _ in range(3)] == [1] * 3
    assert all(torch.equal(out, found[0]) for out in found)


def test_new_rows_that_lie_in_the_cache_itself_and_a_cache_whose_rows_overlap_are_left_to_torch(in_python):
    q, caches = known()
    own = [x[:, :1] for x in caches]
    assert in_python(lambda: assert_step(q, caches, own, LENGTHS)) == 1
    expanded = [x[:, :, :1].expand(x.shape) for x in caches]

    def step():
        with warnings.catch_warnings(action="ignore"):
            flash_attn_with_kvcache(q, *expanded, TENSOR, TENSOR, cache_seqlens=LENGTHS)

    assert [in_python(step) for _ in range(4)] == [1] * 4


def test_a_cache_that_was_freed_is_an_error_by_its_name(in_python):
    q, caches = known()
    caches[1].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedInputError, match=r"^v_cache: got a tensor whose storage was freed"):
        flash_attn_with_kvcache(q, *caches, TENSOR, TENSOR, cache_seqlens=LENGTHS)


def test_in_inference_mode_steps_are_repeated_too(in_python):
    with torch.inference_mode():
        q, caches = known()
        step = functools.partial(assert_step, q, caches, (TENSOR + 2, TENSOR + 3), LENGTHS)
        step()
        assert in_python(step) == 0
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        flash_attn_with_kvcache(q, *caches, TENSOR, TENSOR, cache_seqlens=LENGTHS)


def test_a_setting_or_a_choice_decides_about_the_next_step(in_python, ran):
    q, caches = known()
    ran()
    step = functools.partial(assert_step, q, caches, (TENSOR, TENSOR), LENGTHS)
    with attnreg.use_backend("math"):
        for _ in range(4):
            step()
        assert ran() == {"math": (8, 0)}
    step()
    assert "math" not in ran()
    with attnreg.register_backend("math"):
        step()
        assert ran() == {"math": (2, 0)}


def drawn_steps(draw, dtype):
    """Return the options of a kind of steps, and some steps of it: caches, and the other arguments."""
    batch, rows, new = draw.randint(1, 4), draw.randint(1, 3), draw.randint(0, 3)
    heads, size, width = draw.choice([(4, 2), (3, 1), (2, 2)]), draw.choice([4, 6]), draw.randint(1, 3)
    is_paged, room = draw.random() < 0.5, size * width
    shape = (batch * width + 1, size) if is_paged else (batch + draw.randint(0, 1), room)
    options = {
        "causal": draw.random() < 0.5, "softmax_scale": draw.choice([None, 0.3]),
        "window_size": draw.choice([(-1, -1), (3, -1), (2, 1)]),
        "return_softmax_lse": draw.random() < 0.5,
    }  # fmt: skip
    steps = []
    for _ in range(4):
        caches = [torch.randn(*shape, heads[1], 8).to(dtype) for _ in "kv"]
        given = {"q": torch.randn(batch, rows, heads[0], 8).to(dtype)}
        if new:
            given |= {name: torch.randn(batch, new, heads[1], 8).to(dtype) for name in "kv"}
        given["cache_seqlens"] = ints(*(draw.randint(0, room - new) for _ in range(batch)))
        if is_paged:
            given["block_table"] = ints(*draw.sample(range(shape[0]), batch * width)).view(batch, width)
        steps.append((caches, given))
    return options, steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_random_kinds_compute_and_write_what_they_do_in_python(in_python, dtype):
    draw = random.Random(0)
    for _ in range(12):
        options, steps = drawn_steps(draw, dtype)
        copies, results = [[x.clone() for x in caches] for caches, _ in steps], []
        with call_cache.paused():
            for (keys, values), (_, given) in zip(copies, steps, strict=True):
                results.append(flash_attn_with_kvcache(k_cache=keys, v_cache=values, **given, **options))
        for number, (caches, given) in enumerate(steps):
            step = functools.partial(flash_attn_with_kvcache, **given, **options)
            found = []
            taken = in_python(lambda: found.append(step(k_cache=caches[0], v_cache=caches[1])))  # noqa: B023
            assert taken == (number < 2)
            torch.testing.assert_close(found[0], results[number], rtol=0, atol=0)
            assert all(map(torch.equal, caches, copies[number]))


def test_threads_decode_into_their_own_caches(in_python):
    def decode(seed):
        draw = torch.Generator().manual_seed(seed)
        caches = [torch.randn(BATCH, ROOM, KEY_HEADS, DIM, generator=draw) for _ in "kv"]
        for number in range(10):
            q = torch.randn(BATCH, 1, HEADS, DIM, generator=draw)
            new = torch.randn(2, BATCH, 1, KEY_HEADS, DIM, generator=draw).unbind()
            assert_step(q, caches, new, ints(number, 0, number // 2))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(decode, range(4)))


def test_places_whose_storage_was_freed_are_named_and_nothing_is_written():
    query, cache = torch.randn(3, 1, 4, 16), torch.randn(5, 8, 4, 16)
    places, before = torch.tensor([4, 0, 2], dtype=torch.int32), cache.clone()
    places.untyped_storage().resize_(0)
    for _ in range(3):
        with pytest.raises(attnreg.UnsupportedInputError, match=r"cache_batch_idx: got .* in memory"):
            flash_attn_with_kvcache(
                query, cache, cache, query, query, cache_seqlens=3, cache_batch_idx=places
            )
    assert torch.equal(cache, before)
