// SPDX-License-Identifier: Apache-2.0
// The warps that gather load MXFP8 operands: rows of A, B by TMA, and the scales of both by cp.async, so that they are
// reported, and relayed in a pair, with the rows.
#pragma once

#include "../../arch/cp_async.cuh"
#include "../produce/gather.cuh"
#include "pair_loads.cuh"
#include "scales.cuh"

namespace tessera::cuda::gemm {

// Returns the place of the four scales of row m in an atom.
__device__ __forceinline__ constexpr uint32_t place_in_atom(int m) {
  return static_cast<uint32_t>(m % 32 * 16 + m / 32 * 4);
}

// Thread t copies the word of row t of A, 4 bytes. A line of B's atom has the scales of four rows, 32 rows apart, in 16
// bytes; a thread of the first two warps copies half of a line. Rows of gate come before those of up, 64 each, from an
// atom of either.
template <GemmConfig kGemm>
class MxScaleGather {
 public:
  __device__ __forceinline__ MxScaleGather(GemmParams const& p, MxScaleParams const& scales)
      : p_(p), scales_(scales) {}

  // As RowGather does it.
  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    int const row = min(tile.row + thread(), tile.end - 1);
    ahead_ = p_.gmem_index != nullptr ? p_.gmem_index[row] : row;
  }
  __device__ __forceinline__ void begin() {
    gmem_a_ = scales_.gmem_a + int64_t{ahead_} * p_.k_tiles * kWordBytes;
    k_tile_ = 0;
  }
  // The next k_tile.
  __device__ __forceinline__ void copy(SharedStorage<kGemm>& smem, int stage,
                                       WorkTile const& tile) {
    int const t = thread();
    arch::cp_async_4(arch::shared_address(smem.a_scales[stage]) + place_in_atom(t), gmem_a_);
    gmem_a_ += kWordBytes;
    if (t < kBThreads) {
      uint32_t const at = static_cast<uint32_t>(t % 32 * 16 + t / 32 * 8);
      arch::cp_async_8(arch::shared_address(smem.b_scales[stage]) + at, b_line(tile, t));
    }
    ++k_tile_;
  }

 private:
  static constexpr int kWordBytes = 4, kBThreads = 64;

  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
  }
  __device__ __forceinline__ uint8_t const* b_line(WorkTile const& tile, int t) const {
    constexpr int kHalves = kGemm.b_halves();
    int const part = t / 32;  // 64 rows of the tile
    int const row = kHalves == 2 ? tile.n_tile * kGroupRows
                                 : tile.n_tile * kScaleAtomRows + part * kGroupRows;  // in a half
    int64_t const matrix = int64_t{tile.segment} * kHalves + (kHalves == 2 ? part : 0);
    int64_t const atom = int64_t{row / kScaleAtomRows} * p_.k_tiles + k_tile_;
    return scales_.gmem_b + matrix * scales_.b_matrix_bytes + atom * kScaleAtomBytes + t % 32 * 16 +
           row % kScaleAtomRows / kGroupRows * 8;
  }

  GemmParams const& p_;
  MxScaleParams const& scales_;
  uint8_t const* gmem_a_;  // the word of this thread's row in the next k_tile
  int k_tile_;
  int ahead_;
};

// This CTA's rows of a tile of B: in a pair each has 64, of gate or of up where there are halves. Called by one thread.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_mx_b(SharedStorage<kGemm>& smem, GemmParams const& p,
                                          int stage, int k_tile, WorkTile const& tile) {
  arch::Mbarrier* const full = &smem.full[stage];
  int const group = tile.n_tile * kGemm.b_groups(), k = k_tile * kGemm.tile.k;
  if constexpr (kGemm.cluster_m() == 2) {
    auto const rank = static_cast<int>(arch::cluster_cta_rank());
    if (rank == 0) arch::mbarrier_arrive_expect_tx(full, kGemm.b_tile_bytes());
    constexpr bool kIsHalf = kGemm.b_halves() == 2;
    arch::tma_load_for_pair(smem.b[stage], &p.b[0], full, k, 0, kIsHalf ? rank : 0,
                            group + (kIsHalf ? 0 : rank), tile.segment);
  } else {
    arch::mbarrier_arrive_expect_tx(full, kGemm.b_tile_bytes());
    arch::tma_load(smem.b[stage], &p.b[0], full, k, 0, 0, group, tile.segment);
  }
}

// The policy of gather_tiles().
template <GemmConfig kGemm>
class MxTiles {
 public:
  __device__ __forceinline__ MxTiles(SharedStorage<kGemm>& smem, GemmParams const& p,
                                     MxScaleParams const& scales)
      : smem_(smem), p_(p), rows_(p), scales_(p, scales) {}

  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    rows_.prefetch(tile);
    scales_.prefetch(tile);
  }
  __device__ __forceinline__ void begin() {
    rows_.begin();
    scales_.begin();
  }
  __device__ __forceinline__ void fill_b(int stage, WorkTile const& tile, int k_tile) {
    load_mx_b<kGemm>(smem_, p_, stage, k_tile, tile);
  }
  __device__ __forceinline__ void copy(int stage, WorkTile const& tile) {
    scales_.copy(smem_, stage, tile);
    rows_.copy(smem_, stage, tile.rows);  // and arrives
  }
  __device__ __forceinline__ void after(PipelineState<kGemm>&, WorkTile const&) {}

 private:
  SharedStorage<kGemm>& smem_;
  GemmParams const& p_;
  RowGather<kGemm> rows_;
  MxScaleGather<kGemm> scales_;
};

}  // namespace tessera::cuda::gemm
