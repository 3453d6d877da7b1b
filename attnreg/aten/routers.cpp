// The routers' shortest way, compiled: calls that came before.
//
// A router written in Python takes the interpreter's lock and turns every argument into an object,
// which costs the host more than the decision. What stands here lies over that router and knows
// again the calls that it has answered. Those go straight to torch's own kernel, if it was that, or
// to the function that runs the backend's; every other call goes to the router as before, which alone
// decides. It tells what it has decided while the call is under way (the `accept...` functions), and
// what this file keeps of that is dropped whole, by `forget`, whenever settings, registrations or
// tables change.
//
// Three kinds of calls are known again:
//   - all of them, while nothing is registered;
//   - dense ones, by everything but the values of tensors;
//   - packed ones of `varlen_attn`, which announces each of them: forwards by the same, and by offsets
//     that were found to leave no row without a key; backwards by the tensor that such a forward hands
//     its backward, which no other call has.

#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Arguments = at::ArrayRef<c10::IValue>;
using Words = c10::SmallVector<int64_t, 96>;

constexpr size_t kMostKnown = 4096;  // as State keeps; then they start anew
constexpr size_t kMostOffsets = 64;  // as `packed` keeps

// ---- What is counted. A counter of attnreg's, and how often it went up since `drain` looked last.

struct Tally {
  PyObject* counter;  // held until `drain` finds that nothing counts there any more
  std::atomic<int64_t> times{0};
};

using Tallies = std::vector<std::shared_ptr<Tally>>;

void count(const Tallies& tallies) {
  for (const auto& tally : tallies) {
    tally->times.fetch_add(1, std::memory_order_relaxed);
  }
}

// ---- What is kept

struct Hash {
  size_t operator()(const Words& words) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (const int64_t word : words) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

// A function of Python's; none for torch's own kernel.
using Run = std::shared_ptr<PyObject>;

struct Way {  // how a call is answered
  Run run;
  Tallies tallies;
};

struct Sent {  // a forward of `varlen_attn`
  Words call;
  std::vector<c10::IValue> beside;  // what the op returns beside its results
  Way way;
};

struct Returned {  // the backward of one
  at::Tensor carrier;  // held, so that nothing else can come to lie where it does
  int64_t modes;
  Way way;
};

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Offsets {  // a pair that was found to leave no row without a key
  Weak queries, keys;
  decltype(at::Tensor()._version()) queries_version, keys_version;
  int64_t tokens_q, tokens_k;
  c10::Stream stream;  // another one doesn't wait for what was written on this one
};

struct Kept {
  uint64_t generation = 0;
  std::unordered_map<Words, std::shared_ptr<const Way>, Hash> known;
  std::unordered_map<int64_t, std::shared_ptr<Sent>> sent;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Returned>> returned;
  std::vector<Offsets> offsets;
  size_t oldest_offsets = 0;
  int64_t numbers = 0;  // given to what is sent
};

// None of it is ever destroyed: calls may come while the process ends.
std::shared_mutex& guard = *new std::shared_mutex;
Kept& kept = *new Kept;
auto& tallies = *new std::unordered_map<PyObject*, std::shared_ptr<Tally>>;
std::atomic<bool> enabled{true};
std::atomic<bool> passing{false};         // nothing is registered: every call is torch's
std::atomic<PyObject*> choices{nullptr};  // the context variable, once anybody has made a choice there

void open_after_fork() {
  new (&guard) std::shared_mutex;  // whoever held it is not in this process
}

class Locked {  // holds the interpreter's lock
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() {
    PyGILState_Release(state_);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

[[noreturn]] void throw_error_of_python() {
  python_error error;
  error.persist();
  throw error;
}

// ---- What is under way on a thread

// The number of what `varlen_attn` is about to call: 0 for nothing, negative if it has none.
thread_local int64_t announced = 0;

struct UnderWay {  // a call that the router in Python has
  uint64_t generation = 0;
  Words call;  // empty where it can't be known again
  UnderWay* outer = nullptr;
};

thread_local UnderWay* under_way = nullptr;

class Asking {  // makes a call the one under way for as long as this lives
 public:
  explicit Asking(UnderWay& call) {
    call.outer = under_way;
    under_way = &call;
  }
  ~Asking() {
    under_way = under_way->outer;
  }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;
};

// ---- What tells calls apart

c10::Stream stream_of(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

using IsCapturing = int (*)(void*, int*);

IsCapturing cuda_runtime() {
  // Torch has loaded it if it has one, under the name that it was built against.
  void* library = dlopen(ATTNREG_CUDART, RTLD_NOW | RTLD_NOLOAD);
  return library ? reinterpret_cast<IsCapturing>(dlsym(library, "cudaStreamIsCapturing")) : nullptr;
}

// Whether a CUDA graph is being captured; nothing where that can't be told.
std::optional<bool> capturing(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) {
    return false;
  }
  static const IsCapturing ask = cuda_runtime();
  int status = 0;
  if (!ask || ask(stream_of(tensor).native_handle(), &status) != 0) {
    return std::nullopt;
  }
  return status != 0;
}

int64_t modes() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() | context.deterministicAlgorithmsWarnOnly() << 1;
}

struct Place {  // an op below a dispatch key
  int64_t number;
  size_t query;     // where its arguments have the query; key and value follow
  int64_t carrier;  // where they have what a forward hands its backward; -1 in a forward
};

void describe(const at::Tensor& tensor, Words& words) {
  const auto device = tensor.device();
  words.append({static_cast<int64_t>(tensor.scalar_type()), static_cast<int64_t>(device.type()), device.index()});
  words.push_back(tensor.dim());
  words.append(tensor.sizes().begin(), tensor.sizes().end());
}

// Return everything about a call but for the values of tensors; nothing where that can't be told.
Words describe(const Place& place, Arguments arguments, bool packed) {
  enum { kAbsent, kTensor, kInt, kBool, kDouble };
  Words words{place.number};
  bool needs_gradient = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    const c10::IValue& argument = arguments[i];
    const bool present = argument.isTensor() && argument.toTensor().defined();
    if (i >= place.query && i < place.query + 3) {
      if (!present) {
        return {};
      }
      describe(argument.toTensor(), words);
      needs_gradient |= argument.toTensor().requires_grad();
    } else if (argument.isTensor() || argument.isNone()) {
      words.push_back(present ? kTensor : kAbsent);
    } else if (argument.isInt()) {
      words.append({kInt, argument.toInt()});
    } else if (argument.isBool()) {
      words.append({kBool, argument.toBool()});
    } else if (argument.isDouble()) {
      const double number = argument.toDouble();
      int64_t bits = 0;
      std::memcpy(&bits, &number, sizeof bits);
      words.append({kDouble, bits});
    } else {
      return {};
    }
  }
  const auto captured = capturing(arguments[place.query].toTensor());
  if (!captured) {
    return {};
  }
  const bool recording = c10::GradMode::is_enabled();
  words.append({modes(), *captured, packed ? recording && needs_gradient : recording | needs_gradient << 1});
  return words;
}

bool captured(const Words& call) {
  return call[call.size() - 2];
}

// Whether torch's kernel takes these as they are.
bool lie_well(Arguments arguments) {
  return std::all_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
    const at::Tensor& tensor = argument.toTensor();
    return tensor.defined() && tensor.is_contiguous() &&
        reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  });
}

