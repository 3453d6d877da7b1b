// How a kept call of `varlen_attn` is found and run, a forward or a backward.

#pragma once

#include <mutex>
#include <shared_mutex>
#include <vector>

#include "cache.h"
#include "varlen_call.h"

namespace attnreg {

// Numbers of the sites that aren't ops of aten's.
constexpr int64_t kVarlenForward = -1, kVarlenBackward = -2;

// `sinks` are those that a kernel may count; undefined if there are none.
inline Key varlen_key(int64_t site, const VarlenCall& call, const Tensors& tensors, const at::Tensor& sinks) {
  const size_t count = tensors.size();
  std::vector<c10::IValue> arguments;
  arguments.reserve(count + 8);  // those of `append_to` and the one below: allocated once
  arguments.assign(tensors.begin(), tensors.end());
  call.append_to(arguments);
  arguments.emplace_back(tensors[count - 2].is_same(tensors[count - 1]));
  Key key = key_of(site, call.choice, arguments, count, site == kVarlenForward ? 0 : 1);
  if (sinks.defined() && is_freed(sinks)) {
    key.clear();
  } else if (sinks.defined() && !key.empty()) {
    append(sinks, true, key);
  }
  return key;
}

inline bool offsets_are_known(const Tensors& tensors, size_t query) {
  const std::shared_lock lock(guard);
  const size_t count = tensors.size();
  return every_row_sees_a_key(tensors[count - 2], tensors[count - 1], tensors[query].size(0), tensors[query + 1].size(0));
}

// Check what the launcher of a forward or a backward has returned; `sinks` are those that it was given.
inline void check_results(const Tensors& tensors, size_t query, const at::Tensor& sinks, const Tensors& results) {
  const bool is_forward = query == 0;
  const size_t expected = is_forward ? 2 : sinks.defined() ? 4 : 3;
  TORCH_CHECK(results.size() == expected, "attnreg: a launcher breaks the contract: got ", results.size(),
              is_forward ? " results" : " gradients", ", expected ", expected);
  if (is_forward) {
    const at::Tensor& q = tensors[0];
    check_result(results[0], {q.size(0), q.size(1), tensors[2].size(2)}, q.scalar_type(), "the output");
    const auto lse = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    check_result(results[1], {q.size(1), q.size(0)}, lse, "the LSE");
  }
  for (size_t i = 0; i < 3 && !is_forward; i++) {
    check_result(results[i], tensors[1 + i].sizes(), tensors[1 + i].scalar_type(), "a gradient");
  }
  if (expected == 4) {
    check_result(results[3], sinks.sizes(), sinks.scalar_type(), "the gradient of sinks");
  }
}

// What a launcher that counts sinks is given: they come before the offsets.
inline Tensors with_sinks_given(const Tensors& tensors, const at::Tensor& sinks) {
  Tensors given(tensors.begin(), tensors.end() - 2);
  given.push_back(sinks);
  given.append(tensors.end() - 2, tensors.end());
  return given;
}

// Run a kept call; false where there is none, or it can't be run so. The caller counts `sinks` that the entry doesn't.
inline bool run_varlen(
    const Key& key, const LookedUp& found, const Tensors& tensors, size_t query, bool known, const at::Tensor& sinks,
    Tensors& results) {
  const Entry* entry = found.entry.get();
  if (!entry || entry->is_due() || entry->is_native() ||
      (entry->needs_offsets && !known && !offsets_are_known(tensors, query))) {
    return false;
  }
  const auto run_and_check = [&] {
    Spare spare;
    const auto keys = tensors[query].key_set();
    const bool done = entry->counts_sinks ? run(*entry, with_sinks_given(tensors, sinks), keys, results, spare)
                                          : run(*entry, tensors, keys, results, spare);
    if (done) {
      check_results(tensors, query, entry->counts_sinks ? sinks : at::Tensor(), results);
    }
    return done;
  };
  if (!run_unless_declined(*entry, run_and_check)) {
    erase(key);
    return false;
  }
  entry->count();
  return true;
}

}  // namespace attnreg
