// What Python returns to be kept, as `call_cache.described` makes it.

#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache.h"

namespace attnreg {

// Torch's own kernels, captured before a router covers them; they stay for as long as the process lives.
inline auto& native_kernels = *new std::unordered_map<std::string, std::pair<c10::OperatorHandle, c10::SafeKernelFunction>>;

// Capture torch's kernel of an aten op below a key; null where there is none. With the interpreter's lock.
inline const std::pair<c10::OperatorHandle, c10::SafeKernelFunction>* capture(const std::string& op, const std::string& key) {
  const auto known = native_kernels.find(key + op);
  if (known != native_kernels.end()) {
    return &known->second;
  }
  const auto handle = c10::Dispatcher::singleton().findSchema({"aten::" + op, ""});
  const auto where = c10::parseDispatchKey(key);
  if (!handle || !handle->hasKernelForDispatchKey(where)) {
    return nullptr;
  }
  const auto kernel = handle->getComputedKernelForDispatchKey(where);
  return &native_kernels.emplace(key + op, std::make_pair(*handle, kernel)).first->second;
}

// An op's arguments behind some tensors: some by place, some by name, the others as they are by default.
inline std::vector<c10::IValue> arguments_behind(
    const c10::FunctionSchema& schema, size_t tensors, PyObject* rest, PyObject* options) {
  std::vector<c10::IValue> found;
  const auto& arguments = schema.arguments();
  Py_ssize_t by_name = 0;
  for (size_t i = tensors; i < arguments.size(); i++) {
    const auto place = static_cast<Py_ssize_t>(i - tensors);
    PyObject* given = place < PyTuple_GET_SIZE(rest) ? PyTuple_GET_ITEM(rest, place)
                                                      : PyDict_GetItemString(options, arguments[i].name().c_str());
    by_name += given && place >= PyTuple_GET_SIZE(rest);
    TORCH_CHECK(given || arguments[i].default_value(), "attnreg: ", schema.name(), " got no ", arguments[i].name());
    found.push_back(given ? from_python(given, arguments[i].type()) : *arguments[i].default_value());
  }
  const bool all = tensors + PyTuple_GET_SIZE(rest) <= arguments.size() && by_name == PyDict_GET_SIZE(options);
  TORCH_CHECK(all, "attnreg: ", schema.name(), " got arguments that it doesn't take");
  return found;
}

// `tensors` is how many a launcher is given.
inline void read_op_launcher(PyObject* described, size_t tensors, Entry& entry) {
  const char *op = nullptr, *key = nullptr, *kind = nullptr;
  PyObject *launcher = nullptr, *rest = nullptr, *options = nullptr;
  Py_ssize_t results = 0;
  if (!PyArg_ParseTuple(described, "sOssO!O!n", &kind, &launcher, &op, &key, &PyTuple_Type, &rest, &PyDict_Type,
                        &options, &results)) {
    throw_error_of_python();
  }
  const auto* captured = capture(op, key);
  if (!captured) {
    entry.python = held(launcher);  // which has a kernel of its own
    return;
  }
  entry.op = std::make_shared<const OpLauncher>(
      captured->first, captured->second, arguments_behind(captured->first.schema(), tensors, rest, options),
      static_cast<size_t>(results));
}

inline void read_address_launcher(PyObject* described, Entry& entry) {
  const char* kind = nullptr;
  PyObject *launcher = nullptr, *launch = nullptr, *operands = nullptr, *results = nullptr, *lse_strides = nullptr,
           *derive = nullptr;
  Py_ssize_t workspace = 0;
  if (!PyArg_ParseTuple(described, "sOOO!O!nOO", &kind, &launcher, &launch, &PyTuple_Type, &operands, &PyTuple_Type,
                        &results, &workspace, &lse_strides, &derive)) {
    throw_error_of_python();
  }
  auto found = std::make_shared<AddressLauncher>();
  found->launch = held(launch);
  for (const int64_t number : numbers_of(operands)) {
    found->operands.push_back(static_cast<size_t>(number));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); i++) {
    PyObject *sizes = nullptr, *strides = nullptr, *dtype = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(results, i), "O!O!O!", &PyTuple_Type, &sizes, &PyTuple_Type, &strides,
                          &THPDtypeType, &dtype)) {
      throw_error_of_python();
    }
    found->results.push_back({numbers_of(sizes), numbers_of(strides), reinterpret_cast<THPDtype*>(dtype)->scalar_type});
  }
  found->workspace = workspace;
  if (lse_strides != Py_None) {
    found->lse_strides = numbers_of(lse_strides);
  }
  if (derive != Py_None) {
    found->derive = held(derive);
  }
  entry.addresses = std::move(found);
}

// Keep what Python has returned for a call with this key and so many tensors, sinks aside; `schema` is the op's, null for `varlen_attn`.
inline void keep_described(
    const Key& key, uint64_t generation, PyObject* described, size_t tensors, const c10::FunctionSchema* schema) {
  if (!PyTuple_Check(described)) {
    if (described == Py_True) {
      const std::unique_lock lock(guard);
      passing = passing || generation == cache.generation;
    }
    return;
  }
  PyObject *launcher = nullptr, *counters = nullptr, *decline_reason = nullptr;
  PyObject *auxiliary = nullptr, *offsets = nullptr;
  int is_final = 0, counts_sinks = 0;
  if (!PyArg_ParseTuple(described, "OO!OpO!Op", &launcher, &PyTuple_Type, &counters, &decline_reason, &is_final,
                        &PyTuple_Type, &auxiliary, &offsets, &counts_sinks)) {
    throw_error_of_python();
  }
  auto entry = std::make_shared<Entry>();
  entry->tallies = tallies_of(counters);
  entry->decline_reason = held(decline_reason);
  entry->is_final = is_final != 0;
  entry->counts_sinks = counts_sinks != 0;
  if (PyTuple_Check(launcher)) {
    if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(launcher, 0), "op") == 0) {
      read_op_launcher(launcher, tensors + counts_sinks, *entry);
    } else {
      read_address_launcher(launcher, *entry);
    }
  } else if (launcher != Py_None) {
    entry->python = held(launcher);
  }
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(auxiliary));
  const size_t returned = schema ? schema->returns().size() : 0;
  TORCH_CHECK(count <= returned, "attnreg: got ", count, " auxiliary outputs, expected at most ", returned);
  for (size_t i = 0; i < count; i++) {
    PyObject* one = PyTuple_GET_ITEM(auxiliary, static_cast<Py_ssize_t>(i));
    entry->auxiliary.push_back(from_python(one, schema->returns()[returned - count + i].type()));
  }
  if (offsets != Py_None) {
    entry->needs_offsets = true;
    PyObject *queries = nullptr, *keys = nullptr;
    Py_ssize_t tokens_q = 0, tokens_k = 0;
    if (!PyArg_ParseTuple(offsets, "OOnn", &queries, &keys, &tokens_q, &tokens_k)) {
      throw_error_of_python();
    }
    keep_offsets(generation, THPVariable_Unpack(queries), THPVariable_Unpack(keys), tokens_q, tokens_k);
  }
  keep(key, generation, std::move(entry));
}

}  // namespace attnreg
