// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups: multiply the stages of each work tile, hand accumulators to the epilogue.
//
// An epilogue has kSteps steps per column group; step<k>(group accumulators, tile, row, group) reads
// only the registers of that group.
#pragma once

#include <utility>

#include "../arch/named_barrier.cuh"
#include "../arch/proxy_fence.cuh"
#include "../arch/setmaxnreg.cuh"
#include "../arch/wgmma.cuh"
#include "gemm_params.hpp"
#include "pipeline.cuh"
#include "tile_scheduler.cuh"

namespace tessera::cuda::block {

template <GemmConfig kGemm>
using Accumulators = float[kGemm.column_groups()][kGroupColumns / 2];  // of 64 rows, per thread

template <GemmConfig kGemm>
__device__ __forceinline__ void wait_full(SharedStorage<kGemm>& smem,
                                          PipelineState<kGemm.stages> const& state) {
  arch::mbarrier_wait(&smem.full[state.stage], state.phase);
  // cp.async wrote A through the generic proxy; full[] ordered those writes before us.
  if constexpr (kGemm.uses_cp_async()) arch::fence_proxy_async_shared();
}

enum class Columns { kAll, kLeft, kRight };

// Issues one k_tile, as one group of wgmmas, for kActive times 64 rows from `row` of the tile.
template <GemmConfig kGemm, Columns kColumns, int kActive, int kSubtiles>
__device__ __forceinline__ void issue(SharedStorage<kGemm>& smem, int stage,
                                      Accumulators<kGemm> (&acc)[kSubtiles], int row, int k_tile) {
  constexpr uint64_t kSubtileStep = kGemm.a_subtile_bytes() / 16;
  constexpr uint64_t kGroupStep = kGroupColumns * kGemm.tile.k * 2 / 16;
  uint64_t const a = arch::wgmma_descriptor_k_major(&smem.a[stage][row * kGemm.tile.k]);
  uint64_t const b = arch::wgmma_descriptor_k_major(smem.b[stage]);
  arch::wgmma_fence();
  TESSERA_UNROLL
  for (int k16 = 0; k16 < kGemm.tile.k / 16; ++k16) {
    TESSERA_UNROLL
    for (int m = 0; m < kActive; ++m) {
      uint64_t const a16 = a + k16 * arch::kWgmmaDescriptorK16 + m * kSubtileStep;
      uint64_t const b16 = b + k16 * arch::kWgmmaDescriptorK16;
      if constexpr (kGemm.column_groups() == 1 || kColumns == Columns::kLeft) {
        arch::wgmma_m64n128k16(acc[m][0], a16, b16, k_tile | k16);
      } else if constexpr (kColumns == Columns::kRight) {
        arch::wgmma_m64n128k16(acc[m][1], a16, b16 + kGroupStep, k_tile | k16);
      } else if constexpr (kGemm.lag > 0) {
        arch::wgmma_m64n128k16(acc[m][0], a16, b16, k_tile | k16);
        arch::wgmma_m64n128k16(acc[m][1], a16, b16 + kGroupStep, k_tile | k16);
      } else {
        arch::wgmma_m64n256k16(acc[m][0], acc[m][1], a16, b16, k_tile | k16);
      }
    }
  }
  arch::wgmma_commit();
}

// Once at most one group is in flight the stage before the last issued one has been read.
template <GemmConfig kGemm>
__device__ __forceinline__ void release_previous(SharedStorage<kGemm>& smem, int k_tile,
                                                 int& previous, int stage) {
  if (k_tile > 0) {
    arch::wgmma_wait<1>();
    release_stage<kGemm>(smem, previous);
  }
  previous = stage;
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

// All steps of one column group; after step k, `after(k)` as a compile-time number.
template <class Epilogue, class After>
__device__ __forceinline__ void run_epilogue(Epilogue& epilogue,
                                             float const (&acc)[kGroupColumns / 2],
                                             WorkTile const& tile, int row, int group,
                                             After after) {
  [&]<int... kStep>(std::integer_sequence<int, kStep...>) {
    (..., (epilogue.template step<kStep>(acc, tile, row, group),
           after(std::integral_constant<int, kStep>{})));
  }(std::make_integer_sequence<int, Epilogue::kSteps>{});
}

// Cooperative: each warpgroup owns 64 rows of every tile, so all epilogues come at the same time and
// would leave the tensor cores idle. With lag L the two column groups part at the ends of a tile:
//
//   k_tile        ..  K-2   K-1 | 0'    1'   2' ..
//   left  group   ..  ----first | epilogue left  (then first of the next tile)
//   right group   ..  ----after | under epilogue left
//
// The left columns run ahead through the last L k_tiles, then the right ones follow while the left
// epilogue runs; of the next tile the left columns take the first L k_tiles while the right epilogue
// runs. In between one m64n256 wgmma serves both. No extra shared memory: the L stages wait for
// their second use.
template <GemmConfig kGemm, class Epilogue>
class CooperativeConsumer {
 public:
  __device__ __forceinline__ CooperativeConsumer(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                 typename Epilogue::Params const& epilogue_params,
                                                 int consumer)
      : smem_(smem),
        k_tiles_(p.k_tiles),
        row_(consumer * kSubtileM),
        epilogue_(smem, epilogue_params, consumer) {}

  __device__ __forceinline__ void run() {
    WorkQueue<kGemm> queue(smem_);
    WorkTile tile;
    while (queue.read(tile)) {
      bool idle = tile.rows <= row_;
      if (!idle) idle = run_chain(queue, tile);
      if (idle) pass<kGemm>(smem_, state_, k_tiles_);
    }
    epilogue_.drain();
  }

 private:
  static constexpr int kLag = kGemm.lag;

  // Tiles with rows for this warpgroup, back to back. True if it ends at a tile without, to be passed.
  __device__ __forceinline__ bool run_chain(WorkQueue<kGemm>& queue, WorkTile& tile) {
    Accumulators<kGemm> acc[1];
    run_ahead(acc, state_, 0);
    while (true) {
      int previous = 0;
      follow(acc, previous);
      for (int k_tile = kLag; k_tile < k_tiles_ - kLag; ++k_tile) {
        wait_full<kGemm>(smem_, state_);
        issue<kGemm, Columns::kAll, 1>(smem_, state_.stage, acc, row_, k_tile);
        release_previous<kGemm>(smem_, k_tile, previous, state_.stage);
        state_.advance();
      }
      finish(acc, tile, previous);
      WorkTile const before = tile;
      bool const exists = queue.read(tile);
      if (!exists || tile.rows <= row_) {
        store_right(acc, before);
        return exists;
      }
      run_ahead(acc, state_, 0);
      store_right(acc, before);
    }
  }

  // The left columns of kLag k_tiles; the right ones start from the same stage.
  __device__ __forceinline__ void run_ahead(Accumulators<kGemm> (&acc)[1],
                                            PipelineState<kGemm.stages> lead, int k_tile) {
    TESSERA_UNROLL
    for (int k = 0; k < kLag; ++k) {
      wait_full<kGemm>(smem_, lead);
      issue<kGemm, Columns::kLeft, 1>(smem_, lead.stage, acc, row_, k_tile + k);
      lead.advance();
    }
  }

  // The right columns of the first kLag k_tiles.
  __device__ __forceinline__ void follow(Accumulators<kGemm> (&acc)[1], int& previous) {
    TESSERA_UNROLL
    for (int k = 0; k < kLag; ++k) {
      issue<kGemm, Columns::kRight, 1>(smem_, state_.stage, acc, row_, k);
      release_previous<kGemm>(smem_, k, previous, state_.stage);
      state_.advance();
    }
  }

  // The last kLag k_tiles: left, then right, then the left epilogue under the right columns.
  __device__ __forceinline__ void finish(Accumulators<kGemm> (&acc)[1], WorkTile const& tile,
                                         int previous) {
    run_ahead(acc, state_, k_tiles_ - kLag);
    int trailing[kLag > 0 ? kLag : 1];
    TESSERA_UNROLL
    for (int k = 0; k < kLag; ++k) {
      issue<kGemm, Columns::kRight, 1>(smem_, state_.stage, acc, row_, k_tiles_ - kLag + k);
      trailing[k] = state_.stage;
      state_.advance();
    }
    arch::wgmma_wait<kLag>();  // only right columns are in flight
    release_stage<kGemm>(smem_, previous);
    store(acc[0][0], tile, 0, [&](auto step) {
      constexpr int kStep = decltype(step)::value;
      if constexpr (kStep < kLag) {
        arch::wgmma_wait<kLag - 1 - kStep>();
        release_stage<kGemm>(smem_, trailing[kStep]);
      }
    });
  }

  __device__ __forceinline__ void store_right(Accumulators<kGemm> const (&acc)[1],
                                              WorkTile const& tile) {
    if constexpr (kGemm.column_groups() > 1) store(acc[0][1], tile, 1, [](auto) {});
  }

  template <class After>
  __device__ __forceinline__ void store(float const (&acc)[kGroupColumns / 2],
                                        WorkTile const& tile, int group, After after) {
    run_epilogue(epilogue_, acc, tile, tile.row + row_, group, after);
  }

  SharedStorage<kGemm>& smem_;
  int k_tiles_;
  int row_;
  Epilogue epilogue_;
  PipelineState<kGemm.stages> state_;
};

// All k_tiles of the first kActive 64-row parts; the last group of wgmmas is left in flight.
template <GemmConfig kGemm, int kActive, int kSubtiles>
__device__ __forceinline__ void multiply_tile(SharedStorage<kGemm>& smem,
                                              PipelineState<kGemm.stages>& state,
                                              Accumulators<kGemm> (&acc)[kSubtiles], int k_tiles,
                                              int& previous) {
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    wait_full<kGemm>(smem, state);
    issue<kGemm, Columns::kAll, kActive>(smem, state.stage, acc, 0, k_tile);
    release_previous<kGemm>(smem, k_tile, previous, state.stage);
    state.advance();
  }
}

// Ping-pong: warpgroup w computes tiles w, w+2, ..; one multiplies while the other stores. The turn
// to issue wgmmas alternates, so a tile's k loop is never interrupted.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void consume_ping_pong(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                  Epilogue& epilogue, int consumer) {
  constexpr int kSubtiles = kGemm.warpgroup_subtiles();
  constexpr int kThreads = 2 * arch::kWarpgroupThreads;
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm.stages> state;
  Accumulators<kGemm> acc[kSubtiles];
  WorkTile tile;
  auto const step_over = [&] {  // the other warpgroup's tile and its stages
    bool const exists = queue.read(tile);
    if (exists) state.advance(p.k_tiles);
    return exists;
  };
  bool more = true;
  if (consumer == 1) {
    arch::named_barrier_arrive(kBarrierMmaTurn, kThreads);  // warpgroup 0 has the first turn
    more = step_over();
  }
  while (more && queue.read(tile)) {
    int const subtiles = (tile.rows + kSubtileM - 1) / kSubtileM;
    arch::named_barrier_sync(kBarrierMmaTurn + consumer, kThreads);
    if (subtiles == 0) {
      pass<kGemm>(smem, state, p.k_tiles);
      arch::named_barrier_arrive(kBarrierMmaTurn + (consumer ^ 1), kThreads);
    } else {
      int previous = 0;
      if (subtiles == kSubtiles) {
        multiply_tile<kGemm, kSubtiles>(smem, state, acc, p.k_tiles, previous);
      } else {
        multiply_tile<kGemm, kSubtiles == 1 ? 1 : kSubtiles - 1>(smem, state, acc, p.k_tiles,
                                                                 previous);
      }
      arch::named_barrier_arrive(kBarrierMmaTurn + (consumer ^ 1), kThreads);
      arch::wgmma_wait<0>();
      release_stage<kGemm>(smem, previous);
      TESSERA_UNROLL
      for (int m = 0; m < kSubtiles; ++m) {
        TESSERA_UNROLL
        for (int group = 0; group < kGemm.column_groups(); ++group) {
          if (m < subtiles) {
            run_epilogue(epilogue, acc[m][group], tile, tile.row + m * kSubtileM, group,
                         [](auto) {});
          }
        }
      }
    }
    // Its next tile but one is announced only while the other warpgroup multiplies.
    more = step_over();
  }
  epilogue.drain();
}

template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void consume(SharedStorage<kGemm>& smem, GemmParams const& p,
                                        typename Epilogue::Params const& epilogue_params,
                                        int consumer) {
  arch::acquire_registers<kGemm.consumer_registers()>();
  if constexpr (kGemm.ping_pong()) {
    Epilogue epilogue(smem, epilogue_params, consumer);
    consume_ping_pong<kGemm>(smem, p, epilogue, consumer);
  } else {
    CooperativeConsumer<kGemm, Epilogue>(smem, p, epilogue_params, consumer).run();
  }
}

}  // namespace tessera::cuda::block
