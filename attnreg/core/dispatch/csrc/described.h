// What Python returns to be kept: `call_cache.Kept` and the launchers of `launching/launchers.py`, read by name.

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

// An attribute of an object of Python's.
inline Object attribute(PyObject* object, const char* name) {
  Object value = owned(PyObject_GetAttrString(object, name));
  if (!value) {
    throw_error_of_python();
  }
  return value;
}

inline Object tuple_attribute(PyObject* object, const char* name) {
  Object value = attribute(object, name);
  TORCH_CHECK_TYPE(PyTuple_Check(value.get()), name, ": got a ", Py_TYPE(value.get())->tp_name, ", expected a tuple");
  return value;
}

inline int64_t number_attribute(PyObject* object, const char* name) {
  const int64_t number = PyLong_AsLongLong(attribute(object, name).get());
  if (number == -1 && PyErr_Occurred()) {
    throw_error_of_python();
  }
  return number;
}

inline bool flag_attribute(PyObject* object, const char* name) {
  return number_attribute(object, name) != 0;
}

inline void* address_attribute(PyObject* object, const char* name) {
  const Object value = attribute(object, name);
  TORCH_CHECK_TYPE(PyLong_Check(value.get()), name, ": got a ", Py_TYPE(value.get())->tp_name, ", expected an address");
  void* address = PyLong_AsVoidPtr(value.get());
  if (!address && PyErr_Occurred()) {
    throw_error_of_python();
  }
  return address;
}

inline std::string text_attribute(PyObject* object, const char* name) {
  const Object value = attribute(object, name);
  const char* text = PyUnicode_AsUTF8(value.get());
  if (!text) {
    throw_error_of_python();
  }
  return text;
}

inline Window window_attribute(PyObject* launcher) {
  long long left = -1, right = -1;
  if (!PyArg_ParseTuple(tuple_attribute(launcher, "window").get(), "LL", &left, &right)) {
    throw_error_of_python();
  }
  return {left, right};
}

// Pairs of a place and a number that is 0 or 1: which length, or whose rows.
inline std::vector<std::pair<size_t, bool>> places_attribute(PyObject* object, const char* name) {
  const Object places = tuple_attribute(object, name);
  std::vector<std::pair<size_t, bool>> pairs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places.get()); i++) {
    Py_ssize_t place = 0;
    int of_keys = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places.get(), i), "np", &place, &of_keys)) {
      throw_error_of_python();
    }
    pairs.emplace_back(static_cast<size_t>(place), of_keys != 0);
  }
  return pairs;
}

// An op's arguments behind some tensors: some by place, some by name, the others as they are by default.
inline std::vector<c10::IValue> arguments_behind(const c10::FunctionSchema& schema, size_t tensors, PyObject* launcher) {
  const Object rest = tuple_attribute(launcher, "rest"), options = attribute(launcher, "options");
  TORCH_CHECK_TYPE(PyDict_Check(options.get()), "options: got a ", Py_TYPE(options.get())->tp_name, ", expected a dict");
  std::vector<c10::IValue> values;
  const auto& arguments = schema.arguments();
  Py_ssize_t by_name = 0;
  for (size_t i = tensors; i < arguments.size(); i++) {
    const auto place = static_cast<Py_ssize_t>(i - tensors);
    const bool by_place = place < PyTuple_GET_SIZE(rest.get());
    PyObject* value = by_place ? PyTuple_GET_ITEM(rest.get(), place)
                               : PyDict_GetItemString(options.get(), arguments[i].name().c_str());
    by_name += value && !by_place;
    TORCH_CHECK(value || arguments[i].default_value(), "attnreg: ", schema.name(), " got no ", arguments[i].name());
    values.push_back(value ? from_python(value, arguments[i].type()) : *arguments[i].default_value());
  }
  const bool all = tensors + PyTuple_GET_SIZE(rest.get()) <= arguments.size() && by_name == PyDict_GET_SIZE(options.get());
  TORCH_CHECK(all, "attnreg: ", schema.name(), " got arguments that it doesn't take");
  return values;
}

// A function of Python's to keep.
inline Object held_function(PyObject* function) {
  TORCH_CHECK_TYPE(PyCallable_Check(function), "got a ", Py_TYPE(function)->tp_name, ", expected a function");
  return held(function);
}

