// SPDX-License-Identifier: Apache-2.0
// dispatch of a backward pass as two kernels, the second one beside the GEMM that reads the rows of the first: the
// tokens of this rank, a P-th of all, are there at once, so that blocks of rows with no others are multiplied while the
// link brings the peers'.
//   begin_dispatch   x of the caller to its places in the window and among the tokens of all ranks, in one reading;
//                    staged, by the last CTA; all tables, and for each expert which blocks have this rank's rows alone
//   dispatch_beside  on a few SMs, on another stream:
//     x         awaits staged of the peers, pulls their tokens, and counts [arrivals], a CTA each, whatever has come:
//               who waits for this word has no limit of time of its own (src/cuda/gemm/await_rows.cuh)
//     second_x  on the first second_ctas CTAs, as nobody waits for it yet, so that the others' SMs are free: to its
//               place in the window; second_staged, by the last CTA; then tokens of all ranks, as dispatch has it
// Memory   begin_dispatch: bulk copies of the peers, and of this GPU, read the window after a proxy fence ahead of
//          staged. dispatch_beside: each lane waits until its bulk copies are written, its CTA counts with release
// Requires gathered tokens, hidden % 8 == 0. CTAs of dispatch_beside wait for one another: all of them have an SM
//          before anything follows that would take it (its event `begun`)
#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "cuda/host/launch.hpp"
#include "expert_parallel/unfused/dispatch_rows.cuh"
#include "expert_parallel/unfused/launch_on.hpp"

