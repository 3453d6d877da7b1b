// Kernels that are given the addresses of their tensors. See `AddressLauncher` in `launching/launchers.py`.

#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "launchers.h"

namespace attnreg {

// A kernel on the GPU that writes what is read of offsets, int64 (rows, width). See `OffsetsKernel` in Python.
struct OffsetsKernel {
  LaunchKernel launch;
  void* function;
  int64_t threads, rows, width;
  std::vector<int64_t> words;   // its arguments behind tensor, offsets, their strides, batch and width
  std::vector<int64_t> places;  // where in the tensor a launch reads, in bytes

  bool writes_as(const OffsetsKernel& other) const {
    return function == other.function && rows == other.rows && width == other.width && words == other.words;
  }
};

struct Derived {  // what Python has derived of a pair of offsets, and owns
  SeenOffsets offsets;
  Weak tensor;
  std::vector<int64_t> places;
};

struct Written {  // what a kernel has written of a pair of offsets
  SeenOffsets offsets;
  OffsetsKernel kernel;
  at::Tensor tensor;
};

struct Read {  // what a kernel reads of offsets: places in a tensor, in bytes
  at::Tensor tensor;
  std::vector<int64_t> places;
};

struct Prepared {  // how a kernel on addresses runs calls of some lengths and strides
  Lengths least, most;
  std::vector<int64_t> strides;  // of all tensors, one after the other
  Object launch;
  std::vector<size_t> operands;
  int64_t workspace;
  bool lse_token_first;
  std::optional<std::vector<int64_t>> lse_strides;
  Object derive;                           // none of dense calls
  std::optional<OffsetsKernel> kernel;     // what derives the same of offsets that are new
  mutable std::optional<Derived> derived;  // of the last offsets; under the interpreter's lock
};

constexpr size_t kMostPrepared = 4;  // batches alternate between a few buckets of lengths
constexpr size_t kMostWritten = 64;  // as `launching.offsets` has: what goes is not compared any more

// Of all launchers, as both directions and all layers of a step share it; the newest last. Under the interpreter's lock.
inline auto& all_written = *new std::vector<Written>;

struct AddressLauncher {  // a kernel that is given the addresses of its tensors
  Object prepare;
  mutable std::vector<std::shared_ptr<const Prepared>> prepared;  // the newest last; under the interpreter's lock
};

// Whether a capture is under way, or Inductor's graph trees are loaded: then nothing is kept of offsets, as
// `torchlib.layout.needs_graph_memory` says. With the interpreter's lock.
inline bool needs_graph_memory(const at::Tensor& tensor) {
  if (capturing(tensor).value_or(true)) {
    return true;
  }
  PyObject* const modules = PyImport_GetModuleDict();  // borrowed, as what is in it
  PyObject* const layout = PyDict_GetItemString(modules, "attnreg.core.torchlib.layout");
  const Object name = owned(layout ? PyObject_GetAttrString(layout, "GRAPH_TREES") : nullptr);
  if (!name) {
    PyErr_Clear();  // the process ends
    return true;
  }
  return PyDict_GetItem(modules, name.get()) != nullptr;
}

// Launch a kernel on offsets, without a wait and without the interpreter's lock: a launch may wait for the device.
inline Read written(const OffsetsKernel& kernel, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const WithoutGil without;
  const auto options = at::TensorOptions().dtype(at::kLong).device(queries.device());
  Read read{at::empty({kernel.rows, kernel.width}, options), kernel.places};
  c10::SmallVector<int64_t, kMostWords> words{word_of(read.tensor), word_of(queries),     word_of(keys), queries.stride(0),
                                              keys.stride(0),       queries.size(0) - 1, kernel.width};
  words.append(kernel.words.begin(), kernel.words.end());
  void* const on = queries.is_cuda() ? stream.native_handle() : nullptr;
  launch_words(kernel.launch, kernel.function, (kernel.width + kernel.threads - 1) / kernel.threads, kernel.threads, on, words);
  return read;
}

inline void check_places(const std::vector<int64_t>& places, int64_t bytes, const char* by) {
  for (const int64_t place : places) {
    TORCH_CHECK_INDEX(place >= 0 && place < bytes, "attnreg: Prepared.", by, " returned the place ", place, " in a tensor of ", bytes, " bytes");
  }
}

// What Python derives of the offsets; nothing if the kernel can't run any more. If the call cache has derived `own` and used
// it for a while, Python has the device say whether it still holds.
inline std::optional<Read> derived_by_python(
    const Prepared& launcher, const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& own) {
  std::vector<Object> arguments;
  arguments.push_back(owned(THPVariable_Wrap(queries)));
  arguments.push_back(owned(THPVariable_Wrap(keys)));
  if (own.defined()) {
    arguments.push_back(owned(THPVariable_Wrap(own)));
  }
  const Object returned = call_python(launcher.derive.get(), arguments);
  if (returned.get() == Py_None) {
    return std::nullopt;
  }
  PyObject *tensor = nullptr, *places = nullptr;
  if (!PyTuple_Check(returned.get()) || !PyArg_ParseTuple(returned.get(), "OO!", &tensor, &PyTuple_Type, &places) || !THPVariable_Check(tensor)) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "attnreg: Prepared.derive returned a ", Py_TYPE(returned.get())->tp_name,
                     tensor ? c10::str(" of a ", Py_TYPE(tensor)->tp_name) : "", ", expected a tuple of a tensor and a tuple of places, or None");
  }
  Read read{THPVariable_Unpack(tensor), numbers_of(places)};
  TORCH_CHECK(read.tensor.device() == queries.device(), "attnreg: Prepared.derive returned a tensor on ", read.tensor.device(),
              ", expected ", queries.device());
  check_places(read.places, static_cast<int64_t>(read.tensor.nbytes()), "derive");
  return read;
}

