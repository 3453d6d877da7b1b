"""On a GPU: decoding with a cache, which keys count and which backend runs it."""

import pytest
import torch
from support import gpu, truth

import attnreg
from attnreg.flash_attn import flash_attn_with_kvcache, kvcache

pytestmark = pytest.mark.gpu

ROOM, USED = 700, (0, 699, 1, 300, 65)


def drawn(heads, tokens, dim=64, dtype=torch.bfloat16, room=ROOM):
    """Return queries, caches with NaN in all that isn't used, new keys and values, and the used counts."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(length, count):
        shape = (len(USED), length, count, dim)
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    used = torch.tensor(USED, dtype=torch.int32, device="cuda").clamp(max=ROOM - tokens)
    caches = [normal(room, heads[1]) for _ in range(2)]
    for cache in caches:
        cache.masked_fill_((torch.arange(room, device="cuda") >= used[:, None])[..., None, None], torch.nan)
    return normal(tokens, heads[0]), caches, (normal(tokens, heads[1]), normal(tokens, heads[1])), used


def expected(q, caches, new, used, causal=True):
    """Return output and LSE in float64."""
    outs, lses = [], []
    for row, count in enumerate(used.tolist()):
        keys, values = (
            torch.cat((cache[row, :count], *([] if one is None else [one[row]]))).double()
            for cache, one in zip(caches, new, strict=True)
        )
        shared = q.shape[2] // keys.shape[1]
        keys, values = (x.repeat_interleave(shared, dim=1) for x in (keys, values))
        if len(keys):
            out, lse = truth.attention(q[row].double(), keys, values, window=(-1, 0) if causal else (-1, -1))
        else:
            out, lse = (
                q[row].double() * 0,
                q.new_full((q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64),
            )
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_keys_that_count_are_seen_and_no_others(named, ran, heads, tokens, appends):
    """With NaN in what doesn't count; a sequence without a key has output 0. Eager, then in a CUDA graph."""
    q, caches, new, used = drawn(heads, tokens)
    new = new if appends else (None, None)
    truths = expected(q, caches, new, used)

    def step():
        return flash_attn_with_kvcache(
            q, *caches, *new, cache_seqlens=used, causal=True, return_softmax_lse=True
        )

    def check(results):
        for found, true in zip(results, truths, strict=True):
            truth.assert_near(found, true, torch.bfloat16)

    with attnreg.use_backend(named):
        for _ in range(3):  # what is known of offsets arrives after the first
            check(step())
            torch.cuda.synchronize()
        assert ran() == {named: (3, 0)}
        check(gpu.replay(*gpu.capture(step)))


@pytest.mark.parametrize(("heads", "tokens"), [((8, 2), 1), ((8, 2), 4), ((4, 4), 1)], ids=str)
def test_where_nothing_is_asked_for_fa4_decodes_or_fa2_if_it_splits_keys(ran, heads, tokens):
    for room in (ROOM, 5000):
        q, caches, new, used = drawn(heads, tokens, room=room)
        attnreg.reset_stats()
        out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=used, causal=True)
        truth.assert_near(out, expected(q, caches, new, used)[0], torch.bfloat16)
        splits = room == 5000 and (heads, tokens) == ((8, 2), 1)
        assert ran() == {"FA2" if splits else "FA4": (1, 0)}


# ---- steps that the call cache repeats


