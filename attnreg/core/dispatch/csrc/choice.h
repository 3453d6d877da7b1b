// The scoped choice in force for a thread or task, which `dispatch.scope` keeps in a context variable.

#pragma once

#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "functions.h"
#include "python.h"

namespace attnreg {

inline std::atomic<PyObject*> choices{nullptr};  // the context variable, once it may contain a choice

// The number of a choice; -1 where Python has to find out.
inline int64_t number_of_choice(PyObject* choice) {
  static PyObject* const attribute = PyUnicode_InternFromString("number");
  const Object number = owned(PyObject_GetAttr(choice, attribute));
  const int64_t value = number ? PyLong_AsLongLong(number.get()) : -1;
  PyErr_Clear();
  return value;
}

// The number of the choice in the context variable, or in a backward of that which `dispatch.scope` says is inherited;
// 0 for none, -1 where Python has to find out.
inline int64_t read_choice(PyObject* variable, bool in_backward) {
  const WithGil gil;
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable, Py_None, &value) != 0) {
    PyErr_Clear();
    return -1;
  }
  const Object choice = owned(value);
  if (value != Py_None) {
    return number_of_choice(value);
  }
  if (!in_backward) {
    return 0;
  }
  const Object scope = owned(PyImport_ImportModule("attnreg.core.dispatch.scope"));
  const Object inherited = owned(scope ? PyObject_CallMethod(scope.get(), "inherited_number", nullptr) : nullptr);
  const int64_t number = inherited ? PyLong_AsLongLong(inherited.get()) : -1;
  PyErr_Clear();
  return number;
}

// What a thread remembers of its choice, as taking the interpreter's lock costs more than the rest of looking a call up.
// It holds until the thread enters or leaves a choice, changes its context, which Python counts, or begins or ends a backward.
struct Remembered {
  uint64_t thread;  // its number, as another one's state may come to lie at the same address; 0 for nothing
  const PyObject* context;
  uint64_t context_version;
  int64_t graph_task;  // of the backward that this thread runs, or -1
  int64_t choice;
};

inline thread_local Remembered remembered{0, nullptr, 0, -1, 0};

// The number of the choice in force for this thread or task.
inline int64_t scoped_choice() {
  PyObject* variable = choices.load(std::memory_order_acquire);
  if (!variable) {
    return 0;
  }
  const PyThreadState* thread = PyGILState_GetThisThreadState();
  if (!thread) {
    return 0;  // a thread that Python doesn't know has entered nothing
  }
  const int64_t graph_task = torch::autograd::get_current_graph_task_id();
  Remembered& last = remembered;
  if (last.thread != thread->id || last.context != thread->context || last.context_version != thread->context_ver ||
      last.graph_task != graph_task) {
    const int64_t choice = read_choice(variable, graph_task != -1);
    last = {thread->id, thread->context, thread->context_ver, graph_task, choice};
  }
  return last.choice;
}

// ---- Calls in the block of a module: see `attnreg.assignment`

// What threads of autograd's inherit, by its key in the state that torch hands them: see `dispatch.scope`.
using State = at::impl::ThreadLocalPythonObjects;
inline bool is_inherited = false;
inline const std::string& kInherited = *new std::string("attnreg_choice");

// A choice, which is kept for good, or None, whose number is 0.
struct Choice {
  PyObject* object;
  int64_t number;
};

// What such a thread finds: this thread, a choice, and nothing that was inherited before.
inline std::shared_ptr<c10::SafePyObject> to_inherit(PyObject* choice) {
  PyObject* inherited = Py_BuildValue("(kOO)", PyThread_get_thread_ident(), choice, Py_None);
  if (!inherited) {
    throw_error_of_python();
  }
  return std::make_shared<c10::SafePyObject>(inherited, getPyInterpreter());
}

template <class Any>
void inherit_nothing() {
  if constexpr (requires { Any::erase(kInherited); }) {
    Any::erase(kInherited);
  } else {  // torch before 2.13
    Any::set(kInherited, to_inherit(Py_None));
  }
}

// A choice in force for this thread or task from `enter` to `leave`, both with the interpreter's lock. Nothing happens
// when the object ends: a daemon thread is unwound in the middle of a call when the interpreter ends, and has no lock then.
class Entered {
 public:
  Entered(PyObject* variable, Choice choice, int64_t graph_task)
      : variable_(variable), choice_(choice), graph_task_(graph_task), before_(remembered) {}
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

  void enter() {
    if (is_inherited) {
      if (State::contains(kInherited)) {
        inherited_ = new Inherited(State::get(kInherited));
      }
      State::set(kInherited, to_inherit(choice_.object));
    }
    token_ = PyContextVar_Set(variable_, choice_.object);
    if (!token_) {
      restore();
      throw_error_of_python();
    }
    const PyThreadState* thread = PyThreadState_Get();
    remembered = {thread->id, thread->context, thread->context_ver, graph_task_, choice_.number};
  }

