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

// A copy of a packed tensor with zeros in the rows past the last offset. Also answers what is so of the offsets.
inline at::Tensor blanked(const DeviceCode& code, const at::Tensor& x, const Launch& call, bool of_keys) {
  at::Tensor copy = at::empty(x.sizes(), x.options());
  const at::Tensor &queries = call.offsets(0), &keys = call.offsets(1), &offsets = call.offsets(of_keys);
  const int64_t size = static_cast<int64_t>(x.element_size()), rows = x.size(0), place = place_of_answer(call);
  if (const int64_t total = (rows * 32 + kBlock128 - 1) / kBlock128 + (place != 0); total > 0) {
    launch_on(code, code.blank, total, kBlock128, x,
              {word_of(copy), word_of(x), word_of(offsets), offsets.size(0) - 1, rows, x.size(1), x.size(2) * size,
               copy.stride(0) * size, copy.stride(1) * size, x.stride(0) * size, x.stride(1) * size, offsets.stride(0),
               word_of(queries), word_of(keys), call.lengths.numbers[Lengths::kTokensQ], call.lengths.numbers[Lengths::kTokensK],
               queries.stride(0), keys.stride(0), place});
    is_answered(call);
  }
  return copy;
}

// Clear the results of a packed forward or backward; nothing if they have no rows. A forward's kernel also answers what is
// so of the offsets.
inline void clear(const DeviceCode& code, const Launch& call, Window window, const Tensors& results) {
  const at::Tensor &queries = call.offsets(0), &keys = call.offsets(1);
  const int64_t batch = queries.size(0) - 1, step_q = queries.stride(0), step_k = keys.stride(0);
  const auto blocks = [](int64_t rows) { return (rows + kBlock128 - 1) / kBlock128; };
  if (call.is_forward) {
    const at::Tensor &out = results[0], &lse = results[1];
    const int64_t size = static_cast<int64_t>(out.element_size()), rows = out.size(0);
    const int64_t place = place_of_answer(call);
    if (const int64_t total = blocks(rows) + (place != 0); total > 0) {
      launch_on(code, code.clear_forward, total, kBlock128, out,
                {word_of(out), word_of(lse), word_of(queries), word_of(keys), batch, rows, out.size(1),
                 out.size(2) * size, out.stride(0) * size, out.stride(1) * size, lse.stride(0), lse.stride(1),
                 window.left, window.right, step_q, step_k,
                 call.asks_queries ? -1 : call.lengths.numbers[Lengths::kTokensK], place,
                 call.used ? word_of(*call.used) : 0, call.used ? call.used->stride(0) : 0});
      is_answered(call);
    }
    return;
  }
  const at::Tensor &dq = results[0], &dk = results[1], &dv = results[2];
  const int64_t size = static_cast<int64_t>(dq.element_size());
  if (const int64_t total = blocks(dq.size(0)) + blocks(dk.size(0)); total > 0) {
    launch_on(code, code.clear_backward, total, kBlock128, dq,
              {word_of(dq), word_of(dk), word_of(dv), word_of(queries), word_of(keys), batch,
               dq.size(0), dk.size(0), dq.size(1), dk.size(1), dq.size(2) * size, dk.size(2) * size, dv.size(2) * size,
               dq.stride(0) * size, dq.stride(1) * size, dk.stride(0) * size, dk.stride(1) * size,
               dv.stride(0) * size, dv.stride(1) * size, step_q, step_k});
  }
}

}  // namespace attnreg
