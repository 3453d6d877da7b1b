// Programs: allocations and compiled functions of TVM-FFI that run a call without Python. See `launching/programs.py`.

#pragma once

#include <ATen/dlpack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device_code.h"

namespace attnreg {

// TVM-FFI's C interface (c_api.h): an argument, an object's header, and an error behind that.
struct FfiValue {
  int32_t type;
  uint32_t padding;
  union {
    int64_t integer;
    double number;
    void* pointer;
  };
};

struct FfiObject {
  uint64_t references;
  int32_t type;
  uint32_t padding;
  void (*deleter)(void*, int);
};

struct FfiText {
  const char* data;
  size_t size;
};

struct FfiError {
  FfiObject header;
  FfiText kind, message;
};

struct FfiInterface {
  int (*call)(void* function, FfiValue* arguments, int32_t count, FfiValue* result) = nullptr;
  int (*set_stream)(int32_t device_type, int32_t device, void* stream, void** before) = nullptr;
  void (*take_error)(void** error) = nullptr;
  int (*drop)(void* object) = nullptr;
};

enum FfiType : int32_t { kFfiNothing = 0, kFfiInteger = 1, kFfiFloat = 3, kFfiTensor = 7, kFfiObject = 64 };

constexpr size_t kNumbers = 7;  // the lengths of a call, then its query heads and key heads

struct ProgramSize {
  std::array<int64_t, kNumbers> factors;
  int64_t more, unit, times;

  int64_t value(const std::array<int64_t, kNumbers>& numbers) const {
    int64_t sum = more;
    for (size_t i = 0; i < kNumbers; i++) {
      sum += factors[i] * numbers[i];
    }
    return sum / unit * times;
  }
};

enum class BufferKind : int64_t { kNew, kLike, kPages, kTable };

struct ProgramBuffer {
  BufferKind kind;
  int64_t number = 0, tile = 0;  // the tensor that it is like, or a view of; the size that pages don't have
  at::ScalarType dtype = at::kFloat;  // these of a new tensor
  std::vector<ProgramSize> sizes{};
  bool zero = false;
};

struct ProgramStep {
  void* function;
  std::vector<FfiValue> arguments;  // of a tensor its number
};

struct Program {
  FfiInterface ffi;
  std::array<std::pair<int64_t, int64_t>, 5> bounds;  // of each length the least and the greatest
  std::vector<int64_t> contiguous;                    // the numbers of tensors that are copied unless they are
  std::vector<ProgramBuffer> buffers;
  std::vector<ProgramStep> steps;
  std::vector<int64_t> results;
  Object keep;  // owns functions and objects

  bool serves(const Lengths& lengths) const {
    for (size_t i = 0; i < bounds.size(); i++) {
      if (lengths.numbers[i] < bounds[i].first || lengths.numbers[i] > bounds[i].second) {
        return false;
      }
    }
    return true;
  }
};

// The programs of a kind of calls, as Python has described them; none of a class of lengths that Python runs.
struct Programs {
  Object describe;
  mutable std::mutex lock;
  mutable std::vector<std::shared_ptr<const Program>> known;

