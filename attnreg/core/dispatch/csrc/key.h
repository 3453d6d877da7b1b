// The cache key of a call's kind, which is all of it but lengths and values, and its lengths.

#pragma once

#include <Python.h>

#include <dlfcn.h>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace attnreg {

using Key = c10::SmallVector<int64_t, 80>;  // empty for a call that has no key
using Arguments = at::ArrayRef<c10::IValue>;
using Tensors = c10::SmallVector<at::Tensor, 12>;

inline size_t hash_of(const int64_t* words, size_t count) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < count; i++) {
    hash = (hash ^ static_cast<uint64_t>(words[i])) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 29;
  }
  return hash;
}

struct KeyHash {
  size_t operator()(const Key& key) const {
    return hash_of(key.data(), key.size());
  }
};

inline c10::Stream stream_of(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

using IsCapturing = int (*)(void*, int*);

inline IsCapturing cuda_runtime() {
  // Torch has loaded it if it has one, under the name that it was built against.
  void* library = dlopen(ATTNREG_CUDART, RTLD_NOW | RTLD_NOLOAD);
  return library ? reinterpret_cast<IsCapturing>(dlsym(library, "cudaStreamIsCapturing")) : nullptr;
}

// Whether a CUDA graph is being captured on the tensor's stream; nothing where that can't be asked.
inline std::optional<bool> capturing(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) {
    return false;
  }
  static const IsCapturing ask = cuda_runtime();
  int status = 0;
  if (!ask || ask(stream_of(tensor).native_handle(), &status) != 0) {
    return std::nullopt;
  }
  return status != 0;
}

inline int64_t bits_of(double number) {
  int64_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

enum Word : int64_t { kAbsent, kTensor, kInt, kFalse, kTrue, kDouble };

// The lengths of a call, as `contract.lengths.Lengths`.
struct Lengths {
  enum Name { kBatch, kMaxQ, kMaxK, kTokensQ, kTokensK, kCount };
  int64_t numbers[kCount] = {};
};

// Which dimensions of a tensor are lengths, as bits.
constexpr uint32_t kNone = 0, kFirst = 0b1, kBatchRows = 0b11, kBatchHeadsRows = 0b101, kRowsOfLse = 0b10, kAll = ~0u;

// A stride as launchers may tell strides apart: 0, 1, whole steps of sixteen bytes, others.
inline int64_t stride_class(int64_t stride, int64_t item_size) {
  return stride == 0 ? 0 : stride == 1 ? 1 : stride * item_size % 16 == 0 ? 2 : 3;
}

// Whether all elements of a tensor lie in its storage: that may have been freed, or shrunk, since the tensor was made.
inline bool is_in_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) {
    return true;
  }
  int64_t end = tensor.storage_offset() + tensor.numel();
  if (!tensor.is_contiguous()) {
    const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
    end = tensor.storage_offset() + 1;
    for (size_t i = 0; i < sizes.size(); i++) {
      end += (sizes[i] - 1) * strides[i];
    }
  }
  return end * static_cast<int64_t>(tensor.element_size()) <= static_cast<int64_t>(tensor.storage().nbytes());
}

// The address of a tensor, for whatever reads or writes its elements without torch's checks.
inline void* address_of(const at::Tensor& tensor) {
  TORCH_CHECK(is_in_memory(tensor), "attnreg: got a tensor of shape ", tensor.sizes(), " and strides ", tensor.strides(),
              " that is out of bounds for its storage of ", tensor.storage().nbytes(), " bytes");
  return const_cast<void*>(tensor.const_data_ptr());
}

// A tensor: what isn't a length as it is, of a length whether it is 0, 1 or more. A tensor that a launcher is given is
// `described` with the classes of its strides, and whether sixteen bytes can be read at a time. The words are written
// in place, as a hit takes much of its time here.
// Of an LSE only those strides are told apart that are 0 or 1: other strides follow from lengths.
inline void append(const at::Tensor& tensor, bool described, uint32_t lengths, Key& key, bool is_lse = false) {
  const at::IntArrayRef sizes = tensor.sizes();
  const bool is_aligned = described && tensor.has_storage() && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  const bool is_contiguous = described && tensor.is_contiguous();
  const c10::Device device = tensor.device();
  const size_t start = key.size();
  key.resize_for_overwrite(start + 2 + sizes.size());
  int64_t* word = key.data() + start;
  *word++ = kTensor | is_aligned << 8 | is_contiguous << 9 |
      static_cast<int64_t>(static_cast<uint8_t>(tensor.scalar_type())) << 16 |
      static_cast<int64_t>(static_cast<uint8_t>(device.type())) << 24 |
      static_cast<int64_t>(static_cast<uint8_t>(device.index())) << 32 | tensor.dim() << 40;
  int64_t& classes = *word++;
  classes = 0;
  const auto item_size = static_cast<int64_t>(tensor.element_size());
  for (size_t i = 0; i < sizes.size(); i++) {
    const bool is_length = lengths >> i & 1;
    const int64_t of_stride = described ? stride_class(tensor.strides()[i], item_size) : 0;
    classes = classes << 2 | (is_lse ? std::min<int64_t>(of_stride, 2) : of_stride);
    if (is_length) {
      classes = classes << 2 | (sizes[i] > 1 ? 2 : sizes[i]);
    } else {
      *word++ = sizes[i];
    }
  }
  key.resize(word - key.data());
}

// The modes that torch is in, which a kind of calls depends on; nothing where that can't be asked.
inline std::optional<int64_t> modes_of(const at::Tensor& query, bool needs_gradient) {
  const auto captured = capturing(query);
  if (!captured) {
    return std::nullopt;
  }
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() | context.deterministicAlgorithmsWarnOnly() << 1 | *captured << 2 |
      c10::GradMode::is_enabled() << 3 | needs_gradient << 4;
}

// Append an argument that is no tensor; false for one that has no place in a key.
inline bool append_value(const c10::IValue& argument, Key& key) {
  if (argument.isNone()) {
    key.push_back(kAbsent);
  } else if (argument.isInt()) {
    key.push_back(kInt);
    key.push_back(argument.toInt());
  } else if (argument.isBool()) {
    key.push_back(argument.toBool() ? kTrue : kFalse);
  } else if (argument.isDouble()) {
    key.push_back(kDouble);
    key.push_back(bits_of(argument.toDouble()));
  } else {
    return false;
  }
  return true;
}

}  // namespace attnreg
