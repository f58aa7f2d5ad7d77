// SPDX-License-Identifier: Apache-2.0
// No option without effect: every pair of (router, rounding, activation, layout or grouping) and option is refused by
// the option's name, or changes what the calls compute, take or leave.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "tessera/names.hpp"
#include "tests/api/option_calls.hpp"

namespace tessera::api_test {
namespace {

struct Option {
  std::string name;
  std::function<void(MoeDesc&)> set;  ///< empty: the tensor `name` is given
  std::string other_name = {};        ///< of what a refusal may speak instead
};

std::vector<Option> options() {
  std::vector<Option> all = {
      {"route_scale", [](MoeDesc& d) { d.router.route_scale = 2.5f; }},
      {"normalize_scores", [](MoeDesc& d) { d.router.normalize_scores = true; }},
      {"groups", [](MoeDesc& d) { d.router.groups = 2; }},
      {"top_groups", [](MoeDesc& d) { d.router.top_groups = 1; }},
      {"tile", [](MoeDesc& d) { d.router.tile = 5; }},
      {"seed", [](MoeDesc& d) { d.router.seed = 7; }},
      {"step", [](MoeDesc& d) { d.router.step = 3; }},
      {"layer", [](MoeDesc& d) { d.router.layer = 2; }},
      {"capacity", [](MoeDesc& d) { d.router.capacity = 3; }},
      {"replay", [](MoeDesc& d) { d.router.replay = true; }},
      {"alpha", [](MoeDesc& d) { d.activation.alpha = 1.25f; }},
      {"limit", [](MoeDesc& d) { d.activation.limit = 0.25f; }},
      {"up_offset", [](MoeDesc& d) { d.activation.up_offset = 0; }},
      {"layout.block", [](MoeDesc& d) { d.layout.block = 3; }},
      {"bias", [](MoeDesc& d) { d.bias = true; }},
      {"save", [](MoeDesc& d) { d.save = SavePolicy::x; }},
      {"save", [](MoeDesc& d) { d.save = SavePolicy::none; }},
      {"score_position", [](MoeDesc& d) { d.score_position = ScorePosition::activation; }},
      {"score_position", [](MoeDesc& d) { d.score_position = ScorePosition::input; }},
      {"column_chunk", [](MoeDesc& d) { d.column_chunk = 3; }},
      {"overwrite_h", [](MoeDesc& d) { d.overwrite_h = true; }},
      {"ids_dtype", [](MoeDesc& d) { d.ids_dtype = DType::int64; }, "int64 is needed"},
      {"dtype", [](MoeDesc& d) { d.dtype = DType::bf16; }},
      {"precision", [](MoeDesc& d) { d.precision = Precision::fp8; }},
      {"precision", [](MoeDesc& d) { d.precision = Precision::mxfp8; }},
      {"precision", [](MoeDesc& d) { d.precision = Precision::automatic; }},
      {"pow2_scales", [](MoeDesc& d) { d.pow2_scales = true; }},
      {"weight_codes", [](MoeDesc& d) { d.weight_codes = true; }},
      {"router_dtype", [](MoeDesc& d) { d.router_dtype = DType::fp32; }},
      {"router_dtype", [](MoeDesc& d) { d.router_dtype = DType::bf16; }},
      {"variable_experts",
       [](MoeDesc& d) {
         d.shape.variable_experts = true;
         d.shape.slots = d.shape.tokens * d.shape.top_k;
       }},
      {"slots", [](MoeDesc& d) { d.shape.slots = 5; }}};
  for (GateUpOrder const order : {GateUpOrder::up_first, GateUpOrder::interleaved}) {
    all.push_back({"order", [order](MoeDesc& d) { d.layout.order = order; }, "layout"});
  }
  for (auto const turned : {WeightOrientation::transposed, WeightOrientation::separate}) {
    all.push_back(
        {"orientation", [turned](MoeDesc& d) { d.layout.orientation = turned; }, "layout"});
  }
  for (auto const& round : kRoundingNames) {
    if (round.value == Rounding::none) continue;
    all.push_back({"round", [round](MoeDesc& d) {
                     d.router.round = round.value;
                     d.router.tile = d.router.tile == 128 ? 3 : d.router.tile;
                   }});
  }
  for (auto const grouping : {RowGrouping::offsets, RowGrouping::ends, RowGrouping::counts}) {
    char const* const given = grouping == RowGrouping::offsets ? "expert_offsets: "
                              : grouping == RowGrouping::ends  ? "ends"
                                                               : "counts";
    all.push_back({"grouping", [grouping](MoeDesc& d) { d.grouping = grouping; }, given});
  }
  for (char const* name :
       {"topk_ids", "topk_weights", "token_offsets", "w_router", "b_router", "selection_bias",
        "expert_offsets", "row_scores", "w_gate", "b_up", "b_gate", "b_down", "aux_dlogits",
        "token_mask", "x8", "x_scale", "h_scale"}) {
    all.push_back({name, {}});
  }
  return all;
}

// Stops the compiler when a field is added: an option needs a row in options(), and the other steps of "An option of
// the layer" in docs/add-a-kernel.md.
[[maybe_unused]] void name_every_field(MoeDesc const& desc) {
  [[maybe_unused]] auto const& [shape, dtype, activation, layout, bias, router, score_position,
                                save, grouping, column_chunk, ids_dtype, overwrite_h, router_dtype,
                                precision, pow2_scales, weight_codes] = desc;
  [[maybe_unused]] auto const& [kind, route_scale, normalize_scores, groups, top_groups, round,
                                tile, seed, step, layer, capacity, replay] = desc.router;
}

struct Base {
  std::string name;
  MoeDesc desc;
};

MoeDesc plain_desc() {
  MoeDesc desc;
  desc.shape = {.tokens = kTokens,
                .hidden = kHidden,
                .intermediate = kIntermediate,
                .experts = kExperts,
                .top_k = kTopK};
  return desc;
}

std::vector<Base> bases() {
  std::vector<Base> all;
  auto const add = [&](std::string const& name, auto&& change) {
    all.push_back({name, plain_desc()});
    change(all.back().desc);
  };
  for (auto const& router : kRouterNames) {
    add(std::string("router ") + router.name, [&](MoeDesc& d) { d.router.kind = router.value; });
    if (router.value == RouterKind::given) continue;
    add(std::string("replayed ids, router ") + router.name, [&](MoeDesc& d) {
      d.router.kind = router.value;
      d.router.replay = true;
    });
  }
  for (auto const& round : kRoundingNames) {
    if (round.value == Rounding::none) continue;
    add(std::string("round ") + round.name, [&](MoeDesc& d) {
      d.router = {.kind = RouterKind::topk_softmax, .round = round.value, .tile = 3};
    });
  }
  for (auto const& activation : kActivationNames) {
    add(std::string("activation ") + activation.name,
        [&](MoeDesc& d) { d.activation.kind = activation.value; });
  }
  for (auto const& layout : kLayoutNames) {
    add(std::string("layout ") + layout.name, [&](MoeDesc& d) {
      d.layout = layout.value;
      if (d.layout.order == GateUpOrder::blocked) d.layout.block = 2;
    });
  }
  for (auto const grouping : {RowGrouping::offsets, RowGrouping::ends, RowGrouping::counts}) {
    add("grouping " + std::to_string(static_cast<int>(grouping)), [&](MoeDesc& d) {
      d.grouping = grouping;
      d.shape.top_k = 1;
    });
  }
  for (SavePolicy const save : {SavePolicy::x, SavePolicy::none}) {
    add("save " + std::to_string(static_cast<int>(save)), [&](MoeDesc& d) { d.save = save; });
  }
  return all;
}

/// Whether the desc and the tensors are those of the base: the option names what the base is anyway.
bool is_base(Base const& base, MoeDesc const& desc, Extras const& extras) {
  if (desc.router_dtype == DType::fp32 && desc.router.kind != RouterKind::given) return true;
  if (desc.precision == Precision::automatic) return true;  // native, as explain() says
  if (!(desc == base.desc)) return false;
  // After forward with save=none there is no backward call that could take aux_dlogits.
  if (holds(extras, "aux_dlogits") && desc.save == SavePolicy::none) return true;
  bool const routed = desc.router.kind != RouterKind::given;
  bool const grouped = desc.grouping != RowGrouping::slots;
  bool const separate = desc.layout.orientation == WeightOrientation::separate;
  return extras.empty() || (holds(extras, "w_router") && routed) ||
         (holds(extras, "topk_ids") && !grouped && (!routed || desc.router.replay)) ||
         (holds(extras, "topk_weights") && !grouped && !routed) ||
         (holds(extras, "expert_offsets") && grouped) || (holds(extras, "w_gate") && separate);
}

TEST(Options, NoneIsWithoutEffect) {
  Context const context = value_of(Context::create({.num_threads = 1}));
  int walked = 0, refused = 0, same = 0;
  for (Base const& base : bases()) {
    Outcome const plain = Calls(context, base.desc, {}, base.desc.grouping).run();
    ASSERT_TRUE(plain.refusals.empty() || base.desc.save == SavePolicy::none)
        << base.name << ": " << plain.refusals;
    for (Option const& option : options()) {
      MoeDesc desc = base.desc;
      Extras extras;
      option.set ? option.set(desc) : extras.push_back(option.name);
      if (is_base(base, desc, extras)) {
        ++same;
        continue;
      }
      ++walked;
      RowGrouping const grouping =
          base.desc.grouping == RowGrouping::slots ? desc.grouping : base.desc.grouping;
      Outcome const changed = Calls(context, desc, extras, grouping).run();
      bool const named = changed.refusals.find(option.name) != std::string::npos ||
                         (!option.other_name.empty() &&
                          changed.refusals.find(option.other_name) != std::string::npos);
      refused += named ? 1 : 0;
      // A call that is refused has no result: then the refusal has to name the option.
      bool const new_refusal = !changed.refusals.empty() && changed.refusals != plain.refusals;
      EXPECT_TRUE(named || (!new_refusal && changed.bytes != plain.bytes))
          << base.name << " with " << option.name
          << (new_refusal ? ": refused without its name: " + changed.refusals
                          : std::string(": accepted, and changes nothing"));
    }
  }
  std::printf("%d pairs walked: %d refused by name, %d change the result; %d are the base itself\n",
              walked, refused, walked - refused, same);
  EXPECT_GT(walked, 2000);
  EXPECT_GT(refused, 800);
  EXPECT_GT(walked - refused, 300);
}

// What Qwen3's config.json calls norm_topk_prob.
TEST(Options, NormalizedSoftmaxTopkIsSoftmaxTopkRenorm) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  for (Rounding const round : {Rounding::none, Rounding::nr_f}) {
    MoeDesc one = small_desc(RouterKind::softmax_topk), other = one;
    one.router.normalize_scores = true;
    other.router.kind = RouterKind::softmax_topk_renorm;
    one.router.round = other.router.round = round;
    if (round != Rounding::none) one.router.tile = other.router.tile = 2;
    EXPECT_EQ(resolved(one.router), other.router);
    Layer a(context, one), b(context, other);
    ASSERT_TRUE(a.run_forward().ok() && b.run_forward().ok());
    ASSERT_TRUE(a.run_backward().ok() && b.run_backward().ok());
    EXPECT_EQ(a.o, b.o);
    EXPECT_EQ(a.dw_router, b.dw_router);
    EXPECT_EQ(a.dx, b.dx);
    EXPECT_EQ(a.routing.size(), b.routing.size());
    one.router.normalize_scores = false;
    Layer plain(context, one);
    ASSERT_TRUE(plain.run_forward().ok());
    EXPECT_NE(a.o, plain.o);
  }
}

double norm(Floats const& values) {
  double sum = 0;
  for (float const value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

TEST(Options, ScoresAreConstantExactlyWhereTheRouterHasNoGradient) {
  Context const context = value_of(Context::create({.num_threads = 1}));
  int walked = 0, constant = 0;
  auto const share_of = [&](MoeDesc const& desc) {
    Layer layer(context, desc);
    if (desc.router.replay) {
      layer.forward.topk_ids = tensor(layer.ids.data(), {desc.shape.tokens, desc.shape.top_k});
    }
    EXPECT_TRUE(layer.run_forward().ok());
    EXPECT_TRUE(layer.run_backward().ok());
    return norm(layer.dw_router) / norm(layer.dw_up);
  };
  auto const walk = [&](MoeDesc desc) {
    if (!workspace_bytes(context, desc, Pass::forward).ok()) return;  // options that do not apply
    // Where scores are divided by their sum, it cancels up to rounding errors. A draw may add nothing by chance.
    double share = share_of(desc);
    for (std::uint64_t seed = 1; draws(desc.router) && seed < 8; ++seed) {
      desc.router.seed = seed;
      share = std::max(share, share_of(desc));
    }
    ++walked;
    if (scores_are_constant(desc)) {
      ++constant;
      EXPECT_LT(share, 1e-6);
    } else {
      EXPECT_GT(share, 1e-4);
    }
  };
  for (auto const& router : kRouterNames) {
    if (router.value == RouterKind::given) continue;
    for (std::int64_t const experts : {1, 5}) {
      for (std::int64_t const top_k : {std::int64_t{1}, std::int64_t{2}, experts}) {
        for (bool const normalize : {false, true}) {
          MoeDesc desc = small_desc(router.value);
          desc.shape.experts = experts;
          desc.shape.top_k = top_k;
          desc.router.normalize_scores = normalize;
          SCOPED_TRACE(testing::Message() << router.name << " experts " << experts << " top_k "
                                          << top_k << " normalize " << normalize);
          walk(desc);
          for (auto const& round : kRoundingNames) {
            for (std::int32_t const tile : {1, 2, 3}) {
              MoeDesc rounded = desc;
              rounded.router.round = round.value;
              if (round.value == Rounding::none) continue;
              rounded.router.tile = tile;
              SCOPED_TRACE(testing::Message() << round.name << " to " << tile);
              walk(rounded);
            }
          }
          desc.router.replay = true;
          walk(desc);
        }
      }
    }
  }
  MoeDesc silent = small_desc(RouterKind::softmax_topk);
  silent.router.route_scale = 0;
  EXPECT_TRUE(scores_are_constant(silent));
  EXPECT_FALSE(scores_are_constant(small_desc(RouterKind::given)));
  std::printf("%d layers, of which %d have constant scores\n", walked, constant);
  EXPECT_GT(walked, 500);
  EXPECT_GT(constant, 50);
}

}  // namespace
}  // namespace tessera::api_test
