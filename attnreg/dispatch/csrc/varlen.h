// The front of `varlen_attn`: looks a call up, runs what is kept or asks the plan, and records the call for autograd.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <mutex>
#include <type_traits>

#include "described.h"
#include "varlen_call.h"

namespace attnreg {

// Numbers of the sites that aren't ops of aten's.
constexpr int64_t kVarlenForward = -1, kVarlenBackward = -2;

inline PyObject* plan_forward = nullptr;  // functions of `varlen.plans`; there as long as the process lives
inline PyObject* plan_backward = nullptr;

using NodePointer = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;

// A new node of autograd's. Up to torch 2.12 shared pointers hold them, with a deleter of their own.
template <class Node, class Pointer = NodePointer, class... Given>
auto make_node(Given&&... given) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node(std::forward<Given>(given)...), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>(std::forward<Given>(given)...);
  }
}

inline Key varlen_key(int64_t site, const VarlenCall& call, const Tensors& tensors) {
  std::vector<c10::IValue> arguments(tensors.begin(), tensors.end());
  call.append_to(arguments);
  const size_t count = tensors.size();
  arguments.emplace_back(tensors[count - 2].is_same(tensors[count - 1]));
  return key_of(site, call.choice, arguments, count, site == kVarlenForward ? 0 : 1);
}

inline bool offsets_are_known(const Tensors& tensors, size_t query) {
  const std::shared_lock lock(guard);
  const size_t count = tensors.size();
  return every_row_sees_a_key(tensors[count - 2], tensors[count - 1], tensors[query].size(0), tensors[query + 1].size(0));
}

// Run a kept call; false where there is none, or it can't be run so.
inline bool run_varlen(const Key& key, const LookedUp& found, const Tensors& tensors, size_t query, bool known, Tensors& results) {
  const Entry* entry = found.entry.get();
  if (!entry || entry->is_due() || entry->is_native() ||
      (entry->needs_offsets && !known && !offsets_are_known(tensors, query))) {
    return false;
  }
  Spare spare;
  if (!run(*entry, tensors, tensors[query].key_set(), results, spare)) {
    erase(key);
    return false;
  }
  entry->count();
  return true;
}

// The backward of a call. It holds what the forward had; torch checks that it hasn't been written to since.
struct VarlenBackward final : public torch::autograd::Node {
  std::array<torch::autograd::SavedVariable, 7> saved;  // query, key, value, output, LSE, both offsets
  VarlenCall call{};
  bool known = false;  // whether every row was known to see a key
  bool released = false;

  std::string name() const override {
    return "VarlenAttnBackward";
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : saved) {
      one.reset_data();
    }
    released = true;
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    if (!grads[0].defined()) {
      return torch::autograd::variable_list(3);
    }
    Tensors tensors{as_memory(grads[0])};
    for (size_t i = 0; i < saved.size(); i++) {
      tensors.push_back(saved[i].unpack(i == 3 ? getptr() : nullptr));
    }
    torch::autograd::variable_list results;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      for (at::Tensor& one : gradients(tensors)) {
        results.push_back(std::move(one));
      }
    }
    if (c10::GradMode::is_enabled()) {
      refuse_second(tensors, results);
    }
    return results;
  }

 private:
  Tensors gradients(const Tensors& tensors) const {
    const bool use_cache = enabled.load(std::memory_order_relaxed) && std::all_of(tensors.begin(), tensors.end(), is_plain);
    const Key key = use_cache ? varlen_key(kVarlenBackward, call, tensors) : Key{};
    const LookedUp found = look_up(key);
    Tensors results;
    if (!run_varlen(key, found, tensors, 1, known, results)) {
      results = planned(key, found.generation, tensors);
    }
    TORCH_CHECK(results.size() == 3, "attnreg: a launcher breaks the contract: got ", results.size(), " gradients");
    for (size_t i = 0; i < 3; i++) {
      check_result(results[i], tensors[1 + i].sizes(), tensors[1 + i].scalar_type(), "a gradient");
    }
    return results;
  }

  Tensors planned(const Key& key, uint64_t generation, const Tensors& tensors) const {
    const WithGil gil;
    std::vector<Object> given;
    for (const at::Tensor& one : tensors) {
      given.push_back(owned(THPVariable_Wrap(one)));
    }
    for (const int64_t number : {call.max_q, call.max_k}) {
      given.push_back(owned(PyLong_FromLongLong(number)));
    }
    given.push_back(owned(PyBool_FromLong(call.causal)));
    given.push_back(owned(Py_BuildValue("(LL)", static_cast<long long>(call.left), static_cast<long long>(call.right))));
    given.push_back(call.scale ? owned(PyFloat_FromDouble(*call.scale)) : (Py_INCREF(Py_None), owned(Py_None)));
    given.push_back(owned(PyLong_FromLongLong(call.choice)));
    const Object returned = call_python(plan_backward, given);
    PyObject *one = nullptr, *two = nullptr, *three = nullptr, *described = nullptr;
    if (!PyArg_ParseTuple(returned.get(), "OOOO", &one, &two, &three, &described)) {
      throw_error_of_python();
    }
    keep_described(key, generation, described, tensors.size(), nullptr);
    return {THPVariable_Unpack(one), THPVariable_Unpack(two), THPVariable_Unpack(three)};
  }

  // Gradients of gradients aren't computed: asking for them is an error, as with torch's own kernels.
  static void refuse_second(const Tensors& tensors, torch::autograd::variable_list& results) {
    if (std::none_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) { return x.requires_grad(); })) {
      return;
    }
    const auto error = make_node<torch::autograd::NotImplemented>("the backward of attnreg.varlen_attn");
    error->set_next_edges(torch::autograd::collect_next_edges(tensors[0], tensors[1], tensors[2], tensors[3]));
    for (at::Tensor& one : results) {
      torch::autograd::set_history(one, error);
    }
  }
};

