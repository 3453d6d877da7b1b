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

// What decides about a tensor that no launcher is given: a mask, the offsets of an aten op.
inline void append_shape(const at::Tensor& tensor, Key& key) {
  const auto device = tensor.device();
  key.append({static_cast<int64_t>(tensor.scalar_type()), static_cast<int64_t>(device.type()), device.index(), tensor.dim()});
  key.append(tensor.sizes().begin(), tensor.sizes().end());
}

// A tensor but for its values, and whether sixteen bytes can be read at a time.
inline void append(const at::Tensor& tensor, Key& key) {
  append_shape(tensor, key);
  key.append(tensor.strides().begin(), tensor.strides().end());
  key.push_back(tensor.has_storage() && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0);
}

// Return the key of a call. Of the first `described` arguments tensors count with all that `append` takes, of the
// rest only with their shapes; `query` says where query, key and value begin. `choice` is the number of the
// scoped choice, `site` that of the op.
inline Key key_of(int64_t site, int64_t choice, Arguments arguments, size_t described, size_t query) {
  enum { kAbsent, kTensor, kInt, kBool, kDouble };
  Key key{site, choice};
  bool needs_gradient = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    const c10::IValue& argument = arguments[i];
    const bool present = argument.isTensor() && argument.toTensor().defined();
    const bool operand = i >= query && i < query + 3;
    if (operand && !present) {
      return {};
    }
    if (argument.isTensor() || argument.isNone()) {
      key.push_back(present ? kTensor : kAbsent);
      if (present && i < described) {
        append(argument.toTensor(), key);
      } else if (present) {
        append_shape(argument.toTensor(), key);
      }
      needs_gradient |= operand && argument.toTensor().requires_grad();
    } else if (argument.isInt()) {
      key.append({kInt, argument.toInt()});
    } else if (argument.isBool()) {
      key.append({kBool, argument.toBool()});
    } else if (argument.isDouble()) {
      key.append({kDouble, bits_of(argument.toDouble())});
    } else {
      return {};
    }
  }
  const auto captured = capturing(arguments[query].toTensor());
  if (!captured) {
    return {};
  }
  const auto& context = at::globalContext();
  const int64_t modes = context.deterministicAlgorithms() | context.deterministicAlgorithmsWarnOnly() << 1 |
      *captured << 2 | c10::GradMode::is_enabled() << 3 | needs_gradient << 4;
  key.push_back(modes);
  return key;
}

}  // namespace attnreg
