// The forward in bfloat16 by AMX (tiles.h). As in forward.h scores and outputs are transposed, rows as columns, and 16 of
// them are a vector: a tile of 16 keys x 16 rows is a part of a panel, and the words of a right matrix are the weights of
// two keys, so that two vectors of weights make a vector of words without being shuffled.

#pragma once

#include "forward.h"
#include "tiles.h"

#ifdef ATTNREG_TILES

namespace attnreg {

class TileForward : public Forward<BFloat16> {
 public:
  // Rows of a task, in whole pairs of tiles.
  static constexpr int64_t kRows = 1024, kStep = kPair;

  using Forward::Forward;

  void run(const Task& task) {
    bounds_.set(task, problem_.group(), kPair);
    if (task.rows < kFew || bounds_.highest() - bounds_.lowest() < kFew) {
      return Forward::run(task);
    }
    const TileSession session;
    const int64_t lanes = padded(task.rows, kPair), size = problem_.size, value_size = problem_.value_size;
    const TileMatrix q = take_tiles(q_, lanes, size);
    const TileMatrix k = take_tiles(k_, kPacked, size), v = take_tiles(v_, value_size, kPacked);
    const Panels out = out_.zeros(lanes, value_size);
    base_ = base_buffer_.take(lanes);
    sums_of_rows_ = sums_.take(lanes);
    std::fill_n(base_, lanes, -kInfinity);
    std::fill_n(sums_of_rows_, lanes, 0.0f);
    for (int64_t i = 0; i < 2; i++) {
      scores_of_[i] = score_buffers_[i].panels(kPair, kKeys);
      weights_of_[i] = take_tiles(weight_buffers_[i], kPair, kKeys);
    }
    pack_tiles<true>(query_rows<BFloat16>(problem_.q, task, problem_.group()), task.row, task.rows, size, q);
    for (int64_t key = bounds_.lowest(); key < bounds_.highest(); key += kPacked) {
      const int64_t count = std::min(kPacked, bounds_.highest() - key);
      with_key_rows<BFloat16>(
          problem_, problem_.k, task, [&](auto rows) { pack_tiles<false>(rows, key, count, size, k); });
      with_key_rows<BFloat16>(
          problem_, problem_.v, task, [&](auto rows) { pack_pairs<1, true>(rows, key, count, value_size, v); });
      list_blocks(lanes, key, count);
      run_blocks(q, k, v, out);
    }
    write_results(task, out, base_, sums_of_rows_);
  }

 private:
  // Tasks with fewer rows or keys run by forward.h: a pair of tiles would be mostly empty.
  static constexpr int64_t kFew = kPair;
  // Keys that are packed at a time, and keys of a block, whose scores stay in the first-level cache.
  static constexpr int64_t kPacked = 512, kKeys = 128;
  // A row's weights are relative to a score that is at most this power of 2 below its highest: sums are seldom rescaled.
  static constexpr float kBelow = 8.0f;

  // Two panels of rows and, of the packed keys, those of `span` after `block`. What outputs so far are multiplied by.
  struct Block {
    int64_t lane, key, block;
    Bounds::Span span;
    bool rescales = false;
    Floats factors[2]{};
  };

  void list_blocks(int64_t lanes, int64_t key, int64_t count) {
    blocks_.clear();
    for (int64_t block = 0; block < count; block += kKeys) {
      for (int64_t lane = 0; lane < lanes; lane += kPair) {
        const auto span = bounds_.rounded(lane, kPair, key + block, std::min(kKeys, count - block), kPair);
        if (span.from < span.to) {
          blocks_.push_back({lane, key + block, block, span});
        }
      }
    }
  }

