// A router over one in Python: looks a call up, and has it answered the way that is known, or passes it on.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include "addresses.h"
#include "op_calls.h"
#include "turned.h"

namespace attnreg {

struct Answer {  // what is known of a call
  bool passes = false;             // whether it is torch's, uncounted
  std::shared_ptr<const Way> way;  // how else it is answered; unknown if there is none
  size_t taken = 0;                // how many arguments a function of Python's takes
};

inline PyObject* to_python(const c10::IValue& value) {
  if (value.isTensor()) {
    return THPVariable_Wrap(value.toTensor());
  }
  Py_RETURN_NONE;
}

inline c10::IValue from_python(PyObject* value, const c10::TypePtr& type) {
  if (THPVariable_Check(value)) {
    return THPVariable_Unpack(value);
  }
  if (value == Py_None) {
    // Where there has to be a tensor, which may be undefined, that is what None stands for.
    return type->kind() == c10::TypeKind::TensorType ? c10::IValue(at::Tensor()) : c10::IValue();
  }
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) {
    throw_error_of_python();
  }
  return static_cast<int64_t>(number);
}

// Append what a function of Python's returns for some tensors; false if that is None: it can't answer.
inline bool call_python(
    PyObject* run, const Given& given, const c10::FunctionSchema& schema, std::vector<c10::IValue>& results) {
  const Locked lock;
  std::vector<PyObject*> arguments;
  for (const c10::IValue& one : given) {
    arguments.push_back(to_python(one));
  }
  PyObject* returned = PyObject_Vectorcall(run, arguments.data(), arguments.size(), nullptr);
  for (PyObject* one : arguments) {
    Py_XDECREF(one);
  }
  if (!returned) {
    throw_error_of_python();
  }
  const Run held(returned, Py_DecRef);  // the lock lasts longer
  if (returned == Py_None) {
    return false;
  }
  const auto& types = schema.returns();
  const auto count = PyTuple_Check(returned) ? static_cast<size_t>(PyTuple_GET_SIZE(returned)) : 0;
  TORCH_CHECK(0 < count && count <= types.size(), "attnreg: ", schema.name(), " got ", count, " results");
  for (size_t i = 0; i < count; i++) {
    results.push_back(from_python(PyTuple_GET_ITEM(returned, i), types[i].type()));
  }
  return true;
}

class Router final : public c10::OperatorKernel {
 public:
  Router(Place place, c10::SafeKernelFunction torchs, c10::SafeKernelFunction pythons)
      : place_(place), torchs_(std::move(torchs)), pythons_(std::move(pythons)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const int64_t announcement = std::exchange(announced, kNothing);
    if (!enabled.load(std::memory_order_relaxed)) {
      return pythons_.callBoxed(op, keys, stack);
    }
    UnderWay call{&op.schema(), taken(place_, Front::kTorchs)};
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const Answer answer = look_up(arguments, announcement, call);
    if (answer.passes) {
      torchs_.callBoxed(op, keys, stack);
    } else if (!answer.way || !answered(answer, arguments, op, keys, stack)) {
      const Asking asking(call);
      pythons_.callBoxed(op, keys, stack);
    } else {
      count(answer.way->tallies);
    }
  }

 private:
  // Whether a call was answered the way that is known.
  bool answered(
      const Answer& answer, Arguments arguments, const c10::OperatorHandle& op, c10::DispatchKeySet keys,
      torch::jit::Stack* stack) const {
    const Way& way = *answer.way;
    if (!way.run && !way.another && !way.addresses) {
      torchs_.callBoxed(op, keys, stack);
      torch::jit::drop(*stack, way.beside.size());
      stack->insert(stack->end(), way.beside.begin(), way.beside.end());
      return true;
    }
    std::optional<Locked> lock;  // as long as there is anything that Python has seen
    if (way.run) {
      lock.emplace();
    }
    const auto first = arguments.slice(0, answer.taken);
    Given given(first.begin(), first.end());
    if (way.turned) {
      turn(given, place_);
    }
    std::vector<c10::IValue> results;
    Spare spare;
    if (way.another) {
      call_torch(*way.another, given, keys, results, spare);
    } else if (way.addresses) {
      if (!run_on_addresses(*way.addresses, given, results)) {
        return false;
      }
    } else if (!call_python(way.run.get(), given, op.schema(), results)) {
      return false;
    }
    if (way.turned) {
      const auto expected = op.schema().returns().size() - way.beside.size();
      TORCH_CHECK(results.size() == expected, "attnreg: ", op.schema().name(), " got ", results.size(),
                  " results of a kernel, expected ", expected);
      turn_back(results, arguments, place_);
    }
    if (way.saved) {
      results[1] = results[1].toTensor().contiguous();
    }
    const auto device = arguments[place_.query].toTensor().device();
    torch::jit::drop(*stack, arguments.size());
    stack->insert(stack->end(), results.begin(), results.end());
    for (const c10::IValue& one : way.beside) {
      // What Inductor compiles may write to an op's outputs. Calls of `varlen_attn`'s own front aren't compiled.
      const bool anew = way.turned && one.isTensor() && one.toTensor().defined();
      stack->push_back(anew ? fresh(one.toTensor(), device, spare) : one);
    }
    return true;
  }

  Answer look_up(Arguments arguments, int64_t announcement, UnderWay& call) const {
    Front front = announcement == kNothing ? Front::kTorchs : Front::kVarlenForward;
    const c10::TensorImpl* carrier = nullptr;
    if (place_.carrier >= 0) {
      const c10::IValue& given = arguments[place_.carrier];
      if (given.isTensor() && given.toTensor().defined() && given.toTensor().storage_offset() != 0) {
        front = Front::kVarlenBackward;
        carrier = given.toTensor().unsafeGetTensorImpl();
      }
    } else if (front == Front::kTorchs && chosen_for()) {
      return {};
    }
    if (front == Front::kTorchs && passing.load(std::memory_order_acquire)) {
      return {true};
    }
    if (announcement != kUnknown) {
      call.call = describe(place_, arguments, front, carrier);
    }
    const std::shared_lock lock(guard);
    call.generation = kept.generation;
    const auto found = call.call.empty() ? kept.known.end() : kept.known.find(call.call);
    if (found == kept.known.end() || (front == Front::kVarlenForward && !covered(arguments))) {
      return {};
    }
    return {false, found->second, taken(place_, front)};
  }

  Place place_;
  c10::SafeKernelFunction torchs_, pythons_;
};

}  // namespace attnreg
