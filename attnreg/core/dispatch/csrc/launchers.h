// Launchers: what runs a call that is kept. See `attnreg/core/launching/launchers.py`.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "key.h"
#include "native.h"
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
  std::vector<std::pair<size_t, bool>> lengths;  // places in `rest` of the longest query, and (true) of the longest key
  std::optional<size_t> used{};  // the place in `rest` of how many keys count; none where the op isn't given it
  bool folds = false;            // whether a longest query of 1 means that each sequence has a query
  bool zeroes_rows = false;      // whether output rows of a sequence without keys are written as 0
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

struct Derived {  // what was derived of a pair of offsets; Python owns the tensor
  SeenOffsets offsets;
  Weak tensor;
  std::vector<int64_t> places;
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
  mutable std::optional<Derived> derived;  // of the last offsets; under the interpreter's lock
};

constexpr size_t kMostPrepared = 4;  // batches alternate between a few buckets of lengths

struct AddressLauncher {  // a kernel that is given the addresses of its tensors
  Object prepare;
  mutable std::vector<std::shared_ptr<const Prepared>> prepared;  // the newest last; under the interpreter's lock
};

struct NativeLauncher {  // a C function
  NativeFunction function;
  const void* context;
  Object owner;  // keeps the memory of the context alive
};

// A call as a launcher is given it.
struct Launch {
  const Tensors& tensors;  // those of the kernel, sinks behind them, then both offsets of a packed call
  const Lengths& lengths;
  bool is_packed;
  bool knows_rows;  // whether every row of a packed call is known to see a key
  bool fills_rows;  // whether every row is known to belong to a sequence that has queries and keys
  bool is_forward;
  // Where a kernel of ours that is launched for the call anyway is to answer what is so of the offsets; 0 once one does.
  int64_t* answer = nullptr;
  bool asks_queries = false;  // whether it is asked what is so of the offsets of queries alone
  const at::Tensor* used = nullptr;  // how many keys of each sequence of a packed forward count; null for all
  const at::Tensor* table = nullptr;  // the pages of each sequence, if the keys of a packed forward are pages; they have no offsets
  bool fills_queries = false;        // whether every row of the query is known to belong to a sequence
  bool drops_lse = false;            // whether nobody reads the LSE of a forward

  // Whether each sequence is known to have one query.
  bool has_lone_queries() const {
    return fills_queries && lengths.numbers[Lengths::kMaxQ] == 1 && lengths.numbers[Lengths::kTokensQ] == lengths.numbers[Lengths::kBatch];
  }
  size_t operands() const {
    return tensors.size() - (is_packed ? 2 : 0);
  }
  const at::Tensor& query() const {
    return tensors[is_forward ? 0 : 1];
  }
  const at::Tensor& offsets(size_t of_keys) const {
    return tensors[tensors.size() - 2 + of_keys];
  }
};

// A tensor with these strides; a copy unless it has them.
inline at::Tensor with_strides(const at::Tensor& x, at::IntArrayRef strides) {
  return x.strides() == strides ? x : at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
}

// What a message says of a result that isn't as the contract says; of device and layout only what is wrong.
inline std::string described(const at::Tensor& got, c10::Device device) {
  if (!got.defined() || got.is_nested()) {
    return got.defined() ? "a nested tensor" : "nothing";
  }
  return c10::str(got.sizes(), " ", got.scalar_type(), got.device() == device ? "" : c10::str(" on ", got.device()),
                  got.layout() == at::kStrided ? "" : c10::str(" ", got.layout()), got.is_neg() ? " lazily negated" : "",
                  got._is_zerotensor() ? " without memory" : "");
}

// Check a result of a launcher against what the contract says of it.
inline void check_result(const at::Tensor& got, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device, const char* what, const char* of = "") {
  const bool is_memory = got.defined() && !got.is_nested() && got.device() == device && got.layout() == at::kStrided &&
      !got.is_neg() && !got._is_zerotensor();
  if (is_memory && got.sizes() == sizes && got.scalar_type() == dtype) {
    return;
  }
  const bool is_elsewhere = got.defined() && got.device() != device;
  TORCH_CHECK(false, "attnreg: a launcher breaks the contract: got ", what, " ", described(got, device), ", expected ", sizes, " ",
              dtype, is_elsewhere ? c10::str(" on ", device) : "", of);
}

