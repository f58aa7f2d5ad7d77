// SPDX-License-Identifier: Apache-2.0
// Calls of route, and what the CPU backend makes of them: for tests on a GPU and of emulated kernels.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "cpu/parallel/ops.hpp"

namespace tessera::routing_test {

struct RouteCase {
  char const* name;
  std::int64_t tokens, experts, top_k;
  RouterKind kind = RouterKind::topk_softmax;
  bool normalize = false, bias = false;
  float scale = 1;
  bool rounded_logits = false;  // many ties
  bool infinities = false;
  bool one_lane = false;      // the largest logits are 32 experts apart
  bool one_of_eight = false;  // .. are those of one lane of eight
  bool ranked = false;        // slots, for metadata
};

struct RouteResult {
  std::vector<std::int32_t> ids;
  std::vector<float> weights, chosen_p;
};

inline MoeDesc desc_of(RouteCase const& c) {
  MoeDesc desc;
  desc.shape = {c.tokens, 8, 8, c.experts, c.top_k};
  desc.router.kind = c.kind;
  desc.router.normalize_scores = c.normalize;
  desc.router.route_scale = c.scale;
  return desc;
}

inline std::vector<float> make_logits(RouteCase const& c) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(std::size_t(c.tokens * c.experts));
  for (float& l : logits) l = c.rounded_logits ? std::round(normal(random)) : normal(random);
  float const special[] = {std::nanf(""), INFINITY, -INFINITY, -0.0f, 0.0f, 200.0f, -200.0f};
  for (std::size_t i = 0; c.infinities && i < logits.size(); i += 7)
    logits[i] = special[random() % 7];
  for (std::size_t i = 0; c.one_lane && i < logits.size(); ++i) {
    if (i % std::size_t(c.experts) % 32 == 7) logits[i] += 100;
  }
  for (std::size_t i = 0; c.one_of_eight && i < logits.size(); ++i) {
    if (i % std::size_t(c.experts) % 32 / 4 == 3) logits[i] += 100;
  }
  return logits;
}

inline RouteResult on_cpu(RouteCase const& c, std::vector<float> const& logits, float const* bias) {
  MoeDesc const desc = desc_of(c);
  std::size_t const slots = std::size_t(c.tokens * c.top_k);
  RouteResult out{std::vector<std::int32_t>(slots), std::vector<float>(slots),
                  std::vector<float>(slots)};
  core::ThreadPool pool(2);
  std::int64_t const floats = (cpu::select_scratch_floats(desc) + 15) / 16 * 16;
  std::vector<double> scratch(static_cast<std::size_t>(floats));
  cpu::Threads const threads{pool, reinterpret_cast<float*>(scratch.data()), floats};
  cpu::select_experts(
      desc, {logits.data(), c.experts}, bias,
      {out.ids.data(), DType::int32, c.top_k, {out.weights.data(), c.top_k}, out.chosen_p.data()},
      threads);
  return out;
}

}  // namespace tessera::routing_test
