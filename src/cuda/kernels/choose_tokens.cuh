// SPDX-License-Identifier: Apache-2.0
// choose_tokens: expert e keeps its m_e pairs (token, e) of highest rank; slots by token, then expert.
//   token rounding  m_e by core/token_rounding.hpp; members of the top-k choice rank above others
//   expert choice   m_e = capacity, no members: pairs rank by p
// Shapes   logits (T,E) fp32, ranks (E,T); ids, scores (P), token_offsets (T+1)
// Work     reads 4TE of logits, writes 4TE of ranks and reads them four times, out of L2 where they fit; writes 8P + 4T
// Schedule kernels in the stream's order, choose_tokens_..
//   rank   a warp per token, 32 tokens a CTA: p of all experts, then the members' scores; transposed through shared
//          memory, so that an expert's ranks lie side by side
//   keep   a CTA per expert, its ranks in shared memory up to T = 49152: counts members and others; the rule gives m_e;
//          the last rank that stays is found bit by bit among the few that the threads' best ones leave in question;
//          what ranks below becomes 0. Equal ranks go to lower tokens. balance_f, whose rule runs over the experts:
//          counts and cuts in two launches, .._round between them
//   count  a CTA per 32 tokens: a lane has a token, a warp a part of the experts
//   scan   one CTA: slots of earlier blocks
//   emit   as count, with the slots' places; fills what is left of P
// Numerics ranks: fp32, compiled without contraction, sums fold 32 lanes by halves: the bits of the CPU; all else
//          integers, atomics only where their order does not matter; bitwise repeatable: yes, the order of pairs is
//          total
// Requires groups <= 32
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../block/fold.cuh"
#include "../host/choose_tokens.hpp"
#include "../host/launch.hpp"
#include "core/router_math.hpp"
#include "core/token_rounding.hpp"

namespace tessera::cuda {

struct ChooseTokensConfig {
  static constexpr int kBlockWarps = 8;  // of rank, count and emit
  static constexpr int kMostStaged =
      1024;  // experts whose ranks of 32 tokens pass through shared memory
  static constexpr int kThreads = 512;       // of keep
  static constexpr int kMostTokens = 49152;  // whose ranks of an expert lie in its shared memory
  static constexpr int kMostCandidates = 2048;
  static constexpr int kScanThreads = 1024;
  static constexpr int kMaxGroups = arch::kWarpThreads;
};

// Regions of the workspace.
struct ChoiceWorkspace {
  core::ExpertPairs* gmem_pairs;  // (E)
  uint32_t* gmem_ranks;           // (E,T); 0: not kept
  int32_t* gmem_block_slots;  // (blocks+1): of each block, then their exclusive sums and the total

  __device__ static ChoiceWorkspace of(ChooseTokensArguments const& p) {
    auto* const pairs = static_cast<core::ExpertPairs*>(p.gmem_workspace);
    auto* const ranks = reinterpret_cast<uint32_t*>(pairs + p.experts);
    return {pairs, ranks, reinterpret_cast<int32_t*>(ranks + p.tokens * p.experts)};
  }
};

// A warp's token: its ranks go to `column`, E values `stride` apart.
struct RankedToken {
  ChooseTokensArguments const& p;
  int64_t token;
  uint32_t* column;
  int64_t stride;

  __device__ float const* gmem_logits() const { return p.gmem_logits + token * p.experts; }
  __device__ int32_t member(int k) const { return p.gmem_topk_ids[token * p.top_k + k]; }
  // visit(e) for the experts of this lane, of `count` from the first one on.
  template <class Visit>
  __device__ static void for_each(int count, Visit&& visit) {
    for (int i = arch::lane_idx(); i < count; i += arch::kWarpThreads) visit(i);
  }

  // The groups that the token keeps, as bits: the largest sums of two largest keys, ties to the lower group.
  __device__ uint32_t kept_groups() const {
    if (p.router.kind != RouterKind::group_limited || p.gmem_topk_ids == nullptr) return ~0u;
    int const size = p.experts / p.groups, own = arch::lane_idx();
    uint32_t first = 0, second = 0;
    for (int i = 0; own < p.groups && i < size; ++i) {
      int const e = own * size + i;
      float const bias = p.gmem_selection_bias != nullptr ? p.gmem_selection_bias[e] : 0.0f;
      float const value = core::own_p(p.router.kind, gmem_logits()[e]);
      uint32_t const key = core::ordered_key(value + bias);
      second = max(second, min(first, key));
      first = max(first, key);
    }
    float sum = core::key_value(first);
    if (size > 1) sum += core::key_value(second);
    uint32_t const key = own < p.groups ? core::ordered_key(sum) : 0;
    int before = 0;
    for (int g = 0; g < p.groups; ++g) {
      uint32_t const other = __shfl_sync(block::kWholeWarp, key, g);
      before += other > key || (other == key && g < own) ? 1 : 0;
    }
    return __ballot_sync(block::kWholeWarp, own < p.groups && before < p.top_groups);
  }