  // While weights of a block are computed, AMX multiplies the previous block's weights and the next block's scores.
  void run_blocks(TileMatrix q, TileMatrix k, TileMatrix v, Panels out) {
    const auto scores = [&](size_t i) {
      const Block& block = blocks_[i];
      return TileProduct(
          k.from(block.block / kTile), q.from(block.lane / kTile), scores_of_[i % 2], block.span.from / kTile,
          block.span.to / kTile, 0, q.steps, false);
    };
    const auto outputs = [&](size_t i) {
      const Block& block = blocks_[i];
      const Panels to = out.from(block.lane / kLanes);
      if (block.rescales) {
        rescale(to, block.factors);
      }
      return TileProduct(
          v.from(0, block.block / kTileSteps), weights_of_[i % 2], to, 0, problem_.value_size / kTile,
          block.span.from / kTileSteps, block.span.to / kTileSteps, true);
    };
    TileProduct first = blocks_.empty() ? TileProduct() : scores(0);
    first.finish();
    for (size_t i = 0; i < blocks_.size(); i++) {
      TileProduct before = i > 0 ? outputs(i - 1) : TileProduct();
      TileProduct next = i + 1 < blocks_.size() ? scores(i + 1) : TileProduct();
      const int64_t parts = 2 * (blocks_[i].span.to - blocks_[i].span.from) / kTile;
      const int64_t steps = before.steps() + next.steps();
      int64_t part = 0, done = 0;
      softmax(blocks_[i], scores_of_[i % 2], weights_of_[i % 2], [&] {
        for (part++; done * parts < steps * part; done++) {
          before.is_done() ? next.step() : before.step();
        }
      });
    }
    if (!blocks_.empty()) {
      outputs(blocks_.size() - 1).finish();
    }
  }

  void rescale(Panels out, const Floats* factors) const {
    for (int64_t panel = 0; panel < 2; panel++) {
      for (int64_t row = 0; row < problem_.value_size; row++) {
        store(out.at(panel, row), load<Floats>(out.at(panel, row)) * factors[panel]);
      }
    }
  }

  // Turns scores into weights, and calls a function after each tile of them.
  template <class Between>
  void softmax(Block& block, Panels scores, TileMatrix weights, Between&& between) {
    const auto& [from, to, masked] = block.span;
    if (masked) {
      bounds_.mask(scores, 2, block.lane, block.key, block.span);
    }
    for (int64_t panel = 0; panel < 2; panel++) {
      float *base_of = base_ + block.lane + panel * kLanes, *sum_of = sums_of_rows_ + block.lane + panel * kLanes;
      const Floats before = load<Floats>(base_of);
      const Floats highest = highest_of(scores.from(panel), from, to, before);
      const Ints rises = (highest - before) * scale_.to_exponent > kBelow;  // also from -inf, but not to it
      const Floats now = rises ? highest : before;
      const Floats base = (now == -kInfinity ? Floats{} : now) * scale_.to_exponent;
      const Floats factor = rises ? exp2(before * scale_.to_exponent - base) : broadcast(1.0f);
      block.factors[panel] = factor;
      block.rescales = block.rescales || _mm512_test_epi32_mask(bits_of<__m512i>(rises), bits_of<__m512i>(rises));
      store(base_of, now);
      Floats sums[2] = {};
      for (int64_t key = from; key < to; key += kTile) {
        auto* at = weights.at(panel, key / kTileSteps) + key % kTileSteps / 2 * kTileSteps;
#pragma GCC unroll 8
        for (int64_t i = 0; i < kTile; i += 2) {
          const Floats even = fast_exp2(load<Floats>(scores.at(panel, key + i)) * scale_.to_exponent - base);
          const Floats odd = fast_exp2(load<Floats>(scores.at(panel, key + i + 1)) * scale_.to_exponent - base);
          sums[0] += even;
          sums[1] += odd;
          store(at + i / 2 * kTileSteps, pairs(nearest(even), nearest(odd)));
        }
        between();
      }
      store(sum_of, load<Floats>(sum_of) * factor + (sums[0] + sums[1]));
    }
  }

  std::vector<Block> blocks_;
  Panels scores_of_[2];
  TileMatrix weights_of_[2];
  float *base_ = nullptr, *sums_of_rows_ = nullptr;
  Buffer score_buffers_[2], weight_buffers_[2], base_buffer_;
};

}  // namespace attnreg

#endif
