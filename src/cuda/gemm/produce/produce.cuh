// SPDX-License-Identifier: Apache-2.0
// The producer warpgroup: draws work tiles and fills the stages of each, A by TMA or by gather, B by
// TMA, multicast to the cluster. With schedules_apart a second warp draws.
#pragma once

#include "../../arch/setmaxnreg.cuh"
#include "along_k.cuh"
#include "gather.cuh"
#include "tma.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm, class Epilogue, bool kFirstWarp>
__device__ __forceinline__ void produce_with_gather(
    SharedStorage<kGemm>& smem, GemmParams const& p,
    typename Epilogue::Params const& epilogue_params) {
  if constexpr (kGemm.varlen_k()) {
    produce_along_k<kGemm, Epilogue, kFirstWarp>(smem, p, epilogue_params);
  } else {
    produce_by_gather<kGemm, Epilogue, kFirstWarp>(smem, p, epilogue_params);
  }
}

template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void produce(SharedStorage<kGemm>& smem, GemmParams const& p,
                                        typename Epilogue::Params const& epilogue_params) {
  arch::release_registers<kGemm.producer_registers()>();
  if constexpr (kGemm.gathers()) {
    if (arch::warp_idx() == 0) {
      produce_with_gather<kGemm, Epilogue, true>(smem, p, epilogue_params);
    } else {
      produce_with_gather<kGemm, Epilogue, false>(smem, p, epilogue_params);
    }
  } else {
    int const warp = arch::warp_idx();
    if (warp == 0) {
      produce_by_tma<kGemm, Epilogue>(smem, p, epilogue_params);
    } else if (kGemm.schedules_apart() && warp == 1) {
      TileScheduler<kGemm>(smem, p).run(p.k_tiles);
    }
  }
}

}  // namespace tessera::cuda::gemm