  // p of every expert; with one of its own, divided by what divides the members'.
  __device__ void rank_others() const {
    RouterKind const kind = p.router.kind;
    bool const own_p = core::has_own_p(kind);
    float sum = 1, largest = 0;
    if (!own_p) {
      uint32_t key = 0;
      for_each(p.experts, [&](int e) { key = max(key, core::ordered_key(gmem_logits()[e])); });
      largest = core::key_value(__reduce_max_sync(block::kWholeWarp, key));
      float partial = 0;
      for_each(p.experts, [&](int e) { partial += core::exp_fp32(gmem_logits()[e] - largest); });
      sum = block::fold_sum<arch::kWarpThreads>(partial);
    } else if (p.router.normalize_scores) {
      float partial = 0;
      for_each(p.top_k, [&](int k) { partial += core::own_p(kind, gmem_logits()[member(k)]); });
      sum = block::fold_sum<arch::kWarpThreads>(partial) + core::kNormalizeFloor;
    }
    uint32_t const kept = kept_groups();
    int const size = kind == RouterKind::group_limited ? p.experts / p.groups : p.experts;
    for_each(p.experts, [&](int e) {
      float const logit = gmem_logits()[e];
      float const term = own_p ? core::own_p(kind, logit) : core::exp_fp32(logit - largest);
      bool const eligible = (kept >> e / size & 1) != 0;
      column[e * stride] = eligible ? core::pair_rank(false, term / sum) : 0;
    });
  }

  __device__ void rank() const {
    rank_others();
    if (p.gmem_topk_ids == nullptr) return;
    __syncwarp();
    for_each(p.top_k, [&](int k) {
      float const score = p.gmem_member_scores[token * p.top_k + k];
      column[member(k) * stride] = core::pair_rank(true, score);
    });
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kBlockWarps* arch::kWarpThreads)
    choose_tokens_rank(__grid_constant__ ChooseTokensArguments const p) {
  constexpr int kPitch = kChoiceBlockTokens + 1;  // of shared memory
  extern __shared__ uint32_t smem_ranks[];        // (E, kPitch)
  uint32_t* const gmem_ranks = ChoiceWorkspace::of(p).gmem_ranks;
  int64_t const first = int64_t{blockIdx.x} * kChoiceBlockTokens;
  bool const staged = p.experts <= Config::kMostStaged;
  for (int i = arch::warp_idx(); i < kChoiceBlockTokens; i += Config::kBlockWarps) {
    int64_t const token = first + i;
    if (token >= p.tokens) break;
    if (staged) {
      RankedToken{p, token, smem_ranks + i, kPitch}.rank();
    } else {
      RankedToken{p, token, gmem_ranks + token, p.tokens}.rank();
    }
  }
  if (!staged) return;
  __syncthreads();
  int64_t const token = first + arch::lane_idx();
  for (int e = arch::warp_idx(); e < p.experts && token < p.tokens; e += Config::kBlockWarps) {
    gmem_ranks[e * p.tokens + token] = smem_ranks[e * kPitch + arch::lane_idx()];
  }
}

// The ranks of one expert: brought to shared memory where they fit; thread i looks at tokens i, i + kThreads, ...
template <class Config>
class ExpertColumn {
 public:
  // No barrier: a thread reads what it has brought itself.
  __device__ ExpertColumn(ChooseTokensArguments const& p, int expert, uint32_t* smem)
      : gmem_(ChoiceWorkspace::of(p).gmem_ranks + expert * p.tokens),
        ranks_(p.tokens <= Config::kMostTokens ? smem : gmem_),
        tokens_(p.tokens) {
    if (ranks_ == gmem_) return;
    for (int64_t t = threadIdx.x; t < tokens_; t += Config::kThreads) smem[t] = gmem_[t];
  }

