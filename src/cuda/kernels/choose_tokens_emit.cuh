// SPDX-License-Identifier: Apache-2.0
// choose_tokens_emit: from what each expert keeps to slots by token, then expert, and where the call wants them to the
// routing tables, which metadata makes of other slots (kernels/metadata.cuh).
// Shapes   kept tokens (E, blocks of 32), slots of blocks, and rows of experts, which every CTA adds up to where its
//          own begin, or choose_tokens_scan where they are many; ids, scores (P), token_offsets (T+1);
//          expert_offsets (E+1), the other tables (P)
// Work     reads E words per block of 32 tokens and, of kept pairs alone, 16 bytes; writes 8P + 4T, with tables 20P
// Schedule a CTA per 32 tokens, a part of the experts a warp: 32 experts' words of 32 tokens are turned,
//          so that a lane has the bits of its token; slots follow from their counts, rows from an expert's earlier
//          blocks and the bits below the token's. What is sorted by slot leaves through shared memory; rows are written
//          where they lie. Fills what is left of P
// Numerics integers; bitwise repeatable: yes
// Requires E <= kMaxChoosingExperts
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/static_shared.cuh"
#include "../arch/warp.cuh"
#include "../host/choose_tokens.hpp"
#include "../host/kernel_limits.hpp"
#include "../host/launch.hpp"
#include "../warp/bits.cuh"
#include "../warp/clear_words.cuh"
#include "../warp/sums.cuh"
#include "core/token_rounding.hpp"

namespace tessera::cuda {

struct EmitTokensConfig {
  static constexpr int kCtaWarps = 8;
  static constexpr int kStagedSlots = 1024;  // of a block, that pass through shared memory
  // Every CTA adds up so many blocks' slots and experts' rows itself, which spares the launch of scan.
  static constexpr int kMaxAddedBlocks = 1280;
  static constexpr int kMaxAddedExperts = 256;
};

/// Says that emit has the sums of choose_tokens_scan.
template <class Config>
bool emit_needs_scan(ChooseTokensArguments const& args) {
  return choice_blocks(args.tokens) > Config::kMaxAddedBlocks ||
         args.experts > Config::kMaxAddedExperts;
}

// A lane's token and the experts of its warp, of which it keeps some: a bit each.
template <class Config>
struct ChoicePart {
  ChooseTokensArguments const& p;
  int64_t token;
  int first, end;       // experts
  uint32_t* smem_kept;  // this lane's words, a warp apart: of 32 experts each

  // Experts of a warp, and words of a lane.
  __host__ __device__ static constexpr int experts_of(int experts) {
    return (experts + Config::kCtaWarps - 1) / Config::kCtaWarps;
  }
  __host__ __device__ static constexpr int words_of(int experts) {
    return (experts_of(experts) + arch::kWarpThreads - 1) / arch::kWarpThreads;
  }
  // The lanes of a CTA have so many bytes of these bits.
  static constexpr int kept_bytes(int experts) {
    return 4 * Config::kCtaWarps * arch::kWarpThreads * words_of(experts);
  }

  __device__ ChoicePart(ChooseTokensArguments const& args, int warp, uint32_t* smem)
      : p(args),
        token(int64_t{blockIdx.x} * kChoiceBlockTokens + arch::lane_idx()),
        first(min(warp * experts_of(p.experts), p.experts)),
        end(min(first + experts_of(p.experts), p.experts)),
        smem_kept(smem + warp * words_of(p.experts) * arch::kWarpThreads + arch::lane_idx()) {}

  __device__ KeptTokens const* kept_by(int expert) const {
    return ChoiceWorkspace::of(p).gmem_kept + expert * choice_blocks(p.tokens) + blockIdx.x;
  }

