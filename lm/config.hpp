// SPDX-License-Identifier: Apache-2.0
// The sizes of the model: a Qwen3-MoE over bytes, as Hugging Face describes it in config.json.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "tessera/shape.hpp"

namespace tessera::lm {

struct ModelConfig {
  static constexpr std::int64_t kVocabulary = 256;  // a token is a byte

  std::int64_t hidden = 128;       ///< d
  std::int64_t intermediate = 96;  ///< n, per expert
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t kv_heads = 2;  ///< divides heads
  std::int64_t head_dim = 32;
  std::int64_t context = 128;                          ///< tokens that a prediction sees
  std::int64_t experts = 16;                           ///< E, in every layer
  std::int64_t top_k = 2;                              ///< K
  Router router = {.kind = RouterKind::topk_softmax};  ///< kind, groups, scale, normalisation
  double rms_eps = 1e-6;
  double rope_theta = 10000;

  /// Width of one token's queries, keys and values together.
  [[nodiscard]] constexpr std::int64_t qkv_width() const noexcept {
    return (heads + 2 * kv_heads) * head_dim;
  }
  bool operator==(ModelConfig const&) const = default;
};

/// True if experts are chosen with a selection bias: a number for each, which no gradient reaches and each step's load
/// moves (Model::update_selection_bias).
constexpr bool has_selection_bias(ModelConfig const& config) noexcept {
  RouterKind const kind = config.router.kind;
  return kind == RouterKind::sigmoid_bias || kind == RouterKind::group_limited ||
         kind == RouterKind::sqrtsoftplus;
}

/// Throws InputError unless every size is in range and the model has fewer than 2^31 parameters.
void validate(ModelConfig const& config);

/// Counts the parameters of a valid config.
std::int64_t parameter_count(ModelConfig const& config);

/// True if Hugging Face's Qwen3MoeForCausalLM has this router.
bool is_qwen3_moe(ModelConfig const& config) noexcept;

/// config.json of Qwen3MoeForCausalLM; with another router, of model_type "tessera_moe" with the router beside it.
nlohmann::json to_json(ModelConfig const& config);

/// Reads config.json. Throws InputError for anything but a byte-level Qwen3-MoE with tied embeddings, or its
/// "tessera_moe" form.
ModelConfig config_from_json(nlohmann::json const& json);
ModelConfig parse_config(std::string_view text);

/// Command line names of routers ("topk-softmax") and rounding rules ("nr-f"). The second form throws
/// InputError, listing the names.
char const* router_name(RouterKind router) noexcept;
RouterKind router_from_name(std::string_view name);
char const* rounding_name(Rounding rounding) noexcept;
Rounding rounding_from_name(std::string_view name);

}  // namespace tessera::lm
