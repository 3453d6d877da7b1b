// The backward in bfloat16 by AMX (tiles.h): the five products of backward.h, for which weights and gradients of scores
// are rounded to bfloat16, as PyTorch's own operations round them.
//
// Both are computed as panels, rows as columns. Gradients of key and value are sums over rows: the words that their
// products multiply are of two panels. Those of the query are sums over keys: there words are of two keys.

#pragma once

#include "backward.h"
#include "tiles.h"

#ifdef ATTNREG_TILES

namespace attnreg {

class TileBackward : public Backward<BFloat16, 256> {
 public:
  using Backward::Backward;

 private:
  static constexpr int64_t kFew = kPair, kKeys = 128;
  // Rows whose weights are kept at a time, so that sums of keys are loaded and stored once for all of them.
  static constexpr int64_t kGroup = 256;

  // A chunk's rows in every form that a product needs, and one block of keys; `weights` and so on for rows of a group.
  struct Tiles {
    int64_t lanes;
    TileMatrix q, q_rows, grad_out, grad_out_rows;
    TileMatrix k, k_rows, v;
    TileMatrix weights, grad_scores, grad_scores_of_keys;
    Panels scores, grads, grad_q;
    // What is subtracted from a score as an exponent of 2, and from the gradient of its weight.
    float *zeros, *exponent, *delta, *grad_lse;
  };

  void add_chunk(const Task& head, int64_t chunk, const KeySums& sums, const ChunkOrder& order) override {
    const Task task = task_of(head, chunk);
    bounds_.set(task, problem_.group(), kPair);
    const bool is_small = task.rows < kFew || bounds_.highest() - bounds_.lowest() < kFew;
    if (is_small || !load_rows(task)) {
      return Backward::add_chunk(head, chunk, sums, order);
    }
    const TileSession session;
    pack(task);
    const auto keys = key_rows<BFloat16>(problem_.k, task), values = key_rows<BFloat16>(problem_.v, task);
    for (int64_t key = bounds_.lowest(); key < bounds_.highest(); key += kKeys) {
      const int64_t count = std::min(kKeys, bounds_.highest() - key);
      pack_tiles<false>(keys, key, count, problem_.size, t_.k);
      pack_pairs<1, true>(keys, key, count, problem_.size, t_.k_rows);
      pack_tiles<false>(values, key, count, problem_.value_size, t_.v);
      order.wait(key + count);
      for (int64_t lane = 0; lane < t_.lanes; lane += kGroup) {
        add_group(lane, std::min(kGroup, t_.lanes - lane), key, count, sums);
      }
      order.set_added(key + count);
    }
    std::fill_n(t_.exponent, t_.lanes, static_cast<float>(problem_.scale));
    const auto grad_q = query_rows<BFloat16>(problem_.grad_q, task, problem_.group());
    unpack_columns(t_.grad_q, t_.exponent, grad_q, task.row, task.rows, problem_.size);
  }

  // Loads what is known of each row from its LSE and output. Returns false where an LSE is too large for that.
  bool load_rows(const Task& task) {
    const int64_t group = problem_.group(), lanes = padded(task.rows, kPair);
    t_.lanes = lanes;
    t_.zeros = base_.take(lanes);
    t_.exponent = rest_.take(lanes);
    t_.delta = delta_.take(lanes);
    t_.grad_lse = grad_lse_.take(lanes);
    std::fill_n(t_.zeros, lanes, 0.0f);
    const auto lses = query_rows<Float32>(problem_.lse, task, group);
    const auto grad_lses = query_rows<Float32>(problem_.grad_lse, task, group);
    const auto outs = query_rows<BFloat16>(problem_.out, task, group);
    const auto grads = query_rows<BFloat16>(problem_.grad_out, task, group);
    for (int64_t row = 0; row < lanes; row++) {
      // Weights are 0 in a row that sees no key, and in lanes after the last row.
      const float lse = row < task.rows ? *lses[task.row + row] : -kInfinity;
      if (std::isfinite(lse) && std::abs(lse) > kLarge<BFloat16>) {
        return false;
      }
      t_.exponent[row] = lse == -kInfinity ? kInfinity : static_cast<float>(lse / kLog2);
      const bool counts = problem_.grad_lse.data && std::isfinite(lse);
      t_.grad_lse[row] = counts ? *grad_lses[task.row + row] : 0.0f;
      Floats sum{};
      for (int64_t column = 0; row < task.rows && column < problem_.value_size; column += kLanes) {
        sum += BFloat16::read(outs[task.row + row] + column) * BFloat16::read(grads[task.row + row] + column);
      }
      t_.delta[row] = _mm512_reduce_add_ps(sum) - t_.grad_lse[row];
    }
    return true;
  }

  void pack(const Task& task) {
    const int64_t size = problem_.size, value_size = problem_.value_size, lanes = t_.lanes, group = problem_.group();
    t_.q = take_tiles(q_columns_, lanes, size);
    t_.q_rows = take_tiles(q_, size, lanes);
    t_.grad_out = take_tiles(grad_out_columns_, lanes, value_size);
    t_.grad_out_rows = take_tiles(grad_out_, value_size, lanes);
    t_.k = take_tiles(k_columns_, kKeys, size);
    t_.k_rows = take_tiles(k_, size, kKeys);
    t_.v = take_tiles(v_columns_, kKeys, value_size);
    t_.weights = take_tiles(weight_tiles_, kKeys, kGroup);
    t_.grad_scores = take_tiles(grad_score_tiles_, kKeys, kGroup);
    t_.grad_scores_of_keys = take_tiles(key_grad_score_tiles_, kPair, kKeys);
    t_.scores = weights_.panels(kPair, kKeys);
    t_.grads = grad_scores_.panels(kPair, kKeys);
    t_.grad_q = grad_q_.zeros(lanes, size);
    const auto queries = query_rows<BFloat16>(problem_.q, task, group);
    const auto grads = query_rows<BFloat16>(problem_.grad_out, task, group);
    pack_tiles<true>(queries, task.row, task.rows, size, t_.q);
    pack_pairs<kTile, false>(queries, task.row, task.rows, size, t_.q_rows);
    pack_tiles<true>(grads, task.row, task.rows, value_size, t_.grad_out);
    pack_pairs<kTile, false>(grads, task.row, task.rows, value_size, t_.grad_out_rows);
  }

