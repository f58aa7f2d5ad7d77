// SPDX-License-Identifier: Apache-2.0
// combine: every row of y to the slot of its pair on its source; a slot has one writer. The last CTA
// acknowledges the pass to all ranks, awaits theirs, and ends the pass.
// Memory   rows are written by bulk copies: each lane waits until they are, its CTA counts, the last one fences at
//          system scope for all and stores ack [ended, ack]
#include "cuda/arch/mbarrier.cuh"
#include "dist/kernels/copy_rows.cuh"
#include "dist/kernels/exchange.hpp"
#include "dist/kernels/wait.cuh"

namespace tessera::dist {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Shared {
  CopyRing ring[kWarps];
};

__device__ void push(ExchangeArguments const& p, Shared& smem) {
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int const worker = static_cast<int>(blockIdx.x) * kWarps + warp;
  int const workers = static_cast<int>(gridDim.x) * kWarps;
  int const rows = p.gmem_expert_offsets[p.shape.local_experts()];
  int const mine = (rows - worker + workers - 1) / workers;
  if (mine <= 0) return;
  int const row_bytes = 2 * p.shape.hidden;
  auto const origin = [&](int i) {
    std::int64_t const row = worker + std::int64_t{i} * workers;
    return *row_origin(p, row);
  };
  uint2 ahead = origin(0);
  copy_rows(smem.ring[warp], mine, row_bytes, [&](int i) {
    uint2 const from = ahead;  // pair, source
    if (i + 1 < mine) ahead = origin(i + 1);
    auto const top_k = static_cast<std::uint32_t>(p.shape.max_top_k);
    std::int64_t const row = worker + std::int64_t{i} * workers;
    return RowCopy{p.gmem_y + row * row_bytes,
                   p.windows[from.y] +
                       p.window.slot(from.x / top_k, static_cast<std::int32_t>(from.x % top_k)),
                   nullptr};
  });
}

__global__ void __launch_bounds__(kThreads, 1)
    combine(__grid_constant__ ExchangeArguments const p) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<Shared*>(smem_raw);
  std::uint32_t const epoch = *p.gmem_epoch;
  int const thread = static_cast<int>(threadIdx.x);
  if (thread % 32 == 0) {
    for (arch::Mbarrier& full : smem.ring[thread / 32].full) arch::mbarrier_init(&full, 1);
    arch::mbarrier_fence_init();
    push(p, smem);
  }
  __syncthreads();
  if (thread != 0) return;
  if (arch::count_acq_rel_gpu(word_of(p.gmem_local, p.local.ended(epoch)), 1) + 1 != gridDim.x) {
    return;
  }
  arch::fence_acq_rel_sys();
  for (int r = 0; r < p.shape.ranks; ++r) {
    arch::store_relaxed_sys(word_of(p.windows[r], p.window.ack_word(p.rank)), epoch);
  }
  for (int r = 0; r < p.shape.ranks; ++r) {
    if (!Waiter(p, epoch).for_epoch(p.window.ack_word(r), epoch, Site::ack, r)) return;
  }
  *p.gmem_epoch = epoch + 1;
}

}  // namespace

cudaError_t launch_combine(ExchangeArguments const& args, int sm_count, cudaStream_t stream) {
  cudaError_t const error = cudaFuncSetAttribute(
      combine, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  combine<<<static_cast<unsigned>(sm_count), kThreads, sizeof(Shared), stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::dist
