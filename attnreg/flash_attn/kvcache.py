"""Decoding with a cache of keys and values, as flash-attn's `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.errors import InvalidInputError
from attnreg.flash_attn.functions import Window, options_of, regular_offsets
from attnreg.varlen.front import AuxRequest, varlen_attn


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append keys and values to a cache, in place, and compute attention over what it holds then.

    For inference: nothing has a gradient.

    Args:
        q: (B, S_q, H, D).
        k_cache, v_cache: (cached sequences, S_cache, H_k, D); with a `block_table` pages, (pages, page size,
            H_k, D).
        k, v: (B, S_new, H_k, D), written at `cache_seqlens` of each sequence; both or none.
        rotary_cos, rotary_sin: (positions, rotary dim / 2): the first dims of `k`, and of `q`, are rotated by
            their position, which for all rows of `q` is that of the first where there is no mask.
        cache_seqlens: int32 (B,) or one number, how many tokens each sequence has in the cache; all, unless
            given.
        cache_batch_idx: int32 (B,), which sequence of the cache is whose; the first B in order, unless given.
        cache_leftpad: int32 (B,), how many tokens at the beginning of a cached sequence don't count.
        block_table: int32 (B, pages of a sequence).
        rotary_interleaved: whether dims 0 and 1, 2 and 3, ... are rotated together, not those of two halves.
        num_splits: into how many pieces the keys are split; 0 lets the kernel choose.

    Other arguments and errors are those of `flash_attn_func`.

    Returns:
        The output (B, S_q, H, D); with `return_softmax_lse` also the LSE, float32 (B, H, S_q).
    """
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic=False)
    batch, length_q = q.shape[:2]
    _check(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table)
    used = _lengths(cache_seqlens, batch, k_cache, block_table, q.device)
    # Where a token of a sequence is in the cache: page and row; without pages a cached sequence is one page.
    pages = block_table
    if pages is None:
        pages = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        pages = pages.to(torch.int32)[:, None]
    if rotary_cos is not None and rotary_sin is not None:
        is_masked = causal or tuple(window_size) != (-1, -1)
        q = _rotated(
            q, rotary_cos, rotary_sin, _positions(used, length_q if is_masked else 1), rotary_interleaved
        )
        if k is not None:
            positions = _positions(used, k.shape[1])
            k = _rotated(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
    if k is not None and v is not None:
        at = _positions(used, k.shape[1]).long()
        size = k_cache.shape[1]
        where = pages.gather(1, at // size).long(), at % size
        k_cache.index_put_(where, k.to(k_cache.dtype))
        v_cache.index_put_(where, v.to(v_cache.dtype))
        used = used + k.shape[1]
    options |= {"seqused_k": used, "num_splits": num_splits or None}
    offsets_k: Tensor | None = None
    if block_table is None and cache_batch_idx is None and cache_leftpad is None:
        # More backends take counts of keys than pages.
        offsets_k, longest = regular_offsets(batch, k_cache.shape[1], k_cache), k_cache.shape[1]
        k_cache, v_cache = (x[:batch].flatten(0, 1) for x in (k_cache, v_cache))
    else:
        if cache_leftpad is not None:
            k_cache, v_cache, pages = _one_token_pages(k_cache, v_cache, pages, cache_leftpad)
            options["seqused_k"] = used - cache_leftpad.to(torch.int32)
        longest = pages.shape[1] * k_cache.shape[1]
        options["block_table"] = pages.contiguous()
    offsets_q, aux = regular_offsets(batch, length_q, q), AuxRequest(lse=return_softmax_lse)
    lengths = offsets_q, offsets_k, length_q, longest
    found: Any = varlen_attn(
        q.flatten(0, 1), k_cache, v_cache, *lengths, return_aux=aux, enable_gqa=True, **options
    )
    out, lse = found if return_softmax_lse else (found, None)
    out = out.unflatten(0, (batch, length_q))
    if lse is None:
        return out
    return out, lse.unflatten(1, (batch, length_q)).transpose(0, 1).contiguous()


def _check(
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:
    if (k is None) != (v is None):
        raise InvalidInputError("k and v: got one of the two, expected both or none")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidInputError("rotary_cos and rotary_sin: got one of the two, expected both or none")
    if cache_seqlens is None and (k is not None or rotary_cos is not None):
        raise InvalidInputError("cache_seqlens: got None, expected the lengths before k and v are appended")
    if cache_batch_idx is not None and block_table is not None:
        raise InvalidInputError(
            "cache_batch_idx: got a tensor, expected None, as block_table says where keys are"
        )


def _lengths(
    given: int | Tensor | None, batch: int, k_cache: Tensor, block_table: Tensor | None, device: torch.device
) -> Tensor:
    """Return how many tokens each sequence has in the cache, int32 (B,)."""
    if isinstance(given, Tensor):
        return given.to(torch.int32)
    pages = 1 if block_table is None else block_table.shape[1]
    full = pages * k_cache.shape[1]
    return torch.full((batch,), full if given is None else given, dtype=torch.int32, device=device)


def _positions(first: Tensor, count: int) -> Tensor:
    """Return the positions (B, count) of tokens that begin at `first`, (B,)."""
    return first[:, None] + torch.arange(count, dtype=torch.int32, device=first.device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Return (B, S, H, D) with its first dims rotated by (B, S) or (B, 1) positions, in float32."""
    size = 2 * cos.shape[-1]
    cos, sin = (table.float()[positions.long()][:, :, None] for table in (cos, sin))
    head = x[..., :size].float()
    one, other = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    both = one * cos - other * sin, one * sin + other * cos
    rotated = torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., size:]), dim=-1)


def _one_token_pages(k_cache: Tensor, v_cache: Tensor, pages: Tensor, leftpad: Tensor) -> tuple[Tensor, ...]:
    """Return the cache in pages of one token, and those of each sequence, without what pads it."""
    size = k_cache.shape[1]
    at = torch.arange(pages.shape[1] * size, device=pages.device) + leftpad.long()[:, None]
    at = at.clamp(max=pages.shape[1] * size - 1)  # what lies beyond isn't used
    found = pages.long().gather(1, at // size) * size + at % size
    return k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None], found.to(torch.int32)