// What a kernel has written of the offsets, or writes now if they are new. It is kept until the offsets' tensors have gone or
// 64 others have come: what is dropped earlier would be written anew, and nobody would compare what calls have read.
inline std::optional<Read> kept_written(
    const Prepared& launcher, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const OffsetsKernel& kernel = *launcher.kernel;
  const auto find = [&] {
    return std::find_if(all_written.begin(), all_written.end(), [&](const Written& each) {
      return each.kernel.writes_as(kernel) && each.offsets.look_like(queries, keys, stream);
    });
  };
  const auto same = find();
  if (same != all_written.end() && same->offsets.is_trusted()) {
    return Read{same->tensor, kernel.places};
  }
  const at::Tensor own = same == all_written.end() ? at::Tensor() : same->tensor;
  // Before anything looks at them: another thread may write to them meanwhile.
  SeenOffsets state{Seen(queries), Seen(keys), stream};
  if (own.defined()) {
    auto read = derived_by_python(launcher, queries, keys, own);
    if (const auto again = find(); read && again != all_written.end()) {
      again->offsets.until = state.until;
    }
    return read;
  }
  Read read = written(kernel, queries, keys, stream);
  std::vector<Written> dropped;  // destroyed last: other threads may run then
  const auto gone = std::stable_partition(all_written.begin(), all_written.end(), [](const Written& each) {
    return !each.offsets.have_gone();
  });
  std::move(gone, all_written.end(), std::back_inserter(dropped));
  all_written.erase(gone, all_written.end());
  if (all_written.size() >= kMostWritten) {
    dropped.push_back(std::move(all_written.front()));
    all_written.erase(all_written.begin());
  }
  all_written.push_back({std::move(state), kernel, read.tensor});
  return read;
}

// What Python derived of the offsets the last time, if neither has changed and its tensor is still alive.
inline std::optional<Read> kept_derived(
    const Prepared& launcher, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const auto& last = launcher.derived;
  if (!last || !last->offsets.is_trusted() || !last->offsets.look_like(queries, keys, stream)) {
    return std::nullopt;
  }
  auto tensor = last->tensor.lock();
  if (!tensor) {
    return std::nullopt;
  }
  return Read{at::Tensor(std::move(tensor)), last->places};
}

// What the kernel reads of the offsets; nothing if it can't run any more. With the interpreter's lock.
inline std::optional<Read> derive(
    const Prepared& launcher, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const bool is_written = launcher.kernel && queries.scalar_type() == at::kInt && keys.scalar_type() == at::kInt;
  if (!counts_versions(queries) || !counts_versions(keys) || needs_graph_memory(queries)) {
    return is_written ? written(*launcher.kernel, queries, keys, stream) : derived_by_python(launcher, queries, keys, {});
  }
  if (is_written) {
    return kept_written(launcher, queries, keys, stream);
  }
  if (auto kept = kept_derived(launcher, queries, keys, stream)) {
    return kept;
  }
  // Before Python looks at them: another thread may write to them meanwhile.
  SeenOffsets state{Seen(queries), Seen(keys), stream};
  auto read = derived_by_python(launcher, queries, keys, {});
  if (read) {
    launcher.derived.emplace(Derived{std::move(state), Weak(read->tensor.getIntrusivePtr()), read->places});
  }
  return read;
}

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

// Read an `OffsetsKernel`.
inline OffsetsKernel read_kernel(PyObject* described) {
  PyObject *launch = nullptr, *function = nullptr, *words = nullptr, *places = nullptr;
  long long threads = 0, rows = 0, width = 0;
  if (!PyTuple_Check(described) ||
      !PyArg_ParseTuple(described, "O!O!LLLO!O!", &PyLong_Type, &launch, &PyLong_Type, &function, &threads, &rows, &width,
                        &PyTuple_Type, &words, &PyTuple_Type, &places)) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "attnreg: Prepared.kernel: got a ", Py_TYPE(described)->tp_name, ", expected an OffsetsKernel or None");
  }
  OffsetsKernel kernel{reinterpret_cast<LaunchKernel>(PyLong_AsVoidPtr(launch)), PyLong_AsVoidPtr(function), threads, rows, width,
                       numbers_of(words), numbers_of(places)};
  TORCH_CHECK(threads > 0 && rows > 0 && width > 0 && kernel.words.size() + 7 <= kMostWords,
              "attnreg: Prepared.kernel: expected sizes above 0 and at most ", kMostWords - 7, " words");
  check_places(kernel.places, 8 * rows * width, "kernel");
  return kernel;
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
  PyObject *launch = nullptr, *operands = nullptr, *lse_strides = nullptr, *derive = nullptr, *bounds = nullptr, *kernel = nullptr;
  Py_ssize_t workspace = 0;
  int lse_token_first = 0;
  if (!PyTuple_Check(returned.get()) ||
      !PyArg_ParseTuple(returned.get(), "OO!npOOOO", &launch, &PyTuple_Type, &operands, &workspace, &lse_token_first,
                        &lse_strides, &derive, &bounds, &kernel)) {
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
  if (derive != Py_None) {
    how->derive = held(derive);
  }
  if (kernel != Py_None) {
    how->kernel = read_kernel(kernel);
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
  if (how->derive) {
    auto of_offsets = derive(*how, call.offsets(0), call.offsets(1), stream);
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
