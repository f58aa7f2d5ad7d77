// SPDX-License-Identifier: Apache-2.0
// A stateless generator: the number at (seed, stream, index), whoever asks and in whatever order. Resuming
// needs no generator state but the step.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace tessera::lm {

/// Says what a number is drawn for; each purpose has its own sequence.
enum class Stream : std::uint64_t { initial_weights = 1, batches = 2, sampling = 3 };

/// The finaliser of SplitMix64: a bijection whose output bits each depend on all input bits.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t random_bits(std::uint64_t seed, Stream stream,
                                    std::uint64_t index) noexcept {
  return mix(mix(mix(seed) ^ static_cast<std::uint64_t>(stream)) ^ index);
}

/// Uniform in [0, 1), 53 bits.
constexpr double random_unit(std::uint64_t seed, Stream stream, std::uint64_t index) noexcept {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

/// Standard normal (Box-Muller).
inline double random_normal(std::uint64_t seed, Stream stream, std::uint64_t index) noexcept {
  double const radius = std::sqrt(-2 * std::log(1 - random_unit(seed, stream, 2 * index)));
  return radius * std::cos(2 * std::numbers::pi * random_unit(seed, stream, 2 * index + 1));
}

}  // namespace tessera::lm
