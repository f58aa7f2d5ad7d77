// SPDX-License-Identifier: Apache-2.0
// metadata: the routing tables of a call, row(j) = expert_offsets[id_j] + #{j' < j : id_j' = id_j}.
// Host side: the call's arguments, which are the kernels' parameters too, the workspace and the launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cleared_words.hpp"

namespace tessera::cuda {

constexpr int kMetadataBlockSlots = 1024;  // slots of one CTA, at most

struct MetadataArguments {
  void const* gmem_ids;               // (P) int32 or int64 by slot; outside [0,E): sentinel, no row
  bool ids_are_int64;                 //
  int32_t const* gmem_token_offsets;  // (T+1); null: token t owns slots [t*K, (t+1)*K)
  int64_t slots;                      // P < 2^31, 0 allowed
  int32_t tokens;                     // T
  int32_t top_k;                      // K; not read with token_offsets
  int32_t experts;                    // E

  int32_t* gmem_expert_offsets;       // (E+1)
  int32_t* gmem_sort_permutation;     // (P) row -> slot; -1 from row R on
  int32_t* gmem_gather_index;         // (P) row -> token; 0 from row R on
  int32_t* gmem_inverse_permutation;  // (P) slot -> row; -1 at sentinels
  void* gmem_workspace;               // metadata_workspace_bytes, 16-byte aligned, any content
  ClearedWords cleared;
  ClearedWords unused =
      {};  // of the tables: elements that belong to none (core/unused_elements.hpp)
  /// Slots of a unit that route has ranked; its counts and ranks are in the workspace; P > 1024. 0: route ranked none.
  int32_t unit_slots = 0;
};

/// Slots are ranked among those of their expert in a unit: the 1024 of a CTA of metadata_rank, or fewer by route.
struct RankUnits {
  int slots;      // of a unit
  int per_block;  // units of a CTA of metadata_scatter

  __host__ __device__ explicit constexpr RankUnits(int32_t unit_slots)
      : slots(unit_slots > 0 ? unit_slots : kMetadataBlockSlots),
        per_block(kMetadataBlockSlots / slots) {}
  __host__ __device__ constexpr int block_slots() const { return slots * per_block; }
  __host__ __device__ constexpr int64_t units(int64_t all_slots) const {
    return (all_slots + slots - 1) / slots;
  }
  __host__ __device__ constexpr int64_t blocks(int64_t all_slots) const {
    return (all_slots + block_slots() - 1) / block_slots();
  }
};

/// Regions of the workspace.
struct MetadataWorkspace {
  int pitch;              // of a unit's counts, in experts: rows of 16 bytes
  uint16_t* gmem_counts;  // (units, pitch): rows of (unit, expert)
  uint16_t* gmem_ranks;   // (P): place of a slot among its expert's slots of the unit

  __host__ __device__ static constexpr int64_t pitch_of(int64_t experts) {
    return (experts + 7) / 8 * 8;
  }
  __host__ __device__ static MetadataWorkspace of(void* gmem, int64_t slots, int64_t experts,
                                                  int32_t unit_slots) {
    auto* const counts = static_cast<uint16_t*>(gmem);
    int64_t const pitch = pitch_of(experts);
    return {static_cast<int>(pitch), counts, counts + RankUnits(unit_slots).units(slots) * pitch};
  }
  __host__ __device__ static MetadataWorkspace of(MetadataArguments const& p) {
    return of(p.gmem_workspace, p.slots, p.experts, p.unit_slots);
  }
};

constexpr size_t metadata_workspace_bytes(int64_t slots, int64_t experts, int32_t unit_slots = 0) {
  return sizeof(uint16_t) *
         static_cast<size_t>(
             RankUnits(unit_slots).units(slots) * MetadataWorkspace::pitch_of(experts) + slots);
}

/// Launches on `stream`; allocates nothing, waits for nothing. cudaErrorInvalidValue: E > 1024.
cudaError_t launch_metadata(MetadataArguments const& args, cudaStream_t stream);

/// The same tables for any E, one thread per expert.
cudaError_t launch_metadata_plain(MetadataArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