  // Adds what a block of keys and a group of rows have to do with each other.
  void add_group(int64_t lane, int64_t lanes, int64_t key, int64_t count, const KeySums& sums) {
    const auto all = bounds_.rounded(lane, lanes, key, count, kPair);
    // Steps of the group, those rows that see some of these keys: no bound decreases, so they are neighbours.
    int64_t first = -1, last = -1;
    for (int64_t step = 0; step * kPair < lanes; step++) {
      const int64_t here = lane + step * kPair;
      const auto own = bounds_.rounded(here, kPair, key, count, kPair);
      if (own.from >= own.to) {
        continue;
      }
      first = first < 0 ? step : first;
      last = step + 1;
      add_pair(here, step, key, count, own);
      for (int64_t tile = all.from / kTile; tile < all.to / kTile; tile++) {
        if (tile < own.from / kTile || tile >= own.to / kTile) {
          std::fill_n(t_.weights.at(tile, step), kTileNumbers, 0);
          std::fill_n(t_.grad_scores.at(tile, step), kTileNumbers, 0);
        }
      }
    }
    if (first < 0) {
      return;
    }
    const int64_t row = lane / kPair, from = all.from / kTile, to = all.to / kTile;
    const auto add = [&](TileMatrix left, TileMatrix right, Panels to_sums, int64_t size) {
      for (int64_t tile = 0; tile < size / kTile; tile += 2) {
        const Panels result{to_sums.at(tile, key), to_sums.height};
        TileProduct(left, right.from(tile, row), result, from, to, first, last, true).finish();
      }
    };
    add(t_.weights, t_.grad_out_rows, sums.v, problem_.value_size);
    add(t_.grad_scores, t_.q_rows, sums.k, problem_.size);
  }

  // The weights of two panels of rows, the gradients of their scores, and what these add to the gradient of the query.
  void add_pair(int64_t lane, int64_t step, int64_t key, int64_t count, const Bounds::Span& span) {
    const int64_t from = span.from / kTile, to = span.to / kTile, tile = lane / kTile;
    TileProduct(t_.k, t_.q.from(tile), t_.scores, from, to, 0, t_.q.steps, false).finish();
    TileProduct(t_.v, t_.grad_out.from(tile), t_.grads, from, to, 0, t_.grad_out.steps, false).finish();
    if (span.masked) {
      bounds_.mask(t_.scores, 2, lane, key, span);
    }
    if (bounds_.within(lane, kPair, key, count)) {
      for (int64_t i = 0, here = lane; i < 2; i++, here += kLanes) {
        gradients_of_block<BFloat16>(
            t_.scores.from(i), t_.grads.from(i), span.from, span.to, true, all_rows(), scale_,
            {t_.zeros + here, t_.exponent + here, t_.delta + here, t_.grad_lse + here});
      }
      store_pair<true>(lane, step, span);
    } else {
      store_pair<false>(lane, step, span);
    }
    TileProduct(
        t_.k_rows, t_.grad_scores_of_keys, t_.grad_q.from(lane / kLanes), 0, problem_.size / kTile,
        span.from / kTileSteps, span.to / kTileSteps, true)
        .finish();
  }

  // Stores weights and gradients of scores as tiles; computes them first, from scores and gradients of weights.
  template <bool kIsDone>
  void store_pair(int64_t lane, int64_t step, const Bounds::Span& span) const {
    Floats exponent[2], delta[2];
    for (int64_t i = 0; i < 2; i++) {
      exponent[i] = load<Floats>(t_.exponent + lane + i * kLanes);
      delta[i] = load<Floats>(t_.delta + lane + i * kLanes);
    }
    for (int64_t key = span.from; key < span.to; key += 2) {
      Words weights[2][2], grads[2][2];  // by key and panel
#pragma GCC unroll 2
      for (int64_t n = 0; n < 2; n++) {
#pragma GCC unroll 2
        for (int64_t i = 0; i < 2; i++) {
          Floats weight = load<Floats>(t_.scores.at(i, key + n)), grad = load<Floats>(t_.grads.at(i, key + n));
          if constexpr (!kIsDone) {
            weight = fast_exp2(weight * scale_.to_exponent - exponent[i]);
            grad = weight * (grad - delta[i]);
          }
          weights[n][i] = nearest(weight);
          grads[n][i] = nearest(grad);
        }
        const int64_t at = (key + n) % kTile * kTileSteps;
        store(t_.weights.at((key + n) / kTile, step) + at, pairs(weights[n][0], weights[n][1]));
        store(t_.grad_scores.at((key + n) / kTile, step) + at, pairs(grads[n][0], grads[n][1]));
      }
#pragma GCC unroll 2
      for (int64_t i = 0; i < 2; i++) {
        auto* to = t_.grad_scores_of_keys.at(i, key / kTileSteps) + key % kTileSteps / 2 * kTileSteps;
        store(to, pairs(grads[0][i], grads[1][i]));
      }
    }
  }

  Tiles t_{};
  Buffer weight_tiles_, grad_score_tiles_, key_grad_score_tiles_;
};

}  // namespace attnreg

#endif
