// The forward of few rows, as in decoding: reading the keys and values is most of the work, and packing them would be
// more than that. So products read them where they are.
//
// A vector of scores is that of all rows and of as many neighbouring keys as fill it: lane i has row i % kRows and
// key i / kRows. To softmax.h each lane is a row of its own. A row's lanes get the highest score of all of them, so
// that its values have one sum; their sums of weights are added up in the end.
//
// If a vector's width doesn't divide a head dim, the last vector of a row ends where the row does: in query and key the
// numbers that the vector before it has, too, are 0 (in both, as an infinite key times 0 would be NaN).

#pragma once

#include "softmax.h"

namespace attnreg {

template <class Number>
class FewRows {
 public:
  explicit FewRows(const Problem& problem) : problem_(problem), scale_(problem), alibi_(problem, scale_) {}

  // Whether it computes the tasks of a sequence. Those of others are forward.h's: with more rows packing pays off.
  static bool takes(const Problem& problem, const Sequence& sequence) {
    const bool fits = problem.size >= kLanes && problem.value_size >= kLanes;
    return fits && sequence.rows * problem.group() <= kLanes && problem.dropout == 0.0;
  }

  void run(const Task& task) {
    const auto &k = problem_.k, &v = problem_.v;
    if (problem_.block_table) {
      run(task, paged_rows<Number>(problem_, k, task), paged_rows<Number>(problem_, v, task));
    } else {
      run(task, key_rows<Number>(k, task), key_rows<Number>(v, task));
    }
  }

 private:
  // Keys of a block, and how many of them before its turn a row is fetched: between the rows of a head lie those of
  // others, and what the machine fetches ahead by itself is these.
  static constexpr int64_t kKeys = 128, kAhead = 16;
  // Sums of a tile of a product: with more, they wouldn't stay in registers.
  static constexpr int64_t kSums = 2 * kTileRows;

  template <class SomeRows>
  void run(const Task& task, const SomeRows& keys, const SomeRows& values) {
    with_rows<1>(task.rows, [&](auto known) { run<decltype(known)::value>(task, keys, values); });
  }

  // Calls a function with the power of two from `kRows` on that so many rows need, known at compile time.
  template <int64_t kRows, class Body>
  static void with_rows(int64_t rows, Body&& body) {
    if constexpr (kRows < kLanes) {
      if (rows > kRows) {
        return with_rows<2 * kRows>(rows, body);
      }
    }
    body(std::integral_constant<int64_t, kRows>());
  }

  template <int64_t kRows, class SomeRows>
  void run(const Task& task, const SomeRows& keys, const SomeRows& values) {
    constexpr int64_t kStep = kLanes / kRows, kPanels = std::clamp<int64_t>(kSums / kRows, 1, 4);
    const int64_t value_size = problem_.value_size;
    const int64_t group = problem_.group(), last = (task.row + task.rows - 1) / group;
    const int64_t lowest = task.sequence->first_key(task.row / group), end = task.sequence->keys_end(last);
    last_ = end - 1;
    read_query<kRows>(task);
    if (alibi_.is_on()) {
      alibi_.set(task, kStep);
    }
    const Panels out = out_.zeros(value_size, kRows), scores{scores_, kKeys / kStep};
    store(highest_, broadcast(-kInfinity));
    store(sums_, Floats{});
    for (int64_t key = lowest; key < end; key += kKeys) {
      const int64_t count = std::min(kKeys, end - key), vectors = (count + kStep - 1) / kStep;
      compute_scores<kRows>(keys, key, count);
      bool is_large = false;
      Floats now = highest_of_block<kRows>(task, scores, vectors, key, count, is_large);
      if (is_large && std::is_same_v<Number, Float32>) {
        compute_scores_in_double<kRows>(keys, key, count);
        now = highest_of_block<kRows>(task, scores, vectors, key, count, is_large);
      }
      float factors[kLanes];
      softmax_of_block(scores, 0, vectors, now, scale_, {highest_, sums_}, factors);
      for (int64_t column = 0; column < value_size;) {
        column += add_values<kRows, kPanels>(values, key, count, column, out, factors);
      }
    }
    write_results<kRows>(task, out);
  }

  // Where the vector for a column begins: the last one ends with its row.
  static int64_t place(int64_t column, int64_t size) { return std::min(column, size - kLanes); }

