// SPDX-License-Identifier: Apache-2.0
// Balancing makes two things of the counts f of an expert's tokens: the costs C of the load-balancing loss, and the
// update of the selection bias.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/load_counts.hpp"

namespace tessera::cuda {

/// C_e, and z / S behind them; C_e all 0 without counts, or where one of them breaks a rule.
struct BalanceCosts {
  core::LoadCounts counts;
  float balance, z;
  int64_t scope_tokens;       // S; 0: *gmem_count
  int32_t const* gmem_count;  // one int
  int64_t experts;            // E
  float* gmem_cost;           // (E+1)
  uint64_t* gmem_error;
};
cudaError_t launch_balance_costs(BalanceCosts const& args, cudaStream_t stream);

/// C_be of the loss of sequences, and the sequence of every token: -1 where offsets that break a rule leave it in none.
struct SequenceCosts {
  void const* gmem_offsets;  // (B+1) int32 or int64
  bool offsets_are_int64;
  void const* gmem_ids;  // (T,K) int32 or int64, rows ids_pitch elements apart
  bool ids_are_int64;
  int64_t ids_pitch, top_k;
  uint8_t const* gmem_token_mask;  // (T) or null
  int64_t tokens, experts;         // T, E
  int64_t sequences;               // B > 0
  float balance;
  int32_t* gmem_counts;       // (B,E+1): f_be, then T_b
  int32_t* gmem_sequence_of;  // (T)
  float* gmem_cost;           // (B,E)
  uint64_t* gmem_error;
};
cudaError_t launch_sequence_costs(SequenceCosts const& args, cudaStream_t stream);

/// bias_e += rate * (sign(mean(f) - f_e) - mean of the signs); nothing where all counts are 0 or one breaks a rule.
struct SelectionBiasUpdate {
  core::LoadCounts counts;
  float rate;
  bool subtract_mean;
  float* gmem_bias;  // (E)
  uint64_t* gmem_error;
};
cudaError_t launch_selection_bias_update(SelectionBiasUpdate const& args, cudaStream_t stream);

}  // namespace tessera::cuda
