// SPDX-License-Identifier: Apache-2.0
// Every CTA does this first: it sends counts to all ranks and its token slice's rows to the owners, and makes the plan.
//   scan     the warps make a histogram of the slice, then the prefix over slices [route_scan]
//   counts   a CTA for each rank sends them; they need no fence
//   entries  one per row goes into the list of its owner; its place depends on the choices alone. A warp has a run of
//            the slice's pairs and knows how many of them the warps before it have, so none waits for another
//   publish  one thread counts its CTA, and the thread of the last CTA signals to the owners, whose readers of lists
//            await it [publish]
//   plan     every CTA awaits the counts of all ranks [counted] and derives the same. The lists may be on their way
// Beside   one warp copies x, and ends before its CTA is counted (copy_x.cuh)
// Few threads poll; a barrier passes the result on. False means that a wait failed and the pass is lost (wait.cuh).
#pragma once

#include "cuda/arch/warp.cuh"
#include "cuda/warp/sums.cuh"
#include "expert_parallel/exchange/exchange.hpp"
#include "expert_parallel/exchange/wait.cuh"

namespace tessera::expert_parallel {

// The number of the warp that copies x beside the routing and counts its CTA's entries. Where ranks are few it makes no
// part of the plan.
template <int kThreads>
constexpr int kBesideWarp = kThreads / arch::kWarpThreads - 1;

// For callers that do nothing beside the routing.
struct NothingBeside {
  __device__ void finish() {}
};

template <int kThreads>
struct RouteStorage {
  static constexpr int kWarps = kThreads / arch::kWarpThreads;

  std::int32_t counts[kMaxRanks * kMaxExperts];  // c[source][expert]
  ExpertPlan plan[kMaxExperts];
  std::int32_t list_begin[kMaxExperts];
  std::int32_t totals[kMaxExperts];        // of this rank's rows
  std::int32_t begin[kMaxExperts];         // index of this slice's first row of each expert
  std::int32_t next[kWarps][kMaxExperts];  // of each warp's next row
};

// True in all threads of the CTA if all of them may go on; a barrier.
__device__ inline bool all_reached(bool reached) { return __syncthreads_or(reached ? 0 : 1) == 0; }

__device__ inline bool is_expert(ExchangeArguments const& p, std::int32_t id) {
  return id >= 0 && id < p.shape.experts;
}

// Clears the counters of the next pass, which nobody has used since the pass before this one.
template <int kThreads>
__device__ void clear_next_bank(ExchangeArguments const& p, std::uint32_t epoch) {
  auto* const bank = word_of(p.gmem_local, p.local.bank(epoch + 1));
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < p.local.bank_bytes / 4; i += std::int64_t{gridDim.x} * kThreads) {
    bank[i] = 0;
  }
}

// Sets the words of this rank's window from `begin` on: ack, staged, block_done and, with partial combine,
// partial_done. Owners write those of blocks once they have this rank's lists.
template <int kThreads>
__device__ void renew_words(ExchangeArguments const& p, std::uint32_t epoch, std::int64_t begin) {
  std::uint32_t* const first = own_window(p).word(begin);
  std::uint32_t* const end = own_window(p).word(p.window.counts);  // what follows
  for (std::uint32_t* word = first + std::int64_t{blockIdx.x} * kThreads + threadIdx.x; word < end;
       word += std::int64_t{gridDim.x} * kThreads) {
    *word = epoch - 1;
  }
}

// LocalLayout::pair_index.
__device__ inline std::uint32_t* pair_word(ExchangeArguments const& p, int pair) {
  return word_of(p.gmem_local, p.local.pair_index + std::int64_t{4} * pair);
}

// Calls put(i, sum of the values before i) for i in [0, count). A converged warp calls it.
template <class Value, class Put>
__device__ void exclusive_sums(int count, Value value, Put put) {
  std::int32_t before = 0;
  int const lane = arch::lane_idx();
  for (int first = 0; first < count; first += arch::kWarpThreads) {
    std::int32_t const own = first + lane < count ? value(first + lane) : 0;
    std::int32_t const sum = cuda::warp::inclusive_sum(own);
    if (first + lane < count) put(first + lane, before + sum - own);
    before += __shfl_sync(arch::kAllLanes, sum, arch::kWarpThreads - 1);
  }
}

