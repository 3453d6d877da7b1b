"""Rows of packed tensors that belong to no sequence or see no key, found on the device without a wait.

Each function is one small CUDA kernel, and torch's ops wherever that can't run. The host never learns what the
offsets are, so all this may be part of a CUDA graph, whose replays read the offsets that are there then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnreg.torchlib.device_code import DeviceKernel

# Threads of a block, and rows that it looks at. `launch_function` callers need it, too.
BLOCK = 128

# Rows are addressed in bytes, as the element's size is all that matters for zeros and copies.
_SHARED = """
typedef long long i64;

// The sequence of a row: -1 before the first, `batch` past the last.
__device__ i64 sequence_of(i64 row, const int* offsets, i64 step, i64 batch) {
  i64 low = -1, high = batch;  // the last offset that isn't greater than the row
  while (low < high) {
    const i64 middle = low + (high - low + 1) / 2;
    if (offsets[middle * step] <= row) low = middle; else high = middle - 1;
  }
  return low;
}

__device__ i64 length_of(i64 sequence, const int* offsets, i64 step) {
  return (i64)offsets[(sequence + 1) * step] - offsets[sequence * step];
}

template <class T>
__device__ void zero_as(char* row, i64 heads, i64 head_bytes, i64 head_step) {
  const unsigned pieces = head_bytes / sizeof(T), all = heads * pieces;
  for (unsigned piece = threadIdx.x % 32; piece < all; piece += 32) {
    const unsigned head = piece / pieces;
    *(T*)(row + head * head_step + (piece - head * pieces) * sizeof(T)) = T();
  }
}

// A row of all heads, by one warp, in as large pieces as its place allows.
__device__ void zero_row(char* row, i64 heads, i64 head_bytes, i64 head_step) {
  if (head_step == head_bytes) { head_bytes *= heads; heads = 1; }
  const i64 places = (i64)row | head_bytes | (heads > 1 ? head_step : 0);
  if (places % 16 == 0) zero_as<uint4>(row, heads, head_bytes, head_step);
  else if (places % 4 == 0) zero_as<unsigned>(row, heads, head_bytes, head_step);
  else zero_as<unsigned short>(row, heads, head_bytes, head_step);
}

// The rows of a block that are to be cleared, as bits that all its threads see.
__device__ bool mark(bool clear, unsigned* marked) {
  const unsigned bits = __ballot_sync(0xffffffffu, clear);
  if (threadIdx.x % 32 == 0) marked[threadIdx.x / 32] = bits;
  return __syncthreads_or(clear);
}
"""

_clear_forward = DeviceKernel(
    "attnreg_clear_forward",
    _SHARED
    + """
extern "C" __global__ void attnreg_clear_forward(
    char* out, float* lse, const int* offsets_q, const int* offsets_k, i64 batch, i64 tokens, i64 heads, i64 head_bytes,
    i64 row_step, i64 head_step, i64 lse_head_step, i64 lse_row_step, i64 left, i64 right, i64 step_q, i64 step_k) {
  __shared__ unsigned marked[4];
  const i64 first = (i64)blockIdx.x * blockDim.x, row = first + threadIdx.x;
  bool clear = false;
  if (row < tokens) {
    const i64 sequence = sequence_of(row, offsets_q, step_q, batch);
    clear = sequence < 0 || sequence == batch;
    if (!clear) {
      const i64 keys = length_of(sequence, offsets_k, step_k);
      const i64 place = row - offsets_q[sequence * step_q] + keys - length_of(sequence, offsets_q, step_q);
      const i64 begin = left < 0 ? 0 : max(place - left, 0ll), last = right < 0 ? keys - 1 : min(place + right, keys - 1);
      clear = begin > last;
    }
  }
  if (!mark(clear, marked)) return;
  for (unsigned n = threadIdx.x / 32; n < blockDim.x; n += blockDim.x / 32) {
    if (!(marked[n / 32] >> n % 32 & 1)) continue;
    zero_row(out + (first + n) * row_step, heads, head_bytes, head_step);
    for (i64 head = threadIdx.x % 32; head < heads; head += 32)
      lse[head * lse_head_step + (first + n) * lse_row_step] = __int_as_float(0xff800000);
  }
}
""",
)

_clear_backward = DeviceKernel(
    "attnreg_clear_backward",
    _SHARED
    + """
