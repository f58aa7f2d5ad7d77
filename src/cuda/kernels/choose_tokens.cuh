// SPDX-License-Identifier: Apache-2.0
// choose_tokens: expert e keeps its m_e pairs (token, e) of highest rank; slots by token, then expert.
//   token rounding  m_e by core/token_rounding.hpp; members of the top-k choice rank above others
//   expert choice   m_e = capacity, or an even share of the slots of all real tokens, no members: pairs rank by p
// Shapes   ranks (E,T), their ends in each block of 32 tokens and blocks' counts of slots, as rank_pairs or
//          route_and_rank leaves them; ids, scores (P), token_offsets (T+1), and where the call wants them the routing
//          tables
// Work     reads TE of ends and the ranks of few blocks, out of L2 where they fit, writes a bit of each pair; then that
//          of choose_tokens_emit.cuh
// Schedule kernels in the stream's order, choose_tokens_..
//   keep   a CTA per expert: counts members and others; the rule gives m_e; the last pair that stays is found from the
//          end of its class that is nearer, among the few that the nearest ranks of blocks leave in question, each
//          compared with all, or bit by bit among all ranks, in shared memory where they fit. It is the expert's cut,
//          and what it drops and adds moves the blocks' counts. Leaves which tokens of each 32 stay, and how many do
//          ahead of them. balance_f, whose rule runs over the experts: counts and cuts in two launches, .._round
//          between them
//   scan   one CTA adds up the slots of earlier blocks, with tables another one the rows of earlier experts; only where
//          they are so many that emit does not add them up itself
//   emit   kernels/choose_tokens_emit.cuh
//          All start while the kernel ahead of them ends, and wait before they read
// Numerics integers, atomics only where their order does not matter; bitwise repeatable: yes, the order of pairs is
//          total
// Requires E <= kMaxChoosingExperts
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/signal.cuh"
#include "../arch/static_shared.cuh"
#include "../arch/warp.cuh"
#include "../host/choose_tokens.hpp"
#include "../host/kernel_limits.hpp"
#include "../host/launch.hpp"
#include "../warp/sums.cuh"
#include "core/token_rounding.hpp"

namespace tessera::cuda {

struct ChooseTokensConfig {
  static constexpr int kThreads = 512;  // of keep
  static constexpr int kCtas = 2;       // of keep on an SM, where their ranks fit
  static constexpr int kMaxWideExperts =
      132;  // that have CTAs of twice the threads: no more than H100 and H200 have SMs
  static constexpr int kMaxTokens = 49152;  // whose ranks of an expert lie in its shared memory
  static constexpr int kAhead = 16;         // ranks of a thread that are on their way at once
  static constexpr int kScanThreads = 1024;
};

// Keep has this where every expert has an SM to itself.
template <class Config>
struct WideKeep : Config {
  static constexpr int kThreads = 2 * Config::kThreads;
  static constexpr int kCtas = 1;
  static constexpr int kAhead = Config::kAhead / 2;
};

// An end of a class, which is the members of an expert or its other eligible tokens. Keys order the pairs of the class,
// larger the nearer to the end.
struct ClassEnd {
  bool members, worst;

  __device__ bool has(uint32_t rank) const { return rank != 0 && core::is_member(rank) == members; }
  __device__ uint32_t key(uint32_t rank) const { return worst ? rank ^ 0x7fffffffu : rank; }
  // Its own inverse.
  __device__ uint64_t key(uint64_t order) const {
    return worst ? order ^ (~uint64_t{0} >> 1) : order;
  }
  // The key of the rank nearest to the end among some, 0 where there is none. Nobody asks for the best members.
  __device__ uint32_t nearest(BlockRanks const& ranks) const {
    if ((members ? ranks.members : ranks.others) == 0) return 0;
    return members ? key(ranks.worst_member) : key(worst ? ranks.worst_other : ranks.best_other);
  }
  // Below all keys of the class.
  template <class Key>
  __device__ Key least_key() const {
    return members ? Key{1} << (8 * sizeof(Key) - 1) : Key{0};
  }
};

// The ranks of one expert by their blocks, of which thread i looks at blocks i, i + kThreads, ..; and a word of bits
// for each block, of the tokens that stay: members first, and a change for each pair that is dropped or added. Where an
// answer needs more than some blocks, all ranks are brought to shared memory, if they fit.
template <class Config>
class ExpertColumn {
 public:
  static constexpr int kWords = Config::kMaxTokens / kChoiceBlockTokens;

