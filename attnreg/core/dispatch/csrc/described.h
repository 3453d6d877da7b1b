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

// Places with 0 for the longest query or 1 for the longest key, as `launchers.places_of` returns them.
inline std::vector<std::pair<size_t, bool>> places_of(PyObject* places) {
  std::vector<std::pair<size_t, bool>> read;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); i++) {
    Py_ssize_t place = 0;
    int of_keys = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places, i), "np", &place, &of_keys)) {
      throw_error_of_python();
    }
    read.emplace_back(static_cast<size_t>(place), of_keys != 0);
  }
  return read;
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

// A function of Python's to keep.
inline Object held_function(PyObject* function) {
  TORCH_CHECK_TYPE(PyCallable_Check(function), "got a ", Py_TYPE(function)->tp_name, ", expected a function");
  return held(function);
}

// `tensors` is how many a launcher is given.
inline void read_op_launcher(PyObject* described, size_t tensors, Entry& entry) {
  const char *op = nullptr, *key = nullptr, *kind = nullptr;
  PyObject *launcher = nullptr, *rest = nullptr, *options = nullptr, *places = nullptr;
  Py_ssize_t results = 0;
  long long left = -1, right = -1;
  if (!PyArg_ParseTuple(described, "sOssO!O!nO!(LL)", &kind, &launcher, &op, &key, &PyTuple_Type, &rest, &PyDict_Type,
                        &options, &results, &PyTuple_Type, &places, &left, &right)) {
    throw_error_of_python();
  }
  const auto* captured = capture(op, key);
  if (!captured) {
    entry.python = held(launcher);  // which has a kernel of its own
    return;
  }
  entry.window = {left, right};
  entry.op = std::make_shared<const OpLauncher>(
      captured->first, captured->second, arguments_behind(captured->first.schema(), tensors, rest, options),
      static_cast<size_t>(results), places_of(places));
}

inline void read_native_launcher(PyObject* described, Entry& entry) {
  const char* kind = nullptr;
  PyObject *launcher = nullptr, *function = nullptr, *context = nullptr;
  if (!PyArg_ParseTuple(described, "sOO!O!", &kind, &launcher, &PyLong_Type, &function, &PyLong_Type, &context)) {
    throw_error_of_python();
  }
  auto* const address = reinterpret_cast<NativeFunction>(PyLong_AsVoidPtr(function));
  void* const of_context = PyLong_AsVoidPtr(context);
  if (PyErr_Occurred()) {
    throw_error_of_python();
  }
  TORCH_CHECK(address, "NativeLauncher.function: got 0, expected an address");
  entry.native = std::make_shared<const NativeLauncher>(address, of_context, held(launcher));
}

inline void read_address_launcher(PyObject* described, Entry& entry) {
  const char* kind = nullptr;
  PyObject *launcher = nullptr, *prepare = nullptr;
  long long left = -1, right = -1;
  if (!PyArg_ParseTuple(described, "sOO(LL)", &kind, &launcher, &prepare, &left, &right)) {
    throw_error_of_python();
  }
  auto addresses = std::make_shared<AddressLauncher>();
  addresses->prepare = held_function(prepare);
  entry.window = {left, right};
  entry.addresses = std::move(addresses);
}

inline void read_function_launcher(PyObject* described, Entry& entry) {
  const char* kind = nullptr;
  PyObject *launcher = nullptr, *run = nullptr, *finite = nullptr;
  long long left = -1, right = -1;
  if (!PyArg_ParseTuple(described, "sOO(LL)O!", &kind, &launcher, &run, &left, &right, &PyTuple_Type, &finite)) {
    throw_error_of_python();
  }
  entry.python = held_function(run);
  entry.window = {left, right};
  entry.clears = true;
  entry.finite = places_of(finite);
}

// Read the cuts of a kind of calls: pairs of terms, each a coefficient and lengths as bits, and of a number.
inline Classes read_classes(PyObject* cuts) {
  Classes classes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(cuts); i++) {
    PyObject* terms = nullptr;
    Cut cut;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(cuts, i), "O!d", &PyTuple_Type, &terms, &cut.at)) {
      throw_error_of_python();
    }
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(terms); j++) {
      double coefficient = 0;
      unsigned names = 0;
      if (!PyArg_ParseTuple(PyTuple_GET_ITEM(terms, j), "dI", &coefficient, &names)) {
        throw_error_of_python();
      }
      cut.terms.emplace_back(coefficient, names);
    }
    classes.cuts.push_back(std::move(cut));
  }
  return classes;
}

// Read a launcher of calls with so many tensors, sinks aside.
inline void read_launcher(PyObject* launcher, size_t tensors, Entry& entry) {
  if (PyTuple_Check(launcher)) {
    const char* kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(launcher, 0));
    if (kind == std::string("op")) {
      read_op_launcher(launcher, tensors + entry.counts_sinks, entry);
    } else if (kind == std::string("native")) {
      read_native_launcher(launcher, entry);
    } else if (kind == std::string("function")) {
      read_function_launcher(launcher, entry);
    } else {
      read_address_launcher(launcher, entry);
    }
  } else if (launcher != Py_None) {
    entry.python = held_function(launcher);
  }
}

// Keep what Python has returned for a call with this key and so many tensors, sinks aside; `schema` is the op's, null for `varlen_attn`.
inline void keep_described(
    const Key& key, const Lengths& lengths, uint64_t generation, PyObject* described, size_t tensors, const c10::FunctionSchema* schema) {
  if (!PyTuple_Check(described)) {
    if (described == Py_True) {
      const std::unique_lock lock(guard);
      passing = passing || generation == cache.generation;
    }
    return;
  }
  PyObject *launcher = nullptr, *counters = nullptr, *decline_reason = nullptr;
  PyObject *auxiliary = nullptr, *places = nullptr, *cuts = nullptr;
  int is_final = 0, counts_sinks = 0, detail = 0;
  if (!PyArg_ParseTuple(described, "OO!OpO!O!p(O!i)", &launcher, &PyTuple_Type, &counters, &decline_reason, &is_final,
                        &PyTuple_Type, &auxiliary, &PyTuple_Type, &places, &counts_sinks, &PyTuple_Type, &cuts, &detail)) {
    throw_error_of_python();
  }
  auto entry = std::make_shared<Entry>();
  entry->tallies = tallies_of(counters);
  entry->decline_reason = held(decline_reason);
  entry->is_final = is_final != 0;
  entry->counts_sinks = counts_sinks != 0;
  try {
    read_launcher(launcher, tensors, *entry);
  } catch (...) {  // the call itself has run, and must not fail for what is to run the next ones
    const Object plan = owned(PyObject_GetAttrString(decline_reason, "__self__"));
    const Object count = owned(plan ? PyObject_GetAttrString(plan.get(), "count_bad_launcher") : nullptr);
    PyErr_Clear();
    if (!count) {
      throw;
    }
    const Object error = error_just_thrown();
    call_python(count.get(), {error});
    return;
  }
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(auxiliary));
  const size_t returned = schema ? schema->returns().size() : 0;
  TORCH_CHECK(count <= returned, "attnreg: got ", count, " auxiliary outputs, expected at most ", returned);
  for (size_t i = 0; i < count; i++) {
    PyObject* output = PyTuple_GET_ITEM(auxiliary, static_cast<Py_ssize_t>(i));
    entry->auxiliary.push_back(from_python(output, schema->returns()[returned - count + i].type()));
  }
  entry->lengths = places_of(places);
  keep(key, lengths, generation, read_classes(cuts), static_cast<Detail>(detail), std::move(entry));
}

}  // namespace attnreg
