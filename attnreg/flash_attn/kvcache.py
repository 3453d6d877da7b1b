"""Decoding with a cache of keys and values, as flash-attn's `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnreg.contract.regular import regular_offsets
from attnreg.errors import InvalidInputError
from attnreg.flash_attn.attention import (
    OF_DENSE,
    Options,
    attend_packed,
    checked_call,
    naming,
    unpacked,
)
from attnreg.flash_attn.functions import Window
from attnreg.flash_attn.rotary import check_compiled, positions, rotated
from attnreg.torchlib.modes import is_plain
from attnreg.varlen import spread
from attnreg.varlen.plans import check_tensors, window

Pair = tuple[Tensor, Tensor]

_NAMES = OF_DENSE | {"key": "k_cache", "value": "v_cache", "seqused_k": "cache_seqlens"}


@naming(_NAMES)
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

    For inference: nothing has a gradient. A call that is refused before a kernel runs has written nothing.

    On a GPU the numbers in `cache_seqlens`, `cache_batch_idx`, `cache_leftpad` and `block_table` aren't
    checked, as that would wait for it: one below 0, or beyond the cache, is an error of CUDA, or keys of
    another sequence are overwritten or seen. In compiled code on a CPU one is a `RuntimeError`.

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
    given = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, **{x: y for x, y in given.items() if y is not None})
    _check(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table)
    options = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    (batch, length_q), new = q.shape[:2], 0 if k is None else k.shape[1]
    used = _lengths(cache_seqlens, q, k_cache, block_table, new)
    _check_places(q, k_cache, cache_batch_idx, cache_leftpad, block_table, used, new)
    if rotary_cos is not None and rotary_sin is not None:
        tables = rotary_cos, rotary_sin, rotary_interleaved
        is_masked = causal or window(window_size, False) != (-1, -1)
        q = rotated(q, positions(used, length_q if is_masked else 1), *tables)
        k = None if k is None else rotated(k, positions(used, k.shape[1]), *tables)
    seen, cu_seqlens_k, longest = used + new if new else used, None, k_cache.shape[1]
    pages, table = _pages(block_table, cache_batch_idx, cache_leftpad, batch, used), None
    if pages is None:
        # More backends take counts of keys than pages.
        cu_seqlens_k = regular_offsets(batch, longest, k_cache)
    elif cache_leftpad is None:
        longest, table = longest * pages.shape[1], pages.contiguous()
    else:
        longest, table = longest * pages.shape[1], _one_token_pages(k_cache, pages, cache_leftpad)
        seen = seen - cache_leftpad.to(torch.int32)

    def keys_and_values() -> tuple[Tensor, Tensor]:
        if table is None:
            return k_cache[:batch].flatten(0, 1), v_cache[:batch].flatten(0, 1)
        if cache_leftpad is None:
            return k_cache, v_cache
        return k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None]

    lengths = regular_offsets(batch, length_q, q), cu_seqlens_k, length_q, longest
    q, splits = q.flatten(0, 1), num_splits or None
    planned = checked_call(q, *keys_and_values(), lengths, options, seen, table, splits)
    if k is not None and v is not None:  # nothing is written for a call that is refused
        _append((k, v), (k_cache, v_cache), cu_seqlens_k is not None, pages, used)
    out, lse = attend_packed(q, *keys_and_values(), lengths, options, seen, table, splits, planned)
    if return_softmax_lse:
        return unpacked(out, lse, batch, length_q)
    return out.view(batch, length_q, *out.shape[1:])


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
    for name, tensor in {"q": q, "k_cache": k_cache, "v_cache": v_cache}.items():
        if tensor.dim() != 4:
            layout = "(batch, length, heads, head_dim)"
            raise InvalidInputError(f"{name}: got {tuple(tensor.shape)}, expected 4 dimensions {layout}")
    if block_table is not None:
        _check_integers("block_table", block_table, q, (len(q), "pages of a sequence"))
        if not k_cache.shape[1]:
            raise InvalidInputError(
                f"k_cache: got {tuple(k_cache.shape)}, expected pages of at least one token"
            )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise InvalidInputError(
            f"v_cache: got shape {tuple(v_cache.shape)}, expected that of k_cache up to the head dim, "
            f"{tuple(k_cache.shape)}"
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
    if cache_batch_idx is None and block_table is None and len(k_cache) < len(q):
        raise InvalidInputError(
            f"k_cache: got {len(k_cache)} sequences for {len(q)} of q, expected at least as many"
        )


def _check_places(
    q: Tensor,
    k_cache: Tensor,
    places: Tensor | None,
    leftpad: Tensor | None,
    block_table: Tensor | None,
    used: Tensor,
    new: int,
) -> None:
    """Check which keys a call is about; on a GPU all but the numbers, which it would have to wait for."""
    if block_table is not None and _is_read(block_table, used):
        counts = (-((used + new) // -k_cache.shape[1])).tolist()
        for row, (pages, count) in enumerate(zip(block_table.tolist(), counts, strict=True)):
            _check_each(f"block_table[{row}]", pages[:count], [len(k_cache) - 1] * count)
    if places is not None:
        _check_integers("cache_batch_idx", places, q, (len(q),))
        if _is_read(places):
            _check_each("cache_batch_idx", places.tolist(), [len(k_cache) - 1] * len(q))
    if leftpad is not None:
        _check_integers("cache_leftpad", leftpad, q, (len(q),))
        if _is_read(leftpad, used):
            _check_each("cache_leftpad", leftpad.tolist(), (used + new).tolist())


def _check_integers(name: str, given: object, q: Tensor, shape: tuple[int | str, ...]) -> None:
    """Check that an argument is a tensor of int32 or int64 on the device of q."""
    expected = f"int32 of shape ({', '.join(map(str, shape))}{',' * (len(shape) == 1)}) on {q.device}"
    if not isinstance(given, Tensor):
        raise InvalidInputError(f"{name}: got {given!r}, expected a tensor, {expected}")
    fits = given.dim() == len(shape) and len(given) == shape[0] and given.device == q.device
    if not fits or given.dtype not in (torch.int32, torch.int64):
        got = f"{given.dtype} of shape {tuple(given.shape)} on {given.device}"
        raise InvalidInputError(f"{name}: got {got}, expected {expected}")


def _is_read(*given: Tensor) -> bool:
    """Whether the host may look at the numbers of tensors."""
    return not torch.compiler.is_compiling() and all(x.is_cpu for x in given) and is_plain(*given)


def _check_each(name: str, numbers: list[int], highest: list[int]) -> None:
    for at, (number, most) in enumerate(zip(numbers, highest, strict=True)):
        if not 0 <= number <= most:
            raise InvalidInputError(f"{name}: got {number} at index {at}, expected 0 to {most}")


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
    given: int | Tensor | None, q: Tensor, k_cache: Tensor, block_table: Tensor | None, new: int
) -> Tensor:
    """Return how many tokens each sequence has in the cache, int32 (B,), which has to have room for new ones.

    Whether it has isn't known of lengths on a GPU: to read them would wait for it.
    """
    room = _room(k_cache, block_table)
    if isinstance(given, Tensor):
        _check_integers("cache_seqlens", given, q, (len(q),))
        used = given.to(torch.int32)
        numbers = given.tolist() if _is_read(given) else []
    elif given is None or isinstance(given, int):
        numbers = [room if given is None else given]
        used = torch.full((len(q),), *numbers, dtype=torch.int32, device=k_cache.device)
    else:
        raise InvalidInputError(f"cache_seqlens: got {given!r}, expected a tensor or one number")
    if (least := min(numbers, default=0)) < 0:
        raise InvalidInputError(f"cache_seqlens: got {least}, expected 0 or more")
    if (most := max(numbers, default=0)) + new > room:
        of_what = "the cache" if block_table is None else f"a row of block_table, {tuple(block_table.shape)}"
        raise InvalidInputError(
            f"cache_seqlens: got {most} and {new} new tokens, expected at most {room}, the room of {of_what}"
        )
    return used


def _pages(
    block_table: Tensor | None, places: Tensor | None, leftpad: Tensor | None, batch: int, used: Tensor
) -> Tensor | None:
    """Return the pages of each sequence, (B, pages); a cached sequence is one. None if all are in order."""
    if block_table is not None:
        return block_table.to(torch.int32)
    if places is not None:
        return places.to(torch.int32)[:, None]
    return None if leftpad is None else torch.arange(batch, dtype=torch.int32, device=used.device)[:, None]


def _append(new: Pair, caches: Pair, in_order: bool, pages: Tensor | None, used: Tensor) -> None:
    """Write new keys and values behind the `used` ones, in place; a cache `in_order` has no pages."""
    (batch, count), size = new[0].shape[:2], caches[0].shape[1]
    room = size if pages is None else size * pages.shape[1]
    check_compiled("cache_seqlens", used, room - count + 1)
    if in_order and all(len(x) == 1 or x.stride(0) == size * x.stride(1) for x in caches):
        # All tokens are one dimension: that takes fewer operations, and a step on a GPU is bound by the host.
        at = regular_offsets(batch, size, used, torch.int64)[:-1] + used
        at = at if count == 1 else positions(at, count).flatten()
        for rows, cache in zip(new, caches, strict=True):
            cache.view(-1, *cache.shape[2:]).index_put_((at,), rows.flatten(0, 1).to(cache.dtype))
        return
    at = positions(used, count).long()
    if pages is None:
        pages = torch.arange(batch, device=used.device)[:, None]
    where = pages.gather(1, at // size).long(), at % size
    check_compiled("block_table or cache_batch_idx", where[0], len(caches[0]))
    for rows, cache in zip(new, caches, strict=True):
        cache.index_put_(where, rows.to(cache.dtype))


def _one_token_pages(k_cache: Tensor, pages: Tensor, leftpad: Tensor) -> Tensor:
    """Return the pages of each sequence, without what pads it, of a cache that lies in pages of one token."""
    size = k_cache.shape[1]
    at = torch.arange(pages.shape[1] * size, device=pages.device) + leftpad.long()[:, None]
    at = at.clamp(max=pages.shape[1] * size - 1)  # what lies beyond isn't used
    return (pages.long().gather(1, at // size) * size + at % size).to(torch.int32)
