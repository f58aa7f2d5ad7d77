// SPDX-License-Identifier: Apache-2.0
// One function per family; what families share stands in front. Field names and shapes are those of
// Hugging Face transformers.
#include "huggingface/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "huggingface/config_reader.hpp"
#include "huggingface/model_families.hpp"
#include "huggingface/model_parts.hpp"
#include "lm/error.hpp"
#include "lm/files.hpp"
#include "lm/json.hpp"
#include "lm/text.hpp"

namespace tessera::huggingface {

namespace {

constexpr std::size_t kMaxConfigBytes = 1 << 20;

using namespace parts;

Model mixtral(ConfigReader const& config) {
  Model model = common(config);
  MoeShape& s = model.moe.shape;
  s.intermediate = config.size("intermediate_size");
  s.experts = config.size("num_local_experts");
  s.top_k = config.size("num_experts_per_tok");
  check_top_k(config, s, "num_local_experts");
  model.moe.activation.kind = gated_activation(config);
  model.moe.router.kind = RouterKind::softmax_topk_renorm;
  all_layers(model);
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
  all_layers(model);
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
  // The newer families always divide scores by their sum, and list their dense layers.
  bool const newer =
      config.model_type().starts_with("qwen3_5") || config.model_type().starts_with("qwen3_vl");
  MoeShape& s = model.moe.shape;
  s.intermediate = config.size("moe_intermediate_size");
  s.experts = config.size_of_either("num_experts", "num_local_experts");
  s.top_k = config.size("num_experts_per_tok");
  check_top_k(config, s, "num_experts");
  model.moe.activation.kind = gated_activation(config);
  model.moe.router.kind = newer ? RouterKind::softmax_topk_renorm : softmax_router(config);
  std::int64_t const step =
      newer ? config.size_or("decoder_sparse_step", 1) : config.size("decoder_sparse_step");
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
  layers_after(config, model, dense, "first_k_dense_replace");
  model.shared_intermediate = config.count_or("n_shared_experts", 0) * s.intermediate;
  count_mlps(model, dense > 0 ? config.size("intermediate_size") : 0, true);  // the selection bias
  note_next_token_layers(config, model);
  return model;
}

Model deepseek_v3(ConfigReader const& config) {
  Model model = sigmoid_moe(config);
  latent_attention(config, model);
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

Model dots1(ConfigReader const& config) {
  Model model = glm4_moe(config);
  if (!config.flag_or("use_qk_norm", false)) {
    model.parameters.norms += model.layers * 2 * heads(config).dim;
  }
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
  all_layers(model);
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
    {"afmoe", afmoe},
    {"aria_text", aria_text},
    {"deepseek_v2", deepseek_v2},
    {"deepseek_v3", deepseek_v3},
    {"dots1", dots1},
    {"flex_olmo", olmoe},
    {"glm4_moe", glm4_moe},
    {"gpt_oss", gpt_oss},
    {"granitemoe", granitemoe},
    {"hunyuan_v1_moe", hunyuan_v1_moe},
    {"minimax", minimax},
    {"minimax_m2", minimax_m2},
    {"mixtral", mixtral},
    {"olmoe", olmoe},
    {"qwen2_moe", qwen2_moe},
    {"qwen3_5_moe_text", qwen3_next},
    {"qwen3_moe", qwen3_moe},
    {"qwen3_next", qwen3_next},
    {"qwen3_vl_moe_text", qwen3_moe},
};

// Holds what keeps plan from a family that convert knows.
struct Unclear {
  char const* model_type;
  char const* why;
};

constexpr Unclear kUnclear[] = {
    {"ernie4_5_moe", "its router chooses by softmax scores and a bias, which no router here does"},
    {"jamba", "its Mamba layers are not counted here"},
    {"jetmoe", "its attention chooses among projections, which are not counted here"},
    {"lfm2_moe", "its convolutions are not counted here"},
    {"llama4_text", "its router scales what enters the experts, which no router here does"},
    {"nemotron_h", "its Mamba layers are not counted here"},
    {"tessera_moe", "`tessera train` wrote it: plan takes that command's flags"},
    {"phimoe", "its router is a sparse mixer, which no router here is"},
};

// True if the language model of a model of that type is known here, if only to be refused.
bool has_text_model(std::string const& type) {
  auto const is = [&](auto const& known) { return type + "_text" == known.model_type; };
  return std::any_of(std::begin(kFamilies), std::end(kFamilies), is) ||
         std::any_of(std::begin(kUnclear), std::end(kUnclear), is);
}

// A model of several parts has its language model's fields in an object of their own.
struct Text {
  char const* key;
  nlohmann::json config;
};

std::optional<Text> text_of(nlohmann::json const& json) {
  if (!json.is_object()) return std::nullopt;
  for (char const* key : {"text_config", "thinker_config", "llm_config", "language_config"}) {
    auto const inner = json.find(key);
    if (inner == json.end() || !inner->is_object()) continue;
    nlohmann::json config = *inner;
    for (char const* shared : {"tie_word_embeddings", "quantization_config"}) {
      if (!config.contains(shared) && json.contains(shared)) config[shared] = json[shared];
    }
    std::string const outer = lm::json_string(json, "model_type");
    if (!config.contains("model_type")) config["model_type"] = outer + "_text";
    return Text{key, std::move(config)};
  }
  return std::nullopt;
}

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
  if (auto const text = text_of(json)) {
    Model model = read_model(text->config);
    model.notes.push_back(
        fmt::format("the model of {} alone, in a model of type {}: other parts are not counted",
                    text->key, lm::printable(config.model_type())));
    return model;
  }
  std::string const& type = config.model_type();
  for (Unclear const& unclear : kUnclear) {
    if (type != unclear.model_type) continue;
    config.fail(fmt::format(
        "{}; for one of its layers leave --hf out and state --hidden, --intermediate, --experts, "
        "--top-k, --activation and --router",
        unclear.why));
  }
  if (has_text_model(type)) {
    config.fail("text_config is missing; take config.json as the model's authors published it");
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
