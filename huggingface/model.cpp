// SPDX-License-Identifier: Apache-2.0
// One function per family; what families share stands in front. Field names and shapes are those of
// Hugging Face transformers.
#include "huggingface/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "huggingface/config_reader.hpp"
#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"
#include "lm/text.hpp"

namespace tessera::huggingface {

namespace {

constexpr std::size_t kMaxConfigBytes = 1 << 20;

constexpr std::int64_t kMostLayers = 1 << 12;

// Far above any model, so that sums of a few products times the layers stay within 64 bits.
std::int64_t product(std::initializer_list<std::int64_t> factors) {
  constexpr double kMost = 1e14;
  double size = 1;
  for (std::int64_t const factor : factors) size *= static_cast<double>(factor);
  if (size > kMost) {
    throw lm::InputError(fmt::format("{:.3g} parameters in one place: sizes too large", size));
  }
  return static_cast<std::int64_t>(size);
}

std::int64_t linear(std::int64_t in, std::int64_t out, bool bias = false) {
  return product({in, out}) + (bias ? out : 0);
}

// gate, up and down projection.
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

// What every family has: sizes, embedding, two norms per layer and a last one.
Model common(ConfigReader const& config) {
  Model model;
  model.model_type = config.model_type();
  model.layers = config.size("num_hidden_layers");
  if (model.layers > kMostLayers) {
    config.fail(fmt::format("num_hidden_layers = {}: at most {}", model.layers, kMostLayers));
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

// Query, key, value and output projection of grouped-query attention.
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

// Routers, experts and dense layers, once model.moe and model.moe_layers are known.
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

Model mixtral(ConfigReader const& config) {
  Model model = common(config);
  MoeShape& s = model.moe.shape;
  s.intermediate = config.size("intermediate_size");
  s.experts = config.size("num_local_experts");
  s.top_k = config.size("num_experts_per_tok");
  check_top_k(config, s, "num_local_experts");
  model.moe.activation.kind = gated_activation(config);
  model.moe.router.kind = RouterKind::softmax_topk_renorm;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) model.moe_layers.push_back(layer);
  model.heads = heads(config);
  model.parameters.attention = model.layers * attention(s.hidden, *model.heads, false, false);
  count_mlps(model, 0, false);
  return model;
}

Model olmoe(ConfigReader const& config) {
  Model model = common(config);
  MoeShape& s = model.moe.shape;
  s.intermediate = config.size("intermediate_size");
  s.experts = config.size("num_experts");
  s.top_k = config.size("num_experts_per_tok");
  check_top_k(config, s, "num_experts");
  model.moe.activation.kind = gated_activation(config);
  model.moe.router.kind = softmax_router(config);
  for (std::int64_t layer = 0; layer < model.layers; ++layer) model.moe_layers.push_back(layer);
  AttentionHeads const h = heads(config);
  model.heads = h;
  bool const bias = config.flag_or("attention_bias", false);
  model.parameters.attention = model.layers * attention(s.hidden, h, bias, bias);
  model.parameters.norms +=
      model.layers * (h.query + h.key_value) * h.dim;  // over all heads at once
  count_mlps(model, 0, false);
  return model;
}

// The MoE part that the Qwen families share: every decoder_sparse_step-th layer but mlp_only_layers.
Model qwen(ConfigReader const& config) {
  Model model = common(config);
  MoeShape& s = model.moe.shape;
  s.intermediate = config.size("moe_intermediate_size");
  s.experts = config.size_of_either("num_experts", "num_local_experts");
  s.top_k = config.size("num_experts_per_tok");
  check_top_k(config, s, "num_experts");
  model.moe.activation.kind = gated_activation(config);
  model.moe.router.kind = softmax_router(config);
  std::int64_t const step = config.size("decoder_sparse_step");
  std::vector<std::int64_t> const dense = config.layer_list("mlp_only_layers", model.layers);
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    bool const listed = std::find(dense.begin(), dense.end(), layer) != dense.end();
    if (!listed && (layer + 1) % step == 0) model.moe_layers.push_back(layer);
  }
  if (model.moe_layers.empty()) {
    config.fail("decoder_sparse_step and mlp_only_layers leave no layer with experts");
  }
  bool const all = static_cast<std::int64_t>(model.moe_layers.size()) == model.layers;
  std::int64_t const dense_intermediate = all ? 0 : config.size("intermediate_size");
  model.shared_intermediate = config.count_or("shared_expert_intermediate_size", 0);
  count_mlps(model, dense_intermediate, false);
  if (model.shared_intermediate > 0) {  // a sigmoid gate of one row
    model.parameters.shared_experts +=
        static_cast<std::int64_t>(model.moe_layers.size()) * s.hidden;
  }
  return model;
}

Model qwen2_moe(ConfigReader const& config) {
  (void)config.size("shared_expert_intermediate_size");
  Model model = qwen(config);
  model.heads = heads(config);
  model.parameters.attention = model.layers * attention(model.moe.shape.hidden, *model.heads,
                                                        config.flag_or("qkv_bias", true), false);
  return model;
}

Model qwen3_moe(ConfigReader const& config) {
  config.require("shared_expert_intermediate_size", 0);
  Model model = qwen(config);
  AttentionHeads const h = heads(config);
  model.heads = h;
  bool const bias = config.flag_or("attention_bias", false);
  model.parameters.attention = model.layers * attention(model.moe.shape.hidden, h, bias, bias);
  model.parameters.norms += model.layers * 2 * h.dim;  // of queries and keys, per head
  return model;
}

// Gated DeltaNet: queries, keys, values and their gate; beta and decay; a short convolution; norm; output.
std::int64_t linear_attention(ConfigReader const& config, std::int64_t hidden) {
  std::int64_t const key_heads = config.size("linear_num_key_heads"),
                     value_heads = config.size("linear_num_value_heads");
  if (value_heads % key_heads != 0) {
    config.fail(fmt::format("linear_num_key_heads = {} does not divide linear_num_value_heads = {}",
                            key_heads, value_heads));
  }
  std::int64_t const value_dim = config.size("linear_value_head_dim");
  std::int64_t const keys = key_heads * config.size("linear_key_head_dim"),
                     values = value_heads * value_dim;
  return linear(hidden, 2 * keys + 2 * values) + linear(hidden, 2 * value_heads) +
         linear(2 * keys + values, config.size("linear_conv_kernel_dim")) + 2 * value_heads +
         value_dim + linear(values, hidden);
}

Model qwen3_next(ConfigReader const& config) {
  Model model = qwen(config);
  std::int64_t const hidden = model.moe.shape.hidden;
  std::int64_t const interval = config.size_or("full_attention_interval", 4);
  auto const names =
      config.layer_names("layer_types", model.layers, {"linear_attention", "full_attention"});
  std::int64_t full = 0;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    bool const by_interval = (layer + 1) % interval == 0;
    bool const is_full =
        names ? (*names)[static_cast<std::size_t>(layer)] == "full_attention" : by_interval;
    if (is_full != by_interval && config.has("full_attention_interval")) {
      config.fail(
          fmt::format("layer_types and full_attention_interval = {} contradict each other "
                      "in layer {}",
                      interval, layer));
    }
    full += is_full ? 1 : 0;
  }
  AttentionHeads const h = heads(config);
  bool const bias = config.flag_or("attention_bias", false);
  // The query projection also makes the gate of the attention's output.
  model.parameters.attention =
      full * (attention(hidden, h, bias, bias) + linear(hidden, h.query * h.dim, bias)) +
      (model.layers - full) * linear_attention(config, hidden);
  model.parameters.norms += full * 2 * h.dim;
  model.notes.push_back("a module in the checkpoint that predicts further tokens is not counted");
  return model;
}

// Sigmoid scores with a selection bias, in groups; the first layers dense; shared experts.
Model sigmoid_moe(ConfigReader const& config) {
  Model model = common(config);
  MoeDesc& moe = model.moe;
  MoeShape& s = moe.shape;
  s.intermediate = config.size("moe_intermediate_size");
  s.experts = config.size("n_routed_experts");
  s.top_k = config.size("num_experts_per_tok");
  check_top_k(config, s, "n_routed_experts");
  moe.activation.kind = gated_activation(config);
  config.require("scoring_func", "sigmoid");
  config.require("topk_method", "noaux_tc");
  config.require("moe_layer_freq", 1);
  std::int64_t const groups = config.size("n_group"), top_groups = config.size("topk_group");
  if (s.experts % groups != 0) {
    config.fail(
        fmt::format("n_group = {} does not divide n_routed_experts = {}", groups, s.experts));
  }
  if (top_groups > groups || s.top_k > top_groups * (s.experts / groups)) {
    config.fail(fmt::format("topk_group = {} of n_group = {} cannot hold num_experts_per_tok = {}",
                            top_groups, groups, s.top_k));
  }
  moe.router = {.kind = groups > 1 ? RouterKind::group_limited : RouterKind::sigmoid_bias,
                .route_scale = static_cast<float>(config.number("routed_scaling_factor")),
                .normalize_scores = config.flag("norm_topk_prob")};
  if (groups > 1) {
    moe.router.groups = static_cast<std::int32_t>(groups);
    moe.router.top_groups = static_cast<std::int32_t>(top_groups);
  }
  std::int64_t const dense = config.count_or("first_k_dense_replace", 0);
  if (dense >= model.layers) {
    config.fail(
        fmt::format("first_k_dense_replace = {} leaves no layer with experts of "
                    "num_hidden_layers = {}",
                    dense, model.layers));
  }
  for (std::int64_t layer = dense; layer < model.layers; ++layer) model.moe_layers.push_back(layer);
  model.shared_intermediate = config.count_or("n_shared_experts", 0) * s.intermediate;
  count_mlps(model, dense > 0 ? config.size("intermediate_size") : 0, true);  // the selection bias
  note_next_token_layers(config, model);
  return model;
}

// Multi-head latent attention.
Model deepseek_v3(ConfigReader const& config) {
  Model model = sigmoid_moe(config);
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
  return model;
}

Model glm4_moe(ConfigReader const& config) {
  Model model = sigmoid_moe(config);
  AttentionHeads const h = heads(config);
  model.heads = h;
  model.parameters.attention =
      model.layers *
      attention(model.moe.shape.hidden, h, config.flag_or("attention_bias", false), false);
  if (config.flag_or("use_qk_norm", false)) model.parameters.norms += model.layers * 2 * h.dim;
  return model;
}

Model gpt_oss(ConfigReader const& config) {
  Model model = common(config);
  MoeDesc& moe = model.moe;
  moe.shape.intermediate = config.size("intermediate_size");
  moe.shape.experts = config.size("num_local_experts");
  moe.shape.top_k = config.size_of_either("experts_per_token", "num_experts_per_tok");
  check_top_k(config, moe.shape, "num_local_experts");
  if (std::string const name = config.text("hidden_act"); name != "silu") {
    config.fail(fmt::format("hidden_act = \"{}\": only silu is understood", lm::printable(name)));
  }
  moe.activation.kind = ActivationKind::clamped_swiglu;
  moe.activation.limit = static_cast<float>(config.number_or("swiglu_limit", 7.0));
  moe.layout = {GateUpOrder::interleaved, WeightOrientation::transposed, 0};
  moe.bias = true;
  moe.router.kind = RouterKind::topk_softmax;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) model.moe_layers.push_back(layer);
  AttentionHeads const h = heads(config);
  model.heads = h;
  bool const bias = config.flag_or("attention_bias", true);
  model.parameters.attention =
      model.layers * (attention(moe.shape.hidden, h, bias, bias) + h.query);  // a sink per head
  count_mlps(model, 0, true);
  return model;
}

