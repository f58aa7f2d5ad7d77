// SPDX-License-Identifier: Apache-2.0
// route and choose_tokens on a GPU: for equal logits the slots, scores and counts of the CPU backend, bit for bit.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "core/router_groups.hpp"
#include "cpu/parallel/ops.hpp"
#include "cuda/host/choose_tokens.hpp"
#include "cuda/host/route.hpp"
#include "tests/cuda/device_buffer.cuh"

namespace {

using tessera::MoeDesc;
using tessera::Rounding;
using tessera::RouterKind;
using tessera::cuda_test::DeviceBuffer;
using tessera::cuda_test::require;
using tessera::cuda_test::same_bits;

enum class Logits { random, with_ties, with_infinities, equal };

struct Case {
  int64_t tokens, experts, top_k;
  RouterKind kind = RouterKind::topk_softmax;
  Rounding round = Rounding::none;
  int tile = 128;
  Logits logits = Logits::random;
  bool normalize = false, bias = false;
  float scale = 1;
  int64_t capacity = 0;
  bool padded = false;
};

struct Result {
  std::vector<int32_t> token_offsets, ids, topk_counts;
  std::vector<float> scores;
};

MoeDesc desc_of(Case const& c) {
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
std::vector<uint8_t> make_mask(Case const& c) {
  std::vector<uint8_t> mask(size_t(c.tokens));
  for (size_t t = 0; t < mask.size(); ++t) {
    bool const padding =
        t % 64 == 0 || t % 7 == 3 || (t / 32 % 3 == 1 && t % 2 == 0) || t / 32 == 5;
    mask[t] = padding ? 0 : uint8_t(t % 255 + 1);
  }
  return mask;
}

std::vector<float> make_logits(Case const& c) {
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
    if (c.logits == Logits::with_infinities && i % 11 == 3) logits[i] = special[random() % 7];
  }
  std::vector<uint8_t> const mask = make_mask(c);
  for (size_t i = 0; c.padded && i < logits.size(); ++i) {
    if (mask[i / size_t(c.experts)] == 0) logits[i] = i % 2 == 0 ? std::nanf("") : 300.0f;
  }
  return logits;
}

std::vector<float> make_bias(Case const& c) {
  std::vector<float> bias(size_t(c.experts));
  for (size_t e = 0; e < bias.size(); ++e) bias[e] = 0.1f * float(e % 7) - 0.3f;
  return bias;
}

Result on_cpu(Case const& c, std::vector<float> const& logits, float const* bias) {
  MoeDesc const desc = desc_of(c);
  auto const slots = size_t(desc.num_slots());
  Result out{std::vector<int32_t>(size_t(c.tokens) + 1), std::vector<int32_t>(slots),
             std::vector<int32_t>(size_t(c.experts)), std::vector<float>(slots)};
  std::vector<int32_t> unrounded(size_t(c.tokens * c.top_k));
  std::vector<uint32_t> ranks(logits.size());
  std::vector<uint8_t> const mask = make_mask(c);
  std::vector<tessera::core::ExpertPairs> pairs(size_t(c.experts));
  tessera::core::ThreadPool pool(2);
  int64_t const floats = (std::max(tessera::cpu::select_scratch_floats(desc),
                                   tessera::cpu::choose_tokens_scratch(desc)) +
                          15) /
                         16 * 16;
  std::vector<double> scratch(static_cast<size_t>(floats));
  tessera::cpu::Threads const threads{pool, reinterpret_cast<float*>(scratch.data()), floats};
  tessera::cpu::select_experts(desc, {logits.data(), c.experts}, bias,
                               {.ids = unrounded.data(),
                                .ids_pitch = c.top_k,
                                .ranks = ranks.data(),
                                .token_mask = c.padded ? mask.data() : nullptr},
                               threads);
  tessera::RoutingView routing;
  routing.token_offsets = out.token_offsets.data();
  routing.topk_ids = out.ids.data();
  routing.scores = out.scores.data();
  tessera::cpu::choose_tokens(desc, ranks.data(), pairs.data(), routing, threads);
  for (size_t e = 0; e < pairs.size(); ++e) out.topk_counts[e] = int32_t(pairs[e].members);
  return out;
}

Result on_gpu(Case const& c, std::vector<float> const& logits, std::vector<float> const& bias) {
  MoeDesc const desc = desc_of(c);
  auto const slots = size_t(desc.num_slots()), chosen = size_t(c.tokens * c.top_k);
  DeviceBuffer const d_logits(logits), d_bias(bias), d_mask(make_mask(c));
  DeviceBuffer const unrounded(4 * chosen), members(4 * chosen);
  DeviceBuffer const offsets(4 * size_t(c.tokens + 1)), ids(4 * slots), scores(4 * slots);
  DeviceBuffer const counts(4 * size_t(c.experts));
  DeviceBuffer const workspace(tessera::cuda::choose_tokens_workspace_bytes(c.tokens, c.experts));
  auto const [groups, top_groups] = c.kind == RouterKind::group_limited
                                        ? tessera::core::router_groups(desc)
                                        : tessera::core::RouterGroups{};
  float const* const gmem_bias = c.bias ? d_bias.as<float>() : nullptr;
  bool const chooses = desc.experts_choose();
  if (!chooses) {
    tessera::cuda::RouteArguments const route{.gmem_logits = d_logits.as<float>(),
                                              .gmem_selection_bias = gmem_bias,
                                              .gmem_topk_ids = unrounded.as<int32_t>(),
                                              .gmem_topk_weights = members.as<float>(),
                                              .gmem_chosen_p = nullptr,
                                              .tokens = c.tokens,
                                              .experts = int32_t(c.experts),
                                              .top_k = int32_t(c.top_k),
                                              .kind = c.kind,
                                              .route_scale = 1,
                                              .normalize_scores = c.normalize,
                                              .groups = int32_t(groups),
                                              .top_groups = int32_t(top_groups)};
    bool const fast = c.experts <= 1024 && c.top_k <= 32;
    require(fast ? tessera::cuda::launch_route(route, nullptr)
                 : tessera::cuda::launch_route_plain(route, nullptr),
            "route");
  }
  require(tessera::cuda::launch_choose_tokens(
              {.gmem_logits = d_logits.as<float>(),
               .gmem_selection_bias = gmem_bias,
               .gmem_topk_ids = chooses ? nullptr : unrounded.as<int32_t>(),
               .gmem_member_scores = members.as<float>(),
               .tokens = c.tokens,
               .experts = int32_t(c.experts),
               .top_k = int32_t(c.top_k),
               .router = desc.router,
               .capacity = desc.router.capacity,
               .groups = int32_t(groups),
               .top_groups = int32_t(top_groups),
               .slots = desc.num_slots(),
               .gmem_token_offsets = offsets.as<int32_t>(),
               .gmem_ids = ids.as<int32_t>(),
               .gmem_scores = scores.as<float>(),
               .gmem_topk_counts = counts.as<int32_t>(),
               .gmem_workspace = workspace.as<void>(),
               .gmem_token_mask = c.padded ? d_mask.as<uint8_t>() : nullptr},
              nullptr),
          "choose_tokens");
  require(cudaDeviceSynchronize(), "choose_tokens");
  return {offsets.values<int32_t>(), ids.values<int32_t>(), counts.values<int32_t>(),
          scores.values<float>()};
}

bool run(Case const& c) {
  std::vector<float> const logits = make_logits(c), bias = make_bias(c);
  Result const cpu = on_cpu(c, logits, c.bias ? bias.data() : nullptr);
  Result const gpu = on_gpu(c, logits, bias);
  bool const offsets = gpu.token_offsets == cpu.token_offsets, ids = gpu.ids == cpu.ids;
  bool const scores = same_bits(gpu.scores, cpu.scores),
             counts = gpu.topk_counts == cpu.topk_counts;
  bool const passed = offsets && ids && scores && counts;
  std::printf("%s T %lld E %lld K %lld router %d round %d tile %d logits %d%s: %d slots%s%s%s%s\n",
              passed ? "passed" : "FAILED", static_cast<long long>(c.tokens),
              static_cast<long long>(c.experts), static_cast<long long>(c.top_k), int(c.kind),
              int(c.round), c.tile, int(c.logits), c.padded ? " padded" : "",
              cpu.token_offsets.back(), offsets ? "" : " (offsets)", ids ? "" : " (ids)",
              scores ? "" : " (scores)", counts ? "" : " (counts)");
  return passed;
}

constexpr Rounding kRoundings[] = {Rounding::nr_f,      Rounding::sr_f, Rounding::nr_s,
                                   Rounding::balance_f, Rounding::up,   Rounding::down};
constexpr RouterKind kRouters[] = {RouterKind::topk_softmax,        RouterKind::softmax_topk,
                                   RouterKind::softmax_topk_renorm, RouterKind::sigmoid_bias,
                                   RouterKind::group_limited,       RouterKind::sqrtsoftplus};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (Rounding const round : kRoundings) {
    for (RouterKind const kind : kRouters) {
      bool const odd = all.size() % 2 != 0;
      all.push_back({.tokens = 700,
                     .experts = 24,
                     .top_k = 3,
                     .kind = kind,
                     .round = round,
                     .tile = 16,
                     .normalize = odd,
                     .bias = kind >= RouterKind::sigmoid_bias,
                     .scale = odd ? 2.5f : 1.0f});
    }
    for (Logits const logits : {Logits::with_ties, Logits::with_infinities, Logits::equal}) {
      all.push_back({.tokens = 1111,
                     .experts = 40,
                     .top_k = 4,
                     .round = round,
                     .tile = 32,
                     .logits = logits});
    }
    all.push_back({.tokens = 5, .experts = 8, .top_k = 2, .round = round, .tile = 4});
    all.push_back({.tokens = 0, .experts = 8, .top_k = 2, .round = round});
    // Many candidates; ranks that do not fit shared memory.
    all.push_back({.tokens = 9000, .experts = 256, .top_k = 4, .round = round});
    all.push_back({.tokens = 20000, .experts = 16, .top_k = 2, .round = round});
    all.push_back(
        {.tokens = 60000, .experts = 9, .top_k = 1, .round = round, .logits = Logits::with_ties});
    all.push_back({.tokens = 300, .experts = 1100, .top_k = 40, .round = round, .tile = 8});
  }
  for (Logits const logits :
       {Logits::random, Logits::with_ties, Logits::with_infinities, Logits::equal}) {
    all.push_back({.tokens = 777,
                   .experts = 33,
                   .top_k = 4,
                   .kind = RouterKind::expert_choice,
                   .logits = logits,
                   .scale = 1.5f});
  }
  for (int64_t const capacity : {1, 500, 3000}) {
    all.push_back({.tokens = 3000,
                   .experts = 12,
                   .top_k = 2,
                   .kind = RouterKind::expert_choice,
                   .capacity = capacity});
  }
  all.push_back({.tokens = 0, .experts = 4, .top_k = 2, .kind = RouterKind::expert_choice});
  for (size_t i = 0, unpadded = all.size(); i < unpadded; ++i) {
    all.push_back(all[i]);
    all.back().padded = true;
  }
  return all;
}

}  // namespace

int main() {
  if (!tessera::cuda_test::has_device()) return tessera::cuda_test::kSkipped;
  bool passed = true;
  for (Case const& c : cases()) passed = run(c) && passed;
  std::printf(passed ? "all passed\n" : "FAILED\n");
  return passed ? 0 : 1;
}
