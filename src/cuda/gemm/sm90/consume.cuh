// SPDX-License-Identifier: Apache-2.0
// The programs of the consumer warpgroups: they multiply each work tile (mainloop.cuh), and hand the accumulators of 64
// rows at a time to the epilogue, in the order that its mode asks for.
#pragma once

#include <climits>

#include "../../arch/named_barrier.cuh"
#include "../../arch/setmaxnreg.cuh"
#include "../epilogue/contract.hpp"
#include "../handover.cuh"
#include "../work_queue.cuh"
#include "deferred.cuh"
#include "mainloop.cuh"
#include "outer_product.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void store_tile(Epilogue& epilogue, PipelineState<kGemm>& state,
                                           Accumulators<kGemm>& acc, WorkTile const& tile,
                                           int row) {
  if constexpr (kGemm.lends()) {
    epilogue.store(acc, tile, row, state);
  } else {
    epilogue.store(acc, tile, row);
  }
}

// Does the pieces of a deferred epilogue when they are due.
template <class Epilogue>
class DeferredPieces {
 public:
  __device__ __forceinline__ DeferredPieces(Epilogue& epilogue, int consumer)
      : epilogue_(epilogue), consumer_(consumer) {}

  // The epilogue has kept a tile.
  __device__ __forceinline__ void add() { next_ = 0; }

  // Begins a tile, behind whose k_tiles they are done.
  __device__ __forceinline__ void begin(int k_tiles) {
    Pace const pace = pace_of(k_tiles, consumer_);
    due_ = next_ == kDeferredPieces ? INT_MAX : pace.first;
    every_ = pace.every;
    at_once_ = pace.at_once;
  }
  // True if the last piece was among those behind this k_tile.
  __device__ __forceinline__ bool under(int k_tile) {
    if (k_tile != due_) return false;
    due_ += every_;
    work_until(min(next_ + at_once_, kDeferredPieces));
    if (next_ < kDeferredPieces) return false;
    due_ = INT_MAX;
    return true;
  }
  __device__ __forceinline__ void finish() { work_until(kDeferredPieces); }

 private:
  __device__ __forceinline__ void work_until(int end) {
#pragma unroll 1
    while (next_ < end) epilogue_.work(next_++);
  }

  Epilogue& epilogue_;
  int consumer_;
  int next_ = kDeferredPieces;
  int due_, every_, at_once_;
};

// A warpgroup without rows still owes its arrivals: the stage is shared with the others. Where a warpgroup arrives
// once, its first warp sees to them alone and the others meet it afterwards: were each to follow the stages, one that
// still stores its last tile could miss two phases of a stage, and wait for ever.
template <GemmConfig kGemm>
__device__ __forceinline__ void pass(SharedStorage<kGemm>& smem, PipelineState<kGemm>& state,
                                     int num_stages, int consumer) {
  bool const first_warp = arch::warp_idx() % 4 == 0;
  if (kGemm.warps_release() || first_warp) {
    for (int i = 0; i < num_stages; ++i) {
      arch::mbarrier_wait(&smem.full[state.stage], state.phase);
      release_stage<kGemm>(smem, state.stage);
      state.advance();
    }
  } else {
    state.advance(num_stages);
  }
  if constexpr (!kGemm.warps_release()) {
    arch::named_barrier_sync(kBarrierSlabs + consumer, arch::kWarpgroupThreads);
  }
}

// The last tile of a run may have no rows. B must have come, else the arrival would count for the run before.
template <GemmConfig kGemm>
__device__ __forceinline__ void pass_resident(SharedStorage<kGemm>& smem, WorkTile const& tile,
                                              int k_tiles) {
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    arch::mbarrier_wait(&smem.resident_full[k_tile], tile.run_phase);
    release_resident<kGemm>(smem, k_tile);
  }
}

// Cooperative: each warpgroup owns 64 rows of every tile.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void consume_cooperative(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                    Epilogue& epilogue, int consumer) {
  int const row = consumer * kSubtileM;
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm> state;
  Accumulators<kGemm> acc[1];
  WorkTile tile;
  WorkTile ahead;
  HandsOver<kGemm> handover(p);
  auto const settle = [&] {
    epilogue.settle();
    if constexpr (kGemm.hands_over()) handover.before(tile);
  };
  UnderFirstKTile between(settle);
  bool more = queue.read(tile);
  while (more) {
    int const k_tiles = k_tiles_of<kGemm>(p, tile);
    if (tile.rows <= row) {
      settle();
      pass<kGemm>(smem, state, k_tiles + kGemm.other_stages(), consumer);
      more = queue.read(tile);
      continue;
    }
    epilogue.begin(tile, tile.row + row, 1);
    int const last = multiply<kGemm, 1>(smem, state, acc, tile,
                                        {row, k_tiles, last_steps_of<kGemm>(tile)}, between);
    more = queue.read(ahead);  // under the last wgmmas
    arch::wgmma_wait<0>();
    release_stage<kGemm>(smem, last);
    store_tile<kGemm>(epilogue, state, acc[0], tile, tile.row + row);
    tile = ahead;
  }
  epilogue.drain();
  if constexpr (kGemm.hands_over()) handover.at_end();
}

