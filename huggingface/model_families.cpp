// SPDX-License-Identifier: Apache-2.0
#include "huggingface/model_families.hpp"

#include <fmt/format.h>

#include "huggingface/model_parts.hpp"

namespace tessera::huggingface::parts {

namespace {

// Sizes by their fields' names, and an MoE layer everywhere.
Model with_sizes(ConfigReader const& config, char const* intermediate, char const* experts,
                 char const* top_k) {
  Model model = common(config);
  MoeShape& s = model.moe.shape;
  s.intermediate = config.size(intermediate);
  s.experts = config.size(experts);
  s.top_k = config.size_of_all(top_k);
  check_top_k(config, s, experts);
  model.moe.activation.kind = gated_activation(config);
  return model;
}

void plain_attention(ConfigReader const& config, Model& model) {
  bool const bias = config.flag_or("attention_bias", false);
  model.heads = heads(config);
  model.parameters.attention =
      model.layers * attention(model.moe.shape.hidden, *model.heads, bias, bias);
}

}  // namespace

// Sigmoid scores with a selection bias, divided by their sum; a gate of the attention's output; four norms a layer.
Model afmoe(ConfigReader const& config) {
  Model model = with_sizes(config, "moe_intermediate_size", "num_experts", "num_experts_per_tok");
  config.require("score_func", "sigmoid");
  config.require("route_norm", true);
  config.require("n_group", 1);
  model.moe.router = {.kind = RouterKind::sigmoid_bias,
                      .route_scale = static_cast<float>(config.number_or("route_scale", 1.0)),
                      .normalize_scores = true};
  std::int64_t const dense = config.count_or("num_dense_layers", 0);
  layers_after(config, model, dense, "num_dense_layers");
  MoeShape const& s = model.moe.shape;
  model.shared_intermediate = config.count_or("num_shared_experts", 0) * s.intermediate;
  plain_attention(config, model);
  AttentionHeads const h = heads(config);
  model.parameters.attention += model.layers * linear(s.hidden, h.query * h.dim);
  model.heads.reset();  // the gate makes it another attention
  model.parameters.norms += model.layers * 2 * (s.hidden + h.dim);
  count_mlps(model, dense > 0 ? config.size("intermediate_size") : 0, true);
  return model;
}

Model aria_text(ConfigReader const& config) {
  Model model = with_sizes(config, "intermediate_size", "moe_num_experts", "moe_topk");
  model.moe.layout = {GateUpOrder::concat, WeightOrientation::transposed, 0};
  model.moe.router.kind = RouterKind::topk_softmax;
  all_layers(model);
  model.shared_intermediate =
      config.count_or("moe_num_shared_experts", 0) * model.moe.shape.intermediate;
  plain_attention(config, model);
  count_mlps(model, 0, false);
  return model;
}

Model deepseek_v2(ConfigReader const& config) {
  Model model =
      with_sizes(config, "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok");
  config.require("topk_method", "greedy");
  config.require("norm_topk_prob", false);
  config.require("routed_scaling_factor", 1.0);
  config.require("moe_layer_freq", 1);
  model.moe.router.kind = RouterKind::softmax_topk;
  std::int64_t const dense = config.count_or("first_k_dense_replace", 0);
  layers_after(config, model, dense, "first_k_dense_replace");
  model.shared_intermediate = config.count_or("n_shared_experts", 0) * model.moe.shape.intermediate;
  latent_attention(config, model);
  count_mlps(model, dense > 0 ? config.size("intermediate_size") : 0, false);
  return model;
}

Model granitemoe(ConfigReader const& config) {
  Model model = with_sizes(config, "intermediate_size", "num_local_experts", "num_experts_per_tok");
  model.moe.router.kind = RouterKind::topk_softmax;
  all_layers(model);
  plain_attention(config, model);
  count_mlps(model, 0, false);
  return model;
}

// Fields that are lists, a number for each layer, must have equal ones.
Model hunyuan_v1_moe(ConfigReader const& config) {
  Model model = with_sizes(config, "intermediate_size", "num_experts", "moe_topk");
  MoeShape& s = model.moe.shape;
  if (config.has("moe_intermediate_size") &&
      config.size_of_all("moe_intermediate_size") != s.intermediate) {
    config.fail(
        fmt::format("moe_intermediate_size contradicts intermediate_size = {}", s.intermediate));
  }
  model.moe.router.kind = RouterKind::softmax_topk_renorm;
  std::int64_t const dense = config.count_or("moe_layer_num_skipped", 0);
  layers_after(config, model, dense, "moe_layer_num_skipped");
  model.shared_intermediate =
      (config.has("num_shared_expert") ? config.size_of_all("num_shared_expert") : 1) *
      s.intermediate;
  plain_attention(config, model);
  model.parameters.norms += model.layers * 2 * heads(config).dim;
  count_mlps(model, s.intermediate, false);
  return model;
}

// Lightning attention: queries, keys and values as wide as each other, a norm, a gate of the output.
Model minimax(ConfigReader const& config) {
  Model model = with_sizes(config, "intermediate_size", "num_local_experts", "num_experts_per_tok");
  model.moe.router.kind = RouterKind::softmax_topk_renorm;
  all_layers(model);
  auto const kinds =
      config.layer_names("layer_types", model.layers, {"full_attention", "linear_attention"});
  if (!kinds) {
    config.fail("layer_types is missing; take config.json as transformers writes it");
  }
  AttentionHeads const h = heads(config);
  std::int64_t const hidden = model.moe.shape.hidden, width = h.query * h.dim;
  for (std::string const& kind : *kinds) {
    bool const full = kind == "full_attention";
    model.parameters.attention += full ? attention(hidden, h, false, false)
                                       : 4 * linear(hidden, width) + linear(width, hidden);
    model.parameters.norms += full ? 0 : width;
  }
  count_mlps(model, 0, false);
  return model;
}

Model minimax_m2(ConfigReader const& config) {
  Model model = with_sizes(config, "intermediate_size", "num_local_experts", "num_experts_per_tok");
  config.require("scoring_func", "sigmoid");
  config.require("use_routing_bias", true);
  config.require("use_qk_norm", true);
  model.moe.router = {.kind = RouterKind::sigmoid_bias, .normalize_scores = true};
  all_layers(model);
  plain_attention(config, model);
  AttentionHeads const h = heads(config);
  model.parameters.norms += model.layers * (h.query + h.key_value) * h.dim;
  count_mlps(model, 0, true);
  return model;
}

}  // namespace tessera::huggingface::parts
