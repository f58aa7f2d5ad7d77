// SPDX-License-Identifier: Apache-2.0
// The warp that multiplies, in a pair of CTAs that of CTA 0. One of its lanes issues everything; commits, not the warp,
// free stages and announce tiles.
//   tile: wait acc_empty | k_tile: wait full, 4 multiplications, commit to empty | .. | commit to acc_full
#pragma once

#include "../../arch/proxy_fence.cuh"
#include "../../arch/sm100/tcgen05_commit.cuh"
#include "../../arch/sm100/tcgen05_descriptor.hpp"
#include "../../arch/sm100/tcgen05_fence.cuh"
#include "../../arch/sm100/tcgen05_mma.cuh"
#include "../ring.cuh"
#include "../scheduler.cuh"
#include "accumulators.cuh"

namespace tessera::cuda::gemm {

constexpr int kStepK = 16;  // k of a multiplication

template <GemmConfig kGemm>
consteval uint32_t mma_instruction() {
  return arch::Bf16Mma{
      .m = kGemm.tile.m * kGemm.cluster_m(),
      .n = kGemm.tile.n,
      .a_major = arch::MmaMajor::kK,
      .b_major = kGemm.b.major == Major::kK ? arch::MmaMajor::kK : arch::MmaMajor::kRows}
      .bits();
}

// The k_tile in `stage`, added to the accumulator at `tensor` or, the first of a tile, instead of it. By one thread.
template <GemmConfig kGemm>
__device__ __forceinline__ void multiply_k_tile(SharedStorage<kGemm>& smem, int stage,
                                                uint32_t tensor, bool is_first) {
  constexpr bool kRowsMajor = kGemm.b.major == Major::kRows;
  constexpr uint32_t kBStep = kRowsMajor ? arch::kRowsMajorStepBytes : arch::kKMajorStepBytes;
  uint64_t const a = arch::k_major_tile(arch::shared_address(smem.a[stage])).bits();
  uint32_t const smem_b = arch::shared_address(smem.b[stage]);
  uint64_t const b =
      (kRowsMajor ? arch::rows_major_boxes(smem_b) : arch::k_major_tile(smem_b)).bits();
  TESSERA_UNROLL
  for (int step = 0; step < kGemm.tile.k / kStepK; ++step) {
    auto const s = static_cast<uint32_t>(step);
    arch::tcgen05_mma_bf16<kGemm.cluster_m()>(tensor, arch::plus(a, s * arch::kKMajorStepBytes),
                                              arch::plus(b, s * kBStep), mma_instruction<kGemm>(),
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
    for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
      wait_in_pair<kGemm>(&smem.full[state.stage], state.phase);
      arch::tcgen05_fence_after();  // behind both waits: the loads of the accumulator are over
      if constexpr (kGemm.gathers()) arch::fence_proxy_async_shared();  // cp.async wrote A
      if (arch::elect_one()) {
        multiply_k_tile<kGemm>(smem, state.stage, tensor, k_tile == 0);
        arch::tcgen05_commit<kGemm.cluster_m()>(&smem.empty[state.stage]);
        if (k_tile == p.k_tiles - 1) {
          arch::tcgen05_commit<kGemm.cluster_m()>(&smem.acc_full[turn.index]);
        }
      }
      __syncwarp();
      state.advance();
    }
    turn.advance();
  }
}

}  // namespace tessera::cuda::gemm
