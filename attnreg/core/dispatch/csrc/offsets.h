// What is known of the offsets of packed calls on a GPU. `launching/offsets.py` says why it is looked at again.

#pragma once

#include <mutex>
#include <shared_mutex>

#include "cache.h"

namespace attnreg {

// A place for an answer; -1 if there is none. Under the lock.
inline int64_t take_answer() {
  for (int64_t slot = 0; answers && slot < kMostAnswers; slot++) {
    if (!is_taken[slot] && answers[slot] != kPending) {
      is_taken[slot] = true;
      answers[slot] = kPending;
      return slot;
    }
  }
  return -1;
}

inline void release_answer(Offsets& pair) {
  if (pair.slot >= 0) {
    is_taken[pair.slot] = false;
    pair.slot = -1;
  }
}

// A place that was taken for an answer. Whoever has it has the device asked, or an error or a launcher that can't run the
// call comes between: then the place is given back, and the next call with the offsets asks.
struct Question {
  int64_t slot = -1;
  int64_t place = 0;  // the address there; 0 where there is no place, and as soon as a kernel is launched that answers

  Question() = default;
  Question(const Question&) = delete;
  Question& operator=(const Question&) = delete;

  ~Question() {
    if (!is_open()) {
      return;
    }
    std::vector<Offsets> dropped;  // destroyed after the lock is released
    const std::unique_lock lock(guard);
    // Nobody else has taken the place meanwhile, also if the pair was dropped: it is taken again only after an answer.
    answers[slot] = 0;
    const auto pair = std::find_if(cache.offsets.begin(), cache.offsets.end(), [&](const Offsets& each) { return each.slot == slot; });
    if (pair == cache.offsets.end()) {
      return;
    }
    release_answer(*pair);
    if (pair->known == Known::kAskedAgain) {
      pair->known = Known::kAnswered;  // long ago
    } else {
      dropped.push_back(std::move(*pair));
      cache.offsets.erase(pair);
    }
  }

  bool is_open() const {
    return place != 0;
  }

  // Under the lock. False if there is no place.
  bool take() {
    slot = take_answer();
    place = slot < 0 ? 0 : reinterpret_cast<int64_t>(answers + slot);
    return is_open();
  }
};

// Have the device say what is so of a pair of offsets, without a wait, by a kernel of its own.
inline void ask_device(const at::Tensor& queries, const at::Tensor& keys, int64_t tokens_q, int64_t tokens_k, Question& question) {
  const DeviceCode& code = *device_code_of(queries.device());
  const c10::OptionalDeviceGuard device_guard(queries.device());  // the default stream is that of the current device
  const int64_t batch = queries.size(0) - 1;
  const int64_t threads = std::min<int64_t>((std::max<int64_t>(batch, 1) + 31) / 32 * 32, 1024);
  launch_on(code, code.facts, 1, threads, queries,
            {0, question.place, word_of(queries), word_of(keys), batch, tokens_q, tokens_k, queries.stride(0), keys.stride(0)});
  question.place = 0;
}

inline Facts read_answer(int64_t slot) {
  const uint16_t answer = answers[slot];
  return {(answer & 0xff) == 1, answer >> 8 == 1};
}

// Whether something isn't so any more.
inline bool is_less(Facts now, Facts before) {
  return (before.fills_rows && !now.fills_rows) || (before.knows_rows && !now.knows_rows);
}

[[noreturn]] inline void throw_changed() {
  const WithGil gil;
  const Object module = owned(PyImport_ImportModule("attnreg.core.launching.offsets"));
  const Object raise = owned(module ? PyObject_GetAttrString(module.get(), "raise_changed") : nullptr);
  if (raise) {
    owned(PyObject_CallNoArgs(raise.get()));
  }
  throw_error_of_python();
}

// What is known of the rows of a pair of offsets, if these are as they were. The first call with them has to ask the
// device, for which `question` gets a place; what it answered is used for a while, then it has to be asked again.
inline Facts facts_of(const at::Tensor& queries, const at::Tensor& keys, int64_t tokens_q, int64_t tokens_k, Question& question) {
  if (!device_code_of(queries.device()) || !counts_versions(queries) || !counts_versions(keys) || queries.scalar_type() != at::kInt || keys.scalar_type() != at::kInt) {
    return {};
  }
  const c10::Stream stream = stream_of(queries);
  bool has_changed = false;
  {
    Offsets dropped{{Seen(queries), Seen(keys), stream}, tokens_q, tokens_k};
    const std::unique_lock lock(guard);
    const auto pair = std::find_if(cache.offsets.begin(), cache.offsets.end(), [&](const Offsets& other) {
      return other.tensors.look_like(queries, keys, stream) && other.tokens_q == tokens_q && other.tokens_k == tokens_k;
    });
    if (pair == cache.offsets.end()) {
      dropped.known = question.take() ? Known::kAsked : Known::kNothing;
      dropped.slot = question.slot;
      if (cache.offsets.size() < kMostOffsets) {
        cache.offsets.push_back(std::move(dropped));
      } else {
        Offsets& oldest = cache.offsets[cache.oldest_offsets++ % kMostOffsets];
        release_answer(oldest);
        std::swap(oldest, dropped);
      }
    } else if (pair->known == Known::kAnswered) {
      if (Clock::now() < pair->tensors.until) {
        return pair->facts;
      }
      pair->known = question.take() ? Known::kAskedAgain : Known::kNothing;
      pair->slot = question.slot;
    } else if (pair->known != Known::kNothing && answers[pair->slot] != kPending) {
      const Facts now = read_answer(pair->slot);
      has_changed = pair->known == Known::kAskedAgain && is_less(now, pair->facts);
      release_answer(*pair);
      pair->known = Known::kAnswered;
      pair->facts = now;
      pair->tensors.until = Clock::now() + trusted.load(std::memory_order_relaxed);
      if (!has_changed) {
        return now;
      }
    }
  }
  if (has_changed) {
    throw_changed();
  }
  return {};
}

// Whether offsets were found to have changed since their rows were last known, of which no call came to say it.
inline bool offsets_have_changed() {
  const std::unique_lock lock(guard);
  return std::any_of(cache.offsets.begin(), cache.offsets.end(), [](const Offsets& pair) {
    return pair.known == Known::kAskedAgain && answers[pair.slot] != kPending && is_less(read_answer(pair.slot), pair.facts);
  });
}

}  // namespace attnreg
