// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine as kernels of their own, around the GEMMs of a single GPU: the unfused chain.
//   dispatch   lists and counts to the owners (route_scan, ack, publish), the plan, rows into the pool
//   combine    rows of y to unique slots on their sources; ack says that all of a rank's came back
// The pool has no pads: row r of it is row r of the plan, and expert_offsets are those of a GEMM.
// Host side: arguments, which are the kernels' parameters too, and launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dist/divisor.hpp"
#include "dist/engine.hpp"
#include "dist/fault.hpp"
#include "dist/protocol.hpp"

namespace tessera::dist {

struct ExchangeArguments {
  ExchangeShape shape;
  WindowLayout window;
  LocalLayout local;
  std::int32_t rank;
  char* windows[kMaxRanks];   // zeroed before the first pass; x of this rank in its own
  char* gmem_local;           // local.bytes, zeroed before the first pass
  std::uint32_t* gmem_epoch;  // 1 before the first pass; combine increments it
  Fault* fault;               // zero; memory of the host that the device writes
  std::uint64_t limit_ns;     // of a wait
  std::uint32_t
      jitter_ns;        // tests: every wait is followed by a pause of up to this length; 0: none
  std::int32_t tokens;  // of this rank in this pass, at most shape.max_tokens
  std::int32_t const* gmem_topk_ids;  // [tokens,max_top_k]; outside [0,E): no row
  float const* gmem_scores;           // [tokens,max_top_k]
  std::int32_t*
      gmem_slot_of_pair;  // out [tokens*max_top_k]: the pair, or -1: rows of the slots; or null
  std::int32_t* gmem_expert_offsets;  // out [local_experts+1]
  char* gmem_pool;                    // out [max_rows,d] bf16
  char const* gmem_y;                 // [max_rows,d] bf16, for combine
  // Of the shape, so that no thread divides by it for each pair or row.
  std::int32_t local_experts = shape.local_experts();
  std::int32_t added_experts = shape.added_experts();
  Divisor by_local_experts{local_experts}, by_top_k{shape.max_top_k};

  [[nodiscard]] TESSERA_INLINE std::int32_t owner(std::int32_t expert) const {
    return by_local_experts.quotient(static_cast<std::uint32_t>(expert));
  }
  [[nodiscard]] TESSERA_INLINE std::int32_t token_of(std::uint32_t pair) const {
    return by_top_k.quotient(pair);
  }
};

/// CTAs of a launch. They wait for each other, so all have to be resident: launches are cooperative.
/// They hold sm_count SMs until the slowest rank has come this far.
cudaError_t launch_dispatch(ExchangeArguments const& args, int sm_count, cudaStream_t stream);
/// When it ends, all rows of this rank's tokens lie in its slots.
cudaError_t launch_combine(ExchangeArguments const& args, int sm_count, cudaStream_t stream);

}  // namespace tessera::dist
