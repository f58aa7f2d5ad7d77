// SPDX-License-Identifier: Apache-2.0
#include "huggingface/model_parts.hpp"

#include <fmt/format.h>

#include "lm/error.hpp"
#include "lm/json.hpp"
#include "lm/text.hpp"

namespace tessera::huggingface::parts {

namespace {

constexpr std::int64_t kMaxLayers = 1 << 12;

}  // namespace

std::int64_t product(std::initializer_list<std::int64_t> factors) {
  constexpr double kMax = 1e14;
  double size = 1;
  for (std::int64_t const factor : factors) size *= static_cast<double>(factor);
  if (size > kMax) {
    throw lm::InputError(fmt::format("{:.3g} parameters in one place: sizes too large", size));
  }
  return static_cast<std::int64_t>(size);
}

std::int64_t linear(std::int64_t in, std::int64_t out, bool bias) {
  return product({in, out}) + (bias ? out : 0);
}

std::int64_t gated_mlp(std::int64_t hidden, std::int64_t intermediate) {
  return product({3, hidden, intermediate});
}

ActivationKind gated_activation(ConfigReader const& config) {
  std::string const name = config.text("hidden_act");
  if (name == "silu") return ActivationKind::swiglu;
  if (name == "gelu") return ActivationKind::geglu_erf;
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return ActivationKind::geglu;
  if (name == "relu") return ActivationKind::reglu;
  config.fail(
      fmt::format("hidden_act = \"{}\": known are silu, gelu, gelu_pytorch_tanh, gelu_new and relu",
                  lm::printable(name)));
}

Model common(ConfigReader const& config) {
  Model model;
  model.model_type = config.model_type();
  model.layers = config.size("num_hidden_layers");
  if (model.layers > kMaxLayers) {
    config.fail(fmt::format("num_hidden_layers = {}: at most {}", model.layers, kMaxLayers));
  }
  model.vocabulary = config.size("vocab_size");
  MoeShape& shape = model.moe.shape;
  shape.hidden = config.size("hidden_size");
  model.moe.dtype = DType::bf16;
  model.parameters.embedding = linear(model.vocabulary, shape.hidden);
  model.parameters.head =
      config.flag_or("tie_word_embeddings", false) ? 0 : model.parameters.embedding;
  model.parameters.norms = (2 * model.layers + 1) * shape.hidden;
  return model;
}

AttentionHeads heads(ConfigReader const& config) {
  AttentionHeads h{.query = config.size("num_attention_heads"), .key_value = 0, .dim = 0};
  h.key_value = config.size_or("num_key_value_heads", h.query);
  if (h.query % h.key_value != 0) {
    config.fail(fmt::format("num_key_value_heads = {} does not divide num_attention_heads = {}",
                            h.key_value, h.query));
  }
  std::int64_t const hidden = config.size("hidden_size");
  if (!config.has("head_dim") && hidden % h.query != 0) {
    config.fail(
        fmt::format("head_dim is missing, and num_attention_heads = {} does not divide "
                    "hidden_size = {}",
                    h.query, hidden));
  }
  h.dim = config.size_or("head_dim", hidden / h.query);
  return h;
}

std::int64_t attention(std::int64_t hidden, AttentionHeads const& h, bool qkv_bias,
                       bool output_bias) {
  return linear(hidden, h.query * h.dim, qkv_bias) +
         2 * linear(hidden, h.key_value * h.dim, qkv_bias) +
         linear(h.query * h.dim, hidden, output_bias);
}

void check_top_k(ConfigReader const& config, MoeShape const& shape, char const* experts_key) {
  if (shape.top_k > shape.experts) {
    config.fail(fmt::format("num_experts_per_tok = {} is more than {} = {}", shape.top_k,
                            experts_key, shape.experts));
  }
}

void count_mlps(Model& model, std::int64_t dense_intermediate, bool router_bias) {
  MoeShape const& s = model.moe.shape;
  auto const moe = static_cast<std::int64_t>(model.moe_layers.size());
  std::int64_t const expert =
      gated_mlp(s.hidden, s.intermediate) + (model.moe.bias ? 2 * s.intermediate + s.hidden : 0);
  model.parameters.router = moe * linear(s.hidden, s.experts, router_bias);
  model.parameters.routed_experts = product({moe, s.experts, expert});
  model.parameters.shared_experts = moe * gated_mlp(s.hidden, model.shared_intermediate);
  model.parameters.dense_mlp = (model.layers - moe) * gated_mlp(s.hidden, dense_intermediate);
}

void note_next_token_layers(ConfigReader const& config, Model& model) {
  if (std::int64_t const layers = config.count_or("num_nextn_predict_layers", 0); layers > 0) {
    model.notes.push_back(fmt::format(
        "num_nextn_predict_layers = {}: layers that predict further tokens are not counted",
        layers));
  }
}

RouterKind softmax_router(ConfigReader const& config) {
  return config.flag("norm_topk_prob") ? RouterKind::softmax_topk_renorm : RouterKind::softmax_topk;
}

void all_layers(Model& model) {
  for (std::int64_t layer = 0; layer < model.layers; ++layer) model.moe_layers.push_back(layer);
}

void layers_after(ConfigReader const& config, Model& model, std::int64_t dense, char const* key) {
  if (dense >= model.layers) {
    config.fail(fmt::format("{} = {} leaves no layer with experts of num_hidden_layers = {}", key,
                            dense, model.layers));
  }
  for (std::int64_t layer = dense; layer < model.layers; ++layer) model.moe_layers.push_back(layer);
}

void latent_attention(ConfigReader const& config, Model& model) {
  std::int64_t const hidden = model.moe.shape.hidden;
  std::int64_t const query_heads = config.size("num_attention_heads");
  std::int64_t const rank = config.size("kv_lora_rank"), rope = config.size("qk_rope_head_dim"),
                     nope = config.size("qk_nope_head_dim"), value = config.size("v_head_dim");
  bool const bias = config.flag_or("attention_bias", false);
  std::int64_t query = linear(hidden, query_heads * (nope + rope)), norms = rank;
  if (config.has("q_lora_rank")) {
    std::int64_t const query_rank = config.size("q_lora_rank");
    query = linear(hidden, query_rank, bias) + linear(query_rank, query_heads * (nope + rope));
    norms += query_rank;
  }
  model.parameters.attention = model.layers * (query + linear(hidden, rank + rope, bias) +
                                               linear(rank, query_heads * (nope + value)) +
                                               linear(query_heads * value, hidden, bias));
  model.parameters.norms += model.layers * norms;
}

}  // namespace tessera::huggingface::parts
