// The autograd node of `varlen_attn` and of dense calls, for eager calls and for compiled autograd.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <mutex>
#include <type_traits>

#include "described.h"
#include "varlen_run.h"

namespace attnreg {

// Functions of `varlen.plans` and `varlen.sinks`; there as long as the process lives.
inline PyObject *plan_backward = nullptr, *grad_of_sinks = nullptr;

using NodePointer = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;

// A new node of autograd's. Up to torch 2.12 shared pointers own them, with a deleter of their own.
template <class Node, class Pointer = NodePointer, class... Values>
auto make_node(Values&&... values) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<Node>(new Node(std::forward<Values>(values)...), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Node>(std::forward<Values>(values)...);
  }
}

// The backward of a call. It keeps what the forward had; torch checks that it hasn't been written to since.
struct VarlenBackward final : public torch::autograd::Node {
  std::array<torch::autograd::SavedVariable, 8> saved;  // query, key, value, output, LSE, both offsets (none of a dense call), sinks
  VarlenCall call{};
  Facts known;  // what was known of the rows
  bool returns_lse = false;  // whether the LSE is a result of the node, too
  bool released = false;

  std::string name() const override {
    return "VarlenAttnBackward";
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved) {
      each.reset_data();
    }
    released = true;
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    const at::Tensor grad_lse = returns_lse ? grads[1] : at::Tensor();
    if (!grads[0].defined() && !grad_lse.defined()) {
      return torch::autograd::variable_list(4);
    }
    Tensors tensors{grads[0]};
    for (size_t i = 0; i < saved.size(); i++) {
      tensors.push_back(saved[i].unpack(is_result(i) ? getptr() : nullptr));
    }
    tensors[0] = grads[0].defined() ? as_rows(as_memory(grads[0])) : at::zeros_like(tensors[4]);
    const at::Tensor sinks = std::move(tensors.back());
    tensors.pop_back();
    if (!tensors.back().defined()) {
      tensors.resize(tensors.size() - 2);
    }
    torch::autograd::variable_list results(4);
    const bool is_batched = is_batch(grads[0]) || is_batch(grad_lse);
    {
      // The op that computes a batch itself makes a second derivative an error.
      std::optional<at::AutoDispatchBelowADInplaceOrView> below;
      if (!is_batched) {
        below.emplace();
      }
      if (should_compute_output(0) || should_compute_output(1) || should_compute_output(2)) {
        const bool to_count = should_compute_output(3) && !grad_lse.defined();
        Tensors computed = gradients(
            tensors, grad_lse.defined() ? as_memory(grad_lse) : grad_lse, to_count ? sinks : at::Tensor());
        std::move(computed.begin(), computed.end(), results.begin());
      }
      if (should_compute_output(3) && !results[3].defined()) {
        results[3] = of_sinks(tensors[0], tensors[4], tensors[5], sinks, grad_lse);
      }
    }
    if (c10::GradMode::is_enabled() && !is_batched) {
      tensors.push_back(sinks);
      tensors.push_back(grad_lse);
      refuse_second(tensors, results);
    }
    return results;
  }

  // Compiled autograd traces a function of the node's tensors in the place of `apply`. What isn't a tensor is part of
  // the graph, so that the graph is used again only where all of it is the same.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    for (size_t i = 0; i < saved.size(); i++) {
      args.collect(saved[i], is_result(i));
    }
    for (const int64_t number : {call.max_q, call.max_k, call.left, right(), call.choice, int64_t{returns_lse}}) {
      args.collect(number);
    }
    args.collect(call.scale);
  }

  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& inputs, torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    using namespace torch::dynamo::autograd;
    PackedArgs packed;
    for (auto& each : saved) {
      swapped.before(each);
      const at::Tensor tensor = each.unpack();
      packed.pack(tensor.defined() ? c10::IValue(tensor) : c10::IValue());
    }
    packed.pack(call.max_q);
    packed.pack(call.max_k);
    packed.pack(call.scale ? c10::IValue(*call.scale) : c10::IValue());
    packed.pack(c10::IValue(std::vector<int64_t>{call.left, right()}));
    packed.pack(call.choice);
    std::vector<at::TypePtr> types;
    for (const c10::IValue& each : packed.vec()) {
      types.push_back(each.isTensor() ? at::TensorType::get() : each.type());
    }
    const auto& compiler = getPyCompilerInterface();
    PyObject* const self = swapped.get_py_compiler();
    const auto function = compiler->bind_function(self, name(), traceable, types, /*is_custom_function=*/true);
    const auto metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    auto results = compiler->call_function(self, "apply_functional", function, inputs, packed.vec(), metadata);
    for (auto& each : saved) {
      swapped.after(each);
    }
    return results;
  }

 private:
  bool is_result(size_t number) const {
    return number == 3 || (number == 4 && returns_lse);
  }

  int64_t right() const {
    return call.causal ? 0 : call.right;
  }

  // The backward as the op that torch.compile keeps of a call, which has a fake.
  static torch::autograd::variable_list traceable(
      const torch::autograd::variable_list& grads, const std::vector<c10::IValue>& packed) {
    const bool has_lse = grads.size() > 1 && grads[1].defined();
    if (!grads[0].defined() && !has_lse) {
      return torch::autograd::variable_list(4);
    }
    // Packed: query, key, value, output, LSE, both offsets, sinks, longest query and key, scale, window, choice.
    const auto& p = packed;
    const c10::IValue none;
    const at::Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(p[3].toTensor());
    const bool is_packed = p[5].isTensor();
    const auto rows = [&](const c10::IValue& x) -> c10::IValue { return is_packed ? x : c10::IValue(x.toTensor().flatten(0, 1)); };
    const auto lse = [&](const c10::IValue& x) -> c10::IValue {
      return is_packed ? x : c10::IValue(x.toTensor().transpose(0, 1).flatten(1));
    };
    // The op takes packed calls alone, and a dense call is a packed call of equal lengths.
    const auto offsets = [&](size_t place, const at::Tensor& dense) -> c10::IValue {
      return is_packed ? p[place] : c10::IValue(at::arange(0, dense.size(0) + 1, dense.options().dtype(at::kInt)) * dense.size(1));
    };
    torch::jit::Stack stack{rows(grad_out), rows(p[0]), rows(p[1]), rows(p[2]), rows(p[3]), lse(p[4]),
                            offsets(5, p[0].toTensor()), offsets(6, p[1].toTensor()),
                            p[8], p[9], false, none, p[10], p[11], none, none, "", p[12], 0.0,
                            has_lse ? lse(grads[1]) : none};
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("attnreg::_varlen_attn_backward", "");
    const auto& arguments = op.schema().arguments();
    for (size_t number = stack.size(); number < arguments.size(); ++number) {
      stack.push_back(*arguments[number].default_value());  // options that the call cache leaves out
    }
    op.callBoxed(stack);
    torch::autograd::variable_list results{stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), at::Tensor()};
    for (size_t i = 0; i < 3 && !is_packed; i++) {
      results[i] = results[i].view_as(p[i].toTensor());
    }
    if (p[7].isTensor()) {
      const at::Tensor out = p[3].toTensor(), lse = p[4].toTensor(), sinks = p[7].toTensor();
      results[3] = of_sinks(grad_out, out, lse, sinks, has_lse ? grads[1] : at::Tensor());
    }
    return results;
  }

  static at::Tensor of_sinks(
      const at::Tensor& grad_out, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& sinks, const at::Tensor& grad_lse) {
    const WithGil gil;
    const Object results = owned(Py_BuildValue("(NN)", THPVariable_Wrap(out), THPVariable_Wrap(lse)));
    std::vector<Object> objects{owned(THPVariable_Wrap(grad_out)), results};
    for (const at::Tensor& each : {sinks, grad_lse}) {
      objects.push_back(owned(THPVariable_Wrap(each)));  // None for one that is undefined
    }
    return THPVariable_Unpack(call_python(grad_of_sinks, objects).get());
  }

  // Three gradients; that of `sinks` comes fourth unless the caller is to compute it.
  Tensors gradients(const Tensors& tensors, const at::Tensor& grad_lse, const at::Tensor& sinks) const {
    const bool use_cache = !grad_lse.defined() && enabled.load(std::memory_order_relaxed) && std::all_of(tensors.begin(), tensors.end(), is_plain);
    Lengths lengths;
    const Further further{sinks};
    const Key key = use_cache ? varlen_key(kVarlenBackward, call, tensors, 1, further, lengths) : Key{};
    const LookedUp looked_up = look_up(key, lengths);
    Tensors results;
    Facts knows_rows = known;
    if (!run_varlen(key, lengths, looked_up, tensors, 1, knows_rows, further, results)) {
      results = planned(key, lengths, looked_up.generation, tensors, grad_lse, sinks);
    }
    return results;
  }

  Tensors planned(
      const Key& key, const Lengths& lengths, uint64_t generation, const Tensors& tensors, const at::Tensor& grad_lse,
      const at::Tensor& sinks) const {
    const WithGil gil;
    std::vector<Object> objects;
    for (const at::Tensor& each : tensors) {
      objects.push_back(owned(THPVariable_Wrap(each)));
    }
    for (size_t i = tensors.size(); i < 8; i++) {
      objects.push_back((Py_INCREF(Py_None), owned(Py_None)));  // a dense call has no offsets
    }
    for (const int64_t number : {call.max_q, call.max_k}) {
      objects.push_back(owned(PyLong_FromLongLong(number)));
    }
    objects.push_back(owned(PyBool_FromLong(call.causal)));
    objects.push_back(owned(Py_BuildValue("(LL)", static_cast<long long>(call.left), static_cast<long long>(call.right))));
    objects.push_back(call.scale ? owned(PyFloat_FromDouble(*call.scale)) : (Py_INCREF(Py_None), owned(Py_None)));
    objects.push_back(owned(PyLong_FromLongLong(call.choice)));
    for (const at::Tensor& each : {grad_lse, sinks}) {
      objects.push_back(owned(THPVariable_Wrap(each)));  // None for one that is undefined
    }
    const Object returned = call_python(plan_backward, objects);
    PyObject *gradients = nullptr, *described = nullptr;
    if (!PyArg_ParseTuple(returned.get(), "O!O", &PyTuple_Type, &gradients, &described)) {
      throw_error_of_python();
    }
    const Py_ssize_t expected = sinks.defined() ? 4 : 3;
    TORCH_CHECK(PyTuple_GET_SIZE(gradients) == expected, "attnreg: a kernel breaks the contract: got ",
                PyTuple_GET_SIZE(gradients), " gradients, expected ", expected);
    keep_described(key, lengths, generation, described, tensors.size(), nullptr);
    Tensors computed;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(gradients); i++) {
      computed.push_back(tensor_of(PyTuple_GET_ITEM(gradients, i)));
    }
    return computed;
  }

  // Gradients of gradients aren't computed: asking for them is an error, as with torch's own kernels.
  static void refuse_second(const Tensors& tensors, torch::autograd::variable_list& results) {
    if (std::none_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) { return x.defined() && x.requires_grad(); })) {
      return;
    }
    const auto error = make_node<torch::autograd::NotImplemented>("the backward of attnreg.varlen_attn");
    error->set_next_edges(
        torch::autograd::collect_next_edges(tensors[0], tensors[1], tensors[2], tensors[3], tensors[tensors.size() - 2], tensors.back()));
    for (at::Tensor& each : results) {
      torch::autograd::set_history(each, error);
    }
  }
};

}  // namespace attnreg