  // smem_ranks, (kMaxTokens) or null, is not used where there are more tokens; smem_words, (kWords).
  __device__ ExpertColumn(ChooseTokensArguments const& p, int expert, uint32_t* smem_ranks,
                          uint32_t* smem_words)
      : gmem_(ChoiceWorkspace::of(p).gmem_ranks + expert * p.tokens),
        ranks_(gmem_),
        smem_ranks_(smem_ranks),
        tokens_(static_cast<int>(p.tokens)),
        blocks_(static_cast<int>(choice_blocks(p.tokens))),
        gmem_blocks_(ChoiceWorkspace::of(p).gmem_block_ranks + int64_t{expert} * blocks_),
        gmem_kept_(ChoiceWorkspace::of(p).gmem_kept + int64_t{expert} * blocks_),
        smem_words_(smem_words),
        words_(fits() ? smem_words : reinterpret_cast<uint32_t*>(gmem_kept_) + blocks_) {
    for (int b = int(threadIdx.x); b < blocks_; b += Config::kThreads) {
      BlockRanks const block = gmem_blocks_[b];
      words_[b] = block.members;
      own_.members |= block.members;
      own_.others |= block.others;
      own_members_ += __popc(block.members);
      own_others_ += __popc(block.others);
      own_.worst_member = min(own_.worst_member, block.worst_member);
      own_.best_other = max(own_.best_other, block.best_other);
      own_.worst_other = min(own_.worst_other, block.worst_other);
    }
    __syncthreads();
  }

  __device__ int members() { return add_up(own_members_); }
  __device__ int eligible() { return add_up(own_others_); }

  // visit(order) for this thread's of the n pairs nearest to an end, 0 < n <= the class's size; returns a key that
  // these n reach and no other. Where the nearest ranks of threads' blocks already show that few pairs can be among
  // them, only those are searched, one a thread.
  template <class Visit>
  __device__ uint64_t for_each_nearest(ClassEnd const& end, int n, Visit&& visit) {
    uint32_t const own = end.nearest(own_);
    // As many threads as n have a key at or above it, and not many more, or it is below all.
    uint32_t const bound = search<uint32_t>(
        end, n, 2 * n, [&](uint32_t key) { return __syncthreads_count(own >= key); });
    TESSERA_STATIC_SHARED(smem_keys, uint64_t[Config::kThreads]);
    TESSERA_STATIC_SHARED(smem_blocks, int[Config::kThreads]);
    TESSERA_STATIC_SHARED(smem_sizes, int[2]);  // of blocks with such pairs, and of their keys
    if (threadIdx.x < 2) smem_sizes[threadIdx.x] = 0;
    __syncthreads();
    auto const append = [&](int& smem_size, auto* smem_list, auto what) {
      int const at = atomicAdd(&smem_size, 1);  // their order does not matter
      if (at < Config::kThreads) smem_list[at] = what;
    };
    if (own >= bound) {
      for (int b = int(threadIdx.x); b < blocks_; b += Config::kThreads) {
        if (end.nearest(gmem_blocks_[b]) >= bound) append(smem_sizes[0], smem_blocks, b);
      }
    }
    __syncthreads();
    int const blocks = smem_sizes[0];
    auto const from_bound = [&](uint32_t rank) { return end.has(rank) && end.key(rank) >= bound; };
    if (blocks <= Config::kThreads) {
      int const lane = arch::lane_idx();
      for (int i = int(threadIdx.x) / arch::kWarpThreads; i < blocks; i += kWarps) {
        int const t = smem_blocks[i] * kChoiceBlockTokens + lane;
        uint32_t const rank = t < tokens_ ? ranks_[t] : 0;
        if (from_bound(rank)) append(smem_sizes[1], smem_keys, end.key(pair_order(rank, t)));
      }
    } else if (threadIdx.x == 0) {
      smem_sizes[1] = Config::kThreads + 1;
    }
    __syncthreads();
    int const size = smem_sizes[1];
    uint64_t least;
    if (size <= Config::kThreads) {
      least = nth_largest(smem_keys, size, n);
      uint64_t const key = int(threadIdx.x) < size ? smem_keys[threadIdx.x] : 0;
      if (key >= least) visit(end.key(key));
    } else {
      stage();
      auto const for_each_from_bound = [&](auto&& body) {
        for_each([&](int t, uint32_t rank) {
          if (from_bound(rank)) body(end.key(pair_order(rank, t)));
        });
      };
      least = search<uint64_t>(end, n, n, [&](uint64_t other) {
        int reached = 0;
        for_each_from_bound([&](uint64_t key) { reached += key >= other ? 1 : 0; });
        return add_up(reached);
      });
      for_each_from_bound([&](uint64_t key) {
        if (key >= least) visit(end.key(key));
      });
    }
    return max(least, uint64_t{bound} << 32);  // what is below the bound was not counted
  }

