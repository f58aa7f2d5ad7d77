// SPDX-License-Identifier: Apache-2.0
// The scales of a GEMM whose operands are e4m3 in blocks along k: a row of A has one for each k_tile, a block of 128 x
// 128 of B one. A stage holds those of its k_tile beside the operands.
#pragma once

#include "config.hpp"
#include "storage.cuh"

namespace tessera::cuda::gemm {

constexpr int kScaleBlock = 128;  // elements along k, and rows of B, that share a scale

struct ScaleParams {
  float const* gmem_a;  // of row r of A and a k_tile: r * a_row_step + k_tile * a_k_step
  int64_t a_row_step, a_k_step;
  // Halves along rows: (segments, n_tiles, k_tiles, 2); else (segments, b_blocks, k_tiles).
  float const* gmem_b;
  int b_blocks;  // of 128 rows of B; an odd number: the last tile has one
};

// Numbers of each row of two tiles, in turns, that the storing warpgroup asks for.
template <int kNumbers, int kRows>
struct RowNumbers {
  alignas(16) float rows[2][kNumbers][kRows];
};
template <int kRows>
struct RowNumbers<0, kRows> {};

template <GemmConfig kGemm>
struct ScaledStorage : SharedStorage<kGemm>, RowNumbers<kGemm.epilogue.row_numbers, kGemm.tile.m> {
  alignas(16) float a_scales[kGemm.stages][kGemm.tile.m];
  alignas(16) float2 b_scales[kGemm.stages];  // gate, up; or the two column groups
  // held[w]: the 16 rows of consumer warp w lie in its slabs. stored[w]: they have been read.
  arch::Mbarrier held[4 * kGemm.consumer_warpgroups];
  arch::Mbarrier stored[4 * kGemm.consumer_warpgroups];
};

// Checks what the mainloop of scaled operands asks of a configuration, besides valid().
consteval bool valid_scaled(GemmConfig c) {
  if (c.a.element != Element::kE4m3 || c.b.element != Element::kE4m3)
    throw "a, b: e4m3 with scales";
  if (c.tile.k != kScaleBlock) throw "tile.k: a block of the scales";
  if (c.b.halves == Halves::kAlongK || c.tile.n != 2 * kScaleBlock)
    throw "tile.n: a block of either half or two blocks, so that a tile of B has two scales";
  if (!c.gathers() || c.tile.m != 128) throw "tile.m: a row for each producer thread";
  if (c.b.major != Major::kK || c.varlen_k() || c.ping_pong() || c.cluster_m() > 1 || c.keeps_b())
    throw "scales with varlen-M, K-major B in the ring, cooperative warpgroups, no multicast";
  if (!c.stores_apart() || c.epilogue.slabs != 4 || c.hands_over() || c.takes_over())
    throw "epilogue: apart, and the whole tile in slabs; no handover";
  return true;
}

}  // namespace tessera::cuda::gemm