extern "C" __global__ void attnreg_clear_backward(
    char* dq, char* dk, char* dv, const int* offsets_q, const int* offsets_k, i64 batch, i64 tokens_q, i64 tokens_k,
    i64 heads_q, i64 heads_k, i64 q_bytes, i64 k_bytes, i64 v_bytes, i64 q_row_step, i64 q_head_step,
    i64 k_row_step, i64 k_head_step, i64 v_row_step, i64 v_head_step, i64 step_q, i64 step_k) {
  __shared__ unsigned marked[4];
  // The first blocks are for the rows of queries, the others for those of keys.
  const i64 blocks_q = (tokens_q + blockDim.x - 1) / blockDim.x;
  const bool queries = blockIdx.x < blocks_q;
  const i64 first = (blockIdx.x - (queries ? 0 : blocks_q)) * blockDim.x, row = first + threadIdx.x;
  bool clear = false;
  if (row < (queries ? tokens_q : tokens_k)) {
    const i64 sequence = queries ? sequence_of(row, offsets_q, step_q, batch) : sequence_of(row, offsets_k, step_k, batch);
    clear = sequence < 0 || sequence == batch ||
            (queries ? length_of(sequence, offsets_k, step_k) : length_of(sequence, offsets_q, step_q)) <= 0;
  }
  if (!mark(clear, marked)) return;
  for (unsigned n = threadIdx.x / 32; n < blockDim.x; n += blockDim.x / 32) {
    if (!(marked[n / 32] >> n % 32 & 1)) continue;
    if (queries) {
      zero_row(dq + (first + n) * q_row_step, heads_q, q_bytes, q_head_step);
    } else {
      zero_row(dk + (first + n) * k_row_step, heads_k, k_bytes, k_head_step);
      zero_row(dv + (first + n) * v_row_step, heads_k, v_bytes, v_head_step);
    }
  }
}
""",
)

_blank = DeviceKernel(
    "attnreg_blank",
    _SHARED
    + """
template <class T>
__device__ void copy_as(char* to, const char* from, bool used, i64 heads, i64 head_bytes, i64 to_step, i64 from_step) {
  const unsigned pieces = head_bytes / sizeof(T), all = heads * pieces;
  for (unsigned piece = threadIdx.x % 32; piece < all; piece += 32) {
    const unsigned head = piece / pieces, place = (piece - head * pieces) * sizeof(T);
    *(T*)(to + head * to_step + place) = used ? *(const T*)(from + head * from_step + place) : T();
  }
}

extern "C" __global__ void attnreg_blank(
    char* to, const char* from, const int* offsets, i64 batch, i64 tokens, i64 heads, i64 head_bytes, i64 to_row_step,
    i64 to_head_step, i64 from_row_step, i64 from_head_step, i64 step) {
  const i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;  // a warp for each
  if (row >= tokens) return;
  const bool used = row < offsets[batch * step];
  to += row * to_row_step;
  from += row * from_row_step;
  if (to_head_step == head_bytes && from_head_step == head_bytes) { head_bytes *= heads; heads = 1; }
  const i64 places = (i64)to | (i64)from | head_bytes | (heads > 1 ? to_head_step | from_head_step : 0);
  if (places % 16 == 0) copy_as<uint4>(to, from, used, heads, head_bytes, to_head_step, from_head_step);
  else if (places % 4 == 0) copy_as<unsigned>(to, from, used, heads, head_bytes, to_head_step, from_head_step);
  else copy_as<unsigned short>(to, from, used, heads, head_bytes, to_head_step, from_head_step);
}
""",
)

_state_facts = DeviceKernel(
    "attnreg_facts",
    _SHARED
    + """
