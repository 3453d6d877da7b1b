// Compiled routers: calls that came before.
//
// A router written in Python takes the interpreter's lock and turns every argument into an object,
// which costs the host more than the decision. What stands here lies over that router and knows
// again the calls that it has answered. Those go straight to torch's own kernel, if it was that, or
// to the function that runs the backend's; every other call goes to the router as before, which alone
// decides. It tells what it has decided while the call is under way (the `accept...` functions), and
// what is kept of that is dropped whole, by `forget`, whenever settings, registrations or
// tables change.
//
// Three kinds of calls are known again:
//   - all of them, while nothing is registered;
//   - dense ones, by everything but the values of tensors;
//   - packed ones of `varlen_attn`, which announces each of them: forwards by the same, and by offsets
//     that were found to leave no row without a key; backwards by the same, and by the tensor that such a
//     forward hands its backward, which no other call has.
//
// `kept.h` has what is kept, `calls.h` what tells calls apart, `router.h` the routers. Beside it: `turned.h` is
// for tensors with the heads first, `addresses.h` for kernels run on addresses, `op_calls.h` for torch's own. `front.h`
// has the way of `varlen_attn` to them; here is what Python calls, always holding the interpreter's lock.

#include <Python.h>
#include <pthread.h>

#include <torch/csrc/Dtype.h>

#include "front.h"

namespace attnreg {
namespace {

struct Site {  // where a router is to lie
  std::string space, op;
  c10::OperatorHandle handle;
  c10::DispatchKey key;
  Place place;
  c10::SafeKernelFunction torchs;
};

std::vector<Site>& sites = *new std::vector<Site>;
auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>;

Tallies tallies_of(PyObject* counters) {
  Tallies found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(counters); i++) {
    PyObject* counter = PyTuple_GET_ITEM(counters, i);
    auto& tally = tallies[counter];
    if (!tally) {
      Py_INCREF(counter);
      tally = std::make_shared<Tally>(counter);
    }
    found.push_back(tally);
  }
  return found;
}

Object held(PyObject* object) {
  Py_INCREF(object);
  return Object(object, [](PyObject* one) {
    const Locked lock;
    Py_DECREF(one);
  });
}

std::vector<int64_t> numbers_of(PyObject* tuple) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
    found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
  }
  if (PyErr_Occurred()) {
    throw_error_of_python();
  }
  return found;
}

// An `AddressCall` of Python's, as that describes itself.
std::shared_ptr<const AddressCall> address_call(PyObject* described) {
  PyObject *launch = nullptr, *operands = nullptr, *results = nullptr, *lse_strides = nullptr, *derive = nullptr;
  Py_ssize_t workspace = 0;
  if (!PyArg_ParseTuple(described, "OO!O!nOO", &launch, &PyTuple_Type, &operands, &PyTuple_Type, &results, &workspace,
                        &lse_strides, &derive)) {
    throw_error_of_python();
  }
  auto call = std::make_shared<AddressCall>();
  call->launch = held(launch);
  for (const int64_t number : numbers_of(operands)) {
    call->operands.push_back(static_cast<size_t>(number));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); i++) {
    PyObject *sizes = nullptr, *strides = nullptr, *dtype = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(results, i), "O!O!O!", &PyTuple_Type, &sizes, &PyTuple_Type, &strides,
                          &THPDtypeType, &dtype)) {
      throw_error_of_python();
    }
    call->results.push_back({numbers_of(sizes), numbers_of(strides), reinterpret_cast<THPDtype*>(dtype)->scalar_type});
  }
  call->workspace = workspace;
  if (lse_strides != Py_None) {
    call->lse_strides = numbers_of(lse_strides);
  }
  if (derive != Py_None) {
    call->derive = held(derive);
  }
  return call;
}

// How a call is answered: by a function of Python's, an `AddressCall` as it describes itself, or torch's kernel (None).
Way way_of(PyObject* run, PyObject* counters) {
  Way way{nullptr, tallies_of(counters)};
  if (PyTuple_Check(run)) {
    way.addresses = address_call(run);
  } else if (run != Py_None) {
    way.run = held(run);
  }
  return way;
}

