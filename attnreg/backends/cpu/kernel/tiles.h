// Products of bfloat16 matrices by AMX, and packing tensors for them.
//
// AMX has eight tiles of 16 rows of 64 bytes. TDPBF16PS adds the product of 16 x 32 bfloat16 with 32 x 16 to 16 x 16
// float32. The right matrix is stored as 16 rows of 16 words, each with two numbers that are neighbours in the sum
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, "Programming with Intel AMX", and volume 2).
//
// The instructions are written as assembly, as GCC's own intrinsics are: no flag is needed, and one library serves all
// machines with AVX512. With ATTNREG_EMULATED_TILES the same is computed without AMX, for tests.

#pragma once

#include "problem.h"

#if defined(__linux__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    (__GNUC__ >= 11 || __clang_major__ >= 12)
#define ATTNREG_TILES
#endif

#ifdef ATTNREG_TILES

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace attnreg {

// Rows of a tile, and numbers of bfloat16 in a row of it. Tiles are loaded by pairs, so matrices have pairs of them.
constexpr int64_t kTile = 16, kTileSteps = 32, kPair = 2 * kTile;
constexpr int64_t kTileNumbers = kTile * kTileSteps;

#ifdef ATTNREG_EMULATED_TILES

inline thread_local Floats emulated_tiles[8][kTile];

struct TileUnit {
  static bool is_there() { return true; }
  static void configure() {}
  static void release() {}

  template <int kNumber>
  static void zero() {
    std::fill_n(emulated_tiles[kNumber], kTile, Floats{});
  }
  template <int kNumber>
  static void load(const void* from) {
    std::memcpy(emulated_tiles[kNumber], from, sizeof emulated_tiles[kNumber]);
  }
  template <int kNumber>
  static void store(void* to) {
    std::memcpy(to, emulated_tiles[kNumber], sizeof emulated_tiles[kNumber]);
  }
  template <int kSum, int kLeft, int kRight>
  static void multiply() {
    for (int64_t row = 0; row < kTile; row++) {
      for (int64_t word = 0; word < kTile; word++) {
        const uint32_t left = bits_of<Words>(emulated_tiles[kLeft][row])[word];
        const Words right = bits_of<Words>(emulated_tiles[kRight][word]);
        emulated_tiles[kSum][row] += bits_of<Floats>(Words{} + (left << 16)) * bits_of<Floats>(right << 16);
        emulated_tiles[kSum][row] +=
            bits_of<Floats>(Words{} + (left & 0xffff0000)) * bits_of<Floats>(right & 0xffff0000);
      }
    }
  }
};

#else

struct TileUnit {
  // Whether the machine has AMX, the system saves its registers, and lets this process use them: once it was asked.
  static bool is_there() {
    static const bool is_supported = [] {
      constexpr unsigned kBFloat16 = 1 << 22, kTiles = 1 << 24, kSaves = 1 << 27, kStates = 3 << 17;
      constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
      unsigned a, b, c, d, high;
      if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (kBFloat16 | kTiles)) {
        return false;
      }
      if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kSaves)) {
        return false;
      }
      asm volatile("xgetbv" : "=a"(a), "=d"(high) : "c"(0));
      return (a & kStates) == kStates && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }();
    return is_supported;
  }

  // All eight tiles are of full size. Of another thread's, or another library's, configuration nothing is left.
  static void configure() {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config{};
    config.palette = 1;
    std::fill_n(config.row_bytes, 8, 64);
    std::fill_n(config.rows, 8, kTile);
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  static void release() { asm volatile("tilerelease"); }

  template <int kNumber>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "n"(kNumber));
  }
  template <int kNumber>
  static void load(const void* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(int64_t(64)), "n"(kNumber) : "memory");
  }
  template <int kNumber>
  static void store(void* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(int64_t(64)), "n"(kNumber) : "memory");
  }
  template <int kSum, int kLeft, int kRight>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kSum), "n"(kLeft), "n"(kRight));
  }
};

#endif

struct TileSession {
  TileSession() { TileUnit::configure(); }
  ~TileSession() { TileUnit::release(); }
  TileSession(const TileSession&) = delete;
};

// A matrix in bfloat16, tile by tile: those that a sum goes over, its steps, next to each other.
struct TileMatrix {
  uint16_t* data;
  int64_t steps;

  uint16_t* at(int64_t tile, int64_t step) const { return data + (tile * steps + step) * kTileNumbers; }
  TileMatrix from(int64_t tile, int64_t step = 0) const { return {at(tile, step), steps}; }
};

// Memory for a matrix of so many rows, or columns, and numbers in each sum; a block of either may not be full.
inline TileMatrix take_tiles(Buffer& buffer, int64_t rows, int64_t numbers) {
  const int64_t tiles = padded(rows, kPair) / kTile, steps = padded(numbers, kTileSteps) / kTileSteps;
  return {reinterpret_cast<uint16_t*>(buffer.take(tiles * steps * kTileNumbers / 2)), steps};
}

// Adds the product of two tile rows of the left and two tile columns of the right to 2 x 2 tiles of the result, or puts
// it there: each tile that is loaded is multiplied twice. One step at a time, so that other work can be done between
// steps: the unit multiplies on its own meanwhile.
class TileProduct {
 public:
  TileProduct() = default;
  // Rows are `first` to `last` tiles of the left, steps `from` to `to`; columns are the right's first two tiles.
  TileProduct(
      TileMatrix left, TileMatrix right, Panels result, int64_t first, int64_t last, int64_t from, int64_t to,
      bool adds)
      : left_(left), right_(right), result_(result), tile_(first), last_(last), step_(from), from_(from), to_(to),
        adds_(adds) {}

