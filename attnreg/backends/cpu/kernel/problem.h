// A call as the workers read it, made of what its caller says (call.h), and the tasks that it is cut into.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "panels.h"

namespace attnreg {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2 = 0.6931471805599453;

// A tensor (batch, token, head, size): its address, and its strides but for the last, which is 1.
struct Operand {
  void* data;
  int64_t batch, token, head;

  template <class Number>
  typename Number::Stored* at(int64_t in_batch, int64_t in_token, int64_t in_head) const {
    return static_cast<typename Number::Stored*>(data) + in_batch * batch + in_token * token + in_head * head;
  }
};

// Row i sees key j if shift - left <= j - i <= shift + right, where shift is keys - rows; -1 is unbounded.
struct Sequence {
  int64_t number, batch, row, rows, key, keys, left, right;

  int64_t first_key(int64_t row) const {
    return left < 0 ? 0 : std::clamp<int64_t>(row + keys - rows - left, 0, keys);
  }
  int64_t keys_end(int64_t row) const {
    return right < 0 ? keys : std::clamp<int64_t>(row + keys - rows + right + 1, 0, keys);
  }
};

// A gradient of the LSE, and each option, is there if its address isn't null.
struct Problem {
  int64_t dtype;
  int64_t heads, key_heads, size, value_size, count;
  const Sequence* sequences;  // the sequences with visible scores
  Operand q, k, v, out, lse, grad_out, grad_q, grad_k, grad_v, grad_lse;
  double scale, softcap;
  int64_t batch_invariant;  // not 0: the cutting of a sequence must not depend on other sequences
  double dropout;
  int64_t slope_batch, slope_head;  // strides
  int64_t pages, page_size, table_width;
  const int32_t* block_table;
  const float* slopes;
  const uint64_t* rng_state;

  int64_t group() const { return heads / key_heads; }
};

// Scores are products of rows of q and k without the scale, which comes in after the highest one of a row, or something
// close to it, was subtracted: what rounding a score costs its weight isn't multiplied by the size of the score then.
// With a softcap the tanh of a score over the softcap takes the score's place, and the softcap the place of the scale.
struct Scale {
  // What the query is multiplied by, so that no scale below 0 is left: -1, 0 or 1.
  float sign = 1.0f;
  // What differences of scores are multiplied by to be exponents of 2; above 0, as scores that are masked are -inf.
  float to_exponent = 1.0f;
  double size;
  bool is_capped;
  // Weights below 2 to the power of this are 0. Slopes give weights of every size: products of the smallest would be too
  // small for normal numbers, with which an instruction takes far longer.
  float lowest = -126.0f;
  // With a softcap, what scores are multiplied by before the tanh.
  float to_tanh = 0.0f;

  explicit Scale(const Problem& problem) : size(std::abs(problem.scale)), is_capped(problem.softcap > 0.0) {
    const float factor = static_cast<float>(size / kLog2);
    // Smaller numbers may be flushed to 0, and slopes are divided by the scale.
    const bool is_zero = factor < (problem.slopes ? 0x1p-64f : 0x1p-126f);
    sign = is_zero ? 0.0f : problem.scale < 0.0 ? -1.0f : 1.0f;
    to_exponent = is_zero ? 1.0f : factor;
    lowest = problem.slopes ? -100.0f : lowest;
    if (is_zero && problem.slopes) {  // of the exponents nothing is left but slopes
      size = 1.0;
      to_exponent = static_cast<float>(1.0 / kLog2);
    }
    if (is_capped) {
      to_tanh = static_cast<float>(std::min(size / problem.softcap, 0x1p126));
      size = problem.softcap;
      to_exponent = static_cast<float>(size / kLog2);
    }
  }
};

// Rows of all query heads that share a key head, those of one token next to each other.
struct Task {
  const Sequence* sequence;
  int64_t key_head, row, rows;

  double cost(int64_t group) const {
    const int64_t last = (row + rows - 1) / group;
    return double(rows) * double(sequence->keys_end(last) - sequence->first_key(row / group));
  }
};

// Costly tasks first: then the threads, which run task after task, end at nearly the same time.
inline void sort(std::vector<Task>& tasks, int64_t group) {
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
    return a.cost(group) > b.cost(group);
  });
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<float, Free>;

inline Memory allocated(void* memory) {
  if (!memory) {
    throw std::bad_alloc();
  }
  return Memory(static_cast<float*>(memory));
}

// Memory that is reused from task to task, aligned to a cache line.
class Buffer {
 public:
  float* take(int64_t count) {
    if (count > size_) {
      memory_.reset();
      size_ = 0;
      memory_ = allocated(std::aligned_alloc(64, padded(count * sizeof(float), 64)));
      size_ = count;
    }
    return memory_.get();
  }

  Panels panels(int64_t columns, int64_t height) { return {take(Panels::size(columns, height)), height}; }

  Panels zeros(int64_t columns, int64_t height) {
    const Panels zeroed = panels(columns, height);
    std::fill_n(zeroed.data, Panels::size(columns, height), 0.0f);
    return zeroed;
  }

 private:
  Memory memory_;
  int64_t size_ = 0;
};

