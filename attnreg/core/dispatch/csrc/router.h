// A router over one of torch's ops: looks a call up, and runs what is kept, or asks the router in Python.

#pragma once

#include <torch/library.h>

#include <limits>

#include "described.h"
#include "layouts.h"

namespace attnreg {

class Router final : public c10::OperatorKernel {
 public:
  // `native` is torch's own kernel, if it has one; `plan` the router in Python.
  Router(int64_t site, Layout layout, const c10::FunctionSchema& schema, std::optional<c10::SafeKernelFunction> native, Object plan)
      : site_(site), layout_(layout), native_(std::move(native)), plan_(std::move(plan)) {
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const std::string& name = schema.arguments()[i].name();
      is_length_.push_back(name == "max_q" || name == "max_k");
      if (layout_.is_backward() && name == "out") {
        out_ = i;
      } else if (layout_.is_backward() && (name == "logsumexp" || name == "lse")) {
        lse_ = i;
      }
      if (name.rfind("cum_seq", 0) == 0 || name.rfind("cu_seqlens", 0) == 0) {
        offsets_.push_back(i);
      }
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const bool is_enabled = enabled.load(std::memory_order_relaxed);
    const int64_t choice = !is_enabled ? -1 : layout_.is_backward() ? choice_of(arguments[layout_.token_argument]) : scoped_choice();
    if (choice == 0 && native_ && passing.load(std::memory_order_acquire)) {
      native_->callBoxed(op, keys, stack);
      return;
    }
    Lengths lengths;
    const Key key = choice < 0 ? Key{} : key_of(choice, arguments, lengths);
    const LookedUp looked_up = is_enabled ? look_up(key, lengths) : LookedUp{};
    if (looked_up.entry && !looked_up.entry->is_due()) {
      const auto run = [&] { return run_kept(*looked_up.entry, lengths, choice, arguments, op, keys, stack); };
      if (run_unless_declined(*looked_up.entry, run)) {
        looked_up.entry->count();
        return;
      }
      erase(key, lengths);
    }
    ask_plan(key, lengths, looked_up.generation, arguments, op, stack);
  }

 private:
  // Mark rows with a score of NaN or +inf, which torch's kernel for the CPU may hide, by `torchlib.nan_rows` in Python. Only
  // a row whose LSE isn't finite, or 0, may be one.
  static void show_nan(const torch::jit::Stack& stack, Arguments inputs) {
    const at::Tensor &out = stack[stack.size() - 2].toTensor(), &lse = stack.back().toTensor();
    const auto may_hide = [](const auto* numbers, int64_t count) {
      constexpr auto kInfinity = std::numeric_limits<std::decay_t<decltype(*numbers)>>::infinity();
      return std::any_of(numbers, numbers + count, [](auto x) { return x == 0 || !(x < kInfinity); });
    };
    if (lse.is_non_overlapping_and_dense() &&
        !(lse.scalar_type() == at::kDouble ? may_hide(lse.const_data_ptr<double>(), lse.numel())
                                           : may_hide(lse.const_data_ptr<float>(), lse.numel()))) {
      return;
    }
    const WithGil gil;
    const Object module = owned(PyImport_ImportModule("attnreg.core.torchlib.nan_rows"));
    const Object show = owned(module ? PyObject_GetAttrString(module.get(), "show_nan") : nullptr);
    if (!show) {
      throw_error_of_python();
    }
    std::vector<Object> arguments{owned(THPVariable_Wrap(out)), owned(THPVariable_Wrap(lse))};
    for (const size_t place : {0, 1, 4, 5}) {  // query, key, whether it is causal, and the mask
      arguments.push_back(owned(to_python(inputs[place])));
    }
    call_python(show.get(), arguments);
  }

