// SPDX-License-Identifier: Apache-2.0
// What every CTA does first: counts to all ranks, its token slice's rows to the owners, and the plan.
//   scan     histogram of the slice, prefix over slices [route_scan, ack]
//   counts   to every rank, from a CTA for each; they need no fence
//   entries  one per row into the list of its owner; an entry's place depends on the choices alone. The last CTA says
//            that they are there
//   plan     every CTA awaits the counts of all ranks [counted] and derives the same; the lists may still be on their
//            way: who reads them awaits them [publish]
// One thread polls, a barrier passes it on. False: a wait has failed, the pass is lost (wait.cuh).
#pragma once

#include "cuda/arch/warp.cuh"
#include "dist/kernels/exchange.hpp"
#include "dist/kernels/wait.cuh"

namespace tessera::dist {

constexpr int kMostExperts = 512;

template <int kThreads>
struct RouteStorage {
  std::int32_t counts[kMaxRanks * kMostExperts];  // c[source][expert]
  ExpertPlan plan[kMostExperts];
  std::int32_t list_begin[kMostExperts];
  std::int32_t totals[kMostExperts];  // of this rank's rows
  std::int32_t next[kMostExperts];    // index of this slice's next row of each expert
};

// Whether all threads of the CTA may go on; a barrier.
__device__ inline bool all_reached(bool reached) { return __syncthreads_or(reached ? 0 : 1) == 0; }

__device__ inline bool is_expert(ExchangeArguments const& p, std::int32_t id) {
  return id >= 0 && id < p.shape.experts;
}

// The counters of the next pass, which nobody has used since the pass before this one.
template <int kThreads>
__device__ void clear_next_bank(ExchangeArguments const& p, std::uint32_t epoch) {
  auto* const bank = word_of(p.gmem_local, p.local.bank(epoch + 1));
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < p.local.bank_bytes / 4; i += std::int64_t{gridDim.x} * kThreads) {
    bank[i] = 0;
  }
}

// LocalLayout::pair_index.
__device__ inline std::uint32_t* pair_word(ExchangeArguments const& p, int pair) {
  return word_of(p.gmem_local, p.local.pair_index + std::int64_t{4} * pair);
}

// next[] and totals[] from the histograms of all slices. On return lists and counts may be overwritten.
template <int kThreads>
__device__ bool scan(ExchangeArguments const& p, RouteStorage<kThreads>& smem, std::uint32_t epoch,
                     TokenSlice slice) {
  int const experts = p.shape.experts;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) smem.next[e] = 0;
  __syncthreads();
  int const end = slice.end * p.shape.max_top_k;
  for (int i = slice.begin * p.shape.max_top_k + static_cast<int>(threadIdx.x); i < end;
       i += kThreads) {
    std::int32_t const id = p.gmem_topk_ids[i];
    if (is_expert(p, id)) atomicAdd(&smem.next[id], 1);
  }
  __syncthreads();
  auto const histogram = [&](int c) {
    return reinterpret_cast<std::int32_t*>(p.gmem_local + p.local.histogram(c));
  };
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    histogram(static_cast<int>(blockIdx.x))[e] = smem.next[e];
  }
  __syncthreads();
  bool reached = true;
  int const peer =
      static_cast<int>(threadIdx.x) - arch::kWarpThreads;  // of another warp than thread 0
  if (threadIdx.x == 0) {
    arch::add_release_gpu(word_of(p.gmem_local, p.local.slices_counted(epoch)), 1);
    reached =
        Waiter(p, epoch).for_count(p.local.slices_counted(epoch), gridDim.x, Site::route_scan);
  } else if (peer >= 0 && peer < p.shape.ranks) {
    reached =
        Waiter(p, epoch).for_epoch(p.window.ack_word(peer), acked_before(epoch), Site::ack, peer);
  }
  if (!all_reached(reached)) return false;
  // Sums over slices: as many threads per expert as there are, each with many loads in flight.
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    smem.next[e] = smem.totals[e] = 0;
  }
  __syncthreads();
  int const slices = static_cast<int>(gridDim.x);
  int const parts = max(kThreads / experts, 1);
  for (int i = static_cast<int>(threadIdx.x); i < experts * parts; i += kThreads) {
    int const e = i % experts;
    TokenSlice const part = token_slice(slices, i / experts, parts);
    std::int32_t before = 0, total = 0;
    _Pragma("unroll 11")  // 132 slices by 3 parts: 44 loads each
        for (int c = part.begin; c < part.end; ++c) {
      std::int32_t const rows = __ldcg(histogram(c) + e);
      if (c < static_cast<int>(blockIdx.x)) before += rows;
      total += rows;
    }
    atomicAdd(&smem.next[e], before);
    atomicAdd(&smem.totals[e], total);
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += kThreads) {
    std::int32_t begin = 0;
    for (int l = p.shape.owner(e) * p.shape.local_experts(); l < e; ++l) begin += smem.totals[l];
    smem.list_begin[e] = begin;
  }
  __syncthreads();
  return true;
}

// Transfer::once: the token's choices on the owner of `id`. The one of the lowest expert, whose tasks come first,
// brings the row.
__device__ inline void join(ExchangeArguments const& p, std::int32_t id, int pair,
                            RouteEntry& entry) {
  int const choice = pair % p.shape.max_top_k;
  std::uint32_t choices = 0;
  for (int j = 0; j < p.shape.max_top_k; ++j) {
    std::int32_t const other = p.gmem_topk_ids[pair - choice + j];
    if (!is_expert(p, other) || p.shape.owner(other) != p.shape.owner(id)) continue;
    choices |= 1u << j;
    if (other < id || (other == id && j < choice)) ++entry.place;
  }
  entry.rows = static_cast<std::uint8_t>(__popc(choices));
  entry.first_index = static_cast<std::int32_t>(choices);
}