  // Inlined by force: GCC 12 takes a function that only fetches for one without effect, and leaves calls of it out.
  template <class SomeRows>
  [[gnu::always_inline]] void fetch(const SomeRows& rows, int64_t row, int64_t column, int64_t columns) const {
    const auto* from = rows[std::min(row + kAhead, last_)] + column;
    for (int64_t i = 0; i < columns; i += 64 / sizeof *from) {
      __builtin_prefetch(from + i);
    }
  }

  // Rows that there aren't are copies of the last one.
  template <int64_t kRows>
  void read_query(const Task& task) {
    const auto rows = query_rows<Number>(problem_.q, task, problem_.group());
    const int64_t size = problem_.size, width = padded(size, kLanes);
    q_ = query_.take(kRows * width);
    for (int64_t row = 0; row < kRows; row++) {
      const auto* from = rows[task.row + std::min(row, task.rows - 1)];
      float* to = q_ + row * width;
      for (int64_t column = 0; column < size; column += kLanes) {
        store(to + column, Number::read(from + place(column, size)) * scale_.sign);
      }
      std::fill_n(to + width - kLanes, width - size, 0.0f);
    }
  }

  // Keys after the last are copies of it, which are masked.
  template <int64_t kRows, class SomeRows>
  void compute_scores(const SomeRows& keys, int64_t first, int64_t count) {
    constexpr int64_t kStep = kLanes / kRows, kPart = kStep < 4 ? kStep : 4;
    const int64_t size = problem_.size, width = padded(size, kLanes);
    for (int64_t key = 0; key < count; key += kStep) {
      Floats sums[kLanes];
#pragma GCC unroll 4
      for (int64_t part = 0; part < kStep; part += kPart) {
        const typename Number::Stored* k[kPart];
        Floats of_part[kPart][kRows] = {};
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPart; i++) {
          k[i] = keys[first + std::min(key + part + i, count - 1)];
          fetch(keys, first + key + part + i, 0, size);
        }
        for (int64_t column = 0; column < size; column += kLanes) {
          const int64_t here = place(column, size);
#pragma GCC unroll 4
          for (int64_t i = 0; i < kPart; i++) {
            const Floats numbers = without_first(Number::read(k[i] + here), column - here);
#pragma GCC unroll 16
            for (int64_t row = 0; row < kRows; row++) {
              of_part[i][row] += load<Floats>(q_ + row * width + column) * numbers;
            }
          }
        }
#pragma GCC unroll 4
        for (int64_t i = 0; i < kPart; i++) {
#pragma GCC unroll 16
          for (int64_t row = 0; row < kRows; row++) {
            sums[(part + i) * kRows + row] = of_part[i][row];
          }
        }
      }
      store(scores_ + key * kRows, sums_of_lanes(sums));
    }
  }

  // The same, summed in float64 and rounded once.
  template <int64_t kRows, class SomeRows>
  [[gnu::noinline]] void compute_scores_in_double(const SomeRows& keys, int64_t first, int64_t count) {
    const int64_t size = problem_.size, width = padded(size, kLanes);
    for (int64_t i = 0; i < count * kRows; i++) {
      const float* q = q_ + i % kRows * width;
      const auto* k = keys[first + i / kRows];
      Doubles sums{};
      for (int64_t column = 0; column < size; column += kLanes) {
        const int64_t here = place(column, size);
        float numbers[kLanes];
        store(numbers, without_first(Number::read(k + here), column - here));
        for (int64_t half = 0; half < kLanes; half += kLanes / 2) {
          const auto left = load<HalfFloats>(q + column + half);
          const auto right = load<HalfFloats>(numbers + half);
          sums += __builtin_convertvector(left, Doubles) * __builtin_convertvector(right, Doubles);
        }
      }
      double sum = 0.0;
      for (int64_t lane = 0; lane < kLanes / 2; lane++) {
        sum += sums[lane];
      }
      scores_[i] = static_cast<float>(sum);
    }
  }

  // Caps a block's scores, adds slopes and masks them; returns the highest of each row so far, in all of its lanes.
  template <int64_t kRows>
  Floats highest_of_block(
      const Task& task, Panels scores, int64_t vectors, int64_t key, int64_t count, bool& is_large) {
    if (scale_.is_capped) {
      cap(scores, 1, 0, vectors, scale_.to_tanh);
    }
    const double limit = kLarge<Number> / scale_.size;
    if (alibi_.is_on()) {
      is_large = alibi_.add(scores, 1, 0, key, 0, vectors, limit, kLanes / kRows);
    }
    if (is_masked<kRows>(task, key, count)) {
      mask<kRows>(task, scores, vectors, key, count);
    }
    Floats highest = highest_of(scores, 0, vectors, load<Floats>(highest_));
    float twice[2 * kLanes];
    for (int64_t lanes = kRows; lanes < kLanes; lanes *= 2) {
      store(twice, highest);
      store(twice + kLanes, highest);
      highest = larger(load<Floats>(twice + lanes), highest);
    }
    is_large = is_large || (!alibi_.is_on() && any_beyond(highest, limit));
    return highest;
  }

