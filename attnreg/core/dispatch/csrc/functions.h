// Functions of Python's whose calls C++ makes, in less time. Dynamo traces their code, so their results must be the same.

#pragma once

#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>

namespace attnreg {

inline vectorcallfunc call_as_written = nullptr;  // calls a function of Python's: the same for all of them

inline void have_called_by(PyObject* function, vectorcallfunc call) {
  auto* written = reinterpret_cast<PyFunctionObject*>(function);
  if (written->vectorcall == call) {
    return;
  }
  call_as_written = written->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(written, call);
#else
  written->vectorcall = call;
#endif
}

// Whether a call of SDPA has a mask, by place or by name. `count` arguments have places; the first is the replacement.
inline bool has_mask(PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  constexpr Py_ssize_t place = 4;  // after the replacement, query, key and value
  static PyObject* const name = PyUnicode_InternFromString("attn_mask");
  if (count > place) {
    return arguments[place] != Py_None;
  }
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
    if (PyUnicode_Compare(PyTuple_GET_ITEM(names, i), name) == 0) {
      return arguments[count + i] != Py_None;
    }
  }
  return false;
}

// Calls `looking` of `aten.bypassed`. A call of SDPA without a mask goes to torch's function at once, unless somebody
// observes calls, or a function mode has to see them.
inline PyObject* call_looking(PyObject* looking, PyObject* const* arguments, size_t flags, PyObject* names) {
  static PyObject* const observes = PyUnicode_InternFromString("_observes");
  static PyObject* const torchs = PyUnicode_InternFromString("_run");
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  const bool is_plain = count > 0 && !has_mask(arguments, count, names) &&
      at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
      PyDict_GetItemWithError(PyFunction_GET_GLOBALS(looking), observes) == Py_False;
  PyObject* run = is_plain ? PyObject_GenericGetAttr(arguments[0], torchs) : nullptr;
  if (!run) {
    PyErr_Clear();
    return call_as_written(looking, arguments, flags, names);
  }
  PyObject* result = PyObject_Vectorcall(run, arguments + 1, static_cast<size_t>(count) - 1, names);
  Py_DECREF(run);
  return result;
}

// pass_unmasked(looking): have calls of the function made here.
inline PyObject* pass_unmasked(PyObject*, PyObject* looking) {
  if (!PyFunction_Check(looking)) {
    PyErr_SetString(PyExc_TypeError, "pass_unmasked: expected a function of Python's");
    return nullptr;
  }
  have_called_by(looking, call_looking);
  Py_RETURN_NONE;
}

}  // namespace attnreg