  // Sum over the CTA of map(rank), which is 0 for rank 0; every thread gets it.
  template <class Value, class Map>
  __device__ Value sum(Map&& map) {
    Value own = 0;
    for_each([&](int64_t, uint32_t rank) { own += map(rank); });
    return add_up(own);
  }

  // The rank of the `count`-th best of a class, 0 < count <= its size. Where every thread's best one is enough to tell
  // that few ranks can come before it, only those are searched.
  __device__ uint32_t last_of(bool members, int64_t count) {
    auto const in_class = [members](uint32_t rank) {
      return rank != 0 && core::is_member(rank) == members;
    };
    uint32_t best = 0;
    for_each([&](int64_t, uint32_t rank) { best = in_class(rank) ? max(best, rank) : best; });
    // As many threads as `count` have a rank at or above it, or it is below all.
    uint32_t const least = search(
        members, count, [&](uint32_t candidate) { return __syncthreads_count(best >= candidate); });
    __shared__ uint32_t smem_ranks[Config::kMostCandidates];
    __shared__ int smem_size;
    if (threadIdx.x == 0) smem_size = 0;
    __syncthreads();
    for_each([&](int64_t, uint32_t rank) {
      if (!in_class(rank) || rank < least) return;
      int const at = atomicAdd(&smem_size, 1);  // their order does not matter
      if (at < Config::kMostCandidates) smem_ranks[at] = rank;
    });
    __syncthreads();
    int const size = smem_size;
    bool const fits = size <= Config::kMostCandidates;
    uint32_t const* const ranks = fits ? smem_ranks : ranks_;
    int64_t const end = fits ? size : tokens_;
    return search(members, count, [&](uint32_t candidate) {
      int own = 0;
      for (int64_t i = threadIdx.x; i < end; i += Config::kThreads) {
        own += in_class(ranks[i]) && ranks[i] >= candidate ? 1 : 0;
      }
      return add_up(own);
    });
  }

  // Fixed-point scores of the `count` best of a class.
  __device__ uint64_t sum_of_best(bool members, int64_t count) {
    if (count == 0) return 0;
    uint32_t const last = last_of(members, count);
    auto const better = [&](uint32_t rank) {
      return core::is_member(rank) == members && rank > last;
    };
    auto const above = sum<int>([&](uint32_t rank) { return better(rank) ? 1 : 0; });
    uint64_t const scores = sum<uint64_t>([&](uint32_t rank) {
      return better(rank) ? core::fixed_point_score(core::score_of_rank(rank)) : uint64_t{0};
    });
    auto const equal = static_cast<uint64_t>(count - above);
    return scores + equal * core::fixed_point_score(core::score_of_rank(last));
  }

  // Clears all ranks but the `count` best.
  __device__ void keep_best(int64_t count, int64_t members, int64_t eligible) {
    // Members rank first: only one of the two classes is cut.
    bool const cuts_members = count < members;
    int64_t const of_class = cuts_members ? count : count - members;
    if (!cuts_members && of_class >= eligible) return;
    uint32_t const least = of_class > 0 ? last_of(cuts_members, of_class) : UINT32_MAX;
    auto const above = [&](uint32_t rank) {
      return rank > least || (!cuts_members && core::is_member(rank));
    };
    int64_t const open =  // for ranks equal to `least`
        count - sum<int>([&](uint32_t rank) { return above(rank) ? 1 : 0; });
    auto const equal = sum<int>([&](uint32_t rank) { return rank == least ? 1 : 0; });
    if (open >= equal) {
      for_each([&](int64_t t, uint32_t rank) {
        if (rank != 0 && rank != least && !above(rank)) gmem_[t] = 0;
      });
      return;
    }
    int64_t taken = 0;  // of them, by lower tokens
    for (int64_t round = 0; round < tokens_; round += Config::kThreads) {
      int64_t const t = round + threadIdx.x;
      uint32_t const rank = t < tokens_ ? ranks_[t] : 0;
      bool const ties = rank == least;
      int in_round;
      int64_t const before = taken + count_before(ties, in_round);
      taken += in_round;
      if (rank != 0 && !above(rank) && !(ties && before < open)) gmem_[t] = 0;
    }
  }

 private:
  static constexpr int kWarps = Config::kThreads / arch::kWarpThreads;

