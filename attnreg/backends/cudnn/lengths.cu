// What execution plans read of the offsets of a packed batch: see lengths.py.

typedef long long i64;

// Row 0 has the lengths, two vectors of 32 bits; rows 1 and 2 where the sequences of queries and of keys begin, in
// tokens; the others the same times a token stride. What lies behind the last sequence is empty.
extern "C" __global__ void attnreg_cudnn_lengths(
    i64* rows, const int* offsets_q, const int* offsets_k, i64 step_q, i64 step_k, i64 batch, i64 width,
    const int* used, i64 step_used, i64 count, i64 of_keys, i64 s0, i64 s1, i64 s2, i64 s3, i64 s4,
    i64 s5, i64 s6, i64 s7, i64 s8, i64 s9, i64 s10, i64 s11) {
  const i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const bool is_sequence = column < batch;
  const i64 sequence = is_sequence ? column : batch;
  const i64 begin_q = offsets_q[sequence * step_q], begin_k = offsets_k[sequence * step_k];
  int queries = 0, keys = 0;
  if (is_sequence) {
    keys = used ? used[sequence * step_used] : offsets_k[(sequence + 1) * step_k] - (int)begin_k;
    // cuDNN 9.19 writes NaN for a sequence without keys; one without queries it leaves alone.
    queries = keys > 0 ? offsets_q[(sequence + 1) * step_q] - (int)begin_q : 0;
  }
  ((int*)rows)[column] = queries;
  ((int*)rows)[width + column] = keys;
  rows[width + column] = begin_q;
  rows[2 * width + column] = begin_k;
  const i64 strides[] = {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11};
  for (i64 n = 0; n < count; n++)
    rows[(3 + n) * width + column] = (of_keys >> n & 1 ? begin_k : begin_q) * strides[n];
}
