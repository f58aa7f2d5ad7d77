// SPDX-License-Identifier: Apache-2.0
// The names of options on the command line, and the command that reproduces a case.
#pragma once

#include <cstddef>
#include <string>

#include "verify/case.hpp"

namespace tessera::verify {

template <class Value>
struct Named {
  char const* name;
  Value value;
};

inline constexpr Named<ActivationKind> kActivationNames[] = {
    {"swiglu", ActivationKind::swiglu},
    {"geglu", ActivationKind::geglu},
    {"geglu-erf", ActivationKind::geglu_erf},
    {"reglu", ActivationKind::reglu},
    {"clamped-swiglu", ActivationKind::clamped_swiglu},
    {"relu", ActivationKind::relu},
    {"relu2", ActivationKind::relu2},
    {"silu", ActivationKind::silu},
    {"gelu", ActivationKind::gelu},
    {"gelu-erf", ActivationKind::gelu_erf},
};

inline constexpr Named<RouterKind> kRouterNames[] = {
    {"topk-softmax", RouterKind::topk_softmax},
    {"softmax-topk", RouterKind::softmax_topk},
    {"softmax-topk-renorm", RouterKind::softmax_topk_renorm},
    {"sigmoid-bias", RouterKind::sigmoid_bias},
    {"group-limited", RouterKind::group_limited},
    {"sqrtsoftplus", RouterKind::sqrtsoftplus},
    {"expert-choice", RouterKind::expert_choice},
    {"given", RouterKind::given},
};

inline constexpr Named<Rounding> kRoundingNames[] = {
    {"none", Rounding::none}, {"nr-f", Rounding::nr_f},           {"sr-f", Rounding::sr_f},
    {"nr-s", Rounding::nr_s}, {"balance-f", Rounding::balance_f}, {"up", Rounding::up},
    {"down", Rounding::down},
};

/// `blocked` and the `transposed-` forms go beyond the common five; blocks are written blocked:B.
inline constexpr Named<WeightLayout> kLayoutNames[] = {
    {"concat", {GateUpOrder::concat, WeightOrientation::rows, 0}},
    {"interleaved", {GateUpOrder::interleaved, WeightOrientation::rows, 0}},
    {"up-first", {GateUpOrder::up_first, WeightOrientation::rows, 0}},
    {"transposed", {GateUpOrder::concat, WeightOrientation::transposed, 0}},
    {"separate", {GateUpOrder::concat, WeightOrientation::separate, 0}},
    {"blocked", {GateUpOrder::blocked, WeightOrientation::rows, 0}},
    {"transposed-interleaved", {GateUpOrder::interleaved, WeightOrientation::transposed, 0}},
    {"transposed-up-first", {GateUpOrder::up_first, WeightOrientation::transposed, 0}},
    {"transposed-blocked", {GateUpOrder::blocked, WeightOrientation::transposed, 0}},
};

inline constexpr Named<DType> kDTypeNames[] = {
    {"fp32", DType::fp32}, {"bf16", DType::bf16}, {"fp16", DType::fp16}};

inline constexpr Named<DType> kIdsDTypeNames[] = {{"int32", DType::int32}, {"int64", DType::int64}};

inline constexpr Named<SavePolicy> kSaveNames[] = {{"h", SavePolicy::h}, {"x", SavePolicy::x}};

inline constexpr Named<RoutingPattern> kPatternNames[] = {
    {"random", RoutingPattern::random},
    {"balanced", RoutingPattern::balanced},
    {"zipf", RoutingPattern::zipf},
    {"one-expert", RoutingPattern::one_expert},
    {"one-token-each", RoutingPattern::one_token_each},
    {"empty", RoutingPattern::empty},
    {"file", RoutingPattern::file},
};

template <class Value, std::size_t kCount>
char const* name_of(Named<Value> const (&names)[kCount], Value value) {
  for (auto const& named : names) {
    if (named.value == value) return named.name;
  }
  return "unknown";
}

/// "concat", "transposed-blocked:32", ...
std::string layout_name(WeightLayout const& layout);
/// "random", "zipf:1.5", "file:ids.json", ...
std::string routing_name(RoutingSpec const& routing);

/// The options of `tessera verify` (and bench, explain) that stand for `layer_case`.
std::string case_options(LayerCase const& layer_case);

}  // namespace tessera::verify
