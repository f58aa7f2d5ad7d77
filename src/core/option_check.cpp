// SPDX-License-Identifier: Apache-2.0
#include "core/option_check.hpp"

#include "core/router_math.hpp"
#include "tessera/names.hpp"
#include "tessera/router.hpp"

namespace tessera::core {
namespace {

/// An option that something reads, or that keeps its default.
struct Option {
  char const* name;
  bool changed;  ///< differs from its default
  double value;
  bool is_read;
  char const* readers;
};

template <class Value>
Option option(char const* name, Value value, Value plain, bool is_read,
              char const* readers) noexcept {
  return {name, !(value == plain), static_cast<double>(value), is_read, readers};
}

template <std::size_t kCount>
Status check(Option const (&options)[kCount], char const* what, char const* chosen) noexcept {
  for (Option const& option : options) {
    if (!option.changed || option.is_read) continue;
    return Status::invalid(
        "%s=%.10g with %s %s: it would change nothing, only %s reads it; leave it out", option.name,
        option.value, what, chosen, option.readers);
  }
  return {};
}

Status check_normalization(Router const& router) noexcept {
  bool const divides = has_own_p(router.kind) || router.kind == RouterKind::softmax_topk;
  if (!router.normalize_scores || divides) return {};
  char const* const name = name_of(kRouterNames, router.kind);
  if (router.kind == RouterKind::given || router.kind == RouterKind::expert_choice) {
    return Status::invalid(
        "normalize_scores=1 with router %s: it would change nothing, only softmax-topk, "
        "sigmoid-bias, group-limited and sqrtsoftplus read it; leave it out",
        name);
  }
  return Status::invalid(
      "normalize_scores=1 with router %s: a token's scores add up to 1 without it; leave it out",
      name);
}

}  // namespace

Status check_options_apply(Activation const& activation) noexcept {
  Activation const plain;
  bool const clamped = activation.kind == ActivationKind::clamped_swiglu;
  constexpr char const* kReader = "clamped-swiglu";
  return check({option("alpha", activation.alpha, plain.alpha, clamped, kReader),
                option("limit", activation.limit, plain.limit, clamped, kReader),
                option("up_offset", activation.up_offset, plain.up_offset, clamped, kReader)},
               "activation", name_of(kActivationNames, activation.kind));
}

Status check_options_apply(MoeDesc const& desc) noexcept {
  if (desc.score_position != ScorePosition::output) {
    return Status::unsupported(
        "score_position=%s: this version multiplies by scores after the down projection; use "
        "output",
        desc.score_position == ScorePosition::input ? "input" : "activation");
  }
  Router const& router = desc.router;
  Router const plain;
  bool const given = router.kind == RouterKind::given;
  TESSERA_TRY(check_normalization(router));
  bool const groups = router.kind == RouterKind::group_limited && !router.replay;
  constexpr char const* kGroups = "the choice of group-limited";
  constexpr char const* kDraws = "stochastic token rounding (sr-f, nr-s)";
  TESSERA_TRY(
      check({option("route_scale", router.route_scale, plain.route_scale, !given, "a router"),
             option("groups", router.groups, plain.groups, groups, kGroups),
             option("top_groups", router.top_groups, plain.top_groups, groups, kGroups)},
            router.replay ? "given ids and router" : "router", name_of(kRouterNames, router.kind)));
  bool const is_drawn = draws(router);
  return check({option("tile", router.tile, plain.tile, desc.rounds_tokens(), "token rounding"),
                option("seed", router.seed, plain.seed, is_drawn, kDraws),
                option("step", router.step, plain.step, is_drawn, kDraws),
                option("layer", router.layer, plain.layer, is_drawn, kDraws)},
               "token rounding", name_of(kRoundingNames, router.round));
}

}  // namespace tessera::core