  // visit(token, rank) for this thread's.
  template <class Visit>
  __device__ void for_each(Visit&& visit) const {
#pragma unroll 4
    for (int64_t t = threadIdx.x; t < tokens_; t += Config::kThreads) visit(t, ranks_[t]);
  }

  // The largest value of a class that `count` of its ranks reach: every bit is set that leaves as many.
  template <class Reach>
  __device__ static uint32_t search(bool members, int64_t count, Reach&& reach) {
    uint32_t last = members ? 1u << 31 : 0;
    for (int bit = 30; bit >= 0; --bit) {
      uint32_t const candidate = last | 1u << bit;
      if (reach(candidate) >= count) last = candidate;
    }
    return last;
  }

  // Two rows of sums in turn, so that one barrier is enough.
  template <class Value>
  __device__ Value add_up(Value own) {
    __shared__ Value smem_sums[2][kWarps];
    if constexpr (sizeof(Value) == 4) {
      own = __reduce_add_sync(block::kWholeWarp, own);
    } else {
      TESSERA_UNROLL
      for (int half = arch::kWarpThreads / 2; half > 0; half /= 2) {
        own += __shfl_xor_sync(block::kWholeWarp, own, half);
      }
    }
    turn_ ^= 1;
    if (arch::lane_idx() == 0) smem_sums[turn_][threadIdx.x / arch::kWarpThreads] = own;
    __syncthreads();
    Value all = 0;
    TESSERA_UNROLL
    for (int w = 0; w < kWarps; ++w) all += smem_sums[turn_][w];
    return all;
  }

  // How many threads before this one have the flag, and how many in all.
  __device__ static int count_before(bool flag, int& all) {
    __shared__ int smem_counts[kWarps];
    uint32_t const ballot = __ballot_sync(block::kWholeWarp, flag);
    int const warp = static_cast<int>(threadIdx.x) / arch::kWarpThreads;
    __syncthreads();
    if (arch::lane_idx() == 0) smem_counts[warp] = __popc(ballot);
    __syncthreads();
    int before = __popc(ballot & ((1u << arch::lane_idx()) - 1));
    all = 0;
    TESSERA_UNROLL
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? smem_counts[w] : 0;
      all += smem_counts[w];
    }
    return before;
  }

  uint32_t* gmem_;
  uint32_t const* ranks_;
  int64_t tokens_;
  int turn_ = 0;
};

enum class ChoiceStep { count, cut, both };

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    choose_tokens_keep(__grid_constant__ ChooseTokensArguments const p, ChoiceStep const step) {
  auto const expert = static_cast<int>(blockIdx.x);
  core::ExpertPairs& gmem_pairs = ChoiceWorkspace::of(p).gmem_pairs[expert];
  extern __shared__ uint32_t smem_column[];
  ExpertColumn<Config> column(p, expert, smem_column);
  core::ExpertPairs pairs;
  if (step == ChoiceStep::cut) {
    pairs = gmem_pairs;
  } else {
    pairs.members =
        column.template sum<int>([](uint32_t rank) { return core::is_member(rank) ? 1 : 0; });
    pairs.eligible = column.template sum<int>(
        [](uint32_t rank) { return rank != 0 && !core::is_member(rank) ? 1 : 0; });
    int64_t const rem =
        p.router.round == Rounding::nr_s ? core::beyond_tile(pairs.members, p.router.tile) : 0;
    if (rem != 0) {
      pairs.weakest =
          column.sum_of_best(true, pairs.members) - column.sum_of_best(true, pairs.members - rem);
      pairs.best = column.sum_of_best(false, min(p.router.tile - rem, pairs.eligible));
    }
    pairs.takes =
        p.gmem_topk_ids == nullptr ? p.capacity : core::rounded_count(p.router, expert, pairs, 0);
    if (threadIdx.x == 0 && p.gmem_topk_counts != nullptr) {
      p.gmem_topk_counts[expert] = static_cast<int32_t>(pairs.members);
    }
    if (step == ChoiceStep::count) {
      if (threadIdx.x == 0) gmem_pairs = pairs;
      return;
    }
  }
  column.keep_best(pairs.takes, pairs.members, pairs.eligible);
}

// One thread decides, as each answer depends on those of all experts before it; the others bring the experts near.
template <class Config>
__global__ void __launch_bounds__(Config::kScanThreads)
    choose_tokens_round(__grid_constant__ ChooseTokensArguments const p) {
  __shared__ core::ExpertPairs smem_pairs[Config::kScanThreads];
  core::ExpertPairs* const gmem_pairs = ChoiceWorkspace::of(p).gmem_pairs;
  int64_t carry = 0;
  for (int base = 0; base < p.experts; base += Config::kScanThreads) {
    int const own = static_cast<int>(threadIdx.x),
              count = min(p.experts - base, Config::kScanThreads);
    if (own < count) smem_pairs[own] = gmem_pairs[base + own];
    __syncthreads();
    for (int e = 0; own == 0 && e < count; ++e) {
      smem_pairs[e].takes = core::rounded_count(p.router, base + e, smem_pairs[e], carry);
      carry += smem_pairs[e].takes - smem_pairs[e].members;
    }
    __syncthreads();
    if (own < count) gmem_pairs[base + own].takes = smem_pairs[own].takes;
  }
}

// A lane's token and the experts of its warp.
template <class Config>
struct ChoicePart {
  int64_t token;
  int first, end;  // experts
  uint32_t const* gmem_ranks;
  int64_t tokens;

