// Ops with the heads before the lengths, (B, H, S, D): how their tensors come into attnreg's layout, and back.
//
// As `aten.cudnn` does it in Python: an LSE there has a last dimension of 1.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>

#include "calls.h"

namespace attnreg {

using Given = c10::SmallVector<c10::IValue, 8>;

inline at::Tensor turned(const c10::IValue& x) {
  return x.toTensor().transpose(1, 2);
}

// The result with the strides that torch's own kernels give what is shaped like a model.
inline at::Tensor like(const at::Tensor& result, const at::Tensor& model) {
  TORCH_CHECK(result.sizes() == model.sizes() && result.scalar_type() == model.scalar_type(), "attnreg: a kernel's ",
              "result is ", result.toString(), result.sizes(), ", expected ", model.toString(), model.sizes());
  if (result.strides() == model.strides()) {
    return result;
  }
  const at::Tensor expected = at::empty_like(model);
  return expected.strides() == result.strides() ? result : expected.copy_(result);
}

// Turn what a forward is given (query, key, value), or a backward (gradient, query, key, value, output, LSE).
inline void turn(Given& given, const Place& place) {
  const bool backward = place.carrier >= 0;
  for (size_t i = 0; i < given.size() - backward; i++) {
    given[i] = turned(given[i]);
  }
  if (backward) {
    given.back() = given.back().toTensor().squeeze(-1);
  }
}

// Turn what they return: output and LSE, or the gradients of query, key and value.
inline void turn_back(std::vector<c10::IValue>& results, Arguments arguments, const Place& place) {
  const bool backward = place.carrier >= 0;
  for (size_t i = 0; i < (backward ? 3 : 1); i++) {
    results[i] = like(turned(results[i]), arguments[place.query + i].toTensor());
  }
  if (!backward) {
    results[1] = results[1].toTensor().contiguous().unsqueeze(-1);
  }
}

// Call a kernel of torch's on some tensors.
inline void call_torch(
    const OpCall& call, const Given& given, c10::DispatchKeySet keys, std::vector<c10::IValue>& results) {
  torch::jit::Stack stack(given.begin(), given.end());
  stack.insert(stack.end(), call.rest.begin(), call.rest.end());
  call.kernel.callBoxed(call.op, keys, &stack);
  stack.resize(call.results);
  results = std::move(stack);
}

}  // namespace attnreg
