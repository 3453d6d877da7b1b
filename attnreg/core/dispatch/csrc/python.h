// What passes between C++ and Python.

#pragma once

#include <Python.h>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <vector>

namespace attnreg {

class WithGil {  // takes the interpreter's lock
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() {
    PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

class WithoutGil {  // lets go of it
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    PyEval_RestoreThread(thread_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

using Object = std::shared_ptr<PyObject>;

// An object that goes in whatever thread its last user ends.
inline Object held(PyObject* object) {
  Py_INCREF(object);
  return Object(object, [](PyObject* each) {
    const WithGil gil;
    Py_DECREF(each);
  });
}

// A new reference, dropped with the lock.
inline Object owned(PyObject* object) {
  return Object(object, Py_DecRef);
}

[[noreturn]] inline void throw_error_of_python() {
  python_error error;
  error.persist();
  throw error;
}

inline std::vector<int64_t> numbers_of(PyObject* tuple) {
  std::vector<int64_t> numbers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
    numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
  }
  if (PyErr_Occurred()) {
    throw_error_of_python();
  }
  return numbers;
}

// A new reference to a tuple of numbers.
inline PyObject* tuple_of(c10::ArrayRef<int64_t> numbers) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t i = 0; i < numbers.size(); i++) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
  }
  return tuple;
}

inline PyObject* to_python(const c10::IValue& value) {
  if (value.isTensor()) {
    return THPVariable_Wrap(value.toTensor());
  }
  if (value.isBool()) {
    return PyBool_FromLong(value.toBool());
  }
  if (value.isInt()) {
    return PyLong_FromLongLong(value.toInt());
  }
  if (value.isDouble()) {
    return PyFloat_FromDouble(value.toDouble());
  }
  TORCH_CHECK(value.isNone(), "attnreg: got an argument of type ", value.tagKind());
  Py_RETURN_NONE;
}

// A value as an op's schema has it.
inline c10::IValue from_python(PyObject* value, const c10::TypePtr& type) {
  if (THPVariable_Check(value)) {
    return THPVariable_Unpack(value);
  }
  const auto optional = type->cast<c10::OptionalType>();
  const auto kind = (optional ? optional->getElementType() : type)->kind();
  if (value == Py_None) {
    // Where there has to be a tensor, which may be undefined, that is what None stands for.
    return type->kind() == c10::TypeKind::TensorType ? c10::IValue(at::Tensor()) : c10::IValue();
  }
  if (PyBool_Check(value)) {
    return value == Py_True;
  }
  if (PyFloat_Check(value) || (PyLong_Check(value) && kind == c10::TypeKind::FloatType)) {
    return PyFloat_AsDouble(value);
  }
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) {
    throw_error_of_python();
  }
  return static_cast<int64_t>(number);
}

// The tensor that an object of Python's is. What it is instead may be what a kernel has returned.
inline const at::Tensor& tensor_of(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "attnreg: a kernel returned a ", Py_TYPE(object)->tp_name, ", expected a tensor");
  return THPVariable_Unpack(object);
}

// Call a function; the caller has the lock.
inline Object call_python(PyObject* function, const std::vector<Object>& arguments) {
  std::vector<PyObject*> pointers;
  for (const Object& each : arguments) {
    if (!each) {
      throw_error_of_python();
    }
    pointers.push_back(each.get());
  }
  Object returned = owned(PyObject_Vectorcall(function, pointers.data(), pointers.size(), nullptr));
  if (!returned) {
    throw_error_of_python();
  }
  return returned;
}

}  // namespace attnreg
