// SPDX-License-Identifier: Apache-2.0
// The mainloop: a consumer warpgroup multiplies the stages of a work tile into its accumulators.
#pragma once

#include <concepts>

#include "../../arch/proxy_fence.cuh"
#include "../../arch/sm90/wgmma.cuh"
#include "../params.hpp"
#include "../ring.cuh"
#include "../tile_extent.cuh"
#include "../work_tile.hpp"
#include "accumulators.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
__device__ __forceinline__ void wait_full(SharedStorage<kGemm>& smem,
                                          PipelineState<kGemm> const& state) {
  arch::mbarrier_wait(&smem.full[state.stage], state.phase);
  // cp.async wrote A through the generic proxy; full[] ordered those writes before us.
  if constexpr (kGemm.gathers()) arch::fence_proxy_async_shared();
}

// Issues the first kSteps times 16 of one k_tile, as one group of wgmmas, for kActive times 64 rows from `row`
// of the tile and its first kGroups column groups.
template <GemmConfig kGemm, int kActive, int kSteps = kGemm.tile.k / 16,
          int kGroups = kGemm.column_groups(), int kSubtiles>
__device__ __forceinline__ void issue(SharedStorage<kGemm>& smem, PipelineState<kGemm> const& state,
                                      Accumulators<kGemm> (&acc)[kSubtiles], int row, int k_tile) {
  static_assert(kGemm.a.element == Element::kBf16 && kGemm.b.element == Element::kBf16,
                "these wgmmas multiply bf16");
  bf16 const* const smem_b = smem.b[kGemm.keeps_b() ? k_tile : state.b_stage()];
  constexpr uint64_t kSubtileStep = kGemm.a_subtile_bytes() / 16;
  constexpr bool kTransposeA = kGemm.a.major == Major::kRows;
  constexpr uint64_t kStepA = kTransposeA ? arch::kWgmmaRowsMajorK16 : arch::kWgmmaDescriptorK16;
  bf16 const* const smem_a = &smem.a[state.stage][row * kGemm.tile.k];
  uint64_t const a = kTransposeA ? arch::wgmma_descriptor_rows_major(smem_a)
                                 : arch::wgmma_descriptor_k_major(smem_a);
  constexpr bool kTransposeB = kGemm.b.major == Major::kRows;
  constexpr uint64_t kStepB = kTransposeB ? arch::kWgmmaRowsMajorK16 : arch::kWgmmaDescriptorK16;
  uint64_t const b = kTransposeB ? arch::wgmma_descriptor_rows_major(smem_b)
                                 : arch::wgmma_descriptor_k_major(smem_b);
  constexpr uint64_t kTermStep = kGemm.b_term_bytes() / 16;
  arch::wgmma_fence();
  TESSERA_UNROLL
  for (int step = 0; step < kSteps * kGemm.b_terms(); ++step) {
    int const k16 = step % kSteps;
    TESSERA_UNROLL
    for (int m = 0; m < kActive; ++m) {
      uint64_t const a16 = a + k16 * kStepA + m * kSubtileStep;
      uint64_t const b16 = b + k16 * kStepB + step / kSteps * kTermStep;
      if constexpr (kGroups == 1) {
        arch::wgmma_m64n128k16<kTransposeA, kTransposeB>(Fragments::of(acc[m], 0), a16, b16,
                                                         k_tile | step);
      } else {
        arch::wgmma_m64n256k16<kTransposeA, kTransposeB>(
            Fragments::of(acc[m], 0), Fragments::of(acc[m], 1), a16, b16, k_tile | step);
      }
    }
  }
  arch::wgmma_commit();
}

// Issues the last k_tile of varlen-K: only the steps that its rows reach.
template <GemmConfig kGemm, int kActive, int kSteps, int kSubtiles>
__device__ __forceinline__ void issue_last(SharedStorage<kGemm>& smem,
                                           PipelineState<kGemm> const& state,
                                           Accumulators<kGemm> (&acc)[kSubtiles], int row,
                                           int k_tile, int steps) {
  if constexpr (kSteps > 1) {
    if (steps < kSteps) {
      return issue_last<kGemm, kActive, kSteps - 1>(smem, state, acc, row, k_tile, steps);
    }
  }
  issue<kGemm, kActive, kSteps>(smem, state, acc, row, k_tile);
}

// True for the warpgroup's first, or last, tile of a run.
__device__ __forceinline__ bool first_of_run(WorkTile const& tile) { return tile.in_run < 2; }
__device__ __forceinline__ bool last_of_run(WorkTile const& tile) { return tile.run_left < 2; }

// The part of a tile that a warpgroup multiplies: 64-row parts from row `row` of the tile on, over so many k_tiles. Of
// the last one only `last_steps` times 16 are multiplied (varlen-K).
struct KLoop {
  int row, k_tiles, last_steps;
};

