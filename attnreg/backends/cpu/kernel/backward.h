// The backward: weights are recomputed from the LSE, with five products for each block of keys.

#pragma once

#include "few_rows.h"
#include "key_sums.h"
#include "softmax.h"

namespace attnreg {

// `kRows` are those of a chunk: they are packed at a time, in every form that a product needs.
template <class Number, int64_t kRows = 5 * kMaxPanels * kLanes>
class Backward {
 public:
  static constexpr int64_t kKeys = 64;

  explicit Backward(const Problem& problem)
      : problem_(problem), scale_(problem), alibi_(problem, scale_), dropout_(problem) {}
  virtual ~Backward() = default;
  static int64_t chunks(const Task& head) { return (head.rows + kRows - 1) / kRows; }

  // Computes all chunks of a head.
  void run(const Task& head) {
    const int64_t count = KeySums::size(problem_, *head.sequence);
    float* memory = sums_.take(count);
    std::fill_n(memory, count, 0.0f);
    const KeySums sums = KeySums::in(memory, problem_, *head.sequence);
    for (int64_t chunk = 0; chunk < chunks(head); chunk++) {
      add_chunk(head, chunk, sums, ChunkOrder());
    }
    write(head, sums);
  }

  // Computes one chunk; the last one writes what all have added.
  void run(SharedHead& shared, int64_t chunk) {
    struct AtEnd {
      SharedHead& shared;
      int64_t chunk;
      ~AtEnd() { shared.set_added(chunk, SharedHead::kEnd); }  // also without memory: others wait for this chunk
    } at_end{shared, chunk};
    const KeySums sums = KeySums::in(shared.sums(), problem_, *shared.head.sequence);
    add_chunk(shared.head, chunk, sums, {&shared, chunk});
    shared.wait(chunk, SharedHead::kEnd);
    if (chunk == shared.chunks - 1) {
      write(shared.head, sums);
      shared.free_sums();
    }
  }

 protected:
  static Task task_of(const Task& head, int64_t chunk) {
    return {head.sequence, head.key_head, chunk * kRows, std::min(kRows, head.rows - chunk * kRows)};
  }

  // What a task works on: its rows in every form that a product needs, and one block of keys and of scores.
  struct Packed {
    Panels q, q_columns, grad_out, grad_out_columns, grad_q;
    Panels k, k_columns, v_columns, weights, grad_scores, slopes, kept;
    int64_t lanes;
    float *base, *rest, *delta, *grad_lse, *delta_of_out;  // as `RowStatistics` has them; by the output that was given
  };

  virtual void add_chunk(const Task& head, int64_t chunk, const KeySums& sums, const ChunkOrder& order) {
    const int64_t size = problem_.size;
    const Task task = task_of(head, chunk);
    const Packed packed = pack(task);
    bounds_.set(task, problem_.group());
    if (alibi_.is_on()) {
      alibi_.set(task);
    }
    if (dropout_.is_on()) {
      dropout_.set(task);
    }
    const bool is_large = load_statistics(task, packed);
    few_rows_ = FewRows<Number>::takes(problem_, *head.sequence);
    if (is_large) {
      compute_statistics(task, packed);
    }
    for (int64_t row = 0; row < packed.lanes; row++) {
      packed.delta[row] -= packed.grad_lse[row];
    }
    const int64_t q_panels = padded(size, kLanes) / kLanes, v_panels = padded(problem_.value_size, kLanes) / kLanes;
    for (int64_t key = bounds_.lowest(); key < bounds_.highest(); key += kKeys) {
      const int64_t count = pack_keys(task, packed, key);
      pack_rows(key_rows<Number>(problem_.k, task), key, count, size, packed.k);
      order.wait(key + count);
      for_each_tile(packed, key, count, [&](auto known, int64_t lane, const Bounds::Span& span) {
        constexpr int64_t kWidth = decltype(known)::value;
        const int64_t end = padded(span.to, kTileRows), rows = std::min(task.rows - lane, kWidth * kLanes);
        products<kWidth>(packed, lane, key, span, is_large);
        if (span.masked) {
          bounds_.mask(packed.weights, kWidth, lane, key, span);
        }
        const bool is_all = !std::is_same_v<Number, Float32> && bounds_.within(lane, kWidth * kLanes, key, count);
        for (int64_t i = 0, here = lane; i < kWidth; i++, here += kLanes) {
          const Ints whole = dropout_.is_on() ? bounds_.each_within(here, key, count) : all_rows();
          gradients_of_block<Number>(
              packed.weights.from(i), packed.grad_scores.from(i), span.from, span.to, is_all || dropout_.is_on(), whole,
              scale_,
              {packed.base + here, packed.rest + here, packed.delta + here, packed.grad_lse + here});
        }
        if (scale_.is_capped) {
          multiply(packed.grad_scores, packed.slopes, kWidth, span.from, span.to);
        }
        if (dropout_.is_on()) {
          multiply(packed.weights, packed.kept, kWidth, span.from, span.to);
        }
        columns_by_rows<kWidth, Store::kAdd>(
            packed.k, packed.grad_scores, packed.grad_q.from(lane / kLanes), 0, padded(size, kTileRows), span.from,
            span.to);
        const Panels q{packed.q.at(0, lane), packed.q.height};
        const Panels grad_out{packed.grad_out.at(0, lane), packed.grad_out.height};
        add_rows_by_all_rows(packed.weights, grad_out, sums.v, v_panels, key, span.from, end, rows);
        add_rows_by_all_rows(packed.grad_scores, q, sums.k, q_panels, key, span.from, end, rows);
      });
      order.set_added(key + count);
    }
    std::fill_n(packed.rest, packed.lanes, static_cast<float>(problem_.scale));
    const auto grad_q = query_rows<Number>(problem_.grad_q, task, problem_.group());
    unpack_columns(packed.grad_q, packed.rest, grad_q, task.row, task.rows, size);
  }