// The slice's pairs that one of `warps` warps routes.
__device__ inline TokenSlice pairs_of_warp(ExchangeArguments const& p, TokenSlice slice, int warp,
                                           int warps) {
  int const begin = slice.begin * p.shape.max_top_k;
  TokenSlice const part = token_slice((slice.end - slice.begin) * p.shape.max_top_k, warp, warps);
  return {begin + part.begin, begin + part.end};
}

// Computes next[], totals[] and list_begin[] from the histograms of all slices.
template <int kThreads>
__device__ bool scan(ExchangeArguments const& p, RouteStorage<kThreads>& smem, std::uint32_t epoch,
                     TokenSlice slice) {
  constexpr int kWarps = RouteStorage<kThreads>::kWarps;
  int const experts = p.shape.experts;
  int const thread = static_cast<int>(threadIdx.x);
  int const warp = thread / arch::kWarpThreads;
  int const lane = arch::lane_idx();
  for (int e = thread; e < experts; e += kThreads) smem.begin[e] = smem.totals[e] = 0;
  std::int32_t (&next)[kMaxExperts] = smem.next[warp];
  for (int e = lane; e < experts; e += arch::kWarpThreads) next[e] = 0;
  __syncwarp();
  TokenSlice const pairs = pairs_of_warp(p, slice, warp, kWarps);
  for (int i = pairs.begin + lane; i < pairs.end; i += arch::kWarpThreads) {
    std::int32_t const id = p.gmem_topk_ids[i];
    if (is_expert(p, id)) atomicAdd(&next[id], 1);
  }
  __syncthreads();
  auto const histogram = [&](int c) {
    return reinterpret_cast<std::int32_t*>(p.gmem_local + p.local.histogram(c));
  };
  // Replaces what each warp counted by what the warps before it have.
  for (int e = thread; e < experts; e += kThreads) {
    std::int32_t rows = 0;
    TESSERA_UNROLL
    for (int w = 0; w < kWarps; ++w) {
      std::int32_t const of_warp = smem.next[w][e];
      smem.next[w][e] = rows;
      rows += of_warp;
    }
    histogram(static_cast<int>(blockIdx.x))[e] = rows;
  }
  __syncthreads();
  bool reached = true;
  if (thread == 0) {
    arch::add_release_gpu(word_of(p.gmem_local, p.local.slices_counted(epoch)), 1);
    reached =
        Waiter(p, epoch).for_count(p.local.slices_counted(epoch), gridDim.x, Site::route_scan);
  }
  if (!all_reached(reached)) return false;
  // Sums over slices: the threads share the groups of four experts, and each has all of its loads in flight.
  int const slices = static_cast<int>(gridDim.x);
  int const fours = (experts + 3) / 4;
  int const parts = max(kThreads / fours, 1);
  for (int i = thread; i < fours * parts; i += kThreads) {
    int const four = i % fours;
    TokenSlice const part = token_slice(slices, i / fours, parts);
    std::int32_t before[4] = {}, total[4] = {};
    _Pragma("unroll 11")  // 132 slices by 12 parts, where experts are 128
        for (int c = part.begin; c < part.end; ++c) {
      int4 const of_slice = __ldcg(reinterpret_cast<int4 const*>(histogram(c)) + four);
      std::int32_t const rows[4] = {of_slice.x, of_slice.y, of_slice.z, of_slice.w};
      TESSERA_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (c < static_cast<int>(blockIdx.x)) before[j] += rows[j];
        total[j] += rows[j];
      }
    }
    TESSERA_UNROLL
    for (int j = 0; j < 4; ++j) {
      int const e = 4 * four + j;
      if (e >= experts) break;
      atomicAdd(&smem.begin[e], before[j]);
      atomicAdd(&smem.totals[e], total[j]);
    }
  }
  __syncthreads();
  for (int owner = warp; owner < p.shape.ranks; owner += kWarps) {
    int const first = owner * p.local_experts;
    exclusive_sums(
        p.local_experts, [&](int local) { return smem.totals[first + local]; },
        [&](int local, std::int32_t before) { smem.list_begin[first + local] = before; });
  }
  __syncthreads();
  return true;
}

