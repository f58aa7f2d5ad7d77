// SPDX-License-Identifier: Apache-2.0
// What token rounding, expert choice and replay promise, seen through the API: counts, sets, ties, scores, bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

using Pair = std::pair<std::int64_t, std::int64_t>;  // token, expert

struct Slots {
  std::vector<std::int64_t> ids, offsets;
  Floats weights;
  std::vector<std::int64_t> rows;  ///< M_e
  std::set<Pair> pairs;
};

/// Routes with hidden = experts and an identity router: the logits are x.
Slots slots_of(MoeDesc desc, Floats const& logits, std::int32_t threads = 2) {
  Context const context = value_of(Context::create({.num_threads = threads}));
  std::int64_t const experts = desc.shape.experts, tokens = desc.shape.tokens;
  desc.shape.hidden = experts;
  desc.shape.intermediate = 1;
  desc.ids_dtype = DType::int64;
  Floats identity(static_cast<std::size_t>(experts * experts), 0.0f);
  for (std::int64_t e = 0; e < experts; ++e)
    identity[static_cast<std::size_t>(e * (experts + 1))] = 1;
  bool const vary = desc.experts_vary();
  Slots out;
  out.ids.assign(static_cast<std::size_t>(desc.num_slots()), -7);
  out.weights.assign(out.ids.size(), NAN);
  out.offsets.assign(static_cast<std::size_t>(tokens) + 1, -7);
  std::vector<std::byte> workspace(value_of(workspace_bytes(context, desc, Pass::route)),
                                   std::byte{0xff});
  RouteArgs args;
  args.x = tensor(logits.data(), {tokens, experts});
  args.w_router = tensor(identity.data(), {experts, experts});
  if (vary) {
    args.topk_ids = tensor(out.ids.data(), {desc.num_slots()});
    args.topk_weights = tensor(out.weights.data(), {desc.num_slots()});
    args.token_offsets = tensor(out.offsets.data(), {tokens + 1});
  } else {
    args.topk_ids = tensor(out.ids.data(), {tokens, desc.shape.top_k});
    args.topk_weights = tensor(out.weights.data(), {tokens, desc.shape.top_k});
    for (std::int64_t t = 0; t <= tokens; ++t) {
      out.offsets[static_cast<std::size_t>(t)] = t * desc.shape.top_k;
    }
  }
  args.workspace = {workspace.data(), workspace.size()};
  Status const status = route(context, desc, args);
  EXPECT_TRUE(status.ok()) << status.text();
  out.rows.assign(static_cast<std::size_t>(experts), 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    auto const at = static_cast<std::size_t>(t);
    for (std::int64_t j = out.offsets[at]; j < out.offsets[at + 1]; ++j) {
      std::int64_t const expert = out.ids[static_cast<std::size_t>(j)];
      ++out.rows[static_cast<std::size_t>(expert)];
      EXPECT_TRUE(out.pairs.emplace(t, expert).second) << "token " << t << " twice in " << expert;
    }
  }
  return out;
}

MoeDesc rounded_desc(Rounding rounding, std::int32_t tile, std::int64_t tokens,
                     std::int64_t experts, std::int64_t top_k,
                     RouterKind kind = RouterKind::topk_softmax) {
  MoeDesc desc;
  desc.shape.tokens = tokens;
  desc.shape.experts = experts;
  desc.shape.top_k = top_k;
  desc.router.kind = kind;
  desc.router.round = rounding;
  if (rounding != Rounding::none) desc.router.tile = tile;
  if (draws(desc.router)) desc.router.seed = 5;
  return desc;
}

constexpr Rounding kRoundings[] = {Rounding::nr_f,      Rounding::sr_f, Rounding::nr_s,
                                   Rounding::balance_f, Rounding::up,   Rounding::down};
constexpr RouterKind kTopKRouters[] = {RouterKind::topk_softmax, RouterKind::softmax_topk,
                                       RouterKind::sigmoid_bias, RouterKind::group_limited,
                                       RouterKind::sqrtsoftplus};

