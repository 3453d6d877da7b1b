"""Rows of packed tensors that belong to no sequence or see no key, found on the device without a wait.

Each function launches a small CUDA kernel. Where that can't run, torch's ops do the same. The host never
learns what the offsets are: a CUDA graph may hold these calls, and its replays read the offsets that are
there then.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from attnreg.core.torchlib.device_code import DeviceKernel

# Threads of a block. Of the kernels that clear a block is also for as many rows.
BLOCK = 128

# What the call cache has these kernels write besides, to save a launch; in Python `facts` is apart, and
# `clear_forward`.
_NO_FACTS, _NO_OUTPUT = (0,) * 7, (0,) * 8

_SOURCE = Path(__file__).with_name("rows.cu")
CLEAR_FORWARD = DeviceKernel("attnreg_clear_forward", _SOURCE)
CLEAR_BACKWARD = DeviceKernel("attnreg_clear_backward", _SOURCE)
BLANK = DeviceKernel("attnreg_blank", _SOURCE)
FACTS = DeviceKernel("attnreg_facts", _SOURCE)
# Launched by the call cache alone (`dispatch/csrc/decode.h`).
APPEND = DeviceKernel("attnreg_append", _SOURCE)
# Launched by the call cache, as `counts` describes it, and by Python.
COUNTS = DeviceKernel("attnreg_counts", _SOURCE)


def clear_forward(
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    window: tuple[int, int],
    used: Tensor | None = None,
) -> None:
    """Set output rows that see no key, or belong to no sequence, to 0 and their LSE to -inf.

    `out` is (T, H, D) in any dtype of 16 or 32 bits, `lse` (H, T) in float32, the offsets (B + 1,) in int32;
    `window` is (left, right) in tokens, -1 unbounded, aligned bottom-right. `used` is int32 (B,), how many
    keys of each sequence count; None for all.
    """
    tokens, heads, dim = out.shape
    left, right = window
    if not tokens:
        return
    if not _runs(CLEAR_FORWARD, cu_seqlens_q, cu_seqlens_k if used is None else used, out):
        counts = cu_seqlens_k.diff() if used is None else used
        unseeing = _unseeing(tokens, cu_seqlens_q, counts, left, right)
        out.masked_fill_(unseeing[:, None, None], 0)
        lse.masked_fill_(unseeing, -torch.inf)
        return
    size, batch = out.element_size(), cu_seqlens_q.shape[0] - 1
    row_step, head_step, _ = out.stride()
    sizes = batch, tokens, heads, dim * size, row_step * size, head_step * size, *lse.stride()
    steps = cu_seqlens_q.stride(0), cu_seqlens_k.stride(0)
    of_counts = (0, 0) if used is None else (used, used.stride(0))
    tensors = out, lse, cu_seqlens_q, cu_seqlens_k
    CLEAR_FORWARD(
        -(-tokens // BLOCK), BLOCK, *tensors, *sizes, left, right, *steps, *_NO_FACTS[-2:], *of_counts
    )


def clear_backward(dq: Tensor, dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Set gradients to 0 of rows that belong to no sequence, or to one without keys (dq) or queries (dk, dv).

    The gradients are (T, H, D) in any dtype of 16 or 32 bits, the offsets (B + 1,) in int32.
    """
    tokens_q, heads_q, _ = dq.shape
    tokens_k, heads_k, _ = dk.shape
    if not _runs(CLEAR_BACKWARD, cu_seqlens_q, cu_seqlens_k, dq, dk, dv):
        dq.masked_fill_(_alone(tokens_q, cu_seqlens_q, cu_seqlens_k)[:, None, None], 0)
        alone = _alone(tokens_k, cu_seqlens_k, cu_seqlens_q)[:, None, None]
        dk.masked_fill_(alone, 0)
        dv.masked_fill_(alone, 0)
        return
    if not tokens_q + tokens_k:
        return
    grid, batch = -(-tokens_q // BLOCK) - (-tokens_k // BLOCK), cu_seqlens_q.shape[0] - 1
    rows = [x.shape[2] * x.element_size() for x in (dq, dk, dv)]
    steps = [step * x.element_size() for x in (dq, dk, dv) for step in x.stride()[:2]]
    steps += cu_seqlens_q.stride(0), cu_seqlens_k.stride(0)
    sizes = batch, tokens_q, tokens_k, heads_q, heads_k, *rows
    CLEAR_BACKWARD(grid, BLOCK, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, *sizes, *steps)


def blanked(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return a copy of x, (T, H, D) in 16 or 32 bits, with zeros in the rows at or past the last offset."""
    tokens, heads, dim = x.shape
    copy = torch.empty_like(x)
    if not tokens:
        return copy
    if not _runs(BLANK, cu_seqlens, cu_seqlens, x, copy):
        past = torch.arange(tokens, dtype=cu_seqlens.dtype, device=x.device) >= cu_seqlens[-1]
        return copy.copy_(x.detach()).masked_fill_(past[:, None, None], 0)
    size = x.element_size()
    steps = [step * size for step in (*copy.stride()[:2], *x.stride()[:2])]
    batch = cu_seqlens.shape[0] - 1
    grid = -(-tokens * 32 // BLOCK)
    sizes = batch, tokens, heads, dim * size, *steps, cu_seqlens.stride(0)
    BLANK(grid, BLOCK, copy, x, cu_seqlens, *sizes, *_NO_FACTS, *_NO_OUTPUT)
    return copy


def facts(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens_q: int, tokens_k: int, place: Tensor | None = None
) -> Tensor:
    """Return on the device, as uint8 (2,), whether no row is unused and whether every row sees a key.

    No row is unused if every row belongs to a sequence, and each sequence has both queries and keys or
    neither. Every row sees a key, also under a causal mask, if moreover no sequence has fewer keys than
    queries. Offsets are int32 (B + 1,). The device writes both numbers to `place` as well, uint8 (2,) in
    pinned memory.
    """
    if _runs(FACTS, cu_seqlens_q, cu_seqlens_k):
        result = torch.empty(2, dtype=torch.uint8, device=cu_seqlens_q.device)
        steps = cu_seqlens_q.stride(0), cu_seqlens_k.stride(0)
        batch = cu_seqlens_q.shape[0] - 1
        host = 0 if place is None else place
        threads = min(-(-max(batch, 1) // 32) * 32, 1024)
        FACTS(1, threads, result, host, cu_seqlens_q, cu_seqlens_k, batch, tokens_q, tokens_k, *steps)
        return result
    queries, keys = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    filled = (queries >= 0).all() & (keys >= 0).all() & ((queries > 0) == (keys > 0)).all()
    for offsets, tokens in ((cu_seqlens_q, tokens_q), (cu_seqlens_k, tokens_k)):
        filled &= (offsets[0] == 0) & (offsets[-1] == tokens)
    result = torch.stack((filled, filled & (keys >= queries).all())).to(torch.uint8)
    if place is not None:
        place.copy_(result, non_blocking=True)
    return result


def _runs(kernel: DeviceKernel, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *rows: Tensor) -> bool:
    """Return whether a kernel can run on these tensors."""
    return (
        cu_seqlens_q.is_cuda
        and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        and all(x.stride(-1) == 1 and x.element_size() > 1 for x in rows)
        and kernel.available(cu_seqlens_q.get_device())
    )


def sequences_of(tokens: int, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each row its number, whether it belongs to a sequence, and to which; offsets are (B + 1,)."""
    rows = torch.arange(tokens, dtype=offsets.dtype, device=offsets.device)
    sequence = torch.searchsorted(offsets.contiguous(), rows, right=True, out_int32=True) - 1
    batch = offsets.shape[0] - 1
    return rows, (sequence >= 0) & (sequence < batch), sequence.clamp(0, max(batch - 1, 0))


def _unseeing(tokens: int, cu_seqlens_q: Tensor, counts: Tensor, left: int, right: int) -> Tensor:
    """Return a mask of the query rows that see no key, of `counts` keys, or belong to no sequence."""
    rows, inside, sequence = sequences_of(tokens, cu_seqlens_q)
    if cu_seqlens_q.shape[0] == 1:
        return ~inside
    keys = counts[sequence].long()  # a place in a window as wide as int32 allows is wider
    place = rows - cu_seqlens_q[1:][sequence] + keys
    begin = (place - left).clamp(min=0) if left >= 0 else torch.zeros_like(place)
    last = torch.minimum(place + right, keys - 1) if right >= 0 else keys - 1
    return ~inside | (begin > last)


def _alone(tokens: int, offsets: Tensor, others: Tensor) -> Tensor:
    """Return a mask of rows of no sequence, and of rows whose sequence is empty in `others`."""
    _, inside, sequence = sequences_of(tokens, offsets)
    if offsets.shape[0] == 1:
        return ~inside
    return ~inside | (others.diff()[sequence] <= 0)
