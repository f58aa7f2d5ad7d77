// SPDX-License-Identifier: Apache-2.0
// dispatch: the rows that this rank's experts have to multiply, from the windows of all ranks.
//   staged   one thread says to all ranks that this rank's rows lie in its window. Rows that the caller has elsewhere
//            all threads copy there before; the last CTA that has done so says it
//   tables   all threads copy them, note which pairs have rows, and clear the next pass's counters; then every CTA
//            awaits what all ranks say
//   pull     warps load rows by bulk copies, row i by warp i mod warps, and store each for all of its token's choices
//            here, a lane for each; the rows of second_x behind those of x, or by a launch of their own
//   gathered a token is stored once, for GEMMs that gather rows: two warps of a CTA pull those of this rank, at the
//            speed of its memory, while the others pull those of the peers, at that of the link
// Barriers __syncthreads only: one thread polls, the CTA follows. Waits have a limit (wait.cuh)
// Memory   x and second_x were written before this kernel, or by its threads, whose CTAs count [copied]; bulk copies
//          read them after a proxy fence behind staged
// Requires hidden % 8 == 0. Nobody waits before this rank has spoken, but where rows are copied CTAs that wait keep
//          their SMs: all others have to get one, so there are no more CTAs than SMs
#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "cuda/host/launch.hpp"
#include "expert_parallel/unfused/dispatch_rows.cuh"
#include "expert_parallel/unfused/launch_on.hpp"

namespace tessera::expert_parallel {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / arch::kWarpThreads;

struct Shared {
  Ring ring[kWarps];
};

// Says to all ranks that those of this rank lie in its window which this launch brings.
__device__ void say_staged(DispatchArguments const& p, std::uint32_t epoch) {
  ExchangeArguments const& exchange = p.exchange;
  arch::fence_acq_rel_sys();
  for (int r = 0; r < exchange.shape.ranks; ++r) {
    Peer const peer = peer_of(exchange, r);
    if (p.gmem_rows != nullptr) peer.signal(exchange.window.staged_word(exchange.rank), epoch);
    if (p.gmem_second_rows != nullptr) {
      peer.signal(exchange.window.second_staged_word(exchange.rank), epoch);
    }
  }
}

// Copies the caller's rows to their places in this rank's window. Warps with the same number in all CTAs come before
// the next ones, so that few rows are copied by all SMs, too.
__device__ void copy_to_window(DispatchArguments const& p) {
  ExchangeArguments const& exchange = p.exchange;
  int const pieces_of_row = exchange.shape.hidden / 8;
  int const pieces = exchange.tokens * pieces_of_row;  // of kMostCopiedBytes
  int const first_pieces = p.x.gmem != nullptr ? pieces : 0;
  int const all = first_pieces + (p.second_x.gmem != nullptr ? pieces : 0);
  int const ctas = static_cast<int>(gridDim.x);
  int const worker = (arch::warp_idx() * ctas + static_cast<int>(blockIdx.x)) * arch::kWarpThreads +
                     arch::lane_idx();
  char* const first = own_window(exchange).place(exchange.window.x_row(0));
  char* const second = own_window(exchange).place(exchange.window.second_x_row(0));
  copy_pieces(
      all, worker, ctas * kThreads,
      [&](std::int64_t i) {
        return i < first_pieces ? piece_of(p.x, pieces_of_row, i)
                                : piece_of(p.second_x, pieces_of_row, i - first_pieces);
      },
      [&](std::int64_t i, uint4 value) {
        char* const to = i < first_pieces ? first + 16 * i : second + 16 * (i - first_pieces);
        *reinterpret_cast<uint4*>(to) = value;
      });
}

// Has the rows of this rank's tokens in its window, and says so to all ranks. Called by all threads.
__device__ void stage(DispatchArguments const& p, std::uint32_t epoch) {
  ExchangeArguments const& exchange = p.exchange;
  bool speaks = blockIdx.x == 0 && threadIdx.x == 0;
  if (p.x.gmem != nullptr || p.second_x.gmem != nullptr) {
    copy_to_window(p);
    speaks = all_have_copied(exchange, exchange.local.copied(epoch), static_cast<int>(gridDim.x));
  }
  if (speaks) say_staged(p, epoch);
}

// Awaits what this launch brings of a rank, which may bring both by one launch or each by its own.
__device__ bool await_staged(DispatchArguments const& p, Waiter const& waiter, std::uint32_t epoch,
                             int source) {
  WindowLayout const& window = p.exchange.window;
  if (p.gmem_rows != nullptr &&
      !waiter.for_epoch(window.staged_word(source), epoch, Site::staged, source)) {
    return false;
  }
  return p.gmem_second_rows == nullptr || waiter.for_second_rows(source);
}

__global__ void __launch_bounds__(kThreads, 1)
    dispatch(__grid_constant__ DispatchArguments const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<Shared*>(smem_raw);
  ExchangeArguments const& exchange = p.exchange;
  std::uint32_t const epoch = *exchange.gmem_epoch;
  int const thread = static_cast<int>(threadIdx.x);
  int const warp = thread / arch::kWarpThreads;
  int const lane = thread % arch::kWarpThreads;
  bool const begins = p.gmem_rows != nullptr;  // else the rest of a pass that has begun
  stage(p, epoch);
  if (lane == 0) {
    for (arch::Mbarrier& full : smem.ring[warp].full) arch::mbarrier_init(&full, 1);
    arch::mbarrier_fence_init();
  }
  int const all_rows = p.tables.gmem_expert_offsets[exchange.local_experts];
  int const rows = static_cast<int>(min(std::int64_t{all_rows}, p.capacity));
  if (begins) begin_pass<kThreads>(p, epoch, rows);
  Waiter const waiter(exchange, epoch);
  bool reached = true;
  if (thread < exchange.shape.ranks) {
    reached = await_staged(p, waiter, epoch, thread);
  }
  if (!all_reached(reached)) return;
  if (begins && all_rows > rows && !p.may_overflow && blockIdx.x == 0 && thread == 0) {
    waiter.give_up(Site::rows, static_cast<std::uint32_t>(p.capacity),
                   static_cast<std::uint32_t>(all_rows));
  }
  __syncwarp();
  arch::fence_proxy_async_global();
  Pull pull(p, smem.ring[warp], rows);
  Share const share = share_of<kWarps>(p, warp, static_cast<int>(gridDim.x));
  if (begins) pull.all(share, false, p.gmem_rows);
  if (p.gmem_second_rows != nullptr) pull.all(share, true, p.gmem_second_rows);
  arch::bulk_store_wait<0>();
}

}  // namespace

cudaError_t launch_dispatch(DispatchArguments const& args, int sm_count, cudaStream_t stream,
                            cudaEvent_t begun) {
  if (args.exchange.shape.hidden % 8 != 0) return cudaErrorInvalidValue;
  bool const copies = args.x.gmem != nullptr || args.second_x.gmem != nullptr;
  if ((copies || args.zeroed.count > 0) && args.gmem_rows == nullptr) return cudaErrorInvalidValue;
  cudaError_t const error =
      cuda::host::allow_shared_memory<dispatch>(static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  return launch_on(sm_count, kThreads, sizeof(Shared), stream, begun, dispatch, args);
}

}  // namespace tessera::expert_parallel
