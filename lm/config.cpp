// SPDX-License-Identifier: Apache-2.0
#include "lm/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "lm/error.hpp"
#include "lm/json.hpp"
#include "tessera/names.hpp"
#include "tessera/router.hpp"

namespace tessera::lm {

using nlohmann::json;

namespace {

constexpr std::int64_t kMaxParameters = (std::int64_t{1} << 31) - 1;

struct Size {
  char const* option;  // of the command line
  char const* key;     // in config.json
  std::int64_t ModelConfig::* member;
  std::int64_t largest;
};

constexpr Size kSizes[] = {
    {"hidden", "hidden_size", &ModelConfig::hidden, 1 << 16},
    {"intermediate", "moe_intermediate_size", &ModelConfig::intermediate, 1 << 16},
    {"layers", "num_hidden_layers", &ModelConfig::layers, 1 << 10},
    {"heads", "num_attention_heads", &ModelConfig::heads, 1 << 10},
    {"kv-heads", "num_key_value_heads", &ModelConfig::kv_heads, 1 << 10},
    {"head-dim", "head_dim", &ModelConfig::head_dim, 1 << 12},
    {"context", "max_position_embeddings", &ModelConfig::context, 1 << 16},
    {"experts", "num_experts", &ModelConfig::experts, 1 << 12},
    {"top-k", "num_experts_per_tok", &ModelConfig::top_k, 1 << 12},
};

constexpr double kMaxRopeValues = 1 << 24;

// In fp64: exact below 2^53, and too large stays too large.
double count_parameters(ModelConfig const& c) {
  auto const hidden = static_cast<double>(c.hidden), head_dim = static_cast<double>(c.head_dim);
  auto const heads = static_cast<double>(c.heads), kv_heads = static_cast<double>(c.kv_heads);
  double const attention = 2 * hidden * (heads + kv_heads) * head_dim;
  double const experts =
      static_cast<double>(c.experts) * hidden * (3 * static_cast<double>(c.intermediate) + 1);
  double const norms = 2 * hidden + 2 * head_dim;
  double const bias = has_selection_bias(c) ? static_cast<double>(c.experts) : 0;
  return static_cast<double>(c.layers) * (attention + experts + norms + bias) +
         (ModelConfig::kVocabulary + 1) * hidden;
}

template <class Value, std::size_t kCount>
Value from_name(Named<Value> const (&names)[kCount], std::string_view name, char const* what) {
  if (auto const value = value_named(names, name)) return *value;
  throw InputError(fmt::format("{} \"{}\" is unknown; choose one of {}", what, printable(name),
                               names_text(names)));
}

constexpr char const* kQwen3Moe = "qwen3_moe";
constexpr char const* kTesseraMoe = "tessera_moe";
constexpr char const* kRouterKey = "tessera_router";

json router_json(Router const& router) {
  return {{"kind", router_name(router.kind)},
          {"route_scale", router.route_scale},
          {"normalize_scores", router.normalize_scores},
          {"groups", router.groups},
          {"top_groups", router.top_groups}};
}

constexpr double kLargestScale = 1e6;

Router router_from_json(json const& config) {
  auto const found = config.find(kRouterKey);
  if (found == config.end()) throw InputError(fmt::format("{} is missing", kRouterKey));
  auto const normalize = found->is_object() ? found->find("normalize_scores") : found->end();
  if (!found->is_object() || normalize == found->end() || !normalize->is_boolean()) {
    throw InputError(fmt::format("{}: normalize_scores must be true or false", kRouterKey));
  }
  Router router;
  router.kind = router_from_name(json_string(*found, "kind"));
  router.route_scale =
      static_cast<float>(json_number(*found, "route_scale", -kLargestScale, kLargestScale));
  router.normalize_scores = normalize->get<bool>();
  router.groups = static_cast<std::int32_t>(json_integer(*found, "groups", 0, 1 << 12));
  router.top_groups = static_cast<std::int32_t>(json_integer(*found, "top_groups", 0, 1 << 12));
  return router;
}

// A member that this model needs at one value; absent counts as that value.
void require(json const& object, char const* key, json const& wanted) {
  auto const found = object.find(key);
  if (found == object.end() || *found == wanted) return;
  throw InputError(fmt::format("{} must be {}: this model has no other form", key, wanted.dump()));
}

// transformers 5 saves num_experts by another model's name.
std::int64_t size_from_json(json const& object, Size const& size) {
  constexpr char const* kOtherName = "num_local_experts";
  if (size.member != &ModelConfig::experts || !object.contains(kOtherName)) {
    return json_integer(object, size.key, 1, size.largest);
  }
  std::int64_t const value = json_integer(object, kOtherName, 1, size.largest);
  if (object.contains(size.key) && json_integer(object, size.key, 1, size.largest) != value) {
    throw InputError(fmt::format("{} = {} contradicts {} = {}; leave out one of them", kOtherName,
                                 value, size.key, object[size.key].dump()));
  }
  return value;
}

double rope_theta(json const& object) {
  constexpr std::pair<char const*, char const*> kOnly[] = {{"rope_type", "\"default\""},
                                                           {"partial_rotary_factor", "1"}};
  auto const nested = object.find("rope_parameters");
  if (nested == object.end() || nested->is_null()) {
    return json_number(object, "rope_theta", 1, 1e12);
  }
  if (!nested->is_object()) throw InputError("rope_parameters must be an object");
  for (auto const& [key, value] : nested->items()) {
    if (key == "rope_theta") continue;
    auto const* const only = std::find_if(std::begin(kOnly), std::end(kOnly),
                                          [&](auto const& known) { return key == known.first; });
    if (only != std::end(kOnly) && value == json::parse(only->second)) continue;
    throw InputError(fmt::format(
        "rope_parameters: {} = {}: this model rotates by rope_theta alone", printable(key),
        printable(value.dump(-1, ' ', false, json::error_handler_t::replace))));
  }
  return json_number(*nested, "rope_theta", 1, 1e12);
}

}  // namespace

void validate(ModelConfig const& config) {
  for (Size const& size : kSizes) {
    std::int64_t const value = config.*size.member;
    if (value < 1 || value > size.largest) {
      throw InputError(
          fmt::format("{} = {}: must be in [1, {}]", size.option, value, size.largest));
    }
  }
  if (config.top_k > config.experts) {
    throw InputError(fmt::format("top-k = {}: there are only {} experts; lower top-k", config.top_k,
                                 config.experts));
  }
  if (config.router.kind == RouterKind::given) {
    throw InputError("router given: the model routes by itself; choose another of " +
                     names_text(kRouterNames));
  }
  if (!(std::abs(config.router.route_scale) <= kLargestScale)) {
    throw InputError(fmt::format("route-scale = {}: must be in [{}, {}]", config.router.route_scale,
                                 -kLargestScale, kLargestScale));
  }
  if (config.heads % config.kv_heads != 0) {
    throw InputError(
        fmt::format("kv-heads = {}: must divide heads = {}", config.kv_heads, config.heads));
  }
  if (config.head_dim % 2 != 0) {
    throw InputError(
        fmt::format("head-dim = {}: must be even, rotations act on pairs", config.head_dim));
  }
  if (static_cast<double>(config.context) * static_cast<double>(config.head_dim) > kMaxRopeValues) {
    throw InputError(fmt::format("context * head-dim = {} * {}: at most 2^24; lower one of them",
                                 config.context, config.head_dim));
  }
  if (double const count = count_parameters(config); count > static_cast<double>(kMaxParameters)) {
    throw InputError(fmt::format("{:.3g} parameters: at most 2^31 - 1; use smaller sizes", count));
  }
}

std::int64_t parameter_count(ModelConfig const& config) {
  return static_cast<std::int64_t>(count_parameters(config));
}

bool is_qwen3_moe(ModelConfig const& config) noexcept {
  Router const router = resolved(config.router);
  RouterKind const kind = router.kind;
  bool const softmax = kind == RouterKind::topk_softmax ||
                       kind == RouterKind::softmax_topk_renorm || kind == RouterKind::softmax_topk;
  return softmax && router == Router{.kind = kind};
}

json to_json(ModelConfig const& config) {
  bool const qwen = is_qwen3_moe(config);
  json object = {
      {"architectures", qwen ? json::array({"Qwen3MoeForCausalLM"}) : json::array()},
      {"model_type", qwen ? kQwen3Moe : kTesseraMoe},
      {"vocab_size", ModelConfig::kVocabulary},
      {"intermediate_size", config.intermediate * config.top_k},
      {"hidden_act", "silu"},
      {"norm_topk_prob", resolved(config.router).kind != RouterKind::softmax_topk},
      {"decoder_sparse_step", 1},
      {"mlp_only_layers", json::array()},
      {"tie_word_embeddings", true},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"use_sliding_window", false},
      {"rms_norm_eps", config.rms_eps},
      {"rope_theta", config.rope_theta},
      {"rope_scaling", nullptr},
      {"initializer_range", 0.02},
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr},
      {"torch_dtype", "float32"},
  };
  for (Size const& size : kSizes) object[size.key] = config.*size.member;
  if (!qwen) object[kRouterKey] = router_json(config.router);
  return object;
}

