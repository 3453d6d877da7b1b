// How the tensors of an aten op come into the contract's layout, (B, S, H, D), and its results out of it.

#pragma once

#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "cache.h"

namespace attnreg {

struct Layout {  // as `aten.routing.OpLayout` has it
  size_t query;
  int64_t token_argument, token_result;
  bool bhsd, lse_ends_in_one, lse_bsh, gradients_bshd;

  bool is_backward() const {
    return token_argument >= 0;
  }
  // Which dimensions of a tensor of the op are lengths, as bits; `lse` says whether it is the LSE.
  uint32_t lengths_of(bool lse) const {
    return lse || bhsd ? kBatchHeadsRows : kBatchRows;
  }
  // How many of the op's arguments, all of them tensors, a launcher is given: query, key and value; in a backward
  // the gradient before them, output and LSE behind.
  size_t tensors() const {
    return is_backward() ? 6 : query + 3;
  }
};

using Sizes = c10::SmallVector<int64_t, 4>;

// Another view of a tensor's memory. Below autograd, which is where routers are, that is all that an op for views
// makes of it; the ops themselves take the host half a microsecond each.
inline at::Tensor view_of(const at::Tensor& x, const Sizes& sizes, const Sizes& strides) {
  auto view =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(x.storage()), x.key_set(), x.dtype());
  view->set_sizes_and_strides(sizes, strides, x.storage_offset());
  return at::Tensor(std::move(view));
}

// A tensor with its second and third dimension swapped.
inline at::Tensor transposed(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 4, "attnreg: got a tensor of ", x.dim(), " dimensions, expected 4");
  Sizes sizes(x.sizes().begin(), x.sizes().end()), strides(x.strides().begin(), x.strides().end());
  std::swap(sizes[1], sizes[2]);
  std::swap(strides[1], strides[2]);
  return view_of(x, sizes, strides);
}

inline at::Tensor without_last(const at::Tensor& lse) {
  if (lse.dim() != 4 || lse.size(3) != 1) {
    return lse;
  }
  const Sizes sizes(lse.sizes().begin(), lse.sizes().end() - 1);
  return view_of(lse, sizes, Sizes(lse.strides().begin(), lse.strides().end() - 1));
}

inline at::Tensor with_last(const at::Tensor& lse) {
  Sizes sizes(lse.sizes().begin(), lse.sizes().end()), strides(lse.strides().begin(), lse.strides().end());
  sizes.push_back(1);
  strides.push_back(1);
  return view_of(lse, sizes, strides);
}

// A (B, H, S) tensor with the strides of (B, S, H).
inline at::Tensor lse_as_bsh(const at::Tensor& lse) {
  const int64_t heads = lse.size(1), rows = lse.size(2);
  const Sizes strides{heads * rows, 1, heads};
  return with_strides(lse, strides);
}

// A result with the strides that torch's own kernels give what is shaped like a model: torch.compile asserts them.
inline at::Tensor laid_out_like(const at::Tensor& result, const at::Tensor& model) {
  if (result.strides() == model.strides() || result.sizes() != model.sizes()) {
    return result;
  }
  const at::Tensor expected = at::empty_like(model);
  return expected.strides() == result.strides() ? result : expected.copy_(result);
}

// Bring what an op is given into the contract's layout.
inline Tensors to_contract(const Layout& layout, Arguments arguments) {
  Tensors views;
  for (size_t i = 0; i < layout.tensors(); i++) {
    const at::Tensor& x = arguments[i].toTensor();
    const bool is_lse = layout.is_backward() && i + 1 == layout.tensors();
    views.push_back(is_lse ? (layout.lse_ends_in_one ? without_last(x) : x) : (layout.bhsd ? transposed(x) : x));
  }
  return views;
}

// Bring a launcher's results into the op's layout: output and LSE, or three gradients.
inline void to_op(const Layout& layout, Arguments arguments, Tensors& results) {
  for (size_t i = 0; i < (layout.is_backward() ? 3 : 1); i++) {
    if (layout.gradients_bshd) {
      results[i] = transposed(results[i].contiguous());
    } else {
      // What `F.scaled_dot_product_attention` was given has (B, H, S, D) also where the op below it has not.
      const at::Tensor& of_op = arguments[layout.query + i].toTensor();
      const at::Tensor laid_out = laid_out_like(transposed(results[i]), layout.bhsd ? of_op : transposed(of_op));
      results[i] = layout.bhsd ? laid_out : transposed(laid_out);
    }
  }
  if (!layout.is_backward()) {
    const at::Tensor lse = layout.lse_bsh ? lse_as_bsh(results[1]) : results[1].contiguous();
    results[1] = layout.lse_ends_in_one ? with_last(lse) : lse;
  }
}