// One pair per thread at a time; those of one expert keep their order, as the warps count theirs one after the other.
template <int kThreads>
__device__ void write_entries(ExchangeArguments const& p, RouteStorage<kThreads>& smem,
                              std::uint32_t epoch, TokenSlice slice) {
  int const warp = static_cast<int>(threadIdx.x) / arch::kWarpThreads;
  unsigned const earlier_lanes = (1u << threadIdx.x % arch::kWarpThreads) - 1;
  int const end = slice.end * p.shape.max_top_k;
  for (int first = slice.begin * p.shape.max_top_k; first < end; first += kThreads) {
    int const pair = first + static_cast<int>(threadIdx.x);
    std::int32_t const id = pair < end ? p.gmem_topk_ids[pair] : -1;
    bool const routed = is_expert(p, id);
    unsigned const same = __match_any_sync(arch::kAllLanes, routed ? id : -1);
    std::int32_t index = 0;
    int const pairs = min(end - first, kThreads);
    for (int w = 0; w * arch::kWarpThreads < pairs; ++w) {
      if (w == warp && routed) index = smem.next[id] + __popc(same & earlier_lanes);
      __syncwarp();
      if (w == warp && routed && (same & earlier_lanes) == 0) smem.next[id] += __popc(same);
      __syncthreads();
    }
    if (routed) {
      // Every row comes for itself, and scores stay with their source.
      RouteEntry entry = {static_cast<std::uint32_t>(pair), 0.0f, 0, 1, 0, 0};
      char* const window = p.windows[p.shape.owner(id)];
      if (p.shape.transfer == Transfer::once) {
        join(p, id, pair, entry);
        PairPlace const at = {id % p.shape.local_experts(), index};
        *word_of(window, p.window.place_word(parity(epoch), p.rank, pair)) = at.word();
      }
      std::int64_t const place = smem.list_begin[id] + index;
      *reinterpret_cast<uint4*>(window + p.window.list_entry(parity(epoch), p.rank, place)) =
          *reinterpret_cast<uint4 const*>(&entry);
      *pair_word(p, pair) = static_cast<std::uint32_t>(index);
    }
    if (pair < end && p.gmem_slot_of_pair != nullptr) {
      p.gmem_slot_of_pair[pair] = routed ? pair : -1;
    }
  }
}

template <int kThreads>
__device__ void send_counts(ExchangeArguments const& p, RouteStorage<kThreads> const& smem,
                            std::uint32_t epoch) {
  for (int r = static_cast<int>(blockIdx.x); r < p.shape.ranks; r += static_cast<int>(gridDim.x)) {
    for (int e = static_cast<int>(threadIdx.x); e < p.shape.experts; e += kThreads) {
      std::int64_t const at = p.window.count_word(parity(epoch), p.rank, e);
      arch::store_relaxed_sys(reinterpret_cast<std::uint64_t*>(p.windows[r] + at),
                              CountWord{smem.totals[e], epoch}.word());
    }
  }
}

template <int kThreads>
__device__ bool route(ExchangeArguments const& p, RouteStorage<kThreads>& smem,
                      std::uint32_t epoch) {
  TokenSlice const slice =
      token_slice(p.tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  if (!scan(p, smem, epoch, slice)) return false;
  send_counts(p, smem, epoch);
  write_entries(p, smem, epoch, slice);
  __syncthreads();
  if (threadIdx.x != 0) return true;
  arch::fence_acq_rel_sys();  // for all threads of the CTA
  std::uint32_t const before =
      arch::count_acq_rel_gpu(word_of(p.gmem_local, p.local.slices_written(epoch)), 1);
  for (int r = 0; r < p.shape.ranks && before + 1 == gridDim.x; ++r) {
    arch::store_release_sys(word_of(p.windows[r], p.window.publish_word(p.rank)), epoch);
  }
  return true;
}

template <int kThreads>
__device__ bool make_plan(ExchangeArguments const& p, RouteStorage<kThreads>& smem,
                          std::uint32_t epoch) {
  int const thread = static_cast<int>(threadIdx.x);
  bool reached = true;
  for (int i = thread; i < p.shape.ranks * p.shape.experts && reached; i += kThreads) {
    reached = Waiter(p, epoch).for_rows(i / p.shape.experts, i % p.shape.experts, smem.counts[i]);
  }
  if (!all_reached(reached)) return false;
  CountMatrix const matrix{smem.counts, p.shape.experts};
  for (int e = thread; e < p.shape.experts; e += kThreads) {
    smem.plan[e] = plan_alone(p.shape, matrix, e);
  }
  make_list_begins(p.shape, matrix, p.rank, smem.list_begin, thread, kThreads);
  __syncthreads();
  constexpr int kRounds = (kMostExperts + kThreads - 1) / kThreads;
  ExpertPlan placed[kRounds];
  TESSERA_UNROLL
  for (int i = 0; i < kRounds; ++i) {
    int const e = thread + i * kThreads;
    if (e < p.shape.experts) placed[i] = plan_placed(p.shape, smem.plan, e);
  }
  __syncthreads();
  TESSERA_UNROLL
  for (int i = 0; i < kRounds; ++i) {
    int const e = thread + i * kThreads;
    if (e < p.shape.experts) smem.plan[e] = placed[i];
  }
  __syncthreads();
  return true;
}

}  // namespace tessera::dist