bool leaves_a_trace_when_changed(const c10::IValue& argument) {
  return argument.isTensor() && argument.toTensor().defined() && !argument.toTensor().is_inference();
}

// Whether offsets were found to leave no row without a key, and are as they were; under the lock.
bool covered(const c10::IValue& of_queries, const c10::IValue& of_keys, int64_t tokens_q, int64_t tokens_k) {
  if (!leaves_a_trace_when_changed(of_queries) || !leaves_a_trace_when_changed(of_keys)) {
    return false;
  }
  const at::Tensor &queries = of_queries.toTensor(), &keys = of_keys.toTensor();
  const c10::Stream stream = stream_of(queries);
  return std::any_of(kept.offsets.begin(), kept.offsets.end(), [&](const Offsets& one) {
    return one.queries._unsafe_get_target() == queries.unsafeGetTensorImpl() && !one.queries.expired() &&
        one.keys._unsafe_get_target() == keys.unsafeGetTensorImpl() && !one.keys.expired() &&
        one.queries_version == queries._version() && one.keys_version == keys._version() &&
        one.tokens_q == tokens_q && one.tokens_k == tokens_k && one.stream == stream;
  });
}

// Whether a choice was made for this thread or task: what it means the router in Python knows.
bool chosen_for() {
  PyObject* variable = choices.load(std::memory_order_acquire);
  if (!variable) {
    return false;
  }
  const Locked lock;
  PyObject* choice = nullptr;
  const bool none = PyContextVar_Get(variable, Py_None, &choice) == 0 && choice == Py_None;
  PyErr_Clear();
  Py_XDECREF(choice);
  return !none;
}

// ---- The routers

struct Answer {  // what is known of a call
  bool passes = false;              // whether it is torch's, uncounted
  std::shared_ptr<const Way> way;   // how else it is answered; unknown if there is none
  std::shared_ptr<const Sent> sent; // if it is a forward of `varlen_attn`
  size_t taken = 0;                 // how many arguments a function of Python's takes
};

PyObject* to_python(const c10::IValue& value) {
  if (value.isTensor()) {
    return THPVariable_Wrap(value.toTensor());
  }
  Py_RETURN_NONE;
}

