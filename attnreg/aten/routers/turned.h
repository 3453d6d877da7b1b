// Ops with the heads before the lengths, (B, H, S, D): how their tensors come into attnreg's layout, and back.
//
// As `aten.cudnn` does it in Python: an LSE there has a last dimension of 1.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "calls.h"

namespace attnreg {

using Given = c10::SmallVector<c10::IValue, 8>;

using Lengths = c10::SmallVector<int64_t, 4>;

// Another view of a tensor's memory. Below autograd, which is where routers are, that is all that an op for views
// makes of it; the ops themselves take the host half a microsecond each, and a call takes nine.
inline at::Tensor seen(const at::Tensor& x, const Lengths& sizes, const Lengths& strides) {
  auto view =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(x.storage()), x.key_set(), x.dtype());
  view->set_sizes_and_strides(sizes, strides, x.storage_offset());
  return at::Tensor(std::move(view));
}

// A tensor with its second and third dimension swapped.
inline at::Tensor turned(const c10::IValue& tensor) {
  const at::Tensor& x = tensor.toTensor();
  TORCH_CHECK(x.dim() == 4, "attnreg: got a tensor of ", x.dim(), " dimensions, expected 4");
  Lengths sizes(x.sizes().begin(), x.sizes().end()), strides(x.strides().begin(), x.strides().end());
  std::swap(sizes[1], sizes[2]);
  std::swap(strides[1], strides[2]);
  return seen(x, sizes, strides);
}

// An LSE without its last dimension, if it has that, or with it.
inline at::Tensor without_last(const at::Tensor& lse) {
  if (lse.dim() != 4 || lse.size(3) != 1) {
    return lse;
  }
  const Lengths sizes(lse.sizes().begin(), lse.sizes().end() - 1);
  return seen(lse, sizes, Lengths(lse.strides().begin(), lse.strides().end() - 1));
}

inline at::Tensor with_last(const at::Tensor& lse) {
  Lengths sizes(lse.sizes().begin(), lse.sizes().end()), strides(lse.strides().begin(), lse.strides().end());
  sizes.push_back(1);
  strides.push_back(1);
  return seen(lse, sizes, strides);
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
    given.back() = without_last(given.back().toTensor());
  }
}

// Turn what they return: output and LSE, or the gradients of query, key and value.
inline void turn_back(std::vector<c10::IValue>& results, Arguments arguments, const Place& place) {
  const bool backward = place.carrier >= 0;
  for (size_t i = 0; i < (backward ? 3 : 1); i++) {
    results[i] = like(turned(results[i]), arguments[place.query + i].toTensor());
  }
  if (!backward) {
    const at::Tensor &query = arguments[place.query].toTensor(), &lse = results[1].toTensor();
    TORCH_CHECK(lse.sizes() == query.sizes().slice(0, 3) && lse.scalar_type() == at::kFloat, "attnreg: a kernel's LSE ",
                "is ", lse.toString(), lse.sizes(), ", expected float32 ", query.sizes().slice(0, 3));
    results[1] = with_last(results[1].toTensor().contiguous());
  }
}

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