// Check output and LSE of a forward; of a backward the gradients, behind which comes that of sinks.
inline void check_results(const Launch& call, const Tensors& results) {
  const size_t expected = call.is_forward ? 2 : call.operands() > 6 ? 4 : 3;
  TORCH_CHECK(results.size() == expected, "attnreg: a launcher breaks the contract: got ", results.size(),
              call.is_forward || !call.is_packed ? " results" : " gradients", ", expected ", expected);
  const c10::Device device = call.query().device();
  if (call.is_forward) {
    const at::Tensor& query = call.query();
    c10::SmallVector<int64_t, 4> out(query.sizes().begin(), query.sizes().end()), lse{query.size(-2), query.size(-3)};
    out.back() = call.tensors[2].sizes().back();
    if (!call.is_packed) {
      lse.insert(lse.begin(), query.size(0));
    }
    check_result(results[0], out, query.scalar_type(), device, "the output");
    check_result(results[1], lse, query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, device, "the LSE");
    return;
  }
  constexpr const char* names[] = {", for the query", ", for the key", ", for the value"};
  for (size_t i = 0; i < 3; i++) {
    const at::Tensor& model = call.tensors[1 + i];
    check_result(results[i], model.sizes(), model.scalar_type(), device, "a gradient", names[i]);
  }
  if (expected == 4) {
    const at::Tensor& sinks = call.tensors[6];
    check_result(results[3], sinks.sizes(), sinks.scalar_type(), device, "the gradient of sinks");
  }
}

// Run one of torch's kernels.
inline void launch(const OpLauncher& launcher, const Launch& call, c10::DispatchKeySet keys, Tensors& results, Spare& spare) {
  torch::jit::Stack stack;
  stack.reserve(call.tensors.size() + launcher.rest.size());
  for (const at::Tensor& tensor : call.tensors) {
    stack.emplace_back(tensor);
  }
  stack.insert(stack.end(), launcher.rest.begin(), launcher.rest.end());
  for (const auto& [place, of_keys] : launcher.lengths) {
    stack[call.tensors.size() + place] = call.lengths.numbers[of_keys ? Lengths::kMaxK : Lengths::kMaxQ];
    if (!of_keys && launcher.folds && call.lengths.numbers[Lengths::kMaxQ] == 1 && !call.has_lone_queries()) {
      stack[call.tensors.size() + place] = int64_t{2};
    }
  }
  TORCH_CHECK(!call.table && (!call.used || launcher.used), "attnreg: a launcher isn't given all options of a call");
  if (call.used) {
    stack[call.tensors.size() + *launcher.used] = *call.used;
  }
  launcher.kernel.callBoxed(launcher.op, keys, &stack);
  for (size_t i = 0; i < stack.size(); i++) {
    if (i < launcher.results) {
      results.push_back(std::move(stack[i]).toTensor());
    } else if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      spare.push_back(std::move(stack[i]).toTensor());
    }
  }
}

// Allocate a forward's output and LSE, or a backward's gradients, contiguous but for an LSE with the token first.
inline void allocate(const Launch& call, bool lse_token_first, Tensors& results) {
  const size_t first = call.is_forward ? 0 : 1;
  if (!call.is_forward) {
    for (size_t i = 1; i < 4; i++) {
      results.push_back(at::empty(call.tensors[i].sizes(), call.tensors[i].options(), at::MemoryFormat::Contiguous));
    }
    return;
  }
  const at::Tensor &query = call.tensors[first], &value = call.tensors[first + 2];
  c10::SmallVector<int64_t, 4> sizes(query.sizes().begin(), query.sizes().end());
  sizes.back() = value.sizes().back();
  results.push_back(at::empty(sizes, query.options()));
  const auto lse = query.options().dtype(query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const int64_t rows = query.size(-3), heads = query.size(-2);
  if (lse_token_first) {
    results.push_back(at::empty_strided({heads, rows}, {1, heads}, lse));
  } else if (call.is_packed) {
    results.push_back(at::empty({heads, rows}, lse));
  } else {
    results.push_back(at::empty({query.size(0), heads, rows}, lse));
  }
}

inline NativeOperand native_operand(const at::Tensor& tensor) {
  NativeOperand operand{address_of(tensor), {}, {}};
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), operand.sizes);
  std::copy(tensor.strides().begin(), tensor.strides().end(), operand.strides);
  return operand;
}

