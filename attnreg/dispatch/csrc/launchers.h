// Launchers: what runs a call that is kept. See `attnreg/contract/launchers.py`.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "key.h"
#include "python.h"

namespace attnreg {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using Version = decltype(at::Tensor()._version());

// Tensors that a kernel returned beyond its results: memory to spare.
using Spare = c10::SmallVector<at::Tensor, 4>;

struct OpLauncher {  // one of torch's own kernels, and the op's arguments behind the tensors
  c10::OperatorHandle op;
  c10::SafeKernelFunction kernel;
  std::vector<c10::IValue> rest;
  size_t results;  // how many of its results are returned
};

struct Allocation {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

inline bool counts_versions(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference();
}

// A tensor as it was at some time: torch counts writes to it, but not what `x.data = y` does, which gives it another
// storage. Weak references keep the addresses of what they refer to from being used again.
struct Seen {
  Weak tensor;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* address;
  Version version;

  explicit Seen(const at::Tensor& x)
      : tensor(x.getIntrusivePtr()), storage(x.storage().getWeakStorageImpl()), address(x.const_data_ptr()), version(x._version()) {}

  // Whether this is the very same tensor, as it was.
  bool is(const at::Tensor& x) const {
    return tensor._unsafe_get_target() == x.unsafeGetTensorImpl() && !tensor.expired() && version == x._version() &&
        storage._unsafe_get_target() == x.storage().unsafeGetStorageImpl() && address == x.const_data_ptr();
  }
};

using Clock = std::chrono::steady_clock;

// What is known of offsets is used for so long; then Python has the device compare it. Set to `offsets.TRUSTED`.
inline std::atomic<Clock::duration> trusted{Clock::duration::zero()};

struct SeenOffsets {
  Seen queries, keys;
  c10::Stream stream;  // another one doesn't wait for what was written on this one
  Clock::time_point until = Clock::now() + trusted.load(std::memory_order_relaxed);

  bool look_like(const at::Tensor& other_queries, const at::Tensor& other_keys, c10::Stream other_stream) const {
    return queries.is(other_queries) && keys.is(other_keys) && stream == other_stream;
  }

  bool are(const at::Tensor& other_queries, const at::Tensor& other_keys, c10::Stream other_stream) const {
    return look_like(other_queries, other_keys, other_stream) && Clock::now() < until;
  }
};

struct Derived {  // what was derived of a pair of offsets; Python owns the tensors
  SeenOffsets offsets;
  std::vector<Weak> tensors;
};

struct AddressLauncher {  // a kernel that is given the addresses of its tensors
  Object launch;
  std::vector<size_t> operands;
  std::vector<Allocation> results;
  int64_t workspace;
  std::optional<std::vector<int64_t>> lse_strides;
  Object derive;                           // none of dense calls
  mutable std::optional<Derived> derived;  // of the last offsets; under the interpreter's lock
};

// A tensor with these strides; a copy unless it has them.
inline at::Tensor with_strides(const at::Tensor& x, at::IntArrayRef strides) {
  return x.strides() == strides ? x : at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
}

// Run one of torch's kernels.
inline void launch(const OpLauncher& launcher, const Tensors& given, c10::DispatchKeySet keys, Tensors& results, Spare& spare) {
  torch::jit::Stack stack;
  stack.reserve(given.size() + launcher.rest.size());
  for (const at::Tensor& one : given) {
    stack.emplace_back(one);
  }
  stack.insert(stack.end(), launcher.rest.begin(), launcher.rest.end());
  launcher.kernel.callBoxed(launcher.op, keys, &stack);
  for (size_t i = 0; i < stack.size(); i++) {
    if (i < launcher.results) {
      results.push_back(std::move(stack[i]).toTensor());
    } else if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      spare.push_back(std::move(stack[i]).toTensor());
    }
  }
}

// What was derived of the offsets the last time, if neither has changed and its tensors are still alive.
inline std::optional<Tensors> kept_derived(
    const AddressLauncher& launcher, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const auto& last = launcher.derived;
  if (!last || !last->offsets.are(queries, keys, stream)) {
    return std::nullopt;
  }
  Tensors tensors;
  for (const Weak& one : last->tensors) {
    auto strong = one.lock();
    if (!strong) {
      return std::nullopt;
    }
    tensors.emplace_back(std::move(strong));
  }
  return tensors;
}

// What the kernel reads of the offsets; nothing if it can't run any more. With the interpreter's lock.
inline std::optional<Tensors> derive(
    const AddressLauncher& launcher, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  std::optional<SeenOffsets> seen;
  if (counts_versions(queries) && counts_versions(keys)) {
    if (auto kept = kept_derived(launcher, queries, keys, stream)) {
      return kept;
    }
    // Before Python looks at them: another thread may write to them meanwhile.
    seen.emplace(SeenOffsets{Seen(queries), Seen(keys), stream});
  }
  const Object found = call_python(
      launcher.derive.get(), {owned(THPVariable_Wrap(queries)), owned(THPVariable_Wrap(keys))});
  if (found.get() == Py_None) {
    return std::nullopt;
  }
  TORCH_CHECK_TYPE(PyList_Check(found.get()), "attnreg: AddressLauncher.derive returned a ",
                   Py_TYPE(found.get())->tp_name, ", expected a list of tensors or None");
  Tensors tensors;
  std::vector<Weak> weak;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found.get()); i++) {
    PyObject* one = PyList_GET_ITEM(found.get(), i);
    TORCH_CHECK_TYPE(THPVariable_Check(one), "attnreg: AddressLauncher.derive returned a list with a ",
                     Py_TYPE(one)->tp_name, ", expected tensors");
    tensors.push_back(THPVariable_Unpack(one));
    weak.emplace_back(tensors.back().getIntrusivePtr());
  }
  if (seen) {
    launcher.derived.emplace(Derived{std::move(*seen), std::move(weak)});
  }
  return tensors;
}

