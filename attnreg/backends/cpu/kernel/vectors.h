// Vectors as wide as the instruction set's, and computations with them.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace attnreg {

// Elements of a vector, and rows of a tile of a product: with kMaxPanels vectors in a row, a tile fills the
// registers, but for those that its operands need.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kTileRows = 8;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8, kTileRows = 4;
#else
constexpr int64_t kLanes = 4, kTileRows = 4;
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Doubles = double __attribute__((vector_size(kLanes * 4)));
using HalfFloats = float __attribute__((vector_size(kLanes * 2)));  // as many as Doubles has
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// Halves as words. By an instruction: GCC up to 12, at least, takes five for `__builtin_convertvector`.
inline Words widened(Halves halves) {
#if defined(__AVX512F__)
  return bits_of<Words>(_mm512_cvtepu16_epi32(bits_of<__m256i>(halves)));
#elif defined(__AVX2__)
  return bits_of<Words>(_mm256_cvtepu16_epi32(bits_of<__m128i>(halves)));
#else
  return __builtin_convertvector(halves, Words);
#endif
}

inline Floats broadcast(float number) {
  return Floats{} + number;
}

inline Floats larger(Floats a, Floats b) {
  return a > b ? a : b;
}

// Whether some number is finite and further from 0 than a limit.
inline bool any_beyond(Floats numbers, double limit) {
  for (int64_t i = 0; i < kLanes; i++) {
    const float size = numbers[i] < 0.0f ? -numbers[i] : numbers[i];
    if (size > limit && size <= 0x1.fffffep127f) {
      return true;
    }
  }
  return false;
}

// 2 to the power of at most 127, to two units in the last place; NaN of NaN. 0 below a lowest power: that of the smallest
// normal number, unless given.
inline Floats exp2(Floats power, float lowest = -126.0f) {
  constexpr float kRound = 12582912.0f + 127.0f;  // the last bit that stays is 1; below it is the exponent's bias
  power = power < lowest ? broadcast(-127.0f) : power;
  const Floats shifted = power + kRound;
  const Floats rest = power - (shifted - kRound);
  Floats sum = broadcast(0.00015353362f) * rest + 0.0013398875f;
  sum = sum * rest + 0.009618437f;
  sum = sum * rest + 0.055503324f;
  sum = sum * rest + 0.24022648f;
  sum = sum * rest + 0.6931472f;
  sum = sum * rest + 1.0f;
  // Multiplied, as NaN has to stay NaN.
  return sum * bits_of<Floats>(bits_of<Words>(shifted) << 23);
}

// To two units in the last place; NaN of NaN.
inline Floats tanh(Floats x) {
  const Words sign = bits_of<Words>(x) & 0x80000000u;
  Floats size = bits_of<Floats>(bits_of<Words>(x) ^ sign);
  size = size > 10.0f ? broadcast(10.0f) : size;  // from 9.02 on it is 1 in float32
  const Floats square = size * size;
  Floats sum = broadcast(-0.0057049785f) * square + 0.020639079f;
  sum = sum * square - 0.053739712f;
  sum = sum * square + 0.13331442f;
  sum = sum * square - 0.33333281f;
  const Floats near = size * square * sum + size, far = 1.0f - 2.0f / (exp2(size * 2.88539008f) + 1.0f);
  return bits_of<Floats>(bits_of<Words>(size < 0.625f ? near : far) | sign);
}

template <size_t... kLane>
inline Floats interleaved(Floats a, Floats b, bool high, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return high ? __builtin_shufflevector(a, b, ((kLanes + kLane) / 2 + kLane % 2 * kLanes)...)
              : __builtin_shufflevector(a, b, (kLane / 2 + kLane % 2 * kLanes)...);
#else
  return high ? __builtin_shuffle(a, b, Ints{((kLanes + kLane) / 2 + kLane % 2 * kLanes)...})
              : __builtin_shuffle(a, b, Ints{(kLane / 2 + kLane % 2 * kLanes)...});
#endif
}

// Each step is a perfect shuffle of all elements; log2(kLanes) of them swap lanes and rows.
inline void transpose(Floats (&rows)[kLanes]) {
  constexpr auto kAll = std::make_index_sequence<kLanes>();
#pragma GCC unroll 4
  for (int64_t step = 1; step < kLanes; step *= 2) {
    Floats shuffled[kLanes];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kLanes / 2; i++) {
      shuffled[2 * i] = interleaved(rows[i], rows[i + kLanes / 2], false, kAll);
      shuffled[2 * i + 1] = interleaved(rows[i], rows[i + kLanes / 2], true, kAll);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; i++) {
      rows[i] = shuffled[i];
    }
  }
}

// The same numbers with 0 in the first lanes.
inline Floats without_first(Floats numbers, int64_t lanes) {
  if (lanes == 0) {
    return numbers;
  }
  Ints lane;
  for (int64_t i = 0; i < kLanes; i++) {
    lane[i] = static_cast<int32_t>(i);
  }
  return lane < static_cast<int32_t>(lanes) ? Floats{} : numbers;
}

// Lane i of the result is the sum of the lanes of vector i.
inline __attribute__((always_inline)) Floats sums_of_lanes(Floats (&each)[kLanes]) {
  constexpr auto kAll = std::make_index_sequence<kLanes>();
#pragma GCC unroll 4
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; i++) {
      each[i] = interleaved(each[i], each[i + half], false, kAll) + interleaved(each[i], each[i + half], true, kAll);
    }
  }
  return each[0];
}

}  // namespace attnreg
