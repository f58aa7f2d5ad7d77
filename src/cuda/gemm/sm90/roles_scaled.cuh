// SPDX-License-Identifier: Apache-2.0
// The GEMM of scaled e4m3 operands as the programs of its two roles; that of roles.cuh with scales.
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
  set_up<kGemm>(smem, p);
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    produce_scaled<kGemm>(smem, p, scales);
  } else {
    consume_scaled<kGemm, Epilogue>(smem, p, epilogue_params, warpgroup - 1);
  }
}

}  // namespace tessera::cuda::gemm
