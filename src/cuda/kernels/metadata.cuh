// SPDX-License-Identifier: Apache-2.0
// metadata: expert_offsets, sort_permutation, gather_index and inverse_permutation from slot ids, stable:
//           row(j) = expert_offsets[id_j] + #{j' < j : id_j' = id_j}.
// Shapes   ids (P) int32 or int64, tables (E+1), (P), (P), (P) int32; U units of slots, P/1024 without route's
// Work     reads 4P (8P), writes 12P + 4E and words that it clears; between the kernels 2P of ranks and 2*E*U of
//          counts, which every cluster of the second kernel reads: 24 x 49 KB out of L2 at P = 196608, E = 128,
//          24 x 197 KB with route's units; launch bound
// Schedule one block: metadata_one_block, all of it by a CTA; beside it CTAs that clear, 4096 words each. More: two
//          kernels, each a node of its own in the stream
//   metadata_rank    unless route has ranked units of 32 tokens (kernels/route.cuh); a CTA per 1024 slots: a warp ranks
//                    its 128 slots among themselves by ballots, 32 at a time; the CTA adds what earlier warps hold of
//                    the same expert; ranks and counts go to the workspace
//   metadata_scatter a CTA per block of units, up to 1024 slots, 8 in a cluster: each adds up an eighth of all counts,
//                    of the units ahead of the cluster and of all, and reads the sums of its peers; scan of the E
//                    totals, then every slot knows its row; slots are sorted by expert in shared memory, so that rows
//                    are written in runs
// Numerics integers; no atomics anywhere, so rows never depend on timing; bitwise repeatable: yes
// Requires E <= 1024, P < 2^31
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch/cluster.cuh"
#include "../arch/cluster_load.cuh"
#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/static_shared.cuh"
#include "../arch/warp.cuh"
#include "../host/launch.hpp"
#include "../host/metadata.hpp"
#include "../warp/clear_words.cuh"
#include "../warp/sums.cuh"