// `tensors` is how many a launcher is given.
inline void read_op_launcher(PyObject* launcher, size_t tensors, Entry& entry) {
  const auto* captured = capture(text_attribute(launcher, "op"), text_attribute(launcher, "key"));
  if (!captured) {
    entry.python = held(launcher);  // which has a kernel of its own
    return;
  }
  entry.window = window_attribute(launcher);
  const auto& schema = captured->first.schema();
  std::optional<size_t> used;
  if (flag_attribute(launcher, "takes_used")) {
    const auto place = schema.argumentIndexWithName("seqused_k");
    TORCH_CHECK(place && static_cast<size_t>(*place) >= tensors, "attnreg: ", schema.name(), " takes no seqused_k behind its tensors");
    used = static_cast<size_t>(*place) - tensors;
  }
  entry.op = std::make_shared<const OpLauncher>(
      captured->first, captured->second, arguments_behind(schema, tensors, launcher),
      static_cast<size_t>(number_attribute(launcher, "results")), places_attribute(launcher, "length_places"), used,
      flag_attribute(launcher, "folds"));
  entry.zeroes_rows = flag_attribute(launcher, "zeroes_rows");
}

inline void read_native_launcher(PyObject* launcher, Entry& entry) {
  auto* const function = reinterpret_cast<NativeFunction>(address_attribute(launcher, "function"));
  TORCH_CHECK(function, "function: got 0, expected an address");
  entry.native = std::make_shared<const NativeLauncher>(function, address_attribute(launcher, "context"), held(launcher));
}

inline void read_address_launcher(PyObject* launcher, Entry& entry) {
  auto addresses = std::make_shared<AddressLauncher>();
  addresses->prepare = held_function(attribute(launcher, "prepare").get());
  entry.window = window_attribute(launcher);
  entry.addresses = std::move(addresses);
}

inline void read_function_launcher(PyObject* launcher, Entry& entry) {
  entry.python = held_function(attribute(launcher, "run").get());
  entry.window = window_attribute(launcher);
  entry.clears = true;
  entry.zeroes_rows = flag_attribute(launcher, "zeroes_rows");
  entry.finite = places_attribute(launcher, "finite");
  if (const Object counts = attribute(launcher, "counts"); counts.get() != Py_None) {
    entry.counts = read_derivation(counts.get());
  }
  if (const Object describe = attribute(launcher, "programs"); describe.get() != Py_None) {
    auto programs = std::make_shared<Programs>();
    programs->describe = held_function(describe.get());
    entry.programs = std::move(programs);
  }
}

// `tensors` is how many the launcher is given.
inline void read_launcher(PyObject* launcher, size_t tensors, Entry& entry) {
  if (launcher == Py_None) {
    return;
  }
  const std::string form = PyObject_HasAttrString(launcher, "form") ? text_attribute(launcher, "form") : "";
  if (form == "op") {
    read_op_launcher(launcher, tensors, entry);
  } else if (form == "native") {
    read_native_launcher(launcher, entry);
  } else if (form == "function") {
    read_function_launcher(launcher, entry);
  } else if (form == "addresses") {
    read_address_launcher(launcher, entry);
  } else {
    entry.python = held_function(launcher);
  }
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

// Keep what Python has returned for a call with this key and so many tensors, sinks aside; `schema` is the op's, null for `varlen_attn`.
inline void keep_described(
    const Key& key, const Lengths& lengths, uint64_t generation, PyObject* kept, size_t tensors, const c10::FunctionSchema* schema) {
  if (kept == Py_None) {
    return;
  }
  if (kept == Py_True) {  // nothing is registered
    const std::unique_lock lock(guard);
    passing = passing || generation == cache.generation;
    return;
  }
  auto entry = std::make_shared<Entry>();
  entry->tallies = tallies_of(tuple_attribute(kept, "counters").get());
  entry->decline_reason = held(attribute(kept, "decline_reason").get());
  entry->is_final = flag_attribute(kept, "is_final");
  entry->counts_sinks = flag_attribute(kept, "counts_sinks");
  try {
    read_launcher(attribute(kept, "launcher").get(), tensors + entry->counts_sinks, *entry);
  } catch (...) {  // the call itself has run, and must not fail for what is to run the next ones
    const Object error = error_just_thrown();
    call_python(attribute(attribute(kept, "plan").get(), "count_bad_launcher").get(), {error});
    return;
  }
  const Object auxiliary = tuple_attribute(kept, "auxiliary");
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(auxiliary.get()));
  const size_t returned = schema ? schema->returns().size() : 0;
  TORCH_CHECK(count <= returned, "attnreg: got ", count, " auxiliary outputs, expected at most ", returned);
  for (size_t i = 0; i < count; i++) {
    PyObject* output = PyTuple_GET_ITEM(auxiliary.get(), static_cast<Py_ssize_t>(i));
    entry->auxiliary.push_back(from_python(output, schema->returns()[returned - count + i].type()));
  }
  entry->lengths = places_attribute(kept, "length_places");
  const Classes classes = read_classes(tuple_attribute(kept, "cuts_as_numbers").get());
  OfClass of_class{static_cast<Detail>(number_attribute(kept, "detail"))};
  if (const Object steps = attribute(kept, "steps"); steps.get() != Py_None) {
    of_class.steps = held_function(steps.get());
  }
  keep(key, lengths, generation, classes, std::move(of_class), std::move(entry));
}

}  // namespace attnreg