  // Fixed-point scores of the n pairs nearest to an end.
  __device__ uint64_t sum_of_nearest(ClassEnd const& end, int n) {
    if (n == 0) return 0;
    uint64_t own = 0;
    for_each_nearest(end, n, [&](uint64_t order) {
      own += core::fixed_point_score(core::score_of_rank(static_cast<uint32_t>(order >> 32)));
    });
    return add_up(own);
  }

  // Leaves the bits of the `count` best; moves the blocks' slots, which are those of all members.
  __device__ void cut(int count, int members, int eligible, int32_t* gmem_block_slots) {
    // Members rank first: only one of the two classes is cut, and its members dropped or its others added.
    bool const drops = count < members;
    int const size = drops ? members : eligible;
    int const kept = drops ? count : min(count - members, eligible), lost = size - kept;
    if (!drops && kept == 0) return;
    auto const change = [&](uint64_t order) {
      uint32_t const token = 0xffffffffu - static_cast<uint32_t>(order);
      uint32_t const block = token / kChoiceBlockTokens;
      atomicXor(words_ + block, 1u << token % kChoiceBlockTokens);
      atomicAdd(gmem_block_slots + block, drops ? -1 : 1);
    };
    uint64_t least = kept == 0 ? kNoPair : kMinPair;  // none of the class stays, or all
    if (kept > 0 && lost > 0) {
      // Members that are dropped are fewer than a tile; others are searched from the end that is nearer.
      ClassEnd const end{drops, drops || lost < kept};
      bool const at_end = drops == end.worst;  // what is dropped or added
      uint64_t const key = for_each_nearest(end, end.worst ? lost : kept, [&](uint64_t order) {
        if (at_end) change(order);
      });
      least = end.worst ? end.key(key) + 1 : key;
      if (at_end) return;
    }
    for_each([&](int t, uint32_t rank) {
      uint64_t const order = pair_order(rank, t);
      if (rank != 0 && core::is_member(rank) != (order >= least)) change(order);
    });
  }

  // Writes which tokens of each block stay, and how many do in the blocks ahead of it. kWords blocks at a time.
  __device__ void store_kept() const {
    int const thread = static_cast<int>(threadIdx.x);
    int carry = 0;
    __syncthreads();
    for (int first = 0; first < blocks_; first += kWords) {
      int const words = min(blocks_ - first, kWords);
      for (int b = thread; !fits() && b < words; b += Config::kThreads) {
        // Their place ends where that of the last block does, which is written after they are read.
        smem_words_[b] = arch::load_acquire_gpu(words_ + first + b);
      }
      if (!fits()) __syncthreads();
      int const of_thread = (words + Config::kThreads - 1) / Config::kThreads;
      int const begin = min(thread * of_thread, words), end = min(begin + of_thread, words);
      int own = 0;
      for (int b = begin; b < end; ++b) own += __popc(smem_words_[b]);
      warp::CtaSums const sums = warp::sums_over_cta<kWarps>(own);
      int before = carry + sums.before;
      for (int b = begin; b < end; ++b) {
        uint32_t const kept = smem_words_[b];
        gmem_kept_[first + b] = {kept, before};
        before += __popc(kept);
      }
      carry += sums.all;
      __syncthreads();
    }
  }