@pytest.fixture
def in_python(monkeypatch):
    """Return the steps that were run in Python."""
    taken, run = [], kvcache._run

    def counted(*arguments):
        taken.append(arguments)
        return run(*arguments)

    monkeypatch.setattr(kvcache, "_run", counted)
    return taken


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=str)
def test_a_cache_that_grows_is_right_at_each_step_and_takes_no_python(
    named, ran, compiled_cache, in_python, heads, tokens
):
    _, caches, _, used = drawn(heads, tokens)
    used, versions = (used - 40).clamp(min=0), [x._version for x in caches]
    for x in caches:  # as far as it is used there are numbers
        rows = torch.arange(ROOM, device="cuda") < used[:, None]
        assert not x[rows].isnan().any()
        x[~rows] = torch.nan
    generator = torch.Generator("cuda").manual_seed(2)

    def normal(count):
        shape = (len(USED), tokens, count, 64)
        return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)

    with attnreg.use_backend(named):
        for number in range(10):
            q, new = normal(heads[0]), (normal(heads[1]), normal(heads[1]))
            wanted = expected(q, caches, new, used)
            with_lse = number % 2 == 0
            taken = len(in_python)
            results = flash_attn_with_kvcache(
                q, *caches, *new, cache_seqlens=used, causal=True, return_softmax_lse=with_lse
            )
            assert number < 2 or len(in_python) == taken
            for found, true in zip(results if with_lse else (results,), wanted, strict=False):
                truth.assert_near(found, true, torch.bfloat16)
            for cache, rows in zip(caches, new, strict=True):
                for place, count in enumerate(used.tolist()):
                    assert torch.equal(cache[place, count : count + tokens], rows[place])
                    assert cache[place, count + tokens :].isnan().all()
            used += tokens
        assert ran() == {named: (10, 0)}
    assert all(x._version >= version + 10 for x, version in zip(caches, versions, strict=True))


LAYOUTS = {
    "in order": lambda x: x,
    "by head": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "within a larger one": lambda x: torch.cat((x, torch.ones_like(x)), 1)[:, :ROOM],
    "more sequences": lambda x: torch.cat((x, torch.ones_like(x))),
    "rows of odd bytes": lambda x: torch.cat((x, x[..., :1]), -1)[..., :-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (40, torch.float16)], ids=str)
def test_new_rows_are_written_into_a_cache_of_any_layout_and_nothing_else_is(
    compiled_cache, ran, layout, dim, dtype
):
    for tokens in (1, 4):
        q, caches, new, used = drawn((4, 2), tokens, dim, dtype)
        caches = [LAYOUTS[layout](x) for x in caches]
        for number in range(5):
            results = flash_attn_with_kvcache(
                q, *caches, *new, cache_seqlens=used, causal=True, return_softmax_lse=True
            )
            for found, true in zip(results, expected(q, caches, new, used), strict=True):
                truth.assert_near(found, true, dtype)
            for cache, rows in zip(caches, new, strict=True):
                before = LAYOUTS[layout](cache[: len(q)].clone())
                for place, count in enumerate(used.tolist()):
                    assert torch.equal(cache[place, count : count + tokens], rows[place]), number
                    assert cache[place, count + tokens :].isnan().all()
                assert torch.equal(cache[len(q) :], before[len(q) :])
    assert ran() == {"FA4" if dim == 64 else "FA2": (10, 0)}  # pages need head dims in steps of 16


@pytest.mark.only_for("FA2", "FA4")
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_repeated_step_takes_a_kernel_that_writes_and_that_of_attention(named, compiled_cache, with_lse):
    """Behind the kernel only an LSE that somebody reads has to be corrected, for a sequence without keys."""
    q, caches, new, used = drawn((8, 2), 1)

    def step():
        flash_attn_with_kvcache(
            q, *caches, *new, cache_seqlens=used, causal=True, return_softmax_lse=with_lse
        )

    with attnreg.use_backend(named):
        for _ in range(12):
            step()
            torch.cuda.synchronize()
        own = sorted(name for name in gpu.kernels_of(step) if name.startswith("attnreg_"))
    assert own == ["attnreg_append", *(["attnreg_clear_forward"] if with_lse else [])]


