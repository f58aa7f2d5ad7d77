// SPDX-License-Identifier: Apache-2.0
// The GEMM of all kernels, once: D[row, :] = A[row, :] * B[segment(row)]^T for every work tile, as
// the programs of its two roles. One warpgroup produces (fills stages), the others consume (multiply
// and hand their accumulators to the epilogue). Policies come from GemmConfig.
#pragma once

#include "consume.cuh"
#include "produce.cuh"

namespace tessera::cuda::block {

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

}  // namespace tessera::cuda::block