extern "C" __global__ void attnreg_facts(
    uchar2* result, uchar2* place, const int* offsets_q, const int* offsets_k, i64 batch, i64 tokens_q, i64 tokens_k,
    i64 step_q, i64 step_k) {
  bool filled = offsets_q[0] == 0 && offsets_k[0] == 0 && offsets_q[batch * step_q] == tokens_q &&
                offsets_k[batch * step_k] == tokens_k;
  bool covered = true;
  for (i64 n = threadIdx.x; n < batch; n += blockDim.x) {
    const i64 queries = length_of(n, offsets_q, step_q), keys = length_of(n, offsets_k, step_k);
    filled = filled && queries >= 0 && keys >= 0 && (queries > 0) == (keys > 0);
    covered = covered && keys >= queries;
  }
  filled = __syncthreads_and(filled);
  covered = __syncthreads_and(covered) && filled;
  if (threadIdx.x == 0) {
    const uchar2 facts = make_uchar2(filled, covered);
    *result = facts;
    if (place) {  // in the host's memory
      *(volatile unsigned short*)place = facts.x | facts.y << 8;
      __threadfence_system();
    }
  }
}
""",
)


def clear_forward(
    out: Tensor, lse: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, window: tuple[int, int]
) -> None:
    """Set output rows that see no key, or belong to no sequence, to 0 and their LSE to -inf.

    `out` is (T, H, D) in any dtype of 16 or 32 bits, `lse` (H, T) in float32, the offsets (B + 1,) in int32;
    `window` is (left, right) in tokens, -1 unbounded, aligned bottom-right.
    """
    tokens, heads, dim = out.shape
    left, right = window
    if not tokens:
        return
    if not _runs(_clear_forward, cu_seqlens_q, cu_seqlens_k, out):
        unseeing = _unseeing(tokens, cu_seqlens_q, cu_seqlens_k, left, right)
        out.masked_fill_(unseeing[:, None, None], 0)
        lse.masked_fill_(unseeing, -torch.inf)
        return
    size = out.element_size()
    row_step, head_step, _ = out.stride()
    _clear_forward(
        -(-tokens // BLOCK),
        BLOCK,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_q.shape[0] - 1,
        tokens,
        heads,
        dim * size,
        row_step * size,
        head_step * size,
        *lse.stride(),
        left,
        right,
        cu_seqlens_q.stride(0),
        cu_seqlens_k.stride(0),
    )


def clear_backward(dq: Tensor, dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Set gradients to 0 of rows that belong to no sequence, or to one without keys (dq) or queries (dk, dv).

    The gradients are (T, H, D) in any dtype of 16 or 32 bits, the offsets (B + 1,) in int32.
    """
    tokens_q, heads_q, _ = dq.shape
    tokens_k, heads_k, _ = dk.shape
    if not _runs(_clear_backward, cu_seqlens_q, cu_seqlens_k, dq, dk, dv):
        dq.masked_fill_(_alone(tokens_q, cu_seqlens_q, cu_seqlens_k)[:, None, None], 0)
        alone = _alone(tokens_k, cu_seqlens_k, cu_seqlens_q)[:, None, None]
        dk.masked_fill_(alone, 0)
        dv.masked_fill_(alone, 0)
        return
    if not tokens_q + tokens_k:
        return
    sizes = [x.element_size() for x in (dq, dk, dv)]
    _clear_backward(
        -(-tokens_q // BLOCK) - (-tokens_k // BLOCK),
        BLOCK,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_q.shape[0] - 1,
        tokens_q,
        tokens_k,
        heads_q,
        heads_k,
        *(x.shape[2] * size for x, size in zip((dq, dk, dv), sizes, strict=True)),
        *(step * size for x, size in zip((dq, dk, dv), sizes, strict=True) for step in x.stride()[:2]),
        cu_seqlens_q.stride(0),
        cu_seqlens_k.stride(0),
    )


def blanked(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return a copy of x, (T, H, D) in 16 or 32 bits, with zeros in the rows at or past the last offset."""
    tokens, heads, dim = x.shape
    copy = torch.empty_like(x)
    if not tokens:
        return copy
    if not _runs(_blank, cu_seqlens, cu_seqlens, x, copy):
        past = torch.arange(tokens, dtype=cu_seqlens.dtype, device=x.device) >= cu_seqlens[-1]
        return torch.where(past[:, None, None], torch.zeros((), dtype=x.dtype, device=x.device), x, out=copy)
    size = x.element_size()
    steps = [step * size for step in (*copy.stride()[:2], *x.stride()[:2])]
    batch = cu_seqlens.shape[0] - 1
    grid = -(-tokens * 32 // BLOCK)
    _blank(grid, BLOCK, copy, x, cu_seqlens, batch, tokens, heads, dim * size, *steps, cu_seqlens.stride(0))
    return copy


def facts(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens_q: int, tokens_k: int, place: Tensor | None = None
) -> Tensor:
    """Return on the device, as two numbers in uint8, whether no row is unused and every row sees a key.

    No row is unused if every row belongs to a sequence, and each sequence has both queries and keys or
    neither. Every row sees a key, also under a causal mask, if moreover no sequence has fewer keys than
    queries. The device writes them to `place` as well, two numbers in uint8 in pinned memory.
    """
    if _runs(_state_facts, cu_seqlens_q, cu_seqlens_k):
        result = torch.empty(2, dtype=torch.uint8, device=cu_seqlens_q.device)
        steps = cu_seqlens_q.stride(0), cu_seqlens_k.stride(0)
        batch = cu_seqlens_q.shape[0] - 1
        host = 0 if place is None else place
        threads = min(-(-max(batch, 1) // 32) * 32, 1024)
        _state_facts(1, threads, result, host, cu_seqlens_q, cu_seqlens_k, batch, tokens_q, tokens_k, *steps)
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
        and all(x.stride(-1) == 1 for x in rows)
        and kernel.available(cu_seqlens_q.get_device())
    )


def _sequences(tokens: int, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each row its number, whether it belongs to a sequence, and to which."""
    rows = torch.arange(tokens, dtype=offsets.dtype, device=offsets.device)
    sequence = torch.searchsorted(offsets.contiguous(), rows, right=True) - 1
    batch = offsets.shape[0] - 1
    return rows, (sequence >= 0) & (sequence < batch), sequence.clamp(0, max(batch - 1, 0))


def _unseeing(tokens: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, left: int, right: int) -> Tensor:
    """Return a mask of the query rows that see no key or belong to no sequence."""
    rows, inside, sequence = _sequences(tokens, cu_seqlens_q)
    if cu_seqlens_q.shape[0] == 1:
        return ~inside
    keys = cu_seqlens_k.diff()[sequence]
    place = rows - cu_seqlens_q[1:][sequence] + keys
    begin = (place - left).clamp(min=0) if left >= 0 else torch.zeros_like(place)
    last = torch.minimum(place + right, keys - 1) if right >= 0 else keys - 1
    return ~inside | (begin > last)


def _alone(tokens: int, offsets: Tensor, others: Tensor) -> Tensor:
    """Return a mask of rows of no sequence, and of those whose sequence has none of the other kind of row."""
    _, inside, sequence = _sequences(tokens, offsets)
    if offsets.shape[0] == 1:
        return ~inside
    return ~inside | (others.diff()[sequence] <= 0)
