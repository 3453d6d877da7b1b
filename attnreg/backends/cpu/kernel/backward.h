// The backward: weights are recomputed from the LSE, with five products for each block of keys.

#pragma once

#include "problem.h"
#include "products.h"

namespace attnreg {

// The sums of the gradients of key and value of one head of a sequence.
struct KeySums {
  Panels k, v;

  static int64_t size(const Problem& problem, const Sequence& sequence) {
    const int64_t height = padded(sequence.keys, kTileRows) + kTileRows;
    return Panels::size(problem.size, height) + Panels::size(problem.value_size, height);
  }

  // Blocks of keys begin at any key, so their last tile may reach beyond the last one.
  static KeySums in(float* memory, const Problem& problem, const Sequence& sequence) {
    const int64_t height = padded(sequence.keys, kTileRows) + kTileRows;
    return {{memory, height}, {memory + Panels::size(problem.size, height), height}};
  }
};

template <class Number>
class Backward {
 public:
  static constexpr int64_t kKeys = 64;
  // Rows that are packed at a time, in every form that a product needs.
  static constexpr int64_t kRows = 5 * kMaxPanels * kLanes;

  explicit Backward(const Problem& problem) : problem_(problem) {}

  // `shared` is the memory for the sums where the task is one of several of a head, else null.
  void run(const Task& task, float* shared) {
    const int64_t count = KeySums::size(problem_, *task.sequence);
    float* memory = shared ? shared : sums_.take(count);
    std::fill_n(memory, count, 0.0f);
    const KeySums sums = KeySums::in(memory, problem_, *task.sequence);
    for (int64_t done = 0; done < task.rows; done += kRows) {
      add_rows({task.sequence, task.key_head, task.row + done, std::min(kRows, task.rows - done), task.part}, sums);
    }
    if (!shared) {
      write(task, sums);
    }
  }

  void write(const Task& task, const KeySums& sums) const {
    const int64_t keys = task.sequence->keys;
    const auto grad_k = key_rows<Number>(problem_.grad_k, task), grad_v = key_rows<Number>(problem_.grad_v, task);
    unpack_rows(sums.k, static_cast<float>(problem_.scale), grad_k, keys, problem_.size);
    unpack_rows(sums.v, 1.0f, grad_v, keys, problem_.value_size);
  }

 private:
  void add_rows(const Task& task, const KeySums& sums) {
    const int64_t size = problem_.size, value_size = problem_.value_size, group = problem_.group();
    const int64_t lanes = padded(task.rows, kLanes);
    const auto queries = query_rows<Number>(problem_.q, task, group);
    const auto grads = query_rows<Number>(problem_.grad_out, task, group);
    const Panels q = q_.panels(size, task.rows), q_columns = q_columns_.panels(lanes, size);
    const Panels grad_out = grad_out_.panels(value_size, task.rows);
    const Panels grad_out_columns = grad_out_columns_.panels(lanes, value_size);
    const Panels grad_q = grad_q_.zeros(lanes, padded(size, kTileRows));
    pack_rows(queries, task.row, task.rows, size, q);
    pack_columns(queries, task.row, task.rows, size, static_cast<float>(problem_.scale / kLog2), q_columns);
    pack_rows(grads, task.row, task.rows, value_size, grad_out);
    pack_columns(grads, task.row, task.rows, value_size, 1.0f, grad_out_columns);
    float* lse = lse_.take(lanes);
    float* delta = delta_.take(lanes);
    load_lse_and_delta(task, grad_out_columns, lse, delta);
    bounds_.set(task, group);

    const Panels k = k_.panels(size, kKeys), k_columns = k_columns_.panels(kKeys, size);
    const Panels v_columns = v_columns_.panels(kKeys, value_size);
    const Panels weights = weights_.panels(kMaxPanels * kLanes, kKeys);
    const Panels grad_scores = grad_scores_.panels(kMaxPanels * kLanes, kKeys);
    const auto keys = key_rows<Number>(problem_.k, task), values = key_rows<Number>(problem_.v, task);
    for (int64_t key = bounds_.lowest(); key < bounds_.highest(); key += kKeys) {
      const int64_t count = std::min(kKeys, bounds_.highest() - key);
      pack_rows(keys, key, count, size, k);
      pack_columns(keys, key, count, size, 1.0f, k_columns);
      pack_columns(values, key, count, value_size, 1.0f, v_columns);
      for (int64_t lane = 0, width; lane < lanes; lane += width * kLanes) {
        width = next_width((lanes - lane) / kLanes);
        const auto span = bounds_.of(lane, width * kLanes, key, count);
        if (span.from >= span.to) {
          continue;
        }
        const int64_t panel = lane / kLanes, rows = std::min(task.rows - lane, width * kLanes);
        const int64_t end = padded(span.to, kTileRows);
        with_width(width, [&](auto known) {
          constexpr int64_t kWidth = decltype(known)::value;
          columns_by_rows<kWidth, Store::kOverwrite>(k_columns, q_columns.from(panel), weights, span.from, end, 0, size);
          columns_by_rows<kWidth, Store::kOverwrite>(
              v_columns, grad_out_columns.from(panel), grad_scores, span.from, end, 0, value_size);
          if (span.masked) {
            bounds_.mask(weights, kWidth, lane, key, span);
          }
          for (int64_t i = 0; i < kWidth; i++) {
            const int64_t here = lane + i * kLanes;
            grad_of_scores(weights.from(i), grad_scores.from(i), span.from, span.to, lse + here, delta + here);
          }
          columns_by_rows<kWidth, Store::kAdd>(
              k, grad_scores, grad_q.from(panel), 0, padded(size, kTileRows), span.from, span.to);
        });
        const Panels some_q{q.at(0, lane), q.height}, some_grads{grad_out.at(0, lane), grad_out.height};
        const int64_t q_panels = padded(size, kLanes) / kLanes, v_panels = padded(value_size, kLanes) / kLanes;
        add_rows_by_all_rows(weights, some_grads, sums.v, v_panels, key, span.from, end, rows);
        add_rows_by_all_rows(grad_scores, some_q, sums.k, q_panels, key, span.from, end, rows);
      }
    }
    std::fill_n(lse, lanes, static_cast<float>(problem_.scale));
    unpack_columns(grad_q, lse, query_rows<Number>(problem_.grad_q, task, group), task.row, task.rows, size);
  }

  // For each row the LSE to base 2, and the sum of its output times its gradient.
  void load_lse_and_delta(const Task& task, Panels grad_out_columns, float* lse, float* delta) {
    const int64_t group = problem_.group(), size = problem_.value_size, lanes = padded(task.rows, kLanes);
    const auto lses = query_rows<Float32>(problem_.lse, task, group);
    for (int64_t row = 0; row < lanes; row++) {
      // A weight is exp(score - LSE): 0 in a row that sees no key, and in lanes after the last row.
      const float found = row < task.rows ? *lses[task.row + row] : -kInfinity;
      lse[row] = found == -kInfinity ? kInfinity : static_cast<float>(found / kLog2);
    }
    // Summed in the order in which the product of value and gradient is: in a row that sees one key the two are
    // equal, and their difference has to be exactly 0.
    const Panels out = out_columns_.panels(lanes, size);
    pack_columns(query_rows<Number>(problem_.out, task, group), task.row, task.rows, size, 1.0f, out);
    for (int64_t panel = 0; panel * kLanes < lanes; panel++) {
      Floats sum{};
      for (int64_t column = 0; column < size; column++) {
        sum += load<Floats>(out.at(panel, column)) * load<Floats>(grad_out_columns.at(panel, column));
      }
      store(delta + panel * kLanes, sum);
    }
  }

  // Turns scores into weights, and gradients of weights into those of scores; both are 0 from `to` up to a multiple
  // of kTileRows.
  static void grad_of_scores(
      Panels weights, Panels grad_scores, int64_t from, int64_t to, const float* lse, const float* delta) {
    const Floats row_lse = load<Floats>(lse), row_delta = load<Floats>(delta);
    int64_t row = from;
    for (; row < to; row++) {
      float *weight = weights.at(0, row), *grad = grad_scores.at(0, row);
      // No weight is above 1, however much of very large scores was lost to rounding.
      const Floats power = load<Floats>(weight) - row_lse;
      const Floats found = exp2(power > 0.0f ? Floats{} : power);
      store(weight, found);
      store(grad, found * (load<Floats>(grad) - row_delta));
    }
    for (; row % kTileRows; row++) {
      store(weights.at(0, row), Floats{});
      store(grad_scores.at(0, row), Floats{});
    }
  }

  const Problem& problem_;
  Bounds bounds_;
  Buffer sums_, q_, q_columns_, k_, k_columns_, v_columns_, grad_out_, grad_out_columns_, grad_q_;
  Buffer out_columns_, weights_, grad_scores_, lse_, delta_;
};

}  // namespace attnreg
