// SPDX-License-Identifier: Apache-2.0
// The mainloop of operands in e4m3 with scales. The tensor cores keep 13 fraction bits of an e4m3 accumulator, so the
// sum of a k_tile, 128 products, goes to registers of its own, is scaled and added to the accumulators in fp32. For the
// whole tile these do not fit: the column groups take turns.
//   a warpgroup: wait full[s] | 4 x m64n128k32 of group 0 -> partial | scales | wait | acc[0] += partial * scales |
//                4 x m64n128k32 of group 1 -> partial | look at full[s+1] | wait | arrive empty[s] |
//                acc[1] += partial * scales
// It never has two groups of wgmmas in flight; those of the other warpgroup fill the tensor cores meanwhile. Sums are
// those of k_tiles in their order, each added by one FMA. Whatever else a warpgroup does, the tensor cores wait for:
// it fills slabs behind a tile's k loop, and another warpgroup has the epilogue.
// docs/notebook/2026-11-27-fp8-up-projection.md
#pragma once

#include <cstddef>

#include "../../arch/sm90/wgmma_e4m3.cuh"
#include "../scales.cuh"
#include "consume.cuh"
#include "held_tile.cuh"

namespace tessera::cuda::gemm {

// Factors of a k_tile: scales of a thread's two rows, times those of gate and up, or of the two column groups.
struct ScaleFactors {
  float of[2][2];  // [gate, up][upper, lower row]
};

template <GemmConfig kGemm>
__device__ __forceinline__ ScaleFactors scale_factors(ScaledStorage<kGemm> const& smem, int stage,
                                                      int row) {
  float const upper = smem.a_scales[stage][row], lower = smem.a_scales[stage][row + 8];
  float2 const b = smem.b_scales[stage];
  return {{{upper * b.x, lower * b.x}, {upper * b.y, lower * b.y}}};
}

// acc += partial * scales. In halves registers come as 32 of 64 gate columns, then 32 of up; pairs of them by row.
template <GemmConfig kGemm>
__device__ __forceinline__ void promote(float (&acc)[kGroupColumns / 2],
                                        float const (&partial)[kGroupColumns / 2],
                                        ScaleFactors const& factors, int group) {
  TESSERA_UNROLL
  for (int i = 0; i < kGroupColumns / 2; ++i) {
    int const part = kGemm.b_halves() == 2 ? i / (kGroupColumns / 4) : group;
    acc[i] = fmaf(partial[i], factors.of[part][i / 2 % 2], acc[i]);
  }
}

// The products of a k_tile and of one column group of 64 rows, as one group of wgmmas.
__device__ __forceinline__ void issue_scaled(float (&partial)[kGroupColumns / 2], uint64_t a,
                                             uint64_t b) {
  arch::wgmma_fence();
  TESSERA_UNROLL
  for (int step = 0; step < kScaleBlock / 32; ++step) {
    arch::wgmma_e4m3_m64n128k32(partial, a + step * arch::kWgmmaDescriptorK16,
                                b + step * arch::kWgmmaDescriptorK16, step);
  }
  arch::wgmma_commit();
}

// A consumer thread's upper row of the tile, as the compiler may not work it out anew between wgmmas.
__device__ __forceinline__ int scaled_row() {
  uint32_t const thread = threadIdx.x - arch::kWarpgroupThreads;
  return static_cast<int>(
      arch::forgotten(thread / arch::kWarpThreads * kWarpRows + thread % arch::kWarpThreads / 4));
}

// Lanes of a warp agree, so that the compiler knows them together.
template <GemmConfig kGemm>
__device__ __forceinline__ bool is_full(ScaledStorage<kGemm>& smem,
                                        PipelineState<kGemm> const& state) {
  return __all_sync(arch::kAllLanes,
                    arch::mbarrier_test_wait(&smem.full[state.stage], state.phase));
}

// All k_tiles of 64 rows from `row` of the tile. A stage that is full already is waited for, and the fence behind the
// wait comes, under the last products of the one before.
template <GemmConfig kGemm>
__device__ __forceinline__ void multiply_scaled(ScaledStorage<kGemm>& smem,
                                                PipelineState<kGemm>& state,
                                                Accumulators<kGemm>& acc, int row, int k_tiles) {
  constexpr uint64_t kGroupStep = kGemm.b.bytes(kGroupColumns, kGemm.tile.k) / 16;
  // Held, as ptxas puts what works it out between wgmmas; consumers with few registers work it out anew in each k_tile.
  constexpr bool kHoldsRow = kGemm.consumer_registers() >= 208;
  int const held_row = kHoldsRow ? scaled_row() : 0;
  // Not by a flag of the first products: ptxas puts the selects between the wgmmas of a group.
  TESSERA_UNROLL
  for (int i = 0; i < kGroupColumns; ++i) Fragments::of(acc, i / 64)[i % 64] = 0;
  bool full = false;
  // Descriptors of the first stage are held: worked out anew, an address of shared memory waits for a special register.
  using Shared = SharedStorage<kGemm>;
  constexpr uint32_t kBehindA = offsetof(Shared, b) - offsetof(Shared, a);
  uint32_t const smem_a = arch::forgotten(arch::shared_address(smem.a));
  uint64_t const first_a =
      arch::wgmma_descriptor_k_major(smem_a + row * static_cast<uint32_t>(kGemm.tile.k));
  uint64_t const first_b = arch::wgmma_descriptor_k_major(smem_a + kBehindA);
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    int const stage = state.stage;
    if (!full) wait_full<kGemm>(smem, state);
    uint64_t const a = first_a + stage * (sizeof(smem.a[0]) / 16);
    uint64_t const b = first_b + stage * (sizeof(smem.b[0]) / 16);
    ScaleFactors factors;
    TESSERA_UNROLL
    for (int group = 0; group < 2; ++group) {
      float partial[kGroupColumns / 2];
      issue_scaled(partial, a, b + group * kGroupStep);
      if (group == 0) {
        factors = scale_factors<kGemm>(smem, stage, kHoldsRow ? held_row : scaled_row());
      } else {
        state.advance();
        full = k_tile + 1 < k_tiles && is_full<kGemm>(smem, state);
        if (full) arch::fence_proxy_async_shared();
      }
      arch::wgmma_wait<0>();
      if (group == 1) release_stage<kGemm>(smem, stage);
      promote<kGemm>(Fragments::of(acc, group), partial, factors, group);
    }
  }
}

