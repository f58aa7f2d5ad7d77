// SPDX-License-Identifier: Apache-2.0
// The producer of a GEMM that gathers rows of A with their scales. With a k_tile it loads a scale of each row and two
// scales of B; all of them land before the phase of the stage's barrier ends.
#pragma once

#include "../../arch/cp_async.cuh"
#include "../../arch/setmaxnreg.cuh"
#include "../../arch/tma.cuh"
#include "../ring.cuh"
#include "../scales.cuh"
#include "gather.cuh"

namespace tessera::cuda::gemm {

// Thread t copies the scales of row t of the tile, 4 bytes in each k_tile.
template <GemmConfig kGemm>
class ScaleGather {
 public:
  __device__ __forceinline__ ScaleGather(GemmParams const& p, ScaleParams const& scales)
      : gmem_index_(p.gmem_index), scales_(scales) {}

  // As RowGather does it.
  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    int const row = min(tile.row + thread(), tile.end - 1);
    ahead_ = gmem_index_ != nullptr ? gmem_index_[row] : row;
  }
  __device__ __forceinline__ void begin() {
    next_ = static_cast<uint32_t>(ahead_) * static_cast<uint32_t>(scales_.a_row_step);
  }
  __device__ __forceinline__ void copy(ScaledStorage<kGemm>& smem, int stage) {
    arch::cp_async_4(arch::shared_address(&smem.a_scales[stage][thread()]), scales_.gmem_a + next_);
    next_ += static_cast<uint32_t>(scales_.a_k_step);
  }

 private:
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
  }
  int const* gmem_index_;
  ScaleParams const& scales_;
  uint32_t next_;  // scale of this thread's row: 2^32 of them are those of 2^39 codes
  int ahead_;
};

// The two scales of B in a k_tile. Called by one thread.
template <GemmConfig kGemm>
__device__ __forceinline__ void copy_b_scales(ScaledStorage<kGemm>& smem, int stage,
                                              GemmParams const& p, ScaleParams const& scales,
                                              WorkTile const& tile, int k_tile) {
  uint32_t const to = arch::shared_address(&smem.b_scales[stage]);
  if constexpr (kGemm.b_halves() == 2) {
    int64_t const first = (int64_t{tile.segment} * p.n_tiles + tile.n_tile) * 2 * p.k_tiles;
    arch::cp_async_8(to, scales.gmem_b + first + 2 * k_tile);
  } else {
    int const block = 2 * tile.n_tile;
    int64_t const first = (int64_t{tile.segment} * scales.b_blocks + block) * p.k_tiles + k_tile;
    arch::cp_async_4(to, scales.gmem_b + first);
    // A block that does not exist has sums of zeros; any scale will do.
    arch::cp_async_4(to + 4, scales.gmem_b + first + (block + 1 < scales.b_blocks ? p.k_tiles : 0));
  }
}

// Loads rows of A with their scales, and B with its own by TMA.
template <GemmConfig kGemm>
class ScaledTiles {
 public:
  __device__ __forceinline__ ScaledTiles(ScaledStorage<kGemm>& smem, GemmParams const& p,
                                         ScaleParams const& scales)
      : smem_(smem), p_(p), scales_(scales), rows_(p), row_scales_(p, scales) {}

  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    rows_.prefetch(tile);
    row_scales_.prefetch(tile);
  }
  __device__ __forceinline__ void begin() {
    rows_.begin();
    row_scales_.begin();
  }
  __device__ __forceinline__ void fill_b(int stage, WorkTile const& tile, int k_tile) {
    arch::Mbarrier* const full = &smem_.full[stage];
    arch::mbarrier_arrive_expect_tx(full, kGemm.b_tile_bytes());
    arch::tma_load(smem_.b[stage], &p_.b[0], full, k_tile * kGemm.tile.k, 0, 0,
                   tile.n_tile * kGemm.b_groups(), tile.segment);
    copy_b_scales<kGemm>(smem_, stage, p_, scales_, tile, k_tile);
  }
  __device__ __forceinline__ void copy(int stage, WorkTile const& tile) {
    row_scales_.copy(smem_, stage);
    rows_.copy(smem_, stage, tile.rows);  // and arrives
  }
  __device__ __forceinline__ void after(PipelineState<kGemm>&, WorkTile const&) {}

 private:
  ScaledStorage<kGemm>& smem_;
  GemmParams const& p_;
  ScaleParams const& scales_;
  RowGather<kGemm> rows_;
  ScaleGather<kGemm> row_scales_;
};

template <GemmConfig kGemm>
__device__ __forceinline__ void produce_scaled(ScaledStorage<kGemm>& smem, GemmParams const& p,
                                               ScaleParams const& scales) {
  arch::release_registers<kGemm.producer_registers()>();
  if (arch::warp_idx() == 0) {
    gather_tiles<kGemm, true, ScaledTiles<kGemm>>(smem, p, scales);
  } else {
    gather_tiles<kGemm, false, ScaledTiles<kGemm>>(smem, p, scales);
  }
}

}  // namespace tessera::cuda::gemm
