// SPDX-License-Identifier: Apache-2.0
// route on a GPU: the kernel, its plain twin and the CPU backend agree bit for bit on equal logits.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "core/router_groups.hpp"
#include "core/router_math.hpp"
#include "cuda/host/metadata.hpp"
#include "cuda/host/route.hpp"
#include "tests/cuda/device_buffer.cuh"
#include "tests/cuda/route_cases.hpp"

namespace {

using tessera::RouterKind;
using tessera::cuda::RouteArguments;
using tessera::cuda_test::DeviceBuffer;
using tessera::cuda_test::require;
using tessera::cuda_test::same_bits;
using tessera::routing_test::RouteCase;
using tessera::routing_test::RouteResult;

bool same(RouteResult const& a, RouteResult const& b, bool own_p) {
  return a.ids == b.ids && same_bits(a.weights, b.weights) &&
         (!own_p || same_bits(a.chosen_p, b.chosen_p));
}

template <class Launch>
RouteResult on_gpu(RouteCase const& c, std::vector<float> const& logits,
                   std::vector<float> const& bias, Launch&& launch) {
  size_t const slots = size_t(c.tokens * c.top_k);
  DeviceBuffer const d_logits(logits), d_bias(bias);
  DeviceBuffer const ids(4 * slots), weights(4 * slots), chosen_p(4 * slots);
  auto const [groups, top_groups] = tessera::core::router_groups(desc_of(c));
  RouteArguments const args{.gmem_logits = d_logits.as<float>(),
                            .gmem_selection_bias = c.bias ? d_bias.as<float>() : nullptr,
                            .gmem_topk_ids = ids.as<int32_t>(),
                            .gmem_topk_weights = weights.as<float>(),
                            .gmem_chosen_p = chosen_p.as<float>(),
                            .tokens = c.tokens,
                            .experts = int32_t(c.experts),
                            .top_k = int32_t(c.top_k),
                            .kind = c.kind,
                            .route_scale = c.scale,
                            .normalize_scores = c.normalize,
                            .groups = int32_t(groups),
                            .top_groups = int32_t(top_groups)};
  require(launch(args, cudaStream_t{}), "launch");
  require(cudaDeviceSynchronize(), "route");
  return {ids.values<int32_t>(), weights.values<float>(), chosen_p.values<float>()};
}

// The tables that metadata makes of the ids of a call, of which route has ranked the slots, or not.
std::vector<std::vector<int32_t>> tables_of(RouteArguments const& args, int32_t unit_slots,
                                            DeviceBuffer const& workspace) {
  int64_t const slots = args.tokens * args.top_k;
  DeviceBuffer const expert_offsets(4 * (size_t(args.experts) + 1)), sort(4 * size_t(slots));
  DeviceBuffer const gather(4 * size_t(slots)), inverse(4 * size_t(slots));
  require(tessera::cuda::launch_metadata({.gmem_ids = args.gmem_topk_ids,
                                          .ids_are_int64 = false,
                                          .gmem_token_offsets = nullptr,
                                          .slots = slots,
                                          .tokens = int32_t(args.tokens),
                                          .top_k = args.top_k,
                                          .experts = args.experts,
                                          .gmem_expert_offsets = expert_offsets.as<int32_t>(),
                                          .gmem_sort_permutation = sort.as<int32_t>(),
                                          .gmem_gather_index = gather.as<int32_t>(),
                                          .gmem_inverse_permutation = inverse.as<int32_t>(),
                                          .gmem_workspace = workspace.as<void>(),
                                          .cleared = {},
                                          .unit_slots = unit_slots},
                                         cudaStream_t{}),
          "metadata");
  require(cudaDeviceSynchronize(), "metadata");
  return {expert_offsets.values<int32_t>(), sort.values<int32_t>(), gather.values<int32_t>(),
          inverse.values<int32_t>()};
}

// Launches with ranks where route has them: metadata makes the same tables with its own and with these.
struct RankingLaunch {
  bool ranked = false, same_tables = true;

