// The front of `varlen_attn` and of flash-attn's dense function: looks a call up, runs what is kept or asks Python, and
// records the call for autograd.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "varlen_backward.h"

namespace attnreg {

// Functions of `varlen.plans` and `varlen.sinks`; there as long as the process lives.
inline PyObject *plan_forward = nullptr, *with_sinks = nullptr;

// Whether something wants to see ops that this front doesn't call.
inline bool is_observed() {
  return at::impl::torch_function_mode_enabled() || c10::impl::dispatch_mode_enabled() ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

inline void record(
    const Tensors& tensors, const at::Tensor& sinks, const VarlenCall& call, Facts known, bool returns_lse, Tensors& results) {
  const auto node = make_node<VarlenBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(tensors[0], tensors[1], tensors[2], sinks));
  node->call = call;
  node->known = known;
  node->returns_lse = returns_lse;
  torch::autograd::set_history(results[0], node);
  if (returns_lse) {
    torch::autograd::set_history(results[1], node);
  }
  for (size_t i = 0; i < 3; i++) {
    node->saved[i] = torch::autograd::SavedVariable(tensors[i], false);
  }
  node->saved[3] = torch::autograd::SavedVariable(results[0], true);
  node->saved[4] = torch::autograd::SavedVariable(results[1], returns_lse);
  for (size_t i = 3; i < 5; i++) {  // none of a dense call
    node->saved[i + 2] = torch::autograd::SavedVariable(i < tensors.size() ? tensors[i] : at::Tensor(), false);
  }
  node->saved[7] = torch::autograd::SavedVariable(sinks, false);
}

// Have Python run a forward by its plan, and count sinks unless they are None; the caller owns the interpreter's lock.
inline Tensors planned_forward(
    PyObject* const* arguments, bool needs_gradient, PyObject* sinks, PyObject* used, PyObject* table, const Key& key,
    const Lengths& lengths, uint64_t generation, size_t tensors = 5) {
  std::vector<PyObject*> plan_arguments(arguments, arguments + 12);
  plan_arguments.push_back(needs_gradient ? Py_True : Py_False);
  plan_arguments.push_back(sinks);
  plan_arguments.push_back(used);
  plan_arguments.push_back(table);
  const Object returned = owned(PyObject_Vectorcall(plan_forward, plan_arguments.data(), plan_arguments.size(), nullptr));
  PyObject *out = nullptr, *lse = nullptr, *described = nullptr;
  if (!returned || !PyArg_ParseTuple(returned.get(), "OOO", &out, &lse, &described)) {
    throw_error_of_python();
  }
  Tensors results{tensor_of(out), tensor_of(lse)};
  keep_described(key, lengths, generation, described, tensors, nullptr);
  return results;
}

// Count sinks in the results of a kernel; the caller owns the interpreter's lock.
inline Tensors results_with_sinks(const Tensors& results, const at::Tensor& sinks) {
  std::vector<Object> objects;
  for (const at::Tensor& each : {results[0], results[1], sinks}) {
    objects.push_back(owned(THPVariable_Wrap(each)));
  }
  const Object returned = call_python(with_sinks, objects);
  return {THPVariable_Unpack(PyTuple_GET_ITEM(returned.get(), 0)), THPVariable_Unpack(PyTuple_GET_ITEM(returned.get(), 1))};
}

// Read a tensor of an option, or None; false for what isn't as most are.
inline bool read_optional(PyObject* argument, at::Tensor& tensor) {
  if (argument == Py_None) {
    return true;
  }
  if (!THPVariable_CheckExact(argument)) {
    return false;
  }
  tensor = THPVariable_Unpack(argument);
  return is_plain(tensor);
}

// Return output and LSE of a call; None where Python has to connect it to autograd, or to say what is wrong with a dense
// call. There are fifteen arguments. The last three say whether the program gets the LSE, which is None otherwise, and are
// checked sinks, or None, and how many keys of each sequence count, or None.
inline PyObject* attend(PyObject* const* arguments, bool is_packed) {
  Tensors tensors, results;
  VarlenCall call{};
  if (!enabled || !plan_forward || is_observed()) {
    Py_RETURN_NONE;
  }
  if (!read_varlen(arguments, is_packed, tensors, call)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  at::Tensor sinks, used;
  if (!read_optional(arguments[13], sinks) || !read_optional(arguments[14], used)) {
    Py_RETURN_NONE;
  }
  const bool needs_gradient =
      c10::GradMode::is_enabled() && (tensors[0].requires_grad() || tensors[1].requires_grad() || tensors[2].requires_grad());
  // A kernel isn't given sinks where the program gets the LSE: see `varlen.sinks`.
  const bool returns_lse = arguments[12] == Py_True;
  const at::Tensor to_count = returns_lse ? at::Tensor() : sinks;
  if (!is_packed) {
    Lengths dense;
    if (!read_dense_lengths(tensors, 0, dense) || !std::all_of(tensors.begin(), tensors.end(), is_in_memory)) {
      Py_RETURN_NONE;
    }
    call.max_q = dense.numbers[Lengths::kMaxQ];
    call.max_k = dense.numbers[Lengths::kMaxK];
  }
  if (used.defined() && (needs_gradient || sinks.defined())) {
    Py_RETURN_NONE;  // the node keeps no counts, and no launcher is given both
  }
  const Further further{to_count, used, at::Tensor(), !returns_lse && !needs_gradient && !sinks.defined()};
  Facts known;
  {
    RECORD_FUNCTION(is_packed ? "attnreg::varlen_attn" : "attnreg::flash_attn", std::vector<c10::IValue>({tensors[0], tensors[1], tensors[2]}));
    const at::AutoDispatchBelowADInplaceOrView below;
    Lengths lengths;
    const Key key = varlen_key(kVarlenForward, call, tensors, 0, further, lengths);
    const LookedUp looked_up = look_up(key, lengths);
    bool done = false, counted = false;
    if (looked_up.entry) {
      const WithoutGil without;
      done = run_varlen(key, lengths, looked_up, tensors, 0, known, further, results);
      counted = done && looked_up.entry->counts_sinks;
    }
    if (!done) {
      PyObject* counted_sinks = to_count.defined() ? arguments[13] : Py_None;
      results = planned_forward(arguments, needs_gradient, counted_sinks, arguments[14], Py_None, key, lengths, looked_up.generation, tensors.size());
      counted = to_count.defined();
    }
    if (sinks.defined() && !counted) {
      results = results_with_sinks(results, sinks);
    }
  }
  if (needs_gradient || (c10::GradMode::is_enabled() && sinks.defined() && sinks.requires_grad())) {
    record(tensors, sinks, call, known, returns_lse, results);
  }
  // An LSE that the program doesn't get stays without an object of Python's: the backward's thread, which drops the LSE
  // last, would take the interpreter's lock to drop that, too.
  const Object out = owned(THPVariable_Wrap(results[0]));
  const Object lse = owned(THPVariable_Wrap(arguments[12] == Py_True ? results[1] : at::Tensor()));
  return out && lse ? PyTuple_Pack(2, out.get(), lse.get()) : nullptr;
}

// A call of `varlen_attn`.
inline PyObject* varlen(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 15, "varlen: got ", count, " arguments, expected 15");
  return attend(arguments, true);
  END_HANDLE_TH_ERRORS
}

// A dense call: query, key and value, (B, S, H, D), whether it is causal, window, scale, choice, whether the program gets
// the LSE.
inline PyObject* dense(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8, "dense: got ", count, " arguments, expected 8");
  const Object zero = owned(PyLong_FromLong(0));  // the tensors say the lengths
  PyObject* const packed_arguments[15] = {arguments[0], arguments[1], arguments[2], Py_None,      Py_None,
                                          zero.get(),   zero.get(),   arguments[3], arguments[4], arguments[5],
                                          Py_True,      arguments[6], arguments[7], Py_None,      Py_None};
  return attend(packed_arguments, false);
  END_HANDLE_TH_ERRORS
}

}  // namespace attnreg
