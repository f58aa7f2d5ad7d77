// SPDX-License-Identifier: Apache-2.0
// The names of options, as users write them on the command line and in files: one table for each enum.
#pragma once

#include <charconv>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/shape.hpp"

namespace tessera {

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

inline constexpr Named<Precision> kPrecisionNames[] = {{"native", Precision::native},
                                                       {"fp8", Precision::fp8},
                                                       {"mxfp8", Precision::mxfp8},
                                                       {"auto", Precision::automatic}};

inline constexpr Named<DType> kDTypeNames[] = {
    {"fp32", DType::fp32}, {"bf16", DType::bf16}, {"fp16", DType::fp16}};

/// The name of `value`, or "unknown" for one that is in no table.
template <class Value, std::size_t kCount>
constexpr char const* name_of(Named<Value> const (&names)[kCount], Value value) noexcept {
  for (auto const& named : names) {
    if (named.value == value) return named.name;
  }
  return "unknown";
}

/// The value that `name` names, or nothing.
template <class Value, std::size_t kCount>
constexpr std::optional<Value> value_named(Named<Value> const (&names)[kCount],
                                           std::string_view name) noexcept {
  for (auto const& named : names) {
    if (name == named.name) return named.value;
  }
  return std::nullopt;
}

/// All names of a table with spaces between them: what a message offers.
template <class Value, std::size_t kCount>
std::string names_text(Named<Value> const (&names)[kCount]) {
  std::string text;
  for (auto const& named : names) text.append(text.empty() ? "" : " ").append(named.name);
  return text;
}

/// "concat", "transposed-blocked:32", ...
inline std::string layout_name(WeightLayout const& layout) {
  WeightLayout plain = layout;
  plain.block = 0;
  std::string name = name_of(kLayoutNames, plain);
  if (layout.order == GateUpOrder::blocked) name.append(":").append(std::to_string(layout.block));
  return name;
}

/// The layout that layout_name() calls `text`; nothing for any other text. Blocked layouts, and only they,
/// name their block, a positive integer.
inline std::optional<WeightLayout> layout_named(std::string_view text) noexcept {
  std::size_t const colon = text.find(':');
  std::optional<WeightLayout> layout = value_named(kLayoutNames, text.substr(0, colon));
  bool const has_block = colon != std::string_view::npos;
  if (!layout || (layout->order == GateUpOrder::blocked) != has_block) return std::nullopt;
  if (!has_block) return layout;
  std::string_view const digits = text.substr(colon + 1);
  auto const [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), layout->block);
  bool const whole = error == std::errc{} && end == digits.data() + digits.size();
  return whole && layout->block > 0 ? layout : std::nullopt;
}

}  // namespace tessera
