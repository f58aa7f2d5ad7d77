// SPDX-License-Identifier: Apache-2.0
// A sample of the naive path stores a value by this. One rounding can decide a whole row, and to nearest it may be off
// by next to nothing: what it could have cost shows only where its error is drawn anew for each sample.
#pragma once

#include <cmath>
#include <cstdint>

#include "verify/random_source.hpp"
#include "verify/storage.hpp"

namespace tessera::verify {

class NaiveRounding {
 public:
  /// Sample 0 rounds to nearest; the others take an error that is uniform within half a spacing.
  NaiveRounding(DType dtype, std::uint64_t sample)
      : dtype_(dtype), to_nearest_(sample == 0), random_(sample, 3) {}

  /// `value` as stored. What the type holds exactly stays what it is.
  float operator()(float value) {
    float const nearest = round_to(dtype_, value);
    if (to_nearest_ || nearest == value || !std::isfinite(nearest)) return nearest;
    return value + static_cast<float>(random_.uniform() - 0.5) * spacing_at(dtype_, value);
  }

 private:
  DType dtype_;
  bool to_nearest_;
  RandomSource random_;
};

}  // namespace tessera::verify