  // Notes the pairs that stay and counts them. Without tokens there is no word.
  __device__ int find() const {
    int count = 0;
    for (int base = first; base < end; base += arch::kWarpThreads) {
      int const e = base + arch::lane_idx();
      uint32_t const kept = warp::transposed(e < end && p.tokens > 0 ? kept_by(e)->tokens : 0);
      smem_kept[base - first] = kept;
      count += __popc(kept);
    }
    return count;
  }
  // visit(expert, rank, row) for them, experts ascending; rows begin at `first_row` and the expert's offset, without
  // offsets they are 0. kAhead pairs are on their way at once.
  template <class Visit>
  __device__ void for_each(int32_t const* offsets, int first_row, Visit&& visit) const {
    constexpr int kAhead = 4;
    uint32_t const* const gmem_ranks = ChoiceWorkspace::of(p).gmem_ranks + token;
    uint32_t const below = (1u << arch::lane_idx()) - 1;
    for (int base = first; base < end; base += arch::kWarpThreads) {
      uint32_t kept = smem_kept[base - first];
      while (kept != 0) {
        int experts[kAhead], rows[kAhead];
        uint32_t ranks[kAhead];
        TESSERA_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          experts[i] = kept != 0 ? base + __ffs(static_cast<int>(kept)) - 1 : -1;
          kept &= kept - 1;
          rows[i] = 0;
          if (experts[i] < 0) continue;
          ranks[i] = gmem_ranks[experts[i] * p.tokens];
          if (offsets == nullptr) continue;
          KeptTokens const of_expert = *kept_by(experts[i]);
          rows[i] =
              first_row + offsets[experts[i]] + of_expert.before + __popc(of_expert.tokens & below);
        }
        TESSERA_UNROLL
        for (int i = 0; i < kAhead; ++i) {
          if (experts[i] >= 0) visit(experts[i], ranks[i], rows[i]);
        }
      }
    }
  }
};

// A CTA's slots and a warp's experts begin where these say behind finish(). Loads are on their way from the constructor
// on; share() leaves what warps have to tell each other, and a barrier of the CTA comes between share() and finish().
struct ChoiceSums {
  int first_slot = 0, all_slots = 0;  // of this CTA's block, and of all blocks
  int first_row = 0;                  // of this warp's experts, to which `offsets` add
  int32_t const* offsets = nullptr;   // of rows, by expert; null: no tables
};

// The sums are there.
template <class Config>
struct ScannedSums : ChoiceSums {
  static constexpr int kCtas = 8;  // on an SM
  struct Shared {};
  __device__ ScannedSums(ChoicePart<Config> const& part, int, Shared&) {
    int32_t const* const gmem_slots = ChoiceWorkspace::of(part.p).gmem_block_slots;
    first_slot = gmem_slots[blockIdx.x];
    all_slots = gmem_slots[choice_blocks(part.p.tokens)];
    offsets = part.p.tables.gmem_expert_offsets;
  }
  __device__ void share() {}
  __device__ void finish() {}
};

// Every CTA adds them up, and the first one writes the experts' offsets.
template <class Config>
class AddedSums : public ChoiceSums {
 public:
  static constexpr int kCtas = 6;  // on an SM, so that 132 SMs have those of 24576 tokens at once
  struct WarpSums {
    int ahead, all;  // slots of the warp's blocks that are ahead of the CTA's, and of all of them
    int rows;        // of the warp's experts
  };
  struct Shared {
    int32_t offsets[Config::kMaxAddedExperts];  // of experts, from their warp's first one on
    WarpSums sums[Config::kCtaWarps];
  };