namespace tessera::expert_parallel {
namespace {

constexpr int kBeginThreads = 512, kBeginCtasOfSm = 3;
// A warp moves 1.2 GB/s beside a GEMM, so 16 SMs of so many warps fill the link.
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / arch::kWarpThreads;

struct Shared {
  Ring ring[kWarps];
};

// Copies the caller's rows to places of rows without pads. worker of workers: this thread.
template <class... Places>
__device__ void copy_rows_to(ExchangeArguments const& exchange, CallerRows const& rows, int worker,
                             int workers, Places... to) {
  int const pieces_of_row = exchange.shape.hidden / 8;
  copy_pieces(
      std::int64_t{exchange.tokens} * pieces_of_row, worker, workers,
      [&](std::int64_t i) { return piece_of(rows, pieces_of_row, i); },
      [&](std::int64_t i, uint4 value) {
        ((*reinterpret_cast<uint4*>(to + 16 * i) = value), ...);
      });
}

// Says to all ranks by a word of theirs that rows lie in this rank's window.
__device__ void signal_ranks(ExchangeArguments const& exchange, std::int64_t word,
                             std::uint32_t epoch) {
  arch::fence_acq_rel_sys();
  for (int r = 0; r < exchange.shape.ranks; ++r) peer_of(exchange, r).signal(word, epoch);
}

// Counts the blocks of an expert, the first ones, whose rows are all of this rank's tokens, which come before others.
__device__ int own_blocks(DispatchArguments const& p, int expert, int rows) {
  constexpr int kRows = core::kReadyRows;
  int const begin = min(p.tables.gmem_expert_offsets[expert], rows);
  int const end = min(p.tables.gmem_expert_offsets[expert + 1], rows);
  int first_of_peers = begin;
  for (int after = end; first_of_peers < after;) {
    int const middle = first_of_peers + (after - first_of_peers) / 2;
    if (p.tables.gmem_origins[middle].source == p.exchange.rank) {
      first_of_peers = middle + 1;
    } else {
      after = middle;
    }
  }
  int const own = first_of_peers - begin;
  return first_of_peers == end ? (own + kRows - 1) / kRows : own / kRows;
}

__global__ void __launch_bounds__(kBeginThreads)
    begin_dispatch(__grid_constant__ DispatchArguments const p) {
  ExchangeArguments const& exchange = p.exchange;
  std::uint32_t const epoch = *exchange.gmem_epoch;
  char* const window = own_window(exchange).place(exchange.window.x_row(0));
  std::int64_t const row_bytes = std::int64_t{2} * exchange.shape.hidden;
  char* const own =
      p.gmem_rows + exchange.gathered_row(static_cast<std::uint32_t>(exchange.rank), 0) * row_bytes;
  int const ctas = static_cast<int>(gridDim.x);
  int const thread = static_cast<int>(blockIdx.x) * kBeginThreads + static_cast<int>(threadIdx.x);
  int const threads = ctas * kBeginThreads;
  if (p.x.gmem == window) {
    copy_rows_to(exchange, p.x, thread, threads, own);
  } else {
    copy_rows_to(exchange, p.x, thread, threads, own, window);
  }
  if (all_have_copied(exchange, exchange.local.copied(epoch), ctas)) {
    signal_ranks(exchange, exchange.window.staged_word(exchange.rank), epoch);
  }
  int const rows = static_cast<int>(
      min(std::int64_t{p.tables.gmem_expert_offsets[exchange.local_experts]}, p.capacity));
  if (thread == 0) *p.gmem_arrivals = 0;
  for (int e = thread; e < exchange.local_experts; e += threads) {
    p.gmem_ready_blocks[e] = e < p.ready_from ? 0 : own_blocks(p, e, rows);
  }
  begin_pass<kBeginThreads>(p, epoch, rows);
}

// Awaits a word of every rank; all threads call it. False: the pass is lost.
template <class Await>
__device__ bool await_ranks(ExchangeArguments const& exchange, Await await) {
  int const rank = static_cast<int>(threadIdx.x);
  bool const reached = rank < exchange.shape.ranks ? await(rank) : true;
  if (!all_reached(reached)) return false;
  __syncwarp();
  arch::fence_proxy_async_global();
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    dispatch_beside(__grid_constant__ DispatchArguments const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<Shared*>(smem_raw);
  ExchangeArguments const& exchange = p.exchange;
  std::uint32_t const epoch = *exchange.gmem_epoch;
  int const warp = static_cast<int>(threadIdx.x) / arch::kWarpThreads;
  int const all_rows = p.tables.gmem_expert_offsets[exchange.local_experts];
  int const rows = static_cast<int>(min(std::int64_t{all_rows}, p.capacity));
  if (threadIdx.x % arch::kWarpThreads == 0) {
    for (arch::Mbarrier& full : smem.ring[warp].full) arch::mbarrier_init(&full, 1);
    arch::mbarrier_fence_init();
  }
  Waiter const waiter(exchange, epoch);
  bool const staged = await_ranks(exchange, [&](int rank) {
    return waiter.for_epoch(exchange.window.staged_word(rank), epoch, Site::staged, rank);
  });
  int const worker = static_cast<int>(blockIdx.x) * kWarps + warp;
  int const workers = static_cast<int>(gridDim.x) * kWarps;
  Pull pull(p, smem.ring[warp], rows);
  if (staged) {
    if (all_rows > rows && !p.may_overflow && blockIdx.x == 0 && threadIdx.x == 0) {
      waiter.give_up(Site::rows, static_cast<std::uint32_t>(p.capacity),
                     static_cast<std::uint32_t>(all_rows));
    }
    __syncwarp();
    pull.all({Sources::peers, worker, workers}, false, p.gmem_rows);
    arch::bulk_store_wait<0>();
  }
  __syncthreads();
  if (threadIdx.x == 0) arch::add_release_gpu(p.gmem_arrivals, 1);
  if (!staged || p.gmem_second_rows == nullptr || static_cast<int>(blockIdx.x) >= p.second_ctas)
    return;
  char* const window = own_window(exchange).place(exchange.window.second_x_row(0));
  int const ctas = p.second_ctas;
  if (p.second_x.gmem != window) {
    copy_rows_to(exchange, p.second_x, static_cast<int>(blockIdx.x * kThreads + threadIdx.x),
                 ctas * kThreads, window);
  }
  if (all_have_copied(exchange, exchange.local.second_copied(epoch), ctas)) {
    signal_ranks(exchange, exchange.window.second_staged_word(exchange.rank), epoch);
  }
  bool const second_staged =
      await_ranks(exchange, [&](int rank) { return waiter.for_second_rows(rank); });
  if (!second_staged) return;
  pull.all(share_of<kWarps>(p, warp, ctas), true, p.gmem_second_rows);
  arch::bulk_store_wait<0>();
}

}  // namespace

cudaError_t launch_begin_dispatch(DispatchArguments const& args, int sm_count,
                                  cudaStream_t stream) {
  if (args.exchange.shape.hidden % 8 != 0 || !args.gathered || args.x.gmem == nullptr ||
      args.gmem_rows == nullptr || args.gmem_ready_blocks == nullptr) {
    return cudaErrorInvalidValue;
  }
  return launch_on(kBeginCtasOfSm * sm_count, kBeginThreads, 0, stream, nullptr, begin_dispatch,
                   args);
}

cudaError_t launch_dispatch_beside(DispatchArguments const& args, int sm_count, cudaStream_t stream,
                                   cudaEvent_t begun) {
  bool const has_second = args.gmem_second_rows != nullptr;
  if (!args.gathered || has_second != (args.second_x.gmem != nullptr) ||
      (has_second && (args.second_ctas < 1 || args.second_ctas > sm_count))) {
    return cudaErrorInvalidValue;
  }
  cudaError_t const error =
      cuda::host::allow_shared_memory<dispatch_beside>(static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  return launch_on(sm_count, kThreads, sizeof(Shared), stream, begun, dispatch_beside, args);
}

}  // namespace tessera::expert_parallel
