// The kernels of rows.py. A step is a stride: in bytes, so that the dtype doesn't matter, but of offsets and
// the LSE in elements. Each parameter has eight bytes.

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
__device__ void set_as(char* to, const char* from, i64 heads, i64 head_bytes, i64 to_step, i64 from_step) {
  const unsigned pieces = head_bytes / sizeof(T), all = heads * pieces;
#pragma unroll 1  // compiles in half the time
  for (unsigned piece = threadIdx.x % 32; piece < all; piece += 32) {
    const unsigned head = piece / pieces, place = (piece - head * pieces) * sizeof(T);
    *(T*)(to + head * to_step + place) = from ? *(const T*)(from + head * from_step + place) : T();
  }
}

// Have a warp set a row of all heads to another one, or to zeros, in as large pieces as both places allow.
__device__ __noinline__ void set_row(
    char* to, const char* from, i64 heads, i64 head_bytes, i64 to_step, i64 from_step) {
  if (to_step == head_bytes && (!from || from_step == head_bytes)) {
    head_bytes *= heads;
    heads = 1;
  }
  const i64 places = (i64)to | (i64)from | head_bytes | (heads > 1 ? to_step | from_step : 0);
  if (places % 16 == 0) {
    set_as<uint4>(to, from, heads, head_bytes, to_step, from_step);
  } else if (places % 4 == 0) {
    set_as<unsigned>(to, from, heads, head_bytes, to_step, from_step);
  } else {
    set_as<unsigned short>(to, from, heads, head_bytes, to_step, from_step);
  }
}

__device__ void zero_row(char* row, i64 heads, i64 head_bytes, i64 head_step) {
  set_row(row, nullptr, heads, head_bytes, head_step, 0);
}

// The rows of a block that are to be cleared, as bits that all its threads see.
__device__ bool mark(bool clear, unsigned* marked) {
  const unsigned bits = __ballot_sync(0xffffffffu, clear);
  if (threadIdx.x % 32 == 0) marked[threadIdx.x / 32] = bits;
  return __syncthreads_or(clear);
}

// Write what is so of offsets into memory of the host, which reads it meanwhile, and of the device unless `result` is
// null: whether no row is unused and, in the second byte, whether every row sees a key. By all threads of a block.
__device__ void write_facts(
    unsigned short* result, unsigned short* place, const int* offsets_q, const int* offsets_k, i64 batch,
    i64 tokens_q, i64 tokens_k, i64 step_q, i64 step_k) {
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
    const unsigned short both = filled | covered << 8;
    if (result) *result = both;
    if (place) {
      *(volatile unsigned short*)place = both;
      __threadfence_system();
    }
  }
}

// Set the marked rows of a block's outputs to 0, and their LSE to -inf. By all threads of the block.
__device__ void clear_outputs(
    const unsigned* marked, i64 first, char* out, float* lse, i64 heads, i64 head_bytes, i64 row_step, i64 head_step,
    i64 lse_head_step, i64 lse_row_step) {
  for (unsigned n = threadIdx.x / 32; n < blockDim.x; n += blockDim.x / 32) {
    if (!(marked[n / 32] >> n % 32 & 1)) continue;
    zero_row(out + (first + n) * row_step, heads, head_bytes, head_step);
    for (i64 head = threadIdx.x % 32; head < heads; head += 32)
      lse[head * lse_head_step + (first + n) * lse_row_step] = __int_as_float(0xff800000);
  }
}

// If there is a place for facts, a further block of the grid, behind those for rows, writes them; of the offsets of queries
// alone if `tokens_k` is below 0. Where `used` isn't null it has the number of each sequence's keys.
extern "C" __global__ void attnreg_clear_forward(
    char* out, float* lse, const int* offsets_q, const int* offsets_k, i64 batch, i64 tokens, i64 heads,
    i64 head_bytes, i64 row_step, i64 head_step, i64 lse_head_step, i64 lse_row_step, i64 left, i64 right,
    i64 step_q, i64 step_k, i64 tokens_k, unsigned short* place, const int* used, i64 step_used) {
  __shared__ unsigned marked[4];
  const i64 first = (i64)blockIdx.x * blockDim.x, row = first + threadIdx.x;
  if (first >= tokens) {
    const bool both = tokens_k >= 0;
    write_facts(nullptr, place, offsets_q, both ? offsets_k : offsets_q, batch, tokens, both ? tokens_k : tokens, step_q,
                both ? step_k : step_q);
    return;
  }
  bool clear = false;
  if (row < tokens) {
    const i64 sequence = sequence_of(row, offsets_q, step_q, batch);
    clear = sequence < 0 || sequence == batch;
    if (!clear) {
      const i64 keys = used ? used[sequence * step_used] : length_of(sequence, offsets_k, step_k);
      const i64 place = row - offsets_q[sequence * step_q] + keys - length_of(sequence, offsets_q, step_q);
      const i64 begin = left < 0 ? 0 : max(place - left, 0ll);
      const i64 last = right < 0 ? keys - 1 : min(place + right, keys - 1);
      clear = begin > last;
    }
  }
  if (mark(clear, marked))
    clear_outputs(marked, first, out, lse, heads, head_bytes, row_step, head_step, lse_head_step, lse_row_step);
}

