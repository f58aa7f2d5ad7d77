// SPDX-License-Identifier: Apache-2.0
// A published MoE model as its config.json describes it: the MoE layer that Tessera would run, which layers have
// one, and where the parameters are.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::huggingface {

/// Parameters of a whole model by what they belong to; biases and norms included.
struct Parameters {
  std::int64_t embedding = 0;  ///< [vocabulary, d]
  std::int64_t head = 0;       ///< [vocabulary, d]; 0 where it is the embedding
  std::int64_t attention = 0;  ///< or what stands in its place: latent or linear attention
  std::int64_t norms = 0;
  std::int64_t dense_mlp = 0;  ///< of layers without experts
  std::int64_t router = 0;
  std::int64_t shared_experts = 0;
  std::int64_t routed_experts = 0;

  [[nodiscard]] std::int64_t total() const noexcept {
    return embedding + head + attention + norms + dense_mlp + router + shared_experts +
           routed_experts;
  }
};

/// Heads of grouped-query attention.
struct AttentionHeads {
  std::int64_t query, key_value, dim;
};

struct Model {
  std::string model_type;
  std::int64_t layers = 0;
  std::int64_t vocabulary = 0;
  std::optional<AttentionHeads> heads;   ///< nothing where layers have another attention
  std::vector<std::int64_t> moe_layers;  ///< their indices, ascending
  std::int64_t shared_intermediate = 0;  ///< width of the shared experts of one layer together
  MoeDesc moe;                           ///< one MoE layer in bf16, without tokens
  Parameters parameters;
  std::vector<std::string> notes;  ///< what the numbers leave out

  /// Parameters that one token meets: all but those of the experts that it is not sent to.
  [[nodiscard]] std::int64_t active_parameters() const noexcept;
  /// FLOPs of one token's forward pass: 2 for every parameter met, 0 for the embedding, which is looked up.
  /// Attention scores, which grow with the context, are not counted.
  [[nodiscard]] double forward_flops_per_token() const noexcept;
};

/// The model types that read_model understands.
std::vector<std::string> model_types();

/// Throws lm::InputError naming the field that is missing, contradicts another, or means something else than
/// Tessera computes.
Model read_model(nlohmann::json const& config);

/// The same for a config.json, whose path stands in front of the error.
Model load_model_config(std::filesystem::path const& path);

}  // namespace tessera::huggingface
