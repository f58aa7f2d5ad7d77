// SPDX-License-Identifier: Apache-2.0
// The model, a Qwen3-MoE over bytes. Per layer, with the residual stream x [T,d]:
//   u = x + W_o attention(rope(norm_q(W_q a)), rope(norm_k(W_k a)), W_v a),  a = norm(x)
//   x' = u + moe(norm(u))
// and the logits are norm(x) E^T with the embedding E. Forward saves what backward reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lm/attention.hpp"
#include "lm/config.hpp"
#include "lm/linear.hpp"
#include "lm/moe_block.hpp"
#include "lm/parameters.hpp"
#include "lm/rope.hpp"
#include "tessera/context.hpp"

namespace tessera::lm {

/// Sequences of equal length, one after the other.
struct Batch {
  std::int64_t sequences = 0;
  std::int64_t length = 0;
  std::span<std::uint8_t const> inputs;   ///< [sequences * length]
  std::span<std::uint8_t const> targets;  ///< the byte after each input
};

class Model {
 public:
  /// Holds `context` by reference.
  Model(Context const& context, ModelConfig const& config);

  [[nodiscard]] ModelConfig const& config() const noexcept { return config_; }
  [[nodiscard]] ParameterLayout const& layout() const noexcept { return layout_; }

  /// Returns the batch's mean loss in nats per byte. Writes every element of `gradients`: of that loss plus
  /// each layer's router losses.
  double train(std::span<float const> parameters, Batch const& batch,
               RoundingOptions const& rounding, RouterLosses const& losses,
               std::span<float> gradients);

  /// Moves the selection biases in `parameters` by `rate` towards the experts that the last train() used less than
  /// others. Only where has_selection_bias(config()).
  void update_selection_bias(double rate, std::span<float> parameters) const;

  /// The loss alone. Without `moe`, the MoE blocks add nothing to the residual stream.
  double evaluate(std::span<float const> parameters, Batch const& batch, bool moe = true);

  /// The 256 logits after the last byte of `tokens` (1 to config().context of them).
  std::span<float const> next_logits(std::span<float const> parameters,
                                     std::span<std::uint8_t const> tokens);

  /// Rows of each expert in the last call, [layers * E].
  [[nodiscard]] std::span<std::int32_t const> expert_counts() const noexcept { return counts_; }

 private:
  struct LayerMemory {
    std::vector<float> x, normed, inverse_rms;  // the layer's input
    std::vector<float> qkv, q, k;               // projected; then normalised and rotated
    std::vector<float> q_inverse_rms, k_inverse_rms, p, attended;
    std::vector<float> u, moe_normed, moe_inverse_rms;  // after attention
  };

  struct Pass;
  void resize(std::int64_t sequences, std::int64_t length);
  void forward(Pass const& pass);
  void layer_fwd(Pass const& pass, std::int64_t layer, float* x_out);
  void attention_block_fwd(Pass const& pass, LayerMemory& memory, LayerOffsets const& at);
  void backward(Pass const& pass, std::span<float> gradients);
  void layer_bwd(Pass const& pass, std::int64_t layer, std::span<float> gradients);
  void attention_block_bwd(Pass const& pass, LayerMemory& memory, LayerOffsets const& at,
                           std::span<float> gradients);
  [[nodiscard]] AttentionShape attention_shape() const;
  [[nodiscard]] std::int64_t tokens() const { return sequences_ * length_; }

  Context const& context_;
  ModelConfig config_;
  ParameterLayout layout_;
  RopeTable rope_;
  std::vector<MoeBlock> blocks_;
  std::int64_t sequences_ = 0, length_ = 0;  // of the batch at hand
  std::vector<LayerMemory> layers_;
  std::vector<float> x_, normed_, inverse_rms_, logits_;  // after the last layer
  std::vector<float> dx_, d_normed_, d_qkv_, d_attended_;
  std::vector<std::int32_t> counts_;
  std::vector<std::byte> workspace_;
};

}  // namespace tessera::lm
