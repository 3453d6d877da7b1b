"""Decoding with a cache of keys and values, as flash-attn's `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.errors import InvalidInputError
from attnreg.flash_attn.attention import Options, attend_packed, regular_offsets, unpacked
from attnreg.flash_attn.functions import Window
from attnreg.varlen import spread
from attnreg.varlen.plans import check_tensors


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
    spread.check_is_off("a call without a cache: flash_attn_varlen_func with the offsets of the whole batch")
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    _check(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table)
    options = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    batch, length_q = q.shape[:2]
    used = _lengths(cache_seqlens, batch, k_cache, block_table, 0 if k is None else k.shape[1])
    if rotary_cos is not None and rotary_sin is not None:
        tables = rotary_cos, rotary_sin, rotary_interleaved
        is_masked = causal or tuple(window_size) != (-1, -1)
        q = _rotated(q, _positions(used, length_q if is_masked else 1), *tables)
        k = None if k is None else _rotated(k, _positions(used, k.shape[1]), *tables)
    pages = _pages(block_table, cache_batch_idx, batch, used)
    if k is not None and v is not None:
        _append(k, v, k_cache, v_cache, pages, used)
        used = used + k.shape[1]
    offsets_q, offsets_k, longest = regular_offsets(batch, length_q, q), None, k_cache.shape[1]
    if block_table is None and cache_batch_idx is None and cache_leftpad is None:
        # More backends take counts of keys than pages.
        offsets_k, table = regular_offsets(batch, longest, k_cache), None
        keys, values = (x[:batch].flatten(0, 1) for x in (k_cache, v_cache))
    else:
        keys, values, table = k_cache, v_cache, pages.contiguous()
        longest *= pages.shape[1]
        if cache_leftpad is not None:
            keys, values, table = _one_token_pages(keys, values, pages, cache_leftpad)
            used = used - cache_leftpad.to(torch.int32)
    lengths = offsets_q, offsets_k, length_q, longest
    packed = attend_packed(q.flatten(0, 1), keys, values, lengths, options, used, table, num_splits or None)
    out, lse = unpacked(*packed, batch)
    return (out, lse) if return_softmax_lse else out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:
    if q.dim() != 4:
        raise InvalidInputError(
            f"q: got {tuple(q.shape)}, expected 4 dimensions (batch, length, heads, head_dim)"
        )
    if (k is None) != (v is None):
        raise InvalidInputError("k and v: got one of the two, expected both or none")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        # What has another shape, PyTorch would expand.
        expected = len(q), *((k if k is not None else q).shape[1:2]), *cache.shape[2:]
        if new is not None and tuple(new.shape) != expected:
            raise InvalidInputError(
                f"{name}: got shape {tuple(new.shape)}, expected {expected}, as of the cache"
            )
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidInputError("rotary_cos and rotary_sin: got one of the two, expected both or none")
    if rotary_cos is not None and rotary_sin is not None:
        _check_rotary(rotary_cos, rotary_sin, q.shape[-1], _room(k_cache, block_table))
    if cache_seqlens is None and (k is not None or rotary_cos is not None):
        raise InvalidInputError("cache_seqlens: got None, expected the lengths before k and v are appended")
    if cache_batch_idx is not None and block_table is not None:
        raise InvalidInputError(
            "cache_batch_idx: got a tensor, expected None, as block_table says where keys are"
        )


def _check_rotary(cos: Tensor, sin: Tensor, head_dim: int, room: int) -> None:
    shapes = tuple(cos.shape), tuple(sin.shape)
    if shapes[0] != shapes[1] or cos.dim() != 2 or cos.shape[0] < room or 2 * cos.shape[1] > head_dim:
        raise InvalidInputError(
            f"rotary_cos and rotary_sin: got shapes {shapes[0]} and {shapes[1]}, expected equal ones: "
            f"(positions, rotary dim / 2), at least {room} positions and at most {head_dim} rotary dims"
        )


def _room(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Return how many tokens of one sequence a cache can hold."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _lengths(
    given: int | Tensor | None, batch: int, k_cache: Tensor, block_table: Tensor | None, new: int
) -> Tensor:
    """Return how many tokens each sequence has in the cache, int32 (B,), which has to have room for new ones.

    Whether it has isn't known of lengths on a GPU: to read them would wait for it.
    """
    room = _room(k_cache, block_table)
    if not (given is None or isinstance(given, int | Tensor)):
        raise InvalidInputError(f"cache_seqlens: got {given!r}, expected a tensor or one number")
    if isinstance(given, Tensor):
        most = int(given.max()) if given.is_cpu and given.numel() and not torch.compiler.is_compiling() else 0
        used = given.to(torch.int32)
    else:
        most = room if given is None else given
        used = torch.full((batch,), most, dtype=torch.int32, device=k_cache.device)
    if most + new > room:
        raise InvalidInputError(
            f"cache_seqlens: got {most} and {new} new tokens, expected at most {room}, the room of the cache"
        )
    return used


def _pages(block_table: Tensor | None, places: Tensor | None, batch: int, used: Tensor) -> Tensor:
    """Return the pages of each sequence, int32 (B, pages); without pages a cached sequence is one page."""
    if block_table is not None:
        return block_table
    if places is not None:
        return places.to(torch.int32)[:, None]
    return torch.arange(batch, dtype=torch.int32, device=used.device)[:, None]


def _append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Tensor, used: Tensor) -> None:
    """Write new keys and values behind the `used` ones, in place."""
    at, size = _positions(used, k.shape[1]).long(), k_cache.shape[1]
    where = pages.gather(1, at // size).long(), at % size
    k_cache.index_put_(where, k.to(k_cache.dtype))
    v_cache.index_put_(where, v.to(v_cache.dtype))


def _positions(first: Tensor, count: int) -> Tensor:
    """Return the positions (B, count) of tokens that begin at `first`, (B,)."""
    return first[:, None] + torch.arange(count, dtype=torch.int32, device=first.device)


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
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
