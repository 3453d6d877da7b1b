// A call as its caller describes it, and the problem that it is: its sequences are looked up in the offsets each time,
// and checked, as whoever shares their memory may have written to them. Nothing is kept from one call to the next, so
// calls of lengths that were never seen cost what repeated ones do.

#pragma once

#include <optional>

#include "problem.h"

namespace attnreg {

// A tensor of a call, in the contract's layout: (B, S, H, D), packed (T, H, D); an LSE is (B, H, S), packed (H, T).
// Numbers that aren't used are 0. The call cache has the same two structs (dispatch/csrc/native.h): neither library is
// compiled with a header of the other.
struct NativeOperand {
  void* data;
  int64_t sizes[4], strides[4];
};

// A forward has the operands q, k, v, out, lse; a backward has grad_out, q, k, v, out, lse, grad_q, grad_k,
// grad_v, and the gradient of the LSE where there is one. Results may hold anything. `batch` and the longest lengths
// are read of packed calls alone. `used` has how many keys of each sequence count, and is null where all do; `block_table`
// has as many rows as there are sequences, and is null where keys and values aren't pages.
struct NativeCall {
  int64_t operand_count;
  const NativeOperand* operands;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // of packed tensors, `batch` + 1 of them, else null
  int64_t batch, max_q, max_k;
  const int32_t *used, *block_table;
  int64_t table_width;
};

// What calls of a kind have in common, as `NativeKind` in `problem.py` has it. A pointer is null without its option.
struct Kind {
  int64_t dtype;
  double scale, softcap;
  int64_t left, right;      // the window
  int64_t batch_invariant;  // not 0: the cutting of a sequence must not depend on other sequences
  // Calls that may be torch's, from so many keys and tokens on and below so many rows (see `choice.py`), aren't run; with
  // 0 keys there are none.
  int64_t torchs_keys, torchs_tokens, torchs_rows;
  double dropout;
  const uint64_t* rng_state;
  const float* slopes;
  int64_t slope_batch, slope_head;  // strides
};

// Also in `compiled.py`. Results are whole only with kDone; from kNoPage on nothing was written.
enum Status : int64_t { kDone, kNoMemory, kNoThreads, kNoPage, kWrongLengths, kDeclined };

// How many numbers a tensor has in each direction, as (batch, token, head, size).
struct Shape {
  int64_t batch, tokens, heads, size;
  bool operator==(const Shape&) const = default;
  Shape with_size(int64_t other) const { return {batch, tokens, heads, other}; }
};

// Window and first row and key of what is visible of a sequence: the first rows may see no key, and the first keys may
// be seen by no row. A bound that hides nothing is -1.
inline std::optional<Sequence> visible(const Sequence& all, int64_t left, int64_t right) {
  const int64_t shift = all.keys - all.rows;
  const int64_t row = right < 0 ? 0 : std::max<int64_t>(0, -shift - right);
  if (row >= all.rows || all.keys == 0) {
    return std::nullopt;
  }
  const int64_t key = left < 0 ? 0 : std::max<int64_t>(0, row + shift - left);
  const bool hides_left = left >= 0 && left < all.keys - key - 1, hides_right = right >= 0 && right < all.rows - row - 1;
  return Sequence{
      all.number,    all.batch,      all.row + row,          all.rows - row,
      all.key + key, all.keys - key, hides_left ? left : -1, hides_right ? right : -1};
}

class CallReader {
 public:
  CallReader(const Kind& kind, const NativeCall& call, bool is_forward)
      : kind_(kind), call_(call), is_forward_(is_forward) {}

  // Reads a call, which has to outlive the problem, as this has to. Nothing is written.
  Status read() {
    read_kind();
    if (!read_tensors() || may_be_torchs()) {
      return kDeclined;
    }
    if (!read_sequences()) {
      return kWrongLengths;
    }
    problem_.sequences = sequences_.data();
    problem_.count = sequences_.size();
    return has_its_pages(problem_) ? kDone : kNoPage;
  }

  const Problem& problem() const { return problem_; }

