// SPDX-License-Identifier: Apache-2.0
// Calls of router_dlogits after token rounding: for tests on a GPU and of emulated kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "tessera/shape.hpp"

namespace tessera::routing_test {

struct RoundedCase {
  char const* name;
  std::int64_t tokens, experts, top_k;
  RouterKind kind = RouterKind::topk_softmax;
  bool normalize = false;
  double kept = 0.8, added = 0.05;  // chances of a member, and of another expert
  double padding = 0;
  bool aux = false, all_outputs = true;
  bool rows = false;  // dlogits by row, and the list of the tokens that these do not serve
};

inline constexpr std::int64_t kGroups = 3, kSpareSlots = 37;
inline constexpr float kRouteScale = 2.5f;

struct RoundedData {
  std::vector<std::int32_t> offsets{0}, ids, rows, unrounded;
  std::vector<float> scores, logits, aux, partials, dscores;
  std::vector<std::uint8_t> mask;
};

inline RoundedData make_rounded_data(RoundedCase const& c) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal(0, 1);
  std::uniform_real_distribution<double> chance(0, 1);
  RoundedData data;
  std::vector<std::int32_t> experts(static_cast<std::size_t>(c.experts));
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    std::iota(experts.begin(), experts.end(), 0);
    std::shuffle(experts.begin(), experts.end(), random);
    bool const real = chance(random) >= c.padding;
    data.mask.push_back(real ? 1 : 0);
    std::vector<std::int32_t> slots;
    for (std::int64_t i = 0; i < c.experts; ++i) {
      std::int32_t const id = experts[static_cast<std::size_t>(i)];
      if (i < c.top_k) data.unrounded.push_back(real ? id : -1);
      if (real && chance(random) < (i < c.top_k ? c.kept : c.added)) slots.push_back(id);
    }
    std::shuffle(slots.begin(), slots.end(), random);
    for (std::int32_t const id : slots) {
      data.rows.push_back(static_cast<std::int32_t>(data.ids.size()));
      data.ids.push_back(id);
    }
    data.offsets.push_back(static_cast<std::int32_t>(data.ids.size()));
  }
  std::shuffle(data.rows.begin(), data.rows.end(), random);
  if (c.tokens == 0) return data;
  data.rows.resize(data.rows.size() + kSpareSlots, -1);
  data.ids.resize(data.ids.size() + kSpareSlots, -1);
  auto const fill = [&](std::vector<float>& out, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) out.push_back(normal(random));
  };
  auto const pairs = static_cast<std::size_t>(c.tokens * c.experts);
  for (std::size_t i = 0; i < data.ids.size(); ++i) {
    data.scores.push_back(0.3f + 0.05f * normal(random));
  }
  fill(data.logits, pairs);
  fill(data.aux, pairs);
  fill(data.partials, data.ids.size() * kGroups);
  for (std::int32_t const row : data.rows) {
    float sum = 0;
    for (std::int64_t g = 0; row >= 0 && g < kGroups; ++g) {
      sum += data.partials[static_cast<std::size_t>(row * kGroups + g)];
    }
    data.dscores.push_back(sum);
  }
  return data;
}

// The tokens that are to be listed: a member has no row, or a softmax over all scores an expert that was added.
inline std::vector<bool> listed_tokens(RoundedCase const& c, RoundedData const& data) {
  bool const has_own_p = c.kind != RouterKind::topk_softmax;
  std::vector<bool> out;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    auto const first = data.unrounded.begin() + t * c.top_k;
    auto const slot = data.ids.begin() + data.offsets[static_cast<std::size_t>(t)];
    auto const end = data.ids.begin() + data.offsets[static_cast<std::size_t>(t + 1)];
    bool const drops = std::any_of(first, first + c.top_k, [&](std::int32_t id) {
      return id >= 0 && std::find(slot, end, id) == end;
    });
    bool const adds = std::any_of(slot, end, [&](std::int32_t id) {
      return std::find(first, first + c.top_k, id) == first + c.top_k;
    });
    out.push_back(drops || (adds && !has_own_p));
  }
  return out;
}

inline std::vector<RoundedCase> rounded_cases() {
  std::vector<RoundedCase> cases = {
      {.name = "no tokens", .tokens = 0, .experts = 8, .top_k = 2},
      {.name = "dropped and added", .tokens = 33, .experts = 64, .top_k = 8},
      {.name = "nothing added", .tokens = 9, .experts = 40, .top_k = 4, .added = 0},
      {.name = "no slots", .tokens = 5, .experts = 16, .top_k = 4, .kept = 0, .added = 0},
      {.name = "more slots than lanes", .tokens = 6, .experts = 200, .top_k = 8, .added = 0.4},
      {.name = "one expert of odd rows, aux, no dlogits",
       .tokens = 11,
       .experts = 37,
       .top_k = 1,
       .aux = true,
       .all_outputs = false},
      {.name = "padding, aux",
       .tokens = 21,
       .experts = 24,
       .top_k = 3,
       .padding = 0.4,
       .aux = true},
      {.name = "sigmoid",
       .tokens = 17,
       .experts = 48,
       .top_k = 6,
       .kind = RouterKind::sigmoid_bias},
      {.name = "sigmoid, normalised",
       .tokens = 17,
       .experts = 48,
       .top_k = 6,
       .kind = RouterKind::sigmoid_bias,
       .normalize = true,
       .added = 0.2},
      {.name = "sqrtsoftplus, normalised, many slots",
       .tokens = 5,
       .experts = 100,
       .top_k = 32,
       .kind = RouterKind::sqrtsoftplus,
       .normalize = true,
       .added = 0.5},
      {.name = "nothing dropped or added, padding",
       .tokens = 37,
       .experts = 32,
       .top_k = 8,
       .kept = 1,
       .added = 0,
       .padding = 0.2},
      {.name = "few dropped, few added",
       .tokens = 83,
       .experts = 128,
       .top_k = 8,
       .kept = 0.98,
       .added = 0.001},
      {.name = "few of two experts of odd rows",
       .tokens = 43,
       .experts = 35,
       .top_k = 2,
       .kept = 0.9,
       .added = 0.003},
      {.name = "few of 1024 experts",
       .tokens = 9,
       .experts = 1024,
       .top_k = 32,
       .kept = 0.99,
       .added = 0.0003},
      {.name = "sigmoid, few dropped, few added",
       .tokens = 50,
       .experts = 96,
       .top_k = 5,
       .kind = RouterKind::sigmoid_bias,
       .normalize = true,
       .kept = 0.95,
       .added = 0.004}};
  for (std::size_t i = 0, count = cases.size(); i < count; ++i) {
    if (cases[i].aux) continue;
    cases.push_back(cases[i]);
    cases.back().rows = true;
  }
  return cases;
}

}  // namespace tessera::routing_test
