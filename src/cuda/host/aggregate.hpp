// SPDX-License-Identifier: Apache-2.0
// aggregate: o_t = rnd([o_t +] sum over slots j of token t, ascending, of s_j * y[inverse_permutation[j]]).
// Host side: the call's arguments, which are the kernels' parameters too, and the two launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda {

struct AggregateArguments {
  void const* gmem_y;                       // (R,d), rows 16-byte aligned
  float const* gmem_scores;                 // (P); null: plain sum, as for dx
  int32_t const* gmem_inverse_permutation;  // (P) slot -> row; negative: sentinel, adds nothing
  int32_t const* gmem_token_offsets;        // (T+1); null: token t owns slots [t*K, (t+1)*K)
  void* gmem_o;                             // (T,d), every element is written
  int64_t o_pitch;                          // elements from one row of o to the next
  bool adds_to_o;                           // the sum starts from what o holds, else from 0
  // (T) or null; with adds_to_o a token's sum starts from 0 if its byte is 0.
  uint8_t const* gmem_adds = nullptr;
  int64_t tokens;  // T, 0 allowed
  int64_t hidden;  // d
  int32_t top_k;   // K; with token_offsets the typical number of slots
};

/// Arguments of an aggregate that runs beside the previous launch of the stream. That one neither writes what is read
/// here nor uses what is written here, and lets this one start only when all that came before it has ended.
struct AggregateBesideArguments {
  AggregateArguments aggregate;
  uint32_t* gmem_token_counter;  // one int, 0 before and after every launch
};

/// Launches on `stream`; allocates nothing, waits for nothing. Element: __nv_bfloat16 or float.
/// cudaErrorInvalidValue: rows or bases not multiples of 16 bytes, or 2^31 or more work items.
template <class Element>
cudaError_t launch_aggregate(AggregateArguments const& args, cudaStream_t stream);

/// The same bits on the SMs that the previous kernel leaves. What follows in the stream waits for both.
template <class Element>
cudaError_t launch_aggregate_beside(AggregateBesideArguments const& args, int sm_count,
                                    cudaStream_t stream);

/// The same bits for any d and alignment, one thread per output.
template <class Element>
cudaError_t launch_aggregate_plain(AggregateArguments const& args, cudaStream_t stream);

}  // namespace tessera::cuda
