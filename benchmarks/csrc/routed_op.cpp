// Two ways from Python to a packed kernel that does nothing: a function of a C++ module, and an op of torch's dispatcher.
//
// Both allocate the output and the LSE, and record the same autograd node where a gradient is needed. What differs is the
// way there: a vector of Python objects, or a schema with one kernel for Autograd and one for the device. `routed_op.py`
// times both.

#include <Python.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Options {
  int64_t max_q, max_k;
  bool causal, gqa;
  int64_t left, right, choice;
  std::optional<double> scale;
};

std::tuple<Tensor, Tensor> launch(const Tensor& query, const Tensor& value) {
  return {at::empty({query.size(0), query.size(1), value.size(2)}, query.options()),
          at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat))};
}

struct Recorded : torch::autograd::Function<Recorded> {
  template <class Run>
  static variable_list forward(
      AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_q, const Tensor& cu_k,
      const Run& run) {
    auto [out, lse] = run();
    context->mark_non_differentiable({lse});
    context->save_for_backward({query, key, value, out, lse, cu_q, cu_k});
    return {out, lse};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {at::empty_like(saved[0]), at::empty_like(saved[1]), at::empty_like(saved[2]), Tensor(), Tensor(), Tensor()};
  }
};

bool needs_gradient(const Tensor& query, const Tensor& key, const Tensor& value) {
  return at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad());
}

// ---- the op

std::tuple<Tensor, Tensor> on_device(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_q, const Tensor& cu_k, int64_t max_q, int64_t max_k,
    bool causal, int64_t left, int64_t right, std::optional<double> scale, bool gqa, int64_t choice) {
  return launch(query, value);
}

std::tuple<Tensor, Tensor> with_gradient(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_q, const Tensor& cu_k, int64_t max_q, int64_t max_k,
    bool causal, int64_t left, int64_t right, std::optional<double> scale, bool gqa, int64_t choice) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attnreg_trial::varlen_attn", "")
                             .typed<decltype(on_device)>();
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.call(query, key, value, cu_q, cu_k, max_q, max_k, causal, left, right, scale, gqa, choice);
  };
  if (!needs_gradient(query, key, value)) {
    return run();
  }
  const auto results = Recorded::apply(query, key, value, cu_q, cu_k, run);
  return {results[0], results[1]};
}

TORCH_LIBRARY(attnreg_trial, library) {
  library.def(
      "varlen_attn(Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor cu_k, SymInt max_q, SymInt max_k, bool causal, "
      "int left, int right, float? scale, bool gqa, int choice) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(attnreg_trial, CPU, library) {
  library.impl("varlen_attn", on_device);
}

TORCH_LIBRARY_IMPL(attnreg_trial, CUDA, library) {
  library.impl("varlen_attn", on_device);
}

TORCH_LIBRARY_IMPL(attnreg_trial, Autograd, library) {
  library.impl("varlen_attn", with_gradient);
}

// ---- the function

PyObject* call_directly(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  const Tensor &query = THPVariable_Unpack(arguments[0]), &key = THPVariable_Unpack(arguments[1]),
               &value = THPVariable_Unpack(arguments[2]), &cu_q = THPVariable_Unpack(arguments[3]),
               &cu_k = THPVariable_Unpack(arguments[4]);
  PyObject* const* rest = arguments + 5;
  Options options{PyLong_AsLongLong(rest[0]), PyLong_AsLongLong(rest[1]), rest[2] == Py_True,            rest[6] == Py_True,
                  PyLong_AsLongLong(rest[3]), PyLong_AsLongLong(rest[4]), PyLong_AsLongLong(rest[7]), std::nullopt};
  if (rest[5] != Py_None) {
    options.scale = PyFloat_AsDouble(rest[5]);
  }
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return launch(query, value);
  };
  if (!needs_gradient(query, key, value)) {
    auto [out, lse] = run();
    return Py_BuildValue("(NN)", THPVariable_Wrap(out), THPVariable_Wrap(lse));
  }
  const auto results = Recorded::apply(query, key, value, cu_q, cu_k, run);
  return Py_BuildValue("(NN)", THPVariable_Wrap(results[0]), THPVariable_Wrap(results[1]));
}

PyMethodDef methods[] = {
    {"call_directly", reinterpret_cast<PyCFunction>(call_directly), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "attnreg_trial", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_attnreg_trial() {
  return PyModule_Create(&definition);
}