// Whether something wants to see ops that this front doesn't call.
inline bool is_observed() {
  return at::impl::torch_function_mode_enabled() || c10::impl::dispatch_mode_enabled() ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

inline void record(const Tensors& tensors, const VarlenCall& call, bool known, Tensors& results) {
  const auto node = make_node<VarlenBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(tensors[0], tensors[1], tensors[2]));
  node->call = call;
  node->known = known;
  torch::autograd::set_history(results[0], node);
  for (size_t i = 0; i < 3; i++) {
    node->saved[i] = torch::autograd::SavedVariable(tensors[i], false);
  }
  node->saved[3] = torch::autograd::SavedVariable(results[0], true);
  node->saved[4] = torch::autograd::SavedVariable(results[1], false);
  node->saved[5] = torch::autograd::SavedVariable(tensors[3], false);
  node->saved[6] = torch::autograd::SavedVariable(tensors[4], false);
}

// Ask the plan of a forward; holding the interpreter's lock.
inline Tensors planned_forward(
    PyObject* const* arguments, bool needs_gradient, const Key& key, uint64_t generation, bool& known) {
  std::vector<PyObject*> given(arguments, arguments + 12);
  given.push_back(needs_gradient ? Py_True : Py_False);
  const Object returned = owned(PyObject_Vectorcall(plan_forward, given.data(), given.size(), nullptr));
  PyObject *out = nullptr, *lse = nullptr, *described = nullptr;
  if (!returned || !PyArg_ParseTuple(returned.get(), "OOO", &out, &lse, &described)) {
    throw_error_of_python();
  }
  keep_described(key, generation, described, 5, nullptr);
  known = PyTuple_Check(described) && PyTuple_GET_ITEM(described, 4) != Py_None;
  return {THPVariable_Unpack(out), THPVariable_Unpack(lse)};
}

// Return output and LSE of a call of `varlen_attn`; None where Python has to connect it to autograd.
inline PyObject* varlen(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Tensors tensors, results;
  VarlenCall call{};
  if (count != 12 || !enabled || !plan_forward || is_observed()) {
    Py_RETURN_NONE;
  }
  if (!read_varlen(arguments, tensors, call)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  const bool needs_gradient =
      c10::GradMode::is_enabled() && (tensors[0].requires_grad() || tensors[1].requires_grad() || tensors[2].requires_grad());
  bool known = false;
  {
    RECORD_FUNCTION("attnreg::varlen_attn", std::vector<c10::IValue>({tensors[0], tensors[1], tensors[2]}));
    const at::AutoDispatchBelowADInplaceOrView below;
    const Key key = varlen_key(kVarlenForward, call, tensors);
    const LookedUp found = look_up(key);
    bool done = false;
    if (found.entry) {
      const WithoutGil without;
      done = run_varlen(key, found, tensors, 0, false, results);
      known = done && found.entry->needs_offsets;
    }
    if (!done) {
      results = planned_forward(arguments, needs_gradient, key, found.generation, known);
    } else {
      const at::Tensor& query = tensors[0];
      TORCH_CHECK(results.size() == 2, "attnreg: a launcher breaks the contract: got ", results.size(), " results");
      check_result(results[0], {query.size(0), query.size(1), tensors[2].size(2)}, query.scalar_type(), "the output");
      const auto lse = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
      check_result(results[1], {query.size(1), query.size(0)}, lse, "the LSE");
    }
  }
  if (needs_gradient) {
    record(tensors, call, known, results);
  }
  const Object out = owned(THPVariable_Wrap(results[0])), lse = owned(THPVariable_Wrap(results[1]));
  return out && lse ? PyTuple_Pack(2, out.get(), lse.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

}  // namespace attnreg