// The call under way, if what is decided about it may be kept: not if anything has changed since.
// Under the lock. What is replaced there goes after it: whatever held it may do anything then.
const UnderWay* to_be_kept() {
  return under_way && under_way->generation == kept.generation ? under_way : nullptr;
}

PyObject* capture(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *space = nullptr, *op = nullptr, *key = nullptr;
  Py_ssize_t query = 0, carrier = 0;
  if (!PyArg_ParseTuple(args, "sssnn", &space, &op, &key, &query, &carrier)) {
    return nullptr;
  }
  const std::string name = std::string(space) + "::" + op;
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
  const auto where = c10::parseDispatchKey(key);
  const bool has_kernel = handle.hasKernelForDispatchKey(where);
  if (has_kernel) {
    const Place place{static_cast<int64_t>(sites.size()), static_cast<size_t>(query), carrier};
    sites.push_back({space, op, handle, where, place, handle.getComputedKernelForDispatchKey(where)});
  }
  return PyBool_FromLong(has_kernel);
  END_HANDLE_TH_ERRORS
}

PyObject* cover_all(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  for (const Site& site : sites) {
    auto router = std::make_unique<Router>(
        site.place, site.torchs, site.handle.getComputedKernelForDispatchKey(site.key));
    auto library =
        std::make_unique<torch::Library>(torch::Library::IMPL, site.space, site.key, __FILE__, __LINE__);
    library->impl(site.op.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(router)));
    libraries.push_back(std::move(library));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* uncover(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  libraries.clear();
  sites.clear();
  destination.reset();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* enable(PyObject*, PyObject* on) {
  enabled = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

PyObject* forget(PyObject*, PyObject*) {
  Kept old;  // goes when nobody waits for it any more
  {
    const std::unique_lock lock(guard);
    passing = false;
    std::swap(old, kept);
    kept.generation = old.generation + 1;
  }
  Py_RETURN_NONE;
}

PyObject* watch(PyObject*, PyObject* variable) {
  Py_INCREF(variable);
  choices = variable;
  Py_RETURN_NONE;
}

PyObject* announce(PyObject*, PyObject* what) {
  announced = PyLong_AsLongLong(what);
  Py_RETURN_NONE;
}

PyObject* accept_passing(PyObject*, PyObject*) {
  const std::unique_lock lock(guard);
  if (to_be_kept()) {
    passing = true;
  }
  Py_RETURN_NONE;
}

// Keep how the call under way is answered, if it may be kept.
void keep(Way answered) {
  auto way = std::make_shared<const Way>(std::move(answered));
  decltype(kept.known) dropped;
  const std::unique_lock lock(guard);
  const UnderWay* call = to_be_kept();
  // What is known by a carrier holds it, as another may come to lie there.
  if (call && !call->call.empty() && carrier_of(call->call) == way->carrier.unsafeGetTensorImpl()) {
    if (kept.known.size() >= kMostKnown) {
      std::swap(kept.known, dropped);
    }
    std::swap(kept.known[call->call], way);
  }
}

PyObject* accept(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *run = nullptr, *counters = nullptr;
  if (!PyArg_ParseTuple(args, "OO!", &run, &PyTuple_Type, &counters)) {
    return nullptr;
  }
  keep(way_of(run, counters));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* accept_sent(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *run = nullptr, *counters = nullptr, *beside = nullptr;
  int saved = 0;
  if (!PyArg_ParseTuple(args, "OO!O!p", &run, &PyTuple_Type, &counters, &PyTuple_Type, &beside, &saved)) {
    return nullptr;
  }
  Way way = way_of(run, counters);
  way.saved = saved != 0 && way.addresses;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(beside); i++) {
    way.beside.emplace_back(THPVariable_Unpack(PyTuple_GET_ITEM(beside, i)));
  }
  keep(std::move(way));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* accept_returned(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *carrier = nullptr, *run = nullptr, *counters = nullptr;
  if (!PyArg_ParseTuple(args, "OOO!", &carrier, &run, &PyTuple_Type, &counters)) {
    return nullptr;
  }
  Way way = way_of(run, counters);
  way.carrier = THPVariable_Unpack(carrier);
  keep(std::move(way));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Keep a way of a call under way whose tensors have the heads first, and what it returns beside the results.
void keep_turned(Way way, PyObject* beside) {
  const auto& types = under_way->schema->returns();
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(beside));
  TORCH_CHECK(count < types.size(), "attnreg: ", under_way->schema->name(), " got ", count, " results beside others");
  for (size_t i = 0; i < count; i++) {
    PyObject* one = PyTuple_GET_ITEM(beside, static_cast<Py_ssize_t>(i));
    way.beside.push_back(from_python(one, types[types.size() - count + i].type()));
  }
  way.turned = true;
  keep(std::move(way));
}

PyObject* accept_turned(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *run = nullptr, *counters = nullptr, *beside = nullptr;
  if (!PyArg_ParseTuple(args, "OO!O!", &run, &PyTuple_Type, &counters, &PyTuple_Type, &beside)) {
    return nullptr;
  }
  if (under_way) {
    keep_turned(way_of(run, counters), beside);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* accept_op(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *op = nullptr, *key = nullptr;
  PyObject *rest = nullptr, *options = nullptr, *counters = nullptr, *beside = nullptr;
  Py_ssize_t results = 0;
  if (!PyArg_ParseTuple(
          args, "ssO!O!nO!O!", &op, &key, &PyTuple_Type, &rest, &PyDict_Type, &options, &results, &PyTuple_Type,
          &counters, &PyTuple_Type, &beside)) {
    return nullptr;
  }
  const auto site = std::find_if(sites.begin(), sites.end(), [&](const Site& one) {
    return one.op == op && one.key == c10::parseDispatchKey(key);
  });
  if (site == sites.end()) {
    Py_RETURN_FALSE;
  }
  if (under_way) {
    Way way = way_of(Py_None, counters);
    way.another = std::make_shared<const OpCall>(
        site->handle, site->torchs, behind_tensors(site->handle.schema(), under_way->tensors, rest, options),
        static_cast<size_t>(results));
    keep_turned(std::move(way), beside);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* accept_offsets(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *of_queries = nullptr, *of_keys = nullptr;
  Py_ssize_t tokens_q = 0, tokens_k = 0;
  if (!PyArg_ParseTuple(args, "OOnn", &of_queries, &of_keys, &tokens_q, &tokens_k)) {
    return nullptr;
  }
  const at::Tensor queries = THPVariable_Unpack(of_queries), keys = THPVariable_Unpack(of_keys);
  const std::unique_lock lock(guard);
  if (to_be_kept() && leaves_a_trace_when_changed(queries) && leaves_a_trace_when_changed(keys) &&
      !covered(queries, keys, tokens_q, tokens_k)) {
    Offsets found{
        Weak(queries.getIntrusivePtr()), Weak(keys.getIntrusivePtr()), queries._version(), keys._version(),
        tokens_q, tokens_k, stream_of(queries)};
    if (kept.offsets.size() < kMostOffsets) {
      kept.offsets.push_back(std::move(found));
    } else {
      kept.offsets[kept.oldest_offsets++ % kMostOffsets] = std::move(found);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* lead_to(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* op = nullptr;
  PyObject* scope = nullptr;
  if (!PyArg_ParseTuple(args, "sO", &op, &scope)) {
    return nullptr;
  }
  Py_INCREF(scope);  // there is one for as long as the process lives
  destination = Destination{c10::Dispatcher::singleton().findSchemaOrThrow(op, ""), scope};
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* accept_sending(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *known_by = nullptr, *own = nullptr, *rest = nullptr, *options = nullptr;
  if (!PyArg_ParseTuple(
          args, "O!OO!O!", &PyBytes_Type, &known_by, &own, &PyTuple_Type, &rest, &PyDict_Type, &options)) {
    return nullptr;
  }
  const auto* begin = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(known_by));
  const Words words(begin, begin + PyBytes_GET_SIZE(known_by) / sizeof *begin);
  if (!destination) {
    Py_RETURN_NONE;  // the routers were taken out meanwhile
  }
  auto sending = std::make_shared<const Sending>(held(own), behind_tensors(destination->op.schema(), kTensors, rest, options));
  decltype(kept.sendings) dropped;
  const std::unique_lock lock(guard);
  if (!words.empty() && words[0] == static_cast<int64_t>(kept.generation)) {  // nothing has changed since
    if (kept.sendings.size() >= kMostKnown) {
      std::swap(kept.sendings, dropped);
    }
    std::swap(kept.sendings[words], sending);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* drain(PyObject*, PyObject*) {
  // First without Python, which may run anything while it makes objects.
  std::vector<std::pair<PyObject*, int64_t>> counted;
  for (auto at = tallies.begin(); at != tallies.end();) {
    const auto& [counter, tally] = *at;
    const bool in_use = tally.use_count() > 1;
    const int64_t times = tally->times.exchange(0, std::memory_order_relaxed);
    counted.emplace_back(counter, times);
    if (in_use) {
      Py_INCREF(counter);
      ++at;
    } else {
      at = tallies.erase(at);
    }
  }
  PyObject* found = PyList_New(0);
  for (const auto& [counter, times] : counted) {
    PyObject* row = found && times != 0 ? Py_BuildValue("(OL)", counter, static_cast<long long>(times)) : nullptr;
    if (row && PyList_Append(found, row) != 0) {
      Py_CLEAR(found);
    }
    Py_XDECREF(row);
    Py_DECREF(counter);
  }
  return PyErr_Occurred() ? nullptr : found;
}

PyMethodDef functions[] = {
    {"capture", capture, METH_VARARGS, "Capture torch's kernel of an op below a key; whether there is one."},
    {"cover", cover_all, METH_NOARGS, "Lay routers over those in Python, for all that was captured."},
    {"uncover", uncover, METH_NOARGS, "Take them out again."},
    {"enable", enable, METH_O, "Let them answer calls, or pass all to those in Python."},
    {"forget", forget, METH_NOARGS, "Drop what calls are known by."},
    {"watch", watch, METH_O, "Look at a context variable before a forward: it may hold a choice."},
    {"announce", announce, METH_O, "Say what `varlen_attn` is about to call: 1 what it knows, -1 what it doesn't, 0 nothing."},
    {"accept_passing", accept_passing, METH_NOARGS, "The call under way is torch's, as is every other."},
    {"accept", accept, METH_VARARGS, "A function answers the call under way, or None: torch; and what to count."},
    {"accept_turned", accept_turned, METH_VARARGS, "A function does, given tensors with the heads turned; and what is returned beside."},
    {"accept_op", accept_op, METH_VARARGS, "So does a kernel of torch's, if it was captured: its op and key, arguments behind tensors, how many results count."},
    {"accept_sent", accept_sent, METH_VARARGS, "So it is, of `varlen_attn`; what is returned beside the results; whether autograd may save what a kernel run on addresses returns."},
    {"accept_returned", accept_returned, METH_VARARGS, "So is the backward of one, known by its carrier."},
    {"accept_offsets", accept_offsets, METH_VARARGS, "Offsets leave no row without a key."},
    {"lead_to", lead_to, METH_VARARGS, "Send what `varlen` is given to an op, with its scope in a context variable."},
    {"varlen", reinterpret_cast<PyCFunction>(varlen), METH_FASTCALL, "Output and LSE of a call of `varlen_attn` that came before, or what it is known by, or None."},
    {"accept_sending", accept_sending, METH_VARARGS, "A call is sent so: what it is known by, its scope, and the op's arguments behind the tensors."},
    {"drain", drain, METH_NOARGS, "Return what was counted since the last time, and by which counters."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "attnreg_routers", nullptr, -1, functions};

}  // namespace
}  // namespace attnreg

PyMODINIT_FUNC PyInit_attnreg_routers() {
  pthread_atfork(nullptr, nullptr, attnreg::open_after_fork);
  return PyModule_Create(&attnreg::definition);
}
