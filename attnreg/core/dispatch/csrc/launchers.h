// Launchers: what runs a call that is kept. See `attnreg/core/launching/launchers.py`.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <array>
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

  bool is_trusted() const {
    return Clock::now() < until;
  }

  // Whether a tensor has gone, so that no call comes with it any more.
  bool have_gone() const {
    return queries.tensor.expired() || keys.tensor.expired();
  }
};

// cuLaunchKernel.
using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

constexpr size_t kMostWords = 32;  // the arguments of a kernel of ours, which have eight bytes each

// The address of a tensor as an argument of a kernel.
inline int64_t word_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(address_of(tensor));
}

// Launch a kernel of ours on a stream of the current device.
inline void launch_words(
    LaunchKernel launch, void* function, int64_t blocks, int64_t threads, void* stream, at::ArrayRef<int64_t> words) {
  std::array<int64_t, kMostWords> memory;
  std::array<void*, kMostWords> pointers;
  for (size_t i = 0; i < words.size(); i++) {
    memory[i] = words[i];
    pointers[i] = &memory[i];
  }
  const int error = launch(function, static_cast<unsigned>(blocks), 1, 1, static_cast<unsigned>(threads), 1, 1, 0, stream, pointers.data(), nullptr);
  TORCH_CHECK(error == 0, "a kernel for packed calls failed with CUDA error ", error);
}

struct NativeLauncher {  // a C function
  NativeFunction function;
  const void* context;
  Object owner;  // keeps the memory of the context alive
};

// A call as a launcher is given it.
struct Launch {
  const Tensors& tensors;  // those of the kernel, sinks behind them, then both offsets of a packed call; `used` and `table` aren't here
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

// Run a function of Python's; false if it can't run the call any more.
inline bool launch(PyObject* function, const Launch& call, bool knows_rows, Tensors& results) {
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
    arguments.push_back(owned(PyBool_FromLong(knows_rows)));
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
