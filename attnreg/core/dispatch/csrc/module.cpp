// The compiled call cache: the fast path of attnreg.
//
// A router written in Python takes the interpreter's lock and turns every argument into an object, which costs the
// host more than the decision. Here a call is described by its kind (`key.h`) and the class of its lengths
// (`lengths.h`). If these are kept (`cache.h`), their launcher runs it (`launchers.h`): one of torch's own kernels, a C
// function, a kernel on addresses (`addresses.h`), or a function of Python's. If not, Python runs it by its plan, and
// returns with the results what is to be kept (`described.h`), or nothing. Whatever changes in settings, registrations or
// tables drops all of it.
//
// There are two fronts: routers over aten's ops (`router.h`, with `layouts.h`), and `varlen_attn` with an autograd
// node of its own (`varlen.h`). A step of decoding with a cache (`decode.h`) is one of the second. Calls of modules that
// `attnreg.assign` has assigned enter their choice in C++, too (`choice.h`), and calls of SDPA without a mask pass there by
// what looks at masks (`functions.h`). Below are the functions that Python calls, always with the interpreter's lock.

#include <Python.h>
#include <pthread.h>

#include "decode.h"
#include "observer.h"
#include "router.h"
#include "varlen.h"

namespace attnreg {
namespace {

auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>;

PyObject* add_router(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *op = nullptr, *key = nullptr;
  PyObject* plan = nullptr;
  Py_ssize_t query = 0, token_argument = 0, token_result = 0;
  int bhsd = 0, lse_ends_in_one = 0, lse_bsh = 0, gradients_bshd = 0;
  if (!PyArg_ParseTuple(args, "ss(nnnpppp)O", &op, &key, &query, &token_argument, &token_result, &bhsd,
                        &lse_ends_in_one, &lse_bsh, &gradients_bshd, &plan)) {
    return nullptr;
  }
  native_kernels.erase(std::string(key) + op);  // what lies there now is what to fall back to
  const auto* native = capture(op, key);
  const Layout layout{static_cast<size_t>(query), token_argument, token_result, bhsd != 0,
                      lse_ends_in_one != 0, lse_bsh != 0, gradients_bshd != 0};
  const auto& schema = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + op).c_str(), "").schema();
  auto router = std::make_unique<Router>(
      static_cast<int64_t>(libraries.size()), layout, schema, native ? std::optional(native->second) : std::nullopt, held(plan));
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::parseDispatchKey(key), __FILE__, __LINE__);
  library->impl(op, torch::CppFunction::makeFromBoxedFunctor(std::move(router)));
  libraries.push_back(std::move(library));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* add_observer(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *op = nullptr, *key = nullptr;
  PyObject *places = nullptr, *count = nullptr;
  if (!PyArg_ParseTuple(args, "ssO!O", &op, &key, &PyTuple_Type, &places, &count)) {
    return nullptr;
  }
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + op).c_str(), "");
  const auto where = c10::parseDispatchKey(key);
  if (!handle.hasComputedKernelForDispatchKey(where)) {  // of an op that torch composes of others there is no other
    Py_RETURN_NONE;
  }
  const auto site = -1 - static_cast<int64_t>(libraries.size());  // no router has a negative one
  auto observer = std::make_unique<Observer>(
      site, numbers_of(places), handle.getComputedKernelForDispatchKey(where), held(count));
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", where, __FILE__, __LINE__);
  library->impl(op, torch::CppFunction::makeFromBoxedFunctor(std::move(observer)));
  libraries.push_back(std::move(library));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* remove_routers(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  libraries.clear();
  drop_all();
  const std::vector<Written> dropped = std::exchange(all_written, {});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* enable(PyObject*, PyObject* on) {
  enabled = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

PyObject* drop(PyObject*, PyObject*) {
  drop_all();
  const std::vector<Written> dropped = std::exchange(all_written, {});  // freed last: other threads may run then
  Py_RETURN_NONE;
}

PyObject* watch(PyObject*, PyObject* args) {
  PyObject *variable = nullptr, *of_compiler = nullptr, *callback = nullptr;
  int inherits = 0;
  if (!PyArg_ParseTuple(args, "OpO!O", &variable, &inherits, &PyDict_Type, &of_compiler, &callback)) {
    return nullptr;
  }
  for (PyObject* object : {variable, of_compiler, callback}) {
    Py_INCREF(object);
  }
  dynamo_callback = callback;
  is_inherited = inherits != 0;
  compiler = of_compiler;
  choices = variable;
  Py_RETURN_NONE;
}

PyObject* forget_choices(PyObject*, PyObject*) {
  remembered = {};
  Py_RETURN_NONE;
}

PyObject* trust_offsets(PyObject*, PyObject* seconds) {
  const double number = PyFloat_AsDouble(seconds);
  if (number == -1.0 && PyErr_Occurred()) {
    return nullptr;
  }
  trusted = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(number));
  Py_RETURN_NONE;
}

PyObject* set_plans(PyObject*, PyObject* args) {
  PyObject *forward = nullptr, *backward = nullptr, *rescale = nullptr, *of_sinks = nullptr;
  if (!PyArg_ParseTuple(args, "OOOO", &forward, &backward, &rescale, &of_sinks)) {
    return nullptr;
  }
  for (PyObject* function : {forward, backward, rescale, of_sinks}) {
    Py_INCREF(function);
  }
  with_sinks = rescale;
  grad_of_sinks = of_sinks;
  plan_backward = backward;
  plan_forward = forward;
  Py_RETURN_NONE;
}

PyObject* set_device_code(PyObject*, PyObject* args) {
  Py_ssize_t index = 0;
  PyObject* addresses[7] = {};
  if (!PyArg_ParseTuple(args, "nO!O!O!O!O!O!O!", &index, &PyLong_Type, &addresses[0], &PyLong_Type, &addresses[1], &PyLong_Type,
                        &addresses[2], &PyLong_Type, &addresses[3], &PyLong_Type, &addresses[4], &PyLong_Type,
                        &addresses[5], &PyLong_Type, &addresses[6])) {
    return nullptr;
  }
  if (index >= 0 && index < kMostDevices && !is_there[index]) {
    void* pointers[7];
    std::transform(addresses, addresses + 7, pointers, PyLong_AsVoidPtr);
    device_codes[index] = {reinterpret_cast<LaunchKernel>(pointers[0]), pointers[1], pointers[2], pointers[3], pointers[4], pointers[5]};
    if (!answers) {
      answers = static_cast<volatile uint16_t*>(pointers[6]);
    }
    is_there[index].store(true, std::memory_order_release);
  }
  Py_RETURN_NONE;
}

PyObject* offsets_changed(PyObject*, PyObject*) {
  return PyBool_FromLong(offsets_have_changed());
}

PyObject* drain(PyObject*, PyObject*) {
  // First without Python, which may run anything while it makes objects.
  std::vector<std::pair<PyObject*, int64_t>> counted;
  for (auto at = all_tallies.begin(); at != all_tallies.end();) {
    const auto& [counter, tally] = *at;
    const bool in_use = tally.use_count() > 1;
    const int64_t times = tally->times.exchange(0, std::memory_order_relaxed);
    counted.emplace_back(counter, times);
    if (in_use) {
      Py_INCREF(counter);
      ++at;
    } else {
      at = all_tallies.erase(at);
    }
  }
  PyObject* rows = PyList_New(0);
  for (const auto& [counter, times] : counted) {
    PyObject* row = rows && times != 0 ? Py_BuildValue("(OL)", counter, static_cast<long long>(times)) : nullptr;
    if (row && PyList_Append(rows, row) != 0) {
      Py_CLEAR(rows);
    }
    Py_XDECREF(row);
    Py_DECREF(counter);
  }
  return PyErr_Occurred() ? nullptr : rows;
}

PyMethodDef functions[] = {
    {"add_observer", add_observer, METH_VARARGS, "Put an observer over torch's kernel of an aten op below a key; the places of its arguments; the function."},
    {"add_router", add_router, METH_VARARGS, "Put a router over torch's kernel of an aten op below a key; how its tensors lie; the router in Python."},
    {"remove_routers", remove_routers, METH_NOARGS, "Take all routers out."},
    {"enable", enable, METH_O, "Look calls up, or leave every call to Python."},
    {"drop", drop, METH_NOARGS, "Drop everything that is kept."},
    {"watch", watch, METH_VARARGS, "Look at a context variable before a forward: it may contain a choice. Whether autograd's threads inherit it; the names of `torch.compiler`; the function that returns Dynamo's callback."},
    {"forget_choices", forget_choices, METH_NOARGS, "This thread has entered or left a choice: read the context variable anew."},
    {"pass_unmasked", pass_unmasked, METH_VARARGS, "Have the object of a class called from here, or torch's SDPA if there is no mask to look at; the names of `aten.bypassed`."},
    {"take_over", take_over, METH_O, "Call a function that runs a method in the block of a module from here."},
    {"trust_offsets", trust_offsets, METH_O, "For how many seconds what is known of offsets is used before Python is called anew."},
    {"set_plans", set_plans, METH_VARARGS, "The functions of Python that run forwards and backwards of `varlen_attn`, and count sinks in their results."},
    {"set_device_code", set_device_code, METH_VARARGS, "The kernels for packed calls on a GPU: its index, cuLaunchKernel, those that clear rows of a forward and a backward, state facts, blank rows and append to a cache, and pinned memory for answers."},
    {"offsets_changed", offsets_changed, METH_NOARGS, "Whether offsets were found to have been written to without a trace, since the last call with them."},
    {"varlen", reinterpret_cast<PyCFunction>(varlen), METH_FASTCALL, "Output and LSE of a call of `varlen_attn`; None where Python has to connect it to autograd."},
    {"dense", reinterpret_cast<PyCFunction>(dense), METH_FASTCALL, "Output and LSE of a dense call, as `varlen`."},
    {"decode", reinterpret_cast<PyCFunction>(decode), METH_FASTCALL, "Output and LSE of a step of decoding with a cache; None where Python has to run it."},
    {"drain", drain, METH_NOARGS, "Return what was counted since the last time, and by which counters."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "attnreg_call_cache", nullptr, -1, functions};

}  // namespace
}  // namespace attnreg

PyMODINIT_FUNC PyInit_attnreg_call_cache() {
  pthread_atfork(nullptr, nullptr, attnreg::begin_anew_after_fork);
  PyObject* module = PyModule_Create(&attnreg::definition);
  // The name of its file, without the suffix: whoever loads the file compares both.
  if (module && PyModule_AddStringConstant(module, "library", ATTNREG_LIBRARY) != 0) {
    Py_CLEAR(module);
    return nullptr;
  }
  return module;
}
