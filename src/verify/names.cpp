// SPDX-License-Identifier: Apache-2.0
#include "verify/names.hpp"

#include <cstdio>

namespace tessera::verify {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

}  // namespace

std::string routing_name(RoutingSpec const& routing) {
  std::string name = name_of(kPatternNames, routing.pattern);
  switch (routing.pattern) {
    case RoutingPattern::zipf:
    case RoutingPattern::shuffled_zipf:
    case RoutingPattern::empty:
      return name.append(":").append(number(routing.parameter));
    case RoutingPattern::file:
      return name.append(":").append(routing.path);
    default:
      return name;
  }
}

std::string case_options(LayerCase const& layer_case) {
  MoeDesc const& desc = layer_case.desc;
  MoeDesc const plain;
  std::string text;
  auto const add = [&text](char const* flag, std::string const& value) {
    text += (text.empty() ? "--" : " --") + std::string(flag);
    if (!value.empty()) text += " " + value;
  };
  add("tokens", std::to_string(desc.shape.tokens));
  add("hidden", std::to_string(desc.shape.hidden));
  add("intermediate", std::to_string(desc.shape.intermediate));
  add("experts", std::to_string(desc.shape.experts));
  add("top-k", std::to_string(desc.shape.top_k));
  add("activation", name_of(kActivationNames, desc.activation.kind));
  add("layout", layout_name(desc.layout));
  add("dtype", name_of(kDTypeNames, desc.dtype));
  if (desc.router_dtype != DType::none) {
    add("router-dtype", name_of(kDTypeNames, desc.router_dtype));
  }
  if (desc.precision != Precision::native) {
    add("precision", name_of(kPrecisionNames, desc.precision));
    if (desc.pow2_scales) add("scales", "pow2");
  }
  add("router", name_of(kRouterNames, desc.router.kind));
  add("routing", routing_name(layer_case.routing));
  if (desc.activation.alpha != plain.activation.alpha) add("alpha", number(desc.activation.alpha));
  if (desc.activation.limit != plain.activation.limit) add("limit", number(desc.activation.limit));
  if (desc.activation.up_offset != plain.activation.up_offset) {
    add("up-offset", number(desc.activation.up_offset));
  }
  if (desc.bias) add("bias", "");
  if (desc.router.round != Rounding::none) {
    add("round", name_of(kRoundingNames, desc.router.round));
    add("tile", std::to_string(desc.router.tile));
    if (desc.router.step != 0) add("step", std::to_string(desc.router.step));
    if (desc.router.layer != 0) add("layer", std::to_string(desc.router.layer));
  }
  if (desc.router.capacity != 0) add("capacity", std::to_string(desc.router.capacity));
  if (desc.router.replay) add("replay", "");
  if (layer_case.aux_dlogits) add("aux-dlogits", "");
  if (desc.router.groups != 0) add("groups", std::to_string(desc.router.groups));
  if (desc.router.top_groups != 0) add("top-groups", std::to_string(desc.router.top_groups));
  if (desc.router.route_scale != 1) add("route-scale", number(desc.router.route_scale));
  if (desc.router.normalize_scores) add("normalize-scores", "");
  if (layer_case.router_bias) add("router-bias", "");
  if (layer_case.sentinel_fraction != 0) add("sentinels", number(layer_case.sentinel_fraction));
  if (layer_case.padding_fraction != 0) add("padding", number(layer_case.padding_fraction));
  if (layer_case.repeat_experts) add("repeat-experts", "");
  if (desc.shape.variable_experts) add("variable-experts", "");
  if (desc.ids_dtype != DType::int32) add("ids-dtype", name_of(kIdsDTypeNames, desc.ids_dtype));
  if (desc.column_chunk != 0) add("column-chunk", std::to_string(desc.column_chunk));
  if (desc.save != SavePolicy::h) add("save", name_of(kSaveNames, desc.save));
  if (layer_case.gradient_mode == GradientMode::accumulate) add("accumulate", "");
  add("seed", std::to_string(layer_case.seed));
  return text;
}

}  // namespace tessera::verify
