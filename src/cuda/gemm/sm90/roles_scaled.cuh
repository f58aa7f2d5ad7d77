// SPDX-License-Identifier: Apache-2.0
// The GEMM of scaled e4m3 operands as the programs of its three roles: that of roles.cuh with scales, and with a
// warpgroup that has the epilogue.
//   consumer warp w  | k loop of tile i | wait stored[w], fill its rows of the slabs, arrive held[w] | k loop of i+1 ..
//   storing warp     | wait held[w], epilogue of tile i, arrive stored[w] | the same for warp w + 4
#pragma once

#include "../produce/gather_scaled.cuh"
#include "mainloop_scaled.cuh"
#include "roles.cuh"

namespace tessera::cuda::gemm {

// The whole kernel: every thread of the grid calls it once.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void run_scaled_gemm(GemmParams const& p, ScaleParams const& scales,
                                                typename Epilogue::Params const& epilogue_params) {
  static_assert(valid(kGemm) && valid_scaled(kGemm));
  static_assert(sizeof(ScaledStorage<kGemm>) <= kSharedMemoryBytes);
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<ScaledStorage<kGemm>*>(smem_raw);
  if (threadIdx.x == 0) {
    TESSERA_UNROLL
    for (int warp = 0; warp < 4 * kGemm.consumer_warpgroups; ++warp) {
      arch::mbarrier_init(&smem.held[warp], 1);
      arch::mbarrier_init(&smem.stored[warp], 1);
    }
  }
  set_up<kGemm>(smem, p);
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    produce_scaled<kGemm>(smem, p, scales);
  } else if (warpgroup <= kGemm.consumer_warpgroups) {
    consume_scaled<kGemm>(smem, p, warpgroup - 1);
  } else {
    store_scaled<kGemm, Epilogue>(smem, epilogue_params);
  }
}

}  // namespace tessera::cuda::gemm