// Run a C function; false if it can't run the call.
inline bool launch(const NativeLauncher& launcher, const Launch& call, Tensors& results) {
  const int32_t* offsets[2] = {};
  const size_t sides = !call.is_packed ? 0 : call.table ? 1 : 2;  // pages have no offsets
  for (size_t i = 0; i < sides; i++) {
    if (call.offsets(i).scalar_type() != at::kInt || !call.offsets(i).is_contiguous()) {
      return false;
    }
    offsets[i] = static_cast<const int32_t*>(address_of(call.offsets(i)));
  }
  for (const at::Tensor* option : {call.used, call.table}) {
    if (option && (option->scalar_type() != at::kInt || !option->is_contiguous())) {
      return false;
    }
  }
  allocate(call, false, results);
  c10::SmallVector<NativeOperand, 9> operands;
  for (size_t i = 0; i < call.operands(); i++) {
    operands.push_back(native_operand(call.tensors[i]));
  }
  for (const at::Tensor& result : results) {
    operands.push_back(native_operand(result));
  }
  const auto& numbers = call.lengths.numbers;
  const NativeCall native{static_cast<int64_t>(operands.size()), operands.data(), offsets[0], offsets[1],
                          numbers[Lengths::kBatch], numbers[Lengths::kMaxQ], numbers[Lengths::kMaxK],
                          call.used ? static_cast<const int32_t*>(address_of(*call.used)) : nullptr,
                          call.table ? static_cast<const int32_t*>(address_of(*call.table)) : nullptr,
                          call.table ? call.table->size(1) : 0};
  return launcher.function(launcher.context, &native) == 0;
}

// What was derived of the offsets the last time, if neither has changed and its tensor is still alive.
inline std::optional<Read> kept_derived(
    const Prepared& launcher, const at::Tensor& queries, const at::Tensor& keys, c10::Stream stream) {
  const auto& last = launcher.derived;
  if (!last || !last->offsets.are(queries, keys, stream)) {
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
  if (seen) {
    launcher.derived.emplace(Derived{std::move(*seen), Weak(read.tensor.getIntrusivePtr()), read.places});
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
  PyObject *launch = nullptr, *operands = nullptr, *lse_strides = nullptr, *derive = nullptr, *bounds = nullptr;
  Py_ssize_t workspace = 0;
  int lse_token_first = 0;
  if (!PyTuple_Check(returned.get()) ||
      !PyArg_ParseTuple(returned.get(), "OO!npOOO", &launch, &PyTuple_Type, &operands, &workspace, &lse_token_first,
                        &lse_strides, &derive, &bounds)) {
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

// Run a function of Python's; false if it can't run the call any more.
inline bool launch(PyObject* function, const Launch& call, Tensors& results) {
  const WithGil gil;
  std::vector<Object> arguments;
  for (size_t i = 0; i < call.tensors.size(); i++) {
    if (i == call.operands()) {
      for (const at::Tensor* option : {call.used, call.table}) {
        if (option) {
          arguments.push_back(owned(THPVariable_Wrap(*option)));
        }
      }
    }
    const bool is_missing = call.table && i + 1 == call.tensors.size();  // pages have no offsets
    arguments.push_back(owned(THPVariable_Wrap(is_missing ? at::Tensor() : call.tensors[i])));
  }
  if (call.is_packed) {
    arguments.push_back(owned(PyLong_FromLongLong(call.lengths.numbers[Lengths::kMaxQ])));
    arguments.push_back(owned(PyLong_FromLongLong(call.lengths.numbers[Lengths::kMaxK])));
    arguments.push_back(owned(PyBool_FromLong(call.knows_rows)));
  }
  const Object returned = call_python(function, arguments);
  if (returned.get() == Py_None) {
    return false;
  }
  TORCH_CHECK_TYPE(PyTuple_Check(returned.get()), "attnreg: a launcher returned a ", Py_TYPE(returned.get())->tp_name,
                   ", expected a tuple of tensors or None");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(returned.get()); i++) {
    PyObject* result = PyTuple_GET_ITEM(returned.get(), i);
    TORCH_CHECK_TYPE(THPVariable_Check(result), "attnreg: a launcher returned a tuple with a ", Py_TYPE(result)->tp_name,
                     ", expected tensors: number ", i + 1, " of them");
    results.push_back(THPVariable_Unpack(result));
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