  void leave() {
    PyObject *type = nullptr, *error = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &error, &traceback);
    if (PyContextVar_Reset(variable_, token_) != 0) {
      PyErr_WriteUnraisable(variable_);
    }
    Py_DECREF(token_);
    restore();
    PyErr_Restore(type, error, traceback);
  }

 private:
  using Inherited = std::shared_ptr<c10::SafePyObject>;

  // Whether this thread or task still has a choice, its own or inherited. What threads inherited before may be
  // another task's, whose method a greenlet has left open.
  bool has_choice() const {
    PyObject* value = nullptr;
    const bool has_own = PyContextVar_Get(variable_, Py_None, &value) == 0 && value != Py_None;
    Py_XDECREF(value);
    return has_own || torch::autograd::get_current_graph_task_id() != -1;
  }

  void restore() {
    remembered = before_;
    if (inherited_ && has_choice()) {
      State::set(kInherited, std::move(*inherited_));
    } else if (is_inherited) {
      inherit_nothing<State>();
    }
    delete inherited_;
    inherited_ = nullptr;
  }

  PyObject *variable_, *token_ = nullptr;
  Choice choice_;
  int64_t graph_task_;
  Remembered before_;
  Inherited* inherited_ = nullptr;
};

inline PyObject *compiler = nullptr, *dynamo_callback = nullptr;  // the names of `torch.compiler`; what Dynamo traces by

// Whether Dynamo may trace what this thread calls. After an error it never takes its evaluation of frames out.
inline bool is_dynamo_on() {
  if (_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == _PyEval_EvalFrameDefault) {
    return false;
  }
  const Object callback = owned(PyObject_CallNoArgs(dynamo_callback));
  if (!callback) {
    PyErr_Clear();
  }
  return callback.get() != Py_None;
}

// Whether Dynamo may trace what is called now, torch's other tracing is on, or a block of traced code is in force.
inline bool may_be_traced() {
  static PyObject* const flag = PyUnicode_InternFromString("_is_compiling_flag");
  return at::impl::PythonTorchFunctionTLS::stack_len() != 0 || PyDict_GetItemWithError(compiler, flag) != Py_False ||
      is_dynamo_on();
}

// The choice of the innermost block of a module, of number 0 in a block without; of number -1 where Python has to look.
inline Choice choice_of_module(PyObject* module) {
  static PyObject* const blocks_name = PyUnicode_InternFromString("_attnreg_blocks");
  static PyObject* const choice_name = PyUnicode_InternFromString("choice");
  const Object blocks = owned(PyObject_GenericGetAttr(module, blocks_name));
  const Py_ssize_t count = blocks && PyTuple_CheckExact(blocks.get()) ? PyTuple_GET_SIZE(blocks.get()) : 0;
  const Object choice = owned(count ? PyObject_GetAttr(PyTuple_GET_ITEM(blocks.get(), count - 1), choice_name) : nullptr);
  const int64_t number = !choice ? -1 : choice.get() == Py_None ? 0 : number_of_choice(choice.get());
  PyErr_Clear();
  return {choice.get(), number};
}

// Run a function of C++; false with an error of Python's where it throws.
template <class Run>
bool catching(const Run& run) {
  try {
    run();
    return true;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return false;
  }
}

// Calls `in_block` of `attnreg.assignment`: without its code, in a quarter of the time, where its result is the same.
inline PyObject* call_in_block(PyObject* in_block, PyObject* const* arguments, size_t count, PyObject* names) {
  PyObject* variable = choices.load(std::memory_order_acquire);
  if (!variable || PyVectorcall_NARGS(count) == 0 || may_be_traced()) {
    return call_as_written(in_block, arguments, count, names);
  }
  PyObject* run = PyCell_GET(PyTuple_GET_ITEM(PyFunction_GET_CLOSURE(in_block), 0));
  const Choice choice = run ? choice_of_module(arguments[0]) : Choice{nullptr, -1};
  const int64_t graph_task = torch::autograd::get_current_graph_task_id();
  // A backward may repeat a call in a checkpoint.
  if (choice.number < 0 || (choice.number == 0 && graph_task != -1)) {
    return call_as_written(in_block, arguments, count, names);
  }
  Entered entered(variable, choice, graph_task);
  if (choice.number != 0 && !catching([&] { entered.enter(); })) {
    return nullptr;
  }
  Py_INCREF(run);
  // Outside of any `catch`: see `Entered`.
  PyObject* result = PyObject_Vectorcall(run, arguments, count, names);
  Py_DECREF(run);
  if (choice.number != 0 && !catching([&] { entered.leave(); })) {
    Py_CLEAR(result);
  }
  return result;
}

// take_over(in_block): have calls of the function made here.
inline PyObject* take_over(PyObject*, PyObject* in_block) {
  PyObject* closure = PyFunction_Check(in_block) ? PyFunction_GET_CLOSURE(in_block) : nullptr;
  if (!closure || PyTuple_GET_SIZE(closure) != 1) {
    PyErr_SetString(PyExc_TypeError, "take_over: expected a function that uses one variable of the function around it");
    return nullptr;
  }
  have_called_by(in_block, call_in_block);
  Py_RETURN_NONE;
}

}  // namespace attnreg