  // Calls a function for each tile of a block of keys, with its width, first lane and keys.
  template <class Body>
  void for_each_tile(const Packed& packed, int64_t key, int64_t count, Body&& body) const {
    for (int64_t lane = 0, width; lane < packed.lanes; lane += width * kLanes) {
      width = next_width((packed.lanes - lane) / kLanes);
      const auto span = bounds_.of(lane, width * kLanes, key, count);
      if (span.from < span.to) {
        with_width(width, [&](auto known) { body(known, lane, span); });
      }
    }
  }

  Packed pack(const Task& task) {
    const int64_t size = problem_.size, value_size = problem_.value_size, lanes = padded(task.rows, kLanes);
    const auto queries = query_rows<Number>(problem_.q, task, problem_.group());
    const auto grads = query_rows<Number>(problem_.grad_out, task, problem_.group());
    const Packed packed{
        q_.panels(size, task.rows), q_columns_.panels(lanes, size), grad_out_.panels(value_size, task.rows),
        grad_out_columns_.panels(lanes, value_size), grad_q_.zeros(lanes, padded(size, kTileRows)),
        k_.panels(size, kKeys), k_columns_.panels(kKeys, size), v_columns_.panels(kKeys, value_size),
        weights_.panels(kMaxPanels * kLanes, kKeys), grad_scores_.panels(kMaxPanels * kLanes, kKeys),
        scale_.is_capped ? slopes_.panels(kMaxPanels * kLanes, kKeys) : Panels{},
        dropout_.is_on() ? kept_.panels(kMaxPanels * kLanes, kKeys) : Panels{}, lanes,
        base_.take(lanes), rest_.take(lanes), delta_.take(lanes), grad_lse_.take(lanes), delta_of_out_.take(lanes)};
    pack_rows(queries, task.row, task.rows, size, packed.q);
    pack_columns(queries, task.row, task.rows, size, scale_.sign, packed.q_columns);
    pack_rows(grads, task.row, task.rows, value_size, packed.grad_out);
    pack_columns(grads, task.row, task.rows, value_size, 1.0f, packed.grad_out_columns);
    return packed;
  }

  // Packs a block of keys and values, and returns how many there are.
  int64_t pack_keys(const Task& task, const Packed& packed, int64_t key) const {
    const int64_t count = std::min(kKeys, bounds_.highest() - key);
    pack_columns(key_rows<Number>(problem_.k, task), key, count, problem_.size, 1.0f, packed.k_columns);
    pack_columns(key_rows<Number>(problem_.v, task), key, count, problem_.value_size, 1.0f, packed.v_columns);
    return count;
  }

  // Computes the scores of a tile, and the gradients of its weights.
  template <int64_t kWidth>
  void products(const Packed& packed, int64_t lane, int64_t key, const Bounds::Span& span, bool is_large) const {
    const int64_t panel = lane / kLanes, end = padded(span.to, kTileRows);
    const Panels q = packed.q_columns.from(panel), grad_out = packed.grad_out_columns.from(panel);
    if (is_large && std::is_same_v<Number, Float32>) {
      rows_of_heads_in_double<kWidth>(packed.k_columns, q, packed.weights, span.from, end, problem_.size);
    } else if (kWidth == 1 && few_rows_) {  // rounded as in the forward: a weight is exp(score - LSE)
      rows_of_heads_by_lanes(packed.k_columns, q, packed.weights, span.from, end, problem_.size);
    } else {
      rows_of_heads<kWidth>(packed.k_columns, q, packed.weights, span.from, end, problem_.size);
    }
    rows_of_heads<kWidth>(packed.v_columns, grad_out, packed.grad_scores, span.from, end, problem_.value_size);
    if (scale_.is_capped) {
      cap(packed.weights, kWidth, span.from, span.to, scale_.to_tanh, packed.slopes);
    }
    if (alibi_.is_on()) {
      alibi_.add(packed.weights, kWidth, lane, key, span.from, span.to, kInfinity);
    }
    if (dropout_.is_on()) {
      dropout_.template draw<false>(packed.kept, kWidth, lane, key, span.from, span.to);
      multiply(packed.grad_scores, packed.kept, kWidth, span.from, span.to);
    }
  }