  // Writes the results of rows, and the gradients of keys, that are in no sequence or see, or are seen by, nothing.
  template <class Number>
  void fill_rest() const {
    const auto fill = [&](auto number, const Operand& x, int64_t heads, int64_t size, auto value) {
      return [=](int64_t batch, int64_t from, int64_t to) {
        for (int64_t token = from; token < to; token++) {
          for (int64_t head = 0; head < heads; head++) {
            std::fill_n(x.at<decltype(number)>(batch, token, head), size, value);
          }
        }
      };
    };
    const Problem& p = problem_;
    const typename Number::Stored zero{};
    if (is_forward_) {
      for_each_gap<&Sequence::row, &Sequence::rows>(q_, fill(Number(), p.out, p.heads, p.value_size, zero));
      for_each_gap<&Sequence::row, &Sequence::rows>(q_, fill(Float32(), p.lse, p.heads, 1, -kInfinity));
      return;
    }
    for_each_gap<&Sequence::row, &Sequence::rows>(q_, fill(Number(), p.grad_q, p.heads, p.size, zero));
    for_each_gap<&Sequence::key, &Sequence::keys>(k_, fill(Number(), p.grad_k, p.key_heads, p.size, zero));
    for_each_gap<&Sequence::key, &Sequence::keys>(k_, fill(Number(), p.grad_v, p.key_heads, p.value_size, zero));
  }

 private:
  // Calls a function with each range of tokens that lies between sequences.
  template <int64_t Sequence::*kFirst, int64_t Sequence::*kCount, class Body>
  void for_each_gap(const Shape& shape, Body&& body) const {
    int64_t batch = 0, from = 0;
    for (const Sequence& sequence : sequences_) {
      for (; batch < sequence.batch; batch++, from = 0) {
        body(batch, from, shape.tokens);
      }
      body(batch, from, sequence.*kFirst);
      from = sequence.*kFirst + sequence.*kCount;
    }
    for (; batch < shape.batch; batch++, from = 0) {
      body(batch, from, shape.tokens);
    }
  }

  void read_kind() {
    Problem& p = problem_;
    p.dtype = kind_.dtype;
    p.scale = kind_.scale;
    p.softcap = kind_.softcap;
    p.batch_invariant = kind_.batch_invariant;
    p.dropout = kind_.dropout;
    p.rng_state = kind_.rng_state;
    p.slopes = kind_.slopes;
    p.slope_batch = kind_.slope_batch;
    p.slope_head = kind_.slope_head;
    p.block_table = call_.block_table;
    p.table_width = call_.table_width;
  }

  // Returns false if tensors don't fit each other, or can't be read.
  bool read_tensors() {
    Problem& p = problem_;
    const NativeOperand* natives = call_.operands;
    const bool packed_q = call_.cu_seqlens_q, packed_k = call_.cu_seqlens_k, paged = call_.block_table;
    const int64_t expected = is_forward_ ? 5 : 9, first = is_forward_ ? 0 : 1;
    const bool has_grad_lse = !is_forward_ && call_.operand_count == 10;
    if (call_.operand_count != expected + has_grad_lse || (paged ? packed_k || !is_forward_ : packed_q != packed_k)) {
      return false;
    }
    Shape v{}, out{}, lse{};
    bool fits = tensor(natives[first], packed_q, p.q, q_) && tensor(natives[first + 1], packed_k, p.k, k_) &&
                tensor(natives[first + 2], packed_k, p.v, v) && tensor(natives[first + 3], packed_q, p.out, out);
    row_numbers(natives[first + 4], packed_q, p.lse, lse);
    fits = fits && q_.size == k_.size && v == k_.with_size(v.size) && out == q_.with_size(v.size) &&
           lse == q_.with_size(1) && q_.size > 0 && v.size > 0 && q_.heads > 0 && k_.heads > 0 && q_.heads % k_.heads == 0;
    if (!is_forward_) {
      Shape grad_out{}, grad_q{}, grad_k{}, grad_v{};
      fits = fits && tensor(natives[0], packed_q, p.grad_out, grad_out) && tensor(natives[6], packed_q, p.grad_q, grad_q) &&
             tensor(natives[7], packed_k, p.grad_k, grad_k) && tensor(natives[8], packed_k, p.grad_v, grad_v) &&
             grad_out == out && grad_q == q_ && grad_k == k_ && grad_v == v;
      if (has_grad_lse) {
        row_numbers(natives[9], packed_q, p.grad_lse, lse);
        fits = fits && lse == q_.with_size(1);
      }
    }
    p.heads = q_.heads;
    p.key_heads = k_.heads;
    p.size = q_.size;
    p.value_size = v.size;
    p.pages = k_.batch;
    p.page_size = k_.tokens;
    count_ = packed_q ? call_.batch : q_.batch;
    return fits && (packed_k || paged || k_.batch == q_.batch);
  }