extern "C" __global__ void attnreg_clear_backward(
    char* dq, char* dk, char* dv, const int* offsets_q, const int* offsets_k, i64 batch, i64 tokens_q,
    i64 tokens_k, i64 heads_q, i64 heads_k, i64 q_bytes, i64 k_bytes, i64 v_bytes, i64 q_row_step,
    i64 q_head_step, i64 k_row_step, i64 k_head_step, i64 v_row_step, i64 v_head_step, i64 step_q,
    i64 step_k) {
  __shared__ unsigned marked[4];
  // The first blocks are for the rows of queries, the others for those of keys.
  const i64 blocks_q = (tokens_q + blockDim.x - 1) / blockDim.x;
  const bool queries = blockIdx.x < blocks_q;
  const i64 first = (blockIdx.x - (queries ? 0 : blocks_q)) * blockDim.x, row = first + threadIdx.x;
  bool clear = false;
  if (row < (queries ? tokens_q : tokens_k)) {
    const int *own = queries ? offsets_q : offsets_k, *others = queries ? offsets_k : offsets_q;
    const i64 sequence = sequence_of(row, own, queries ? step_q : step_k, batch);
    clear = sequence < 0 || sequence == batch || length_of(sequence, others, queries ? step_k : step_q) <= 0;
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

// Copy rows; those past the last offset become zeros. A warp copies a row. If `out` isn't null, further blocks clear outputs
// before the call: the rows that lie in no sequence, of `tokens_q`. As of the kernel above a last block writes facts, if there
// is a place for them.
extern "C" __global__ void attnreg_blank(
    char* to, const char* from, const int* offsets, i64 batch, i64 tokens, i64 heads, i64 head_bytes,
    i64 to_row_step, i64 to_head_step, i64 from_row_step, i64 from_head_step, i64 step, const int* offsets_q,
    const int* offsets_k, i64 tokens_q, i64 tokens_k, i64 step_q, i64 step_k, unsigned short* place, char* out,
    float* lse, i64 out_heads, i64 out_head_bytes, i64 out_row_step, i64 out_head_step, i64 lse_head_step,
    i64 lse_row_step) {
  __shared__ unsigned marked[4];
  const i64 copying = (tokens * 32 + blockDim.x - 1) / blockDim.x, row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (blockIdx.x < copying) {
    if (row >= tokens) return;
    const char* source = row < offsets[batch * step] ? from + row * from_row_step : nullptr;
    set_row(to + row * to_row_step, source, heads, head_bytes, to_head_step, from_head_step);
    return;
  }
  const i64 first = (blockIdx.x - copying) * blockDim.x, query = first + threadIdx.x;
  if (!out || first >= tokens_q) {
    write_facts(nullptr, place, offsets_q, offsets_k, batch, tokens_q, tokens_k, step_q, step_k);
    return;
  }
  if (mark(query < tokens_q && (query < offsets_q[0] || query >= offsets_q[batch * step_q]), marked))
    clear_outputs(marked, first, out, lse, out_heads, out_head_bytes, out_row_step, out_head_step, lse_head_step,
                  lse_row_step);
}

extern "C" __global__ void __launch_bounds__(1024) attnreg_facts(
    unsigned short* result, unsigned short* place, const int* offsets_q, const int* offsets_k, i64 batch,
    i64 tokens_q, i64 tokens_k, i64 step_q, i64 step_k) {
  write_facts(result, place, offsets_q, offsets_k, batch, tokens_q, tokens_k, step_q, step_k);
}

// How many keys each sequence has and, behind a multiple of four numbers, the offsets: see counts.py. `OffsetsKernel` in Python
// says which arguments such a kernel gets.
extern "C" __global__ void attnreg_counts(
    int* numbers, const int*, const int* offsets_k, i64, i64 step_k, i64 batch, i64) {
  const i64 sequence = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (sequence >= batch) return;
  int* const offsets = numbers + (batch + 3) / 4 * 4;
  const int begin = offsets_k[sequence * step_k], end = offsets_k[(sequence + 1) * step_k];
  numbers[sequence] = end - begin;
  offsets[sequence] = begin;
  if (sequence == batch - 1) offsets[batch] = end;
}

// Write new rows of keys and values behind the `used` ones of each sequence of a cache, and into `counts` how many there are
// then. A sequence has `width` pages of `size` tokens, of all `pages`; without a table it is a page, in order. A warp writes
// a row of all heads, even ones of keys. A number out of range ends in an error of CUDA.
extern "C" __global__ void attnreg_append(
    int* counts, const int* used, i64 step_used, const int* table, i64 width, i64 size, i64 pages, i64 batch,
    i64 count, i64 heads, char* keys, const char* new_keys, i64 k_bytes, i64 k_step, i64 k_row_step,
    i64 k_head_step, i64 new_k_step, i64 new_k_row_step, i64 new_k_head_step, char* values,
    const char* new_values, i64 v_bytes, i64 v_step, i64 v_row_step, i64 v_head_step, i64 new_v_step,
    i64 new_v_row_step, i64 new_v_head_step) {
  const i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, row = warp / 2;
  if (row >= batch * count) return;
  const i64 sequence = row / count, number = row - sequence * count;
  const i64 first = used[sequence * step_used], token = first + number;
  if (first < 0 || token >= width * size) __trap();
  const i64 page = table ? table[sequence * width + token / size] : sequence, place = token % size;
  if (page < 0 || page >= pages) __trap();
  if (warp % 2) {
    set_row(values + page * v_step + place * v_row_step,
            new_values + sequence * new_v_step + number * new_v_row_step, heads, v_bytes, v_head_step, new_v_head_step);
  } else {
    set_row(keys + page * k_step + place * k_row_step,
            new_keys + sequence * new_k_step + number * new_k_row_step, heads, k_bytes, k_head_step, new_k_head_step);
    if (number == 0 && threadIdx.x % 32 == 0) counts[sequence] = (int)(first + count);
  }
}
