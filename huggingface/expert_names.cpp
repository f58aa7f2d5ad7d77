// SPDX-License-Identifier: Apache-2.0
#include "huggingface/expert_names.hpp"

#include <charconv>
#include <utility>

namespace tessera::huggingface {

namespace {

constexpr std::int64_t kMaxExperts = 1 << 20;

struct Suffix {
  Naming naming;
  char const* text;  // after the prefix, and after the expert's number where it has one
  Part part;
  bool bias;
  bool separate;  // the tessera scheme's reading where gate and up are apart
};

constexpr Suffix kSuffixes[] = {
    {Naming::tessera, ".w_up", Part::gate_up, false, false},
    {Naming::tessera, ".w_up", Part::up, false, true},
    {Naming::tessera, ".w_gate", Part::gate, false, true},
    {Naming::tessera, ".w_down", Part::down, false, false},
    {Naming::tessera, ".w_down", Part::down, false, true},
    {Naming::tessera, ".b_up", Part::gate_up, true, false},
    {Naming::tessera, ".b_up", Part::up, true, true},
    {Naming::tessera, ".b_gate", Part::gate, true, true},
    {Naming::tessera, ".b_down", Part::down, true, false},
    {Naming::tessera, ".b_down", Part::down, true, true},
    {Naming::per_expert, ".gate_proj.weight", Part::gate, false, false},
    {Naming::per_expert, ".up_proj.weight", Part::up, false, false},
    {Naming::per_expert, ".down_proj.weight", Part::down, false, false},
    {Naming::per_expert_w123, ".w1.weight", Part::gate, false, false},
    {Naming::per_expert_w123, ".w3.weight", Part::up, false, false},
    {Naming::per_expert_w123, ".w2.weight", Part::down, false, false},
    {Naming::stacked, ".gate_up_proj", Part::gate_up, false, false},
    {Naming::stacked, ".up_proj", Part::up, false, false},
    {Naming::stacked, ".down_proj", Part::down, false, false},
    {Naming::stacked, ".gate_up_proj_bias", Part::gate_up, true, false},
    {Naming::stacked, ".down_proj_bias", Part::down, true, false},
    {Naming::stacked_linear, ".input_linear.weight", Part::gate_up, false, false},
    {Naming::stacked_linear, ".output_linear.weight", Part::down, false, false},
    {Naming::stacked_linear_mlp, ".input_linear.weight", Part::gate_up, false, false},
    {Naming::stacked_linear_mlp, ".output_linear.weight", Part::down, false, false},
    {Naming::stacked_fc, ".fc1.weight", Part::gate_up, false, false},
    {Naming::stacked_fc, ".fc2.weight", Part::down, false, false},
};

constexpr std::pair<Naming, char const*> kNamings[] = {
    {Naming::tessera, "tessera"},
    {Naming::per_expert, "per-expert"},
    {Naming::per_expert_w123, "per-expert-w123"},
    {Naming::stacked, "stacked"},
    {Naming::stacked_linear, "stacked-linear"},
    {Naming::stacked_linear_mlp, "stacked-linear-mlp"},
    {Naming::stacked_fc, "stacked-fc"},
};

constexpr WeightLayout kSeparate{GateUpOrder::concat, WeightOrientation::separate, 0};
constexpr WeightLayout kConcat{};
constexpr WeightLayout kTransposed{GateUpOrder::concat, WeightOrientation::transposed, 0};

constexpr std::pair<std::string_view, NativeForm> kNativeForms[] = {
    {"afmoe", {Naming::per_expert, kSeparate}},
    {"deepseek_v2", {Naming::per_expert, kSeparate}},
    {"deepseek_v3", {Naming::per_expert, kSeparate}},
    {"dots1", {Naming::per_expert, kSeparate}},
    {"ernie4_5_moe", {Naming::per_expert, kSeparate}},
    {"flex_olmo", {Naming::per_expert, kSeparate}},
    {"glm4_moe", {Naming::per_expert, kSeparate}},
    {"hunyuan_v1_moe", {Naming::per_expert, kSeparate}},
    {"jamba", {Naming::per_expert, kSeparate}},
    {"nemotron_h", {Naming::per_expert, kSeparate, false}},
    {"olmoe", {Naming::per_expert, kSeparate}},
    {"qwen2_moe", {Naming::per_expert, kSeparate}},
    {"qwen3_moe", {Naming::per_expert, kSeparate}},
    {"qwen3_next", {Naming::per_expert, kSeparate}},
    {"qwen3_5_moe", {Naming::per_expert, kSeparate}},
    {"qwen3_5_moe_text", {Naming::per_expert, kSeparate}},
    {"tessera_moe", {Naming::per_expert, kSeparate}},  // `tessera train` with another router
    {"lfm2_moe", {Naming::per_expert_w123, kSeparate}},
    {"minimax", {Naming::per_expert_w123, kSeparate}},
    {"minimax_m2", {Naming::per_expert_w123, kSeparate}},
    {"mixtral", {Naming::per_expert_w123, kSeparate}},
    {"phimoe", {Naming::per_expert_w123, kSeparate}},
    {"gpt_oss", {Naming::stacked, {GateUpOrder::interleaved, WeightOrientation::transposed, 0}}},
    {"llama4", {Naming::stacked, {GateUpOrder::concat, WeightOrientation::transposed, 0}}},
    {"llama4_text", {Naming::stacked, {GateUpOrder::concat, WeightOrientation::transposed, 0}}},
    {"qwen3_vl_moe", {Naming::stacked, {GateUpOrder::concat, WeightOrientation::transposed, 0}}},
    {"granitemoe", {Naming::stacked_linear, kConcat}},
    {"jetmoe", {Naming::stacked_linear_mlp, kConcat}},
    {"aria", {Naming::stacked_fc, kTransposed}},
    {"aria_text", {Naming::stacked_fc, kTransposed}},
};

bool ends_with_component(std::string_view prefix, std::string_view last) {
  return prefix == last || (prefix.size() > last.size() && prefix.ends_with(last) &&
                            prefix[prefix.size() - last.size() - 1] == '.');
}

// "experts" as the last component; Granite and JetMoE have none, their block stands for it. JetMoE's
// "self_attention.experts" has such names as well: projections of queries, which are no experts of a layer here.
bool is_prefix(Naming naming, std::string_view prefix) {
  if (naming == Naming::tessera) return !prefix.empty();
  if (naming == Naming::stacked_linear) return ends_with_component(prefix, "block_sparse_moe");
  if (naming == Naming::stacked_linear_mlp) return ends_with_component(prefix, "mlp");
  return ends_with_component(prefix, "experts");
}

}  // namespace

char const* naming_name(Naming naming) noexcept {
  for (auto const& [value, name] : kNamings) {
    if (value == naming) return name;
  }
  return "unknown";
}

std::optional<Naming> naming_named(std::string_view name) noexcept {
  for (auto const& [value, text] : kNamings) {
    if (name == text) return value;
  }
  return std::nullopt;
}

char const* known_spellings() noexcept {
  return "experts.<e>.gate_proj.weight (up_proj, down_proj), experts.<e>.w1.weight (w3, w2), "
         "experts.gate_up_proj (down_proj), block_sparse_moe.input_linear.weight (output_linear), "
         "mlp.input_linear.weight, experts.fc1.weight (fc2); without a gate "
         "experts.<e>.up_proj.weight, "
         "experts.up_proj";
}

WeightLayout hugging_face_layout(Naming naming) noexcept {
  if (naming == Naming::stacked_fc) return kTransposed;
  return is_per_expert(naming) ? kSeparate : kConcat;
}

bool is_per_expert(Naming naming) noexcept {
  return naming == Naming::per_expert || naming == Naming::per_expert_w123;
}

std::optional<ExpertTensor> parse_expert_name(Naming naming, std::string_view name, bool separate) {
  for (Suffix const& suffix : kSuffixes) {
    bool const tessera = naming == Naming::tessera;
    if (suffix.naming != naming || (tessera && suffix.separate != separate)) continue;
    if (!name.ends_with(suffix.text)) continue;
    std::string_view stem = name;
    stem.remove_suffix(std::string_view(suffix.text).size());
    ExpertTensor tensor{.prefix = {}, .part = suffix.part, .bias = suffix.bias};
    if (is_per_expert(naming)) {
      std::size_t const dot = stem.rfind('.');
      if (dot == std::string_view::npos) continue;
      std::string_view const digits = stem.substr(dot + 1);
      auto const [end, error] =
          std::from_chars(digits.data(), digits.data() + digits.size(), tensor.expert);
      bool const canonical = error == std::errc{} && end == digits.data() + digits.size() &&
                             std::to_string(tensor.expert) == digits && tensor.expert >= 0 &&
                             tensor.expert < kMaxExperts;
      if (!canonical) continue;
      stem = stem.substr(0, dot);
    }
    if (!is_prefix(naming, stem)) continue;
    tensor.prefix = stem;
    return tensor;
  }
  return std::nullopt;
}

std::string expert_name(Naming naming, ExpertTensor const& tensor) {
  std::string const number =
      is_per_expert(naming) ? "." + std::to_string(tensor.expert) : std::string();
  for (Suffix const& suffix : kSuffixes) {
    if (suffix.naming == naming && suffix.part == tensor.part && suffix.bias == tensor.bias) {
      return tensor.prefix + number + suffix.text;
    }
  }
  return {};  // a part that the scheme has no name for
}

std::optional<NativeForm> native_form(std::string_view model_type) noexcept {
  for (auto const& [name, form] : kNativeForms) {
    if (name == model_type) return form;
  }
  return std::nullopt;
}

std::vector<std::string_view> native_model_types() {
  std::vector<std::string_view> types;
  for (auto const& [name, form] : kNativeForms) types.push_back(name);
  return types;
}

std::string native_prefix(Naming naming, std::string_view prefix) {
  constexpr std::string_view kExperts = ".experts", kMlp = "mlp.experts";
  constexpr char const* kBlock = "block_sparse_moe.experts";
  std::string native(prefix);
  if (naming == Naming::stacked_linear && prefix.ends_with(kExperts)) {
    native.resize(prefix.size() - kExperts.size());
  }
  bool const of_mlp =
      prefix == kMlp || (prefix.ends_with(kMlp) && prefix[prefix.size() - kMlp.size() - 1] == '.');
  if (naming == Naming::per_expert_w123 && of_mlp) {
    native.replace(prefix.size() - kMlp.size(), kMlp.size(), kBlock);
  }
  return native;
}

}  // namespace tessera::huggingface