// Each warpgroup owns 64 rows of every tile, and its warps hand theirs to the warpgroup that stores.
template <GemmConfig kGemm>
__device__ __forceinline__ void consume_scaled(ScaledStorage<kGemm>& smem, GemmParams const& p,
                                               int consumer) {
  arch::acquire_registers<kGemm.consumer_registers()>();
  int const row = consumer * kSubtileM;
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm> state;
  Accumulators<kGemm> acc;
  WorkTile tile;
  uint32_t phase = 1;  // of stored[]
  while (queue.read(tile)) {
    if (tile.rows <= row) {
      pass<kGemm>(smem, state, p.k_tiles, consumer);
      continue;
    }
    multiply_scaled<kGemm>(smem, state, acc, row, p.k_tiles);
    int const warp = arch::warp_idx() - 4;
    arch::mbarrier_wait(&smem.stored[warp], phase);
    phase ^= 1;
    HeldTile<kGemm>::keep(smem, acc);
    if (arch::lane_idx() == 0) arch::mbarrier_arrive(&smem.held[warp]);
    __syncwarp();
  }
}

// Stores what consumers hold: a warp the rows of the same warp of either. An epilogue that reads asks for what a tile
// needs while the tile before it is stored (epilogue/contract.hpp).
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void store_scaled(ScaledStorage<kGemm>& smem,
                                             typename Epilogue::Params const& epilogue_params) {
  static_assert(keeps_contract<kGemm.epilogue, Epilogue, Accumulators<kGemm>, PipelineState<kGemm>,
                               ScaledStorage<kGemm>>());
  constexpr bool kReads = kGemm.epilogue.row_numbers != 0;
  arch::release_registers<kGemm.epilogue_registers()>();
  WorkQueue<kGemm> queue(smem);
  WorkTile tile = {}, ahead = {};
  uint32_t phases = 0;  // of held[], a bit for either consumer: the first has rows of every tile
  Epilogue epilogue(smem, epilogue_params);
  if constexpr (kReads) {
    if (queue.peek(tile)) epilogue.start(tile);
  }
  while (queue.read(tile)) {
    uint32_t const turn = phases & 1;
    if constexpr (kReads) {
      if (!queue.peek(ahead)) ahead = {};
      epilogue.begin(ahead, turn ^ 1);
    }
#pragma unroll 1
    for (int consumer = 0; consumer < 2 && tile.rows > consumer * kSubtileM; ++consumer) {
      int const warp = 4 * consumer + arch::warp_idx() % 4;
      arch::mbarrier_wait(&smem.held[warp], phases >> consumer & 1);
      phases ^= 1u << consumer;
      epilogue.store(tile, consumer, turn);
      __syncwarp();
      if (arch::lane_idx() == 0) arch::mbarrier_arrive(&smem.stored[warp]);
      __syncwarp();
      if constexpr (kReads) {
        if (consumer == 0) epilogue.follow(turn ^ 1);
      }
    }
  }
  if constexpr (kReads) epilogue.finish();
}

}  // namespace tessera::cuda::gemm