  cudaError_t operator()(RouteArguments args, cudaStream_t stream) {
    int32_t const unit_slots = tessera::cuda::route_unit_slots(args);
    if (unit_slots == 0) return tessera::cuda::launch_route(args, stream);
    using tessera::cuda::metadata_workspace_bytes;
    int64_t const slots = args.tokens * args.top_k;
    DeviceBuffer const with(metadata_workspace_bytes(slots, args.experts, unit_slots));
    DeviceBuffer const without(metadata_workspace_bytes(slots, args.experts));
    auto const workspace =
        tessera::cuda::MetadataWorkspace::of(with.as<void>(), slots, args.experts, unit_slots);
    args.gmem_unit_counts = workspace.gmem_counts;
    args.gmem_unit_ranks = workspace.gmem_ranks;
    cudaError_t const error = tessera::cuda::launch_route(args, stream);
    if (error != cudaSuccess) return error;
    ranked = true;
    same_tables = tables_of(args, unit_slots, with) == tables_of(args, 0, without);
    return cudaSuccess;
  }
};

bool run(RouteCase const& c) {
  std::vector<float> const logits = make_logits(c);
  std::vector<float> bias(size_t(c.experts));
  for (size_t e = 0; e < bias.size(); ++e) bias[e] = 0.1f * float(e % 7) - 0.3f;
  bool const own_p = tessera::core::has_own_p(c.kind);
  RouteResult const cpu = on_cpu(c, logits, c.bias ? bias.data() : nullptr);
  bool const plain = same(on_gpu(c, logits, bias, tessera::cuda::launch_route_plain), cpu, own_p);
  bool const fast = c.experts <= 1024 && c.top_k <= 32;
  bool const kernel =
      !fast || same(on_gpu(c, logits, bias, tessera::cuda::launch_route), cpu, own_p);
  RankingLaunch ranking;
  bool const ranks =
      !fast || (same(on_gpu(c, logits, bias, ranking), cpu, own_p) && ranking.same_tables);
  bool const as_expected = ranking.ranked == c.ranked;
  std::printf("%s %s%s%s%s%s\n", kernel && plain && ranks && as_expected ? "passed" : "FAILED",
              c.name, kernel ? "" : " (kernel)", plain ? "" : " (plain twin)",
              ranks ? "" : " (ranks)", as_expected ? "" : " (ranked or not)");
  return kernel && plain && ranks && as_expected;
}

constexpr RouteCase kCases[] = {
    {.name = "no tokens", .tokens = 0, .experts = 8, .top_k = 2},
    {.name = "one expert", .tokens = 9, .experts = 1, .top_k = 1},
    {.name = "K = E", .tokens = 50, .experts = 32, .top_k = 32},
    {.name = "ties",
     .tokens = 500,
     .experts = 64,
     .top_k = 8,
     .rounded_logits = true,
     .ranked = true},
    {.name = "NaN and infinities",
     .tokens = 500,
     .experts = 60,
     .top_k = 6,
     .infinities = true,
     .ranked = true},
    {.name = "ties, 61 experts", .tokens = 500, .experts = 61, .top_k = 7, .rounded_logits = true},
    {.name = "NaN, 130 experts", .tokens = 99, .experts = 130, .top_k = 9, .infinities = true},
    {.name = "K = 2 of 32", .tokens = 1001, .experts = 32, .top_k = 2, .ranked = true},
    {.name = "K = 3 of 12, the last block is short",
     .tokens = 3333,
     .experts = 12,
     .top_k = 3,
     .ranked = true},
    {.name = "too many counts", .tokens = 70000, .experts = 128, .top_k = 2},
    {.name = "K = 4 of 64", .tokens = 1001, .experts = 64, .top_k = 4, .ranked = true},
    {.name = "K = 9 of 36", .tokens = 333, .experts = 36, .top_k = 9},
    {.name = "K = 16 of 256", .tokens = 333, .experts = 256, .top_k = 16},
    {.name = "K = 20 of 64", .tokens = 333, .experts = 64, .top_k = 20},
    {.name = "ties, 512 experts",
     .tokens = 200,
     .experts = 512,
     .top_k = 10,
     .rounded_logits = true},
    {.name = "one of eight lanes",
     .tokens = 400,
     .experts = 256,
     .top_k = 12,
     .one_of_eight = true},
    {.name = "7B", .tokens = 2000, .experts = 128, .top_k = 8, .scale = 2.5f, .ranked = true},
    {.name = "512 experts, bias", .tokens = 700, .experts = 512, .top_k = 10, .bias = true},
    {.name = "one lane", .tokens = 400, .experts = 256, .top_k = 12, .one_lane = true},
    {.name = "1024 experts", .tokens = 300, .experts = 1024, .top_k = 16},
    {.name = "softmax-topk",
     .tokens = 800,
     .experts = 200,
     .top_k = 8,
     .kind = RouterKind::softmax_topk,
     .scale = 0.5f},
    {.name = "softmax-topk, 1000 experts",
     .tokens = 100,
     .experts = 1000,
     .top_k = 4,
     .kind = RouterKind::softmax_topk},
    {.name = "sigmoid",
     .tokens = 800,
     .experts = 128,
     .top_k = 8,
     .kind = RouterKind::sigmoid_bias,
     .bias = true,
     .ranked = true},
    {.name = "sigmoid, normalised",
     .tokens = 800,
     .experts = 128,
     .top_k = 6,
     .kind = RouterKind::sigmoid_bias,
     .normalize = true,
     .bias = true,
     .scale = 2.5f,
     .ranked = true},
    {.name = "sqrtsoftplus",
     .tokens = 800,
     .experts = 96,
     .top_k = 8,
     .kind = RouterKind::sqrtsoftplus,
     .normalize = true,
     .ranked = true},
    {.name = "group-limited",
     .tokens = 800,
     .experts = 256,
     .top_k = 8,
     .kind = RouterKind::group_limited,
     .normalize = true,
     .bias = true,
     .scale = 2.5f},
    {.name = "group-limited, ties",
     .tokens = 800,
     .experts = 48,
     .top_k = 5,
     .kind = RouterKind::group_limited,
     .rounded_logits = true},
    {.name = "beyond the kernel: 3000 experts, K = 40", .tokens = 20, .experts = 3000, .top_k = 40},
};

}  // namespace

int main() {
  if (!tessera::cuda_test::has_device()) return tessera::cuda_test::kSkipped;
  bool ok = true;
  for (RouteCase const& c : kCases) ok = run(c) && ok;
  std::printf(ok ? "all passed\n" : "some FAILED\n");
  return ok ? 0 : 1;
}
