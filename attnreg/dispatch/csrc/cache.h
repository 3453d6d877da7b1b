// The call cache: by the key of a call, the launcher that runs it.

#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/graph_task.h>

#include "launchers.h"

namespace attnreg {

constexpr size_t kMostEntries = 4096;  // as `dispatch.state` has; then all are kept anew
constexpr size_t kMostOffsets = 64;    // as `contract.offsets` has

// ---- What is counted: a counter of Python's, and how often it went up since `drain` looked last.

struct Tally {
  PyObject* counter;  // kept alive until `drain` finds that nothing counts there any more
  std::atomic<int64_t> times{0};
};

using Tallies = std::vector<std::shared_ptr<Tally>>;

inline auto& all_tallies = *new std::unordered_map<PyObject*, std::shared_ptr<Tally>>;  // under the interpreter's lock

inline Tallies tallies_of(PyObject* counters) {
  Tallies found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(counters); i++) {
    PyObject* counter = PyTuple_GET_ITEM(counters, i);
    auto& tally = all_tallies[counter];
    if (!tally) {
      Py_INCREF(counter);
      tally = std::make_shared<Tally>(counter);
    }
    found.push_back(tally);
  }
  return found;
}

// ---- What is kept

struct Entry {  // how a call is run: by one of the three, or by torch's own kernel of the op
  Object python;
  std::shared_ptr<const OpLauncher> op;
  std::shared_ptr<const AddressLauncher> addresses;
  Tallies tallies;
  Object decline_reason;  // counts an error, and returns None unless the backend declines the call with it
  bool is_final = true;
  bool counts_sinks = false;             // whether the launcher is given sinks; if not, results are rescaled
  bool needs_offsets = false;            // only with offsets of which it is known that every row sees a key
  std::vector<c10::IValue> auxiliary{};  // what an aten op returns behind the kernel's results: numbers and models
  mutable std::atomic<uint32_t> uses{0};

  bool is_native() const {
    return !python && !op && !addresses;
  }

  // Whether Python is to be asked for a better launcher: after the first, second, fourth use and so on.
  bool is_due() const {
    const uint32_t used = is_final ? 0 : uses.fetch_add(1, std::memory_order_relaxed) + 1;
    return used && (used & (used - 1)) == 0;
  }

  void count() const {
    for (const auto& tally : tallies) {
      tally->times.fetch_add(1, std::memory_order_relaxed);
    }
  }
};

// Whether what a kept call has just thrown only declines it, by `Plan.decline_reason`. Not inlined: a hit has nothing of it.
[[gnu::cold, gnu::noinline]] inline bool is_declined(const Entry& entry) {
  const WithGil gil;
  name_backend(entry.decline_reason.get());
  PyObject *type = nullptr, *error = nullptr, *traceback = nullptr;
  torch::translate_exception_to_python(std::current_exception());
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  const Object owners[] = {owned(type), owned(error), owned(traceback)};
  const Object reason = owned(error ? PyObject_CallOneArg(entry.decline_reason.get(), error) : nullptr);
  if (!reason && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
    throw_error_of_python();  // Ctrl-C, which came meanwhile
  }
  PyErr_Clear();
  // Torch's own kernel of an op has taken the arguments from the stack.
  return reason && reason.get() != Py_None && !entry.is_native();
}

// Run a kept call; false if Python is to run it. What it throws otherwise is counted, and thrown on.
template <class Run>
bool run_unless_declined(const Entry& entry, const Run& run) {
  try {
    return run();
  } catch (...) {
    if (!is_declined(entry)) {
      throw;
    }
    return false;
  }
}

struct Offsets {  // a pair of which it is known that every row sees a key
  SeenOffsets seen;
  int64_t tokens_q, tokens_k;
};

struct Cache {
  uint64_t generation = 0;
  std::unordered_map<Key, std::shared_ptr<const Entry>, KeyHash> entries;
  std::vector<Offsets> offsets;
  size_t oldest_offsets = 0;
};

// None of it is ever destroyed: calls may come while the process ends.
inline std::shared_mutex& guard = *new std::shared_mutex;
inline Cache& cache = *new Cache;
inline std::atomic<bool> enabled{true};
inline std::atomic<bool> passing{false};         // nothing is registered: every call of a routed op is torch's
inline std::atomic<PyObject*> choices{nullptr};  // the context variable, once it may contain a choice

// A forked child begins with an empty cache: a thread that isn't in it may have owned the lock, and left half a change.
// What was there isn't destroyed, as it can't be known to be whole.
inline void begin_anew_after_fork() {
  const uint64_t generation = cache.generation;
  new (&guard) std::shared_mutex;
  new (&cache) Cache{generation + 1};
  passing = false;
}

struct LookedUp {
  uint64_t generation = 0;  // what Python returns is kept only if nothing has changed meanwhile
  std::shared_ptr<const Entry> entry{};
};

// Whether it is known of a pair of offsets that every row sees a key, and they are as they were; under the lock.
inline bool every_row_sees_a_key(const at::Tensor& queries, const at::Tensor& keys, int64_t tokens_q, int64_t tokens_k) {
  if (!counts_versions(queries) || !counts_versions(keys)) {
    return false;
  }
  const c10::Stream stream = stream_of(queries);
  for (const Offsets& one : cache.offsets) {
    if (one.seen.are(queries, keys, stream) && one.tokens_q == tokens_q && one.tokens_k == tokens_k) {
      return true;
    }
  }
  return false;
}

