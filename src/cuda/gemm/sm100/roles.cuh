// SPDX-License-Identifier: Apache-2.0
// A GEMM on sm_100a: D[row, :] = A[row, :] * B[segment(row)]^T, tile by tile, by one CTA or a pair, as the programs of
// its warps (storage.cuh). Compiled and emulated, never run on hardware.
#pragma once

#include "../../arch/sm100/tcgen05_alloc.cuh"
#include "../produce/produce.cuh"
#include "gather_scaled.cuh"
#include "mainloop.cuh"
#include "pair_loads.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
__device__ __forceinline__ void init_barriers(SharedStorage<kGemm>& smem) {
  for (int s = 0; s < kGemm.stages; ++s) {
    arch::mbarrier_init(&smem.full[s], full_arrivals(kGemm));
    arch::mbarrier_init(&smem.empty[s], 1);
    arch::mbarrier_init(&smem.gathered[s], arch::kWarpgroupThreads);
  }
  for (int i = 0; i < kAccumulators; ++i) {
    arch::mbarrier_init(&smem.acc_full[i], 1);
    arch::mbarrier_init(&smem.acc_empty[i], kEpilogueWarps * kGemm.cluster_m());
  }
  for (int w = 0; w < kEpilogueWarps; ++w) {
    for (int b = 0; b < kLoadBuffers; ++b) arch::mbarrier_init(&smem.loads[w][b], 1);
  }
  for (int w = 0; w < kWorkSlots; ++w) {
    arch::mbarrier_init(&smem.work_full[w], 1);
    arch::mbarrier_init(&smem.work_empty[w], tile_readers(kGemm));
    if constexpr (kGemm.cluster_m() == 2) {
      arch::mbarrier_arrive_expect_tx(&smem.work_full[w], sizeof(int4));
    }
  }
  arch::mbarrier_fence_init();
}

// All threads of the CTA or the pair.
template <GemmConfig kGemm>
__device__ __forceinline__ void sync_ctas() {
  if constexpr (kGemm.cluster_m() == 2) {
    arch::cluster_sync();
  } else {
    __syncthreads();
  }
}

// Barriers, the segment table and tensor memory.
template <GemmConfig kGemm>
__device__ __forceinline__ void set_up_in_tensor_memory(SharedStorage<kGemm>& smem,
                                                        GemmParams const& p, int warp) {
  if (threadIdx.x == 0) {
    if constexpr (!kGemm.gathers()) arch::tma_prefetch_map(&p.a);
    if (!p.b_in_boxes) arch::tma_prefetch_map(&p.b[0]);
    init_barriers<kGemm>(smem);
  }
  if (warp == multiply_warp(kGemm)) {
    arch::tcgen05_alloc<kGemm.cluster_m()>(&smem.tensor, tensor_columns<kGemm>());
    arch::tcgen05_relinquish<kGemm.cluster_m()>();
  }
  for (int s = static_cast<int>(threadIdx.x); s <= p.segments;
       s += threads_in_tensor_memory(kGemm)) {
    smem.segment_offsets[s] =
        p.gmem_offsets != nullptr ? p.gmem_offsets[s] : min(s * p.segment_rows, p.total_rows);
  }
  arch::tcgen05_fence_before();
  sync_ctas<kGemm>();
  arch::tcgen05_fence_after();
}

// Epilogue(smem, params); begin(tile, first row of the warp), under the tile's k loop; store(AccumulatorRows&, tile,
// the same row), which has to call release() once; drain(). A warp whose rows do not exist calls release() alone.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void store_tiles(SharedStorage<kGemm>& smem,
                                            typename Epilogue::Params const& epilogue_params) {
  WorkQueue<kGemm> queue(smem);
  Epilogue epilogue(smem, epilogue_params);
  AccumulatorTurn turn;
  WorkTile tile;
  int const first = arch::warp_in_warpgroup() * kWarpSlabRows;
  while (queue.read(tile)) {
    AccumulatorRows<kGemm> rows(smem, turn);
    bool const exists = first < tile.rows;
    if (exists) epilogue.begin(tile, tile.row + first);
    rows.wait();
    if (exists) {
      epilogue.store(rows, tile, tile.row + first);
    } else {
      rows.release();
    }
    turn.advance();
  }
  epilogue.drain();
}

// The warps that gather.
template <GemmConfig kGemm, class Epilogue, bool kFirstWarp>
__device__ __forceinline__ void gather_operands(SharedStorage<kGemm>& smem,
                                                TensorGemmParams<kGemm> const& p,
                                                typename Epilogue::Params const& epilogue_params) {
  if constexpr (is_mxfp8(kGemm)) {
    gather_tiles<kGemm, kFirstWarp, MxTiles<kGemm>>(smem, p, p.scales);
  } else {
    produce_with_gather<kGemm, Epilogue, kFirstWarp>(smem, p, epilogue_params);
  }
}

// The whole kernel: every thread of the grid calls it once.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void run_gemm_in_tensor_memory(
    TensorGemmParams<kGemm> const& p, typename Epilogue::Params const& epilogue_params) {
  static_assert(valid_in_tensor_memory(kGemm));
  auto& smem = shared_storage<kGemm>();
  int const warp = arch::warp_idx();
  set_up_in_tensor_memory<kGemm>(smem, p, warp);
  if (warp < kEpilogueWarps) {
    store_tiles<kGemm, Epilogue>(smem, epilogue_params);
  } else if (warp == multiply_warp(kGemm)) {
    if (kGemm.cluster_m() == 1 || arch::cluster_cta_rank() == 0) multiply_tiles<kGemm>(smem, p);
  } else if (relays(kGemm) && warp == kRelayWarp) {
    if constexpr (relays(kGemm)) relay_rows<kGemm>(smem, p);
  } else if constexpr (kGemm.gathers()) {
    if (warp == kEpilogueWarps) {
      gather_operands<kGemm, Epilogue, true>(smem, p, epilogue_params);
    } else {
      gather_operands<kGemm, Epilogue, false>(smem, p, epilogue_params);
    }
  } else if (warp == kLoadWarp) {
    if constexpr (kGemm.cluster_m() == 2) {
      load_for_pair<kGemm>(smem, p);
    } else {
      produce_by_tma<kGemm, Epilogue>(smem, p, epilogue_params);
    }
  }
  // The last loads of accumulators are over, and so are the multiplications that they waited for; the peer arrives at
  // barriers here, and reads this shared memory, until it comes here as well.
  arch::tcgen05_fence_before();
  sync_ctas<kGemm>();
  arch::tcgen05_fence_after();
  if (warp == multiply_warp(kGemm)) {
    arch::tcgen05_free<kGemm.cluster_m()>(smem.tensor, tensor_columns<kGemm>());
  }
}

}  // namespace tessera::cuda::gemm
