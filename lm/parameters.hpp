// SPDX-License-Identifier: Apache-2.0
// All parameters in one flat array. Each tensor of Hugging Face's checkpoint is a contiguous slice of it:
// w_up [E,2n,d] holds gate_proj and up_proj of expert 0, then of expert 1, and so on; w_qkv is q_proj,
// k_proj, v_proj.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lm/config.hpp"

namespace tessera::lm {

/// Says what a tensor is to training.
enum class Role {
  weight,          ///< starts random, decays
  norm,            ///< starts at 1, does not decay
  selection_bias,  ///< starts at 0; the experts' load moves it, not a gradient
};

/// A tensor as the checkpoint names it.
struct NamedSlice {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  ///< in floats, into the flat array
  std::int64_t size = 0;
  Role role = Role::weight;
  double initial_std = 0;  ///< of weights
};

/// Offsets of one layer's tensors, in floats.
struct LayerOffsets {
  std::int64_t input_norm = 0;
  std::int64_t w_qkv = 0;  ///< [(H + 2G) * head_dim, d]
  std::int64_t q_norm = 0, k_norm = 0;
  std::int64_t w_o = 0;  ///< [d, H * head_dim]
  std::int64_t moe_norm = 0;
  std::int64_t w_router = 0;        ///< [E, d]
  std::int64_t selection_bias = 0;  ///< [E], where has_selection_bias(config)
  std::int64_t w_up = 0;            ///< [E, 2n, d], gate rows first
  std::int64_t w_down = 0;          ///< [E, d, n]
};

/// Tensors that a checkpoint of this model holds.
constexpr std::int64_t slice_count(ModelConfig const& config) {
  return 2 + config.layers * (9 + (has_selection_bias(config) ? 1 : 0) + 3 * config.experts);
}

class ParameterLayout {
 public:
  explicit ParameterLayout(ModelConfig const& config);

  [[nodiscard]] std::int64_t size() const noexcept { return size_; }
  [[nodiscard]] std::int64_t embedding() const noexcept {
    return 0;
  }  ///< [256, d], tied to the output
  [[nodiscard]] std::int64_t final_norm() const noexcept { return final_norm_; }
  [[nodiscard]] LayerOffsets const& layer(std::int64_t i) const {
    return layers_[static_cast<std::size_t>(i)];
  }
  /// In ascending offset, without gaps.
  [[nodiscard]] std::vector<NamedSlice> const& slices() const noexcept { return slices_; }

 private:
  std::int64_t add(std::string name, std::vector<std::int64_t> shape, Role role,
                   double initial_std = 0);
  LayerOffsets add_layer(ModelConfig const& config, std::int64_t layer);

  std::vector<NamedSlice> slices_;
  std::vector<LayerOffsets> layers_;
  std::int64_t final_norm_ = 0;
  std::int64_t size_ = 0;
};

/// Fresh parameters, as their roles say; weights are normal with NamedSlice::initial_std.
std::vector<float> initial_parameters(ParameterLayout const& layout, std::uint64_t seed);

}  // namespace tessera::lm
