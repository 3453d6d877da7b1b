"""Decoding with a cache of keys and values, as flash-attn's `flash_attn_with_kvcache`."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from attnreg.core.dispatch import call_cache, scope
from attnreg.core.launching.memory import check_in_memory
from attnreg.core.launching.regular import regular_offsets
from attnreg.core.torchlib.frames import leave_module_uncompiled
from attnreg.core.torchlib.layout import GRAPH_TREES, needs_graph_memory
from attnreg.core.varlen import spread
from attnreg.core.varlen.plans import check_tensors, window
from attnreg.flash_attn.attention import (
    OF_DENSE,
    Options,
    attend_packed,
    checked_call,
    naming,
    unpacked,
)
from attnreg.flash_attn.functions import Window
from attnreg.flash_attn.kvcache_checks import check, check_places, lengths_of
from attnreg.flash_attn.rotary import check_compiled, positions, rotated

Pair = tuple[Tensor, Tensor]

_NAMES = OF_DENSE | {
    "key": "k_cache",
    "value": "v_cache",
    "seqused_k": "cache_seqlens",
    "cos": "rotary_cos",
    "sin": "rotary_sin",
}


@naming(_NAMES)
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
    """Append keys and values to a cache, in place, and compute attention over the cache.

    For inference: nothing has a gradient. A call that is refused before a kernel runs has written nothing.
    Tensors of int64 in the place of int32 are converted, in Python at each call.

    On a GPU the numbers in `cache_seqlens`, `cache_batch_idx`, `cache_leftpad` and `block_table` aren't
    checked, because a check would wait for the GPU. A number below 0, or beyond the cache, is then an error
    of CUDA, or keys of another sequence are overwritten or seen. In compiled code on a CPU it is a
    `RuntimeError`.

    Args:
        q: (B, S_q, H, D), in half precision or float32.
        k_cache, v_cache: (cached sequences, S_cache, H_k, D), of the same dtype; with a `block_table` (pages,
            page size, H_k, D).
        k, v: (B, S_new, H_k, D), written at `cache_seqlens` of each sequence; both or none.
        rotary_cos, rotary_sin: (positions, rotary dim / 2), tables by which the first dims of `k` and `q` are
            rotated according to their positions. Without a mask all rows of `q` have the position of the
            first.
        cache_seqlens: int32 (B,) or one number: the tokens that each sequence has in the cache; by default
            the cache is full.
        cache_batch_idx: int32 (B,), the place of each sequence in the cache; by default the first B, in
            order.
        cache_leftpad: int32 (B,), the tokens at the beginning of each cached sequence that don't count.
        block_table: int32 (B, pages of a sequence).
        rotary_interleaved: whether dims 0 and 1, 2 and 3, ... are rotated together. Otherwise dims of the two
            halves are.
        num_splits: the number of pieces that the keys are split into; 0 lets the kernel choose.

    Further arguments and errors are as for `flash_attn_func`.

    Returns:
        The output (B, S_q, H, D), in the dtype of `q`. With `return_softmax_lse` also the LSE, float32
        (B, H, S_q).
    """
    spread.check_is_off("a call without a cache: flash_attn_varlen_func with the offsets of the whole batch")
    options = Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    rotary, places = (rotary_cos, rotary_sin), (cache_batch_idx, cache_leftpad, block_table)
    is_simple = (
        rotary_cos is rotary_sin is cache_leftpad is alibi_slopes is None
        and not num_splits
        and type(softcap) in (float, int)
        and not softcap
        and not torch.compiler.is_compiling()
    )
    step, table = (q, k_cache, v_cache, k, v, cache_seqlens, options, bool(return_softmax_lse)), block_table
    if is_simple and cache_batch_idx is not None:
        # Without a `block_table` a cached sequence is a page.
        is_simple = block_table is None and isinstance(cache_batch_idx, Tensor) and cache_batch_idx.dim() == 1
        try:
            table = cache_batch_idx[:, None] if is_simple else None
        except RuntimeError:  # torch 2.13 makes no view of a storage that was freed
            check_in_memory(cache_batch_idx=cache_batch_idx)
            raise
    if is_simple and (results := _run_compiled(*step, table)) is not None:
        return results
    return _run(*step, rotary, rotary_interleaved, places, num_splits or None, is_simple)


def _run_compiled(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    used: int | Tensor | None,
    options: Options,
    with_lse: bool,
    table: Tensor | None,
    offsets: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Any:
    """Return what `flash_attn_with_kvcache` does, by the call cache; None where Python has to run the call.

    Nothing is written then. Arguments are that function's. Regular `offsets`, int32 (B + 1,), of queries and,
    without a `table`, of keys say that the call was checked and has a plan. Without them only calls of kinds
    run that are kept.
    """
    cache = call_cache.active if call_cache.is_loaded else call_cache.load()
    if cache is None or GRAPH_TREES in sys.modules:
        return None
    choice = scope.current()
    results = cache.decode(
        q, k_cache, v_cache, k, v, used, table, options.causal, options.window_size, options.softmax_scale,
        0 if choice is None else choice.number, with_lse, *offsets,
    )  # fmt: skip
    return results if results is None or with_lse else results[0]


@torch.no_grad()
def _run(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    options: Options,
    with_lse: bool,
    rotary: tuple[Tensor | None, Tensor | None],
    interleaved: bool,
    places: tuple[Tensor | None, Tensor | None, Tensor | None],
    splits: int | None,
    is_simple: bool,
) -> Any:
    """Check a call of `flash_attn_with_kvcache`, and run it; `is_simple` if the call cache may repeat it."""
    (cos, sin), (batch_idx, leftpad, block_table) = rotary, places
    optional = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin}
    present = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, **present)
    check(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, batch_idx, block_table)
    (batch, length_q), new = q.shape[:2], 0 if k is None else k.shape[1]
    used = lengths_of(cache_seqlens, q, k_cache, block_table, new)
    check_places(q, k_cache, batch_idx, leftpad, block_table, used, new)
    if cos is not None and sin is not None:
        is_masked = options.causal or window(options.window_size, False) != (-1, -1)
        q = rotated(q, positions(used, length_q if is_masked else 1), cos, sin, interleaved)
        k = None if k is None else rotated(k, positions(used, k.shape[1]), cos, sin, interleaved)
    key_counts, cu_seqlens_k, longest = used + new if new else used, None, k_cache.shape[1]
    pages, table = _pages(block_table, batch_idx, leftpad, batch, used), None
    if pages is None:
        # More backends support counts of keys than pages.
        cu_seqlens_k = regular_offsets(batch, longest, k_cache)
    elif leftpad is None:
        longest, table = longest * pages.shape[1], pages.contiguous()
    else:
        longest, table = longest * pages.shape[1], _one_token_pages(k_cache, pages, leftpad)
        key_counts = key_counts - leftpad.to(torch.int32)

    keys_and_values = functools.partial(_keys_and_values, k_cache, v_cache, table, leftpad, batch)
    lengths = regular_offsets(batch, length_q, q), cu_seqlens_k, length_q, longest
    packed = q.flatten(0, 1)
    planned = checked_call(packed, *keys_and_values(), lengths, options, key_counts, table, splits)
    # Once a plan has run, the call cache may run further calls of the kind.
    if is_simple and planned is not None and planned.plan.is_checked and planned.plan.turn is None:
        call_cache.provide_device_code(q.device)
        if not needs_graph_memory(q):
            step = q, k_cache, v_cache, k, v, used, options, with_lse, table
            if (results := _run_compiled(*step, lengths[:2])) is not None:
                return results
    if k is not None and v is not None:  # after the checks, so that a refused call writes nothing
        _append((k, v), (k_cache, v_cache), cu_seqlens_k is not None, pages, used)
    results = attend_packed(packed, *keys_and_values(), lengths, options, key_counts, table, splits, planned)
    if with_lse:
        return unpacked(*results, batch, length_q)
    return results[0].view(batch, length_q, *results[0].shape[1:]).detach()  # as `unpacked` does


def _keys_and_values(
    k_cache: Tensor, v_cache: Tensor, table: Tensor | None, leftpad: Tensor | None, batch: int
) -> tuple[Tensor, Tensor]:
    """Return the caches as `varlen_attn` has keys and values: (T, H, D), or pages with a table.

    Of a cache that isn't contiguous this may be a copy, so that it is called again after new keys were
    written.
    """
    if table is None:
        return k_cache[:batch].flatten(0, 1), v_cache[:batch].flatten(0, 1)
    if leftpad is None:
        return k_cache, v_cache
    return k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None]


def _pages(
    block_table: Tensor | None, places: Tensor | None, leftpad: Tensor | None, batch: int, used: Tensor
) -> Tensor | None:
    """Return the pages of each sequence, int32 (B, pages); None if the cache is in order.

    Without a `block_table` a cached sequence is a page.
    """
    if block_table is not None:
        return block_table.to(torch.int32)
    if places is not None:
        return places.to(torch.int32)[:, None]
    return None if leftpad is None else torch.arange(batch, dtype=torch.int32, device=used.device)[:, None]


def _append(new: Pair, caches: Pair, in_order: bool, pages: Tensor | None, used: Tensor) -> None:
    """Write new keys and values after the `used` tokens, in place; a cache `in_order` has no pages."""
    (batch, count), size = new[0].shape[:2], caches[0].shape[1]
    room = size if pages is None else size * pages.shape[1]
    check_compiled("cache_seqlens", used, room - count + 1)
    if in_order and all(len(x) == 1 or x.stride(0) == size * x.stride(1) for x in caches):
        # With all tokens in one dimension fewer operations run, and on a GPU the host bounds a decoding step.
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
    """Return the pages of each sequence without its padding, if each token of the cache is a page: int32."""
    size = k_cache.shape[1]
    at = torch.arange(pages.shape[1] * size, device=pages.device) + leftpad.long()[:, None]
    at = at.clamp(max=pages.shape[1] * size - 1)  # tokens beyond aren't used
    return (pages.long().gather(1, at // size) * size + at % size).to(torch.int32)


leave_module_uncompiled(__name__)