  // Whether some lane of a block has a key that its row doesn't see, or none.
  template <int64_t kRows>
  bool is_masked(const Task& task, int64_t key, int64_t count) const {
    const int64_t group = problem_.group(), first = task.row / group, last = (task.row + task.rows - 1) / group;
    const bool all = task.sequence->first_key(last) <= key && task.sequence->keys_end(first) >= key + count;
    return !all || count % (kLanes / kRows);
  }

  template <int64_t kRows>
  [[gnu::noinline]] void mask(const Task& task, Panels scores, int64_t vectors, int64_t key, int64_t count) const {
    Ints first, end, here;
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const int64_t token = (task.row + std::min(lane % kRows, task.rows - 1)) / problem_.group();
      first[lane] = std::clamp<int64_t>(task.sequence->first_key(token) - key, 0, count);
      end[lane] = std::clamp<int64_t>(task.sequence->keys_end(token) - key, 0, count);
      here[lane] = lane / kRows;
    }
    const Floats hidden = broadcast(-kInfinity);
    for (int64_t row = 0; row < vectors; row++, here += int32_t(kLanes / kRows)) {
      float* at = scores.at(0, row);
      store(at, here < first ? hidden : here >= end ? hidden : load<Floats>(at));
    }
  }

  // Adds the values of a block, times their weights, to what earlier ones left of the output, times its factors, for as
  // many columns as a tile has, kPanels vectors at most; returns how many.
  template <int64_t kRows, int64_t kPanels, class SomeRows>
  int64_t add_values(
      const SomeRows& values, int64_t first, int64_t count, int64_t column, Panels out, const float* factors) const {
    if constexpr (kPanels > 1) {
      if (problem_.value_size - column <= (kPanels - 1) * kLanes) {
        return add_values<kRows, kPanels / 2>(values, first, count, column, out, factors);
      }
    }
    Floats sums[kRows][kPanels] = {};
    const float* weights = scores_;
    const int64_t last = place(column + (kPanels - 1) * kLanes, problem_.value_size);
    for (int64_t key = 0; key < count; key++, weights += kRows) {
      const auto* from = values[first + key];
      fetch(values, first + key, column, kPanels * kLanes);
#pragma GCC unroll 4
      for (int64_t n = 0; n < kPanels; n++) {
        const Floats numbers = Number::read(from + (n < kPanels - 1 ? column + n * kLanes : last));
#pragma GCC unroll 16
        for (int64_t row = 0; row < kRows; row++) {
          sums[row][n] += weights[row] * numbers;
        }
      }
    }
#pragma GCC unroll 16
    for (int64_t row = 0; row < kRows; row++) {
#pragma GCC unroll 4
      for (int64_t n = 0; n < kPanels; n++) {
        float* at = out.at(column / kLanes + n, row);
        store(at, load<Floats>(at) * factors[row] + sums[row][n]);
      }
    }
    return kPanels * kLanes;
  }

  template <int64_t kRows>
  void write_results(const Task& task, Panels out) {
    const int64_t group = problem_.group();
    const auto lse = query_rows<Float32>(problem_.lse, task, group);
    const auto rows = query_rows<Number>(problem_.out, task, group);
    for (int64_t row = 0; row < task.rows; row++) {
      float sum = 0.0f;
      for (int64_t lane = row; lane < kLanes; lane += kRows) {
        sum += sums_[lane];
      }
      const double lse_of_row = highest_[row] * scale_.size + std::log(double(sum));
      *lse[task.row + row] = sum == 0.0f ? -kInfinity : static_cast<float>(lse_of_row);
      const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
      for (int64_t column = 0; column < problem_.value_size; column += kLanes) {
        auto* to = rows[task.row + row] + place(column, problem_.value_size);
        Number::write(to, load<Floats>(out.at(column / kLanes, row)) * factor);
      }
    }
  }

  const Problem& problem_;
  const Scale scale_;
  Alibi alibi_;
  Buffer query_, out_;
  float* q_ = nullptr;
  int64_t last_ = 0;
  // Of a block, and of each lane so far.
  alignas(64) float scores_[kKeys * kLanes], highest_[kLanes], sums_[kLanes];
};

}  // namespace attnreg