  __device__ AddedSums(ChoicePart<Config> const& part, int warp, Shared& smem)
      : part_(part), warp_(warp), smem_(smem) {
    ChoiceWorkspace const workspace = ChoiceWorkspace::of(part.p);
    auto const blocks = static_cast<int>(choice_blocks(part.p.tokens));
    TESSERA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      slots_[i] = block(i) < blocks ? workspace.gmem_block_slots[block(i)] : 0;
    }
    if (part.p.tables.gmem_expert_offsets != nullptr) offsets = smem.offsets;
    TESSERA_UNROLL
    for (int i = 0; i < kExperts; ++i) {
      bool const counts = offsets != nullptr && expert(i) < part.end;
      takes_[i] = counts ? static_cast<int>(workspace.gmem_pairs[expert(i)].takes) : 0;
    }
  }
  __device__ void share() {
    WarpSums own{};
    TESSERA_UNROLL
    for (int i = 0; i < kBlocks; ++i) {
      own.ahead += block(i) < static_cast<int>(blockIdx.x) ? slots_[i] : 0;
      own.all += slots_[i];
    }
    own.ahead = __reduce_add_sync(arch::kAllLanes, own.ahead);
    own.all = __reduce_add_sync(arch::kAllLanes, own.all);
    TESSERA_UNROLL
    for (int i = 0; i < kExperts; ++i) {
      int const up_to = warp::inclusive_sum(takes_[i]);
      if (expert(i) < part_.end) smem_.offsets[expert(i)] = own.rows + up_to - takes_[i];
      own.rows += __shfl_sync(arch::kAllLanes, up_to, arch::kWarpThreads - 1);
    }
    if (arch::lane_idx() == 0) smem_.sums[warp_] = own;
  }
  __device__ void finish() {
    int rows = 0;
    TESSERA_UNROLL
    for (int w = 0; w < Config::kCtaWarps; ++w) {
      WarpSums const sums = smem_.sums[w];
      first_slot += sums.ahead;
      all_slots += sums.all;
      first_row += w < warp_ ? sums.rows : 0;
      rows += sums.rows;
    }
    if (blockIdx.x != 0 || offsets == nullptr) return;
    int32_t* const gmem_offsets = part_.p.tables.gmem_expert_offsets;
    TESSERA_UNROLL
    for (int i = 0; i < kExperts; ++i) {
      if (expert(i) < part_.end) gmem_offsets[expert(i)] = first_row + smem_.offsets[expert(i)];
    }
    if (threadIdx.x == 0) gmem_offsets[part_.p.experts] = rows;
  }

 private:
  static constexpr int kThreads = Config::kCtaWarps * arch::kWarpThreads;
  static constexpr int kBlocks = (Config::kMaxAddedBlocks + kThreads - 1) / kThreads;
  static constexpr int kExperts = (Config::kMaxAddedExperts + kThreads - 1) / kThreads;

  // Those that this thread reads.
  __device__ static int block(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }
  __device__ int expert(int i) const {
    return part_.first + i * arch::kWarpThreads + arch::lane_idx();
  }

  ChoicePart<Config> const& part_;
  int warp_;
  Shared& smem_;
  int slots_[kBlocks], takes_[kExperts];
};

// CTAs with slots. Those behind them clear words. Without tokens one CTA still writes the first offset.
__host__ __device__ inline int emitting_ctas(ChooseTokensArguments const& p) {
  return static_cast<int>(choice_blocks(p.tokens > 0 ? p.tokens : 1));
}

