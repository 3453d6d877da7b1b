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

// Whether a call of SDPA has a mask, by place or by name.
inline bool has_mask(PyObject* arguments, PyObject* named) {
  constexpr Py_ssize_t place = 3;  // after query, key and value
  static PyObject* const name = PyUnicode_InternFromString("attn_mask");
  if (PyTuple_GET_SIZE(arguments) > place) {
    return PyTuple_GET_ITEM(arguments, place) != Py_None;
  }
  PyObject* mask = named ? PyDict_GetItemWithError(named, name) : nullptr;
  return mask && mask != Py_None;
}

inline ternaryfunc call_by_class = nullptr;  // calls an object by the `__call__` of its class
inline PyObject *torchs_sdpa = nullptr, *names_of_bypassed = nullptr;

// Calls the object in the place of SDPA: see `aten.bypassed`. A call without a mask goes to torch's function at once,
// unless somebody observes calls, or a function mode has to see them. The tuple and the dict are passed on without a copy.
inline PyObject* call_unmasked(PyObject* looking, PyObject* arguments, PyObject* named) {
  static PyObject* const observes = PyUnicode_InternFromString("_observes");
  const bool is_plain = !has_mask(arguments, named) && at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
      PyDict_GetItemWithError(names_of_bypassed, observes) == Py_False;
  return is_plain ? PyObject_Call(torchs_sdpa, arguments, named) : call_by_class(looking, arguments, named);
}

// pass_unmasked(class, torchs, names): have the object of the class called here; torch's function, which it replaces;
// the names of `aten.bypassed`.
inline PyObject* pass_unmasked(PyObject*, PyObject* args) {
  PyObject *looking = nullptr, *torchs = nullptr, *names = nullptr;
  if (!PyArg_ParseTuple(args, "O!OO!", &PyType_Type, &looking, &torchs, &PyDict_Type, &names)) {
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(looking);
  if (type->tp_call != call_unmasked) {
    Py_INCREF(torchs);
    Py_INCREF(names);
    torchs_sdpa = torchs;
    names_of_bypassed = names;
    call_by_class = type->tp_call;
    type->tp_call = call_unmasked;  // `__call__`, which Dynamo traces, stays what it is
  }
  Py_RETURN_NONE;
}

}  // namespace attnreg
