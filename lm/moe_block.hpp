// SPDX-License-Identifier: Apache-2.0
// One MoE block of the model: the library's layer with its router, and the memory that lies between its
// forward and its backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lm/config.hpp"
#include "tessera/moe.hpp"

namespace tessera::lm {

/// Token rounding of one call; the default is none, as evaluation uses.
struct RoundingOptions {
  Rounding rounding = Rounding::none;
  std::int32_t tile = 128;
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
};

/// Factors of the losses of a router's logits (tessera/balance.hpp).
struct RouterLosses {
  double balance = 0;
  double z = 0;
  [[nodiscard]] bool any() const noexcept { return balance != 0 || z != 0; }
};

/// Describes what one MoE block computes for so many tokens. In training the router and the rounding are those of the
/// options. Elsewhere nothing is rounded, and where experts choose, which looks at other tokens and so at what
/// comes later, tokens choose by the same scores instead.
MoeDesc moe_desc(ModelConfig const& config, std::int64_t tokens, RoundingOptions const& rounding,
                 std::int64_t layer, bool training);

struct MoeWeights {
  float const* router;
  float const* selection_bias;  ///< [E], or null
  float const* up;
  float const* down;
};

struct MoeGradients {
  float* router;
  float* up;
  float* down;
};

class MoeBlock {
 public:
  MoeBlock(ModelConfig const& config, std::int64_t layer);

  /// o = MoE(x) for `tokens` rows; counts [E] receives the rows of each expert. With `save`, what
  /// backward needs stays in this object. `workspace` is shared among blocks and grows as needed.
  void forward(Context const& context, std::int64_t tokens, RoundingOptions const& rounding,
               bool save, float const* x, MoeWeights const& weights, float* o, std::int32_t* counts,
               std::vector<std::byte>& workspace);

  /// The backward pass of the last forward call that saved. Writes dx and the weights' gradients; adds those of the
  /// router's losses.
  void backward(Context const& context, RouterLosses const& losses, float const* x,
                float const* d_o, MoeWeights const& weights, float* dx,
                MoeGradients const& gradients, std::vector<std::byte>& workspace);

  /// Tokens that chose each expert in the last forward call that saved, before rounding: [E].
  [[nodiscard]] std::vector<std::int32_t> const& topk_counts() const noexcept {
    return topk_counts_;
  }

 private:
  [[nodiscard]] ExpertWeights expert_weights(MoeWeights const& weights) const;
  void router_losses_bwd(Context const& context, RouterLosses const& losses,
                         std::vector<std::byte>& workspace);

  ModelConfig config_;
  std::int64_t layer_;
  MoeDesc saved_;  // of the last forward call that saved
  std::vector<float> h_, logits_, aux_dlogits_;
  std::vector<std::int32_t> topk_counts_;  // before rounding
  std::vector<std::int32_t> routing_;
};

}  // namespace tessera::lm
