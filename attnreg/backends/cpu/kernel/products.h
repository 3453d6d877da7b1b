// Matrix products, a tile of registers at a time.

#pragma once

#include <type_traits>

#include "panels.h"

namespace attnreg {

// The most panels of columns that a tile has.
constexpr int64_t kWidest = 3;

// Cuts panels into as even parts as the widest tile allows: one panel alone reads more than it computes.
inline int64_t width_of_next(int64_t left) {
  return left == 4 ? 2 : left < kWidest ? left : kWidest;
}

// Calls what takes a number of panels at compile time.
template <class Body>
inline void with_width(int64_t width, Body&& body) {
  switch (width) {
    case 1:
      return body(std::integral_constant<int64_t, 1>());
    case 2:
      return body(std::integral_constant<int64_t, 2>());
    default:
      return body(std::integral_constant<int64_t, 3>());
  }
}

// What the sums of a tile are added to: nothing, what is there, or that with each column multiplied by a factor.
// They begin at 0 each time: the sum of sums loses less to rounding than one long sum.
enum class To { kNothing, kSum, kScaled };

template <int64_t kWidth, To kTo>
struct Tile {
  Floats sums[kSteps][kWidth] = {};

  template <int64_t kApart>
  inline __attribute__((always_inline)) void add(const float* left, const float* right, int64_t panel) {
    Floats columns[kWidth];
#pragma GCC unroll 3
    for (int64_t n = 0; n < kWidth; n++) {
      columns[n] = load<Floats>(right + n * panel);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < kSteps; i++) {
      const Floats number = splat(left[i * kApart]);
#pragma GCC unroll 3
      for (int64_t n = 0; n < kWidth; n++) {
        sums[i][n] += number * columns[n];
      }
    }
  }

  inline __attribute__((always_inline)) void write(Panels to, int64_t row, const float* factors) const {
#pragma GCC unroll 3
    for (int64_t n = 0; n < kWidth; n++) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kSteps; i++) {
        float* at = to.at(n, row + i);
        if constexpr (kTo == To::kNothing) {
          store(at, sums[i][n]);
        } else if constexpr (kTo == To::kSum) {
          store(at, load<Floats>(at) + sums[i][n]);
        } else {
          store(at, load<Floats>(at) * load<Floats>(factors + n * kLanes) + sums[i][n]);
        }
      }
    }
  }
};

// Row r of the result is the sum over k of column r of the left, row k, times row k of the right. Rows are `from`
// to `to`, a whole number of tiles; `first` to `last` is summed over.
template <int64_t kWidth, To kTo>
void columns_by_rows(
    Panels left, Panels right, Panels result, int64_t from, int64_t to, int64_t first, int64_t last,
    const float* factors = nullptr) {
  const int64_t panel = right.height * kLanes;
  for (int64_t row = from; row < to; row += kSteps) {
    Tile<kWidth, kTo> tile;
    const float *a = left.at(row / kLanes, first) + row % kLanes, *b = right.at(0, first);
    for (int64_t k = first; k < last; k++, a += kLanes, b += kLanes) {
      tile.template add<1>(a, b, panel);
    }
    tile.write(result, row, factors);
  }
}

// Adds to row `shift + r` of the result the sum over k, 0 to `last`, of column k of the left, row r, times row k
// of the right.
template <int64_t kWidth>
void add_rows_by_rows(
    Panels left, Panels right, Panels result, int64_t shift, int64_t from, int64_t to, int64_t last) {
  const int64_t panel = right.height * kLanes;
  for (int64_t row = from; row < to; row += kSteps) {
    Tile<kWidth, To::kSum> tile;
    const float* b = right.at(0, 0);
    for (int64_t k = 0; k < last; k += kLanes) {
      const float* a = left.at(k / kLanes, row);
      const int64_t end = last - k < kLanes ? last - k : kLanes;
      for (int64_t lane = 0; lane < end; lane++, b += kLanes) {
        tile.template add<kLanes>(a + lane, b, panel);
      }
    }
    tile.write(result, shift + row, nullptr);
  }
}

// The same for any number of panels of the right.
inline void add_rows_by_all_rows(
    Panels left, Panels right, Panels result, int64_t panels, int64_t shift, int64_t from, int64_t to, int64_t last) {
  for (int64_t panel = 0, width; panel < panels; panel += width) {
    width = width_of_next(panels - panel);
    const Panels b = right.from(panel), c = result.from(panel);
    with_width(width, [&](auto known) {
      add_rows_by_rows<decltype(known)::value>(left, b, c, shift, from, to, last);
    });
  }
}

}  // namespace attnreg
