// Matrices as products read and write them, and how rows of tensors are packed and unpacked.

#pragma once

#include "dtypes.h"

namespace attnreg {

constexpr int64_t padded(int64_t size, int64_t step) {
  return (size + step - 1) / step * step;
}

// A matrix whose columns are grouped into panels as wide as a vector, stored panel by panel, each row by row: a
// loop over the rows of a panel reads memory in order, whatever the sizes are.
struct Panels {
  float* data;
  int64_t height;

  float* at(int64_t panel, int64_t row) const { return data + (panel * height + row) * kLanes; }
  Panels from(int64_t panel) const { return {at(panel, 0), height}; }

  static int64_t size(int64_t columns, int64_t height) { return padded(columns, kLanes) * height; }
};

// The rows of a head, or of the query heads that share a key head, in a tensor.
template <class Dtype>
struct Rows {
  using Number = Dtype;
  using Stored = typename Number::Stored;

  Stored* data;
  int64_t token, head;  // strides
  int64_t heads;        // neighbouring rows are those of the heads of one token

  Stored* operator[](int64_t row) const {
    return heads == 1 ? data + row * token : data + row / heads * token + row % heads * head;
  }
};

// The rows of a key head in pages: a table has the page of each `size` of a sequence's tokens.
template <class Dtype>
struct PagedRows {
  using Number = Dtype;
  using Stored = typename Number::Stored;

  Stored* data;
  int64_t page, token;  // strides
  const int32_t* table;
  uint32_t size;
  int64_t first;

  Stored* operator[](int64_t row) const {
    const uint32_t here = static_cast<uint32_t>(first + row);
    return data + table[here / size] * page + here % size * token;
  }
};

// Packs tensor rows as columns, multiplied by a factor; columns that the last panel lacks are 0.
template <class SomeRows>
void pack_columns(const SomeRows& rows, int64_t first, int64_t count, int64_t size, float factor, Panels to) {
  using Number = typename SomeRows::Number;
  for (int64_t panel = 0; panel * kLanes < count; panel++) {
    const int64_t here = first + panel * kLanes, real = count - panel * kLanes;
    for (int64_t column = 0; column < size; column += kLanes) {
      Floats block[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; i++) {
        block[i] = i < real ? read<Number>(rows[here + i] + column, size - column) * factor : Floats{};
      }
      transpose(block);
      const int64_t used = size - column < kLanes ? size - column : kLanes;
      for (int64_t i = 0; i < used; i++) {
        store(to.at(panel, column + i), block[i]);
      }
    }
  }
}

// Packs tensor rows as rows; columns that the last panel lacks are 0.
template <class SomeRows>
void pack_rows(const SomeRows& rows, int64_t first, int64_t count, int64_t size, Panels to) {
  for (int64_t row = 0; row < count; row++) {
    const auto* from = rows[first + row];
    for (int64_t column = 0; column < size; column += kLanes) {
      store(to.at(column / kLanes, row), read<typename SomeRows::Number>(from + column, size - column));
    }
  }
}

// Unpacks columns to tensor rows, each multiplied by its factor.
template <class Number>
void unpack_columns(
    Panels from, const float* factors, const Rows<Number>& rows, int64_t first, int64_t count, int64_t size) {
  for (int64_t panel = 0; panel * kLanes < count; panel++) {
    const int64_t here = first + panel * kLanes, real = count - panel * kLanes;
    const Floats factor = load<Floats>(factors + panel * kLanes);
    for (int64_t column = 0; column < size; column += kLanes) {
      Floats block[kLanes];
      for (int64_t i = 0; i < kLanes; i++) {
        block[i] = column + i < size ? load<Floats>(from.at(panel, column + i)) * factor : Floats{};
      }
      transpose(block);
      for (int64_t i = 0; i < kLanes && i < real; i++) {
        write<Number>(rows[here + i] + column, block[i], size - column);
      }
    }
  }
}

// Unpacks rows to tensor rows, all multiplied by one factor.
template <class Number>
void unpack_rows(Panels from, float factor, const Rows<Number>& rows, int64_t count, int64_t size) {
  for (int64_t row = 0; row < count; row++) {
    auto* to = rows[row];
    for (int64_t column = 0; column < size; column += kLanes) {
      write<Number>(to + column, load<Floats>(from.at(column / kLanes, row)) * factor, size - column);
    }
  }
}

}  // namespace attnreg
