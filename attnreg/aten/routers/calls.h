// What tells calls apart.

#pragma once

#include <dlfcn.h>

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "kept.h"

namespace attnreg {

using Arguments = at::ArrayRef<c10::IValue>;
using Given = c10::SmallVector<c10::IValue, 8>;  // those that a kernel or a function is given

inline c10::Stream stream_of(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

using IsCapturing = int (*)(void*, int*);

inline IsCapturing cuda_runtime() {
  // Torch has loaded it if it has one, under the name that it was built against.
  void* library = dlopen(ATTNREG_CUDART, RTLD_NOW | RTLD_NOLOAD);
  return library ? reinterpret_cast<IsCapturing>(dlsym(library, "cudaStreamIsCapturing")) : nullptr;
}

// Whether a CUDA graph is being captured; nothing where that can't be told.
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

inline int64_t modes() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() | context.deterministicAlgorithmsWarnOnly() << 1;
}

struct Place {  // an op below a dispatch key
  int64_t number;
  size_t query;     // where its arguments have the query; key and value follow
  int64_t carrier;  // where they have what a forward hands its backward; -1 in a forward
};

// Which way a call came. Offsets lie behind query, key and value, and in a backward behind output and LSE.
enum class Front : int64_t { kTorchs, kVarlenForward, kVarlenBackward };

// How many arguments a function of Python's takes, all of them tensors.
inline size_t taken(const Place& place, Front front) {
  switch (front) {
    case Front::kVarlenForward:
      return 5;  // query, key, value, both offsets
    case Front::kVarlenBackward:
      return 8;  // the gradient, query, key, value, output, LSE, both offsets
    default:
      return place.carrier < 0 ? place.query + 3 : 6;  // the same without offsets
  }
}

// What an undefined tensor is.
inline const c10::TensorImpl* const kNobody = at::Tensor().unsafeGetTensorImpl();

inline void describe_shape(const at::Tensor& tensor, Words& words) {
  const auto device = tensor.device();
  words.append({static_cast<int64_t>(tensor.scalar_type()), static_cast<int64_t>(device.type()), device.index()});
  words.push_back(tensor.dim());
  words.append(tensor.sizes().begin(), tensor.sizes().end());
}

inline int64_t bits_of(double number) {
  int64_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

// Everything about a tensor but for its values, and whether sixteen bytes can be read at a time.
inline void describe(const at::Tensor& tensor, Words& words) {
  describe_shape(tensor, words);
  words.append(tensor.strides().begin(), tensor.strides().end());
  words.push_back(tensor.has_storage() && reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0);
}

// Return everything about a call but for the values of tensors; nothing where that can't be told.
inline Words describe(const Place& place, Arguments arguments, Front front, const c10::TensorImpl* carrier) {
  enum { kAbsent, kTensor, kInt, kBool, kDouble };
  Words words{place.number, static_cast<int64_t>(front), reinterpret_cast<int64_t>(carrier ? carrier : kNobody)};
  const size_t described = taken(place, front);
  bool needs_gradient = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    const c10::IValue& argument = arguments[i];
    const bool present = argument.isTensor() && argument.toTensor().defined();
    const bool operand = i >= place.query && i < place.query + 3;
    if (operand && !present) {
      return {};
    }
    if (argument.isTensor() || argument.isNone()) {
      words.push_back(present ? kTensor : kAbsent);
      if (present && i < described) {
        describe(argument.toTensor(), words);
      }
      needs_gradient |= operand && argument.toTensor().requires_grad();
    } else if (argument.isInt()) {
      words.append({kInt, argument.toInt()});
    } else if (argument.isBool()) {
      words.append({kBool, argument.toBool()});
    } else if (argument.isDouble()) {
      words.append({kDouble, bits_of(argument.toDouble())});
    } else {
      return {};
    }
  }
  const auto captured = capturing(arguments[place.query].toTensor());
  if (!captured) {
    return {};
  }
  if (front != Front::kTorchs) {
    const c10::IValue &of_queries = arguments[described - 2], &of_keys = arguments[described - 1];
    words.push_back(of_queries.isTensor() && of_keys.isTensor() && of_queries.toTensor().is_same(of_keys.toTensor()));
  }
  const bool recording = c10::GradMode::is_enabled();
  const bool varlen = front != Front::kTorchs;
  words.append({modes(), *captured, varlen ? recording && needs_gradient : recording | needs_gradient << 1});
  return words;
}

inline const c10::TensorImpl* carrier_of(const Words& call) {
  return reinterpret_cast<const c10::TensorImpl*>(call[2]);
}

inline bool leaves_a_trace_when_changed(const c10::IValue& argument) {
  return argument.isTensor() && argument.toTensor().defined() && !argument.toTensor().is_inference();
}

// Whether offsets were found to leave no row without a key, and are as they were; under the lock.
inline bool covered(const c10::IValue& of_queries, const c10::IValue& of_keys, int64_t tokens_q, int64_t tokens_k) {
  if (!leaves_a_trace_when_changed(of_queries) || !leaves_a_trace_when_changed(of_keys)) {
    return false;
  }
  const at::Tensor &queries = of_queries.toTensor(), &keys = of_keys.toTensor();
  const c10::Stream stream = stream_of(queries);
  return std::any_of(kept.offsets.begin(), kept.offsets.end(), [&](const Offsets& one) {
    return one.queries._unsafe_get_target() == queries.unsafeGetTensorImpl() && !one.queries.expired() &&
        one.keys._unsafe_get_target() == keys.unsafeGetTensorImpl() && !one.keys.expired() &&
        one.queries_version == queries._version() && one.keys_version == keys._version() &&
        one.tokens_q == tokens_q && one.tokens_k == tokens_k && one.stream == stream;
  });
}

// The same of a call of `varlen_attn`.
inline bool covered(Arguments arguments) {
  return covered(arguments[3], arguments[4], arguments[0].toTensor().size(0), arguments[1].toTensor().size(0));
}

// Whether a context variable holds something; holding the interpreter's lock.
inline bool is_set(PyObject* variable) {
  PyObject* choice = nullptr;
  const bool none = PyContextVar_Get(variable, Py_None, &choice) == 0 && choice == Py_None;
  PyErr_Clear();
  Py_XDECREF(choice);
  return !none;
}

// Whether a choice was made for this thread or task: what it means the router in Python knows.
inline bool chosen_for() {
  PyObject* variable = choices.load(std::memory_order_acquire);
  if (!variable) {
    return false;
  }
  const Locked lock;
  return is_set(variable);
}

}  // namespace attnreg
