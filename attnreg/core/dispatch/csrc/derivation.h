// What a launch reads of offsets, derived once for all launches with them. See `launching/derivation.py`.

#pragma once

#include <algorithm>
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
  std::shared_ptr<const OffsetsKernel> kernel;
  at::Tensor tensor;
  uint64_t number;  // how many were written until then
};

struct Read {  // what a kernel reads of offsets: places in a tensor, in bytes
  at::Tensor tensor;
  std::vector<int64_t> places;
};

// What derives of offsets what a launch reads of them. See `Derivation` in Python.
struct Derivation {
  Object derive;
  std::shared_ptr<const OffsetsKernel> kernel;  // what derives the same of offsets that are new
  mutable std::optional<Derived> derived;       // of the last offsets; under the interpreter's lock
};

constexpr size_t kMostWritten = 64;  // as `launching.offsets` has: what goes is not compared any more

// Of all launchers, as both directions and all layers of a step share it. Under the interpreter's lock.
inline auto& all_written = *new std::vector<Written>;
inline uint64_t last_written = 0;

// Whether a capture is under way, or Inductor's graph trees are loaded: then nothing is kept of offsets, as
// `torchlib.layout.needs_graph_memory` says. With the interpreter's lock.
inline bool needs_graph_memory(const at::Tensor& tensor) {
  if (capturing(tensor).value_or(true)) {
    return true;
  }
  PyObject* const modules = PyImport_GetModuleDict();  // borrowed, as what is in it
  static PyObject* name = nullptr;                     // looked up once: each packed call of cuDNN asks
  if (!name) {
    PyObject* const layout = PyDict_GetItemString(modules, "attnreg.core.torchlib.layout");
    name = layout ? PyObject_GetAttrString(layout, "GRAPH_TREES") : nullptr;
  }
  if (!name) {
    PyErr_Clear();  // the process ends
    return true;
  }
  return PyDict_GetItem(modules, name) != nullptr;
}

// Launch a kernel on offsets, without a wait and without the interpreter's lock: a launch may wait for the device.
inline Read written(const OffsetsKernel& kernel, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const WithoutGil without;
  const auto options = at::TensorOptions().dtype(at::kLong).device(queries.device());
  const int64_t batch = queries.size(0) - 1, width = kernel.width > 0 ? kernel.width : batch;
  Read read{at::empty({kernel.rows, width}, options), kernel.places};
  c10::SmallVector<int64_t, kMostWords> words{
      word_of(read.tensor), word_of(queries), word_of(keys), queries.stride(0), keys.stride(0), batch, width};
  words.append(kernel.words.begin(), kernel.words.end());
  void* const on = queries.is_cuda() ? stream.native_handle() : nullptr;
  launch_words(kernel.launch, kernel.function, (width + kernel.threads - 1) / kernel.threads, kernel.threads, on, words);
  return read;
}

inline void check_places(const std::vector<int64_t>& places, int64_t bytes, const char* by) {
  for (const int64_t place : places) {
    TORCH_CHECK_INDEX(place >= 0 && place < bytes, "attnreg: Derivation.", by, " returned the place ", place, " in a tensor of ", bytes, " bytes");
  }
}

// What Python derives of the offsets; nothing if the kernel can't run any more. If the call cache has derived `own` and used
// it for a while, Python has the device say whether it still holds.
inline std::optional<Read> derived_by_python(
    const Derivation& derivation, const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& own) {
  std::vector<Object> arguments;
  arguments.push_back(owned(THPVariable_Wrap(queries)));
  arguments.push_back(owned(THPVariable_Wrap(keys)));
  if (own.defined()) {
    arguments.push_back(owned(THPVariable_Wrap(own)));
  }
  const Object returned = call_python(derivation.derive.get(), arguments);
  if (returned.get() == Py_None) {
    return std::nullopt;
  }
  PyObject *tensor = nullptr, *places = nullptr;
  if (!PyTuple_Check(returned.get()) || !PyArg_ParseTuple(returned.get(), "OO!", &tensor, &PyTuple_Type, &places) || !THPVariable_Check(tensor)) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "attnreg: Derivation.derive returned a ", Py_TYPE(returned.get())->tp_name,
                     tensor ? c10::str(" of a ", Py_TYPE(tensor)->tp_name) : "", ", expected a tuple of a tensor and a tuple of places, or None");
  }
  Read read{THPVariable_Unpack(tensor), numbers_of(places)};
  TORCH_CHECK(read.tensor.device() == queries.device(), "attnreg: Derivation.derive returned a tensor on ", read.tensor.device(),
              ", expected ", queries.device());
  check_places(read.places, static_cast<int64_t>(read.tensor.nbytes()), "derive");
  return read;
}

// What was written of the offsets; null if they are new.
inline Written* find_written(const OffsetsKernel& kernel, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const auto same = std::find_if(all_written.begin(), all_written.end(), [&](const Written& each) {
    return each.kernel->writes_as(kernel) && each.offsets.look_like(queries, keys, stream);
  });
  return same == all_written.end() ? nullptr : &*same;
}