// Adds the token's choices on the owner of `id` to the entry, for rows that cross once. The entry of the lowest expert,
// whose tasks come first, has the row pulled.
__device__ inline void join(ExchangeArguments const& p, std::int32_t id, int pair,
                            RouteEntry& entry) {
  int const choice = pair - p.token_of(pair) * p.shape.max_top_k;
  std::uint32_t choices = 0;
  int const first = p.owner(id) * p.local_experts;
  int added = 0;     // rows that are added up
  bool ends = true;  // this is the last of them
  for (int j = 0; j < p.shape.max_top_k; ++j) {
    std::int32_t const other = p.gmem_topk_ids[pair - choice + j];
    if (!is_expert(p, other) || p.owner(other) != p.owner(id)) continue;
    choices |= 1u << j;
    bool const is_before = other < id || (other == id && j < choice);
    if (is_before) ++entry.place;
    if (other - first >= p.partial_experts) continue;
    ++added;
    if (!is_before && j != choice) ends = false;
  }
  entry.ends_sum = id - first < p.partial_experts && ends && added > 1 ? 1 : 0;
  entry.choices = choices;
}

// Writes the slice's entries, one pair per lane at a time; pairs of one expert keep their order.
template <bool kWithScores, int kThreads>
__device__ void write_entries(ExchangeArguments const& p, RouteStorage<kThreads>& smem,
                              std::uint32_t epoch, TokenSlice slice) {
  int const warp = static_cast<int>(threadIdx.x) / arch::kWarpThreads;
  int const lane = arch::lane_idx();
  std::int32_t (&next)[kMaxExperts] = smem.next[warp];
  unsigned const earlier_lanes = (1u << lane) - 1;
  TokenSlice const pairs = pairs_of_warp(p, slice, warp, RouteStorage<kThreads>::kWarps);
  for (int first = pairs.begin; first < pairs.end; first += arch::kWarpThreads) {
    int const pair = first + lane;
    std::int32_t const id = pair < pairs.end ? p.gmem_topk_ids[pair] : -1;
    bool const routed = is_expert(p, id);
    unsigned const same = __match_any_sync(arch::kAllLanes, routed ? id : -1);
    std::int32_t const index =
        routed ? smem.begin[id] + next[id] + __popc(same & earlier_lanes) : 0;
    __syncwarp();
    if (routed && (same & earlier_lanes) == 0) next[id] += __popc(same);
    __syncwarp();
    if (routed) {
      RouteEntry entry = {.pair = static_cast<std::uint32_t>(pair)};
      if constexpr (kWithScores) entry.score = p.gmem_scores[pair];
      Peer const owner = peer_of(p, p.owner(id));
      if (p.shape.rows_cross_once()) {
        join(p, id, pair, entry);
        PairPlace const at = {id - p.owner(id) * p.local_experts, index};
        float const score = p.shape.transfer == Transfer::partial_combine ? p.gmem_scores[pair] : 0;
        std::int64_t const placed = p.window.placed_pair(parity(epoch), p.rank, pair);
        *reinterpret_cast<uint2*>(owner.store_if_local<OtherWay::kStaged>(placed)) =
            make_uint2(at.word(), __float_as_uint(score));
      }
      std::int64_t const place = smem.list_begin[id] + index;
      std::int64_t const listed = p.window.list_entry(parity(epoch), p.rank, place);
      *reinterpret_cast<uint4*>(owner.store_if_local<OtherWay::kStaged>(listed)) =
          *reinterpret_cast<uint4 const*>(&entry);
      *pair_word(p, pair) = static_cast<std::uint32_t>(index);
    }
  }
}

template <int kThreads>
__device__ void send_counts(ExchangeArguments const& p, RouteStorage<kThreads> const& smem,
                            std::uint32_t epoch) {
  for (int r = static_cast<int>(blockIdx.x); r < p.shape.ranks; r += static_cast<int>(gridDim.x)) {
    for (int e = static_cast<int>(threadIdx.x); e < p.shape.experts; e += kThreads) {
      peer_of(p, r).signal(p.window.count_word(parity(epoch), p.rank, e),
                           CountWord{smem.totals[e], epoch}.word());
    }
  }
}

