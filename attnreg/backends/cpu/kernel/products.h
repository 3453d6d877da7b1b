// Matrix products, one tile at a time, whose sums stay in registers.

#pragma once

#include <algorithm>
#include <type_traits>

#include "panels.h"

namespace attnreg {

// Panels of columns that a tile has at most.
constexpr int64_t kMaxPanels = 3;

// How many of the panels that are left the next tile takes: parts as even as possible, since a tile of one panel
// reads more than it computes.
inline int64_t next_width(int64_t left) {
  return left == 4 ? 2 : left < kMaxPanels ? left : kMaxPanels;
}

// Calls a function with a number of panels that is known at compile time.
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

// How the sums of a tile are stored: over what is there, added to it, or added to it after each of its columns was
// multiplied by a factor. Sums begin at 0: a sum of sums loses less to rounding than one long sum.
enum class Store { kOverwrite, kAdd, kScaleAndAdd };

template <int64_t kWidth, Store kStore>
struct Tile {
  Floats sums[kTileRows][kWidth] = {};

  template <int64_t kStride>
  inline __attribute__((always_inline)) void add(const float* left, const float* right, int64_t panel) {
    Floats columns[kWidth];
#pragma GCC unroll 3
    for (int64_t n = 0; n < kWidth; n++) {
      columns[n] = load<Floats>(right + n * panel);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < kTileRows; i++) {
      const Floats number = broadcast(left[i * kStride]);
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
      for (int64_t i = 0; i < kTileRows; i++) {
        float* at = to.at(n, row + i);
        if constexpr (kStore == Store::kOverwrite) {
          store(at, sums[i][n]);
        } else if constexpr (kStore == Store::kAdd) {
          store(at, load<Floats>(at) + sums[i][n]);
        } else {
          store(at, load<Floats>(at) * load<Floats>(factors + n * kLanes) + sums[i][n]);
        }
      }
    }
  }
};

// Row r of the result is the sum over k of column r of the left, row k, times row k of the right. Rows are `from`
// to `to`, a multiple of kTileRows; `first` to `last` is summed over.
template <int64_t kWidth, Store kStore>
void columns_by_rows(
    Panels left, Panels right, Panels result, int64_t from, int64_t to, int64_t first, int64_t last,
    const float* factors = nullptr) {
  const int64_t panel = right.height * kLanes;
  for (int64_t row = from; row < to; row += kTileRows) {
    Tile<kWidth, kStore> tile;
    const float *a = left.at(row / kLanes, first) + row % kLanes, *b = right.at(0, first);
    for (int64_t k = first; k < last; k++, a += kLanes, b += kLanes) {
      tile.template add<1>(a, b, panel);
    }
    tile.write(result, row, factors);
  }
}

// Products of rows of q and k, or of the output's gradient and v, are sums over the head dim. The weights depend on
// them exponentially, and gradients on small differences of them: they are sums of sums of so many products.
constexpr int64_t kTerms = 32;

template <int64_t kWidth>
void rows_of_heads(Panels left, Panels right, Panels result, int64_t from, int64_t to, int64_t size) {
  columns_by_rows<kWidth, Store::kOverwrite>(left, right, result, from, to, 0, std::min(size, kTerms));
  for (int64_t first = kTerms; first < size; first += kTerms) {
    columns_by_rows<kWidth, Store::kAdd>(left, right, result, from, to, first, std::min(size, first + kTerms));
  }
}

// The same, summed in float64 and rounded once.
template <int64_t kWidth>
void rows_of_heads_in_double(Panels left, Panels right, Panels result, int64_t from, int64_t to, int64_t size) {
  constexpr int64_t kRows = 4, kHalf = kLanes / 2;
  const int64_t panel = right.height * kLanes;
  for (int64_t row = from; row < to; row += kRows) {
    Doubles sums[kRows][2 * kWidth] = {};
    const float *a = left.at(row / kLanes, 0) + row % kLanes, *b = right.at(0, 0);
    for (int64_t k = 0; k < size; k++, a += kLanes, b += kLanes) {
#pragma GCC unroll 6
      for (int64_t n = 0; n < 2 * kWidth; n++) {
        const auto some = load<HalfFloats>(b + n / 2 * panel + n % 2 * kHalf);
        const Doubles columns = __builtin_convertvector(some, Doubles);
#pragma GCC unroll 4
        for (int64_t i = 0; i < kRows; i++) {
          sums[i][n] += double(a[i]) * columns;
        }
      }
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRows; i++) {
#pragma GCC unroll 6
      for (int64_t n = 0; n < 2 * kWidth; n++) {
        store(result.at(n / 2, row + i) + n % 2 * kHalf, __builtin_convertvector(sums[i][n], HalfFloats));
      }
    }
  }
}

// Sums the products of every kStep-th number, for the rows of a tile, in the order of `sums_of_lanes`.
template <int64_t kStep>
void add_by_lanes(const float* left, const float* right, int64_t first, int64_t size, Floats (&sums)[kTileRows]) {
  if constexpr (kStep == kLanes) {
    Tile<1, Store::kOverwrite> tile;
    const int64_t rest = size % kLanes;
    for (int64_t k = first; k < size - rest; k += kLanes) {
      tile.template add<1>(left + k * kLanes, right + k * kLanes, 0);
    }
    if (first >= kLanes - rest) {  // the last vector ends where the row does
      const int64_t k = size - kLanes + first;
      tile.template add<1>(left + k * kLanes, right + k * kLanes, 0);
    }
    std::memcpy(sums, tile.sums, sizeof sums);
  } else {
    Floats others[kTileRows];
    add_by_lanes<2 * kStep>(left, right, first, size, sums);
    add_by_lanes<2 * kStep>(left, right, first + kStep, size, others);
    for (int64_t i = 0; i < kTileRows; i++) {
      sums[i] += others[i];
    }
  }
}

// `rows_of_heads` for one panel, with each sum rounded as it is in few_rows.h.
inline void rows_of_heads_by_lanes(
    Panels left, Panels right, Panels result, int64_t from, int64_t to, int64_t size) {
  for (int64_t row = from; row < to; row += kTileRows) {
    Floats sums[kTileRows];
    add_by_lanes<1>(left.at(row / kLanes, 0) + row % kLanes, right.at(0, 0), 0, size, sums);
    std::memcpy(result.at(0, row), sums, sizeof sums);
  }
}

// Adds to row `shift + r` of the result the sum over k, 0 to `last`, of column k of the left, row r, times row k
// of the right.
template <int64_t kWidth>
void add_rows_by_rows(
    Panels left, Panels right, Panels result, int64_t shift, int64_t from, int64_t to, int64_t last) {
  const int64_t panel = right.height * kLanes;
  for (int64_t row = from; row < to; row += kTileRows) {
    Tile<kWidth, Store::kAdd> tile;
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
    width = next_width(panels - panel);
    const Panels b = right.from(panel), c = result.from(panel);
    with_width(width, [&](auto known) {
      add_rows_by_rows<decltype(known)::value>(left, b, c, shift, from, to, last);
    });
  }
}

}  // namespace attnreg