  // The lengths of a dense call; false where they don't fit each other, or the call is packed.
  bool read_lengths(Arguments arguments, Lengths& lengths) const {
    const auto tensor = [&](size_t place) -> const at::Tensor& { return arguments[place].toTensor(); };
    const size_t rows = layout_.bhsd ? 2 : 1, q = layout_.query, k = q + 1, v = q + 2;
    for (const size_t place : {q, k, v}) {
      if (!arguments[place].isTensor() || !tensor(place).defined() || tensor(place).dim() != 4) {
        return false;
      }
    }
    const int64_t batch = tensor(q).size(0), max_q = tensor(q).size(rows), max_k = tensor(k).size(rows);
    if (tensor(k).size(0) != batch || tensor(v).size(0) != batch || tensor(v).size(rows) != max_k) {
      return false;
    }
    if (out_ && lse_) {  // of a gradient and results that the caller has put together
      for (const size_t place : {size_t{0}, *out_, *lse_}) {
        if (!arguments[place].isTensor() || !tensor(place).defined()) {
          return false;
        }
      }
      const at::Tensor &grad = tensor(0), &out = tensor(*out_), &lse = tensor(*lse_);
      // Torch's efficient kernel has an LSE of more rows than there are queries.
      if (grad.sizes() != out.sizes() || out.dim() != 4 || out.size(0) != batch || out.size(rows) != max_q || lse.dim() < 3 ||
          lse.size(0) != batch || lse.size(2) < max_q || (*lse_ < layout_.tensors() && lse.size(2) != max_q)) {
        return false;
      }
    }
    lengths = {{batch, max_q, max_k, batch * max_q, batch * max_k}};
    return true;
  }

  // The key of a call's kind; empty for a call that has none. Of a packed call all lengths are in it, as they are.
  Key key_of(int64_t choice, Arguments arguments, Lengths& lengths) const {
    Key key;
    const size_t described = layout_.tensors(), query = layout_.query;
    bool needs_gradient = false;
    for (size_t i = query; i < query + 3; i++) {
      if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) {
        return key;
      }
      needs_gradient |= arguments[i].toTensor().requires_grad();
    }
    const auto modes = modes_of(arguments[query].toTensor(), needs_gradient);
    if (!modes) {
      return key;
    }
    const bool is_packed = has_offsets(arguments);
    if (!is_packed && !read_lengths(arguments, lengths)) {
      return key;
    }
    key.append({site_, choice, *modes});
    bool others_need_gradient = false;  // a mask may need one alone
    for (size_t i = 0; i < arguments.size(); i++) {
      const c10::IValue& argument = arguments[i];
      if (argument.isTensor() && argument.toTensor().defined()) {
        others_need_gradient |= i >= described && argument.toTensor().requires_grad();
        if (!is_in_memory(argument.toTensor())) {
          key.clear();
          return key;
        }
        const bool is_lse = lse_ && i == *lse_;
        const uint32_t of_tensor = i < described ? layout_.lengths_of(is_lse) : kAll;
        append(argument.toTensor(), i < described, is_packed ? kNone : of_tensor, key, is_lse);
      } else if (!is_packed && argument.isInt() && is_length_[i]) {
        key.push_back(kInt);  // the lengths of the tensors say it
      } else if (!append_value(argument.isTensor() ? c10::IValue() : argument, key)) {
        key.clear();
        return key;
      }
    }
    key.push_back(others_need_gradient);
    if (out_ && !is_packed) {  // torch 2.11 keeps its cuDNN graphs by the strides of all but the gradient
      key.push_back(arguments[0].toTensor().strides() == arguments[*out_].toTensor().strides());
    }
    return key;
  }

  bool has_offsets(Arguments arguments) const {
    return std::any_of(offsets_.begin(), offsets_.end(), [&](size_t place) {
      return arguments[place].isTensor() && arguments[place].toTensor().defined();
    });
  }