// Which keys each row of a task sees.
class Bounds {
 public:
  void set(const Task& task, int64_t group, int64_t step = kLanes) {
    const int64_t lanes = padded(task.rows, step);
    first_.resize(lanes);
    end_.resize(lanes);
    for (int64_t lane = 0; lane < lanes; lane++) {
      // Lanes after the last row see what it sees, so that they need no case of their own.
      const int64_t token = (task.row + std::min(lane, task.rows - 1)) / group;
      first_[lane] = task.sequence->first_key(token);
      end_[lane] = task.sequence->keys_end(token);
    }
  }

  // Neither bound decreases from one row to the next.
  int64_t lowest() const { return first_.front(); }
  int64_t highest() const { return end_.back(); }

  // The keys of a block, counted from its first, that some row of a tile sees, `from` rounded down to a multiple of
  // kTileRows; `masked` if some row sees only some of them.
  struct Span {
    int64_t from, to;
    bool masked;
  };

  Span of(int64_t lane, int64_t lanes, int64_t key, int64_t keys) const {
    const int64_t from = std::max<int64_t>(first_[lane] - key, 0) / kTileRows * kTileRows;
    const int64_t to = std::min<int64_t>(end_[lane + lanes - 1] - key, keys);
    return {from, to, first_[lane + lanes - 1] > key + from || end_[lane] < key + to};
  }

  // The same with both ends rounded outwards to multiples of a step; keys that this adds are masked.
  Span rounded(int64_t lane, int64_t lanes, int64_t key, int64_t keys, int64_t step) const {
    const Span exact = of(lane, lanes, key, keys);
    if (exact.from >= exact.to) {
      return exact;
    }
    const int64_t from = exact.from / step * step, to = padded(exact.to, step);
    return {from, to, first_[lane + lanes - 1] > key + from || end_[lane] < key + to};
  }

  // Whether the rows of a tile see only keys of a block.
  bool within(int64_t lane, int64_t lanes, int64_t key, int64_t keys) const {
    return first_[lane] >= key && end_[lane + lanes - 1] <= key + keys;
  }

  // The same of each row of a panel.
  Ints each_within(int64_t lane, int64_t key, int64_t keys) const {
    Ints are_within;
    for (int64_t i = 0; i < kLanes; i++) {
      are_within[i] = -int32_t(first_[lane + i] >= key && end_[lane + i] <= key + keys);
    }
    return are_within;
  }

  // Sets scores that are masked to minus infinity.
  void mask(Panels scores, int64_t panels, int64_t lane, int64_t key, const Span& span) const {
    const Floats hidden = broadcast(-kInfinity);
    for (int64_t panel = 0; panel < panels; panel++) {
      Ints first, end;
      for (int64_t i = 0; i < kLanes; i++) {
        // Counted from the block's first key: the number of a key may have more than 32 bits.
        first[i] = std::clamp<int64_t>(first_[lane + panel * kLanes + i] - key, 0, span.to);
        end[i] = std::clamp<int64_t>(end_[lane + panel * kLanes + i] - key, 0, span.to);
      }
      for (int64_t row = span.from; row < span.to; row++) {
        const Ints here = Ints{} + static_cast<int32_t>(row);
        float* at = scores.at(panel, row);
        store(at, here < first ? hidden : here >= end ? hidden : load<Floats>(at));
      }
    }
  }

 private:
  std::vector<int64_t> first_, end_;
};

template <class Number>
Rows<Number> query_rows(const Operand& operand, const Task& task, int64_t group) {
  const auto& [sequence, key_head, row, rows] = task;
  return {operand.at<Number>(sequence->batch, sequence->row, key_head * group), operand.token, operand.head, group};
}

template <class Number>
Rows<Number> key_rows(const Operand& operand, const Task& task) {
  const auto& [sequence, key_head, row, rows] = task;
  return {operand.at<Number>(sequence->batch, sequence->key, key_head), operand.token, operand.head, 1};
}

template <class Number>
PagedRows<Number> paged_rows(const Problem& problem, const Operand& operand, const Task& task) {
  const auto& [sequence, key_head, row, rows] = task;
  const int32_t* table = problem.block_table + sequence->number * problem.table_width;
  return {
      operand.at<Number>(0, 0, key_head), operand.batch, operand.token, table, uint32_t(problem.page_size),
      sequence->key};
}

// Calls a function with the rows of a task's keys, or values, wherever they are: only forwards read pages.
template <class Number, class Body>
void with_key_rows(const Problem& problem, const Operand& operand, const Task& task, Body&& body) {
  problem.block_table ? body(paged_rows<Number>(problem, operand, task)) : body(key_rows<Number>(operand, task));
}

// Whether all pages that a call reads are there.
inline bool has_its_pages(const Problem& problem) {
  for (int64_t i = 0; problem.block_table && i < problem.count; i++) {
    const Sequence& sequence = problem.sequences[i];
    const int32_t* table = problem.block_table + sequence.number * problem.table_width;
    const int64_t end = (sequence.key + sequence.keys - 1) / problem.page_size;
    for (int64_t page = sequence.key / problem.page_size; page <= end; page++) {
      if (table[page] < 0 || table[page] >= problem.pages) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace attnreg
