// What compiled routers keep: what is counted, what calls are known by, and what is under way.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace attnreg {

using Words = c10::SmallVector<int64_t, 160>;

constexpr size_t kMostKnown = 4096;  // as State keeps; then they start anew
constexpr size_t kMostOffsets = 64;  // as `packed` keeps

// ---- What is counted. A counter of attnreg's, and how often it went up since `drain` looked last.

struct Tally {
  PyObject* counter;  // held until `drain` finds that nothing counts there any more
  std::atomic<int64_t> times{0};
};

using Tallies = std::vector<std::shared_ptr<Tally>>;

inline void count(const Tallies& tallies) {
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

using Object = std::shared_ptr<PyObject>;
using Run = Object;  // a function of Python's; none for torch's own kernel

struct OpCall {  // a kernel of torch's, and the op's arguments behind the tensors
  c10::OperatorHandle op;
  c10::SafeKernelFunction kernel;
  std::vector<c10::IValue> rest;
  size_t results;  // how many of its results count
};

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using Version = decltype(at::Tensor()._version());

struct Allocation {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct Derived {  // what was derived of a pair of offsets; whoever derived it decides how long it lives
  Weak queries, keys;
  Version queries_version, keys_version;
  c10::Stream stream;
  std::vector<Weak> tensors;
};

struct AddressCall {  // a kernel that is run on addresses; see `attnreg.addresses`
  Object launch;
  std::vector<size_t> operands;
  std::vector<Allocation> results;
  int64_t workspace;
  std::optional<std::vector<int64_t>> lse_strides;
  Object derive;                           // none of dense calls
  mutable std::optional<Derived> derived;  // of the last offsets; under the interpreter's lock
};

struct Way {  // how a call is answered: by one of three, or by torch's kernel for the op itself
  Run run;
  Tallies tallies;
  std::vector<c10::IValue> beside{};                       // what a forward returns beside its results
  at::Tensor carrier{};                                    // by which a backward of `varlen_attn` is known, held here
  std::shared_ptr<const OpCall> another = nullptr;         // a kernel of torch's for another op
  std::shared_ptr<const AddressCall> addresses = nullptr;  // a kernel that is run on addresses
  bool turned = false;                                     // whether the tensors have the heads first (`turned.h`)
  bool saved = false;                                      // whether its results have to lie in order, to be saved
};

struct Offsets {  // a pair that was found to leave no row without a key
  Weak queries, keys;
  Version queries_version, keys_version;
  int64_t tokens_q, tokens_k;
  c10::Stream stream;  // another one doesn't wait for what was written on this one
};

struct Sending {  // a call of `varlen_attn`, as it is sent to its op
  Object own;                     // what its router is told of it
  std::vector<c10::IValue> rest;  // the op's arguments behind the tensors
};

struct Kept {
  uint64_t generation = 0;
  std::unordered_map<Words, std::shared_ptr<const Way>, Hash> known;
  std::unordered_map<Words, std::shared_ptr<const Sending>, Hash> sendings;
  std::vector<Offsets> offsets;
  size_t oldest_offsets = 0;
};

// None of it is ever destroyed: calls may come while the process ends.
inline std::shared_mutex& guard = *new std::shared_mutex;
inline Kept& kept = *new Kept;
inline auto& tallies = *new std::unordered_map<PyObject*, std::shared_ptr<Tally>>;
inline std::atomic<bool> enabled{true};
inline std::atomic<bool> passing{false};         // nothing is registered: every call is torch's
inline std::atomic<PyObject*> choices{nullptr};  // the context variable, once anybody has made a choice there

inline void open_after_fork() {
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

[[noreturn]] inline void throw_error_of_python() {
  python_error error;
  error.persist();
  throw error;
}

// ---- What is under way on a thread

// What `varlen_attn` says of what it is about to call: 0 for nothing.
enum Announcement : int64_t { kUnknown = -1, kNothing = 0, kKnown = 1 };
inline thread_local int64_t announced = kNothing;

struct UnderWay {  // a call that the router in Python has
  const c10::FunctionSchema* schema;
  size_t tensors;  // how many the op's arguments begin with
  uint64_t generation = 0;
  Words call{};  // empty where it can't be known again
  UnderWay* outer = nullptr;
};

inline thread_local UnderWay* under_way = nullptr;

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

}  // namespace attnreg
