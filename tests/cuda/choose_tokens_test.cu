// SPDX-License-Identifier: Apache-2.0
// route and choose_tokens on a GPU: for equal logits the slots, scores and counts of the CPU backend, bit for bit, and
// the routing tables of these slots by their definition.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "core/router_groups.hpp"
#include "cuda/host/choose_tokens.hpp"
#include "cuda/host/route.hpp"
#include "tests/cuda/choice_cases.hpp"
#include "tests/cuda/device_buffer.cuh"
#include "tests/cuda/tables_cases.hpp"

namespace {

using tessera::Rounding;
using tessera::RouterKind;
using tessera::cuda_test::DeviceBuffer;
using tessera::cuda_test::require;
using tessera::cuda_test::same_bits;
using tessera::routing_test::ChoiceCase;
using tessera::routing_test::ChoiceResult;
using tessera::routing_test::Logits;
using tessera::routing_test::Tables;

struct Result {
  ChoiceResult choice;
  Tables tables;
};

Result on_gpu(ChoiceCase const& c, std::vector<float> const& logits,
              std::vector<float> const& bias) {
  using namespace tessera::routing_test;  // NOLINT: constants of the tables
  tessera::MoeDesc const desc = desc_of(c);
  auto const slots = size_t(desc.num_slots()), chosen = size_t(c.tokens * c.top_k);
  DeviceBuffer const d_logits(logits), d_bias(bias), d_mask(make_mask(c));
  DeviceBuffer const unrounded(4 * chosen), members(4 * chosen);
  DeviceBuffer const offsets(4 * size_t(c.tokens + 1)), ids(4 * slots), scores(4 * slots);
  DeviceBuffer const counts(4 * size_t(c.experts));
  DeviceBuffer const expert_offsets(4 * size_t(c.experts + 1));
  DeviceBuffer const sorted(4 * slots), gathered(4 * slots), inverse(4 * slots);
  DeviceBuffer const words(std::vector<int32_t>(size_t(kWords), kNotCleared));
  DeviceBuffer const workspace(tessera::cuda::choose_tokens_workspace_bytes(c.tokens, c.experts));
  auto const [groups, top_groups] = c.kind == RouterKind::group_limited
                                        ? tessera::core::router_groups(desc)
                                        : tessera::core::RouterGroups{};
  float const* const gmem_bias = c.bias ? d_bias.as<float>() : nullptr;
  bool const chooses = desc.experts_choose();
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
  tessera::cuda::ChooseTokensArguments const choice{
      .gmem_logits = d_logits.as<float>(),
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
      .gmem_token_mask = c.padded ? d_mask.as<uint8_t>() : nullptr,
      .tables = {.gmem_expert_offsets = expert_offsets.as<int32_t>(),
                 .gmem_sort_permutation = sorted.as<int32_t>(),
                 .gmem_gather_index = gathered.as<int32_t>(),
                 .gmem_inverse_permutation = inverse.as<int32_t>(),
                 .cleared = {words.as<int32_t>(), kClearedWords},
                 .unused = {words.as<int32_t>() + kClearedWords + 1, kUnused}},
      .has_ranks = !chooses && tessera::cuda::route_ranks_pairs(route)};  // as the layer asks
  if (choice.has_ranks) {
    require(tessera::cuda::launch_route_and_rank(route, choice, nullptr), "route_and_rank");
  } else if (!chooses) {
    bool const fast = c.experts <= 1024 && c.top_k <= 32;
    require(fast ? tessera::cuda::launch_route(route, nullptr)
                 : tessera::cuda::launch_route_plain(route, nullptr),
            "route");
  }
  require(tessera::cuda::launch_choose_tokens(choice, nullptr), "choose_tokens");
  require(cudaDeviceSynchronize(), "choose_tokens");
  return {{offsets.values<int32_t>(), ids.values<int32_t>(), counts.values<int32_t>(),
           scores.values<float>()},
          {expert_offsets.values<int32_t>(), sorted.values<int32_t>(), gathered.values<int32_t>(),
           inverse.values<int32_t>(), words.values<int32_t>()}};
}

bool run(ChoiceCase const& c) {
  std::vector<float> const logits = make_logits(c), bias = make_bias(c);
  ChoiceResult const cpu = on_cpu(c, logits, c.bias ? bias.data() : nullptr);
  auto const [gpu, gpu_tables] = on_gpu(c, logits, bias);
  Tables const tables = tessera::routing_test::host_tables(
      {.name = "", .tokens = c.tokens, .top_k = 0, .experts = int32_t(c.experts)},
      {{cpu.ids.begin(), cpu.ids.end()}, cpu.token_offsets});
  bool const offsets = gpu.token_offsets == cpu.token_offsets, ids = gpu.ids == cpu.ids;
  bool const scores = same_bits(gpu.scores, cpu.scores),
             counts = gpu.topk_counts == cpu.topk_counts;
  bool const made = agree(gpu_tables, tables);
  bool const passed = offsets && ids && scores && counts && made;
  std::printf(
      "%s T %lld E %lld K %lld router %d round %d tile %d logits %d%s: %d slots%s%s%s%s%s\n",
      passed ? "passed" : "FAILED", static_cast<long long>(c.tokens),
      static_cast<long long>(c.experts), static_cast<long long>(c.top_k), int(c.kind), int(c.round),
      c.tile, int(c.logits), c.padded ? " padded" : "", cpu.token_offsets.back(),
      offsets ? "" : " (offsets)", ids ? "" : " (ids)", scores ? "" : " (scores)",
      counts ? "" : " (counts)", made ? "" : " (tables)");
  return passed;
}

constexpr Rounding kRoundings[] = {Rounding::nr_f,      Rounding::sr_f, Rounding::nr_s,
                                   Rounding::balance_f, Rounding::up,   Rounding::down};
constexpr RouterKind kRouters[] = {RouterKind::topk_softmax,        RouterKind::softmax_topk,
                                   RouterKind::softmax_topk_renorm, RouterKind::sigmoid_bias,
                                   RouterKind::group_limited,       RouterKind::sqrtsoftplus};

std::vector<ChoiceCase> cases() {
  std::vector<ChoiceCase> all;
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
    for (Logits const logits :
         {Logits::with_ties, Logits::with_infinities, Logits::equal, Logits::to_some}) {
      all.push_back({.tokens = 1111,
                     .experts = 40,
                     .top_k = 4,
                     .round = round,
                     .tile = 32,
                     .logits = logits});
    }
    all.push_back({.tokens = 5, .experts = 8, .top_k = 2, .round = round, .tile = 4});
    all.push_back({.tokens = 0, .experts = 8, .top_k = 2, .round = round});
    all.push_back({.tokens = 3000, .experts = 128, .top_k = 8, .round = round});
    // Many candidates; ranks that do not fit shared memory; more tokens than keep has words at once.
    all.push_back({.tokens = 9000, .experts = 256, .top_k = 4, .round = round});
    all.push_back({.tokens = 20000, .experts = 16, .top_k = 2, .round = round});
    all.push_back(
        {.tokens = 60000, .experts = 9, .top_k = 1, .round = round, .logits = Logits::with_ties});
    all.push_back({.tokens = 70000, .experts = 5, .top_k = 1, .round = round});
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
  for (ChoiceCase const& c : cases()) passed = run(c) && passed;
  std::printf(passed ? "all passed\n" : "FAILED\n");
  return passed ? 0 : 1;
}
