// The arguments of `varlen_attn`, read from Python.

#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "key.h"
#include "python.h"

namespace attnreg {

struct VarlenCall {  // the arguments of `varlen_attn`, tensors aside
  int64_t max_q, max_k;
  bool causal;
  int64_t left, right;
  std::optional<double> scale;
  bool gqa;
  int64_t choice;
};

// Whether a tensor is nothing but memory on a device: no wrapper, no view that is conjugate or negative.
inline bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const uint64_t keys = c10::DispatchKeySet(
      {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
       DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}).raw_repr();
  return (tensor.key_set().raw_repr() & ~keys) == 0 && !tensor._fw_grad(0).defined();
}

// Whether a gradient is a batch of gradients, as by is_grads_batched and vmap.
inline bool is_batch(const at::Tensor& gradient) {
  static const c10::DispatchKeySet batches({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched});
  return gradient.defined() && gradient.key_set().has_any(batches);
}

// A gradient as memory that kernels can read: autograd may hand over zeros without any, or a lazy negative.
// Wrappers have none, of which some unwrap in an op: see `modes.in_memory`, which does the same in Python. A batch
// of gradients stays one: Python computes its elements one after the other.
inline at::Tensor as_memory(const at::Tensor& grad) {
  if (is_plain(grad)) {
    return grad;  // nearly always: what follows goes through torch's dispatcher
  }
  if (is_batch(grad)) {
    return grad;
  }
  const at::Tensor gradient = grad.key_set().has(c10::DispatchKey::Python) ? grad.clone() : grad;
  TORCH_CHECK(!gradient.key_set().has(c10::DispatchKey::Python), "a gradient must be a plain tensor, got a tensor subclass");
  if (gradient._is_zerotensor()) {
    return at::zeros(gradient.sizes(), gradient.options());
  }
  return gradient.resolve_neg().resolve_conj();
}

// A gradient whose rows kernels can read as they are: a sum's is one number, repeated, and would be copied by each of them.
inline at::Tensor as_rows(const at::Tensor& gradient) {
  if (!is_plain(gradient) || !is_in_memory(gradient)) {
    return gradient;  // a batch of gradients, or what Python refuses by its name
  }
  const at::IntArrayRef strides = gradient.strides();
  const bool is_repeated = std::find(strides.begin(), strides.end(), 0) != strides.end();
  return is_repeated || (!strides.empty() && strides.back() != 1) ? gradient.contiguous() : gradient;
}

inline bool read_int(PyObject* number, int64_t& into) {
  if (!PyLong_CheckExact(number)) {
    return false;
  }
  into = PyLong_AsLongLong(number);
  return !(into == -1 && PyErr_Occurred());
}

// Read mask, scale and choice; false where they aren't as most are.
inline bool read_mask(PyObject* causal, PyObject* window, PyObject* scale, PyObject* choice, VarlenCall& call) {
  if (!PyBool_Check(causal) || !PyTuple_CheckExact(window) || PyTuple_GET_SIZE(window) != 2 ||
      !read_int(PyTuple_GET_ITEM(window, 0), call.left) || !read_int(PyTuple_GET_ITEM(window, 1), call.right) ||
      !(scale == Py_None || PyFloat_CheckExact(scale)) || !read_int(choice, call.choice)) {
    return false;
  }
  call.causal = causal == Py_True;
  if (scale != Py_None) {
    call.scale = PyFloat_AS_DOUBLE(scale);
  }
  return true;
}

// Whether autocast leaves query, key and value as they are.
inline bool suits_autocast(const Tensors& tensors) {
  const auto device = tensors[0].device().type();
  if (!at::autocast::is_autocast_enabled(device)) {
    return true;
  }
  const auto wanted = at::autocast::get_autocast_dtype(device);
  return tensors[0].scalar_type() == wanted && tensors[1].scalar_type() == wanted && tensors[2].scalar_type() == wanted;
}

// Read the arguments, those of a dense call without offsets; false where they aren't as most are.
inline bool read_varlen(PyObject* const* arguments, bool is_packed, Tensors& tensors, VarlenCall& call) {
  for (size_t i = 0; i < (is_packed ? 5 : 3); i++) {
    if (!THPVariable_CheckExact(arguments[i]) || !is_plain(THPVariable_Unpack(arguments[i]))) {
      return false;
    }
    tensors.push_back(THPVariable_Unpack(arguments[i]));
  }
  PyObject* const* const rest = arguments + 5;
  if (!read_int(rest[0], call.max_q) || !read_int(rest[1], call.max_k) || !PyBool_Check(rest[5]) ||
      !read_mask(rest[2], rest[3], rest[4], rest[6], call)) {
    return false;
  }
  call.gqa = rest[5] == Py_True;
  return suits_autocast(tensors);
}

}  // namespace attnreg
