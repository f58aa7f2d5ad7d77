// SPDX-License-Identifier: Apache-2.0
// mma.sync for emulated kernels: the end of arch.cuh, which includes it behind all that it calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/emulator/emulator.hpp"

namespace tessera::cuda::arch {

// Products are added in the order of k, one after the other, as those of wgmma are here.
inline void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                         uint32_t b0, uint32_t b1) {
  auto const meet = [](uint32_t first, uint32_t second) {
    std::uint64_t const* const all =
        emulator::exchange(first | uint64_t{second} << 32, {__FILE__, __LINE__});
    std::vector<std::uint64_t> const values(all, all + kWarpThreads);
    __syncwarp();
    return values;
  };
  auto const a_low = meet(a0, a2), a_high = meet(a1, a3), b = meet(b0, b1);
  // Element k of a row: two of its registers have eight each.
  auto const element = [](std::vector<std::uint64_t> const& rows, int row, int k) {
    auto const pairs = rows[static_cast<std::size_t>(4 * row + k % 8 / 2)] >> (k < 8 ? 0 : 32);
    float2 const pair = unpack_bf16(static_cast<uint32_t>(pairs));
    return k % 2 == 0 ? pair.x : pair.y;
  };
  int const g = lane_idx() / 4, q = lane_idx() % 4;
  for (int i = 0; i < 4; ++i) {
    auto const& a = i < 2 ? a_low : a_high;
    for (int k = 0; k < 16; ++k) d[i] += element(a, g, k) * element(b, 2 * q + i % 2, k);
  }
}

}  // namespace tessera::cuda::arch
