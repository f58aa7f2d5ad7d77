// SPDX-License-Identifier: Apache-2.0
// A correct layer with one thing wrong: what every tolerance must reject.
#pragma once

#include "verify/tensors.hpp"

namespace tessera::verify {

enum class Mutant {
  none,
  all_zeros,
  neighbour_row,  ///< one row replaced by its neighbour
  swapped_experts,
  lost_hidden_tail,        ///< last k-tile dropped in sums over d ..
  lost_intermediate_tail,  ///< .. over n
  lost_token_tail,         ///< .. over the rows of an expert
  ignored_scores,
  stale_row,  ///< a partial tile: next expert's first row overwritten, last row left over
  swapped_gate_and_up,
  missing_slot,    ///< the slot of least weight is left out of its token's sum
  scaled_dscores,  ///< ds from dA = s*dA'
  no_bias_in_dscores,
  computed_sentinel,
  unwritten_empty_expert,
  ignored_accumulate,
  wrong_token,         ///< the last row reads another token
  low_precision_sums,  ///< accumulators rounded to bf16 after each term
};

/// The layer's results with `mutant` at work, computed by the reference's ops in fp64 (low_precision_sums: in the
/// accumulator's precision) and rounded to the storage type.
Tensors mutant_tensors(LayerData const& data, Mutant mutant);

}  // namespace tessera::verify
