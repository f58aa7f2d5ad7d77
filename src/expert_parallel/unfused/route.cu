// SPDX-License-Identifier: Apache-2.0
// route: from this rank's choices to tables of the rows that its own experts have to multiply.
//   row_limit     rows that this rank has memory for, to all ranks
//   route, plan   route.cuh
//   host          how many rows there are, and whether those of every rank are within its row limit
//   tables        row_tables.cuh
// Barriers __syncthreads only: one thread polls, the CTA follows. Waits have a limit (wait.cuh)
// Memory   generic writes to peers: a CTA's are released when it counts, the last one fences at system scope for all,
//          then publishes
// Requires shape.experts <= kMaxExperts, all CTAs resident (cooperative launch)
#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/host/launch.hpp"
#include "expert_parallel/exchange/exchange.hpp"
#include "expert_parallel/exchange/route.cuh"
#include "expert_parallel/exchange/row_tables.cuh"

namespace tessera::expert_parallel {
namespace {

constexpr int kThreads = 256;

using Storage = RouteStorage<kThreads>;

__global__ void __launch_bounds__(kThreads, 1)
    route_rows(__grid_constant__ RouteArguments const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<Storage*>(smem_raw);
  ExchangeArguments const& exchange = p.exchange;
  std::uint32_t const epoch = *exchange.gmem_epoch;
  int const thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0) send_row_limit(exchange, epoch, p.row_limit, thread);
  if (!route_and_plan<true>(exchange, smem, epoch, NothingBeside(), [] {})) return;
  PassPlan const pass = {{smem.counts, exchange.shape.experts}, smem.plan, smem.list_begin};
  int const rows = owner_totals(exchange.shape, pass.plan, exchange.rank).rows;
  if (blockIdx.x == 0) {
    write_offsets(exchange, pass, p.made, rows, thread, kThreads);
    if (!signal_host(exchange, pass, epoch, p.host)) return;
  }
  bool reached = true;
  if (thread < exchange.shape.ranks) {
    reached = Waiter(exchange, epoch)
                  .for_epoch(exchange.window.publish_word(thread), epoch, Site::publish, thread);
  }
  if (!all_reached(reached)) return;
  write_rows(exchange, pass, epoch, p.made, rows, static_cast<int>(blockIdx.x) * kThreads + thread,
             static_cast<int>(gridDim.x) * kThreads);
}

}  // namespace

cudaError_t launch_route(RouteArguments const& args, int sm_count, cudaStream_t stream) {
  ExchangeShape const& shape = args.exchange.shape;
  if (shape.experts > kMaxExperts || shape.ranks > kMaxRanks) return cudaErrorInvalidValue;
  cudaError_t const error =
      cuda::host::allow_shared_memory<route_rows>(static_cast<int>(sizeof(Storage)));
  if (error != cudaSuccess) return error;
  void* arguments[] = {const_cast<RouteArguments*>(&args)};
  return cudaLaunchCooperativeKernel(route_rows, dim3(static_cast<unsigned>(sm_count)),
                                     dim3(kThreads), arguments, sizeof(Storage), stream);
}

}  // namespace tessera::expert_parallel