// One thread counts its CTA, all of which has written its entries. The thread of the last CTA signals to the owners
// that all are there; its fence covers the entries of all CTAs that have counted. Returns true in the last one.
__device__ inline bool publish_entries(ExchangeArguments const& p, std::uint32_t epoch) {
  std::uint32_t const before =
      arch::count_acq_rel_gpu(word_of(p.gmem_local, p.local.slices_written(epoch)), 1);
  if (before + 1 != gridDim.x) return false;
  arch::fence_acq_rel_sys();
  for (int r = 0; r < p.shape.ranks; ++r) {
    peer_of(p, r).signal(p.window.publish_word(p.rank), epoch);
  }
  return true;
}

// Does what make_plan and make_list_begins of plan.hpp do, from smem.counts. All warps call it; each does a part.
template <int kThreads>
__device__ void plan_by_warps(ExchangeArguments const& p, RouteStorage<kThreads>& smem) {
  CountMatrix const counts{smem.counts, p.shape.experts};
  int const local_experts = p.local_experts;
  for (int part = static_cast<int>(threadIdx.x) / arch::kWarpThreads; part < 2 * p.shape.ranks;
       part += RouteStorage<kThreads>::kWarps) {
    int const rank = part / 2;
    int const first = rank * local_experts;
    if (part % 2 == 0) {  // the plan of this owner
      ExpertPlan ahead = {};
      for (int group = 0; group < local_experts; group += arch::kWarpThreads) {
        int const local = group + arch::lane_idx();
        bool const has_expert = local < local_experts;
        std::int32_t const rows = has_expert ? rows_of(p.shape, counts, first + local) : 0;
        std::int32_t const blocks = blocks_of(p.shape, rows);
        std::int32_t const units = units_of(blocks);
        // Returns what the experts before this one have; ahead grows by what this group has.
        auto const first_of = [](std::int32_t own, std::int32_t& ahead) {
          std::int32_t const sum = cuda::warp::inclusive_sum(own);
          std::int32_t const before = ahead + sum - own;
          ahead += __shfl_sync(arch::kAllLanes, sum, arch::kWarpThreads - 1);
          return before;
        };
        ExpertPlan const plan = {rows, first_of(rows, ahead.first_row),
                                 first_of(blocks, ahead.first_block),
                                 first_of(units, ahead.first_unit)};
        if (has_expert) smem.plan[first + local] = plan;
      }
    } else {  // the list of this source
      exclusive_sums(
          local_experts, [&](int local) { return counts.at(rank, p.rank * local_experts + local); },
          [&](int local, std::int32_t before) { smem.list_begin[first + local] = before; });
    }
  }
}

// kWithScores: entries carry the scores of their pairs.
template <bool kWithScores = false, int kThreads, class Beside, class Published>
__device__ bool route_and_plan(ExchangeArguments const& p, RouteStorage<kThreads>& smem,
                               std::uint32_t epoch, Beside&& beside, Published published) {
  TokenSlice const slice =
      token_slice(p.tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  int const thread = static_cast<int>(threadIdx.x);
  bool const scanned = scan(p, smem, epoch, slice);
  if (scanned) {
    send_counts(p, smem, epoch);
    write_entries<kWithScores>(p, smem, epoch, slice);
  }
  if (thread / arch::kWarpThreads == kBesideWarp<kThreads>) beside.finish();
  if (!scanned) return false;
  __syncthreads();
  if (thread == kThreads - 1 && publish_entries(p, epoch)) published();
  __syncwarp();
  bool reached = true;
  for (int i = thread; i < p.shape.ranks * p.shape.experts && reached; i += kThreads) {
    reached = Waiter(p, epoch).for_rows(i / p.shape.experts, i % p.shape.experts, smem.counts[i]);
  }
  if (!all_reached(reached)) return false;
  plan_by_warps(p, smem);
  __syncthreads();
  return true;
}

}  // namespace tessera::expert_parallel
