// SPDX-License-Identifier: Apache-2.0
// The cost of one MoE layer, from its shape alone. b bytes per element, w = 2 gated or 1, R = T*K rows,
// M_e = R/E rows per expert, G = d/n.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/moe.hpp"

namespace tessera::cli {

/// Bytes of a layer under one implementation's way of saving.
struct MemoryPlan {
  char const* policy;
  char const* keeps;
  double saved = 0;                              ///< from forward to backward
  std::optional<double> forward_transient = {};  ///< during the call, where it is known
  std::optional<double> backward_transient = {};
  bool has_curve =
      true;  ///< in the picture: not what another policy saves, nor what few shapes allow
};

/// Tessera's policies, then what other implementations keep: counted from their sources, without their
/// routing tables. Those in FP8 for bf16 layers with d and n in whole blocks of 128; weights quantised in the calls.
std::vector<MemoryPlan> memory_plans(MoeDesc const& desc);

/// Counts the equal layers, all alive, from which a stack peaks lower in backward with `plan` than with `base`: a layer
/// alone may need more. None where it never does, or where bytes are not known.
std::optional<std::int64_t> layers_for_lower_peak(MemoryPlan const& plan, MemoryPlan const& base);

/// saved_bytes() of a layer whose router.tile is the tile of waste too, without token rounding. Throws CommandError.
SavedBytes saved_by_layer(MoeDesc desc);

/// R, as far as it follows from the shape: T*K, the capacities of expert-choice, the slots of varying experts.
double routed_rows(MoeDesc const& desc);

/// E (w+1) n d, with the biases.
double expert_parameters(MoeDesc const& desc);

/// FLOPs per byte of the experts' forward GEMMs: (2w+2) M_e n d over b (2 M_e d + 2 M_e n + (w+1) n d); for a
/// gated bf16 layer 3 / (2/d + 2/n + 3/M_e).
double arithmetic_intensity(MoeDesc const& desc);
/// The same with h written and y aggregated; gated bf16: 3 / (4/d + 3/n + 1/(nK) + 3/M_e).
double layer_arithmetic_intensity(MoeDesc const& desc);

/// Expected rows beyond the routed ones, over R, when every token chooses its K experts uniformly and M_e is
/// padded to `tile`: M_e is then binomial, T trials of K/E. 0 without rows.
double expected_tile_waste(std::int64_t tokens, std::int64_t experts, std::int64_t top_k,
                           std::int64_t tile);

/// Layers of equal n*K and n*E with K = 1, 2, 4, ...: from coarse to fine experts.
std::vector<MoeDesc> granularities(MoeDesc const& desc);

}  // namespace tessera::cli
