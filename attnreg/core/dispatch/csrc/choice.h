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
#include <unordered_map>
#include <utility>

#include "python.h"

namespace attnreg {

inline std::atomic<PyObject*> choices{nullptr};  // the context variable, once it may contain a choice

// The number of a choice; -1 where Python has to find out.
inline int64_t number_of_choice(PyObject* choice) {
  static PyObject* const attribute = PyUnicode_InternFromString("number");
  const Object number = owned(PyObject_GetAttr(choice, attribute));
  const int64_t found = number ? PyLong_AsLongLong(number.get()) : -1;
  PyErr_Clear();
  return found;
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

struct Choice {
  PyObject* object;
  int64_t number;
  std::shared_ptr<c10::SafePyObject> inherited;  // what such a thread finds. It names no thread: a method runs no other task
};

// What is known of a choice, or of None; null for what is neither. It is kept as the choice is: for good.
inline const Choice* find_choice(PyObject* object) {
  static auto& known = *new std::unordered_map<PyObject*, Choice>;  // under the interpreter's lock
  const auto found = known.find(object);
  if (found != known.end()) {
    return &found->second;
  }
  const int64_t number = object == Py_None ? 0 : number_of_choice(object);
  if (number < 0) {
    return nullptr;
  }
  PyObject* inherited = Py_BuildValue("(iOO)", -1, object, Py_None);
  if (!inherited) {
    throw_error_of_python();
  }
  auto kept = std::make_shared<c10::SafePyObject>(inherited, getPyInterpreter());
  return &known.emplace(object, Choice{object, number, std::move(kept)}).first->second;
}

template <class Any>
void inherit_nothing() {
  if constexpr (requires { Any::erase(kInherited); }) {
    Any::erase(kInherited);
  } else {  // torch before 2.13
    Any::set(kInherited, find_choice(Py_None)->inherited);
  }
}

// A choice in force for this thread or task while the object lives; whoever makes it has the interpreter's lock.
class Entered {
 public:
  Entered(PyObject* variable, const Choice& choice, int64_t graph_task) : variable_(variable), before_(remembered) {
    if (is_inherited) {
      inherited_ = State::contains(kInherited) ? State::get(kInherited) : nullptr;
      State::set(kInherited, choice.inherited);
    }
    token_ = PyContextVar_Set(variable, choice.object);
    if (!token_) {
      restore();
      throw_error_of_python();
    }
    const PyThreadState* thread = PyThreadState_Get();
    remembered = {thread->id, thread->context, thread->context_ver, graph_task, choice.number};
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

  ~Entered() {
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
      State::set(kInherited, std::move(inherited_));
    } else if (is_inherited) {
      inherit_nothing<State>();
    }
  }

  PyObject *variable_, *token_ = nullptr;
  Remembered before_;
  std::shared_ptr<c10::SafePyObject> inherited_;
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

// The choice of the innermost block of a module, of number 0 in a block without; null where Python has to look.
inline const Choice* choice_of_module(PyObject* module) {
  static PyObject* const blocks_name = PyUnicode_InternFromString("_attnreg_blocks");
  static PyObject* const choice_name = PyUnicode_InternFromString("choice");
  PyObject* blocks = PyObject_GenericGetAttr(module, blocks_name);
  const Py_ssize_t count = blocks && PyTuple_CheckExact(blocks) ? PyTuple_GET_SIZE(blocks) : 0;
  PyObject* choice = count ? PyObject_GetAttr(PyTuple_GET_ITEM(blocks, count - 1), choice_name) : nullptr;
  const Choice* found = choice ? find_choice(choice) : nullptr;
  Py_XDECREF(choice);
  Py_XDECREF(blocks);
  if (!found) {
    PyErr_Clear();
  }
  return found;
}

inline vectorcallfunc call_as_written = nullptr;  // calls a function of Python's

// Calls `in_block` of `attnreg.assignment`: without its code, in a quarter of the time, where its result is the same.
inline PyObject* call_in_block(PyObject* in_block, PyObject* const* arguments, size_t count, PyObject* names) {
  PyObject* variable = choices.load(std::memory_order_acquire);
  if (!variable || PyVectorcall_NARGS(count) == 0 || may_be_traced()) {
    return call_as_written(in_block, arguments, count, names);
  }
  try {
    PyObject* run = PyCell_GET(PyTuple_GET_ITEM(PyFunction_GET_CLOSURE(in_block), 0));
    const Choice* choice = choice_of_module(arguments[0]);
    const int64_t graph_task = torch::autograd::get_current_graph_task_id();
    if (choice && choice->number != 0) {
      const Entered entered(variable, *choice, graph_task);
      return PyObject_Vectorcall(run, arguments, count, names);
    }
    if (choice && graph_task == -1) {  // a backward may repeat a call in a checkpoint
      return PyObject_Vectorcall(run, arguments, count, names);
    }
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return call_as_written(in_block, arguments, count, names);
}

// take_over(in_block): have calls of the function made here.
inline PyObject* take_over(PyObject*, PyObject* given) {
  PyObject* closure = PyFunction_Check(given) ? PyFunction_GET_CLOSURE(given) : nullptr;
  if (!closure || PyTuple_GET_SIZE(closure) != 1) {
    PyErr_SetString(PyExc_TypeError, "take_over: expected a function that uses one variable of the function around it");
    return nullptr;
  }
  auto* in_block = reinterpret_cast<PyFunctionObject*>(given);
  if (in_block->vectorcall != call_in_block) {
    call_as_written = in_block->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
    PyFunction_SetVectorcall(in_block, call_in_block);
#else
    in_block->vectorcall = call_in_block;
#endif
  }
  Py_RETURN_NONE;
}

}  // namespace attnreg