namespace tessera::cuda {

struct MetadataConfig {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / arch::kWarpThreads;
  static constexpr int kRounds = kMetadataBlockSlots / kThreads;  // slots of a thread
  static constexpr int kMaxExperts = 1024;
  // metadata_scatter has these:
  static constexpr int kCtas = 3;        // on an SM
  static constexpr int kCluster = 8;     // CTAs that share the sums over all blocks
  static constexpr int kChunk = 8;       // experts whose counts a thread reads at once
  static constexpr int kMaxGroups = 16;  // of threads, with blocks of their own
  static constexpr int kAhead = 4;       // loads of a thread on their way
};

// A warp has 128 consecutive slots of the block, 32 a round: this lane's of round 0, as a place in the block. Called by
// converged warps.
__device__ __forceinline__ int first_place() {
  return arch::warp_idx() * MetadataConfig::kRounds * arch::kWarpThreads + arch::lane_idx();
}

// The expert of a slot, or -1 for a sentinel and beyond the list.
__device__ __forceinline__ int expert_of_slot(MetadataArguments const& p, int64_t slot) {
  if (slot >= p.slots) return -1;
  int64_t const id = p.ids_are_int64 ? static_cast<int64_t const*>(p.gmem_ids)[slot]
                                     : static_cast<int32_t const*>(p.gmem_ids)[slot];
  return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

// The lanes with this lane's expert, by a ballot per bit: match.any takes as long as a warp has different values.
template <int kRounds>
__device__ __forceinline__ void find_peers(uint32_t (&peers)[kRounds],
                                           int const (&experts)[kRounds], int num_experts) {
  TESSERA_UNROLL
  for (int r = 0; r < kRounds; ++r) peers[r] = 0xffffffffu;
  int const bits = arch::kWarpThreads - __clz(num_experts);
  for (int bit = 0; bit < bits; ++bit) {
    TESSERA_UNROLL
    for (int r = 0; r < kRounds; ++r) {
      int const id = experts[r] < 0 ? num_experts : experts[r];
      bool const is_set = (id >> bit & 1) != 0;
      uint32_t const set = __ballot_sync(arch::kAllLanes, is_set);
      peers[r] &= is_set ? set : ~set;
    }
  }
}

// The experts of this lane's slots of the block, from `first` on, and their places among the block's slots of these
// experts; on_count(e, rows of the block) for every expert, by some thread, seen by the CTA on return. smem_counts,
// (warps, E): how many slots of each expert each warp holds, then how many those before it hold; 16 KiB at E = 1024.
template <class OnCount>
__device__ __forceinline__ void rank_block(MetadataArguments const& p, int64_t first,
                                           int (&experts)[MetadataConfig::kRounds],
                                           int (&ranks)[MetadataConfig::kRounds],
                                           uint16_t* smem_counts, OnCount on_count) {
  constexpr int kRounds = MetadataConfig::kRounds;
  uint16_t* const smem_own = smem_counts + arch::warp_idx() * p.experts;
  for (int i = static_cast<int>(threadIdx.x); i < MetadataConfig::kWarps * p.experts;
       i += MetadataConfig::kThreads) {
    smem_counts[i] = 0;
  }
  TESSERA_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    experts[r] = expert_of_slot(p, first + r * arch::kWarpThreads);
  }
  __syncthreads();
  uint32_t peers[kRounds];
  find_peers(peers, experts, p.experts);
  TESSERA_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    int const before = __popc(peers[r] & ((1u << arch::lane_idx()) - 1));
    int const held = experts[r] >= 0 ? smem_own[experts[r]] : 0;
    ranks[r] = held + before;
    __syncwarp();
    if (experts[r] >= 0 && before == 0) {
      smem_own[experts[r]] = static_cast<uint16_t>(held + __popc(peers[r]));
    }
    __syncwarp();
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < p.experts; e += MetadataConfig::kThreads) {
    int before = 0;
    TESSERA_UNROLL
    for (int w = 0; w < MetadataConfig::kWarps; ++w) {
      uint16_t& count = smem_counts[w * p.experts + e];
      int const own = count;
      count = static_cast<uint16_t>(before);
      before += own;
    }
    on_count(e, before);
  }
  __syncthreads();
  TESSERA_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    if (experts[r] >= 0) ranks[r] += smem_own[experts[r]];
  }
}

__global__ void __launch_bounds__(MetadataConfig::kThreads)
    metadata_rank(__grid_constant__ MetadataArguments const p) {
  constexpr int kRounds = MetadataConfig::kRounds;
  TESSERA_DYNAMIC_SHARED_ARRAY(uint16_t, smem_counts);
  arch::let_next_kernel_start();  // metadata_scatter
  arch::wait_for_previous_kernel();
  int64_t const first = int64_t{blockIdx.x} * kMetadataBlockSlots + first_place();
  MetadataWorkspace const workspace = MetadataWorkspace::of(p);
  int experts[kRounds], ranks[kRounds];
  rank_block(p, first, experts, ranks, smem_counts, [&](int e, int rows) {
    workspace.gmem_counts[int64_t{blockIdx.x} * workspace.pitch + e] = static_cast<uint16_t>(rows);
  });
  TESSERA_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    if (experts[r] < 0) continue;
    workspace.gmem_ranks[first + r * arch::kWarpThreads] = static_cast<uint16_t>(ranks[r]);
  }
}

// A thread has four experts: first their rows, in all and in this block, then the sums over earlier experts.
struct ExpertSums {
  int total[4], block[4];
};

// Four ints from e on; 0 from the last expert on.
__device__ __forceinline__ void load_four(int (&out)[4], int32_t const* from, int e, int experts) {
  TESSERA_UNROLL
  for (int i = 0; i < 4; ++i) out[i] = e + i < experts ? from[e + i] : 0;
}

