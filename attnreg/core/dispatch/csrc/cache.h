// The call cache: by the kind of a call and the class of its lengths, the launcher that runs it.

#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "addresses.h"
#include "choice.h"
#include "device_code.h"
#include "launchers.h"
#include "lengths.h"
#include "program.h"

namespace attnreg {

constexpr size_t kMostEntries = 4096;  // as `dispatch.state` has; then all are kept anew
constexpr size_t kMostOffsets = 64;    // as `launching.offsets` has

// ---- What is counted: a counter of Python's, and how often it went up since `drain` looked last.

struct Tally {
  PyObject* counter;  // kept alive until `drain` finds that nothing counts there any more
  std::atomic<int64_t> times{0};
};

using Tallies = std::vector<std::shared_ptr<Tally>>;

inline auto& all_tallies = *new std::unordered_map<PyObject*, std::shared_ptr<Tally>>;  // under the interpreter's lock

inline Tallies tallies_of(PyObject* counters) {
  Tallies tallies;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(counters); i++) {
    PyObject* counter = PyTuple_GET_ITEM(counters, i);
    auto& tally = all_tallies[counter];
    if (!tally) {
      Py_INCREF(counter);
      tally = std::make_shared<Tally>(counter);
    }
    tallies.push_back(tally);
  }
  return tallies;
}

// ---- What is kept

struct Entry {  // how a call is run: by one of the four, or by torch's own kernel of the op
  Object python;
  std::shared_ptr<const OpLauncher> op;
  std::shared_ptr<const NativeLauncher> native;
  std::shared_ptr<const AddressLauncher> addresses;
  std::shared_ptr<const Programs> programs;  // run in place of a function of Python's, where they can
  Window window{};  // of a packed call on a GPU: by it rows are cleared that aren't known to see a key
  bool clears = false;  // whether they are cleared for a function of Python's; after the others they always are
  bool zeroes_rows = false;  // whether a forward writes 0 to output rows of a sequence without keys
  // Of a function of Python's that takes how many keys of each sequence count, where all do: what derives that.
  std::optional<Derivation> counts{};
  std::vector<std::pair<size_t, bool>> finite{};  // tensors whose rows of no sequence have to be finite, and (true) of keys
  Tallies tallies;
  Object decline_reason;  // counts an error, and returns None unless the backend declines the call with it
  bool is_final = true;
  bool counts_sinks = false;             // whether the launcher is given sinks; if not, results are rescaled
  std::vector<c10::IValue> auxiliary{};  // what an aten op returns behind the kernel's results: numbers and models
  std::vector<std::pair<size_t, bool>> lengths{};  // places in it of the longest query, and (true) of the longest key
  mutable std::atomic<uint32_t> uses{0};