TEST(TokenRounding, CountsAreMultiplesOrAllThatIsEligible) {
  std::mt19937 generator(1);
  constexpr std::int64_t kTokens = 90, kExperts = 12, kTopK = 3;
  for (RouterKind const kind : kTopKRouters) {
    Floats const logits = random_floats(kTokens * kExperts, 1.5f, generator);
    MoeDesc plain = rounded_desc(Rounding::none, 1, kTokens, kExperts, kTopK, kind);
    Slots const chosen = slots_of(plain, logits);
    for (Rounding const rounding : kRoundings) {
      for (std::int32_t const tile : {1, 2, 5, 8, 16, 64, 200}) {
        SCOPED_TRACE(testing::Message() << "router " << static_cast<int>(kind) << " round "
                                        << static_cast<int>(rounding) << " tile " << tile);
        Slots const kept =
            slots_of(rounded_desc(rounding, tile, kTokens, kExperts, kTopK, kind), logits);
        std::int64_t total = 0;
        for (std::size_t e = 0; e < kExperts; ++e) {
          std::int64_t const f = chosen.rows[e], m = kept.rows[e];
          total += m - f;
          EXPECT_LT(std::abs(m - f), tile);
          // Eligible without groups is every token; groups leave fewer, never less than chose it.
          bool const clamped = m > f && (kind == RouterKind::group_limited || m == kTokens);
          EXPECT_TRUE(m % tile == 0 || clamped) << m;
          if (rounding == Rounding::nr_f) {
            EXPECT_LE(2 * std::abs(m - f), tile);
          }
          if (rounding == Rounding::down) {
            EXPECT_EQ(m, f / tile * tile);
          }
          if (rounding == Rounding::balance_f) {
            EXPECT_LE(2 * std::abs(total), tile);
          }
          if (f % tile == 0) {
            EXPECT_EQ(m, f);
          }
          // Nested: either all that chose it stay, or only such stay.
          std::int64_t both = 0;
          for (Pair const& pair : kept.pairs) {
            both += pair.second == static_cast<std::int64_t>(e) && chosen.pairs.contains(pair);
          }
          EXPECT_EQ(both, std::min(f, m));
        }
      }
    }
  }
}

TEST(TokenRounding, TilesOfOneRowLeaveSetAndScores) {
  std::mt19937 generator(2);
  Floats const logits = random_floats(40 * 7, 1, generator);
  for (RouterKind const kind : kTopKRouters) {
    Slots const plain = slots_of(rounded_desc(Rounding::none, 1, 40, 7, 2, kind), logits);
    for (Rounding const rounding : kRoundings) {
      Slots const rounded = slots_of(rounded_desc(rounding, 1, 40, 7, 2, kind), logits);
      ASSERT_EQ(rounded.pairs, plain.pairs);
      for (std::size_t t = 0; t < 40; ++t) {
        for (std::int64_t j = plain.offsets[t]; j < plain.offsets[t + 1]; ++j) {
          auto const own = rounded.ids.begin() + rounded.offsets[t];
          auto const same = std::find(own, own + 2, plain.ids[static_cast<std::size_t>(j)]);
          EXPECT_EQ(rounded.weights[static_cast<std::size_t>(same - rounded.ids.begin())],
                    plain.weights[static_cast<std::size_t>(j)]);
        }
      }
    }
  }
}

TEST(TokenRounding, DropsTheWeakestAndAddsTheBest) {
  // Expert 0 is chosen by tokens 0..4 with growing certainty; tokens 5, 6, 7 prefer expert 1.
  Floats const logits = {0.1f, 0, 0.2f, 0, 0.3f, 0, 0.4f, 0, 0.5f, 0, 0, 3, 0, 1, 0, 2};
  Slots const down =
      slots_of(rounded_desc(Rounding::down, 4, 8, 2, 1, RouterKind::softmax_topk), logits);
  EXPECT_EQ(down.rows, (std::vector<std::int64_t>{4, 0}));
  EXPECT_FALSE(down.pairs.contains({0, 0}));
  Slots const up =
      slots_of(rounded_desc(Rounding::up, 4, 8, 2, 1, RouterKind::softmax_topk), logits);
  EXPECT_EQ(up.rows, (std::vector<std::int64_t>{8, 4}));
  EXPECT_TRUE(up.pairs.contains({0, 1}));  // of the tokens that chose expert 0, 0 likes 1 most
  Slots const seven =
      slots_of(rounded_desc(Rounding::up, 7, 8, 2, 1, RouterKind::softmax_topk), logits);
  EXPECT_FALSE(seven.pairs.contains({5, 0}));  // the one that likes expert 0 least
  EXPECT_EQ(seven.rows[0], 7);
}

TEST(TokenRounding, TiesGoToTheLowerToken) {
  Floats logits;
  for (int t = 0; t < 6; ++t) logits.insert(logits.end(), {1, 0, 0});
  Slots const down = slots_of(rounded_desc(Rounding::down, 4, 6, 3, 1), logits);
  EXPECT_EQ(down.pairs, (std::set<Pair>{{0, 0}, {1, 0}, {2, 0}, {3, 0}}));
  Slots const choice =
      slots_of(rounded_desc(Rounding::none, 1, 6, 3, 1, RouterKind::expert_choice), logits);
  EXPECT_EQ(choice.pairs, (std::set<Pair>{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}}));
}

