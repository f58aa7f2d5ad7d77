// SPDX-License-Identifier: Apache-2.0
// Calls of route and choose_tokens, and what the CPU backend makes of them: for tests on a GPU and of emulated kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "cpu/parallel/ops.hpp"

namespace tessera::routing_test {

// to_some: every token chooses the same experts.
enum class Logits { random, with_ties, with_infinities, equal, to_some };

struct ChoiceCase {
  std::int64_t tokens, experts, top_k;
  RouterKind kind = RouterKind::topk_softmax;
  Rounding round = Rounding::none;
  int tile = 128;
  Logits logits = Logits::random;
  bool normalize = false, bias = false;
  float scale = 1;
  std::int64_t capacity = 0;
  bool padded = false;
};

struct ChoiceResult {
  std::vector<std::int32_t> token_offsets, ids, topk_counts;
  std::vector<float> scores;
};

inline MoeDesc desc_of(ChoiceCase const& c) {
  MoeDesc desc;
  desc.shape = {c.tokens, 8, 8, c.experts, c.top_k};
  desc.router.kind = c.kind;
  desc.router.normalize_scores = c.normalize;
  desc.router.route_scale = c.scale;
  desc.router.round = c.round;
  desc.router.tile = c.tile;
  desc.router.seed = 99;
  desc.router.step = 3;
  desc.router.capacity = c.capacity;
  return desc;
}

// Padding is the first token of every other block of 32, every seventh token, every second one in a third of the blocks
// and the whole of one block.
inline std::vector<std::uint8_t> make_mask(ChoiceCase const& c) {
  std::vector<std::uint8_t> mask(size_t(c.tokens));
  for (size_t t = 0; t < mask.size(); ++t) {
    bool const padding =
        t % 64 == 0 || t % 7 == 3 || (t / 32 % 3 == 1 && t % 2 == 0) || t / 32 == 5;
    mask[t] = padding ? 0 : std::uint8_t(t % 255 + 1);
  }
  return mask;
}

inline std::vector<float> make_logits(ChoiceCase const& c) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal(0, 1.5f);
  std::vector<float> logits(size_t(c.tokens * c.experts));
  float const special[] = {std::nanf(""), INFINITY, -INFINITY, -0.0f, 0.0f, 200.0f, -200.0f};
  for (size_t i = 0; i < logits.size(); ++i) {
    // Experts differ in how often they are chosen.
    float const l = normal(random) + 0.01f * float(i % size_t(c.experts) % 50);
    logits[i] = c.logits == Logits::equal       ? 0.5f
                : c.logits == Logits::with_ties ? std::round(l)
                                                : l;
    if (c.logits == Logits::to_some) logits[i] -= float(i % size_t(c.experts)) * 20;
    if (c.logits == Logits::with_infinities && i % 11 == 3) logits[i] = special[random() % 7];
  }
  std::vector<std::uint8_t> const mask = make_mask(c);
  for (size_t i = 0; c.padded && i < logits.size(); ++i) {
    if (mask[i / size_t(c.experts)] == 0) logits[i] = i % 2 == 0 ? std::nanf("") : 300.0f;
  }
  return logits;
}

inline std::vector<float> make_bias(ChoiceCase const& c) {
  std::vector<float> bias(size_t(c.experts));
  for (size_t e = 0; e < bias.size(); ++e) bias[e] = 0.1f * float(e % 7) - 0.3f;
  return bias;
}

inline ChoiceResult on_cpu(ChoiceCase const& c, std::vector<float> const& logits,
                           float const* bias) {
  MoeDesc const desc = desc_of(c);
  auto const slots = size_t(desc.num_slots());
  ChoiceResult out{std::vector<std::int32_t>(size_t(c.tokens) + 1),
                   std::vector<std::int32_t>(slots), std::vector<std::int32_t>(size_t(c.experts)),
                   std::vector<float>(slots)};
  std::vector<std::int32_t> unrounded(size_t(c.tokens * c.top_k));
  std::vector<std::uint32_t> ranks(logits.size());
  std::vector<std::uint8_t> const mask = make_mask(c);
  std::vector<core::ExpertPairs> pairs(size_t(c.experts));
  core::ThreadPool pool(2);
  std::int64_t const floats =
      (std::max(cpu::select_scratch_floats(desc), cpu::choose_tokens_scratch(desc)) + 15) / 16 * 16;
  std::vector<double> scratch(static_cast<size_t>(floats));
  cpu::Threads const threads{pool, reinterpret_cast<float*>(scratch.data()), floats};
  cpu::select_experts(desc, {logits.data(), c.experts}, bias,
                      {.ids = unrounded.data(),
                       .ids_pitch = c.top_k,
                       .ranks = ranks.data(),
                       .token_mask = c.padded ? mask.data() : nullptr},
                      threads);
  RoutingView routing;
  routing.token_offsets = out.token_offsets.data();
  routing.topk_ids = out.ids.data();
  routing.scores = out.scores.data();
  cpu::choose_tokens(desc, ranks.data(), pairs.data(), routing, threads);
  for (size_t e = 0; e < pairs.size(); ++e) out.topk_counts[e] = std::int32_t(pairs[e].members);
  return out;
}

}  // namespace tessera::routing_test