  bool run_kept(
      const Entry& entry, const Lengths& lengths, int64_t choice, Arguments arguments, const c10::OperatorHandle& op,
      c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    const auto device = arguments[layout_.query].toTensor().device();
    // Also where no gradient is recorded: what AOTAutograd has compiled calls the backward's op itself.
    const int64_t token = choice != 0 ? layout_.token_result : -1;
    if (entry.is_native()) {
      if (layout_.lse_bsh) {
        const c10::SmallVector<c10::IValue, 8> inputs(arguments.begin(), arguments.end());  // the kernel takes them from the stack
        native_->callBoxed(op, keys, stack);
        show_nan(*stack, inputs);
      } else {
        native_->callBoxed(op, keys, stack);
      }
      if (token >= 0) {
        // The LSE of the CPU's op is read; a random state isn't where nothing is dropped. It may be on another device
        // than the query, as the efficient op's is, and a checkpoint compares the devices of what is saved.
        c10::IValue& value = (*stack)[stack->size() - op.schema().returns().size() + token];
        if (token == 1) {
          carry(value, choice);
        } else {
          value = token_like(value.toTensor(), value.toTensor().device(), choice);
        }
      }
      return true;
    }
    Tensors tensors = to_contract(layout_, arguments), results;
    Spare spare;
    if (!run(entry, Launch{tensors, lengths, false, true, true, !layout_.is_backward()}, keys, results, spare)) {
      return false;
    }
    to_op(layout_, arguments, results);
    std::vector<c10::IValue> returned(std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
    for (const c10::IValue& model : entry.auxiliary) {
      const bool is_tensor = model.isTensor() && model.toTensor().defined();
      const bool is_token = static_cast<int64_t>(returned.size()) == token;
      // New ones each time: what Inductor compiles may write to an op's outputs.
      returned.push_back(
          is_token ? c10::IValue(token_like(model.toTensor(), device, choice))
                   : is_tensor ? c10::IValue(auxiliary_like(model.toTensor(), device, spare)) : model);
    }
    for (const auto& [place, of_keys] : entry.lengths) {
      returned[results.size() + place] = lengths.numbers[of_keys ? Lengths::kMaxK : Lengths::kMaxQ];
    }
    if (token == 1) {
      carry(returned[1], choice);
    }
    torch::jit::drop(*stack, arguments.size());
    stack->insert(stack->end(), returned.begin(), returned.end());
    return true;
  }

  void ask_plan(
      const Key& key, const Lengths& lengths, uint64_t generation, Arguments arguments, const c10::OperatorHandle& op,
      torch::jit::Stack* stack) const {
    const auto& schema = op.schema();
    const WithGil gil;
    std::vector<Object> objects;
    size_t positional = 0;
    while (positional < arguments.size() && !schema.arguments()[positional].kwarg_only()) {
      objects.push_back(owned(to_python(arguments[positional++])));
    }
    // Options that are as they would be anyway aren't named.
    const Object options = owned(PyDict_New());
    for (size_t i = positional; i < arguments.size(); i++) {
      const auto& declared = schema.arguments()[i];
      if (declared.default_value() && same(*declared.default_value(), arguments[i])) {
        continue;
      }
      const Object value = owned(to_python(arguments[i]));
      if (!value || PyDict_SetItemString(options.get(), declared.name().c_str(), value.get()) != 0) {
        throw_error_of_python();
      }
    }
    const Object tuple = owned(PyTuple_New(static_cast<Py_ssize_t>(objects.size())));
    for (size_t i = 0; i < objects.size(); i++) {
      if (!objects[i]) {
        throw_error_of_python();
      }
      Py_INCREF(objects[i].get());
      PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), objects[i].get());
    }
    const Object returned = owned(PyObject_Call(plan_.get(), tuple.get(), options.get()));
    PyObject *results = nullptr, *described = nullptr;
    if (!returned || !PyArg_ParseTuple(returned.get(), "OO", &results, &described)) {
      throw_error_of_python();
    }
    const auto values = read_results(results, schema);
    keep_described(key, lengths, generation, described, layout_.tensors(), &schema);
    torch::jit::drop(*stack, arguments.size());
    stack->insert(stack->end(), values.begin(), values.end());
  }

  static bool same(const c10::IValue& a, const c10::IValue& b) {
    if (a.isNone() || b.isNone()) {
      return a.isNone() && b.isNone();
    }
    return a.isScalar() && b.isScalar() && a.tagKind() == b.tagKind() &&
        (a.isDouble() ? a.toDouble() == b.toDouble()
                        : a.isInt() ? a.toInt() == b.toInt() : a.isBool() && a.toBool() == b.toBool());
  }

  static std::vector<c10::IValue> read_results(PyObject* results, const c10::FunctionSchema& schema) {
    const auto& types = schema.returns();
    std::vector<c10::IValue> values;
    if (types.size() == 1 && !PyTuple_Check(results)) {
      values.push_back(from_python(results, types[0].type()));
      return values;
    }
    const auto count = PyTuple_Check(results) ? static_cast<size_t>(PyTuple_GET_SIZE(results)) : 0;
    TORCH_CHECK(count == types.size(), "attnreg: ", schema.name(), " got ", count, " results, expected ", types.size());
    for (size_t i = 0; i < count; i++) {
      values.push_back(from_python(PyTuple_GET_ITEM(results, static_cast<Py_ssize_t>(i)), types[i].type()));
    }
    return values;
  }

  int64_t site_;
  Layout layout_;
  std::optional<c10::SafeKernelFunction> native_;
  Object plan_;
  std::vector<bool> is_length_;  // of each of the op's arguments, whether it is a longest length
  std::vector<size_t> offsets_;  // the places of the op's offsets
  std::optional<size_t> out_, lse_;  // of a backward, the places of the forward's results
};

}  // namespace attnreg