 private:
  static constexpr int kWarps = Config::kThreads / arch::kWarpThreads;
  static constexpr uint64_t kMinPair = uint64_t{1} << 32, kNoPair = ~uint64_t{0};

  __device__ bool fits() const { return tokens_ <= Config::kMaxTokens; }

  // Brings all ranks to shared memory, where they fit.
  __device__ void stage() {
    if (!fits() || smem_ranks_ == nullptr || ranks_ != gmem_) return;
    for (int base = int(threadIdx.x); base < tokens_; base += Config::kAhead * Config::kThreads) {
      uint32_t ranks[Config::kAhead];
      TESSERA_UNROLL
      for (int i = 0; i < Config::kAhead; ++i) {
        int const t = base + i * Config::kThreads;
        ranks[i] = t < tokens_ ? gmem_[t] : 0;
      }
      TESSERA_UNROLL
      for (int i = 0; i < Config::kAhead; ++i) {
        int const t = base + i * Config::kThreads;
        if (t < tokens_) smem_ranks_[t] = ranks[i];
      }
    }
    ranks_ = smem_ranks_;
    __syncthreads();
  }

  // visit(token, rank) for this thread's.
  template <class Visit>
  __device__ void for_each(Visit&& visit) const {
#pragma unroll 4
    for (int t = int(threadIdx.x); t < tokens_; t += Config::kThreads) visit(t, ranks_[t]);
  }

  // Returns the one of these keys that n - 1 are above, 0 < n <= count <= kThreads; no two are equal. Each is compared
  // with all, by as many neighbouring threads as there are for it: one barrier, where a search bit by bit has dozens.
  __device__ static uint64_t nth_largest(uint64_t const* smem_keys, int count, int n) {
    TESSERA_STATIC_SHARED(smem_found, uint64_t);
    int lanes = 1;
    while (2 * lanes * count <= Config::kThreads && lanes < arch::kWarpThreads) lanes *= 2;
    int const thread = static_cast<int>(threadIdx.x), own = thread / lanes;
    uint64_t const key = own < count ? smem_keys[own] : 0;
    int above = 0;
    for (int i = thread % lanes; i < count; i += lanes) above += smem_keys[i] > key ? 1 : 0;
    for (int half = lanes / 2; half > 0; half /= 2) {
      above += __shfl_xor_sync(arch::kAllLanes, above, half);
    }
    if (own < count && thread % lanes == 0 && above == n - 1) smem_found = key;
    __syncthreads();
    return smem_found;
  }

  // A value that n to `most` of the class's keys reach, or a few more where keys are equal: bits are set from the top,
  // each that leaves at least n, until it leaves no more than `most`.
  template <class Key, class Reach>
  __device__ static Key search(ClassEnd const& end, int n, int most, Reach&& reach) {
    Key found = end.least_key<Key>();
    for (int bit = 8 * int(sizeof(Key)) - 2; bit >= 0; --bit) {
      Key const candidate = found | Key{1} << bit;
      int const reached = reach(candidate);
      if (reached >= n) found = candidate;
      if (reached >= n && reached <= most) break;
    }
    return found;
  }

  // Sum over the CTA, for every thread. Two rows of sums in turn, so that one barrier is enough.
  template <class Value>
  __device__ Value add_up(Value own) {
    TESSERA_STATIC_SHARED(smem_sums, Value[2][kWarps]);
    turn_ ^= 1;
    own = sum_of_lanes(own);
    if (arch::lane_idx() == 0) smem_sums[turn_][threadIdx.x / arch::kWarpThreads] = own;
    __syncthreads();
    return sum_of_lanes(arch::lane_idx() < kWarps ? smem_sums[turn_][arch::lane_idx()] : Value{0});
  }
  template <class Value>
  __device__ static Value sum_of_lanes(Value own) {
    if constexpr (sizeof(Value) == 4) {
      return __reduce_add_sync(arch::kAllLanes, own);
    } else {
      TESSERA_UNROLL
      for (int half = arch::kWarpThreads / 2; half > 0; half /= 2) {
        own += __shfl_xor_sync(arch::kAllLanes, own, half);
      }
      return own;
    }
  }