TEST(TokenRounding, NrfMayDropEverythingAndUpMayTakeAll) {
  std::mt19937 generator(3);
  Floats const logits = random_floats(5 * 8, 1, generator);
  Slots const none = slots_of(rounded_desc(Rounding::nr_f, 128, 5, 8, 2), logits);
  EXPECT_TRUE(none.pairs.empty());
  EXPECT_EQ(none.offsets.back(), 0);
  for (std::int64_t const id : none.ids) EXPECT_EQ(id, -1);
  for (float const weight : none.weights) EXPECT_EQ(weight, 0);
  Slots const all =
      slots_of(rounded_desc(Rounding::up, 128, 5, 2, 1), {1, 0, 0, 1, 1, 0, 1, 0, 0, 1});
  EXPECT_EQ(all.rows, (std::vector<std::int64_t>{5, 5}));
  EXPECT_TRUE(slots_of(rounded_desc(Rounding::up, 8, 0, 4, 2), {}).pairs.empty());
}

TEST(TokenRounding, NanRanksHighestAndStaysInItsToken) {
  std::mt19937 generator(6);
  Floats logits = random_floats(40 * 6, 1, generator);
  logits[7 * 6] = NAN;  // the GEMM spreads it over the token's logits
  for (Rounding const rounding : kRoundings) {
    for (RouterKind const kind : kTopKRouters) {
      Slots const kept = slots_of(rounded_desc(rounding, 4, 40, 6, 2, kind), logits);
      for (std::int64_t t = 0; t < 40; ++t) {
        auto const at = static_cast<std::size_t>(t);
        for (std::int64_t j = kept.offsets[at]; j < kept.offsets[at + 1]; ++j) {
          EXPECT_EQ(std::isnan(kept.weights[static_cast<std::size_t>(j)]), t == 7);
        }
      }
      for (std::int64_t e = 0; e < 2; ++e) {  // what it chose, ties to the lower id
        EXPECT_EQ(kept.pairs.contains({7, e}), kept.rows[static_cast<std::size_t>(e)] > 0);
      }
    }
  }
}

TEST(TokenRounding, SlotsNeverExceedTheBound) {
  // One token more than a tile everywhere: as much is added as can be.
  constexpr std::int64_t kExperts = 6;
  Floats logits;
  for (int t = 0; t < 5 * kExperts; ++t) {
    for (int e = 0; e < kExperts; ++e) logits.push_back(t % kExperts == e ? 2.0f : 0.0f);
  }
  for (Rounding const rounding : kRoundings) {
    MoeDesc const desc = rounded_desc(rounding, 4, 5 * kExperts, kExperts, 1);
    Slots const kept = slots_of(desc, logits);
    EXPECT_LE(kept.offsets.back(), desc.num_slots());
    if (rounding == Rounding::up) {
      EXPECT_EQ(kept.offsets.back(), desc.num_slots());
    }
  }
}

TEST(TokenRounding, SameSeedStepAndLayerSameSets) {
  std::mt19937 generator(4);
  Floats const logits = random_floats(300 * 32, 1, generator);
  for (Rounding const rounding : {Rounding::sr_f, Rounding::nr_s}) {
    MoeDesc desc = rounded_desc(rounding, 16, 300, 32, 4);
    Slots const first = slots_of(desc, logits, 1), again = slots_of(desc, logits, 3);
    EXPECT_EQ(first.ids, again.ids);
    EXPECT_EQ(first.weights, again.weights);
    desc.router.step = 1;
    EXPECT_NE(slots_of(desc, logits).rows, first.rows);
    desc.router.step = 0;
    desc.router.layer = 1;
    EXPECT_NE(slots_of(desc, logits).rows, first.rows);
    desc.router.layer = 0;
    desc.router.seed = 6;
    EXPECT_NE(slots_of(desc, logits).rows, first.rows);
  }
}

