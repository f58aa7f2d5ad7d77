// SPDX-License-Identifier: Apache-2.0
// Random numbers that are a function of a counter: the same on every machine, for every thread and call.
#pragma once

#include <cstdint>

#include "core/simd.hpp"
#include "tessera/shape.hpp"

namespace tessera::core {

/// First word of Philox4x32-10 (Salmon et al., SC11) for a counter of four words and a key of two, low word first.
TESSERA_INLINE std::uint32_t philox_word(std::uint64_t key, std::uint32_t c0, std::uint32_t c1,
                                         std::uint32_t c2, std::uint32_t c3) noexcept {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    std::uint64_t const p0 = std::uint64_t{0xd2511f53u} * c0, p1 = std::uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return c0;
}

/// X_e of the stochastic variants: the same for every machine, thread and call of a (seed, step, layer).
TESSERA_INLINE std::uint32_t rounding_random(Router const& router, std::int64_t expert) noexcept {
  return philox_word(router.seed, static_cast<std::uint32_t>(expert), router.layer,
                     static_cast<std::uint32_t>(router.step),
                     static_cast<std::uint32_t>(router.step >> 32));
}

}  // namespace tessera::core
