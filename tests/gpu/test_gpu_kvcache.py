"""On a GPU: decoding with a cache, which keys count and which backend runs it."""

import pytest
import torch
from support import gpu, truth

import attnreg
from attnreg.flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

ROOM, USED = 700, (0, 699, 1, 300, 65)


def drawn(heads, tokens, dim=64, dtype=torch.bfloat16):
    """Return queries, caches with NaN in all that isn't used, new keys and values, and the used counts."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(length, count):
        shape = (len(USED), length, count, dim)
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    used = torch.tensor(USED, dtype=torch.int32, device="cuda").clamp(max=ROOM - tokens)
    caches = [normal(ROOM, heads[1]) for _ in range(2)]
    for cache in caches:
        cache.masked_fill_((torch.arange(ROOM, device="cuda") >= used[:, None])[..., None, None], torch.nan)
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
def test_where_nothing_is_asked_for_fa2_decodes(ran, heads, tokens):
    q, caches, new, used = drawn(heads, tokens)
    out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=used, causal=True)
    truth.assert_near(out, expected(q, caches, new, used)[0], torch.bfloat16)
    assert ran() == {"FA2": (1, 0)}