  std::shared_ptr<const Program> find(const Lengths& lengths) const {
    const std::lock_guard<std::mutex> locked(lock);
    for (const auto& program : known) {
      if (program->serves(lengths)) {
        return program;
      }
    }
    return nullptr;
  }
};

inline PyObject* item(PyObject* tuple, Py_ssize_t place, PyTypeObject* type = nullptr) {
  TORCH_CHECK_TYPE(PyTuple_Check(tuple) && place < PyTuple_GET_SIZE(tuple), "attnreg: a program lacks item ", place);
  PyObject* const value = PyTuple_GET_ITEM(tuple, place);
  TORCH_CHECK_TYPE(!type || PyObject_TypeCheck(value, type), "attnreg: item ", place, " of a program is a ", Py_TYPE(value)->tp_name);
  return value;
}

inline void* address_of_number(PyObject* number) {
  void* const address = PyLong_AsVoidPtr(number);
  if (!address) {
    TORCH_CHECK(PyErr_Occurred(), "attnreg: a program has the address 0");
    throw_error_of_python();
  }
  return address;
}

inline FfiValue read_argument(PyObject* pair) {
  FfiValue value{static_cast<int32_t>(PyLong_AsLong(item(pair, 0))), 0, {}};
  PyObject* const object = item(pair, 1);
  value.integer = 0;
  if (value.type == kFfiFloat) {
    value.number = PyFloat_AsDouble(object);
  } else if (value.type == kFfiObject) {
    value.pointer = address_of_number(object);
    value.type = static_cast<const FfiObject*>(value.pointer)->type;
  } else {
    value.integer = PyLong_AsLongLong(object);
  }
  if (PyErr_Occurred()) {
    throw_error_of_python();
  }
  return value;
}

// Read what `programs.described` returns.
inline std::shared_ptr<const Program> read_program(PyObject* described) {
  auto program = std::make_shared<Program>();
  PyObject* const addresses = item(described, 0, &PyTuple_Type);
  const auto address = [&](Py_ssize_t place) { return address_of_number(item(addresses, place)); };
  program->ffi = {reinterpret_cast<decltype(FfiInterface::call)>(address(0)),
                  reinterpret_cast<decltype(FfiInterface::set_stream)>(address(1)),
                  reinterpret_cast<decltype(FfiInterface::take_error)>(address(2)),
                  reinterpret_cast<decltype(FfiInterface::drop)>(address(3))};
  for (size_t i = 0; i < program->bounds.size(); i++) {
    const auto numbers = numbers_of(item(item(described, 1), static_cast<Py_ssize_t>(i), &PyTuple_Type));
    program->bounds[i] = {numbers.at(0), numbers.at(1)};
  }
  program->contiguous = numbers_of(item(described, 2, &PyTuple_Type));
  PyObject* const buffers = item(described, 3, &PyTuple_Type);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(buffers); i++) {
    PyObject* const each = item(buffers, i, &PyTuple_Type);
    ProgramBuffer buffer{static_cast<BufferKind>(PyLong_AsLong(item(each, 0)))};
    if (buffer.kind != BufferKind::kNew) {
      buffer.number = PyLong_AsLongLong(item(each, 1));
      buffer.tile = buffer.kind == BufferKind::kPages ? PyLong_AsLongLong(item(each, 2)) : 0;
    } else {
      TORCH_CHECK_TYPE(THPDtype_Check(item(each, 1)), "attnreg: a program's buffer has no dtype");
      buffer.dtype = reinterpret_cast<THPDtype*>(item(each, 1))->scalar_type;
      buffer.zero = PyObject_IsTrue(item(each, 3)) == 1;
      PyObject* const sizes = item(each, 2, &PyTuple_Type);
      for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(sizes); j++) {
        const auto numbers = numbers_of(item(sizes, j, &PyTuple_Type));
        TORCH_CHECK(numbers.size() == kNumbers + 3, "attnreg: a program's size has ", numbers.size(), " numbers");
        ProgramSize size{{}, numbers[kNumbers], numbers[kNumbers + 1], numbers[kNumbers + 2]};
        std::copy(numbers.begin(), numbers.begin() + kNumbers, size.factors.begin());
        buffer.sizes.push_back(size);
      }
    }
    program->buffers.push_back(std::move(buffer));
  }
  PyObject* const steps = item(described, 4, &PyTuple_Type);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
    ProgramStep step{address_of_number(item(item(steps, i), 0)), {}};
    PyObject* const arguments = item(item(steps, i), 1, &PyTuple_Type);
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(arguments); j++) {
      step.arguments.push_back(read_argument(item(arguments, j, &PyTuple_Type)));
    }
    program->steps.push_back(std::move(step));
  }
  program->results = numbers_of(item(described, 5, &PyTuple_Type));
  program->keep = held(described);
  return program;
}

