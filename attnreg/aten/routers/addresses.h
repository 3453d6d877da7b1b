// Kernels that are run on addresses: what they need is allocated here, and Python sees no tensor.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "turned.h"

namespace attnreg {

inline at::Tensor allocated(const Allocation& wanted, c10::Device device) {
  return at::empty_strided(wanted.sizes, wanted.strides, at::TensorOptions().dtype(wanted.dtype).device(device));
}

// A tensor as it has to lie; a copy unless it does.
inline at::Tensor lying(const at::Tensor& x, at::IntArrayRef strides) {
  return x.strides() == strides ? x : at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
}

// What is derived of offsets, kept as long as they are what they were; none if the kernel can't be run after all.
// Holding the interpreter's lock.
inline std::shared_ptr<const Derived> derived_of(
    const AddressCall& call, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const auto kept_one = call.derived;
  const bool traced = leaves_a_trace_when_changed(queries) && leaves_a_trace_when_changed(keys);
  if (traced && kept_one && kept_one->queries._unsafe_get_target() == queries.unsafeGetTensorImpl() &&
      kept_one->keys._unsafe_get_target() == keys.unsafeGetTensorImpl() && !kept_one->queries.expired() &&
      !kept_one->keys.expired() && kept_one->queries_version == queries._version() &&
      kept_one->keys_version == keys._version() && kept_one->stream == stream) {
    return kept_one;
  }
  const Object of_queries(THPVariable_Wrap(queries), Py_DecRef), of_keys(THPVariable_Wrap(keys), Py_DecRef);
  PyObject* arguments[] = {of_queries.get(), of_keys.get()};
  const Object found(PyObject_Vectorcall(call.derive.get(), arguments, 2, nullptr), Py_DecRef);
  if (found.get() == Py_None) {
    return nullptr;
  }
  PyObject *tensors = nullptr, *keep = nullptr;
  if (!found || !PyArg_ParseTuple(found.get(), "O!O!", &PyList_Type, &tensors, &PyBool_Type, &keep)) {
    throw_error_of_python();
  }
  auto made = std::make_shared<Derived>(
      Weak(queries.getIntrusivePtr()), Weak(keys.getIntrusivePtr()), traced ? queries._version() : 0,
      traced ? keys._version() : 0, stream);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
    made->tensors.push_back(THPVariable_Unpack(PyList_GET_ITEM(tensors, i)));
  }
  if (traced && keep == Py_True) {
    call.derived = made;
  }
  return made;
}

// Run a kernel on what it is given, offsets last if it wants them; false if it can't be run after all.
inline bool run_on_addresses(const AddressCall& call, Given& given, std::vector<c10::IValue>& results) {
  const size_t count = given.size() - (call.derive ? 2 : 0);
  const auto device = given[0].toTensor().device();
  const c10::impl::VirtualGuardImpl devices(device.type());
  if (devices.getDevice() != device) {
    return false;
  }
  const c10::Stream stream = devices.getStream(device);
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
  std::shared_ptr<const Derived> derived;
  if (call.derive) {
    derived = derived_of(call, given[count].toTensor(), given[count + 1].toTensor(), stream);
    if (!derived) {
      return false;
    }
  }
  c10::SmallVector<const void*, 32> addresses;
  for (const size_t number : call.operands) {
    const size_t result = number - count, further = result - call.results.size();
    if (number < count) {
      addresses.push_back(given[number].toTensor().const_data_ptr());
    } else if (result < call.results.size()) {
      addresses.push_back(results[result].toTensor().mutable_data_ptr());
    } else {
      TORCH_CHECK(derived && further < derived->tensors.size(), "attnreg: a kernel wants operand ", number,
                  ", which there isn't");
      addresses.push_back(derived->tensors[further].const_data_ptr());
    }
  }
  const Object numbers[] = {
      Object(PyLong_FromVoidPtr(addresses.data()), Py_DecRef),
      Object(PyLong_FromVoidPtr(workspace.defined() ? workspace.mutable_data_ptr() : nullptr), Py_DecRef),
      Object(PyLong_FromVoidPtr(device.is_cuda() ? stream.native_handle() : nullptr), Py_DecRef)};
  PyObject* arguments[] = {numbers[0].get(), numbers[1].get(), numbers[2].get()};
  PyObject* launched = PyObject_Vectorcall(call.launch.get(), arguments, 3, nullptr);
  if (!launched) {
    throw_error_of_python();
  }
  Py_DECREF(launched);
  return launched != Py_False;
}

}  // namespace attnreg
