// What is known of the offsets of packed calls on a GPU: see `contract/offsets.py`.

#pragma once

#include <mutex>
#include <shared_mutex>

#include "cache.h"

namespace attnreg {

// `dispatch.call_cache.rows_are_known`; there as long as the process lives.
inline PyObject* rows_are_known = nullptr;

// From so many calls with the same offsets on Python is asked what is known of them, at each doubling: a step of few
// layers with offsets of its own costs no look at them.
constexpr uint32_t kFirstQuestion = 4;

inline Offsets* find_offsets(const at::Tensor& queries, const at::Tensor& keys, int64_t tokens_q, int64_t tokens_k, c10::Stream stream) {
  for (Offsets& pair : cache.offsets) {
    if (pair.seen.look_like(queries, keys, stream) && pair.tokens_q == tokens_q && pair.tokens_k == tokens_k) {
      return &pair;
    }
  }
  return nullptr;
}

// Keep a pair of offsets that is new, and whether every row of it is known to see a key.
inline void keep_offsets(const at::Tensor& queries, const at::Tensor& keys, int64_t tokens_q, int64_t tokens_k, bool is_known) {
  if (!counts_versions(queries) || !counts_versions(keys)) {
    return;
  }
  const c10::Stream stream = stream_of(queries);
  Offsets pair{{Seen(queries), Seen(keys), stream}, tokens_q, tokens_k, is_known};
  const std::unique_lock lock(guard);
  if (Offsets* kept = find_offsets(queries, keys, tokens_q, tokens_k, stream)) {
    kept->is_known = is_known;
    kept->seen.until = pair.seen.until;
  } else if (cache.offsets.size() < kMostOffsets) {
    cache.offsets.push_back(std::move(pair));
  } else {
    std::swap(cache.offsets[cache.oldest_offsets++ % kMostOffsets], pair);
  }
}

// Whether it is known of a pair of offsets that every row sees a key, and they are as they were. What is known is used
// for a while; then Python has the device compare the offsets.
inline bool every_row_sees_a_key(const at::Tensor& queries, const at::Tensor& keys, int64_t tokens_q, int64_t tokens_k) {
  if (!counts_versions(queries) || !counts_versions(keys)) {
    return false;
  }
  const c10::Stream stream = stream_of(queries);
  {
    const std::unique_lock lock(guard);
    Offsets* pair = find_offsets(queries, keys, tokens_q, tokens_k, stream);
    if (pair && pair->is_known && Clock::now() < pair->seen.until) {
      return true;
    }
    if (pair && !pair->is_known) {
      pair->sightings++;
      if (pair->sightings < kFirstQuestion || (pair->sightings & (pair->sightings - 1)) != 0) {
        return false;
      }
    }
    if (!pair) {
      Offsets seen{{Seen(queries), Seen(keys), stream}, tokens_q, tokens_k};
      if (cache.offsets.size() < kMostOffsets) {
        cache.offsets.push_back(std::move(seen));
      } else {
        cache.offsets[cache.oldest_offsets++ % kMostOffsets] = std::move(seen);
      }
      return false;
    }
  }
  const WithGil gil;
  const Object known = call_python(
      rows_are_known, {owned(THPVariable_Wrap(queries)), owned(THPVariable_Wrap(keys)), owned(PyLong_FromLongLong(tokens_q)),
                       owned(PyLong_FromLongLong(tokens_k))});
  keep_offsets(queries, keys, tokens_q, tokens_k, known.get() == Py_True);
  return known.get() == Py_True;
}

}  // namespace attnreg