// Exclusive sums over the experts of the CTA's threads; the sums over all threads in `all`.
__device__ __forceinline__ void scan_experts(ExpertSums& sums, int2& all, int2* smem_warp_sums) {
  int const lane = arch::lane_idx(), warp = arch::warp_idx();
  int2 own{};
  TESSERA_UNROLL
  for (int i = 0; i < 4; ++i) {
    own.x += sums.total[i];
    own.y += sums.block[i];
  }
  int2 const inclusive{warp::inclusive_sum(own.x), warp::inclusive_sum(own.y)};
  if (lane == arch::kWarpThreads - 1) smem_warp_sums[warp] = inclusive;
  __syncthreads();
  int2 before{inclusive.x - own.x, inclusive.y - own.y};
  all = {};
  TESSERA_UNROLL
  for (int w = 0; w < MetadataConfig::kWarps; ++w) {
    int2 const sum = smem_warp_sums[w];
    if (w < warp) {
      before.x += sum.x;
      before.y += sum.y;
    }
    all.x += sum.x;
    all.y += sum.y;
  }
  TESSERA_UNROLL
  for (int i = 0; i < 4; ++i) {
    int const total = sums.total[i], block = sums.block[i];
    sums.total[i] = before.x;
    sums.block[i] = before.y;
    before.x += total;
    before.y += block;
  }
}

