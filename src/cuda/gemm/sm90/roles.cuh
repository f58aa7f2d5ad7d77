// SPDX-License-Identifier: Apache-2.0
// The GEMM of all kernels, once, for every work tile, as the programs of its two roles:
//   varlen-M  D[row, :] = A[row, :] * B[segment(row)]^T
//   varlen-K  D[segment] = sum over its rows r of A[:, r] * B[:, r]^T
// One warpgroup produces (fills stages), the others consume (multiply and hand their accumulators to
// the epilogue). Policies come from GemmConfig.
#pragma once

#include "../produce/produce.cuh"
#include "consume.cuh"
#include "core.cuh"

namespace tessera::cuda::gemm {

// A kernel that may read memory from its first instruction on has nothing to do before.
struct ReadsAtOnce {
  __device__ __forceinline__ void operator()() const {}
};

// Barriers and the segment table. On return all CTAs of the cluster may use each other's barriers. Nothing is read
// from global memory before before_reads() returns, which every thread calls.
template <GemmConfig kGemm, class BeforeReads = ReadsAtOnce>
__device__ __forceinline__ void set_up(SharedStorage<kGemm>& smem, GemmParams const& p,
                                       BeforeReads before_reads = {}) {
  if (threadIdx.x == 0) {
    if constexpr (!kGemm.gathers()) arch::tma_prefetch_map(&p.a);
    if (!p.b_in_boxes) arch::tma_prefetch_map(&p.b[0]);
    init_pipeline<kGemm>(smem);
  }
  before_reads();
  for (int s = static_cast<int>(threadIdx.x); s <= p.segments; s += kGemm.threads()) {
    smem.segment_offsets[s] =
        p.gmem_offsets != nullptr ? p.gmem_offsets[s] : min(s * p.segment_rows, p.total_rows);
  }
  if constexpr (kGemm.cluster_m() > 1) {
    arch::cluster_sync();
  } else {
    __syncthreads();
  }
}

// The whole kernel: every thread of the grid calls it once.
template <GemmConfig kGemm, class Epilogue, class BeforeReads = ReadsAtOnce>
__device__ __forceinline__ void run_gemm(GemmParams const& p,
                                         typename Epilogue::Params const& epilogue_params,
                                         BeforeReads before_reads = {}) {
  static_assert(valid(kGemm));
  auto& smem = shared_storage<kGemm>();
  set_up<kGemm>(smem, p, before_reads);
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    produce<kGemm, Epilogue>(smem, p, epilogue_params);
  } else {
    consume<kGemm, Epilogue>(smem, p, epilogue_params, warpgroup - 1);
  }
  // Peers arrive on this CTA's barriers until they have finished.
  if constexpr (kGemm.cluster_m() > 1) arch::cluster_sync();
}

}  // namespace tessera::cuda::gemm