  uint32_t const* gmem_;
  uint32_t const* ranks_;
  uint32_t* smem_ranks_;
  int tokens_, blocks_;
  BlockRanks const* gmem_blocks_;
  KeptTokens* gmem_kept_;
  uint32_t *smem_words_, *words_;
  // This thread's blocks have these counts and ends together.
  int own_members_ = 0, own_others_ = 0;
  BlockRanks own_ = {
      .members = 0, .others = 0, .worst_member = ~0u, .best_other = 0, .worst_other = ~0u};
  int turn_ = 0;
};

// write(i, sum of the values ahead of i) for each i below `count`, by a CTA of kThreads; returns the sum of all.
template <int kThreads, class Read, class Write>
__device__ __forceinline__ int scan_values(int64_t count, Read&& read, Write&& write) {
  int carry = 0;
  for (int64_t base = 0; base < count; base += kThreads) {
    int64_t const i = base + threadIdx.x;
    warp::CtaSums const sums =
        warp::sums_over_cta<kThreads / arch::kWarpThreads>(i < count ? read(i) : 0);
    if (i < count) write(i, carry + sums.before);
    carry += sums.all;
    __syncthreads();
  }
  return carry;
}

template <class Config>
__global__ void __launch_bounds__(Config::kScanThreads)
    choose_tokens_scan(__grid_constant__ ChooseTokensArguments const p) {
  arch::let_next_kernel_start();
  arch::wait_for_previous_kernel();
  ChoiceWorkspace const workspace = ChoiceWorkspace::of(p);
  if (blockIdx.x == 0) {
    int32_t* const gmem_slots = workspace.gmem_block_slots;
    int64_t const blocks = choice_blocks(p.tokens);
    int const all = scan_values<Config::kScanThreads>(
        blocks, [&](int64_t b) { return gmem_slots[b]; },
        [&](int64_t b, int before) { gmem_slots[b] = before; });
    if (threadIdx.x == 0) gmem_slots[blocks] = all;
  } else {
    int32_t* const gmem_offsets = p.tables.gmem_expert_offsets;
    int const all = scan_values<Config::kScanThreads>(
        p.experts, [&](int64_t e) { return static_cast<int>(workspace.gmem_pairs[e].takes); },
        [&](int64_t e, int before) { gmem_offsets[e] = before; });
    if (threadIdx.x == 0) gmem_offsets[p.experts] = all;
  }
}

enum class ChoiceStep { count, cut, both };

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    choose_tokens_keep(__grid_constant__ ChooseTokensArguments const p, ChoiceStep const step,
                       bool const stages) {
  arch::let_next_kernel_start();
  arch::wait_for_previous_kernel();
  auto const expert = static_cast<int>(blockIdx.x);
  core::ExpertPairs& gmem_pairs = ChoiceWorkspace::of(p).gmem_pairs[expert];
  TESSERA_DYNAMIC_SHARED_ARRAY(uint32_t, smem_column);
  TESSERA_STATIC_SHARED(smem_words, uint32_t[ExpertColumn<Config>::kWords]);
  ExpertColumn<Config> column(p, expert, stages ? smem_column : nullptr, smem_words);
  core::ExpertPairs pairs;
  if (step == ChoiceStep::cut) {
    pairs = gmem_pairs;
  } else {
    pairs.members = column.members();
    pairs.eligible = column.eligible();
    if (p.gmem_topk_ids == nullptr) {
      pairs.takes = core::expert_takes(p.capacity, pairs.eligible, p.top_k, p.experts);
    } else {
      auto const rem = static_cast<int>(core::beyond_tile(pairs.members, p.router.tile));
      if (p.router.round == Rounding::nr_s && rem != 0) {
        int const missing = min(p.router.tile - rem, static_cast<int>(pairs.eligible));
        pairs.weakest = column.sum_of_nearest({true, true}, rem);
        pairs.best = column.sum_of_nearest({false, false}, missing);
      }
      pairs.takes = core::rounded_count(p.router, expert, pairs, 0);
    }
    if (threadIdx.x == 0 && p.gmem_topk_counts != nullptr) {
      p.gmem_topk_counts[expert] = static_cast<int32_t>(pairs.members);
    }
    if (step == ChoiceStep::count) {
      if (threadIdx.x == 0) gmem_pairs = pairs;
      return;
    }
  }
  column.cut(static_cast<int>(pairs.takes), static_cast<int>(pairs.members),
             static_cast<int>(pairs.eligible), ChoiceWorkspace::of(p).gmem_block_slots);
  column.store_kept();
  if (threadIdx.x == 0) gmem_pairs.takes = pairs.takes;
}

// balance_f: each answer depends on those of all experts before it. One warp goes from expert to expert, 32 of them in
// its lanes with all that does not depend on others.
__global__ void __launch_bounds__(arch::kWarpThreads)
    choose_tokens_round(__grid_constant__ ChooseTokensArguments const p) {
  arch::let_next_kernel_start();
  arch::wait_for_previous_kernel();
  core::ExpertPairs* const gmem_pairs = ChoiceWorkspace::of(p).gmem_pairs;
  int const lane = arch::lane_idx(), tile = p.router.tile;
  int64_t carry = 0;
  for (int base = 0; base < p.experts; base += arch::kWarpThreads) {
    int const expert = base + lane;
    core::ExpertPairs own;
    if (expert < p.experts) own = gmem_pairs[expert];
    // A multiple of the tile stays: it gains and loses nothing.
    int const loses = static_cast<int>(core::beyond_tile(own.members, tile));
    int const gains = loses == 0 ? 0 : static_cast<int>(min(int64_t{tile - loses}, own.eligible));
    int change = 0;
    TESSERA_UNROLL
    for (int i = 0; i < arch::kWarpThreads; ++i) {
      int const down = __shfl_sync(arch::kAllLanes, loses, i);
      int const up = __shfl_sync(arch::kAllLanes, gains, i);
      int const next = core::balance_rounds_up(down, tile - down, carry) ? up : -down;
      carry += next;
      if (lane == i) change = next;
    }
    if (expert < p.experts) gmem_pairs[expert].takes = own.members + change;
  }
}

template <class Config>
cudaError_t launch_keep(ChooseTokensArguments const& args, cudaStream_t stream) {
  cudaError_t error = host::allow_shared_memory<choose_tokens_keep<Config>>(4 * Config::kMaxTokens);
  if (error != cudaSuccess) return error;
  // Rounding asks for all ranks only where many are equal: then CTAs that share an SM read them from L2.
  bool const stages =
      args.tokens <= Config::kMaxTokens && (Config::kCtas == 1 || args.gmem_topk_ids == nullptr);
  size_t const smem_bytes = stages ? 4 * static_cast<size_t>(args.tokens) : 0;
  auto const keep = [&](ChoiceStep step) {
    return host::launch_early(choose_tokens_keep<Config>, true, static_cast<unsigned>(args.experts),
                              Config::kThreads, smem_bytes, stream, args, step, stages);
  };
  if (args.router.round != Rounding::balance_f) return keep(ChoiceStep::both);
  error = keep(ChoiceStep::count);
  if (error != cudaSuccess) return error;
  error = host::launch_early(choose_tokens_round, true, 1, arch::kWarpThreads, 0, stream, args);
  return error == cudaSuccess ? keep(ChoiceStep::cut) : error;
}

template <class Config>
cudaError_t launch_choose_tokens_keep_config(ChooseTokensArguments const& args,
                                             cudaStream_t stream) {
  if (args.experts > kMaxChoosingExperts) return cudaErrorInvalidValue;
  return args.experts <= Config::kMaxWideExperts ? launch_keep<WideKeep<Config>>(args, stream)
                                                 : launch_keep<Config>(args, stream);
}

template <class Config>
cudaError_t launch_choose_tokens_scan_config(ChooseTokensArguments const& args,
                                             cudaStream_t stream) {
  unsigned const scans = args.tables.gmem_expert_offsets != nullptr ? 2 : 1;
  return host::launch_early(choose_tokens_scan<Config>, true, scans, Config::kScanThreads, 0,
                            stream, args);
}

}  // namespace tessera::cuda
