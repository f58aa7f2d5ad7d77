// SPDX-License-Identifier: Apache-2.0
// What stands in the model's memory: values that say where they come from.
#pragma once

#include <cstdint>

namespace tessera::expert_parallel::model {

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t const z = (a ^ (b + 0x632be59bd9b4e019u)) * 0x9e3779b97f4a7c15u;
  return z ^ (z >> 31) ^ 1;
}
// Contents: of a token's row of x; of a row of a, which depends on the expert; of a slot's tile.
inline std::uint64_t x_value(std::uint32_t epoch, std::int32_t rank, std::int64_t token) {
  return mix(mix(epoch, static_cast<std::uint64_t>(rank)), static_cast<std::uint64_t>(token));
}
inline std::uint64_t a_value(std::uint64_t x, std::int32_t expert) {
  return mix(x, 1000 + static_cast<std::uint64_t>(expert));
}
inline std::uint64_t y_value(std::uint64_t a, std::int32_t tile) {
  return mix(a, 2000 + static_cast<std::uint64_t>(tile));
}
constexpr std::uint64_t kPad = 0;

// What LocalLayout::row_origin has for a source where a row's result stays on its owner.
constexpr std::uint64_t kStays = 0xffffffffu;

// A RouteEntry in the 64 bits of a cell.
struct Entry {
  std::uint32_t pair, choices, place, ends_sum;
  [[nodiscard]] std::uint64_t bits() const {
    return pair | std::uint64_t{choices} << 20 | std::uint64_t{place} << 52 |
           std::uint64_t{ends_sum} << 58;
  }
  static Entry from(std::uint64_t bits) {
    auto const field = [&](int at, int width) {
      return static_cast<std::uint32_t>(bits >> at & ((std::uint64_t{1} << width) - 1));
    };
    return {field(0, 20), field(20, 32), field(52, 6), field(58, 1)};
  }
};

}  // namespace tessera::expert_parallel::model