// The token that owns a slot: the last t with token_offsets[t] <= slot.
__device__ __forceinline__ int token_of_slot(MetadataArguments const& p, int64_t slot) {
  if (p.gmem_token_offsets == nullptr) return static_cast<int>(slot) / p.top_k;
  int low = 0, high = p.tokens - 1;
  while (low < high) {
    int const middle = low + (high - low + 1) / 2;
    if (p.gmem_token_offsets[middle] <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

struct ScatterStorage {
  int sorted[kMetadataBlockSlots];          // the block's slots by expert, as (expert, place)
  int starts[MetadataConfig::kMaxExperts];  // of an expert in `sorted`
  int rows[MetadataConfig::kMaxExperts];    // row of an expert's slot - its place in `sorted`
  int2 warp_sums[MetadataConfig::kWarps];
};

// The rows of a block's slots: `sums` and `before`, rows of the expert in earlier blocks, are of this thread's four
// experts. The first block writes the offsets of all. `smem` is written after a barrier.
__device__ __forceinline__ void scatter_block(MetadataArguments const& p, int64_t block_slot,
                                              int64_t block_end,
                                              int const (&experts)[MetadataConfig::kRounds],
                                              int const (&ranks)[MetadataConfig::kRounds],
                                              ExpertSums sums, int const (&before)[4],
                                              ScatterStorage& smem) {
  static_assert(4 * MetadataConfig::kThreads >= MetadataConfig::kMaxExperts);
  int const own = static_cast<int>(threadIdx.x) * 4;  // the first of this thread's experts
  int2 all;
  scan_experts(sums, all, smem.warp_sums);
  TESSERA_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (own + i >= p.experts) continue;
    smem.starts[own + i] = sums.block[i];
    smem.rows[own + i] = sums.total[i] + before[i] - sums.block[i];
    if (blockIdx.x == 0) p.gmem_expert_offsets[own + i] = sums.total[i];
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) p.gmem_expert_offsets[p.experts] = all.x;
  if (blockIdx.x == 0) clear_words(p.unused);
  __syncthreads();
  int const place = first_place();
  TESSERA_UNROLL
  for (int r = 0; r < MetadataConfig::kRounds; ++r) {
    int const own_place = place + r * arch::kWarpThreads;
    int64_t const slot = block_slot + own_place;
    if (slot < block_end) {
      int row = -1;
      if (experts[r] >= 0) {
        int const at = smem.starts[experts[r]] + ranks[r];
        smem.sorted[at] = experts[r] * kMetadataBlockSlots + own_place;
        row = smem.rows[experts[r]] + at;
      }
      p.gmem_inverse_permutation[slot] = row;
      if (slot >= all.x) {  // as a row index: beyond the last row
        p.gmem_sort_permutation[slot] = -1;
        p.gmem_gather_index[slot] = 0;
      }
    }
  }
  __syncthreads();
  // Neighbours write neighbouring rows: a fraction of the sectors that slots in their own order would write.
  for (int at = static_cast<int>(threadIdx.x); at < all.y; at += MetadataConfig::kThreads) {
    int const packed = smem.sorted[at];
    int const row = smem.rows[packed / kMetadataBlockSlots] + at;
    int64_t const slot = block_slot + packed % kMetadataBlockSlots;
    p.gmem_sort_permutation[row] = static_cast<int32_t>(slot);
    p.gmem_gather_index[row] = token_of_slot(p, slot);
  }
}

struct alignas(16) UnitSumsStorage {
  // (groups of threads, pitch): rows in the units ahead of the cluster, and in all
  int partial_ahead[MetadataConfig::kThreads * MetadataConfig::kChunk];
  int partial_total[MetadataConfig::kThreads * MetadataConfig::kChunk];
  // Each expert has this CTA's share of both sums, and the rows of its own block.
  int ahead[MetadataConfig::kMaxExperts];
  int total[MetadataConfig::kMaxExperts];
  int in_block[MetadataConfig::kMaxExperts];
};

// Every kCluster-th unit, from the CTA's rank on: a thread adds up the counts of kChunk experts, its group every so
// many of these units. The sums are seen after a barrier.
__device__ __forceinline__ void sum_own_share(MetadataWorkspace const& workspace, int units,
                                              int cluster_first, UnitSumsStorage& smem) {
  using Config = MetadataConfig;
  int const thread = static_cast<int>(threadIdx.x);
  int const chunks = workspace.pitch / Config::kChunk;
  int const groups = min(Config::kThreads / chunks, Config::kMaxGroups);
  int const chunk = thread % chunks, group = thread / chunks;
  if (group < groups) {
    auto const* const gmem_chunk = reinterpret_cast<uint4 const*>(workspace.gmem_counts) + chunk;
    int ahead[Config::kChunk] = {}, total[Config::kChunk] = {};
    int const stride = Config::kCluster * groups;
    for (int first = static_cast<int>(arch::cluster_cta_rank()) + Config::kCluster * group;
         first < units; first += Config::kAhead * stride) {
      uint4 counts[Config::kAhead];
      TESSERA_UNROLL
      for (int i = 0; i < Config::kAhead; ++i) {
        int const unit = first + i * stride;
        counts[i] = unit < units ? gmem_chunk[int64_t{unit} * chunks] : uint4{};
      }
      TESSERA_UNROLL
      for (int i = 0; i < Config::kAhead; ++i) {
        bool const is_ahead = first + i * stride < cluster_first;
        uint32_t const pairs[] = {counts[i].x, counts[i].y, counts[i].z, counts[i].w};
        TESSERA_UNROLL
        for (int e = 0; e < Config::kChunk; ++e) {
          auto const count = static_cast<int>(pairs[e / 2] >> e % 2 * 16 & 0xffff);
          total[e] += count;
          ahead[e] += is_ahead ? count : 0;
        }
      }
    }
    int const at = group * workspace.pitch + chunk * Config::kChunk;
    TESSERA_UNROLL
    for (int e = 0; e < Config::kChunk; e += 4) {
      *reinterpret_cast<int4*>(&smem.partial_ahead[at + e]) = {ahead[e], ahead[e + 1], ahead[e + 2],
                                                               ahead[e + 3]};
      *reinterpret_cast<int4*>(&smem.partial_total[at + e]) = {total[e], total[e + 1], total[e + 2],
                                                               total[e + 3]};
    }
  }
  __syncthreads();
  for (int e = thread; e < workspace.pitch; e += Config::kThreads) {
    int ahead = 0, total = 0;
    for (int g = 0; g < groups; ++g) {
      ahead += smem.partial_ahead[g * workspace.pitch + e];
      total += smem.partial_total[g * workspace.pitch + e];
    }
    smem.ahead[e] = ahead;
    smem.total[e] = total;
  }
}

// Rows of each expert in the CTA's block, and where its units are several smem_before, (units, pitch): in the units of
// the block before each.
__device__ __forceinline__ void sum_own_block(MetadataWorkspace const& workspace,
                                              RankUnits const& ranked, int units,
                                              uint16_t* smem_before, UnitSumsStorage& smem) {
  constexpr int kAhead = 8;  // loads of a thread on their way
  int const first = static_cast<int>(blockIdx.x) * ranked.per_block;
  for (int e = static_cast<int>(threadIdx.x); e < workspace.pitch; e += MetadataConfig::kThreads) {
    int sum = 0;
    for (int base = 0; base < ranked.per_block; base += kAhead) {
      int counts[kAhead];
      TESSERA_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        int const unit = first + base + i;
        bool const exists = base + i < ranked.per_block && unit < units;
        counts[i] = exists ? workspace.gmem_counts[int64_t{unit} * workspace.pitch + e] : 0;
      }
      TESSERA_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (ranked.per_block > 1 && base + i < ranked.per_block) {
          smem_before[(base + i) * workspace.pitch + e] = static_cast<uint16_t>(sum);
        }
        sum += counts[i];
      }
    }
    smem.in_block[e] = sum;
  }
}

__device__ __forceinline__ void add_to(int (&sum)[4], int4 const& four) {
  sum[0] += four.x;
  sum[1] += four.y;
  sum[2] += four.z;
  sum[3] += four.w;
}

// Counts the rows of this thread's four experts: in all, in this block, and in the blocks before it. No CTA of the
// cluster may end before its peers have returned from here.
__device__ __forceinline__ void sum_units(MetadataArguments const& p, RankUnits const& ranked,
                                          uint16_t* smem_before, ExpertSums& sums, int (&before)[4],
                                          UnitSumsStorage& smem) {
  constexpr int kCluster = MetadataConfig::kCluster;
  MetadataWorkspace const workspace = MetadataWorkspace::of(p);
  int const own = static_cast<int>(threadIdx.x) * 4;
  auto const units = static_cast<int>(ranked.units(p.slots));
  auto const rank = static_cast<int>(arch::cluster_cta_rank());
  int const cluster_first = (static_cast<int>(blockIdx.x) - rank) * ranked.per_block;
  sum_own_block(workspace, ranked, units, smem_before, smem);
  sum_own_share(workspace, units, cluster_first, smem);
  arch::cluster_sync();
  TESSERA_UNROLL
  for (int i = 0; i < 4; ++i) sums.total[i] = sums.block[i] = before[i] = 0;
  if (own >= p.experts) return;
  TESSERA_UNROLL
  for (int peer = 0; peer < kCluster; ++peer) {
    add_to(before, arch::load_from_cta(&smem.ahead[own], peer));
    add_to(sums.total, arch::load_from_cta(&smem.total[own], peer));
    int4 const in_block = arch::load_from_cta(&smem.in_block[own], peer);
    if (peer < rank) add_to(before, in_block);
    if (peer == rank) add_to(sums.block, in_block);
  }
  // Counts behind the last expert's may be anything.
  TESSERA_UNROLL
  for (int i = 1; i < 4; ++i) {
    if (own + i >= p.experts) sums.total[i] = sums.block[i] = before[i] = 0;
  }
}

__global__ void __cluster_dims__(MetadataConfig::kCluster)
    __launch_bounds__(MetadataConfig::kThreads, MetadataConfig::kCtas)
        metadata_scatter(__grid_constant__ MetadataArguments const p) {
  constexpr int kRounds = MetadataConfig::kRounds;
  TESSERA_STATIC_SHARED(smem, ScatterStorage);
  TESSERA_STATIC_SHARED(smem_sums, UnitSumsStorage);
  TESSERA_DYNAMIC_SHARED_ARRAY(uint16_t, smem_before);
  arch::let_next_kernel_start();  // up_projection_fwd, which waits
  arch::wait_for_previous_kernel();
  MetadataWorkspace const workspace = MetadataWorkspace::of(p);
  RankUnits const ranked(p.unit_slots);
  int64_t const block_slot = int64_t{blockIdx.x} * ranked.block_slots();
  int64_t const block_end = min(p.slots, block_slot + ranked.block_slots());
  int const place = first_place();
  int experts[kRounds], ranks[kRounds];
  TESSERA_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    int64_t const slot = block_slot + place + r * arch::kWarpThreads;
    experts[r] = slot < block_end ? expert_of_slot(p, slot) : -1;
    ranks[r] = experts[r] >= 0 ? workspace.gmem_ranks[slot] : 0;
  }
  ExpertSums sums;
  int before[4];
  sum_units(p, ranked, smem_before, sums, before, smem_sums);
  TESSERA_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    if (ranked.per_block == 1 || experts[r] < 0) continue;
    int const unit = (place + r * arch::kWarpThreads) / ranked.slots;
    ranks[r] += smem_before[unit * workspace.pitch + experts[r]];
  }
  clear_words(p.cleared, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  scatter_block(p, block_slot, block_end, experts, ranks, sums, before, smem);
  arch::cluster_sync();
}