struct Family {
  char const* model_type;
  Model (*read)(ConfigReader const&);
};

constexpr Family kFamilies[] = {
    {"mixtral", mixtral},       {"qwen2_moe", qwen2_moe}, {"qwen3_moe", qwen3_moe},
    {"qwen3_next", qwen3_next}, {"olmoe", olmoe},         {"deepseek_v3", deepseek_v3},
    {"glm4_moe", glm4_moe},     {"gpt_oss", gpt_oss},
};

void note_quantisation(ConfigReader const& config, nlohmann::json const& json, Model& model) {
  if (!config.has("quantization_config")) return;
  auto const& quantisation = json.at("quantization_config");
  std::string const method = quantisation.is_object() && quantisation.contains("quant_method")
                                 ? lm::json_string(quantisation, "quant_method")
                                 : "an unnamed format";
  model.notes.push_back(fmt::format(
      "the checkpoint stores weights in {}; the bytes here are those of the chosen dtype",
      lm::printable(method)));
}

}  // namespace

std::int64_t Model::active_parameters() const noexcept {
  MoeShape const& s = moe.shape;
  return parameters.total() - parameters.routed_experts / s.experts * (s.experts - s.top_k);
}

double Model::forward_flops_per_token() const noexcept {
  std::int64_t const looked_up = parameters.head == 0 ? 0 : parameters.embedding;
  return 2.0 * static_cast<double>(active_parameters() - looked_up);
}

std::vector<std::string> model_types() {
  std::vector<std::string> names;
  for (Family const& family : kFamilies) names.emplace_back(family.model_type);
  return names;
}

Model read_model(nlohmann::json const& json) {
  ConfigReader const config(json);
  for (Family const& family : kFamilies) {
    if (config.model_type() != family.model_type) continue;
    Model model = family.read(config);
    note_quantisation(config, json, model);
    return model;
  }
  throw lm::InputError(fmt::format("model_type \"{}\" is not known; known are {}",
                                   lm::printable(config.model_type()),
                                   lm::joined(model_types(), ", ")));
}

Model load_model_config(std::filesystem::path const& path) {
  std::string const text = lm::read_file(path, kMaxConfigBytes);
  try {
    return read_model(lm::parse_json(text, "config.json"));
  } catch (lm::InputError const& error) {
    throw lm::InputError(fmt::format("{}: {}", path.string(), error.what()));
  }
}

}  // namespace tessera::huggingface
