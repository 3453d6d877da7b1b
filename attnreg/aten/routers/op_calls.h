// Kernels of torch's that a backend leads to: calling them, and what they leave beside the results that count.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "calls.h"

namespace attnreg {

// What a kernel has returned beside the results that count.
using Spare = c10::SmallVector<at::Tensor, 4>;

// Call a kernel of torch's on some tensors.
inline void call_torch(
    const OpCall& call, const Given& given, c10::DispatchKeySet keys, std::vector<c10::IValue>& results, Spare& spare) {
  torch::jit::Stack stack(given.begin(), given.end());
  stack.insert(stack.end(), call.rest.begin(), call.rest.end());
  call.kernel.callBoxed(call.op, keys, &stack);
  for (size_t i = call.results; i < stack.size(); i++) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      spare.push_back(std::move(stack[i]).toTensor());
    }
  }
  stack.resize(call.results);
  results = std::move(stack);
}

// What the allocators of torch give at least, so that holding it holds no more than a new tensor would.
constexpr size_t kBlock = 512;

// A new tensor like a model, of which nothing is written; in memory that is to spare if there is enough of it in one
// place, as allocating a number takes the host as long as entering a router.
inline at::Tensor fresh(const at::Tensor& model, c10::Device device, Spare& spare) {
  const auto found = std::find_if(spare.begin(), spare.end(), [&](const at::Tensor& x) {
    return x.defined() && x.device() == device && x.use_count() == 1 && x.has_storage() &&
        x.storage().use_count() == 1 && x.storage().nbytes() >= model.nbytes() && x.storage().nbytes() <= kBlock;
  });
  if (found == spare.end()) {
    // Not `empty_like`: of a tensor that only says what it is, that is written in Python.
    return at::empty(model.sizes(), at::TensorOptions().dtype(model.dtype()).device(device));
  }
  const at::Tensor once = std::exchange(*found, at::Tensor());
  auto made = c10::make_intrusive<c10::TensorImpl>(c10::Storage(once.storage()), once.key_set(), model.dtype());
  made->set_sizes_contiguous(model.sizes());
  return at::Tensor(std::move(made));
}

}  // namespace attnreg
