// SPDX-License-Identifier: Apache-2.0
#include "core/desc_check.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/dtype_name.hpp"
#include "core/gathered_rows.hpp"
#include "core/option_check.hpp"
#include "core/router_groups.hpp"
#include "tessera/names.hpp"

namespace tessera::core {
namespace {

using Int = long long;  // for %lld

template <class Enum>
bool in_range(Enum value, Enum last) noexcept {
  return static_cast<std::int32_t>(value) >= 0 && value <= last;
}

Status check_router_dtype(MoeDesc const& desc) noexcept {
  DType const own = desc.router_dtype;
  if (own == DType::none) return {};
  if (!in_range(own, DType::e8m0)) {
    return Status::invalid("router_dtype=%d: not a value of its enum; see tessera/shape.hpp",
                           static_cast<int>(own));
  }
  if (own != DType::fp32 && own != desc.dtype) {
    return Status::invalid(
        "router_dtype=%s beside dtype=%s: w_router and b_router are fp32 or of the type of x; "
        "convert them",
        dtype_name(own), dtype_name(desc.dtype));
  }
  if (desc.router.kind == RouterKind::given) {
    return Status::invalid("router_dtype=%s with router given: there is no router; leave it out",
                           dtype_name(own));
  }
  return {};
}

Status check_enums(MoeDesc const& desc) noexcept {
  auto const bad = [](char const* name, auto value) {
    return Status::invalid("%s=%d: not a value of its enum; see tessera/shape.hpp", name,
                           static_cast<int>(value));
  };
  if (!in_range(desc.dtype, DType::e8m0) || desc.dtype == DType::none) {
    return bad("dtype", desc.dtype);
  }
  if (desc.dtype >= DType::int32) {
    return Status::invalid("dtype=%d: storage is fp32, bf16 or fp16; choose one of them",
                           static_cast<int>(desc.dtype));
  }
  TESSERA_TRY(check_router_dtype(desc));
  if (!in_range(desc.activation.kind, ActivationKind::gelu_erf)) {
    return bad("activation", desc.activation.kind);
  }
  if (!in_range(desc.layout.order, GateUpOrder::blocked)) {
    return bad("layout.order", desc.layout.order);
  }
  if (!in_range(desc.layout.orientation, WeightOrientation::separate)) {
    return bad("layout.orientation", desc.layout.orientation);
  }
  if (!in_range(desc.router.kind, RouterKind::expert_choice))
    return bad("router", desc.router.kind);
  if (!in_range(desc.router.round, Rounding::down)) return bad("round", desc.router.round);
  if (!in_range(desc.score_position, ScorePosition::input)) {
    return bad("score_position", desc.score_position);
  }
  if (!in_range(desc.save, SavePolicy::none)) return bad("save", desc.save);
  if (!in_range(desc.grouping, RowGrouping::counts)) return bad("grouping", desc.grouping);
  if (!in_range(desc.precision, Precision::automatic)) return bad("precision", desc.precision);
  if (desc.ids_dtype != DType::int32 && desc.ids_dtype != DType::int64) {
    return Status::invalid("ids_dtype=%d: ids and offsets are int32 or int64",
                           static_cast<int>(desc.ids_dtype));
  }
  return {};
}

/// Checks who chooses, and what goes together: replayed ids, expert choice, token rounding.
Status check_choice(MoeDesc const& desc) noexcept {
  Router const& router = desc.router;
  bool const given = router.kind == RouterKind::given;
  if (given && router.replay) {
    return Status::invalid(
        "replay with router given: there is no router to score the ids; set its kind");
  }
  if (desc.rounds_tokens()) {
    char const* const rounding = name_of(kRoundingNames, router.round);
    if (given || router.replay) {
      return Status::invalid(
          "token rounding %s with %s: rounding needs a router's choice and scores; use none, or a "
          "top-k router without replay",
          rounding, given ? "router given" : "replay");
    }
    if (router.kind == RouterKind::expert_choice) {
      return Status::invalid(
          "token rounding %s with router expert-choice: its experts take equal counts already; set "
          "capacity",
          rounding);
    }
    if (router.tile < 1) {
      return Status::invalid("tile=%d: token rounding needs a tile of at least 1", router.tile);
    }
  }
  if (router.capacity != 0 && !desc.experts_choose()) {
    return Status::invalid("capacity=%lld: only expert_choice has one; leave 0",
                           static_cast<Int>(router.capacity));
  }
  if (router.capacity < 0 || router.capacity > desc.shape.tokens) {
    return Status::invalid("capacity=%lld, tokens=%lld: an expert takes each token once at most",
                           static_cast<Int>(router.capacity), static_cast<Int>(desc.shape.tokens));
  }
  return {};
}

Status check_sizes(MoeDesc const& desc) noexcept {
  MoeShape const& s = desc.shape;
  struct Size {
    char const* name;
    std::int64_t value, least;
  };
  for (Size const size : {Size{"tokens", s.tokens, 0}, Size{"hidden", s.hidden, 1},
                          Size{"intermediate", s.intermediate, 1}, Size{"experts", s.experts, 1},
                          Size{"top_k", s.top_k, 1}, Size{"slots", s.slots, 0}}) {
    if (size.value < size.least || size.value > kMaxIndex) {
      return Status::invalid("%s=%lld: must be in [%lld, 2^31)", size.name,
                             static_cast<Int>(size.value), static_cast<Int>(size.least));
    }
  }
  if (desc.router.kind != RouterKind::given && s.top_k > s.experts) {
    return Status::invalid("top_k=%lld, experts=%lld: a router chooses at most all experts",
                           static_cast<Int>(s.top_k), static_cast<Int>(s.experts));
  }
  if (!s.variable_experts && s.slots != 0) {
    return Status::invalid(
        "slots=%lld without variable_experts: leave 0 (P = tokens*top_k) or set variable_experts",
        static_cast<Int>(s.slots));
  }
  if (s.variable_experts && desc.router.kind != RouterKind::given && !desc.router.replay) {
    return Status::invalid(
        "variable_experts: token_offsets come with given ids only; use router given, or replay");
  }
  if (s.variable_experts && s.tokens == 0 && s.slots != 0) {
    return Status::invalid("slots=%lld, tokens=0: slots of no token; leave 0",
                           static_cast<Int>(s.slots));
  }
  // Products of two values below 2^31 fit in int64.
  if (!s.variable_experts && s.tokens * s.top_k > kMaxIndex) {
    return Status::invalid(
        "tokens=%lld, top_k=%lld: tokens*top_k must stay below 2^31; split the batch",
        static_cast<Int>(s.tokens), static_cast<Int>(s.top_k));
  }
  TESSERA_TRY(check_choice(desc));
  if (desc.num_slots() > kMaxIndex) {
    return Status::invalid("slots=%lld of %lld tokens: must stay below 2^31; split the batch",
                           static_cast<Int>(desc.num_slots()), static_cast<Int>(s.tokens));
  }
  std::int64_t const widest = std::max(desc.up_width() * s.intermediate, s.hidden);
  if (widest > kMaxIndex || s.experts * widest > kMaxIndex) {
    return Status::invalid("experts=%lld, rows per expert=%lld: their product must stay below 2^31",
                           static_cast<Int>(s.experts), static_cast<Int>(widest));
  }
  // Buffers of P and T rows must be addressable: their bytes fit in 63 bits.
  constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;
  std::int64_t const longest = std::max(desc.num_slots(), s.tokens);
  if (longest * std::max(widest, s.experts) > kMaxElements) {
    return Status::invalid("tokens=%lld, slots=%lld with %lld columns: more than 2^56 elements",
                           static_cast<Int>(s.tokens), static_cast<Int>(desc.num_slots()),
                           static_cast<Int>(std::max(widest, s.experts)));
  }
  return {};
}

Status check_groups(MoeDesc const& desc) noexcept {
  Router const& router = desc.router;
  Int const experts = desc.shape.experts, top_k = desc.shape.top_k;
  if (router.groups < 0 || (router.groups > 0 && experts % router.groups != 0)) {
    return Status::invalid("groups=%d, experts=%lld: groups must divide experts", router.groups,
                           experts);
  }
  auto const [groups, top_groups] = router_groups(desc);
  if (router.top_groups < 0 || top_groups > groups || top_groups * (experts / groups) < top_k) {
    return Status::invalid(
        "top_groups=%d of %lld groups, experts=%lld, top_k=%lld: at most all groups, and their "
        "experts must hold top_k",
        router.top_groups, static_cast<Int>(groups), experts, top_k);
  }
  return {};
}

Status check_options(MoeDesc const& desc) noexcept {
  TESSERA_TRY(check_activation(desc.activation));
  bool const separate = desc.layout.orientation == WeightOrientation::separate;
  if (!desc.activation.gated() && separate) {
    return Status::invalid(
        "layout separate with activation %s: not gated, it has w_up alone; leave out w_gate and "
        "b_gate",
        name_of(kActivationNames, desc.activation.kind));
  }
  if (!desc.activation.gated() && desc.layout.order != GateUpOrder::concat) {
    return Status::invalid(
        "layout with activation %s: gate and up order matters to gated activations only; use "
        "concat, rows or transposed",
        name_of(kActivationNames, desc.activation.kind));
  }
  if (separate && desc.layout.order != GateUpOrder::concat) {
    return Status::invalid("layout: separate matrices have no gate/up order; use concat");
  }
  if (desc.layout.order == GateUpOrder::blocked &&
      (desc.layout.block < 1 || desc.shape.intermediate % desc.layout.block != 0)) {
    return Status::invalid("layout.block=%d, intermediate=%lld: the block must divide intermediate",
                           desc.layout.block, static_cast<Int>(desc.shape.intermediate));
  }
  if (desc.layout.order != GateUpOrder::blocked && desc.layout.block != 0) {
    return Status::invalid("layout.block=%d: only with GateUpOrder::blocked; leave 0",
                           desc.layout.block);
  }
  if (desc.grouping != RowGrouping::slots &&
      (desc.router.kind != RouterKind::given || desc.shape.top_k != 1)) {
    return Status::invalid(
        "grouping=%d: rows grouped ahead of the call need router given and top_k=1 (tokens = rows, "
        "or, with variable_experts, slots = rows that gather tokens)",
        static_cast<int>(desc.grouping));
  }
  if (gathers_grouped_rows(desc) && desc.grouping != RowGrouping::offsets) {
    return Status::invalid(
        "grouping=%d with variable_experts: rows that gather tokens have tables already; set "
        "grouping offsets",
        static_cast<int>(desc.grouping));
  }
  if (gathers_grouped_rows(desc) && desc.quantises()) {
    return Status::unsupported(
        "precision=%s with rows that gather tokens: native alone has them; use native",
        name_of(kPrecisionNames, desc.precision));
  }
  if (desc.column_chunk < 0) {
    return Status::invalid("column_chunk=%lld: a number of columns of hidden, or 0 for all",
                           static_cast<Int>(desc.column_chunk));
  }
  if (desc.overwrite_h && desc.save != SavePolicy::h) {
    return Status::invalid("overwrite_h: with save=%d backward is given no h; leave it out",
                           static_cast<int>(desc.save));
  }
  if (!std::isfinite(desc.router.route_scale)) {
    return Status::invalid("route_scale=%g: must be finite",
                           static_cast<double>(desc.router.route_scale));
  }
  if (desc.router.kind == RouterKind::group_limited) TESSERA_TRY(check_groups(desc));
  return {};
}

/// Checks what a layer needs that quantises its operands, and refuses what is not computed in it.
Status check_precision(MoeDesc const& desc) noexcept {
  char const* const name = name_of(kPrecisionNames, desc.precision);
  if (desc.pow2_scales && desc.precision != Precision::fp8) {
    return Status::invalid(
        "pow2_scales with precision %s: it would change nothing, only fp8 reads it; leave it out",
        name);
  }
  if (desc.weight_codes && desc.precision != Precision::fp8 &&
      desc.precision != Precision::automatic) {
    return Status::invalid(
        "weight_codes with precision %s: only layers of fp8 read codes of weights; leave it out",
        name);
  }
  if (!desc.quantises()) return {};
  if (desc.dtype != DType::bf16) {
    return Status::unsupported("precision=%s with dtype=%s: such layers store bf16; take bf16",
                               name, dtype_name(desc.dtype));
  }
  Int const block = desc.scale_block();
  for (auto const& [extent, value] : {std::pair{"hidden", desc.shape.hidden},
                                      std::pair{"intermediate", desc.shape.intermediate}}) {
    if (value % block == 0) continue;
    return Status::invalid(
        "%s=%lld with precision=%s: blocks need a multiple of %lld; pad it to %lld or use native",
        extent, static_cast<Int>(value), name, block, (value / block + 1) * block);
  }
  if (desc.column_chunk != 0) {
    return Status::unsupported(
        "column_chunk=%lld with precision=%s: whole rows of y are computed; leave it out",
        static_cast<Int>(desc.column_chunk), name);
  }
  return {};
}

}  // namespace

Status check_desc(MoeDesc const& desc) noexcept {
  TESSERA_TRY(check_enums(desc));
  TESSERA_TRY(check_sizes(desc));
  TESSERA_TRY(check_options(desc));
  TESSERA_TRY(check_precision(desc));
  return check_options_apply(desc);
}

Status check_activation(Activation const& activation) noexcept {
  if (activation.kind == ActivationKind::clamped_swiglu &&
      !(std::isfinite(activation.alpha) && activation.limit > 0 &&
        std::isfinite(activation.up_offset))) {
    return Status::invalid(
        "clamped_swiglu alpha=%g limit=%g up_offset=%g: finite values and limit > 0 are needed",
        static_cast<double>(activation.alpha), static_cast<double>(activation.limit),
        static_cast<double>(activation.up_offset));
  }
  return check_options_apply(activation);
}

Status check_pass(Pass pass) noexcept {
  if (!in_range(pass, Pass::route)) {
    return Status::invalid("pass=%d: not a value of its enum; see tessera/moe.hpp",
                           static_cast<int>(pass));
  }
  return {};
}

}  // namespace tessera::core
