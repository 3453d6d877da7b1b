// The forward: an online softmax over blocks of keys (softmax.h).
//
// Scores and outputs are transposed, rows as columns, so that the softmax computes a vector of rows at a time.

#pragma once

#include "few_rows.h"

namespace attnreg {

template <class Number>
class Forward {
 public:
  // Keys of a block: its scores stay in the first-level cache.
  static constexpr int64_t kKeys = 128;
  // Rows of a task at most, and a multiple of what they are: they share the packed keys and values of a block.
  static constexpr int64_t kRows = 10 * kMaxPanels * kLanes, kStep = kMaxPanels * kLanes;

  explicit Forward(const Problem& problem)
      : problem_(problem), scale_(problem), alibi_(problem, scale_), dropout_(problem), few_rows_(problem) {}

  void run(const Task& task) {
    if (FewRows<Number>::takes(problem_, *task.sequence)) {
      return few_rows_.run(task);
    }
    const int64_t size = problem_.size, value_size = problem_.value_size, group = problem_.group();
    const int64_t lanes = padded(task.rows, kLanes);
    const Panels q = q_.panels(lanes, size), out = out_.zeros(lanes, padded(value_size, kTileRows));
    const Panels k = k_.panels(kKeys, size), v = v_.panels(value_size, kKeys);
    const Panels scores = scores_.panels(kMaxPanels * kLanes, kKeys);
    float* highest = highest_.take(lanes);
    float* sums = sums_.take(lanes);
    std::fill_n(highest, lanes, -kInfinity);
    std::fill_n(sums, lanes, 0.0f);
    bounds_.set(task, group);
    if (alibi_.is_on()) {
      alibi_.set(task);
    }
    if (dropout_.is_on()) {
      dropout_.set(task);
    }
    pack_columns(query_rows<Number>(problem_.q, task, group), task.row, task.rows, size, scale_.sign, q);
    for (int64_t key = bounds_.lowest(); key < bounds_.highest(); key += kKeys) {
      const int64_t count = std::min(kKeys, bounds_.highest() - key);
      with_key_rows<Number>(
          problem_, problem_.k, task, [&](auto rows) { pack_columns(rows, key, count, size, 1.0f, k); });
      with_key_rows<Number>(
          problem_, problem_.v, task, [&](auto rows) { pack_rows(rows, key, count, value_size, v); });
      for (int64_t lane = 0, width; lane < lanes; lane += width * kLanes) {
        width = next_width((lanes - lane) / kLanes);
        const auto span = bounds_.of(lane, width * kLanes, key, count);
        if (span.from >= span.to) {
          continue;
        }
        const int64_t panel = lane / kLanes;
        with_width(width, [&](auto known) {
          constexpr int64_t kWidth = decltype(known)::value;
          float factors[kWidth * kLanes];
          softmax_of_tile<Number, kWidth>(
              k, q.from(panel), scores, size, scale_, alibi_, bounds_, lane, key, span,
              {highest + lane, sums + lane}, factors);
          if (dropout_.is_on()) {
            dropout_.template draw<true>(scores, kWidth, lane, key, span.from, span.to);
          }
          columns_by_rows<kWidth, Store::kScaleAndAdd>(
              v, scores, out.from(panel), 0, padded(value_size, kTileRows), span.from, span.to, factors);
        });
      }
    }
    write_results(task, out, highest, sums);
  }

 protected:
  void write_results(const Task& task, Panels out, const float* highest, float* sums) const {
    const int64_t group = problem_.group();
    const auto lse = query_rows<Float32>(problem_.lse, task, group);
    for (int64_t row = 0; row < task.rows; row++) {
      const double lse_of_row = highest[row] * scale_.size + std::log(double(sums[row]));
      *lse[task.row + row] = sums[row] == 0.0f ? -kInfinity : static_cast<float>(lse_of_row);
    }
    for (int64_t lane = 0; lane < padded(task.rows, kLanes); lane += kLanes) {
      const Floats sum = load<Floats>(sums + lane);
      store(sums + lane, sum == 0.0f ? Floats{} : 1.0f / sum);
    }
    const auto rows = query_rows<Number>(problem_.out, task, group);
    unpack_columns(out, sums, rows, task.row, task.rows, problem_.value_size);
  }

  const Problem& problem_;
  const Scale scale_;
  Alibi alibi_;
  Dropout dropout_;
  Bounds bounds_;
  FewRows<Number> few_rows_;
  Buffer q_, k_, v_, scores_, out_, highest_, sums_;
};

}  // namespace attnreg