ModelConfig config_from_json(json const& object) {
  if (!object.is_object()) throw InputError("config.json must be a JSON object");
  std::string const type = json_string(object, "model_type");
  if (type != kQwen3Moe && type != kTesseraMoe) {
    throw InputError(fmt::format("model_type \"{}\": only {} and {} are supported", printable(type),
                                 kQwen3Moe, kTesseraMoe));
  }
  json_integer(object, "vocab_size", ModelConfig::kVocabulary, ModelConfig::kVocabulary);
  require(object, "hidden_act", "silu");
  require(object, "decoder_sparse_step", 1);
  require(object, "mlp_only_layers", json::array());
  require(object, "attention_bias", false);
  require(object, "use_sliding_window", false);
  require(object, "rope_scaling", nullptr);
  if (object.value("tie_word_embeddings", json()) != json(true)) {
    throw InputError("tie_word_embeddings must be true: this model has no other form");
  }

  ModelConfig config;
  for (Size const& size : kSizes) {
    config.*size.member = size_from_json(object, size);
  }
  json const renormalised = object.value("norm_topk_prob", json(false));
  if (!renormalised.is_boolean()) throw InputError("norm_topk_prob must be true or false");
  config.router.kind = renormalised ? RouterKind::softmax_topk_renorm : RouterKind::softmax_topk;
  if (type == kTesseraMoe) {
    config.router = router_from_json(object);
    if (is_qwen3_moe(config)) {
      throw InputError(fmt::format("{}: Qwen3-MoE has this router; model_type must be {}",
                                   kRouterKey, kQwen3Moe));
    }
  }
  config.rms_eps = json_number(object, "rms_norm_eps", 0, 1);
  config.rope_theta = rope_theta(object);
  validate(config);
  return config;
}

ModelConfig parse_config(std::string_view text) {
  return config_from_json(parse_json(text, "config.json"));
}

char const* router_name(RouterKind router) noexcept { return name_of(kRouterNames, router); }
RouterKind router_from_name(std::string_view name) {
  return from_name(kRouterNames, name, "router");
}
char const* rounding_name(Rounding rounding) noexcept { return name_of(kRoundingNames, rounding); }
Rounding rounding_from_name(std::string_view name) {
  return from_name(kRoundingNames, name, "round");
}

}  // namespace tessera::lm