  __device__ explicit ChoicePart(ChooseTokensArguments const& p)
      : token(int64_t{blockIdx.x} * kChoiceBlockTokens + arch::lane_idx()),
        gmem_ranks(ChoiceWorkspace::of(p).gmem_ranks + token),
        tokens(p.tokens) {
    int const part = (p.experts + Config::kBlockWarps - 1) / Config::kBlockWarps;
    first = min(arch::warp_idx() * part, p.experts);
    end = token < p.tokens ? min(first + part, p.experts) : first;
  }
  // visit(e, rank) for the kept pairs, experts ascending.
  template <class Visit>
  __device__ void for_each(Visit&& visit) const {
    constexpr int kAhead = 8;
    for (int base = first; base < end; base += kAhead) {
      uint32_t ranks[kAhead];
      TESSERA_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        ranks[i] = base + i < end ? gmem_ranks[(base + i) * tokens] : 0;
      }
      TESSERA_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (ranks[i] != 0) visit(base + i, ranks[i]);
      }
    }
  }
  __device__ int count() const {
    int kept = 0;
    for_each([&](int, uint32_t) { ++kept; });
    return kept;
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kBlockWarps* arch::kWarpThreads)
    choose_tokens_count(__grid_constant__ ChooseTokensArguments const p) {
  __shared__ int smem_counts[Config::kBlockWarps];
  int const own = __reduce_add_sync(block::kWholeWarp, ChoicePart<Config>(p).count());
  int const warp = arch::warp_idx();
  if (arch::lane_idx() == 0) smem_counts[warp] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int all = 0;
  for (int const count : smem_counts) all += count;
  ChoiceWorkspace::of(p).gmem_block_slots[blockIdx.x] = all;
}

// The sum of `own` over the lanes up to this one.
__device__ inline int inclusive_sum(int own) {
  TESSERA_UNROLL
  for (int step = 1; step < arch::kWarpThreads; step *= 2) {
    int const left = __shfl_up_sync(block::kWholeWarp, own, step);
    if (arch::lane_idx() >= step) own += left;
  }
  return own;
}

// kScanThreads blocks at a time.
template <class Config>
__global__ void __launch_bounds__(Config::kScanThreads)
    choose_tokens_scan(__grid_constant__ ChooseTokensArguments const p) {
  constexpr int kWarps = Config::kScanThreads / arch::kWarpThreads;
  static_assert(kWarps == arch::kWarpThreads, "a lane per warp");
  __shared__ int smem_sums[kWarps];
  int32_t* const gmem_block_slots = ChoiceWorkspace::of(p).gmem_block_slots;
  int64_t const blocks = choice_blocks(p.tokens);
  int const warp = arch::warp_idx();
  int carry = 0;
  for (int64_t base = 0; base < blocks; base += Config::kScanThreads) {
    int64_t const b = base + threadIdx.x;
    int const own = b < blocks ? gmem_block_slots[b] : 0;
    int const up_to = inclusive_sum(own);
    if (arch::lane_idx() == arch::kWarpThreads - 1) smem_sums[warp] = up_to;
    __syncthreads();
    int const of_warps = inclusive_sum(smem_sums[arch::lane_idx()]);
    int const earlier = __shfl_sync(block::kWholeWarp, of_warps, max(warp - 1, 0));
    if (b < blocks) gmem_block_slots[b] = carry + (warp > 0 ? earlier : 0) + up_to - own;
    carry += __shfl_sync(block::kWholeWarp, of_warps, kWarps - 1);
    __syncthreads();
  }
  if (threadIdx.x == 0) gmem_block_slots[blocks] = carry;
}