// What the allocators of torch give at least, so that reusing it takes no more than a new tensor would.
constexpr size_t kBlock = 512;

// A new tensor like a model on "meta", of which nothing is written. It lies in memory to spare if there is enough of
// that in one place: allocating a number takes the host as long as entering a router.
inline at::Tensor auxiliary_like(const at::Tensor& model, c10::Device device, Spare& spare) {
  const auto reusable = std::find_if(spare.begin(), spare.end(), [&](const at::Tensor& x) {
    return x.defined() && x.device() == device && x.use_count() == 1 && x.has_storage() &&
        x.storage().use_count() == 1 && x.storage().nbytes() >= model.nbytes() && x.storage().nbytes() <= kBlock;
  });
  if (reusable == spare.end()) {
    // Not `empty_like`: of a tensor on "meta" that is written in Python.
    return at::empty(model.sizes(), at::TensorOptions().dtype(model.dtype()).device(device));
  }
  const at::Tensor once = std::exchange(*reusable, at::Tensor());
  auto made = c10::make_intrusive<c10::TensorImpl>(c10::Storage(once.storage()), once.key_set(), model.dtype());
  made->set_sizes_contiguous(model.sizes());
  return at::Tensor(std::move(made));
}

// ---- Choice tokens: see `dispatch.scope`, which has the same numbers

constexpr int64_t kAligned = 4, kGuard = 13, kMarked = 1016, kMarkedGuard = 104;
constexpr int64_t kMostMarked = 16;  // beyond, a mark takes more memory than it is worth

inline int64_t extent_of(const at::Tensor& x) {
  int64_t extent = 1;
  for (int64_t i = 0; i < x.dim(); i++) {
    extent += (x.size(i) - 1) * x.stride(i);
  }
  return std::max<int64_t>(extent, 0);
}

// The number of the choice that a tensor carries; 0 for none.
inline int64_t choice_of(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().has_storage()) {
    return 0;
  }
  const at::Tensor& x = value.toTensor();
  const auto stored = static_cast<int64_t>(x.storage().nbytes()), size = static_cast<int64_t>(x.element_size());
  const int64_t start = x.storage_offset();
  if (start == 0) {  // if it carries one, it was marked where it was
    const int64_t added = stored - extent_of(x) * size - kMarkedGuard;
    return added > 0 && added % kMarked == 0 ? added / kMarked : 0;
  }
  if (start % kAligned != 0) {
    return 0;
  }
  return stored / size == start + extent_of(x) + kGuard ? start / kAligned : 0;
}

// A tensor like a model that carries a choice; of its elements nothing is written.
inline at::Tensor token_like(const at::Tensor& model, c10::Device device, int64_t choice) {
  const int64_t start = kAligned * choice;
  const at::Tensor token =
      at::empty({start + extent_of(model) + kGuard}, at::TensorOptions().dtype(model.dtype()).device(device));
  token.unsafeGetTensorImpl()->set_sizes_and_strides(model.sizes(), model.strides(), start);
  return token;
}

// Have a result, whose elements are read, carry a choice: as it is, or a copy. On a CPU it is marked where it is if
// nothing else refers to it or its memory, which takes a third of the time of a copy.
inline void carry(c10::IValue& result, int64_t choice) {
  at::Tensor x = std::move(result).toTensor();
  const bool is_own = x.is_cpu() && x.use_count() == 1 && x.has_storage() && x.storage().use_count() == 1 && x.storage().resizable();
  const bool is_all = x.is_non_overlapping_and_dense() && x.storage_offset() == 0 && x.storage().nbytes() == x.nbytes();
  if (is_own && is_all && choice <= kMostMarked) {
    at::native::resize_bytes_cpu(x.storage().unsafeGetStorageImpl(), x.nbytes() + kMarked * choice + kMarkedGuard);
    result = std::move(x);
    return;
  }
  at::Tensor token = token_like(x, x.device(), choice);
  if (x.is_cpu()) {
    // What lies between the elements is copied as well: less work than an op's.
    std::memcpy(address_of(token), address_of(x), extent_of(x) * x.element_size());
  } else {
    token.copy_(x);
  }
  result = std::move(token);
}

}  // namespace attnreg
