// A kernel over one of torch's ops that attnreg doesn't route: torch's kernel runs, then Python counts the call.

#pragma once

#include <torch/library.h>

#include <utility>
#include <vector>

#include "python.h"

namespace attnreg {

class Observer final : public c10::OperatorKernel {
 public:
  // `places` are the arguments that `observe`, a function of Python's, is called with; `native` is torch's own kernel.
  Observer(std::vector<int64_t> places, c10::SafeKernelFunction native, Object observe)
      : places_(std::move(places)), native_(std::move(native)), observe_(std::move(observe)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    std::vector<c10::IValue> values;  // the kernel takes them from the stack
    for (const int64_t place : places_) {
      values.push_back(arguments[place]);
    }
    native_.callBoxed(op, keys, stack);
    const WithGil gil;
    std::vector<Object> observed;
    for (const c10::IValue& value : values) {
      observed.push_back(owned(to_python(value)));
    }
    call_python(observe_.get(), observed);
  }

 private:
  std::vector<int64_t> places_;
  c10::SafeKernelFunction native_;
  Object observe_;
};

}  // namespace attnreg
