// Kernels that are given the addresses of their tensors. See `AddressLauncher` in `launching/launchers.py`.

#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "derivation.h"

namespace attnreg {

struct Prepared {  // how a kernel on addresses runs calls of some lengths and strides
  Lengths least, most;
  std::vector<int64_t> strides;  // of all tensors, one after the other
  Object launch;
  std::vector<size_t> operands;
  int64_t workspace;
  bool lse_token_first;
  std::optional<std::vector<int64_t>> lse_strides;
  std::optional<Derivation> derivation;  // none of dense calls
};

constexpr size_t kMostPrepared = 4;  // batches alternate between a few buckets of lengths

struct AddressLauncher {  // a kernel that is given the addresses of its tensors
  Object prepare;
  mutable std::vector<std::shared_ptr<const Prepared>> prepared;  // the newest last; under the interpreter's lock
};

constexpr size_t kLse = 5;  // its place among the tensors of a backward

inline std::vector<int64_t> strides_of(const Launch& call) {
  std::vector<int64_t> strides;
  for (size_t i = 0; i < call.operands(); i++) {
    strides.insert(strides.end(), call.tensors[i].strides().begin(), call.tensors[i].strides().end());
  }
  return strides;
}

// Whether lengths lie between others, ends included.
inline bool are_between(const Lengths& lengths, const Lengths& least, const Lengths& most) {
  for (size_t i = 0; i < Lengths::kCount; i++) {
    if (lengths.numbers[i] < least.numbers[i] || lengths.numbers[i] > most.numbers[i]) {
      return false;
    }
  }
  return true;
}

// Read for which lengths a `Prepared` is: a pair of the least and the most of each, or None for those of the call.
inline void read_bounds(PyObject* bounds, const Lengths& lengths, Prepared& how) {
  how.least = how.most = lengths;
  if (bounds == Py_None) {
    return;
  }
  const bool is_tuple = PyTuple_Check(bounds) && PyTuple_GET_SIZE(bounds) == static_cast<Py_ssize_t>(Lengths::kCount);
  for (size_t i = 0; is_tuple && i < Lengths::kCount; i++) {
    long long least = 0, most = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(bounds, static_cast<Py_ssize_t>(i)), "LL", &least, &most)) {
      throw_error_of_python();
    }
    how.least.numbers[i] = least;
    how.most.numbers[i] = most;
  }
  TORCH_CHECK_TYPE(is_tuple && are_between(lengths, how.least, how.most),
                   "attnreg: Prepared.lengths: expected a pair for each of five lengths, with those that it was asked for between them");
}

// How a kernel on addresses runs a call, by Python; null where it doesn't. With the interpreter's lock.
inline std::shared_ptr<const Prepared> prepare(const AddressLauncher& launcher, const Launch& call, std::vector<int64_t> strides) {
  std::vector<Object> arguments;
  for (const int64_t number : call.lengths.numbers) {
    arguments.push_back(owned(PyLong_FromLongLong(number)));
  }
  const Object of_tensors = owned(PyTuple_New(static_cast<Py_ssize_t>(call.operands())));
  for (size_t i = 0; i < call.operands(); i++) {
    PyTuple_SET_ITEM(of_tensors.get(), static_cast<Py_ssize_t>(i), tuple_of(call.tensors[i].strides()));
  }
  arguments.push_back(of_tensors);
  const Object returned = call_python(launcher.prepare.get(), arguments);
  if (returned.get() == Py_None) {
    return nullptr;
  }
  PyObject *launch = nullptr, *operands = nullptr, *lse_strides = nullptr, *derivation = nullptr, *bounds = nullptr;
  Py_ssize_t workspace = 0;
  int lse_token_first = 0;
  if (!PyTuple_Check(returned.get()) ||
      !PyArg_ParseTuple(returned.get(), "OO!npOOO", &launch, &PyTuple_Type, &operands, &workspace, &lse_token_first,
                        &lse_strides, &derivation, &bounds)) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "attnreg: AddressLauncher.prepare returned a ", Py_TYPE(returned.get())->tp_name,
                     ", expected a Prepared or None");
  }
  auto how = std::make_shared<Prepared>();
  read_bounds(bounds, call.lengths, *how);
  how->strides = std::move(strides);
  how->launch = held(launch);
  for (const int64_t number : numbers_of(operands)) {
    how->operands.push_back(static_cast<size_t>(number));
  }
  how->workspace = workspace;
  how->lse_token_first = lse_token_first != 0;
  if (lse_strides != Py_None) {
    how->lse_strides = numbers_of(lse_strides);
  }
  if (derivation != Py_None) {
    how->derivation = read_derivation(derivation);
  }
  std::shared_ptr<const Prepared> dropped;  // last of all: what it owns may then do anything
  if (launcher.prepared.size() >= kMostPrepared) {
    dropped = std::move(launcher.prepared.front());
    launcher.prepared.erase(launcher.prepared.begin());
  }
  launcher.prepared.push_back(how);
  return how;
}

// Run a kernel on addresses; false if it can't run the call.
inline bool launch(const AddressLauncher& launcher, const Launch& call, Tensors& results) {
  TORCH_CHECK(!call.used, "attnreg: a launcher isn't given all options of a call");
  const size_t count = call.operands();
  const auto device = call.tensors[0].device();
  const c10::Stream stream = stream_of(call.tensors[0]);
  std::vector<int64_t> strides = strides_of(call);
  const WithGil gil;
  const auto kept = std::find_if(launcher.prepared.begin(), launcher.prepared.end(), [&](const auto& each) {
    return are_between(call.lengths, each->least, each->most) && each->strides == strides;
  });
  std::shared_ptr<const Prepared> how = kept == launcher.prepared.end() ? nullptr : *kept;
  if (!how) {
    how = prepare(launcher, call, std::move(strides));
    if (!how) {
      return false;
    }
  }
  Tensors operands(call.tensors.begin(), call.tensors.begin() + count);
  if (how->lse_strides) {
    operands[kLse] = with_strides(operands[kLse], *how->lse_strides);
  }
  allocate(call, how->lse_token_first, results);
  at::Tensor workspace;
  if (how->workspace > 0) {
    workspace = at::empty({how->workspace}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  Read derived;
  if (how->derivation) {
    auto of_offsets = derive(*how->derivation, call.offsets(0), call.offsets(1), stream);
    if (!of_offsets) {
      return false;
    }
    derived = std::move(*of_offsets);
  }
  c10::SmallVector<const void*, 32> addresses;
  for (const size_t number : how->operands) {
    const size_t result = number - count, further = result - results.size();
    if (number < count) {
      addresses.push_back(address_of(operands[number]));
    } else if (result < results.size()) {
      addresses.push_back(address_of(results[result]));
    } else {
      TORCH_CHECK_INDEX(further < derived.places.size(), "attnreg: Prepared.operands has ", number,
                        ", expected less than ", count + results.size() + derived.places.size());
      addresses.push_back(static_cast<const char*>(address_of(derived.tensor)) + derived.places[further]);
    }
  }
  const Object launched = call_python(
      how->launch.get(),
      {owned(PyLong_FromVoidPtr(addresses.data())),
       owned(PyLong_FromVoidPtr(workspace.defined() ? address_of(workspace) : nullptr)),
       owned(PyLong_FromVoidPtr(device.is_cuda() ? stream.native_handle() : nullptr))});
  TORCH_CHECK_TYPE(PyBool_Check(launched.get()), "attnreg: Prepared.launch returned a ",
                   Py_TYPE(launched.get())->tp_name, ", expected True or False");
  return launched.get() == Py_True;
}

}  // namespace attnreg
