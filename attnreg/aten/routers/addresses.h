// Kernels that are run on addresses: what they need is allocated here, and Python sees no tensor.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/python_variable.h>

#include "calls.h"

namespace attnreg {

inline at::Tensor allocated(const Allocation& wanted, c10::Device device) {
  return at::empty_strided(wanted.sizes, wanted.strides, at::TensorOptions().dtype(wanted.dtype).device(device));
}

// A tensor as it has to lie; a copy unless it does.
inline at::Tensor lying(const at::Tensor& x, at::IntArrayRef strides) {
  return x.strides() == strides ? x : at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
}

using Tensors = std::vector<at::Tensor>;

// What was derived of offsets the last time, if they are what they were and somebody has kept it.
inline std::optional<Tensors> derived_before(
    const AddressCall& call, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const auto& last = call.derived;
  if (!last || last->queries._unsafe_get_target() != queries.unsafeGetTensorImpl() || last->queries.expired() ||
      last->keys._unsafe_get_target() != keys.unsafeGetTensorImpl() || last->keys.expired() ||
      last->queries_version != queries._version() || last->keys_version != keys._version() ||
      last->stream != stream) {
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

// What is derived of offsets; nothing if the kernel can't be run after all. Holding the interpreter's lock.
inline std::optional<Tensors> derived_of(
    const AddressCall& call, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const bool traced = leaves_a_trace_when_changed(queries) && leaves_a_trace_when_changed(keys);
  if (traced) {
    if (auto before = derived_before(call, queries, keys, stream)) {
      return before;
    }
  }
  // Before Python looks at them: another thread may write to them meanwhile.
  const Version queries_version = traced ? queries._version() : 0, keys_version = traced ? keys._version() : 0;
  const Object of_queries(THPVariable_Wrap(queries), Py_DecRef), of_keys(THPVariable_Wrap(keys), Py_DecRef);
  PyObject* arguments[] = {of_queries.get(), of_keys.get()};
  const Object found(PyObject_Vectorcall(call.derive.get(), arguments, 2, nullptr), Py_DecRef);
  if (!found) {
    throw_error_of_python();
  }
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
  if (traced) {
    call.derived.emplace(Derived{
        Weak(queries.getIntrusivePtr()), Weak(keys.getIntrusivePtr()), queries_version, keys_version, stream,
        std::move(weak)});
  }
  return tensors;
}

// Run a kernel on what it is given, offsets last if it wants them; false if it can't be run after all.
inline bool run_on_addresses(const AddressCall& call, Given& given, std::vector<c10::IValue>& results) {
  const size_t count = given.size() - (call.derive ? 2 : 0);
  const auto device = given[0].toTensor().device();
  const c10::DeviceGuard there(device);
  const c10::Stream stream = stream_of(given[0].toTensor());
  if (call.lse_strides) {
    given[count - 1] = lying(given[count - 1].toTensor(), *call.lse_strides);
  }
  for (const Allocation& one : call.results) {
    results.emplace_back(allocated(one, device));
  }
  at::Tensor workspace;
  if (call.workspace > 0) {
    workspace = at::empty({call.workspace}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  const Locked lock;
  Tensors derived;
  if (call.derive) {
    auto found = derived_of(call, given[count].toTensor(), given[count + 1].toTensor(), stream);
    if (!found) {
      return false;
    }
    derived = std::move(*found);
  }
  c10::SmallVector<const void*, 32> addresses;
  for (const size_t number : call.operands) {
    const size_t result = number - count, further = result - call.results.size();
    if (number < count) {
      addresses.push_back(given[number].toTensor().const_data_ptr());
    } else if (result < call.results.size()) {
      addresses.push_back(results[result].toTensor().mutable_data_ptr());
    } else {
      TORCH_CHECK_INDEX(further < derived.size(), "attnreg: AddressLauncher.operands has ", number, ", expected less than ",
                        count + results.size() + derived.size());
      addresses.push_back(derived[further].const_data_ptr());
    }
  }
  const Object numbers[] = {
      Object(PyLong_FromVoidPtr(addresses.data()), Py_DecRef),
      Object(PyLong_FromVoidPtr(workspace.defined() ? workspace.mutable_data_ptr() : nullptr), Py_DecRef),
      Object(PyLong_FromVoidPtr(device.is_cuda() ? stream.native_handle() : nullptr), Py_DecRef)};
  PyObject* arguments[] = {numbers[0].get(), numbers[1].get(), numbers[2].get()};
  const Object launched(PyObject_Vectorcall(call.launch.get(), arguments, 3, nullptr), Py_DecRef);
  if (!launched) {
    throw_error_of_python();
  }
  TORCH_CHECK_TYPE(PyBool_Check(launched.get()), "attnreg: AddressLauncher.launch returned a ",
                   Py_TYPE(launched.get())->tp_name, ", expected True or False");
  return launched.get() == Py_True;
}

}  // namespace attnreg