inline LookedUp look_up(const Key& key) {
  const std::shared_lock lock(guard);
  const auto found = key.empty() ? cache.entries.end() : cache.entries.find(key);
  return {cache.generation, found == cache.entries.end() ? nullptr : found->second};
}

inline void erase(const Key& key) {
  std::shared_ptr<const Entry> dropped;  // destroyed after the lock is released: what it owns may then do anything
  const std::unique_lock lock(guard);
  if (const auto found = cache.entries.find(key); found != cache.entries.end()) {
    dropped = std::move(found->second);
    cache.entries.erase(found);
  }
}

inline void keep(const Key& key, uint64_t generation, std::shared_ptr<const Entry> entry) {
  decltype(cache.entries) dropped;
  const std::unique_lock lock(guard);
  if (generation == cache.generation && !key.empty()) {
    if (cache.entries.size() >= kMostEntries) {
      std::swap(cache.entries, dropped);
    }
    auto& place = cache.entries[key];
    if (place) {  // Python was called once more, and is called ever more rarely from then on
      entry->uses = place->uses.load(std::memory_order_relaxed);
    }
    std::swap(place, entry);
  }
}

inline void keep_offsets(uint64_t generation, const at::Tensor& queries, const at::Tensor& keys, int64_t tokens_q, int64_t tokens_k) {
  const std::unique_lock lock(guard);
  if (generation != cache.generation || !counts_versions(queries) || !counts_versions(keys)) {
    return;
  }
  Offsets found{{Seen(queries), Seen(keys), stream_of(queries)}, tokens_q, tokens_k};
  for (Offsets& one : cache.offsets) {
    if (one.seen.look_like(queries, keys, found.seen.stream) && one.tokens_q == tokens_q && one.tokens_k == tokens_k) {
      one.seen.until = found.seen.until;
      return;
    }
  }
  if (cache.offsets.size() < kMostOffsets) {
    cache.offsets.push_back(std::move(found));
  } else {
    cache.offsets[cache.oldest_offsets++ % kMostOffsets] = std::move(found);
  }
}

inline void drop_all() {
  Cache old;  // destroyed after the lock is released
  const std::unique_lock lock(guard);
  passing = false;
  std::swap(old, cache);
  cache.generation = old.generation + 1;
}

inline std::atomic<uint64_t> choices_entered{0};  // how often a choice was entered or left, in any thread

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
  if (value == Py_None) {
    if (!in_backward) {
      return 0;
    }
    const Object scope = owned(PyImport_ImportModule("attnreg.dispatch.scope"));
    const Object inherited = owned(scope ? PyObject_CallMethod(scope.get(), "inherited_number", nullptr) : nullptr);
    const int64_t number = inherited ? PyLong_AsLongLong(inherited.get()) : -1;
    PyErr_Clear();
    return number;
  }
  static PyObject* const attribute = PyUnicode_InternFromString("number");
  const Object number = owned(PyObject_GetAttr(value, attribute));
  const int64_t found = number ? PyLong_AsLongLong(number.get()) : -1;
  PyErr_Clear();
  return found;
}

// The number of the choice in force for this thread or task. It is remembered for a thread, as taking the
// interpreter's lock costs more than the rest of looking a call up, until a choice is entered or left anywhere, the
// thread changes its context, which Python counts, or a backward begins or ends.
inline int64_t scoped_choice() {
  PyObject* variable = choices.load(std::memory_order_acquire);
  if (!variable) {
    return 0;
  }
  const PyThreadState* thread = PyGILState_GetThisThreadState();
  if (!thread) {
    return 0;  // a thread that Python doesn't know has entered nothing
  }
  struct Remembered {
    uint64_t thread;  // its number, as another one's state may come to lie at the same address
    const PyObject* context;
    uint64_t context_version, entered;
    int64_t graph_task;  // of the backward that this thread runs, or -1
    int64_t choice;
  };
  thread_local Remembered last{0, nullptr, 0, 0, -1, 0};
  const int64_t graph_task = torch::autograd::get_current_graph_task_id();
  const uint64_t entered = choices_entered.load(std::memory_order_acquire);
  if (last.thread != thread->id || last.context != thread->context || last.context_version != thread->context_ver ||
      last.entered != entered || last.graph_task != graph_task) {
    const int64_t choice = read_choice(variable, graph_task != -1);
    last = {thread->id, thread->context, thread->context_ver, entered, graph_task, choice};
  }
  return last.choice;
}

// Run a kept call; false if its launcher can't any more, or wasn't given. `keys` are those of the op's dispatch.
inline bool run(const Entry& entry, const Tensors& given, c10::DispatchKeySet keys, Tensors& results, Spare& spare) {
  const auto device = given[0].device();
  c10::OptionalDeviceGuard there;
  if (device.is_cuda()) {
    there.reset_device(device);
  }
  if (entry.op) {
    launch(*entry.op, given, keys, results, spare);
    return true;
  }
  return entry.addresses ? launch(*entry.addresses, given, results) : launch(entry.python.get(), given, results);
}

// Check what a launcher has returned against what the contract says of it.
inline void check_result(const at::Tensor& got, at::IntArrayRef sizes, at::ScalarType dtype, const char* what) {
  TORCH_CHECK(got.sizes() == sizes && got.scalar_type() == dtype, "attnreg: a launcher breaks the contract: got ", what,
              " ", got.sizes(), " ", got.scalar_type(), ", expected ", sizes, " ", dtype);
}

}  // namespace attnreg