c10::IValue from_python(PyObject* value, const c10::TypePtr& type) {
  if (THPVariable_Check(value)) {
    return THPVariable_Unpack(value);
  }
  if (value == Py_None) {
    // Where a tensor is returned, which may be undefined, that is what None stands for.
    return type->kind() == c10::TypeKind::TensorType ? c10::IValue(at::Tensor()) : c10::IValue();
  }
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) {
    throw_error_of_python();
  }
  return static_cast<int64_t>(number);
}

// Append what a function of Python's returns for some tensors; false if that is None: it can't answer.
bool call_python(
    PyObject* run, Arguments given, const c10::FunctionSchema& schema, std::vector<c10::IValue>& results) {
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
  TORCH_INTERNAL_ASSERT(0 < count && count <= types.size(), schema.name(), " got ", count, " results");
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
    const int64_t number = std::exchange(announced, 0);
    if (!enabled.load(std::memory_order_relaxed)) {
      return pythons_.callBoxed(op, keys, stack);
    }
    UnderWay call;
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const Answer answer = look_up(arguments, number, call);
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
    const Run& run = answer.way->run;
    std::vector<c10::IValue> results;
    if (!run) {
      torchs_.callBoxed(op, keys, stack);
    } else if (call_python(run.get(), arguments.slice(0, answer.taken), op.schema(), results)) {
      torch::jit::drop(*stack, arguments.size());
      stack->insert(stack->end(), results.begin(), results.end());
    } else {
      return false;
    }
    if (answer.sent) {
      const auto& beside = answer.sent->beside;
      if (!run) {
        torch::jit::drop(*stack, beside.size());
      }
      stack->insert(stack->end(), beside.begin(), beside.end());
    }
    return true;
  }

  Answer look_up(Arguments arguments, int64_t number, UnderWay& call) const {
    if (place_.carrier >= 0) {
      const c10::IValue& carrier = arguments[place_.carrier];
      if (carrier.isTensor() && carrier.toTensor().defined() && carrier.toTensor().storage_offset() != 0) {
        return of_what_returns(arguments, carrier.toTensor(), call);
      }
    } else if (number == 0 && chosen_for()) {
      return {};
    }
    if (number == 0 && passing.load(std::memory_order_acquire)) {
      return {true};
    }
    call.call = describe(place_, arguments, number != 0);
    const std::shared_lock lock(guard);
    call.generation = kept.generation;
    if (call.call.empty()) {
      return {};
    }
    if (number != 0) {
      return of_what_is_sent(arguments, number, call.call);
    }
    const auto found = kept.known.find(call.call);
    // Those of a backward: the gradient, query, key, value, the output and the LSE.
    return found == kept.known.end() ? Answer{} : Answer{false, found->second, nullptr, place_.carrier < 0 ? 3u : 6u};
  }

  // Under the lock. An aten flash op's arguments begin with query, key, value and their offsets.
  static Answer of_what_is_sent(Arguments arguments, int64_t number, const Words& call) {
    const auto found = kept.sent.find(number);
    // A dispatch mode may have made another call of it.
    if (found == kept.sent.end() || captured(call) || found->second->call != call ||
        !(found->second->way.run || lie_well(arguments.slice(0, 3))) ||
        !covered(arguments[3], arguments[4], arguments[0].toTensor().size(0), arguments[1].toTensor().size(0))) {
      return {};
    }
    const auto& sent = found->second;
    return {false, {sent, &sent->way}, sent, 5};
  }

  // An aten flash backward's arguments begin with the gradient, query, key, value, output, LSE and offsets.
  static Answer of_what_returns(Arguments arguments, const at::Tensor& carrier, UnderWay& call) {
    std::shared_ptr<const Returned> known;
    {
      const std::shared_lock lock(guard);
      call.generation = kept.generation;
      const auto found = kept.returned.find(carrier.unsafeGetTensorImpl());
      known = found == kept.returned.end() ? nullptr : found->second;
    }
    if (!known || known->modes != modes() || capturing(arguments[1].toTensor()) != false ||
        !(known->way.run || lie_well(arguments.slice(0, 5)))) {
      return {};
    }
    return {false, {known, &known->way}, nullptr, 8};
  }

  Place place_;
  c10::SafeKernelFunction torchs_, pythons_;
};

struct Site {  // where a router is to lie
  std::string space, op;
  c10::OperatorName name;
  c10::DispatchKey key;
  Place place;
  c10::SafeKernelFunction torchs;
};

std::vector<Site>& sites = *new std::vector<Site>;
auto& libraries = *new std::vector<std::unique_ptr<torch::Library>>;

// ---- What Python calls, holding the interpreter's lock