// Cooperative, too, but the epilogue works under the k loop of the next tile.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void consume_deferred(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                 Epilogue& epilogue, int consumer) {
  int const row = consumer * kSubtileM;
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm> state;
  Accumulators<kGemm> acc[1];
  WorkTile tile;
  WorkTile ahead;
  HandsOver<kGemm> handover(p);
  DeferredPieces<Epilogue> pieces(epilogue, consumer);
  UnderEveryKTile between([&](int k_tile) {
    if (pieces.under(k_tile) && kGemm.hands_over()) handover.before(tile);
  });
  bool more = queue.read(tile);
  while (more) {
    int const k_tiles = k_tiles_of<kGemm>(p, tile);
    if (tile.rows <= row) {  // what is kept waits for the next tile
      pass<kGemm>(smem, state, k_tiles + kGemm.other_stages(), consumer);
      more = queue.read(tile);
      continue;
    }
    pieces.begin(k_tiles);
    epilogue.begin(tile, tile.row + row, 1);
    int last = multiply_existing<kGemm>(smem, p, state, acc, tile,
                                        {row, k_tiles, last_steps_of<kGemm>(tile)}, between);
    if constexpr (kGemm.epilogue.outer_product) {
      last = multiply_outer_product<kGemm>(smem, state, acc[0], epilogue.outer_rows(), p.v_rows > 1,
                                           last);
    }
    more = queue.read(ahead);  // under the last wgmmas
    arch::wgmma_wait<0>();
    release_stage<kGemm>(smem, last);
    epilogue.keep(acc[0], tile, tile.row + row);
    pieces.add();
    tile = ahead;
  }
  pieces.finish();
  epilogue.drain();
  if constexpr (kGemm.hands_over()) handover.at_end();
}

// Ping-pong: warpgroup w computes tiles w, w+2, ..; one multiplies while the other stores. The turn
// to issue wgmmas alternates, so a tile's k loop is never interrupted.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void consume_ping_pong(SharedStorage<kGemm>& smem, GemmParams const& p,
                                                  Epilogue& epilogue, int consumer) {
  constexpr int kSubtiles = kGemm.warpgroup_subtiles();
  constexpr int kThreads = 2 * arch::kWarpgroupThreads;
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm> state;
  Accumulators<kGemm> acc[kSubtiles];
  WorkTile tile;
  UnderFirstKTile between([&] { epilogue.settle(); });
  auto const step_over = [&] {  // the other warpgroup's tile and its stages
    bool const exists = queue.read(tile);
    if (exists) state.advance(k_tiles_of<kGemm>(p, tile));
    return exists;
  };
  bool more = true;
  if (consumer == 1) {
    arch::named_barrier_arrive(kBarrierMmaTurn, kThreads);  // warpgroup 0 has the first turn
    more = step_over();
  }
  while (more && queue.read(tile)) {
    int const subtiles = (tile.rows + kSubtileM - 1) / kSubtileM;
    int const k_tiles = k_tiles_of<kGemm>(p, tile);
    if (subtiles > 0) epilogue.begin(tile, tile.row, subtiles);
    arch::named_barrier_sync(kBarrierMmaTurn + consumer, kThreads);
    if (subtiles == 0) {
      epilogue.settle();
      pass<kGemm>(smem, state, k_tiles, consumer);
      if constexpr (kGemm.keeps_b()) pass_resident<kGemm>(smem, tile, p.k_tiles);
      arch::named_barrier_arrive(kBarrierMmaTurn + (consumer ^ 1), kThreads);
    } else {
      int const last = multiply_active<kGemm, kSubtiles>(
          smem, state, acc, tile, {0, k_tiles, last_steps_of<kGemm>(tile)}, subtiles, between);
      arch::named_barrier_arrive(kBarrierMmaTurn + (consumer ^ 1), kThreads);
      arch::wgmma_wait<0>();
      release_stage<kGemm>(smem, last);
      if constexpr (kGemm.keeps_b()) {
        if (last_of_run(tile)) release_resident<kGemm>(smem, k_tiles - 1);
      }
      TESSERA_UNROLL
      for (int m = 0; m < kSubtiles; ++m) {
        if (m < subtiles) epilogue.store(acc[m], tile, tile.row + m * kSubtileM);
      }
    }
    // Its next tile but one is announced only while the other warpgroup multiplies.
    more = step_over();
  }
  epilogue.drain();
  if constexpr (kGemm.hands_over()) HandsOver<kGemm>(p).at_end();
}

template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void consume(SharedStorage<kGemm>& smem, GemmParams const& p,
                                        typename Epilogue::Params const& epilogue_params,
                                        int consumer) {
  static_assert(keeps_contract<kGemm.epilogue, Epilogue, Accumulators<kGemm>, PipelineState<kGemm>,
                               SharedStorage<kGemm>>());
  arch::acquire_registers<kGemm.consumer_registers()>();
  Epilogue epilogue(smem, epilogue_params, consumer);
  if constexpr (kGemm.ping_pong()) {
    consume_ping_pong<kGemm>(smem, p, epilogue, consumer);
  } else if constexpr (kGemm.defers()) {
    consume_deferred<kGemm>(smem, p, epilogue, consumer);
  } else {
    consume_cooperative<kGemm>(smem, p, epilogue, consumer);
  }
}

}  // namespace tessera::cuda::gemm