def assert_kernel_writes_zeros(named, ran, heads, dim, tokens, page=None):
    """Run steps of which one sequence has no keys, with no kernel that clears, and compare with float64.

    Values of NaN go through the multiprocessors before, so memory that isn't written holds NaN.
    """
    q, caches, _, used = drawn(heads, tokens, dim, room=768)
    causal, given, table = tokens == 1, caches, None
    if page is not None:
        table = torch.arange(len(used) * 768 // page, dtype=torch.int32, device="cuda").view(len(used), -1)
        given = [x.reshape(-1, page, *x.shape[2:]) for x in caches]
    shapes = ((4000, count, dim) for count in (heads[0], heads[1], heads[1]))
    spoilt = [torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    ends = gpu.offsets_of((1000, 2000, 1000))
    right, _ = expected(q, caches, (None, None), used, causal)

    def step():
        return flash_attn_with_kvcache(q, *given, cache_seqlens=used, block_table=table, causal=causal)

    with attnreg.use_backend(named):
        for _ in range(12):
            attnreg.varlen_attn(*spoilt, ends, ends, 2000, 2000, enable_gqa=True)
            out = step()
            torch.cuda.synchronize()
            truth.assert_near(out, right, torch.bfloat16)
            assert not out[0].any()
        own = [name for name in gpu.kernels_of(step) if name.startswith("attnreg_")]
    assert own == []
    assert ran() == {named: (26, 0)}


FEW_QUERIES = pytest.mark.parametrize("tokens", [1, 3])
HEADS_AND_DIM = pytest.mark.parametrize(("heads", "dim"), [((8, 2), 64), ((4, 4), 128)], ids=str)


@pytest.mark.only_for("FA2", "FA4")
@FEW_QUERIES
@HEADS_AND_DIM
def test_a_sequence_without_keys_has_zeros_that_the_kernel_itself_writes(
    named, ran, compiled_cache, heads, dim, tokens
):
    assert_kernel_writes_zeros(named, ran, heads, dim, tokens)


@pytest.mark.only_for("FA4")
@pytest.mark.parametrize("page", [1, 48, 768])
@FEW_QUERIES
@HEADS_AND_DIM
def test_so_has_a_sequence_without_keys_in_pages(named, ran, compiled_cache, heads, dim, tokens, page):
    assert_kernel_writes_zeros(named, ran, heads, dim, tokens, page)


def test_a_step_on_another_stream_has_offsets_of_its_own(compiled_cache, in_python):
    q, caches, new, used = drawn((8, 2), 1)
    right = expected(q, caches, new, used)[0]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), attnreg.use_backend("FA2"):
            for _ in range(4):
                taken = len(in_python)
                out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=used, causal=True)
            assert len(in_python) == taken
            torch.cuda.synchronize()
            truth.assert_near(out, right, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.only_for("FA4")
def test_a_cache_of_more_elements_than_int32_counts_is_read_at_its_end(named, ran):
    """Two caches of 7 GB. Pages that overlap begin at each row, so a page's number is up to 3,276,800."""
    batch, room, heads, dim = 200, 16384, 8, 128
    assert batch * room * heads * dim > 2**31
    caches = [torch.zeros(batch, room, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    rows = torch.randn(3, 2, 90, heads, dim, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    places = 0, batch // 2, batch - 1
    for place, pair in zip(places, rows, strict=True):
        for cache, numbers in zip(caches, pair, strict=True):
            cache[place, :90] = numbers
    q = rows[0, 0, :1].to(torch.bfloat16).expand(batch, 1, heads, dim).contiguous()
    used = torch.full((batch,), 90, dtype=torch.int32, device="cuda")
    with attnreg.use_backend(named):
        for _ in range(3):
            out = flash_attn_with_kvcache(q, *caches, cache_seqlens=used, causal=True)
            torch.cuda.synchronize()
    assert ran() == {named: (3, 0)}
    for place in places:
        keys, values = (x[place, :90].double() for x in caches)
        right, _ = truth.attention(q[place].double(), keys, values, window=(-1, 0))
        truth.assert_near(out[place], right, torch.bfloat16)