template <class Config>
__global__ void __launch_bounds__(Config::kBlockWarps* arch::kWarpThreads)
    choose_tokens_emit(__grid_constant__ ChooseTokensArguments const p) {
  __shared__ int smem_counts[Config::kBlockWarps][kChoiceBlockTokens];
  int32_t const* const gmem_block_slots = ChoiceWorkspace::of(p).gmem_block_slots;
  ChoicePart<Config> const part(p);
  int const warp = arch::warp_idx(), lane = arch::lane_idx();
  smem_counts[warp][lane] = part.count();
  __syncthreads();
  int of_token = 0, before = 0;
  TESSERA_UNROLL
  for (int w = 0; w < Config::kBlockWarps; ++w) {
    before += w < warp ? smem_counts[w][lane] : 0;
    of_token += smem_counts[w][lane];
  }
  int const end = gmem_block_slots[blockIdx.x] + inclusive_sum(of_token);
  if (warp == 0 && part.token < p.tokens) p.gmem_token_offsets[part.token + 1] = end;
  if (blockIdx.x == 0 && threadIdx.x == 0) p.gmem_token_offsets[0] = 0;
  int64_t slot = end - of_token + before;
  part.for_each([&](int e, uint32_t rank) {
    p.gmem_ids[slot] = e;
    p.gmem_scores[slot] = p.router.route_scale * core::score_of_rank(rank);
    ++slot;
  });
  int64_t const used = gmem_block_slots[choice_blocks(p.tokens)];
  int64_t const step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = used + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < p.slots; i += step) {
    p.gmem_ids[i] = -1;
    p.gmem_scores[i] = 0;
  }
}

template <class Config>
cudaError_t launch_choice(ChooseTokensArguments const& args, cudaStream_t stream) {
  cudaError_t const error =
      host::allow_shared_memory<choose_tokens_keep<Config>>(4 * Config::kMostTokens);
  if (error != cudaSuccess) return error;
  auto const experts = static_cast<unsigned>(args.experts);
  size_t const smem_bytes =
      args.tokens <= Config::kMostTokens ? 4 * static_cast<size_t>(args.tokens) : 0;
  auto const launch = [&](ChoiceStep step) {
    choose_tokens_keep<Config><<<experts, Config::kThreads, smem_bytes, stream>>>(args, step);
  };
  if (args.router.round == Rounding::balance_f) {
    launch(ChoiceStep::count);
    choose_tokens_round<Config><<<1, Config::kScanThreads, 0, stream>>>(args);
    launch(ChoiceStep::cut);
  } else {
    launch(ChoiceStep::both);
  }
  return cudaGetLastError();
}

template <class Config>
cudaError_t launch_choose_tokens_config(ChooseTokensArguments const& args, cudaStream_t stream) {
  if (args.groups > Config::kMaxGroups || args.slots > INT32_MAX || args.experts < 1) {
    return cudaErrorInvalidValue;
  }
  constexpr int kBlockThreads = Config::kBlockWarps * arch::kWarpThreads;
  constexpr int kMostShared = Config::kMostStaged * (kChoiceBlockTokens + 1) * 4;
  cudaError_t error = host::allow_shared_memory<choose_tokens_rank<Config>>(kMostShared);
  if (error != cudaSuccess) return error;
  // Without tokens one block still writes the first offset and the counts.
  auto const blocks = static_cast<unsigned>(choice_blocks(args.tokens > 0 ? args.tokens : 1));
  int const staged = args.experts <= Config::kMostStaged ? args.experts : 0;
  auto const smem_bytes = static_cast<size_t>(staged) * (kChoiceBlockTokens + 1) * 4;
  choose_tokens_rank<Config><<<blocks, kBlockThreads, smem_bytes, stream>>>(args);
  error = launch_choice<Config>(args, stream);
  if (error != cudaSuccess) return error;
  choose_tokens_count<Config><<<blocks, kBlockThreads, 0, stream>>>(args);
  choose_tokens_scan<Config><<<1, Config::kScanThreads, 0, stream>>>(args);
  choose_tokens_emit<Config><<<blocks, kBlockThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda
