// SPDX-License-Identifier: Apache-2.0
// metadata: expert_offsets, sort_permutation, gather_index and inverse_permutation from slot ids, stable:
//           row(j) = expert_offsets[id_j] + #{j' < j : id_j' = id_j}.
// Shapes   ids (P) int32 or int64, tables (E+1), (P), (P), (P) int32; B = ceil(P/1024) blocks of slots
// Work     reads 4P (8P), writes 12P + 4E; between the kernels 2P of ranks and 4*E*B of counts; launch bound
// Schedule three kernels, each a node of its own in the stream
//   metadata_rank    a CTA per block: a warp ranks its 32 slots among themselves by ballots, the CTA adds what
//                    earlier warps hold of the same expert; ranks and counts go to the workspace
//   metadata_scan    a warp per expert: exclusive scan of its counts over blocks, total behind them
//   metadata_scatter a CTA per block: scan of the E totals in shared memory, then every slot knows its row
// Numerics integers; no atomics anywhere, so rows never depend on timing; bitwise repeatable: yes
// Requires E <= 1024, P < 2^31
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/metadata.hpp"

namespace tessera::cuda {

struct MetadataConfig {
  static constexpr int kThreads = kMetadataBlockSlots;
  static constexpr int kWarps = kThreads / arch::kWarpThreads;
  static constexpr int kMaxExperts = 1024;
  static constexpr int kScanWarps = 8;
  static constexpr int kScanVectors = 4;
};

// Regions of the workspace.
struct MetadataWorkspace {
  int32_t* gmem_totals;  // (E): M_e
  int32_t* gmem_counts;  // (E, pitch): rows of (expert, block), then their exclusive sums
  uint16_t* gmem_ranks;  // (B, 1024): place of a slot among its expert's slots of the block
  int64_t pitch;

  __device__ static MetadataWorkspace of(MetadataArguments const& p) {
    int64_t const pitch = metadata_pitch(p.slots);
    auto* const totals = static_cast<int32_t*>(p.gmem_workspace);
    int32_t* const counts = totals + (p.experts + 3) / 4 * 4;
    return {totals, counts, reinterpret_cast<uint16_t*>(counts + p.experts * pitch), pitch};
  }
};

// The expert of a slot, or -1 for a sentinel and beyond the list.
__device__ __forceinline__ int expert_of_slot(MetadataArguments const& p, int64_t slot) {
  if (slot >= p.slots) return -1;
  int64_t const id = p.ids_are_int64 ? static_cast<int64_t const*>(p.gmem_ids)[slot]
                                     : static_cast<int32_t const*>(p.gmem_ids)[slot];
  return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

__global__ void __launch_bounds__(MetadataConfig::kThreads)
    metadata_rank(__grid_constant__ MetadataArguments const p) {
  // How many slots of each expert each warp holds: at most 32, so a byte each; 32 KiB at E = 1024.
  extern __shared__ uint8_t smem_warp_counts[];  // (warps, E)
  int const warp = arch::warp_idx(), lane = arch::lane_idx();
  int64_t const slot = int64_t{blockIdx.x} * kMetadataBlockSlots + threadIdx.x;
  int const expert = expert_of_slot(p, slot);
  for (int i = static_cast<int>(threadIdx.x); i < MetadataConfig::kWarps * p.experts / 4;
       i += MetadataConfig::kThreads) {
    reinterpret_cast<uint32_t*>(smem_warp_counts)[i] = 0;
  }
  __syncthreads();
  uint32_t const peers = __match_any_sync(0xffffffffu, expert);
  int const rank_in_warp = __popc(peers & ((1u << lane) - 1));
  if (expert >= 0 && rank_in_warp == 0) {
    smem_warp_counts[warp * p.experts + expert] = static_cast<uint8_t>(__popc(peers));
  }
  __syncthreads();
  MetadataWorkspace const workspace = MetadataWorkspace::of(p);
  for (int e = static_cast<int>(threadIdx.x); e < p.experts; e += MetadataConfig::kThreads) {
    int total = 0;
    TESSERA_UNROLL
    for (int w = 0; w < MetadataConfig::kWarps; ++w) total += smem_warp_counts[w * p.experts + e];
    workspace.gmem_counts[e * workspace.pitch + blockIdx.x] = total;
  }
  if (expert < 0) return;
  int rank = rank_in_warp;
  for (int w = 0; w < warp; ++w) rank += smem_warp_counts[w * p.experts + expert];
  workspace.gmem_ranks[slot] = static_cast<uint16_t>(rank);
}

// A lane scans kScanVectors * 4 consecutive blocks in registers, the warp scans the lanes' sums: one round of
// loads for 512 blocks.
__global__ void __launch_bounds__(MetadataConfig::kScanWarps* arch::kWarpThreads)
    metadata_scan(__grid_constant__ MetadataArguments const p) {
  constexpr int kValues = MetadataConfig::kScanVectors * 4;
  int const expert = static_cast<int>(blockIdx.x) * MetadataConfig::kScanWarps + arch::warp_idx();
  if (expert >= p.experts) return;
  MetadataWorkspace const workspace = MetadataWorkspace::of(p);
  int32_t* const gmem_counts = workspace.gmem_counts + expert * workspace.pitch;
  int const lane = arch::lane_idx();
  auto const blocks = static_cast<int>(metadata_blocks(p.slots));
  int before = 0;
  for (int first = 0; first < blocks; first += arch::kWarpThreads * kValues) {
    int const own = first + lane * kValues;
    int4 counts[MetadataConfig::kScanVectors];
    TESSERA_UNROLL
    for (int v = 0; v < MetadataConfig::kScanVectors; ++v) {
      bool const inside = own + 4 * v < workspace.pitch;
      counts[v] = inside ? *reinterpret_cast<int4 const*>(gmem_counts + own + 4 * v) : int4{};
    }
    auto* const values = reinterpret_cast<int*>(counts);
    int sum = 0;
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      int const count =
          own + i < blocks ? values[i] : 0;  // the last vector may reach past the blocks
      values[i] = sum;
      sum += count;
    }
    int inclusive = sum;
    TESSERA_UNROLL
    for (int step = 1; step < arch::kWarpThreads; step *= 2) {
      int const left = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (lane >= step) inclusive += left;
    }
    TESSERA_UNROLL
    for (int v = 0; v < MetadataConfig::kScanVectors; ++v) {
      int const offset = before + inclusive - sum;
      int4 const out{values[4 * v] + offset, values[4 * v + 1] + offset, values[4 * v + 2] + offset,
                     values[4 * v + 3] + offset};
      if (own + 4 * v < workspace.pitch) {
        *reinterpret_cast<int4*>(gmem_counts + own + 4 * v) = out;
      }
    }
    before += __shfl_sync(0xffffffffu, inclusive, arch::kWarpThreads - 1);
  }
  if (lane == 0) workspace.gmem_totals[expert] = before;
}

// Exclusive scan of the experts' totals: smem_offsets[e], and R at [E]. All threads of the CTA.
__device__ __forceinline__ void scan_totals(MetadataArguments const& p,
                                            MetadataWorkspace const& workspace, int* smem_offsets,
                                            int* smem_warp_sums) {
  int const e = static_cast<int>(threadIdx.x), lane = arch::lane_idx(), warp = arch::warp_idx();
  int const total = e < p.experts ? workspace.gmem_totals[e] : 0;
  int inclusive = total;
  TESSERA_UNROLL
  for (int step = 1; step < arch::kWarpThreads; step *= 2) {
    int const left = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += left;
  }
  if (lane == arch::kWarpThreads - 1) smem_warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; ++w) before += smem_warp_sums[w];
  if (e <= p.experts) smem_offsets[e] = before + inclusive - total;
  if (e == MetadataConfig::kThreads - 1 && p.experts == MetadataConfig::kMaxExperts) {
    smem_offsets[p.experts] = before + inclusive;
  }
  __syncthreads();
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

__global__ void __launch_bounds__(MetadataConfig::kThreads)
    metadata_scatter(__grid_constant__ MetadataArguments const p) {
  __shared__ int smem_offsets[MetadataConfig::kMaxExperts + 1];
  __shared__ int smem_warp_sums[MetadataConfig::kWarps];
  MetadataWorkspace const workspace = MetadataWorkspace::of(p);
  // Loads that do not depend on the scan come first.
  int64_t const slot = int64_t{blockIdx.x} * kMetadataBlockSlots + threadIdx.x;
  int const expert = expert_of_slot(p, slot);
  int row = 0;
  if (expert >= 0) {
    row = workspace.gmem_counts[expert * workspace.pitch + blockIdx.x] + workspace.gmem_ranks[slot];
  }
  scan_totals(p, workspace, smem_offsets, smem_warp_sums);
  if (blockIdx.x == 0) {
    for (int e = static_cast<int>(threadIdx.x); e <= p.experts; e += MetadataConfig::kThreads) {
      p.gmem_expert_offsets[e] = smem_offsets[e];
    }
  }
  if (slot >= p.slots) return;
  if (slot >= smem_offsets[p.experts]) {  // as a row index: beyond the last row
    p.gmem_sort_permutation[slot] = -1;
    p.gmem_gather_index[slot] = 0;
  }
  if (expert < 0) {
    p.gmem_inverse_permutation[slot] = -1;
    return;
  }
  row += smem_offsets[expert];
  p.gmem_inverse_permutation[slot] = row;
  p.gmem_sort_permutation[row] = static_cast<int32_t>(slot);
  p.gmem_gather_index[row] = token_of_slot(p, slot);
}

template <class Config>
cudaError_t launch_metadata_config(MetadataArguments const& args, cudaStream_t stream) {
  if (args.experts < 1 || args.experts > Config::kMaxExperts || args.slots > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (args.slots == 0) {
    return cudaMemsetAsync(args.gmem_expert_offsets, 0, sizeof(int32_t) * (args.experts + 1),
                           stream);
  }
  auto const blocks = static_cast<unsigned>(metadata_blocks(args.slots));
  auto const scan_ctas =
      static_cast<unsigned>((args.experts + Config::kScanWarps - 1) / Config::kScanWarps);
  auto const smem_bytes = static_cast<size_t>(Config::kWarps * args.experts);
  metadata_rank<<<blocks, Config::kThreads, smem_bytes, stream>>>(args);
  metadata_scan<<<scan_ctas, Config::kScanWarps * arch::kWarpThreads, 0, stream>>>(args);
  metadata_scatter<<<blocks, Config::kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda
