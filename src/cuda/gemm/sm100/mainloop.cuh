// SPDX-License-Identifier: Apache-2.0
// The warp that multiplies, in a pair of CTAs that of CTA 0. One of its lanes issues everything; commits, not the warp,
// free stages and announce tiles.
//   tile: wait acc_empty | k_tile: wait full, 4 multiplications, commit to empty | .. | commit to acc_full
// MXFP8 copies its scales to tensor memory ahead of the multiplications of a k_tile (mainloop_scaled.cuh).
#pragma once

#include "../../arch/proxy_fence.cuh"
#include "../../arch/sm100/tcgen05_commit.cuh"
#include "../../arch/sm100/tcgen05_descriptor.hpp"
#include "../../arch/sm100/tcgen05_fence.cuh"
#include "../../arch/sm100/tcgen05_mma.cuh"
#include "../ring.cuh"
#include "../scheduler.cuh"
#include "../tile_extent.cuh"
#include "accumulators.cuh"
#include "mainloop_scaled.cuh"

namespace tessera::cuda::gemm {

constexpr int kStepK = 16;  // k of a multiplication

// An operand as it lies in a stage.
template <Major kMajor>
struct StageOperand {
  static constexpr bool kIsRows = kMajor == Major::kRows;
  static constexpr arch::MmaMajor kMma = kIsRows ? arch::MmaMajor::kRows : arch::MmaMajor::kK;
  static constexpr uint32_t kStep = kIsRows ? arch::kRowsMajorStepBytes : arch::kKMajorStepBytes;
  __device__ __forceinline__ static uint64_t bits(bf16 const* smem) {
    uint32_t const address = arch::shared_address(smem);
    return (kIsRows ? arch::rows_major_boxes(address) : arch::k_major_tile(address)).bits();
  }
};

template <GemmConfig kGemm>
consteval uint32_t mma_instruction() {
  return arch::Bf16Mma{.m = kGemm.tile.m * kGemm.cluster_m(),
                       .n = kGemm.tile.n,
                       .a_major = StageOperand<kGemm.a.major>::kMma,
                       .b_major = StageOperand<kGemm.b.major>::kMma}
      .bits();
}

// Issues `steps` steps of the k_tile in `stage`: they are added to the accumulator at `tensor` or, the first of a tile,
// replace it. One thread calls it.
template <GemmConfig kGemm>
__device__ __forceinline__ void multiply_k_tile(SharedStorage<kGemm>& smem, int stage,
                                                uint32_t tensor, bool is_first, int steps) {
  using A = StageOperand<kGemm.a.major>;
  using B = StageOperand<kGemm.b.major>;
  uint64_t const a = A::bits(smem.a[stage]), b = B::bits(smem.b[stage]);
  TESSERA_UNROLL
  for (int step = 0; step < kGemm.tile.k / kStepK; ++step) {
    if (kGemm.varlen_k() && step == steps) break;
    auto const s = static_cast<uint32_t>(step);
    arch::tcgen05_mma_bf16<kGemm.cluster_m()>(tensor, arch::plus(a, s * A::kStep),
                                              arch::plus(b, s * B::kStep), mma_instruction<kGemm>(),
                                              is_first && step == 0 ? 0 : 1);
  }
}

template <GemmConfig kGemm>
__device__ __forceinline__ void multiply_tiles(SharedStorage<kGemm>& smem, GemmParams const& p) {
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm> state;
  AccumulatorTurn turn;
  WorkTile tile;
  while (queue.read(tile)) {
    wait_in_pair<kGemm>(&smem.acc_empty[turn.index], turn.phase ^ 1);
    uint32_t const tensor = smem.tensor + static_cast<uint32_t>(turn.index * kGemm.tile.n);
    int const k_tiles = k_tiles_of<kGemm>(p, tile);
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      bool const is_last = k_tile == k_tiles - 1;
      wait_in_pair<kGemm>(&smem.full[state.stage], state.phase);
      arch::tcgen05_fence_after();  // behind both waits: the loads of the accumulator are over
      if constexpr (kGemm.gathers() && !relays(kGemm)) {
        arch::fence_proxy_async_shared();  // cp.async wrote A
      }
      if (arch::elect_one()) {
        int const steps =
            kGemm.varlen_k() && is_last ? last_steps_of<kGemm>(tile) : kGemm.tile.k / kStepK;
        multiply_k_tile<kGemm>(smem, state.stage, tensor, k_tile == 0, steps);
        arch::tcgen05_commit<kGemm.cluster_m()>(&smem.empty[state.stage]);
        if (is_last) arch::tcgen05_commit<kGemm.cluster_m()>(&smem.acc_full[turn.index]);
      }
      __syncwarp();
      state.advance();
    }
    turn.advance();
  }
}

}  // namespace tessera::cuda::gemm