// A warp does other work in a k loop, while wgmmas run: its policy has every hook, empty where it has nothing to do.
//   before(k_tile, ring)  comes before the warp waits for a k_tile's stage, the ring's
//   first()               runs under the wgmmas of the first k_tile
//   later()               runs under those of every later k_tile, after the stage of the k_tile before was released
//   each(k_tile)          runs after both, for every k_tile
template <class B, class Ring>
concept BetweenKTiles = requires(B& between, Ring const& ring, int k_tile) {
  { between.before(k_tile, ring) } -> std::same_as<void>;
  { between.first() } -> std::same_as<void>;
  { between.later() } -> std::same_as<void>;
  { between.each(k_tile) } -> std::same_as<void>;
};

// Calls f() under the first k_tile of a tile.
template <class F>
class UnderFirstKTile {
 public:
  __device__ __forceinline__ explicit UnderFirstKTile(F f) : f_(f) {}
  template <class Ring>
  __device__ __forceinline__ void before(int, Ring const&) {}
  __device__ __forceinline__ void first() { f_(); }
  __device__ __forceinline__ void later() {}
  __device__ __forceinline__ void each(int) {}

 private:
  F f_;
};

// Calls f(k_tile) under every k_tile.
template <class F>
class UnderEveryKTile {
 public:
  __device__ __forceinline__ explicit UnderEveryKTile(F f) : f_(f) {}
  template <class Ring>
  __device__ __forceinline__ void before(int, Ring const&) {}
  __device__ __forceinline__ void first() {}
  __device__ __forceinline__ void later() {}
  __device__ __forceinline__ void each(int k_tile) { f_(k_tile); }

 private:
  F f_;
};

// Multiplies the k_tiles of kActive 64-row parts and the first kGroups column groups. The last group of wgmmas is left
// in flight, and its stage, which is returned, unreleased.
template <GemmConfig kGemm, int kActive, int kGroups = kGemm.column_groups(), int kSubtiles,
          BetweenKTiles<PipelineState<kGemm>> Between>
__device__ __forceinline__ int multiply(SharedStorage<kGemm>& smem, PipelineState<kGemm>& state,
                                        Accumulators<kGemm> (&acc)[kSubtiles], WorkTile const& tile,
                                        KLoop const& loop, Between& between) {
  int previous = 0;
  for (int k_tile = 0; k_tile < loop.k_tiles; ++k_tile) {
    if constexpr (kGemm.keeps_b()) {
      if (first_of_run(tile)) arch::mbarrier_wait(&smem.resident_full[k_tile], tile.run_phase);
    }
    between.before(k_tile, state);
    wait_full<kGemm>(smem, state);
    if (kGemm.varlen_k() && k_tile == loop.k_tiles - 1) {
      issue_last<kGemm, kActive, kGemm.tile.k / 16>(smem, state, acc, loop.row, k_tile,
                                                    loop.last_steps);
    } else {
      issue<kGemm, kActive, kGemm.tile.k / 16, kGroups>(smem, state, acc, loop.row, k_tile);
    }
    if (k_tile > 0) {
      arch::wgmma_wait<1>();
      release_stage<kGemm>(smem, previous);
      if constexpr (kGemm.keeps_b()) {
        if (last_of_run(tile)) release_resident<kGemm>(smem, k_tile - 1);
      }
      between.later();
    } else {
      between.first();
    }
    between.each(k_tile);
    previous = state.stage;
    state.advance();
  }
  return previous;
}

// Multiplies `active` parts, a number known only now: one loop is compiled for each.
template <GemmConfig kGemm, int kActive, int kSubtiles, class Between>
__device__ __forceinline__ int multiply_active(SharedStorage<kGemm>& smem,
                                               PipelineState<kGemm>& state,
                                               Accumulators<kGemm> (&acc)[kSubtiles],
                                               WorkTile const& tile, KLoop const& loop, int active,
                                               Between& between) {
  if constexpr (kActive > 1) {
    if (active < kActive) {
      return multiply_active<kGemm, kActive - 1>(smem, state, acc, tile, loop, active, between);
    }
  }
  return multiply<kGemm, kActive>(smem, state, acc, tile, loop, between);
}

// Multiplies 64 rows, and half of the columns of a tile that has no more: what acc keeps of the others is not stored.
template <GemmConfig kGemm, class Between>
__device__ __forceinline__ int multiply_existing(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                 PipelineState<kGemm>& state,
                                                 Accumulators<kGemm> (&acc)[1],
                                                 WorkTile const& tile, KLoop const& loop,
                                                 Between& between) {
  if constexpr (kGemm.halves_last()) {
    if (is_half<kGemm>(p, tile)) {
      return multiply<kGemm, 1, 1>(smem, state, acc, tile, loop, between);
    }
  }
  return multiply<kGemm, 1>(smem, state, acc, tile, loop, between);
}

}  // namespace tessera::cuda::gemm