const Tallies tallies_of(PyObject* counters) {
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

Way way_of(PyObject* run, PyObject* counters) {
  Way way{nullptr, tallies_of(counters)};
  if (run != Py_None) {
    Py_INCREF(run);
    way.run = Run(run, [](PyObject* one) {
      const Locked lock;
      Py_DECREF(one);
    });
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
  const c10::OperatorName name(std::string(space) + "::" + op, "");
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.name.c_str(), "");
  const auto where = c10::parseDispatchKey(key);
  const bool has_kernel = handle.hasKernelForDispatchKey(where);
  if (has_kernel) {
    const Place place{static_cast<int64_t>(sites.size()), static_cast<size_t>(query), carrier};
    sites.push_back({space, op, name, where, place, handle.getComputedKernelForDispatchKey(where)});
  }
  return PyBool_FromLong(has_kernel);
  END_HANDLE_TH_ERRORS
}

PyObject* cover_all(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  for (const Site& site : sites) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(site.name.name.c_str(), "");
    auto router = std::make_unique<Router>(
        site.place, site.torchs, handle.getComputedKernelForDispatchKey(site.key));
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
    kept.numbers = old.numbers;
  }
  Py_RETURN_NONE;
}

PyObject* watch(PyObject*, PyObject* variable) {
  Py_INCREF(variable);
  choices = variable;
  Py_RETURN_NONE;
}

PyObject* announce(PyObject*, PyObject* number) {
  announced = PyLong_AsLongLong(number);
  Py_RETURN_NONE;
}

PyObject* accept_passing(PyObject*, PyObject*) {
  const std::unique_lock lock(guard);
  if (to_be_kept()) {
    passing = true;
  }
  Py_RETURN_NONE;
}

PyObject* accept(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *run = nullptr, *counters = nullptr;
  if (!PyArg_ParseTuple(args, "OO!", &run, &PyTuple_Type, &counters)) {
    return nullptr;
  }
  auto way = std::make_shared<const Way>(way_of(run, counters));
  decltype(kept.known) dropped;
  const std::unique_lock lock(guard);
  const UnderWay* call = to_be_kept();
  if (call && !call->call.empty()) {
    if (kept.known.size() >= kMostKnown) {
      std::swap(kept.known, dropped);
    }
    std::swap(kept.known[call->call], way);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* accept_sent(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *run = nullptr, *counters = nullptr, *beside = nullptr;
  Py_ssize_t number = 0;
  if (!PyArg_ParseTuple(args, "nOO!O!", &number, &run, &PyTuple_Type, &counters, &PyTuple_Type, &beside)) {
    return nullptr;
  }
  auto sent = std::make_shared<Sent>();
  sent->way = way_of(run, counters);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(beside); i++) {
    sent->beside.emplace_back(THPVariable_Unpack(PyTuple_GET_ITEM(beside, i)));
  }
  decltype(kept.sent) dropped;
  decltype(kept.returned) their_backwards;
  const std::unique_lock lock(guard);
  const UnderWay* call = to_be_kept();
  if (call && !call->call.empty()) {
    if (kept.sent.size() >= kMostKnown) {
      std::swap(kept.sent, dropped);
      std::swap(kept.returned, their_backwards);
    }
    number = number > 0 ? number : ++kept.numbers;
    sent->call = call->call;
    std::swap(kept.sent[number], sent);
  }
  return PyLong_FromSsize_t(number);
  END_HANDLE_TH_ERRORS
}

PyObject* accept_returned(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *carrier = nullptr, *run = nullptr, *counters = nullptr;
  if (!PyArg_ParseTuple(args, "OOO!", &carrier, &run, &PyTuple_Type, &counters)) {
    return nullptr;
  }
  auto returned = std::make_shared<Returned>(THPVariable_Unpack(carrier), modes(), way_of(run, counters));
  const c10::TensorImpl* known_by = returned->carrier.unsafeGetTensorImpl();
  const std::unique_lock lock(guard);
  if (to_be_kept()) {
    std::swap(kept.returned[known_by], returned);
  }
  Py_RETURN_NONE;
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
    {"announce", announce, METH_O, "Say what `varlen_attn` is about to call, by its number; -1 if it has none, 0 for nothing."},
    {"accept_passing", accept_passing, METH_NOARGS, "The call under way is torch's, as is every other."},
    {"accept", accept, METH_VARARGS, "A function answers the call under way, or None: torch; and what to count."},
    {"accept_sent", accept_sent, METH_VARARGS, "So it is, of `varlen_attn`; returns its number."},
    {"accept_returned", accept_returned, METH_VARARGS, "So is the backward of one, known by its carrier."},
    {"accept_offsets", accept_offsets, METH_VARARGS, "Offsets leave no row without a key."},
    {"drain", drain, METH_NOARGS, "Return what was counted since the last time, and by which counters."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "attnreg_routers", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_attnreg_routers() {
  pthread_atfork(nullptr, nullptr, open_after_fork);
  return PyModule_Create(&definition);
}