// Keep what was written, until the offsets' tensors have gone or 64 others have come: what is dropped earlier would be written
// anew, and nobody would compare what calls have read. Returns what had its place, to be destroyed last: other threads may run
// then.
inline std::optional<Written> keep_written(Written written) {
  written.number = ++last_written;
  auto place = std::find_if(all_written.begin(), all_written.end(), [](const Written& each) { return each.offsets.have_gone(); });
  if (place == all_written.end() && all_written.size() < kMostWritten) {
    all_written.push_back(std::move(written));
    return std::nullopt;
  }
  if (place == all_written.end()) {
    place = std::min_element(all_written.begin(), all_written.end(), [](const Written& left, const Written& right) {
      return left.number < right.number;
    });
  }
  return std::exchange(*place, std::move(written));
}

// What a kernel has written of the offsets, or writes now if they are new.
inline std::optional<Read> kept_written(
    const Derivation& derivation, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const OffsetsKernel& kernel = *derivation.kernel;
  const Written* const same = find_written(kernel, queries, keys, stream);
  if (same && same->offsets.is_trusted()) {
    return Read{same->tensor, kernel.places};
  }
  const at::Tensor own = same ? same->tensor : at::Tensor();
  // Before anything looks at them: another thread may write to them meanwhile.
  SeenOffsets state{Seen(queries), Seen(keys), stream};
  if (own.defined()) {
    auto read = derived_by_python(derivation, queries, keys, own);
    if (Written* const again = find_written(kernel, queries, keys, stream); read && again) {
      again->offsets.until = state.until;
    }
    return read;
  }
  Read read = written(kernel, queries, keys, stream);
  const auto dropped = keep_written({std::move(state), derivation.kernel, read.tensor, 0});
  return read;
}

// What Python derived of the offsets the last time, if neither has changed and its tensor is still alive.
inline std::optional<Read> kept_derived(
    const Derivation& derivation, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const auto& last = derivation.derived;
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
    const Derivation& derivation, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const bool is_written = derivation.kernel && queries.scalar_type() == at::kInt && keys.scalar_type() == at::kInt;
  if (!counts_versions(queries) || !counts_versions(keys) || needs_graph_memory(queries)) {
    return is_written ? written(*derivation.kernel, queries, keys, stream) : derived_by_python(derivation, queries, keys, {});
  }
  if (is_written) {
    return kept_written(derivation, queries, keys, stream);
  }
  if (auto kept = kept_derived(derivation, queries, keys, stream)) {
    return kept;
  }
  // Before Python looks at them: another thread may write to them meanwhile.
  SeenOffsets state{Seen(queries), Seen(keys), stream};
  auto read = derived_by_python(derivation, queries, keys, {});
  if (read) {
    derivation.derived.emplace(Derived{std::move(state), Weak(read->tensor.getIntrusivePtr()), read->places});
  }
  return read;
}

// Whole numbers in a tensor, from a place on, as a vector of int32.
inline at::Tensor ints_in(const at::Tensor& written, int64_t first, int64_t count) {
  TORCH_CHECK_INDEX(static_cast<int64_t>(written.nbytes()) >= (first + count) * static_cast<int64_t>(sizeof(int32_t)),
                    "attnreg: Derivation.derive returned a tensor of ", written.nbytes(), " bytes, expected ", first + count, " numbers of int32");
  auto view = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(written.storage()), written.key_set(), caffe2::TypeMeta::Make<int32_t>());
  const int64_t size = static_cast<int64_t>(written.element_size()), step = 1;
  view->set_sizes_and_strides(at::IntArrayRef(count), at::IntArrayRef(step), written.storage_offset() * size / static_cast<int64_t>(sizeof(int32_t)) + first);
  return at::Tensor(std::move(view));
}

// Read an `OffsetsKernel`.
inline OffsetsKernel read_kernel(PyObject* described) {
  PyObject *launch = nullptr, *function = nullptr, *words = nullptr, *places = nullptr;
  long long threads = 0, rows = 0, width = 0;
  if (!PyTuple_Check(described) ||
      !PyArg_ParseTuple(described, "O!O!LLLO!O!", &PyLong_Type, &launch, &PyLong_Type, &function, &threads, &rows, &width,
                        &PyTuple_Type, &words, &PyTuple_Type, &places)) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "attnreg: Derivation.kernel: got a ", Py_TYPE(described)->tp_name, ", expected an OffsetsKernel or None");
  }
  OffsetsKernel kernel{reinterpret_cast<LaunchKernel>(PyLong_AsVoidPtr(launch)), PyLong_AsVoidPtr(function), threads, rows, width,
                       numbers_of(words), numbers_of(places)};
  TORCH_CHECK(threads > 0 && rows > 0 && width >= 0 && kernel.words.size() + 7 <= kMostWords,
              "attnreg: Derivation.kernel: expected sizes above 0 and at most ", kMostWords - 7, " words");
  check_places(kernel.places, 8 * rows * std::max<int64_t>(width, 1), "kernel");
  return kernel;
}

// Read a `Derivation`.
inline Derivation read_derivation(PyObject* described) {
  PyObject *derive = nullptr, *kernel = nullptr;
  if (!PyTuple_Check(described) || !PyArg_ParseTuple(described, "OO", &derive, &kernel)) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "attnreg: got a ", Py_TYPE(described)->tp_name, ", expected a Derivation or None");
  }
  Derivation derivation{held(derive), nullptr, {}};
  if (kernel != Py_None) {
    derivation.kernel = std::make_shared<const OffsetsKernel>(read_kernel(kernel));
  }
  return derivation;
}

}  // namespace attnreg
