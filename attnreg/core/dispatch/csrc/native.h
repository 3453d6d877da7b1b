// What a C function of a `NativeLauncher` is given: see `launching/launchers.py`.

#pragma once

#include <cstdint>

namespace attnreg {

struct NativeOperand {  // (B, S, H, D) or (T, H, D), an LSE (B, H, S) or (H, T); what a tensor doesn't have is 0
  void* data;
  int64_t sizes[4], strides[4];
};

struct NativeCall {
  int64_t operand_count;          // forward: q, k, v, out, lse; backward: grad_out, q, k, v, out, lse, grad_q, grad_k, grad_v
  const NativeOperand* operands;  // results are contiguous and uninitialized
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // contiguous; null of dense calls
  int64_t batch, max_q, max_k;
  const int32_t* used;         // how many keys of each sequence count, contiguous; null for all
  const int32_t* block_table;  // the pages of each sequence, contiguous; null unless keys and values are pages
  int64_t table_width;         // pages of a sequence
};

using NativeFunction = int64_t (*)(const void* context, const NativeCall* call);

}  // namespace attnreg
