// A kernel over one of torch's ops that attnreg doesn't route: torch's kernel runs, and the call is counted.

#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <memory>
#include <utility>
#include <vector>

#include "cache.h"

namespace attnreg {

class Observer final : public c10::OperatorKernel {
 public:
  // `places` are the arguments that `count`, a function of Python's, is called with; `native` is torch's own kernel.
  Observer(int64_t site, std::vector<int64_t> places, c10::SafeKernelFunction native, Object count)
      : site_(site), places_(std::move(places)), native_(std::move(native)), count_(std::move(count)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const Key key = enabled.load(std::memory_order_relaxed) ? key_of(arguments) : Key{};
    const LookedUp looked_up = look_up(key, Lengths{});
    if (looked_up.entry) {
      native_.callBoxed(op, keys, stack);
      looked_up.entry->count();
      return;
    }
    std::vector<c10::IValue> values;  // the kernel takes them from the stack
    for (const int64_t place : places_) {
      values.push_back(arguments[place]);
    }
    native_.callBoxed(op, keys, stack);
    const WithGil gil;
    std::vector<Object> objects;
    for (const c10::IValue& value : values) {
      objects.push_back(owned(to_python(value)));
    }
    const Object counter = call_python(count_.get(), objects);
    if (counter.get() == Py_None) {
      return;
    }
    const Object counters = owned(PyTuple_Pack(1, counter.get()));
    if (!counters) {
      throw_error_of_python();
    }
    auto entry = std::make_shared<Entry>();
    entry->tallies = tallies_of(counters.get());
    keep(key, Lengths{}, looked_up.generation, Classes{}, OfClass{}, std::move(entry));
  }

 private:
  // All that the reason depends on; empty where Python has to look: under dispatch modes, and for wrappers.
  Key key_of(Arguments arguments) const {
    Key key;
    if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      return key;
    }
    key.append({site_, at::globalContext().userEnabledFlashSDP()});
    for (const int64_t place : places_) {
      const c10::IValue& argument = arguments[place];
      if (!argument.isTensor() || !argument.toTensor().defined()) {
        if (!append_value(argument.isTensor() ? c10::IValue() : argument, key)) {
          return {};
        }
        continue;
      }
      const at::Tensor& tensor = argument.toTensor();
      if (tensor.is_nested() || tensor.dim() < 2 || tensor.key_set().has(c10::DispatchKey::Python)) {
        return {};
      }
      // No reason depends on a length, whose dimension is the last but one, or on sizes of the mask.
      append(tensor, false, place < 3 ? 1u << (tensor.dim() - 2) : kAll, key);
      key.append({tensor.strides().back() == 1, tensor.requires_grad()});
    }
    return key;
  }

  int64_t site_;
  std::vector<int64_t> places_;
  c10::SafeKernelFunction native_;
  Object count_;
};

}  // namespace attnreg
