// SPDX-License-Identifier: Apache-2.0
// combine: every row to the slot of its pair on its source; a slot has one writer. Where gradients of scores are
// there, those of the rows go the same way. The last CTA acknowledges the pass to all ranks; every CTA awaits what all
// ranks say, then its warps add up slots, a token each, in the order of the choices.
//   push   16 warps, a lane each           sums   the same warps, 8 KB in flight each
//   A launch that merely adds up behind this one would come late: SMs that end go to GEMMs that have waited for them.
// Memory   rows are written by bulk copies: each lane waits until they are, its CTA counts, the last one fences at
//          system scope for all and stores ack [ended, ack]; slots are read by nobody before that
// Numerics fp32 fma in ascending choice order from 0, one rounding: the bits of aggregate (src/cuda/kernels)
#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/load_global.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/store_global.cuh"
#include "cuda/host/launch.hpp"
#include "expert_parallel/exchange/exchange.hpp"
#include "expert_parallel/exchange/route.cuh"
#include "expert_parallel/exchange/weighted_sum.cuh"
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

// Returns the gradient of a row's score. The sum has the order and the bits of dscores_plain (src/cuda/plain).
__device__ float dscore_of(CombineArguments const& p, std::int64_t row) {
  if (p.gmem_dscores != nullptr) return p.gmem_dscores[row];
  float const* const gmem_partials = p.gmem_ds_partials + row * p.ds_groups;
  float sum = 0;
  for (int group = 0; group < p.ds_groups; ++group) sum += gmem_partials[group];
  return sum;
}

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
    if (p.gmem_dscores != nullptr || p.gmem_ds_partials != nullptr) {
      std::int64_t const at = exchange.window.dscore(to.x);
      *reinterpret_cast<float*>(source.store_if_local<OtherWay::kStaged>(at)) = dscore_of(p, row);
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

// Loads of a warp that are in flight together: of so many choices of a token, in so many blocks of columns.
constexpr int kChoicesAtOnce = 8;
constexpr int kBlocksAtOnce = 2;
constexpr int kBlockColumns = 8 * arch::kWarpThreads;

// Adds choices [first, first + kChoicesAtOnce) of a token to this lane's sums. pair: the slot of this lane's choice, or
// -1; score: its weight.
__device__ void add_choices(ExchangeArguments const& exchange, float (&sum)[kBlocksAtOnce][8],
                            std::int32_t pair, float score, int first, int column) {
  char const* const gmem_slots = own_window(exchange).place(exchange.window.slots);
  std::int64_t const row_bytes = std::int64_t{2} * exchange.shape.hidden;
  std::int32_t pairs[kChoicesAtOnce];
  uint4 values[kChoicesAtOnce][kBlocksAtOnce];
  TESSERA_UNROLL
  for (int i = 0; i < kChoicesAtOnce; ++i) {
    pairs[i] = __shfl_sync(arch::kAllLanes, pair, first + i);
    char const* const gmem_row = gmem_slots + pairs[i] * row_bytes;
    TESSERA_UNROLL
    for (int b = 0; b < kBlocksAtOnce; ++b) {
      int const c = column + b * kBlockColumns;
      values[i][b] =
          arch::load_streaming_16(gmem_row + 2 * c, pairs[i] >= 0 && c < exchange.shape.hidden);
    }
  }
  TESSERA_UNROLL
  for (int i = 0; i < kChoicesAtOnce; ++i) {
    float const weight = __shfl_sync(arch::kAllLanes, score, first + i);
    if (pairs[i] < 0) continue;
    TESSERA_UNROLL
    for (int b = 0; b < kBlocksAtOnce; ++b) add_weighted(sum[b], weight, values[i][b]);
  }
}

// Token by token, each by a warp.
__device__ void add_up_slots(CombineArguments const& p) {
  ExchangeArguments const& exchange = p.exchange;
  SlotResults const& results = p.results;
  int const top_k = exchange.shape.max_top_k, hidden = exchange.shape.hidden;
  int const lane = arch::lane_idx();
  int const worker = static_cast<int>(blockIdx.x) * kWarps + arch::warp_idx();
  int const workers = static_cast<int>(gridDim.x) * kWarps;
  for (int token = worker; token < exchange.tokens; token += workers) {
    std::int64_t const own = std::int64_t{token} * top_k + lane;
    std::int32_t const pair = lane < top_k ? results.gmem_slot_of_pair[own] : -1;
    float const score =
        lane < top_k && results.gmem_scores != nullptr ? results.gmem_scores[own] : 1.0f;
    for (int begin = 0; begin < hidden; begin += kBlocksAtOnce * kBlockColumns) {
      int const column = begin + 8 * lane;
      float sum[kBlocksAtOnce][8] = {};
      for (int first = 0; first < top_k; first += kChoicesAtOnce) {
        add_choices(exchange, sum, pair, score, first, column);
      }
      TESSERA_UNROLL
      for (int b = 0; b < kBlocksAtOnce; ++b) {
        int const c = column + b * kBlockColumns;
        if (c >= hidden) continue;
        arch::store_streaming_16(results.gmem_o + 2 * (std::int64_t{token} * hidden + c),
                                 rounded_sum(sum[b]));
      }
    }
  }
}

// Gradients of the scores of this rank's pairs.
__device__ void take_dscores(CombineArguments const& p) {
  SlotResults const& results = p.results;
  if (results.gmem_pair_dscores == nullptr) return;
  ExchangeArguments const& exchange = p.exchange;
  auto const* const gmem_window =
      reinterpret_cast<float const*>(own_window(exchange).place(exchange.window.dscores));
  std::int64_t const pairs = std::int64_t{exchange.tokens} * exchange.shape.max_top_k;
  std::int64_t const first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::int64_t pair = first; pair < pairs; pair += std::int64_t{gridDim.x} * kThreads) {
    results.gmem_pair_dscores[pair] = results.gmem_slot_of_pair[pair] < 0 ? 0 : gmem_window[pair];
  }
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
  bool const ends = thread < arch::kWarpThreads && is_last(exchange, epoch);
  if (ends && thread == 0) {
    arch::fence_acq_rel_sys();
    for (int r = 0; r < exchange.shape.ranks; ++r) {
      peer_of(exchange, r).signal(exchange.window.ack_word(exchange.rank), epoch);
    }
  }
  Waiter const waiter(exchange, epoch);
  bool reached = true;
  if (thread < exchange.shape.ranks && (ends || p.results.gmem_o != nullptr)) {
    reached = waiter.for_epoch(exchange.window.ack_word(thread), epoch, Site::ack, thread);
  }
  if (!all_reached(reached)) return;
  if (p.results.gmem_o != nullptr) {
    add_up_slots(p);
    take_dscores(p);
  }
  if (!ends) return;
  waiter.report_given_up();
  if (thread == 0) *exchange.gmem_epoch = epoch + 1;
}

}  // namespace

cudaError_t launch_combine(CombineArguments const& args, int sm_count, cudaStream_t stream,
                           cudaEvent_t begun) {
  if (args.exchange.shape.hidden % 8 != 0) return cudaErrorInvalidValue;
  cudaError_t const error =
      cuda::host::allow_shared_memory<combine>(static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  return launch_on(sm_count, kThreads, sizeof(Shared), stream, begun, combine, args);
}

}  // namespace tessera::expert_parallel
