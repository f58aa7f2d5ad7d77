// SPDX-License-Identifier: Apache-2.0
// The GEMM of all kernels, once: D[row, :] = A[row, :] * B[segment(row)]^T for every work tile, as
// the programs of its two roles. One warpgroup produces (fills stages), the others consume (multiply
// and hand their accumulators to the epilogue). Policies come from GemmConfig.
#pragma once

#include "../arch/cluster.cuh"
#include "../arch/setmaxnreg.cuh"
#include "../arch/tma.cuh"
#include "../arch/wgmma.cuh"
#include "gather.cuh"
#include "pipeline.cuh"
#include "tile_scheduler.cuh"

namespace tessera::cuda::block {

struct GemmParams {
  CUtensorMap a;            // (k, row), box 64 x 64; kTma only
  CUtensorMap b;            // (k, row, half, segment), box 64 x b_box_n x 1 x 1
  void const* gmem_a;       // kGather only, as are the next two
  int const* gmem_index;    // row -> row of gmem_a
  int a_pitch_chunks;       // row pitch of gmem_a in 16-byte units
  int const* gmem_offsets;  // [segments + 1]
  int* gmem_tile_counter;   // 0 before and after every launch
  int segments;
  int n_tiles;
  int k_tiles;
};

// Barriers and the segment table. On return all CTAs of the cluster may use each other's barriers.
template <GemmConfig kGemm>
__device__ __forceinline__ void set_up(SharedStorage<kGemm>& smem, GemmParams const& p) {
  if (threadIdx.x == 0) {
    if constexpr (!kGemm.gathers()) arch::tma_prefetch_map(&p.a);
    arch::tma_prefetch_map(&p.b);
    init_pipeline<kGemm>(smem);
  }
  for (int s = static_cast<int>(threadIdx.x); s <= p.segments; s += kGemm.threads()) {
    smem.segment_offsets[s] = p.gmem_offsets[s];
  }
  if constexpr (kGemm.cluster_m > 1) {
    arch::cluster_sync();
  } else {
    __syncthreads();
  }
}

// This CTA's boxes of a B tile, sent to every CTA of the cluster. Called by one thread.
template <GemmConfig kGemm>
__device__ __forceinline__ void load_b(SharedStorage<kGemm>& smem, GemmParams const& p, int stage,
                                       int k_tile, WorkTile const& tile) {
  constexpr int kBoxesPerCta = kGemm.b_boxes() / kGemm.cluster_m;
  constexpr int kBoxesPerHalf = kGemm.b_boxes() / kGemm.b_halves;
  constexpr uint16_t kEveryCta = (1u << kGemm.cluster_m) - 1;
  int const cta = kGemm.cluster_m == 1 ? 0 : static_cast<int>(arch::cluster_cta_rank());
  TESSERA_UNROLL
  for (int i = 0; i < kBoxesPerCta; ++i) {
    int const box = cta * kBoxesPerCta + i;
    int const half = box / kBoxesPerHalf;
    int const row = tile.n_tile * (kGemm.tile.n / kGemm.b_halves) +
                    (box - half * kBoxesPerHalf) * kGemm.b_box_n();
    bf16* const smem_b = &smem.b[stage][box * kGemm.b_box_n() * kGemm.tile.k];
    if constexpr (kGemm.cluster_m == 1) {
      arch::tma_load(smem_b, &p.b, &smem.full[stage], k_tile * kGemm.tile.k, row, half,
                     tile.segment);
    } else {
      arch::tma_load_multicast(smem_b, &p.b, &smem.full[stage], kEveryCta, k_tile * kGemm.tile.k,
                               row, half, tile.segment);
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
  if (schedules) scheduler.announce_first();
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

// Four warps gather A; they take turns to issue B, each before its share of A.
template <GemmConfig kGemm, bool kFirstWarp>
__device__ __forceinline__ void produce_by_gather(SharedStorage<kGemm>& smem, GemmParams const& p) {
  constexpr int kReadAhead = 2;  // k_tiles before the end: requests the next tile's row indices
  bool const schedules = kFirstWarp && (kGemm.cluster_m == 1 || arch::cluster_cta_rank() == 0);
  TileScheduler<kGemm> scheduler(smem, p.segments, p.n_tiles, p.gmem_tile_counter);
  WorkQueue<kGemm, kFirstWarp> queue(smem);
  RowGather<kGemm> gather(p.gmem_a, p.gmem_index, p.a_pitch_chunks);
  PipelineState<kGemm.stages> state;
  int const warp = arch::warp_idx() % 4;
  WorkTile tile;
  WorkTile ahead;
  if (schedules) scheduler.announce_first();
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
      if (warp == k_tile % 4 && arch::elect_one()) {
        arch::mbarrier_arrive_expect_tx(&smem.full[state.stage], kGemm.b_tile_bytes());
        load_b<kGemm>(smem, p, state.stage, k_tile, tile);
      }
      __syncwarp();
      gather.copy(smem.a[state.stage], k_tile, tile.rows);
      arch::cp_async_arrive(&smem.full[state.stage]);
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

// acc = A * B^T over all k_tiles for the first kActive 64-row parts from `row` of the tile. The last
// group of wgmmas is left in flight and its stage unreleased: see finish().
template <GemmConfig kGemm, int kActive, int kSubtiles>
__device__ __forceinline__ void multiply(SharedStorage<kGemm>& smem,
                                         PipelineState<kGemm.stages>& state,
                                         float (&acc)[kSubtiles][kGemm.tile.n / 2], int row,
                                         int k_tiles, int signal_skew_at) {
  constexpr uint64_t kSubtileStep = kGemm.a_subtile_bytes() / 16;
  int previous = 0;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    arch::mbarrier_wait(&smem.full[state.stage], state.phase);
    // cp.async wrote A through the generic proxy; full[] ordered those writes before us.
    if constexpr (kGemm.gathers()) arch::fence_proxy_async_shared();
    uint64_t const a =
        arch::wgmma_descriptor_k_major(&smem.a[state.stage][row * kGemm.tile.k]);
    uint64_t const b = arch::wgmma_descriptor_k_major(smem.b[state.stage]);
    arch::wgmma_fence();
    TESSERA_UNROLL
    for (int k16 = 0; k16 < kGemm.tile.k / 16; ++k16) {
      TESSERA_UNROLL
      for (int m = 0; m < kActive; ++m) {
        arch::wgmma_m64k16<kGemm.tile.n>(acc[m],
                                         a + k16 * arch::kWgmmaDescriptorK16 + m * kSubtileStep,
                                         b + k16 * arch::kWgmmaDescriptorK16, k_tile | k16);
      }
    }
    arch::wgmma_commit();
    if (k_tile > 0) {
      arch::wgmma_wait<1>();
      release_stage<kGemm>(smem, previous);
    }
    if constexpr (kGemm.skew > 0) {
      if (k_tile == signal_skew_at) arch::named_barrier_arrive(kBarrierSkew, 256);
    }
    previous = state.stage;
    state.advance();
  }
}

// A warpgroup without rows still owes its arrivals: the stage is shared with the others.
template <GemmConfig kGemm>
__device__ __forceinline__ void pass(SharedStorage<kGemm>& smem,
                                     PipelineState<kGemm.stages>& state, int k_tiles) {
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    arch::mbarrier_wait(&smem.full[state.stage], state.phase);
    release_stage<kGemm>(smem, state.stage);
    state.advance();
  }
}

template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void consume(SharedStorage<kGemm>& smem, GemmParams const& p,
                                        typename Epilogue::Params const& epilogue_params,
                                        int consumer) {
  arch::acquire_registers<kGemm.consumer_registers()>();
  constexpr int kSubtiles = kGemm.warpgroup_subtiles();
  int const row = kGemm.ping_pong() ? 0 : consumer * kGemm.warpgroup_m();
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm.stages> state;
  Epilogue epilogue(smem, epilogue_params, consumer);
  float acc[kSubtiles][kGemm.tile.n / 2];

  int signal_skew_at = -1;
  if constexpr (kGemm.skew > 0) {
    if (consumer == 0) {
      signal_skew_at = min(kGemm.skew, p.k_tiles) - 1;
    } else {
      arch::named_barrier_sync(kBarrierSkew, 256);
    }
  }
  // Ping-pong: every second tile belongs to the other warpgroup, whose stages are stepped over.
  WorkTile tile;
  WorkTile ahead;
  auto const step_over = [&](WorkTile& other) {
    bool const exists = queue.read(other);
    if (exists) state.advance(p.k_tiles);
    return exists;
  };
  bool more = true;
  if constexpr (kGemm.ping_pong()) {
    if (consumer == 1) {
      arch::named_barrier_arrive(kBarrierMmaTurn, 256);  // warpgroup 0 has the first turn
      more = step_over(tile);
    }
  }
  more = more && queue.read(tile);
  if constexpr (kGemm.skew > 0) {
    if (consumer == 0 && (!more || tile.rows == 0)) {
      arch::named_barrier_arrive(kBarrierSkew, 256);
      signal_skew_at = -1;
    }
  }
  while (more) {
    int const subtiles = (tile.rows - row + kSubtileM - 1) / kSubtileM;
    if constexpr (kGemm.ping_pong()) arch::named_barrier_sync(kBarrierMmaTurn + consumer, 256);
    if (subtiles <= 0) {
      pass<kGemm>(smem, state, p.k_tiles);
    } else if (kSubtiles == 1 || subtiles >= kSubtiles) {
      multiply<kGemm, kSubtiles>(smem, state, acc, row, p.k_tiles, signal_skew_at);
    } else {
      multiply<kGemm, kSubtiles == 1 ? 1 : kSubtiles - 1>(smem, state, acc, row, p.k_tiles,
                                                          signal_skew_at);
    }
    signal_skew_at = -1;
    if constexpr (kGemm.ping_pong()) {
      arch::named_barrier_arrive(kBarrierMmaTurn + (consumer ^ 1), 256);
    }
    int const last_stage = state.stage == 0 ? kGemm.stages - 1 : state.stage - 1;
    if constexpr (!kGemm.ping_pong()) more = queue.read(ahead);  // under the last wgmmas
    arch::wgmma_wait<0>();
    if (subtiles > 0) {
      release_stage<kGemm>(smem, last_stage);
      TESSERA_UNROLL
      for (int m = 0; m < kSubtiles; ++m) {
        if (m < subtiles) epilogue.store(acc[m], tile, tile.row + row + m * kSubtileM);
      }
    }
    // Its next tile but one is announced only while the other warpgroup multiplies.
    if constexpr (kGemm.ping_pong()) more = step_over(ahead) && queue.read(ahead);
    tile = ahead;
  }
  epilogue.drain();
}

}  // namespace tessera::cuda::block