// Where all slots are one block, the workspace is not needed. The first CTA makes the tables; the others clear.
__global__ void __launch_bounds__(MetadataConfig::kThreads)
    metadata_one_block(__grid_constant__ MetadataArguments const p) {
  arch::let_next_kernel_start();  // experts_fwd_few_tokens or up_projection_fwd, which wait
  arch::wait_for_previous_kernel();
  TESSERA_DYNAMIC_SHARED_ARRAY(uint16_t, smem_counts);
  TESSERA_STATIC_SHARED(smem, ScatterStorage);
  if (blockIdx.x > 0) return clear_share(p.cleared, static_cast<int>(blockIdx.x) - 1);
  clear_beside_tables(p.cleared);
  int experts[MetadataConfig::kRounds], ranks[MetadataConfig::kRounds];
  int* const smem_totals = smem.rows;  // until scatter_block() has a use for them
  rank_block(p, first_place(), experts, ranks, smem_counts,
             [&](int e, int rows) { smem_totals[e] = rows; });
  ExpertSums sums;
  load_four(sums.total, smem_totals, static_cast<int>(threadIdx.x) * 4, p.experts);
  TESSERA_UNROLL
  for (int i = 0; i < 4; ++i) sums.block[i] = sums.total[i];
  scatter_block(p, 0, p.slots, experts, ranks, sums, {}, smem);
}

template <class Config>
cudaError_t launch_metadata_config(MetadataArguments const& args, cudaStream_t stream) {
  if (args.experts < 1 || args.experts > Config::kMaxExperts || args.slots > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (args.slots == 0) {  // no kernel behind has a row, so none reads a word
    if (args.unused.count > 0) {
      cudaError_t const error = cudaMemsetAsync(
          args.unused.gmem, 0, sizeof(int32_t) * static_cast<size_t>(args.unused.count), stream);
      if (error != cudaSuccess) return error;
    }
    return cudaMemsetAsync(args.gmem_expert_offsets, 0, sizeof(int32_t) * (args.experts + 1),
                           stream);
  }
  RankUnits const ranked(args.unit_slots);
  auto const blocks = static_cast<unsigned>(ranked.blocks(args.slots));
  auto const smem_bytes = sizeof(uint16_t) * static_cast<size_t>(Config::kWarps * args.experts);
  if (args.unit_slots > kMetadataBlockSlots || (args.unit_slots > 0 && blocks == 1)) {
    return cudaErrorInvalidValue;
  }
  if (blocks == 1) {
    return host::launch_early(metadata_one_block, true, 1 + clearing_ctas(args.cleared),
                              Config::kThreads, smem_bytes, stream, args);
  }
  if (args.unit_slots == 0) {
    cudaError_t const error =
        host::launch_early(metadata_rank, true, blocks, Config::kThreads, smem_bytes, stream, args);
    if (error != cudaSuccess) return error;
  }
  auto const before_bytes = sizeof(uint16_t) *
                            static_cast<size_t>(ranked.per_block > 1 ? ranked.per_block : 0) *
                            static_cast<size_t>(MetadataWorkspace::pitch_of(args.experts));
  unsigned const in_clusters =
      (blocks + Config::kCluster - 1) / Config::kCluster * Config::kCluster;
  return host::launch_early(metadata_scatter, true, in_clusters, Config::kThreads, before_bytes,
                            stream, args);
}

}  // namespace tessera::cuda
