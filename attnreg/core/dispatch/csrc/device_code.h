// The kernels of `launching/rows.py`: clearing rows of packed results that see no key, and facts about offsets.

#pragma once

#include <array>
#include <atomic>

#include "launchers.h"

namespace attnreg {

struct Window {
  int64_t left = -1, right = -1;
};

// cuLaunchKernel, and the functions on one GPU; as `DeviceKernel.address` returns them.
struct DeviceCode {
  LaunchKernel launch = nullptr;
  void *clear_forward = nullptr, *clear_backward = nullptr, *facts = nullptr, *blank = nullptr, *append = nullptr;
};

constexpr int64_t kMostDevices = 64, kBlock128 = 128;  // the block is that of `rows.BLOCK`, for as many rows

// Written once for a device, with the interpreter's lock, before `is_there` says so.
inline auto& device_codes = *new std::array<DeviceCode, kMostDevices>;
inline auto& is_there = *new std::array<std::atomic<bool>, kMostDevices>;

inline const DeviceCode* device_code_of(c10::Device device) {
  const int64_t index = device.index();
  const bool fits = device.is_cuda() && index >= 0 && index < kMostDevices;
  return fits && is_there[index].load(std::memory_order_acquire) ? &device_codes[index] : nullptr;
}

inline void launch_on(
    const DeviceCode& code, void* function, int64_t blocks, int64_t threads, const at::Tensor& tensor, at::ArrayRef<int64_t> words) {
  launch_words(code.launch, function, blocks, threads, stream_of(tensor).native_handle(), words);
}

inline int64_t place_of_answer(const Launch& call) {
  return call.answer ? *call.answer : 0;
}

// A kernel was launched that answers.
inline void is_answered(const Launch& call) {
  if (call.answer) {
    *call.answer = 0;
  }
}

inline int64_t blocks_of(int64_t rows) {
  return (rows + kBlock128 - 1) / kBlock128;
}

// The words of a forward's output and LSE for the kernels that clear: addresses, sizes, and strides.
struct OutputWords {
  int64_t out = 0, lse = 0, heads = 0, head_bytes = 0, row_step = 0, head_step = 0, lse_head_step = 0, lse_row_step = 0;

  OutputWords() = default;
  OutputWords(const at::Tensor& output, const at::Tensor& lse_of_output) {
    const int64_t size = static_cast<int64_t>(output.element_size());
    out = word_of(output);
    lse = word_of(lse_of_output);
    heads = output.size(1);
    head_bytes = output.size(2) * size;
    row_step = output.stride(0) * size;
    head_step = output.stride(1) * size;
    lse_head_step = lse_of_output.stride(0);
    lse_row_step = lse_of_output.stride(1);
  }
};

// Copy a packed tensor, with zeros in the rows past the last offset. Also answers what is so of the offsets and, given the
// output of a forward, clears its rows that lie in no sequence.
inline void blank(
    const DeviceCode& code, const at::Tensor& copy, const at::Tensor& x, const Launch& call, bool of_keys,
    const OutputWords& output = {}) {
  const at::Tensor &queries = call.offsets(0), &keys = call.offsets(1), &offsets = call.offsets(of_keys);
  const int64_t size = static_cast<int64_t>(x.element_size()), rows = x.size(0), place = place_of_answer(call);
  const int64_t tokens_q = call.lengths.numbers[Lengths::kTokensQ], tokens_k = call.lengths.numbers[Lengths::kTokensK];
  const int64_t total = blocks_of(rows * 32) + (output.out ? blocks_of(tokens_q) : 0) + (place != 0);
  if (total == 0) {
    return;
  }
  launch_on(code, code.blank, total, kBlock128, x,
            {word_of(copy), word_of(x), word_of(offsets), offsets.size(0) - 1, rows, x.size(1), x.size(2) * size,
             copy.stride(0) * size, copy.stride(1) * size, x.stride(0) * size, x.stride(1) * size, offsets.stride(0),
             word_of(queries), word_of(keys), tokens_q, tokens_k, queries.stride(0), keys.stride(0), place,
             output.out, output.lse, output.heads, output.head_bytes, output.row_step, output.head_step,
             output.lse_head_step, output.lse_row_step});
  is_answered(call);
}

inline at::Tensor blanked(const DeviceCode& code, const at::Tensor& x, const Launch& call, bool of_keys) {
  at::Tensor copy = at::empty(x.sizes(), x.options());
  blank(code, copy, x, call, of_keys);
  return copy;
}

// Clear the results of a packed forward or backward; nothing if they have no rows. A forward's kernel also answers what is
// so of the offsets.
inline void clear(const DeviceCode& code, const Launch& call, Window window, const Tensors& results) {
  const at::Tensor &queries = call.offsets(0), &keys = call.offsets(1);
  const int64_t batch = queries.size(0) - 1, step_q = queries.stride(0), step_k = keys.stride(0);
  if (call.is_forward) {
    const OutputWords of(results[0], results[1]);
    const int64_t rows = results[0].size(0), place = place_of_answer(call);
    if (const int64_t total = blocks_of(rows) + (place != 0); total > 0) {
      launch_on(code, code.clear_forward, total, kBlock128, results[0],
                {of.out, of.lse, word_of(queries), word_of(keys), batch, rows, of.heads, of.head_bytes, of.row_step,
                 of.head_step, of.lse_head_step, of.lse_row_step, window.left, window.right, step_q, step_k,
                 call.asks_queries ? -1 : call.lengths.numbers[Lengths::kTokensK], place,
                 call.used ? word_of(*call.used) : 0, call.used ? call.used->stride(0) : 0});
      is_answered(call);
    }
    return;
  }
  const at::Tensor &dq = results[0], &dk = results[1], &dv = results[2];
  const int64_t size = static_cast<int64_t>(dq.element_size());
  if (const int64_t total = blocks_of(dq.size(0)) + blocks_of(dk.size(0)); total > 0) {
    launch_on(code, code.clear_backward, total, kBlock128, dq,
              {word_of(dq), word_of(dk), word_of(dv), word_of(queries), word_of(keys), batch,
               dq.size(0), dk.size(0), dq.size(1), dk.size(1), dq.size(2) * size, dk.size(2) * size, dv.size(2) * size,
               dq.stride(0) * size, dq.stride(1) * size, dk.stride(0) * size, dk.stride(1) * size,
               dv.stride(0) * size, dv.stride(1) * size, step_q, step_k});
  }
}

}  // namespace attnreg