  bool may_be_torchs() const {
    const int64_t rows = call_.cu_seqlens_q ? call_.max_q : q_.tokens, keys = call_.cu_seqlens_k ? call_.max_k : k_.tokens;
    return kind_.torchs_keys && keys >= kind_.torchs_keys && q_.batch * q_.tokens >= kind_.torchs_tokens &&
           rows * problem_.group() < kind_.torchs_rows;
  }

  static bool tensor(const NativeOperand& native, bool is_packed, Operand& operand, Shape& shape) {
    const auto *sizes = native.sizes + !is_packed, *strides = native.strides + !is_packed;
    operand = {native.data, is_packed ? 0 : native.strides[0], strides[0], strides[1]};
    shape = {is_packed ? 1 : native.sizes[0], sizes[0], sizes[1], sizes[2]};
    return strides[2] == 1 || shape.size == 1;
  }

  static void row_numbers(const NativeOperand& native, bool is_packed, Operand& operand, Shape& shape) {
    const auto *sizes = native.sizes + !is_packed, *strides = native.strides + !is_packed;
    operand = {native.data, is_packed ? 0 : native.strides[0], strides[1], strides[0]};
    shape = {is_packed ? 1 : native.sizes[0], sizes[1], sizes[0], 1};
  }

  bool read_sequences() {
    // Beyond every length, so that no sum overflows.
    constexpr int64_t kFar = int64_t(1) << 62;
    const int64_t left = std::min(kind_.left, kFar), right = std::min(kind_.right, kFar);
    Side of_q{call_.cu_seqlens_q, q_.tokens, call_.max_q};
    Side of_k{call_.cu_seqlens_k, call_.block_table ? call_.table_width * k_.tokens : k_.tokens, call_.max_k};
    if (!of_q.begins() || !of_k.begins()) {
      return false;
    }
    sequences_.reserve(count_);
    for (int64_t i = 0; i < count_; i++) {
      Sequence all{i, call_.cu_seqlens_q ? 0 : i, 0, 0, 0, 0, -1, -1};
      if (!of_q.next(i, all.row, all.rows) || !of_k.next(i, all.key, all.keys)) {
        return false;
      }
      const int64_t used = call_.used ? call_.used[i] : all.keys;
      if (used < 0 || used > all.keys) {
        return false;
      }
      all.keys = used;
      if (const auto keys_in_sight = visible(all, left, right)) {
        sequences_.push_back(*keys_in_sight);
      }
    }
    return true;
  }

  // The position of each sequence in a tensor. An offset is read once, because other code may be writing to it.
  struct Side {
    const int32_t* offsets;
    int64_t tokens, longest, end = 0;

    bool begins() const { return !offsets || offsets[0] == 0; }

    // Returns false if a sequence can't be there.
    bool next(int64_t i, int64_t& first, int64_t& count) {
      if (!offsets) {
        first = 0;
        count = tokens;
        return true;
      }
      first = end;
      end = offsets[i + 1];
      count = end - first;
      return count >= 0 && count <= longest && end <= tokens;
    }
  };

  const Kind& kind_;
  const NativeCall& call_;
  const bool is_forward_;
  Problem problem_{};
  Shape q_{}, k_{};
  int64_t count_ = 0;
  std::vector<Sequence> sequences_;
};

}  // namespace attnreg
