// The cache key of a call: everything about it but the values of its tensors.

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

#include <cstring>
#include <optional>

namespace attnreg {

using Key = c10::SmallVector<int64_t, 160>;  // empty for a call that has no key
using Arguments = at::ArrayRef<c10::IValue>;
using Tensors = c10::SmallVector<at::Tensor, 12>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (const int64_t word : key) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 29;
    }
    return hash;
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

// Whether the memory of a tensor was freed, as FSDP does with parameters that it hasn't gathered. Such a call has no key,
// so that Python refuses it: kernels would read at address 0.
inline bool is_freed(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl()->nbytes() == 0 && tensor.numel() != 0;
}

enum Kind : int64_t { kAbsent, kTensor, kInt, kFalse, kTrue, kDouble };

// A tensor. One that no launcher is given (a mask, the offsets of an aten op) counts with its shape; one that is
// `described` with all but its values, and whether sixteen bytes can be read at a time. The words are written in
// place, as a hit takes most of its time here: whether `append` is inlined depends on the rest of the module.
inline void append(const at::Tensor& tensor, bool described, Key& key) {
  const at::IntArrayRef sizes = tensor.sizes(), strides = described ? tensor.strides() : at::IntArrayRef();
  const bool is_aligned = described && tensor.has_storage() && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  const c10::Device device = tensor.device();
  const size_t start = key.size();
  key.resize_for_overwrite(start + 1 + sizes.size() + strides.size());
  int64_t* word = key.data() + start;
  *word++ = kTensor | is_aligned << 8 | static_cast<int64_t>(static_cast<uint8_t>(tensor.scalar_type())) << 16 |
      static_cast<int64_t>(static_cast<uint8_t>(device.type())) << 24 |
      static_cast<int64_t>(static_cast<uint8_t>(device.index())) << 32 | tensor.dim() << 40;
  for (const at::IntArrayRef numbers : {sizes, strides}) {
    for (const int64_t number : numbers) {
      *word++ = number;
    }
  }
}

// Return the key of a call. The first `described` arguments are tensors that launchers are given; `query` says where
// query, key and value begin. `choice` is the number of the scoped choice, `site` that of the op.
inline Key key_of(int64_t site, int64_t choice, Arguments arguments, size_t described, size_t query) {
  Key key{site, choice};  // the one thing that is returned, so that it isn't moved
  bool needs_gradient = false, has_key = true;
  for (size_t i = 0; i < arguments.size(); i++) {
    const c10::IValue& argument = arguments[i];
    const bool operand = i >= query && i < query + 3;
    if (argument.isTensor() && argument.toTensor().defined()) {
      append(argument.toTensor(), i < described, key);
      has_key &= !is_freed(argument.toTensor());
      needs_gradient |= operand && argument.toTensor().requires_grad();
    } else if (argument.isTensor() || argument.isNone()) {
      key.push_back(kAbsent);
      has_key &= !operand;
    } else if (argument.isInt()) {
      key.push_back(kInt);
      key.push_back(argument.toInt());
    } else if (argument.isBool()) {
      key.push_back(argument.toBool() ? kTrue : kFalse);
    } else if (argument.isDouble()) {
      key.push_back(kDouble);
      key.push_back(bits_of(argument.toDouble()));
    } else {
      has_key = false;
    }
  }
  const auto captured = has_key ? capturing(arguments[query].toTensor()) : std::nullopt;
  if (!captured) {
    key.clear();
    return key;
  }
  const auto& context = at::globalContext();
  key.push_back(
      context.deterministicAlgorithms() | context.deterministicAlgorithmsWarnOnly() << 1 | *captured << 2 |
      c10::GradMode::is_enabled() << 3 | needs_gradient << 4);
  return key;
}

}  // namespace attnreg
