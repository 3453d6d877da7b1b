// The online softmax of a block of scores (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), its gradient, and
// which scores are so large that float32 sums aren't exact enough for it.

#pragma once

#include <cmath>
#include <limits>

#include "options.h"
#include "products.h"

namespace attnreg {

// Where LSEs are beyond this, rounding them and the output to their dtypes costs gradients more than the accuracy rule
// allows; where scores of float32 inputs are, they are computed once more in float64.
template <class Number>
constexpr double kLarge = std::is_same_v<Number, Float32> ? 32.0 : 256.0;

// Sums over the keys that a row has seen so far: its highest score, and the sum of weights relative to that.
struct RowSums {
  float *highest, *weights;
};

// Puts the tanh of scores in their place, and its slope into `slopes` if that has memory. Not inlined: most calls have no
// softcap, and nothing of it.
[[gnu::noinline]] inline void cap(
    Panels scores, int64_t panels, int64_t from, int64_t to, float to_tanh, Panels slopes = {}) {
  for (int64_t panel = 0; panel < panels; panel++) {
    for (int64_t row = from; row < to; row++) {
      const Floats capped = tanh(load<Floats>(scores.at(panel, row)) * to_tanh);
      store(scores.at(panel, row), capped);
      if (slopes.data) {
        store(slopes.at(panel, row), 1.0f - capped * capped);
      }
    }
  }
}

[[gnu::noinline]] inline void multiply(Panels numbers, Panels by, int64_t panels, int64_t from, int64_t to) {
  for (int64_t panel = 0; panel < panels; panel++) {
    for (int64_t row = from; row < to; row++) {
      float* at = numbers.at(panel, row);
      store(at, load<Floats>(at) * load<Floats>(by.at(panel, row)));
    }
  }
}

inline Floats highest_of(Panels scores, int64_t from, int64_t to, Floats before) {
  Floats most[4] = {before, before, before, before};
  int64_t row = from;
  for (; row + 4 <= to; row += 4) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; i++) {
      most[i] = larger(load<Floats>(scores.at(0, row + i)), most[i]);
    }
  }
  for (; row < to; row++) {
    most[0] = larger(load<Floats>(scores.at(0, row)), most[0]);
  }
  return larger(larger(most[0], most[1]), larger(most[2], most[3]));
}

// Turns scores into weights relative to the highest score `now`; `factors` are what earlier sums are multiplied by
// if that has risen.
inline void softmax_of_block(
    Panels scores, int64_t from, int64_t to, Floats now, const Scale& scale, const RowSums& sums, float* factors) {
  const Floats before = load<Floats>(sums.highest);
  const float to_exponent = scale.to_exponent, lowest = scale.lowest;
  // In a row that has seen no key yet, -inf - -inf would be NaN.
  const Floats base = now == -kInfinity ? Floats{} : now;
  Floats sum[2] = {};
  int64_t row = from;
  for (; row + 2 <= to; row += 2) {
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; i++) {
      float* at = scores.at(0, row + i);
      const Floats weight = exp2((load<Floats>(at) - base) * to_exponent, lowest);
      store(at, weight);
      sum[i] += weight;
    }
  }
  for (; row < to; row++) {
    float* at = scores.at(0, row);
    const Floats weight = exp2((load<Floats>(at) - base) * to_exponent, lowest);
    store(at, weight);
    sum[0] += weight;
  }
  const Floats factor = exp2((before - base) * to_exponent);
  store(factors, factor);
  store(sums.weights, load<Floats>(sums.weights) * factor + (sum[0] + sum[1]));
  store(sums.highest, now);
}

// Computes the scores of a tile, masks them, and turns them into weights as above.
template <class Number, int64_t kWidth>
void softmax_of_tile(
    Panels keys, Panels queries, Panels scores, int64_t size, const Scale& scale, const Alibi& alibi,
    const Bounds& bounds, int64_t lane, int64_t key, const Bounds::Span& span, const RowSums& sums, float* factors) {
  const int64_t end = padded(span.to, kTileRows);
  Floats now[kWidth];
  const auto mask = [&] {
    if (scale.is_capped) {
      cap(scores, kWidth, span.from, span.to, scale.to_tanh);
    }
    const double limit = kLarge<Number> / scale.size;
    const bool is_far = alibi.is_on();  // a sum with what a slope adds may be large, however exact the score is
    bool is_large = is_far && alibi.add(scores, kWidth, lane, key, span.from, span.to, limit);
    if (span.masked) {
      bounds.mask(scores, kWidth, lane, key, span);
    }
    for (int64_t i = 0; i < kWidth; i++) {
      now[i] = highest_of(scores.from(i), span.from, span.to, load<Floats>(sums.highest + i * kLanes));
      is_large = is_large || (!is_far && any_beyond(now[i], limit));
    }
    return is_large;
  };
  rows_of_heads<kWidth>(keys, queries, scores, span.from, end, size);
  if (mask() && std::is_same_v<Number, Float32>) {
    rows_of_heads_in_double<kWidth>(keys, queries, scores, span.from, end, size);
    mask();
  }
  for (int64_t i = 0; i < kWidth; i++) {
    const int64_t here = i * kLanes;
    const RowSums of_panel{sums.highest + here, sums.weights + here};
    softmax_of_block(scores.from(i), span.from, span.to, now[i], scale, of_panel, factors + here);
  }
}

