// SPDX-License-Identifier: Apache-2.0
// What balancing makes of the counts f of an expert's tokens: the costs C of the load-balancing loss, and the update of
// the selection bias.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/load_counts.hpp"

namespace tessera::cuda {

/// C_e; all 0 without counts, or where one of them breaks a rule.
struct BalanceCosts {
  core::LoadCounts counts;
  float balance;
  int64_t scope_tokens;  // S
  int64_t experts;       // E
  float* gmem_cost;      // (E)
  uint64_t* gmem_error;
};
cudaError_t launch_balance_costs(BalanceCosts const& args, cudaStream_t stream);

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