  bool is_native() const {
    return !python && !op && !native && !addresses;
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

// What has just been thrown, as an error of Python's with its traceback; the caller owns the interpreter's lock.
inline Object error_just_thrown() {
  PyObject *type = nullptr, *error = nullptr, *traceback = nullptr;
  torch::translate_exception_to_python(std::current_exception());
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  const Object owners[] = {owned(type), owned(traceback)};
  if (error && traceback) {
    PyException_SetTraceback(error, traceback);
  }
  return owned(error);
}

// Whether what a kept call has just thrown only declines it, by `Plan.decline_reason`. Not inlined: a hit has nothing of it.
[[gnu::cold, gnu::noinline]] inline bool is_declined(const Entry& entry) {
  const WithGil gil;
  name_backend(entry.decline_reason.get());
  const Object error = error_just_thrown();
  const Object reason = owned(error ? PyObject_CallOneArg(entry.decline_reason.get(), error.get()) : nullptr);
  if (error && !reason) {
    throw_error_of_python();  // in its place: what the backend broke, or Ctrl-C, which came meanwhile
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

// What the host knows of a pair of offsets: nothing as long as the device was only asked, then what it answered. After a
// while it is asked again, whether that is so still.
enum class Known { kAsked, kAnswered, kNothing, kAskedAgain };

struct Facts {
  bool fills_rows = false;  // whether every row belongs to a sequence that has queries and keys
  bool knows_rows = false;  // whether every row also sees a key, whatever the mask
};

struct Offsets {
  SeenOffsets tensors;
  int64_t tokens_q, tokens_k;
  Known known = Known::kNothing;
  Facts facts{};
  int64_t slot = -1;  // where the device answers
};

// Where devices answer, in pinned memory: two numbers in a word, whether no row is unused and whether every row sees a
// key. As `readback.PENDING` in both as long as there is no answer; a place is taken again only after that.
constexpr int64_t kMostAnswers = 256;
constexpr uint16_t kPending = 0x0202;

inline volatile uint16_t* answers = nullptr;  // set once, with the first device code
inline auto& is_taken = *new std::array<bool, kMostAnswers>{};  // under the lock

struct PlaceHash {
  size_t operator()(const Place& place) const {
    return hash_of(place.data(), place.size());
  }
};

// How much of the lengths matters in a class, and `steps.Steps` of Python's for further steps of lengths, or nothing.
struct OfClass {
  Detail detail = Detail::kClass;
  Object steps{};
};

struct KindOfCall {
  Classes classes;
  std::unordered_map<Place, std::shared_ptr<const Entry>, PlaceHash> entries;
  std::unordered_map<Place, OfClass, PlaceHash> details;  // of the classes of which more counts

  Place place_of(const Lengths& lengths) const {
    Place place = classes.place_of(lengths);
    if (!details.empty()) {
      const auto detail = details.find(place);
      if (detail != details.end()) {
        append(lengths, detail->second.detail, place);
      }
    }
    return place;
  }

  // What decides about lengths in a new step; nothing where it isn't steps that count.
  Object steps_of(const Lengths& lengths) const {
    const auto detail = details.find(classes.place_of(lengths));
    return detail == details.end() ? nullptr : detail->second.steps;
  }
};

struct Cache {
  uint64_t generation = 0;
  std::unordered_map<Key, KindOfCall, KeyHash> kinds;
  size_t entries = 0;
  std::vector<Offsets> offsets;
  size_t oldest_offsets = 0;
};

// None of it is ever destroyed: calls may come while the process ends.
inline std::shared_mutex& guard = *new std::shared_mutex;
inline Cache& cache = *new Cache;
inline std::atomic<bool> enabled{true};
inline std::atomic<bool> passing{false};         // nothing is registered: every call of a routed op is torch's

// A forked child begins with an empty cache: a thread that isn't in it may have owned the lock, and left half a change.
// What was there isn't destroyed, as it can't be known to be whole.
inline void begin_anew_after_fork() {
  const uint64_t generation = cache.generation;
  new (&guard) std::shared_mutex;
  new (&cache) Cache{generation + 1};
  new (&all_written) std::vector<Written>;
  passing = false;
}

struct LookedUp {
  uint64_t generation = 0;  // what Python returns is kept only if nothing has changed meanwhile
  std::shared_ptr<const Entry> entry{};
};

// Look an entry up. Where there is none, `steps` becomes what decides about further steps of the class, if anything does.
inline LookedUp find(const Key& key, const Lengths& lengths, Object& steps) {
  const std::shared_lock lock(guard);
  if (key.empty()) {
    return {cache.generation};
  }
  const auto kind = cache.kinds.find(key);
  if (kind == cache.kinds.end()) {
    return {cache.generation};
  }
  const auto entry = kind->second.entries.find(kind->second.place_of(lengths));
  if (entry != kind->second.entries.end()) {
    return {cache.generation, entry->second};
  }
  steps = kind->second.steps_of(lengths);
  return {cache.generation};
}

// Whether an entry counts a call by these counters of Python's. They are those of the backend's calls, and of each fallback and
// its reasons: in a class they are the same only for the same choice.
inline bool counts_by(const Entry& entry, PyObject* counters) {
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(counters));
  for (size_t i = 0; i < count && i < entry.tallies.size(); i++) {
    if (entry.tallies[i]->counter != PyTuple_GET_ITEM(counters, static_cast<Py_ssize_t>(i))) {
      return false;
    }
  }
  return count == entry.tallies.size();
}

// Have Python choose for lengths in a further step, by times alone, and keep the entry of a step of the class with the same
// choice. Nothing if no step has made it, its entry isn't final or launches on addresses, or something changed meanwhile:
// Python then runs the call.
[[gnu::cold, gnu::noinline]] inline std::shared_ptr<const Entry> chosen_for_step(
    const Key& key, const Lengths& lengths, uint64_t generation, PyObject* steps) {
  const WithGil gil;
  std::vector<Object> numbers;
  for (const int64_t number : lengths.numbers) {
    numbers.push_back(owned(PyLong_FromLongLong(number)));
  }
  const Object counters = call_python(steps, numbers);
  if (counters.get() == Py_None) {
    return nullptr;
  }
  TORCH_CHECK_TYPE(PyTuple_Check(counters.get()), "steps: got a ", Py_TYPE(counters.get())->tp_name, ", expected a tuple");
  const std::unique_lock lock(guard);
  const auto kind = cache.kinds.find(key);
  if (generation != cache.generation || kind == cache.kinds.end() || cache.entries >= kMostEntries) {
    return nullptr;
  }
  auto& entries = kind->second.entries;
  const Place of_class = kind->second.classes.place_of(lengths), place = kind->second.place_of(lengths);
  for (const auto& [other, entry] : entries) {
    const bool is_of_class = other.size() == place.size() && std::equal(of_class.begin(), of_class.end(), other.begin());
    // A launcher on addresses keeps the few newest launches, which steps would take from each other.
    if (is_of_class && entry->is_final && !entry->addresses && counts_by(*entry, counters.get())) {
      const std::shared_ptr<const Entry> chosen = entry;
      cache.entries += entries.emplace(place, chosen).second;
      return chosen;
    }
  }
  return nullptr;
}

// Look an entry up; for lengths in a further step Python may choose it.
inline LookedUp look_up(const Key& key, const Lengths& lengths) {
  Object steps;
  LookedUp looked_up = find(key, lengths, steps);
  if (steps) {
    looked_up.entry = chosen_for_step(key, lengths, looked_up.generation, steps.get());
  }
  return looked_up;
}

inline void erase(const Key& key, const Lengths& lengths) {
  std::shared_ptr<const Entry> dropped;  // destroyed after the lock is released: what it owns may then do anything
  const std::unique_lock lock(guard);
  if (const auto kind = cache.kinds.find(key); kind != cache.kinds.end()) {
    const auto entry = kind->second.entries.find(kind->second.place_of(lengths));
    if (entry != kind->second.entries.end()) {
      dropped = std::move(entry->second);
      kind->second.entries.erase(entry);
    }
  }
}

// Keep an entry for the class of a call's lengths, and for what counts of them in it.
inline void keep(
    const Key& key, const Lengths& lengths, uint64_t generation, const Classes& classes, OfClass of_class, std::shared_ptr<const Entry> entry) {
  // Destroyed after the lock is released, as `of_class` and `entry` are, which take what was there.
  decltype(cache.kinds) dropped;
  decltype(KindOfCall::entries) dropped_entries;
  decltype(KindOfCall::details) dropped_details;
  const std::unique_lock lock(guard);
  if (generation != cache.generation || key.empty()) {
    return;
  }
  if (cache.entries >= kMostEntries) {
    std::swap(cache.kinds, dropped);
    cache.entries = 0;
  }
  KindOfCall& kind = cache.kinds[key];
  if (kind.classes.add(classes)) {  // other classes than before
    std::swap(kind.entries, dropped_entries);
    std::swap(kind.details, dropped_details);
  }
  Place place = kind.classes.place_of(lengths);
  if (const Detail detail = of_class.detail; detail != Detail::kClass) {
    std::swap(kind.details[place], of_class);
    append(lengths, detail, place);
  } else if (const auto counted = kind.details.find(place); counted != kind.details.end()) {
    std::swap(counted->second, of_class);
    kind.details.erase(counted);
  }
  auto& kept = kind.entries[std::move(place)];
  if (kept) {  // Python was called once more, and is called ever more rarely from then on
    entry->uses = kept->uses.load(std::memory_order_relaxed);
  } else {
    cache.entries++;
  }
  std::swap(kept, entry);
}

inline void drop_all() {
  Cache old;  // destroyed after the lock is released
  const std::unique_lock lock(guard);
  passing = false;
  is_taken.fill(false);
  std::swap(old, cache);
  cache.generation = old.generation + 1;
}

// Run a function of Python's, or what it describes; false if it can't run the call any more. The function leaves rows that see
// no key to whoever clears them.
inline bool launch_function(const Entry& entry, const Launch& call, Tensors& results) {
  const bool knows_rows = call.knows_rows || entry.clears;
  return (entry.programs && launch(*entry.programs, call, results)) || launch(entry.python.get(), call, knows_rows, results);
}

// Whether output rows of a packed forward that see no key are 0 as the launcher writes them. That is so only if no row of
// a sequence with keys is without one: the weights of such a row are 0, but the values may be NaN.
inline bool has_zeroes(const Entry& entry, const Lengths& lengths, bool drops_lse) {
  return drops_lse && entry.zeroes_rows && (entry.window.right < 0 || lengths.numbers[Lengths::kMaxQ] == 1);
}

// Whether rows of a packed call are cleared for an entry's launcher.
inline bool clears_rows(const Entry& entry, const Launch& call) {
  const bool is_unknown = entry.python ? entry.clears && !call.fills_rows : !call.knows_rows;
  const bool is_clear = call.fills_queries && has_zeroes(entry, call.lengths, call.drops_lse);
  return call.is_packed && !entry.native && is_unknown && !is_clear && call.tensors[0].is_cuda();
}

// Whether a kernel that is launched for a call anyway can also answer what is so of its offsets.
inline bool can_answer(const Entry& entry, const Launch& call) {
  return clears_rows(entry, call) && (call.is_forward || !entry.finite.empty());
}

// Whether the kernel that copies the values of a packed forward can also clear the output, before the launch. The launcher has
// to leave the rows that are cleared. It leaves rows that lie in no sequence; a row of a sequence that sees no key it may
// write. With the same offsets for queries and keys, and a mask that contains the diagonal, as each does, no such row exists.
inline bool clears_beforehand(const Entry& entry, const Launch& call) {
  return call.is_forward && entry.programs && entry.finite.size() == 1 && !call.used && call.offsets(0).is_same(call.offsets(1));
}

// Run a function of Python's, or what it describes, on copies of tensors that have to be finite.
inline bool launch_finite(const Entry& entry, const Launch& call, const DeviceCode& code, Tensors& results) {
  Tensors tensors(call.tensors.begin(), call.tensors.end());
  for (const auto& [place, of_keys] : entry.finite) {
    tensors[place] = blanked(code, tensors[place], call, of_keys);
  }
  Launch finite{tensors, call.lengths, true, true, true, call.is_forward};
  finite.used = call.used;
  finite.table = call.table;
  return launch_function(entry, finite, results);
}

// Run a kept call; false if its launcher can't. The results are as the contract says. `keys` are those of the op's dispatch.
inline bool run(const Entry& entry, const Launch& call, c10::DispatchKeySet keys, Tensors& results, Spare& spare) {
  const auto device = call.tensors[0].device();
  c10::OptionalDeviceGuard device_guard;
  if (device.is_cuda()) {
    device_guard.reset_device(device);
  }
  const bool clears = clears_rows(entry, call);
  const DeviceCode* code = clears ? device_code_of(device) : nullptr;
  if (clears && !code) {
    return false;
  }
  bool done = true, is_clear = !clears;
  if (entry.native) {
    done = launch(*entry.native, call, results);
  } else if (entry.op) {
    launch(*entry.op, call, keys, results, spare);
  } else if (entry.addresses) {
    done = launch(*entry.addresses, call, results);
  } else if (clears && clears_beforehand(entry, call)) {
    const Blanked blanked{*code, entry.finite[0].first, entry.finite[0].second};
    is_clear = launch(*entry.programs, call, results, &blanked);
    done = is_clear || launch_finite(entry, call, *code, results);
  } else if (clears) {
    done = launch_finite(entry, call, *code, results);
  } else {
    done = launch_function(entry, call, results);
  }
  if (!done) {
    return false;
  }
  check_results(call, results);  // before rows are cleared by their addresses
  if (!is_clear) {
    clear(*code, call, entry.window, results);
  }
  return true;
}

}  // namespace attnreg
