// SPDX-License-Identifier: Apache-2.0
// dispatch: from this rank's choices to the rows that its own experts have to multiply.
//   route, plan   route.cuh
//   pull          one lane of each warp copies rows, row i by warp i mod warps
// Barriers __syncthreads only: one thread polls, the CTA follows. Waits have a limit (wait.cuh)
// Memory   generic writes to peers: every thread fences at system scope before its CTA counts. x was
//          written before this kernel; bulk copies read it after a proxy fence that follows publish
// Requires shape.experts <= kMostExperts, hidden % 8 == 0, all CTAs resident (cooperative launch)
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "dist/kernels/copy_rows.cuh"
#include "dist/kernels/exchange.hpp"
#include "dist/kernels/route.cuh"

namespace tessera::dist {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Shared {
  CopyRing ring[kWarps];
  RouteStorage<kThreads> route;
};

__device__ void pull(ExchangeArguments const& p, Shared& smem, std::uint32_t epoch) {
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int const worker = static_cast<int>(blockIdx.x) * kWarps + warp;
  int const workers = static_cast<int>(gridDim.x) * kWarps;
  int const rows = owner_totals(p.shape, smem.route.plan, p.rank).rows;
  int const mine = (rows - worker + workers - 1) / workers;
  if (mine <= 0) return;
  int const row_bytes = 2 * p.shape.hidden;
  RowCursor cursor(p.shape, {smem.route.counts, p.shape.experts}, smem.route.plan,
                   smem.route.list_begin, p.rank);
  PoolRow ahead = {};
  std::uint32_t ahead_pair = 0;
  auto const look_ahead = [&](int i) {  // entries are read a row before they are needed
    ahead = cursor.at(worker + i * workers);
    std::int64_t const at = p.window.list_entry(parity(epoch), ahead.source, ahead.entry);
    ahead_pair = __ldcg(word_of(p.windows[p.rank], at));  // RouteEntry::pair
  };
  look_ahead(0);
  arch::fence_proxy_async_global();
  copy_rows(smem.ring[warp], mine, row_bytes, [&](int i) {
    std::int64_t const row = worker + std::int64_t{i} * workers;
    std::uint32_t const pair = ahead_pair;
    std::int32_t const source = ahead.source;
    *row_origin(p, row) = make_uint2(pair, static_cast<std::uint32_t>(source));
    if (i + 1 < mine) look_ahead(i + 1);
    std::int64_t const token = pair / static_cast<std::uint32_t>(p.shape.max_top_k);
    return RowCopy{p.windows[source] + p.window.x_row(token), p.gmem_pool + row * row_bytes,
                   nullptr};
  });
}

__global__ void __launch_bounds__(kThreads, 1)
    dispatch(__grid_constant__ ExchangeArguments const p) {
  extern __shared__ __align__(128) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<Shared*>(smem_raw);
  std::uint32_t const epoch = *p.gmem_epoch;
  int const thread = static_cast<int>(threadIdx.x);
  if (thread % 32 == 0) {
    for (arch::Mbarrier& full : smem.ring[thread / 32].full) arch::mbarrier_init(&full, 1);
    arch::mbarrier_fence_init();
  }
  clear_next_bank<kThreads>(p, epoch);
  if (!route(p, smem.route, epoch, NothingBeside(), [] {})) return;
  bool reached = true;
  if (thread < p.shape.ranks) {
    reached =
        Waiter(p, epoch).for_epoch(p.window.publish_word(thread), epoch, Site::publish, thread);
  }
  if (!all_reached(reached)) return;
  if (blockIdx.x == 0) {
    int const local = p.shape.local_experts();
    for (int l = thread; l <= local; l += kThreads) {
      p.gmem_expert_offsets[l] = l < local ? smem.route.plan[p.rank * local + l].first_row
                                           : owner_totals(p.shape, smem.route.plan, p.rank).rows;
    }
  }
  if (thread % 32 == 0) pull(p, smem, epoch);
}

}  // namespace

cudaError_t launch_dispatch(ExchangeArguments const& args, int sm_count, cudaStream_t stream) {
  if (args.shape.experts > kMostExperts || args.shape.ranks > kMaxRanks ||
      args.shape.hidden % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  cudaError_t const error = cudaFuncSetAttribute(
      dispatch, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  void* arguments[] = {const_cast<ExchangeArguments*>(&args)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<void const*>(dispatch),
                                     dim3(static_cast<unsigned>(sm_count)), dim3(kThreads),
                                     arguments, sizeof(Shared), stream);
}

}  // namespace tessera::dist