// The program for these lengths; null where Python has to run the call.
inline std::shared_ptr<const Program> program_for(const Programs& programs, const Lengths& lengths) {
  if (auto known = programs.find(lengths)) {
    return known;
  }
  const WithGil gil;
  std::vector<Object> numbers;
  for (const int64_t number : lengths.numbers) {
    numbers.push_back(owned(PyLong_FromLongLong(number)));
  }
  const Object described = call_python(programs.describe.get(), numbers);
  if (described.get() == Py_None) {
    return nullptr;
  }
  auto program = read_program(described.get());
  if (auto known = programs.find(lengths)) {
    return known;  // another thread has asked meanwhile
  }
  const std::lock_guard<std::mutex> locked(programs.lock);
  programs.known.push_back(program);
  return program;
}

inline DLTensor dl_tensor(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  const uint8_t code = dtype == at::kBFloat16 ? kDLBfloat : at::isFloatingType(dtype) ? kDLFloat : kDLInt;
  return {address_of(tensor),
          {tensor.is_cuda() ? kDLCUDA : kDLCPU, tensor.is_cuda() ? tensor.get_device() : 0},
          static_cast<int32_t>(tensor.dim()),
          {code, static_cast<uint8_t>(tensor.element_size() * 8), 1},
          const_cast<int64_t*>(tensor.sizes().data()),
          const_cast<int64_t*>(tensor.strides().data()),
          0};
}

