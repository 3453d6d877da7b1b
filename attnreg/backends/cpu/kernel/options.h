// What ALiBi slopes and dropout need to know of each row of a task. Both count from a sequence's ends, which stay where
// they are when rows and keys at its beginning are left out.

#pragma once

#include "problem.h"

namespace attnreg {

// Adds to each score what ALiBi does, -slope * |i + keys - rows - j|.
class Alibi {
 public:
  Alibi(const Problem& problem, const Scale& scale) : problem_(problem), scale_(scale) {}

  bool is_on() const { return problem_.slopes; }

  // Lanes are rows; with a step, those of the first of so many neighbouring keys, then those of the second, ...
  void set(const Task& task, int64_t step = 1) {
    const auto& [sequence, key_head, row, rows] = task;
    const int64_t group = problem_.group(), lanes = padded(rows, kLanes), each = lanes / step;
    places_.resize(lanes);
    slopes_.resize(lanes);
    for (int64_t lane = 0; lane < lanes; lane++) {
      const int64_t here = row + std::min(lane % each, rows - 1), head = key_head * group + here % group;
      const float slope = problem_.slopes[sequence->number * problem_.slope_batch + head * problem_.slope_head];
      places_[lane] = here / group + sequence->keys - sequence->rows - lane / each;
      // Scores are without the scale. At most 2^96, so that no distance makes it infinite.
      slopes_[lane] = static_cast<float>(std::clamp(-slope / scale_.size, -0x1p96, 0x1p96));
    }
  }

  // Returns whether a row's highest score was beyond a limit before. Not inlined, as nothing here is that loops: most
  // calls have no slopes.
  [[gnu::noinline]] bool add(
      Panels scores, int64_t panels, int64_t lane, int64_t key, int64_t from, int64_t to, double limit,
      int64_t keys = 1) const {
    bool is_large = false;
    for (int64_t panel = 0; panel < panels; panel++, lane += kLanes) {
      const Floats slope = load<Floats>(&slopes_[lane]);
      Floats place;
      for (int64_t i = 0; i < kLanes; i++) {
        place[i] = static_cast<float>(places_[lane + i] - key);
      }
      Floats highest = broadcast(-kInfinity);
      for (int64_t row = from; row < to; row++) {
        const Floats step = place - static_cast<float>(row * keys), distance = step < 0.0f ? -step : step;
        float* at = scores.at(panel, row);
        const Floats score = load<Floats>(at);
        highest = larger(score, highest);
        store(at, slope * distance + score);
      }
      is_large = is_large || any_beyond(highest, limit);
    }
    return is_large;
  }

 private:
  const Problem& problem_;
  const Scale& scale_;
  std::vector<int64_t> places_;
  std::vector<float> slopes_;
};

// Which weights dropout drops: by a hash of the random state, of the numbers of sequence and head, and of those of row
// and key, counted from the last. `_survivors` in math/mask.py has the same hash: both backends drop the same weights.
class Dropout {
 public:
  explicit Dropout(const Problem& problem) : problem_(problem) {
    const double p = problem.dropout, threshold = std::nearbyint(p * 0x1p32);
    const bool drops_all = threshold > 0xffffffff;
    threshold_ = drops_all ? 0xffffffff : static_cast<uint32_t>(threshold);
    factor_ = drops_all ? 0.0f : static_cast<float>(1.0 / (1.0 - p));
  }

  bool is_on() const { return problem_.dropout > 0.0; }

  void set(const Task& task) {
    const auto& [sequence, key_head, row, rows] = task;
    const int64_t group = problem_.group(), lanes = padded(rows, kLanes);
    last_key_ = sequence->keys - 1;
    steps_.resize(lanes);
    starts_.resize(lanes);
    for (int64_t lane = 0; lane < lanes; lane++) {
      const int64_t here = row + std::min(lane, rows - 1), head = key_head * group + here % group;
      const int64_t from_end = sequence->rows - 1 - here / group;
      steps_[lane] = key_of(1, sequence->number, head, from_end) | 1;  // odd: no two keys of a row collide
      starts_[lane] = key_of(2, sequence->number, head, from_end);
    }
  }

  // Puts the factors of weights, 0 where they are dropped, to where these are, or multiplies these.
  template <bool kMultiplies>
  [[gnu::noinline]] void draw(
      Panels weights, int64_t panels, int64_t lane, int64_t key, int64_t from, int64_t to) const {
    for (int64_t panel = 0; panel < panels; panel++, lane += kLanes) {
      const Words step = load<Words>(&steps_[lane]);
      Words word = step * static_cast<uint32_t>(last_key_ - key - from) + load<Words>(&starts_[lane]);
      for (int64_t row = from; row < to; row++, word -= step) {
        float* at = weights.at(panel, row);
        const Floats kept = kMultiplies ? load<Floats>(at) * factor_ : broadcast(factor_);
        store(at, hash(word) >= threshold_ ? kept : Floats{});
      }
    }
  }

 private:
  // Of one word or a vector of them. The constants are from https://github.com/skeeto/hash-prospector/issues/19.
  template <class Word>
  static Word hash(Word word) {
    word = (word ^ (word >> 16)) * 0x21f0aaadu;
    word = (word ^ (word >> 15)) * 0x735a2d97u;
    return word ^ (word >> 15);
  }

  uint32_t key_of(uint32_t number, int64_t sequence, int64_t head, int64_t row) const {
    const uint64_t seed = problem_.rng_state[0], offset = problem_.rng_state[1];
    uint32_t key = hash(static_cast<uint32_t>(seed) ^ number);
    for (const uint64_t word : {seed >> 32, offset, offset >> 32, uint64_t(sequence), uint64_t(head), uint64_t(row)}) {
      key = hash(key ^ static_cast<uint32_t>(word));
    }
    return key;
  }

  const Problem& problem_;
  uint32_t threshold_;
  float factor_;
  int64_t last_key_ = 0;
  std::vector<uint32_t> steps_, starts_;
};

}  // namespace attnreg