constexpr size_t kLse = 5;  // its place among the tensors of a backward

// Run a kernel on addresses; false if it can't run any more. Offsets come last, if it reads any.
inline bool launch(const AddressLauncher& launcher, Tensors given, Tensors& results) {
  const size_t count = given.size() - (launcher.derive ? 2 : 0);
  const auto device = given[0].device();
  const c10::Stream stream = stream_of(given[0]);
  if (launcher.lse_strides) {
    given[kLse] = with_strides(given[kLse], *launcher.lse_strides);
  }
  for (const Allocation& one : launcher.results) {
    results.push_back(at::empty_strided(one.sizes, one.strides, at::TensorOptions().dtype(one.dtype).device(device)));
  }
  at::Tensor workspace;
  if (launcher.workspace > 0) {
    workspace = at::empty({launcher.workspace}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  const WithGil gil;
  Tensors derived;
  if (launcher.derive) {
    auto found = derive(launcher, given[count], given[count + 1], stream);
    if (!found) {
      return false;
    }
    derived = std::move(*found);
  }
  c10::SmallVector<const void*, 32> addresses;
  for (const size_t number : launcher.operands) {
    const size_t result = number - count, further = result - launcher.results.size();
    if (number < count) {
      addresses.push_back(given[number].const_data_ptr());
    } else if (result < launcher.results.size()) {
      addresses.push_back(results[result].mutable_data_ptr());
    } else {
      TORCH_CHECK_INDEX(further < derived.size(), "attnreg: AddressLauncher.operands has ", number,
                        ", expected less than ", count + results.size() + derived.size());
      addresses.push_back(derived[further].const_data_ptr());
    }
  }
  const Object launched = call_python(
      launcher.launch.get(),
      {owned(PyLong_FromVoidPtr(addresses.data())),
       owned(PyLong_FromVoidPtr(workspace.defined() ? workspace.mutable_data_ptr() : nullptr)),
       owned(PyLong_FromVoidPtr(device.is_cuda() ? stream.native_handle() : nullptr))});
  TORCH_CHECK_TYPE(PyBool_Check(launched.get()), "attnreg: AddressLauncher.launch returned a ",
                   Py_TYPE(launched.get())->tp_name, ", expected True or False");
  return launched.get() == Py_True;
}

// Run a function of Python's; false if it can't run the call any more.
inline bool launch(PyObject* function, const Tensors& given, Tensors& results) {
  const WithGil gil;
  std::vector<Object> arguments;
  for (const at::Tensor& one : given) {
    arguments.push_back(owned(THPVariable_Wrap(one)));
  }
  const Object returned = call_python(function, arguments);
  if (returned.get() == Py_None) {
    return false;
  }
  TORCH_CHECK_TYPE(PyTuple_Check(returned.get()), "attnreg: a launcher returned a ", Py_TYPE(returned.get())->tp_name,
                   ", expected a tuple of tensors or None");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(returned.get()); i++) {
    PyObject* one = PyTuple_GET_ITEM(returned.get(), i);
    TORCH_CHECK_TYPE(THPVariable_Check(one), "attnreg: a launcher returned a tuple with a ", Py_TYPE(one)->tp_name,
                     ", expected tensors");
    results.push_back(THPVariable_Unpack(one));
  }
  return true;
}

// Add the backend's name to an error that has just been thrown, if it is of these files: its launcher breaks the contract.
// With the interpreter's lock. `decline_reason` is a method of the backend's plan.
inline void name_backend(PyObject* decline_reason) {
  try {
    throw;
  } catch (c10::Error& error) {
    if (error.msg().rfind("attnreg: ", 0) == 0) {
      const Object plan = owned(PyObject_GetAttrString(decline_reason, "__self__"));
      const Object name = owned(plan ? PyObject_GetAttrString(plan.get(), "backend") : nullptr);
      const char* const text = name ? PyUnicode_AsUTF8(name.get()) : nullptr;
      PyErr_Clear();
      error.add_context(text ? "backend " + std::string(text) : "backend unknown");
    }
  } catch (...) {  // what torch or Python says is left as it is
  }
}

}  // namespace attnreg
