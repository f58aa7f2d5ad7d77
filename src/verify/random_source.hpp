// SPDX-License-Identifier: Apache-2.0
// Random numbers as a function of (seed, stream, index): the same on every machine, in any order.
#pragma once

#include <cstdint>

namespace tessera::verify {

/// A stream of draws; integer arithmetic only (splitmix64), so that no libm decides a bit.
class RandomSource {
 public:
  RandomSource(std::uint64_t seed, std::uint64_t stream) noexcept
      : state_(mix(mix(seed) ^ (stream * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u))) {}

  std::uint64_t bits() noexcept { return mix(state_ += 0x9e3779b97f4a7c15u); }

  /// Uniform in [0, 1).
  double uniform() noexcept { return static_cast<double>(bits() >> 11) * 0x1p-53; }

  /// Uniform in [0, bound), bound >= 1.
  std::int64_t below(std::int64_t bound) noexcept {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(bound));
  }
  /// Uniform in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) noexcept {
    return low + below(high - low + 1);
  }
  bool chance(double probability) noexcept { return uniform() < probability; }

  /// Mean 0, variance 1, nearly normal: a sum of eight uniform 16-bit integers.
  double normal() noexcept {
    std::int64_t sum = 0;
    for (int word = 0; word < 2; ++word) {
      std::uint64_t const draw = bits();
      for (int shift = 0; shift < 64; shift += 16) sum += (draw >> shift) & 0xffff;
    }
    // variance of one: (2^32 - 1) / 12; 8 of them: standard deviation 53509.92
    return (static_cast<double>(sum) - 8 * 32767.5) / 53509.9199;
  }

 private:
  static std::uint64_t mix(std::uint64_t z) noexcept {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint64_t state_;
};

}  // namespace tessera::verify
