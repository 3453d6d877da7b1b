// Kernels that are given the addresses of their tensors. See `AddressLauncher` in `launching/launchers.py`.

#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
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

struct Derived {  // what was derived of a pair of offsets
  SeenOffsets offsets;
  Weak tensor;
  std::vector<int64_t> places;
  at::Tensor own;  // the same tensor if the call cache has derived it; Python owns the others
};

struct Written {  // what a kernel of ours has written of a pair of offsets
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
  Object derive;                             // none of dense calls
  std::optional<OffsetsKernel> kernel;       // what derives the same of offsets that are new
  mutable std::vector<Derived> derived;      // of the last offsets, the newest last; under the interpreter's lock
};

constexpr size_t kMostPrepared = 4;  // batches alternate between a few buckets of lengths
constexpr size_t kMostDerived = 4;   // and between the offsets of a few micro-batches
constexpr size_t kMostWritten = 8;

// The newest last, of all launchers: both directions of a step share them. Under the interpreter's lock.
inline auto& all_written = *new std::vector<Written>;

struct AddressLauncher {  // a kernel that is given the addresses of its tensors
  Object prepare;
  mutable std::vector<std::shared_ptr<const Prepared>> prepared;  // the newest last; under the interpreter's lock
};

// Whether tensors are in the memory of a CUDA graph, or of Inductor's graph trees: then nothing is kept of offsets. See
// `needs_graph_memory` in Python. With the interpreter's lock.
inline bool needs_graph_memory(const at::Tensor& tensor) {
  PyObject* const modules = PyImport_GetModuleDict();  // borrowed
  return capturing(tensor).value_or(true) || PyDict_GetItemString(modules, "torch._inductor.cudagraph_trees");
}

// Launch a kernel on new offsets, without a wait.
inline Read written(const OffsetsKernel& kernel, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(queries.device());
  Read read{at::empty({kernel.rows, kernel.width}, options), kernel.places};
  c10::SmallVector<int64_t, kMostWords> words{word_of(read.tensor), word_of(queries),     word_of(keys), queries.stride(0),
                                              keys.stride(0),       queries.size(0) - 1, kernel.width};
  words.append(kernel.words.begin(), kernel.words.end());
  void* const on = queries.is_cuda() ? stream.native_handle() : nullptr;
  launch_words(kernel.launch, kernel.function, (kernel.width + kernel.threads - 1) / kernel.threads, kernel.threads, on, words);
  return read;
}

// Add to the newest of something. The oldest goes, which the caller destroys last of all: that may run Python.
template <typename T>
std::optional<T> keep_newest(std::vector<T>& kept, size_t most, T newest) {
  std::optional<T> oldest;
  if (kept.size() >= most) {
    oldest = std::move(kept.front());
    kept.erase(kept.begin());
  }
  kept.push_back(std::move(newest));
  return oldest;
}

// What a kernel has written of these offsets for another launcher, or else writes now; and since when it is used.
inline std::pair<Read, SeenOffsets> shared_written(
    const OffsetsKernel& kernel, const at::Tensor& queries, const at::Tensor& keys, SeenOffsets seen) {
  const auto same = std::find_if(all_written.begin(), all_written.end(), [&](const Written& one) {
    return one.kernel.writes_as(kernel) && one.offsets.look_like(queries, keys, seen.stream) && one.offsets.is_trusted();
  });
  if (same != all_written.end()) {
    return {Read{same->tensor, kernel.places}, same->offsets};
  }
  Read read = written(kernel, queries, keys, seen.stream);
  const auto oldest = keep_newest(all_written, kMostWritten, Written{seen, kernel, read.tensor});
  return {std::move(read), std::move(seen)};
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
  const Object found = call_python(launcher.derive.get(), arguments);
  if (found.get() == Py_None) {
    return std::nullopt;
  }
  PyObject *tensor = nullptr, *places = nullptr;
  if (!PyTuple_Check(found.get()) || !PyArg_ParseTuple(found.get(), "OO!", &tensor, &PyTuple_Type, &places) || !THPVariable_Check(tensor)) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "attnreg: Prepared.derive returned a ", Py_TYPE(found.get())->tp_name,
                     tensor ? c10::str(" of a ", Py_TYPE(tensor)->tp_name) : "", ", expected a tuple of a tensor and a tuple of places, or None");
  }
  Read read{THPVariable_Unpack(tensor), numbers_of(places)};
  TORCH_CHECK(read.tensor.device() == queries.device(), "attnreg: Prepared.derive returned a tensor on ", read.tensor.device(),
              ", expected ", queries.device());
  const auto bytes = static_cast<int64_t>(read.tensor.nbytes());
  for (const int64_t place : read.places) {
    TORCH_CHECK_INDEX(place >= 0 && place < bytes, "attnreg: Prepared.derive returned the place ", place, " in a tensor of ", bytes, " bytes");
  }
  return read;
}

// What the kernel reads of the offsets; nothing if it can't run any more. It is kept for further calls with these offsets.
// With the interpreter's lock.
inline std::optional<Read> derive(
    const Prepared& launcher, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const bool is_int = queries.scalar_type() == at::kInt && keys.scalar_type() == at::kInt;
  if (!counts_versions(queries) || !counts_versions(keys) || needs_graph_memory(queries)) {
    return launcher.kernel && is_int ? written(*launcher.kernel, queries, keys, stream) : derived_by_python(launcher, queries, keys, {});
  }
  at::Tensor own;
  const auto last = std::find_if(launcher.derived.begin(), launcher.derived.end(), [&](const Derived& one) {
    return one.offsets.look_like(queries, keys, stream);
  });
  const bool is_new = last == launcher.derived.end();
  if (!is_new) {
    auto tensor = last->tensor.lock();
    if (tensor && last->offsets.is_trusted()) {
      return Read{at::Tensor(std::move(tensor)), last->places};
    }
    own = last->own;
  }
  // Before anything looks at them: another thread may write to them meanwhile.
  SeenOffsets seen{Seen(queries), Seen(keys), stream};
  std::optional<Read> read;
  if (is_new && launcher.kernel && is_int) {
    std::tie(read, seen) = shared_written(*launcher.kernel, queries, keys, std::move(seen));
    own = read->tensor;
  } else {
    read = derived_by_python(launcher, queries, keys, own);
  }
  if (!read) {
    return read;
  }
  // Python may have run meanwhile, so that nothing that was found before holds.
  auto& kept = launcher.derived;
  const auto same = std::find_if(kept.begin(), kept.end(), [&](const Derived& one) {
    return one.offsets.look_like(queries, keys, stream);
  });
  Derived newest{std::move(seen), Weak(read->tensor.getIntrusivePtr()), read->places, std::move(own)};
  if (same != kept.end()) {
    std::swap(*same, newest);
    return read;
  }
  const auto oldest = keep_newest(kept, kMostDerived, std::move(newest));
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
    throw_error_of_python();
  }
  OffsetsKernel kernel{reinterpret_cast<LaunchKernel>(PyLong_AsVoidPtr(launch)), PyLong_AsVoidPtr(function), threads, rows, width,
                       numbers_of(words), numbers_of(places)};
  TORCH_CHECK(threads > 0 && rows > 0 && width > 0 && kernel.words.size() + 7 <= kMostWords,
              "attnreg: Prepared.kernel: expected sizes above 0 and at most ", kMostWords - 7, " words");
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
  const auto kept = std::find_if(launcher.prepared.begin(), launcher.prepared.end(), [&](const auto& one) {
    return are_between(call.lengths, one->least, one->most) && one->strides == strides;
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
