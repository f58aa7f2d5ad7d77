// SPDX-License-Identifier: Apache-2.0
// combine: every row to the slot of its pair on its source; a slot has one writer. Where gradients of scores are
// there, those of the rows go the same way. The last CTA acknowledges the pass to all ranks, awaits theirs, and ends
// the pass.
// Memory   rows are written by bulk copies: each lane waits until they are, its CTA counts, the last one fences at
//          system scope for all and stores ack [ended, ack]
#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "expert_parallel/exchange/exchange.hpp"
#include "expert_parallel/exchange/wait.cuh"
#include "expert_parallel/unfused/copy_rows.cuh"
#include "expert_parallel/unfused/launch_on.hpp"

namespace tessera::expert_parallel {
namespace {

// 16 SMs of so many warps, 10 KB in flight each, fill the link while other kernels have the rest.
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / arch::kWarpThreads;

struct Shared {
  CopyRing ring[kWarps];
};

__device__ void push_rows(CombineArguments const& p, CopyRing& ring) {
  ExchangeArguments const& exchange = p.exchange;
  int const warp = static_cast<int>(threadIdx.x) / arch::kWarpThreads;
  int const worker = static_cast<int>(blockIdx.x) * kWarps + warp;
  int const workers = static_cast<int>(gridDim.x) * kWarps;
  int const rows = static_cast<int>(
      min(std::int64_t{p.tables.gmem_expert_offsets[exchange.local_experts]}, p.capacity));
  int const mine = (rows - worker + workers - 1) / workers;
  if (mine <= 0) return;
  int const row_bytes = 2 * exchange.shape.hidden;
  auto const origin = [&](int i) {
    std::int64_t const row = worker + std::int64_t{i} * workers;
    return __ldg(reinterpret_cast<uint2 const*>(p.tables.gmem_origins + row));  // RowOrigin
  };
  uint2 ahead = origin(0);
  copy_rows(ring, mine, row_bytes, [&](int i) {
    uint2 const to = ahead;
    if (i + 1 < mine) ahead = origin(i + 1);
    std::int64_t const row = worker + std::int64_t{i} * workers;
    std::int32_t const token = exchange.token_of(to.x);
    Peer const source = peer_of(exchange, to.y);
    std::int32_t const choice = static_cast<std::int32_t>(to.x) - token * exchange.shape.max_top_k;
    if (p.gmem_dscores != nullptr) {
      std::int64_t const at = exchange.window.dscore(to.x);
      *reinterpret_cast<float*>(source.store_if_local<OtherWay::kStaged>(at)) = p.gmem_dscores[row];
    }
    return RowCopy{p.gmem_rows + row * row_bytes,
                   source.store_if_local<OtherWay::kStaged>(exchange.window.slot(token, choice)),
                   nullptr};
  });
}

// The first warp of a CTA calls it behind its barrier. True if the CTA is the last one.
__device__ bool is_last(ExchangeArguments const& p, std::uint32_t epoch) {
  std::uint32_t before = 0;
  if (arch::lane_idx() == 0) {
    before = arch::count_acq_rel_gpu(word_of(p.gmem_local, p.local.ended(epoch)), 1);
  }
  return __shfl_sync(arch::kAllLanes, before, 0) + 1 == gridDim.x;
}

__global__ void __launch_bounds__(kThreads, 1) combine(__grid_constant__ CombineArguments const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<Shared*>(smem_raw);
  ExchangeArguments const& exchange = p.exchange;
  std::uint32_t const epoch = *exchange.gmem_epoch;
  int const thread = static_cast<int>(threadIdx.x);
  if (thread % arch::kWarpThreads == 0) {
    CopyRing& ring = smem.ring[thread / arch::kWarpThreads];
    for (arch::Mbarrier& full : ring.full) arch::mbarrier_init(&full, 1);
    arch::mbarrier_fence_init();
    push_rows(p, ring);
  }
  __syncthreads();
  if (thread >= arch::kWarpThreads || !is_last(exchange, epoch)) return;
  Waiter const waiter(exchange, epoch);
  int const peer = thread < exchange.shape.ranks ? thread : exchange.rank;
  if (thread == 0) {
    arch::fence_acq_rel_sys();
    for (int r = 0; r < exchange.shape.ranks; ++r) {
      peer_of(exchange, r).signal(exchange.window.ack_word(exchange.rank), epoch);
    }
  }
  __syncwarp();
  bool const reached = waiter.for_epoch(exchange.window.ack_word(peer), epoch, Site::ack, peer);
  if (!__all_sync(arch::kAllLanes, reached)) return;
  waiter.report_given_up();
  if (thread == 0) *exchange.gmem_epoch = epoch + 1;
}

__global__ void take_dscores(float const* gmem_window, std::int32_t const* gmem_slot_of_pair,
                             std::int64_t pairs, float* gmem_dscores) {
  std::int64_t const pair = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (pair < pairs) gmem_dscores[pair] = gmem_slot_of_pair[pair] < 0 ? 0 : gmem_window[pair];
}

}  // namespace

cudaError_t launch_combine(CombineArguments const& args, int sm_count, cudaStream_t stream,
                           cudaEvent_t begun) {
  cudaError_t const error = cudaFuncSetAttribute(
      combine, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  return launch_on(sm_count, kThreads, sizeof(Shared), stream, begun, combine, args);
}

cudaError_t launch_take_dscores(float const* gmem_window, std::int32_t const* gmem_slot_of_pair,
                                std::int64_t pairs, float* gmem_dscores, cudaStream_t stream) {
  if (pairs == 0) return cudaSuccess;
  auto const ctas = static_cast<unsigned>((pairs + kThreads - 1) / kThreads);
  void* arguments[] = {&gmem_window, &gmem_slot_of_pair, &pairs, &gmem_dscores};
  return cudaLaunchKernel(take_dscores, dim3(ctas), dim3(kThreads), arguments, 0, stream);
}

}  // namespace tessera::expert_parallel
