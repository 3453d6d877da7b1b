// The dtypes of tensors: read as float32, written rounded to nearest, ties to even.

#pragma once

#include "vectors.h"

namespace attnreg {

struct Float32 {
  using Stored = float;

  static Floats read(const Stored* from) { return load<Floats>(from); }
  static void write(Stored* to, Floats numbers) { store(to, numbers); }
};

struct BFloat16 {
  using Stored = uint16_t;

  static Floats read(const Stored* from) {
    return bits_of<Floats>(widened(load<Halves>(from)) << 16);
  }

  static void write(Stored* to, Floats numbers) {
    const Words bits = bits_of<Words>(numbers);
    const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Words nan = Words{} + 0x7fc0;
    store(to, __builtin_convertvector(numbers == numbers ? rounded : nan, Halves));
  }
};

struct Float16 {
  using Stored = uint16_t;

  static Floats read(const Stored* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(load<__m128i>(from));
#else
    const Words half = widened(load<Halves>(from));
    const Words sign = (half & 0x8000) << 16, rest = (half & 0x7fff) << 13;
    // The product is exact, and corrects the exponent of subnormal numbers, too.
    const Words finite = bits_of<Words>(bits_of<Floats>(rest) * 0x1p112f);
    return bits_of<Floats>(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite));
#endif
  }

  static void write(Stored* to, Floats numbers) {
    const Words bits = bits_of<Words>(numbers);
    const Words sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    const Words normal = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    // The last bit of 0.5 is worth the smallest subnormal half: the sum is rounded to a multiple of that.
    const Words small = bits_of<Words>(bits_of<Floats>(size) + 0.5f) - 0x3f000000;
    const Words large = size > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00;
    const Words words = size < 0x38800000 ? small : size >= 0x47800000 ? large : normal;
    store(to, __builtin_convertvector(sign | words, Halves));
  }
};

// The same for fewer elements than a vector has.

template <class Number>
inline Floats read(const typename Number::Stored* from, int64_t count) {
  if (count >= kLanes) {
    return Number::read(from);
  }
  typename Number::Stored some[kLanes] = {};
  std::memcpy(some, from, count * sizeof *from);
  return Number::read(some);
}

template <class Number>
inline void write(typename Number::Stored* to, Floats numbers, int64_t count) {
  if (count >= kLanes) {
    return Number::write(to, numbers);
  }
  typename Number::Stored some[kLanes];
  Number::write(some, numbers);
  std::memcpy(to, some, count * sizeof *to);
}

}  // namespace attnreg
