// SPDX-License-Identifier: Apache-2.0
// metadata: the routing tables of a call, row(j) = expert_offsets[id_j] + #{j' < j : id_j' = id_j}.
// Host side: the call's arguments, which are the kernels' parameters too, the workspace and the launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cleared_words.hpp"

namespace tessera::cuda {

constexpr int kMetadataBlockSlots = 1024;  // slots that one CTA ranks

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
};

__host__ __device__ constexpr int64_t metadata_blocks(int64_t slots) {
  return (slots + kMetadataBlockSlots - 1) / kMetadataBlockSlots;
}

/// Rows of 16 bytes.
__host__ __device__ constexpr int64_t metadata_counts_pitch(int64_t experts) {
  return (experts + 7) / 8 * 8;
}
/// Rows per (block, expert), and ranks inside a block, uint16.
constexpr size_t metadata_workspace_bytes(int64_t slots, int64_t experts) {
  return static_cast<size_t>(2 * metadata_blocks(slots) *
                             (metadata_counts_pitch(experts) + kMetadataBlockSlots));
}

/// Launches on `stream`; allocates nothing, waits for nothing. cudaErrorInvalidValue: E > 1024.
cudaError_t launch_metadata(MetadataArguments const& args, cudaStream_t stream);

/// The same tables for any E, one thread per expert.
cudaError_t launch_metadata_plain(MetadataArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