  // Loads what is known of each row from its LSE and output. Returns whether LSEs are so large that it isn't exact enough.
  bool load_statistics(const Task& task, const Packed& packed) {
    const int64_t group = problem_.group(), size = problem_.value_size;
    const auto lses = query_rows<Float32>(problem_.lse, task, group);
    const auto grads = query_rows<Float32>(problem_.grad_lse, task, group);
    bool is_large = false;
    for (int64_t row = 0; row < packed.lanes; row++) {
      // A weight is exp(score - LSE): 0 in a row that sees no key, and in lanes after the last row.
      const float lse_of_row = row < task.rows ? *lses[task.row + row] : -kInfinity;
      const double lse = lse_of_row == -kInfinity ? kInfinity : lse_of_row;
      const float base = static_cast<float>(lse / scale_.size);
      packed.base[row] = std::isfinite(base) ? base : 0.0f;
      packed.rest[row] = static_cast<float>((lse - packed.base[row] * scale_.size) / kLog2);
      const bool counts = problem_.grad_lse.data && std::isfinite(lse_of_row);
      packed.grad_lse[row] = counts ? *grads[task.row + row] : 0.0f;
      is_large = is_large || (std::isfinite(lse) && std::abs(lse) > kLarge<Number>);
    }
    // Summed in the order in which the product of value and gradient is: in a row that sees one key the two are
    // equal, and their difference has to be exactly 0.
    const Panels out = out_columns_.panels(packed.lanes, size);
    pack_columns(query_rows<Number>(problem_.out, task, group), task.row, task.rows, size, 1.0f, out);
    for (int64_t panel = 0; panel * kLanes < packed.lanes; panel++) {
      Floats all{};
      for (int64_t column = 0; column < size;) {
        Floats sum{};
        for (const int64_t end = std::min(size, column + kTerms); column < end; column++) {
          sum += load<Floats>(out.at(panel, column)) * load<Floats>(packed.grad_out_columns.at(panel, column));
        }
        all += sum;
      }
      store(packed.delta + panel * kLanes, all);
    }
    return is_large;
  }

  // Computes the same once more from scores, as plain PyTorch operations do.
  void compute_statistics(const Task& task, const Packed& packed) {
    std::copy_n(packed.delta, packed.lanes, packed.delta_of_out);
    std::fill_n(packed.base, packed.lanes, -kInfinity);
    std::fill_n(packed.rest, packed.lanes, 0.0f);
    std::fill_n(packed.delta, packed.lanes, 0.0f);
    for (int64_t key = bounds_.lowest(); key < bounds_.highest(); key += kKeys) {
      const int64_t count = pack_keys(task, packed, key);
      for_each_tile(packed, key, count, [&](auto known, int64_t lane, const Bounds::Span& span) {
        constexpr int64_t kWidth = decltype(known)::value;
        products<kWidth>(packed, lane, key, span, true);
        if (span.masked) {
          bounds_.mask(packed.weights, kWidth, lane, key, span);
        }
        for (int64_t i = 0; i < kWidth; i++, lane += kLanes) {
          const Panels weights = packed.weights.from(i), grads = packed.grad_scores.from(i);
          const Floats highest = highest_of(weights, span.from, span.to, load<Floats>(packed.base + lane));
          float factors[kLanes];
          softmax_of_block(
              weights, span.from, span.to, highest, scale_, {packed.base + lane, packed.rest + lane},
              factors);
          Floats sum{};
          for (int64_t row = span.from; row < span.to; row++) {
            sum += load<Floats>(weights.at(0, row)) * load<Floats>(grads.at(0, row));
          }
          store(packed.delta + lane, load<Floats>(packed.delta + lane) * load<Floats>(factors) + sum);
        }
      });
    }
    const auto lses = query_rows<Float32>(problem_.lse, task, problem_.group());
    for (int64_t row = 0; row < packed.lanes; row++) {
      const float lse = row < task.rows ? *lses[task.row + row] : -kInfinity;
      settle<Number>(lse, packed.delta_of_out[row], scale_.size, packed.base[row], packed.rest[row], packed.delta[row]);
    }
  }

  void write(const Task& head, const KeySums& sums) const {
    const int64_t keys = head.sequence->keys;
    const auto grad_k = key_rows<Number>(problem_.grad_k, head), grad_v = key_rows<Number>(problem_.grad_v, head);
    unpack_rows(sums.k, static_cast<float>(problem_.scale), grad_k, keys, problem_.size);
    unpack_rows(sums.v, 1.0f, grad_v, keys, problem_.value_size);
  }

  const Problem& problem_;
  const Scale scale_;
  Alibi alibi_;
  Dropout dropout_;
  Bounds bounds_;
  bool few_rows_ = false;
  Buffer sums_, q_, q_columns_, k_, k_columns_, v_columns_, grad_out_, grad_out_columns_, grad_q_;
  Buffer out_columns_, weights_, grad_scores_, slopes_, kept_, base_, rest_, delta_, grad_lse_, delta_of_out_;
};

}  // namespace attnreg
