// The front of `varlen_attn`: sends a call that came before on to its op, as Python has sent it.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>

#include "router.h"

namespace attnreg {

constexpr Py_ssize_t kTensors = 5;  // query, key, value, both offsets

// Set while the routers are in: the op, and the context variable that tells its router whose call it is.
struct Destination {
  c10::OperatorHandle op;
  PyObject* scope;
};

inline std::optional<Destination>& destination = *new std::optional<Destination>;

// Whether a tensor is nothing but memory on a device: no wrapper, no view that is conjugate or negative.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const uint64_t keys = c10::DispatchKeySet(
      {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
       DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}).raw_repr();
  return (tensor.key_set().raw_repr() & ~keys) == 0;
}

inline bool append_int(PyObject* number, Words& words) {
  if (!PyLong_CheckExact(number)) {
    return false;
  }
  words.push_back(PyLong_AsLongLong(number));
  return !(words.back() == -1 && PyErr_Occurred());
}

// Append everything that decides about a call of `varlen_attn`; false where it isn't as most are.
inline bool describe(PyObject* const* arguments, Words& words) {
  bool needs_gradient = false;
  for (Py_ssize_t i = 0; i < kTensors; i++) {
    if (!THPVariable_CheckExact(arguments[i])) {
      return false;
    }
    const at::Tensor& tensor = THPVariable_Unpack(arguments[i]);
    if (!is_plain(tensor)) {
      return false;
    }
    describe_shape(tensor, words);
    needs_gradient |= i < 3 && tensor.requires_grad();
  }
  PyObject *const *rest = arguments + kTensors, *causal = rest[2], *window = rest[3], *scale = rest[4], *gqa = rest[5];
  if (!append_int(rest[0], words) || !append_int(rest[1], words) || !PyBool_Check(causal) || !PyBool_Check(gqa) ||
      !PyTuple_CheckExact(window) || PyTuple_GET_SIZE(window) != 2 ||
      !append_int(PyTuple_GET_ITEM(window, 0), words) || !append_int(PyTuple_GET_ITEM(window, 1), words) ||
      !(scale == Py_None || PyFloat_CheckExact(scale))) {
    return false;
  }
  const double number = scale == Py_None ? 0.0 : PyFloat_AS_DOUBLE(scale);
  words.append({causal == Py_True, gqa == Py_True, scale == Py_None, bits_of(number), modes()});
  words.push_back(c10::GradMode::is_enabled() && needs_gradient);
  return true;
}

// Holds a scope, and an announcement, for one call.
class Announced {
 public:
  Announced(PyObject* scope, PyObject* own) : scope_(scope), token_(PyContextVar_Set(scope, own)) {
    announced = kKnown;
  }
  ~Announced() {
    announced = kNothing;  // in case something kept the call from the routers
    if (token_) {
      PyContextVar_Reset(scope_, token_);
      Py_DECREF(token_);
    }
  }
  Announced(const Announced&) = delete;
  Announced& operator=(const Announced&) = delete;
  explicit operator bool() const {
    return token_;
  }

 private:
  PyObject *scope_, *token_;
};

class Unlocked {  // lets go of the interpreter's lock
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  ~Unlocked() {
    PyEval_RestoreThread(thread_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

// Return output and LSE of a call that came before; else what it is known by, or None if it can't be.
inline PyObject* varlen(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != kTensors + 6 || !destination || !enabled || at::impl::torch_function_mode_enabled() ||
      is_set(destination->scope)) {
    Py_RETURN_NONE;
  }
  Words words{0};
  if (!describe(arguments, words)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  if (at::autocast::is_autocast_enabled(THPVariable_Unpack(arguments[0]).device().type())) {
    Py_RETURN_NONE;
  }
  std::shared_ptr<const Sending> known;
  {
    const std::shared_lock lock(guard);
    words[0] = static_cast<int64_t>(kept.generation);
    const auto found = kept.sendings.find(words);
    known = found == kept.sendings.end() ? nullptr : found->second;
  }
  if (!known) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words.data()), words.size() * sizeof words[0]);
  }
  torch::jit::Stack stack;
  stack.reserve(kTensors + known->rest.size());
  for (Py_ssize_t i = 0; i < kTensors; i++) {
    stack.emplace_back(THPVariable_Unpack(arguments[i]));
  }
  stack.insert(stack.end(), known->rest.begin(), known->rest.end());
  const Destination to = *destination;  // which may be another before the call is over
  const Announced sent(to.scope, known->own.get());
  if (!sent) {
    return nullptr;
  }
  {
    const Unlocked unlocked;
    to.op.callBoxed(&stack);
  }
  PyObject *out = THPVariable_Wrap(stack[0].toTensor()), *lse = THPVariable_Wrap(stack[1].toTensor());
  PyObject* both = out && lse ? PyTuple_Pack(2, out, lse) : nullptr;
  Py_XDECREF(out);
  Py_XDECREF(lse);
  return both;
  END_HANDLE_TH_ERRORS
}

inline c10::IValue from_plain(PyObject* value, const c10::TypePtr& type) {
  if (PyBool_Check(value)) {
    return value == Py_True;
  }
  const auto optional = type->cast<c10::OptionalType>();
  const auto kind = (optional ? optional->getElementType() : type)->kind();
  if (PyFloat_Check(value) || (PyLong_Check(value) && kind == c10::TypeKind::FloatType)) {
    return PyFloat_AsDouble(value);
  }
  return from_python(value, type);
}

// Return an op's arguments behind some tensors: some by place, some by name, the others as they are by default.
inline std::vector<c10::IValue> behind_tensors(
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
    found.push_back(given ? from_plain(given, arguments[i].type()) : *arguments[i].default_value());
  }
  const bool all = tensors + PyTuple_GET_SIZE(rest) <= arguments.size() && by_name == PyDict_GET_SIZE(options);
  TORCH_CHECK(all, "attnreg: ", schema.name(), " got arguments that it doesn't take");
  return found;
}

}  // namespace attnreg
