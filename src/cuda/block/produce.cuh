// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup: draws work tiles and fills the stages of each, A by TMA or by gather, B by
// TMA, multicast to the cluster.
#pragma once

#include "../arch/cluster.cuh"
#include "../arch/setmaxnreg.cuh"
#include "../arch/tma.cuh"
#include "gather.cuh"
#include "gemm_params.hpp"
#include "pipeline.cuh"
#include "tile_scheduler.cuh"

namespace tessera::cuda::block {

// This CTA's boxes of a B tile, sent to every CTA of the cluster. Called by one thread.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_b(SharedStorage<kGemm>& smem, GemmParams const& p, int stage,
                                       int k_tile, WorkTile const& tile) {
  constexpr int kBoxesPerCta = kGemm.b_boxes() / kGemm.cluster_m;
  constexpr int kBoxElements = kBoxRows * kGemm.tile.k;
  constexpr uint16_t kEveryCta = (1u << kGemm.cluster_m) - 1;
  int const first =
      kGemm.cluster_m == 1 ? 0 : static_cast<int>(arch::cluster_cta_rank()) * kBoxesPerCta;
  int const k = k_tile * kGemm.tile.k;
  TESSERA_UNROLL
  for (int i = 0; i < kBoxesPerCta; ++i) {
    int const box = first + i;
    int const row = (tile.n_tile * kGemm.b_boxes() + box) / kGemm.b_halves * kBoxRows;
    CUtensorMap const* const map = &p.b[box % kGemm.b_halves];
    int c0 = k;
    int c1 = row;
    int c2 = 0;
    if constexpr (kGemm.b_major == Major::kRows) {
      c0 = row;
      c1 = k;
    } else if (p.b_block <= kBoxRows) {
      c1 = 0;
      c2 = row / p.b_block;
    } else if (row >= p.b_block) {
      c1 = row % p.b_block;
      c2 = row / p.b_block;
    }
    bf16* const smem_b = &smem.b[stage][box * kBoxElements];
    if constexpr (kGemm.cluster_m == 1) {
      arch::tma_load(smem_b, map, &smem.full[stage], c0, c1, c2, tile.segment);
    } else {
      arch::tma_load_multicast(smem_b, map, &smem.full[stage], kEveryCta, c0, c1, c2, tile.segment);
    }
  }
}

// One warp; one of its lanes issues both operands.
template <GemmConfig kGemm>
__device__ __forceinline__ void produce_by_tma(SharedStorage<kGemm>& smem, GemmParams const& p) {
  bool const schedules = kGemm.cluster_m == 1 || arch::cluster_cta_rank() == 0;
  TileScheduler<kGemm> scheduler(smem, p.segments, p.n_tiles, p.gmem_tile_counter);
  WorkQueue<kGemm, true> queue(smem);
  PipelineState<kGemm.stages> state;
  WorkTile tile;
  if (schedules) scheduler.announce_first(p.k_tiles);
  while (queue.read(tile)) {
    int const subtiles = (tile.rows + kSubtileM - 1) / kSubtileM;
    uint32_t const bytes = kGemm.b_tile_bytes() + subtiles * kGemm.a_subtile_bytes();
    for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
      if (schedules) scheduler.step(k_tile, p.k_tiles);
      wait_empty<kGemm>(smem, state);
      if (arch::elect_one()) {
        arch::Mbarrier* const full = &smem.full[state.stage];
        arch::mbarrier_arrive_expect_tx(full, bytes);
        TESSERA_UNROLL
        for (int m = 0; m < kGemm.tile.m / kSubtileM; ++m) {
          if (m < subtiles) {
            arch::tma_load(&smem.a[state.stage][m * kSubtileM * kGemm.tile.k], &p.a, full,
                           k_tile * kGemm.tile.k, tile.row + m * kSubtileM);
          }
        }
        load_b<kGemm>(smem, p, state.stage, k_tile, tile);
      }
      __syncwarp();
      state.advance();
    }
  }
}

// Four warps gather A; one also issues B, before its share of A. Ping-pong tiles are half as wide, so
// the warps take turns there.
template <GemmConfig kGemm, bool kFirstWarp>
__device__ __forceinline__ void produce_by_gather(SharedStorage<kGemm>& smem, GemmParams const& p) {
  constexpr int kReadAhead = 2;  // k_tiles before the end: requests the next tile's row indices
  bool const schedules = kFirstWarp && (kGemm.cluster_m == 1 || arch::cluster_cta_rank() == 0);
  TileScheduler<kGemm> scheduler(smem, p.segments, p.n_tiles, p.gmem_tile_counter);
  WorkQueue<kGemm, kFirstWarp> queue(smem);
  RowGather<kGemm> gather(p);
  PipelineState<kGemm.stages> state;
  int const warp = arch::warp_idx() % 4;
  WorkTile tile;
  WorkTile ahead;
  if (schedules) scheduler.announce_first(p.k_tiles);
  bool more = queue.read(tile);
  if (more) gather.prefetch(tile);
  while (more) {
    gather.begin();
    for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
      if (schedules) scheduler.step(k_tile, p.k_tiles);
      if (k_tile == max(p.k_tiles - kReadAhead, 0)) {
        more = queue.read(ahead);
        if (more) gather.prefetch(ahead);
      }
      wait_empty<kGemm>(smem, state);
      if (warp == (kGemm.ping_pong() ? k_tile % 4 : 0) && arch::elect_one()) {
        arch::mbarrier_arrive_expect_tx(&smem.full[state.stage], kGemm.b_tile_bytes());
        load_b<kGemm>(smem, p, state.stage, k_tile, tile);
      }
      __syncwarp();
      gather.copy(smem, state.stage, k_tile, tile.rows);
      state.advance();
    }
    tile = ahead;
  }
}

template <GemmConfig kGemm>
__device__ __forceinline__ void produce(SharedStorage<kGemm>& smem, GemmParams const& p) {
  arch::release_registers<kGemm.producer_registers()>();
  if constexpr (kGemm.gathers()) {
    if (arch::warp_idx() == 0) {
      produce_by_gather<kGemm, true>(smem, p);
    } else {
      produce_by_gather<kGemm, false>(smem, p);
    }
  } else {
    if (arch::warp_idx() == 0) produce_by_tma<kGemm>(smem, p);
  }
}

}  // namespace tessera::cuda::block
