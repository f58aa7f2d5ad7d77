// SPDX-License-Identifier: Apache-2.0
// The consumer warpgroups: multiply the stages of each work tile, hand the accumulators of 64 rows at
// a time to the epilogue.
#pragma once

#include <climits>
#include <concepts>

#include "../../arch/named_barrier.cuh"
#include "../../arch/proxy_fence.cuh"
#include "../../arch/setmaxnreg.cuh"
#include "../../arch/sm90/wgmma.cuh"
#include "../epilogue/contract.hpp"
#include "../handover.cuh"
#include "../params.hpp"
#include "../ring.cuh"
#include "../tile_extent.cuh"
#include "../work_queue.cuh"
#include "deferred.cuh"
#include "outer_product.cuh"

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
