// The classes of lengths of a kind of calls: what `dispatch.state.CallKind` has in Python.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "key.h"

namespace attnreg {

using Place = c10::SmallVector<int64_t, 8>;  // the class of a call's lengths, followed by what counts of them

// Where a decision changes: see `contract.lengths.Cut`. Products are exact as doubles wherever a limit lies.
struct Cut {
  std::vector<std::pair<double, uint32_t>> terms;  // a coefficient, and the lengths that are multiplied, as bits
  double at = 0;

  bool operator==(const Cut& other) const {
    return at == other.at && terms == other.terms;
  }

  bool is_reached(const Lengths& lengths) const {
    double total = 0;
    for (const auto& [coefficient, names] : terms) {
      double product = coefficient;
      for (uint32_t left = names; left; left &= left - 1) {
        product *= static_cast<double>(lengths.numbers[std::countr_zero(left)]);
      }
      total += product;
    }
    return total >= at;
  }
};

// What counts of the lengths of a class, as `dispatch.state.Detail`, whose `SHAPES` is `kExact` here.
enum class Detail { kClass, kSteps, kExact };

struct Classes {
  std::vector<Cut> cuts;

  // Add the cuts of another kind of Python's that has the same key here; false if there was nothing to add.
  bool add(const Classes& other) {
    bool added = false;
    for (const Cut& cut : other.cuts) {
      if (std::find(cuts.begin(), cuts.end(), cut) == cuts.end()) {
        cuts.push_back(cut);
        added = true;
      }
    }
    return added;
  }

  Place place_of(const Lengths& lengths) const {
    Place place;
    int64_t bits = 1;  // so that a word that is full differs from one that isn't
    for (const Cut& cut : cuts) {
      if (bits >> 62) {
        place.push_back(std::exchange(bits, 1));
      }
      bits = bits << 1 | cut.is_reached(lengths);
    }
    place.push_back(bits);
    return place;
  }

  // As `contract.lengths.step_of`.
  static int64_t step_of(int64_t length) {
    const int bits = std::bit_width(static_cast<uint64_t>(length));
    return 2 * bits + (bits > 1 ? length >> (bits - 2) & 1 : 0);
  }
};

// Append to a class what counts of its lengths.
inline void append(const Lengths& lengths, Detail detail, Place& place) {
  if (detail == Detail::kExact) {
    place.append(std::begin(lengths.numbers), std::end(lengths.numbers));
  } else if (detail == Detail::kSteps) {
    // As `contract.lengths.steps_of`: of all tokens the mean of a sequence counts.
    Lengths means = lengths;
    const int64_t sequences = std::max<int64_t>(lengths.numbers[Lengths::kBatch], 1);
    means.numbers[Lengths::kTokensQ] /= sequences;
    means.numbers[Lengths::kTokensK] /= sequences;
    int64_t steps = 0;
    for (const int64_t length : means.numbers) {
      steps = steps << 8 | Classes::step_of(length);
    }
    place.push_back(steps);
  }
}

}  // namespace attnreg