template <class Config, template <class> class Sums>
__global__ void __launch_bounds__(Config::kCtaWarps* arch::kWarpThreads, Sums<Config>::kCtas)
    choose_tokens_emit(__grid_constant__ ChooseTokensArguments const p) {
  constexpr int kThreads = Config::kCtaWarps * arch::kWarpThreads;
  TESSERA_DYNAMIC_SHARED_ARRAY(uint32_t, smem_kept);
  TESSERA_STATIC_SHARED(smem_counts, int[Config::kCtaWarps][kChoiceBlockTokens]);
  TESSERA_STATIC_SHARED(smem_ids, int32_t[Config::kStagedSlots]);
  TESSERA_STATIC_SHARED(smem_scores, float[Config::kStagedSlots]);
  TESSERA_STATIC_SHARED(smem_rows, int32_t[Config::kStagedSlots]);
  TESSERA_STATIC_SHARED(smem_sums, typename Sums<Config>::Shared);
  int const warp = arch::warp_idx(), lane = arch::lane_idx();
  arch::let_next_kernel_start();  // up_projection_fwd, which waits
  arch::wait_for_previous_kernel();
  ChoiceTables const& tables = p.tables;
  int const blocks = emitting_ctas(p);
  if (static_cast<int>(blockIdx.x) >= blocks) {
    return clear_share(tables.cleared, static_cast<int>(blockIdx.x) - blocks);
  }
  bool const has_tables = tables.gmem_expert_offsets != nullptr;
  ChoicePart<Config> const part(p, warp, smem_kept);
  Sums<Config> sums(part, warp, smem_sums);
  smem_counts[warp][lane] = part.find();
  sums.share();
  __syncthreads();
  sums.finish();
  int const block_slot = sums.first_slot;
  int of_token = 0, before = 0;
  TESSERA_UNROLL
  for (int w = 0; w < Config::kCtaWarps; ++w) {
    before += w < warp ? smem_counts[w][lane] : 0;
    of_token += smem_counts[w][lane];
  }
  int const end = warp::inclusive_sum(of_token);
  int const slots = __shfl_sync(arch::kAllLanes, end, arch::kWarpThreads - 1);
  if (warp == 0 && part.token < p.tokens) p.gmem_token_offsets[part.token + 1] = block_slot + end;
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) p.gmem_token_offsets[0] = 0;
    clear_beside_tables(tables.cleared);
    clear_words(tables.unused);
  }
  // A warp has few slots of each token: it would write a few bytes of each of many sectors.
  bool const staged = slots <= Config::kStagedSlots;
  int32_t* const ids = staged ? smem_ids : p.gmem_ids + block_slot;
  float* const scores = staged ? smem_scores : p.gmem_scores + block_slot;
  int32_t* const rows = staged ? smem_rows : tables.gmem_inverse_permutation + block_slot;
  int slot = end - of_token + before;
  part.for_each(sums.offsets, sums.first_row, [&](int expert, uint32_t rank, int row) {
    ids[slot] = expert;
    scores[slot] = p.router.route_scale * core::score_of_rank(rank);
    if (has_tables) {
      rows[slot] = row;
      tables.gmem_sort_permutation[row] = block_slot + slot;
      tables.gmem_gather_index[row] = static_cast<int32_t>(part.token);
    }
    ++slot;
  });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); staged && i < slots; i += kThreads) {
    p.gmem_ids[block_slot + i] = smem_ids[i];
    p.gmem_scores[block_slot + i] = smem_scores[i];
    if (has_tables) tables.gmem_inverse_permutation[block_slot + i] = smem_rows[i];
  }
  int64_t const used = sums.all_slots;
  int64_t const step = int64_t{blocks} * kThreads;
  for (int64_t i = used + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.slots; i += step) {
    p.gmem_ids[i] = -1;
    p.gmem_scores[i] = 0;
    if (!has_tables) continue;
    tables.gmem_sort_permutation[i] = -1;
    tables.gmem_gather_index[i] = 0;
    tables.gmem_inverse_permutation[i] = -1;
  }
}

template <class Config, template <class> class Sums>
cudaError_t launch_emit(ChooseTokensArguments const& args, cudaStream_t stream) {
  cudaError_t const error = host::allow_shared_memory<choose_tokens_emit<Config, Sums>>(
      ChoicePart<Config>::kept_bytes(kMaxChoosingExperts));
  if (error != cudaSuccess) return error;
  auto const blocks =
      static_cast<unsigned>(emitting_ctas(args)) + clearing_ctas(args.tables.cleared);
  auto const kept_bytes = static_cast<size_t>(ChoicePart<Config>::kept_bytes(args.experts));
  return host::launch_early(choose_tokens_emit<Config, Sums>, true, blocks,
                            Config::kCtaWarps * arch::kWarpThreads, kept_bytes, stream, args);
}

template <class Config>
cudaError_t launch_choose_tokens_emit_config(ChooseTokensArguments const& args,
                                             cudaStream_t stream) {
  return emit_needs_scan<Config>(args) ? launch_emit<Config, ScannedSums>(args, stream)
                                       : launch_emit<Config, AddedSums>(args, stream);
}

}  // namespace tessera::cuda