// Turns what was computed of a row's scores (the highest, the sum of weights, that of weights times their gradients) into
// its statistics. A row whose LSE, as given, is of more keys than there are here (with sinks, or over ranks) keeps that,
// and the delta of the output. What an LSE was rounded by is no key; in 16 bits another kernel's may be off by more.
template <class Number>
void settle(double lse, float delta_of_out, double size, float& base, float& rest, float& delta) {
  constexpr double kRounding = (std::is_same_v<Number, Float32> ? 2 : 16) * std::numeric_limits<float>::epsilon();
  const double highest = base * size, own = highest + std::log(double(rest));
  if (base == -kInfinity) {  // sees no key here
    base = delta = 0.0f;
    rest = kInfinity;
  } else if (own < lse - kRounding * std::max(1.0, std::abs(lse))) {
    delta = delta_of_out;
    rest = static_cast<float>((lse - highest) / kLog2);
  } else {
    delta /= rest;
    rest = static_cast<float>(std::log2(double(rest)));
  }
}

// Weights that add up to less than 1 by more than this leave some to keys elsewhere; less isn't seen in the dtype.
template <class Number>
constexpr float kOfOthers = std::is_same_v<Number, Float32> ? 0x1p-18f : 0x1p-12f;

inline Ints all_rows() {
  return Ints{} - 1;
}

// For each row: what is subtracted from a score, and from the exponent that the score's weight then has; the sum of
// its weights times their gradients, less the gradient of its LSE, and that.
struct RowStatistics {
  const float *base, *rest, *delta, *grad_lse;
};

// Turns scores into weights, and gradients of weights into those of scores; both are 0 from `to` up to a multiple of
// kTileRows. `whole` marks rows that see no further keys; `whole_rows` says whether there may be any.
template <class Number>
void gradients_of_block(
    Panels weights, Panels grads, int64_t from, int64_t to, bool whole_rows, Ints whole, const Scale& scale,
    const RowStatistics& of) {
  const Floats base = load<Floats>(of.base), rest = load<Floats>(of.rest), delta = load<Floats>(of.delta);
  const float to_exponent = scale.to_exponent, lowest = scale.lowest;
  Floats sum{}, all{};
  int64_t row = from;
  for (; row < to; row++) {
    float *weight = weights.at(0, row), *grad = grads.at(0, row);
    // No weight is above 1, however much of very large scores was lost to rounding.
    const Floats power = (load<Floats>(weight) - base) * to_exponent - rest;
    const Floats probabilities = exp2(power > 0.0f ? Floats{} : power, lowest);
    const Floats grad_of_score = probabilities * (load<Floats>(grad) - delta);
    store(weight, probabilities);
    store(grad, grad_of_score);
    sum += grad_of_score;
    all += probabilities;
  }
  // The delta is that of an output in 16 bits, or of one that is multiplied by the factor of dropout. With few keys its
  // rounding is most of a gradient's error, and plain PyTorch operations haven't got it: gradients of a row's scores add
  // up to that of its LSE, mostly 0. Not so where the LSE is of more keys (with sinks, or over ranks): weights don't add
  // up to 1 there.
  if (whole_rows) {
    sum = (whole & (all > 1.0f - kOfOthers<Number>)) ? sum - load<Floats>(of.grad_lse) : Floats{};
    for (int64_t i = from; i < to; i++) {
      store(grads.at(0, i), load<Floats>(grads.at(0, i)) - load<Floats>(weights.at(0, i)) * sum);
    }
  }
  for (; row % kTileRows; row++) {
    store(weights.at(0, row), Floats{});
    store(grads.at(0, row), Floats{});
  }
}

}  // namespace attnreg
