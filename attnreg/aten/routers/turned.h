// Ops with the heads before the lengths, (B, H, S, D): how their tensors come into attnreg's layout, and back.
//
// As `aten.cudnn` does it in Python: an LSE there has a last dimension of 1.

#pragma once

#include <ATen/ops/empty_like.h>

#include <utility>

#include "calls.h"

namespace attnreg {

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

}  // namespace attnreg