TEST(ExpertChoice, EveryExpertTakesItsCapacity) {
  std::mt19937 generator(5);
  Floats const logits = random_floats(50 * 8, 1, generator);
  MoeDesc desc = rounded_desc(Rounding::none, 1, 50, 8, 3, RouterKind::expert_choice);
  EXPECT_EQ(slots_of(desc, logits).rows, std::vector<std::int64_t>(8, 19));  // ceil(50*3/8)
  desc.router.capacity = 50;
  EXPECT_EQ(slots_of(desc, logits).rows, std::vector<std::int64_t>(8, 50));
  desc.router.capacity = 1;
  Slots const one = slots_of(desc, logits);
  for (auto const& [token, expert] : one.pairs) {  // nobody has a larger p of that expert
    auto const p = [&](std::int64_t t) {
      double sum = 0;
      auto const row = logits.begin() + t * 8;
      for (int e = 0; e < 8; ++e) sum += std::exp(static_cast<double>(row[e]));
      return std::exp(static_cast<double>(row[expert])) / sum;
    };
    for (std::int64_t t = 0; t < 50; ++t) EXPECT_LE(p(t), p(token) * (1 + 1e-6));
  }
}

/// Forward and backward of a layer whose ids are those that `source` chose.
struct Replayed {
  Layer layer;
  std::vector<std::int32_t> ids, offsets;
  Replayed(Context const& context, Layer& source) : layer(context, replay_desc(source)) {
    RoutingView const from = source.tables();
    std::int64_t const slots = layer.desc.num_slots(), tokens = layer.desc.shape.tokens;
    ids.assign(from.topk_ids, from.topk_ids + slots);
    layer.forward.topk_ids = tensor(ids.data(), {tokens, layer.desc.shape.top_k});
    if (layer.desc.shape.variable_experts) {
      offsets.assign(from.token_offsets, from.token_offsets + tokens + 1);
      layer.forward.topk_ids = tensor(ids.data(), {slots});
      layer.forward.token_offsets = tensor(offsets.data(), {tokens + 1});
    }
  }
  static MoeDesc replay_desc(Layer& source) {
    MoeDesc desc = source.desc;
    if (desc.experts_vary()) {
      desc.shape.variable_experts = true;
      desc.shape.slots = source.tables().token_offsets[desc.shape.tokens];
    }
    desc.router.round = Rounding::none;
    desc.router.capacity = 0;
    desc.router.replay = true;
    return desc;
  }
};

TEST(Replay, OfARoutersOwnChoiceHasItsBits) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  for (int kind = 1; kind <= 7; ++kind) {
    SCOPED_TRACE(kind);
    MoeDesc desc = small_desc(static_cast<RouterKind>(kind));
    desc.router.normalize_scores = kind == 2 || (kind >= 4 && kind <= 6);
    Layer chosen(context, desc);
    ASSERT_TRUE(chosen.run_forward().ok());
    ASSERT_TRUE(chosen.run_backward().ok());
    Replayed replayed(context, chosen);
    Status const status = replayed.layer.run_forward();
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_TRUE(replayed.layer.run_backward().ok());
    EXPECT_EQ(replayed.layer.o, chosen.o);
    EXPECT_EQ(replayed.layer.dx, chosen.dx);
    EXPECT_EQ(replayed.layer.dw_router, chosen.dw_router);
  }
}

TEST(Replay, RefusesWeightsAndAMissingRouter) {
  Context const context = value_of(Context::create({.num_threads = 1}));
  Layer chosen(context, small_desc(RouterKind::topk_softmax));
  ASSERT_TRUE(chosen.run_forward().ok());
  Replayed replayed(context, chosen);
  Layer& layer = replayed.layer;
  layer.forward.topk_weights = tensor(layer.weights.data(), {19, 2});
  EXPECT_NE(std::string(layer.run_forward().text()).find("topk_weights"), std::string::npos);
  layer.forward.topk_weights = {};
  layer.forward.w_router = {};
  EXPECT_NE(std::string(layer.run_forward().text()).find("w_router"), std::string::npos);
}

TEST(Backward, AuxDlogitsAreAdded) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  Layer plain(context, small_desc(RouterKind::topk_softmax));
  Layer with(context, small_desc(RouterKind::topk_softmax));
  Floats const aux(19 * 5, 0.25f);
  Floats plain_dlogits(aux.size()), dlogits(aux.size());
  with.backward.aux_dlogits = tensor(aux.data(), {19, 5});
  plain.backward.dlogits = tensor(plain_dlogits.data(), {19, 5});
  with.backward.dlogits = tensor(dlogits.data(), {19, 5});
  for (Layer* const layer : {&plain, &with}) {
    ASSERT_TRUE(layer->run_forward().ok());
    ASSERT_TRUE(layer->run_backward().ok());
  }
  for (std::size_t i = 0; i < aux.size(); ++i) EXPECT_EQ(dlogits[i], plain_dlogits[i] + 0.25f);
  EXPECT_NE(with.dw_router, plain.dw_router);
  EXPECT_NE(with.dx, plain.dx);
}

}  // namespace
}  // namespace tessera::api_test