// Have functions launch on a stream, until this ends.
class OnStream {
 public:
  OnStream(const FfiInterface& ffi, const at::Tensor& tensor) : ffi_(ffi), device_(tensor.is_cuda() ? tensor.get_device() : -1) {
    if (device_ >= 0) {
      check(ffi_.set_stream(kDLCUDA, device_, stream_of(tensor).native_handle(), &before_));
    }
  }
  ~OnStream() {
    if (device_ >= 0) {
      ffi_.set_stream(kDLCUDA, device_, before_, nullptr);
    }
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

  // Throw what a function has raised.
  void check(int code) const {
    if (code == 0) {
      return;
    }
    void* raised = nullptr;
    ffi_.take_error(&raised);
    std::string text = "unknown error";
    if (raised) {
      const auto* error = static_cast<const FfiError*>(raised);
      text = std::string(error->kind.data, error->kind.size) + ": " + std::string(error->message.data, error->message.size);
      ffi_.drop(raised);
    }
    TORCH_CHECK(false, "a compiled function failed: ", text);
  }

 private:
  const FfiInterface& ffi_;
  int32_t device_;
  void* before_ = nullptr;
};

inline at::Tensor allocated(const ProgramBuffer& buffer, const Tensors& tensors, const std::array<int64_t, kNumbers>& numbers) {
  if (buffer.kind == BufferKind::kLike) {
    return at::empty_like(tensors[buffer.number]);
  }
  c10::SmallVector<int64_t, 4> sizes;
  for (const ProgramSize& size : buffer.sizes) {
    sizes.push_back(size.value(numbers));
  }
  const auto options = at::TensorOptions().dtype(buffer.dtype).device(tensors[0].device());
  return buffer.zero ? at::zeros(sizes, options) : at::empty(sizes, options);
}

// Whether pages of a tensor's rows can have as many rows as the tensor, which must not be those of a tile.
inline bool pages_fit(const Program& program, const Tensors& tensors) {
  return std::all_of(program.buffers.begin(), program.buffers.end(), [&](const ProgramBuffer& buffer) {
    return buffer.kind != BufferKind::kPages || tensors[buffer.number].size(0) != buffer.tile;
  });
}

struct Shape {
  std::array<int64_t, 4> sizes, strides;
};

// A view, which needs no tensor of torch's: rows (T, H, D) as pages that overlap, or offsets (B + 1,) as their table (B, 1).
inline DLTensor view_of(const ProgramBuffer& buffer, const at::Tensor& x, Shape& shape) {
  DLTensor view = dl_tensor(x);
  if (buffer.kind == BufferKind::kTable) {
    shape = {{x.size(0) - 1, 1}, {x.stride(0), 1}};
    view.ndim = 2;
  } else {
    shape = {{1, x.size(0), x.size(1), x.size(2)}, {x.stride(0), x.stride(0), x.stride(1), x.stride(2)}};
    view.ndim = 4;
  }
  view.shape = shape.sizes.data();
  view.strides = shape.strides.data();
  return view;
}

// The tensors that a program numbers: those of the kernel, of options, and both offsets.
inline Tensors numbered(const Launch& call) {
  Tensors tensors(call.tensors.begin(), call.tensors.begin() + static_cast<std::ptrdiff_t>(call.operands()));
  for (const at::Tensor* option : {call.used, call.table}) {
    if (option) {
      tensors.push_back(*option);
    }
  }
  tensors.append(call.tensors.begin() + static_cast<std::ptrdiff_t>(call.operands()), call.tensors.end());
  return tensors;
}

// A tensor that a forward reads as a copy, in which rows past the last offset are zeros. The kernel that copies it also clears
// the output's rows that lie in no sequence.
struct Blanked {
  const DeviceCode& code;
  size_t place;
  bool of_keys;
};

// Run a program; false if there is none for the call.
inline bool launch(const Programs& programs, const Launch& call, Tensors& results, const Blanked* blanked = nullptr) {
  const at::Tensor &query = call.query(), &key = call.tensors[call.is_forward ? 1 : 2];
  if (query.numel() == 0 || key.numel() == 0) {
    return false;
  }
  const auto program = program_for(programs, call.lengths);
  if (!program || !pages_fit(*program, call.tensors)) {
    return false;
  }
  std::array<int64_t, kNumbers> numbers;
  std::copy_n(call.lengths.numbers, Lengths::kCount, numbers.begin());
  numbers[5] = query.size(-2);
  numbers[6] = key.size(-2);
  Tensors tensors = numbered(call);
  for (const int64_t number : program->contiguous) {
    tensors[number] = tensors[number].contiguous();
  }
  at::Tensor original;
  if (blanked) {
    original = std::exchange(tensors[blanked->place], at::empty(tensors[blanked->place].sizes(), tensors[blanked->place].options()));
  }
  c10::SmallVector<DLTensor, 24> described;
  for (const at::Tensor& tensor : tensors) {
    described.push_back(dl_tensor(tensor));
  }
  c10::SmallVector<Shape, 4> shapes(program->buffers.size());
  for (size_t i = 0; i < program->buffers.size(); i++) {
    const ProgramBuffer& buffer = program->buffers[i];
    if (buffer.kind == BufferKind::kPages || buffer.kind == BufferKind::kTable) {
      described.push_back(view_of(buffer, tensors[buffer.number], shapes[i]));
      tensors.emplace_back();
    } else {
      tensors.push_back(allocated(buffer, tensors, numbers));
      described.push_back(dl_tensor(tensors.back()));
    }
  }
  if (blanked) {
    const OutputWords output(tensors[program->results[0]], tensors[program->results[1]]);
    blank(blanked->code, tensors[blanked->place], original, call, blanked->of_keys, output);
  }
  {
    const OnStream on_stream(program->ffi, query);
    for (const ProgramStep& step : program->steps) {
      c10::SmallVector<FfiValue, 24> arguments(step.arguments.begin(), step.arguments.end());
      for (FfiValue& argument : arguments) {
        if (argument.type == kFfiTensor) {
          argument.pointer = &described[argument.integer];
        }
      }
      FfiValue result{kFfiNothing, 0, {}};
      result.integer = 0;
      on_stream.check(program->ffi.call(step.function, arguments.data(), static_cast<int32_t>(arguments.size()), &result));
    }
  }
  for (const int64_t number : program->results) {
    results.push_back(std::move(tensors[number]));
  }
  return true;
}

}  // namespace attnreg