  int64_t steps() const { return (last_ - tile_) / 2 * (to_ - from_); }
  bool is_done() const { return tile_ >= last_; }

  void step() {
    float* sums[2] = {result_.at(0, tile_ * kTile), result_.at(1, tile_ * kTile)};
    if (step_ == from_) {
      if (adds_) {
        TileUnit::load<0>(sums[0]);
        TileUnit::load<1>(sums[1]);
        TileUnit::load<2>(sums[0] + kTile * kLanes);
        TileUnit::load<3>(sums[1] + kTile * kLanes);
      } else {
        TileUnit::zero<0>();
        TileUnit::zero<1>();
        TileUnit::zero<2>();
        TileUnit::zero<3>();
      }
    }
    TileUnit::load<4>(left_.at(tile_, step_));
    TileUnit::load<6>(right_.at(0, step_));
    TileUnit::multiply<0, 4, 6>();
    TileUnit::load<7>(right_.at(1, step_));
    TileUnit::multiply<1, 4, 7>();
    TileUnit::load<5>(left_.at(tile_ + 1, step_));
    TileUnit::multiply<2, 5, 6>();
    TileUnit::multiply<3, 5, 7>();
    if (++step_ == to_) {
      TileUnit::store<0>(sums[0]);
      TileUnit::store<1>(sums[1]);
      TileUnit::store<2>(sums[0] + kTile * kLanes);
      TileUnit::store<3>(sums[1] + kTile * kLanes);
      step_ = from_;
      tile_ += 2;
    }
  }

  void finish() {
    while (!is_done()) {
      step();
    }
  }

 private:
  TileMatrix left_{}, right_{};
  Panels result_{};
  int64_t tile_ = 0, last_ = 0, step_ = 0, from_ = 0, to_ = 0;
  bool adds_ = false;
};

// ---- packing: sizes of heads are multiples of kTileSteps; rows that the last pair of tiles lacks are 0

// Packs tensor rows as rows of a left matrix, or as columns of a right one.
template <bool kAsColumns, class SomeRows>
void pack_tiles(const SomeRows& rows, int64_t first, int64_t count, int64_t size, TileMatrix to) {
  for (int64_t row = 0; row < padded(count, kPair); row += kTile) {
    for (int64_t column = 0; column < size; column += kTileSteps) {
      Floats block[kTile];  // of words: nothing is computed with them
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTile; i++) {
        block[i] = row + i < count ? load<Floats>(rows[first + row + i] + column) : Floats{};
      }
      if constexpr (kAsColumns) {
        transpose(block);
      }
      std::memcpy(to.at(row / kTile, column / kTileSteps), block, sizeof block);
    }
  }
}

// Packs tensor rows to be summed over: as rows of a right matrix, or as columns of a left one. Words have rows with
// `kApart` rows between them: 1, or 16, as the rows of 16 words are 32 neighbours either way.
template <int64_t kApart, bool kAsColumns, class SomeRows>
void pack_pairs(const SomeRows& rows, int64_t first, int64_t count, int64_t size, TileMatrix to) {
  const auto numbers = [&](int64_t row, int64_t column) {
    return row < count ? widened(load<Halves>(rows[first + row] + column)) : Words{};
  };
  for (int64_t row = 0; row < count; row += kTileSteps) {
    for (int64_t column = 0; column < size; column += 2 * kTile) {
      Floats blocks[2][kTile];  // what comes in one cache line is read together
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTile; i++) {
        const int64_t here = row + (kApart == 1 ? 2 * i : i);
#pragma GCC unroll 2
        for (int64_t n = 0; n < 2; n++) {
          const Words low = numbers(here, column + n * kTile), high = numbers(here + kApart, column + n * kTile);
          blocks[n][i] = bits_of<Floats>(low | high << 16);
        }
      }
#pragma GCC unroll 2
      for (int64_t n = 0; n < 2; n++) {
        if constexpr (kAsColumns) {
          transpose(blocks[n]);
        }
        std::memcpy(to.at(column / kTile + n, row / kTileSteps), blocks[n], sizeof blocks[n]);
      }
    }
  }
}

// ---- between products

// 2 to the power of `power`, to 3e-6 of itself: bfloat16 has three digits. 1 of 0, NaN of NaN, and 0 where it would be
// too small for a normal number, with which the instruction takes fifty times as long.
inline Floats fast_exp2(Floats power) {
  const Floats rest = _mm512_reduce_ps(power, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // above the integer below
  Floats sum = broadcast(0.013426686f) * rest + 0.052242473f;
  sum = sum * rest + 0.24128021f;
  sum = sum * rest + 0.69304484f;
  sum = sum * rest + 1.0f;
  const __mmask16 is_normal = _mm512_cmp_ps_mask(power, broadcast(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(is_normal, sum, power);
}

// A float32 whose upper half is the bfloat16 next to it. Ties are rounded away from 0: one in 65,536, either sign.
inline Words nearest(Floats number) {
  return bits_of<Words>(number) + 0x8000;
}

// Words with the upper halves of two vectors, those of `low` in the lower half.
inline Words pairs(Words low, Words high) {
  return bits_of<Words>(_mm512_mask_mov_epi16(bits_of<__m512i>(low >> 16), 0xaaaaaaaa, bits_of<__m512i>(high)));
}

}  // namespace attnreg

#endif
