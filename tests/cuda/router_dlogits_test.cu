// SPDX-License-Identifier: Apache-2.0
// router_dlogits on a GPU: one kernel, and the plain twins of dscores and router_dlogits one after the other, agree bit
// for bit. What is right is `tessera verify`'s job, but for p so small that S is more than their sum. Exit 0 passed,
// 1 failed, 77 skipped (no GPU).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "core/router_math.hpp"
#include "cuda/host/router_backward.hpp"
#include "tests/cuda/device_buffer.cuh"

namespace {

using tessera::RouterKind;
using tessera::cuda_test::DeviceBuffer;
using tessera::cuda_test::require;
using Bytes = std::vector<unsigned char>;
using Launch = cudaError_t (*)(tessera::cuda::RouterGradientArguments const&, cudaStream_t);

struct Case {
  char const* name;
  int64_t tokens;
  int32_t experts, top_k;
  RouterKind kind = RouterKind::topk_softmax;
  bool normalize = false;
  int64_t groups = 2;
  double sentinels = 0;
  bool bias = false, aux = false, rounded = true;
  int64_t copy_padding = 0;  // of the caller's copy; negative: none
  float p_scale = 0;         // not 0: scores are c p/S of p as large as this, no sentinels
};

constexpr float kRouteScale = 2.5f;

struct Result {
  Bytes dscores, dlogits, rounded, copy;
  std::vector<float> row_dlogits{};
  bool operator==(Result const&) const = default;
};

cudaError_t launch_plain(tessera::cuda::RouterGradientArguments const& args, cudaStream_t stream) {
  cudaError_t const error = launch_dscores_plain(args.dscores, stream);
  return error == cudaSuccess ? launch_router_dlogits_plain(args.dlogits, stream) : error;
}

struct Data {
  std::vector<int32_t> ids, rows, offsets;
  std::vector<float> scores, chosen_p, logits, aux, partials;
  std::vector<__nv_bfloat16> d_o, b_down;
};

constexpr int64_t kHidden = 72;

// Rows in slot order; experts are not grouped, which changes dscores only where it looks up a bias.
Data make_data(Case const& c) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0, 1);
  Data data;
  std::vector<int32_t> experts(size_t(c.experts));
  int32_t rows = 0;
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::iota(experts.begin(), experts.end(), 0);
    for (int32_t k = 0; k < c.top_k; ++k) {
      std::swap(experts[size_t(k)], experts[size_t(k) + random() % size_t(c.experts - k)]);
      bool const sentinel = double(random() % 10000) < 10000 * c.sentinels;
      data.ids.push_back(sentinel ? -1 : experts[size_t(k)]);
      data.rows.push_back(sentinel ? -1 : rows++);
      data.scores.push_back(sentinel ? NAN : 0.5f + 0.1f * normal(random));
      data.chosen_p.push_back(sentinel ? NAN : 0.5f + 0.1f * normal(random));
    }
  }
  for (size_t token = 0; c.p_scale != 0 && token < size_t(c.tokens); ++token) {
    double sum = tessera::core::kNormalizeFloor;
    for (size_t slot = token * size_t(c.top_k); slot < (token + 1) * size_t(c.top_k); ++slot) {
      data.chosen_p[slot] = c.p_scale * (0.1f + std::abs(normal(random)));
      sum += data.chosen_p[slot];
    }
    for (size_t slot = token * size_t(c.top_k); slot < (token + 1) * size_t(c.top_k); ++slot) {
      data.scores[slot] = float(kRouteScale * data.chosen_p[slot] / sum);
    }
  }
  auto const fill = [&](auto& out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out.push_back(normal(random));
  };
  fill(data.logits, c.tokens * c.experts);
  fill(data.aux, c.tokens * c.experts);
  fill(data.partials, int64_t(data.ids.size()) * c.groups);
  fill(data.d_o, int64_t(data.ids.size()) * kHidden);
  fill(data.b_down, c.experts * kHidden);
  for (int32_t e = 0; e <= c.experts; ++e) {
    data.offsets.push_back(int32_t(int64_t{rows} * e / c.experts));
  }
  return data;
}

Result run(Case const& c, Data const& data, Launch launch, bool scratch, bool by_row = false) {
  auto const pairs = size_t(c.tokens * c.experts);
  auto const copy_pitch = c.experts + std::max<int64_t>(c.copy_padding, 0);
  DeviceBuffer const ids(data.ids), rows(data.rows), offsets(data.offsets), scores(data.scores),
      chosen_p(data.chosen_p), logits(data.logits), aux(data.aux), partials(data.partials),
      d_o(data.d_o), b_down(data.b_down);
  DeviceBuffer const dscores(4 * data.ids.size()), dlogits(4 * pairs), rounded(2 * pairs),
      copy(4 * size_t(c.tokens * copy_pitch)), row_dlogits(4 * data.ids.size());
  tessera::cuda::RouterGradientArguments args{};
  args.dscores = {.gmem_ds_partials = partials.as<float>(),
                  .groups = c.groups,
                  .gmem_inverse_permutation = rows.as<int32_t>(),
                  .d_o = {d_o.as<void>(), int64_t(data.ids.size()), kHidden},
                  .gmem_gather_index = nullptr,
                  .gmem_expert_offsets = offsets.as<int32_t>(),
                  .b_down = {},
                  .gmem_dscores = dscores.as<float>(),
                  .slots = int64_t(data.ids.size()),
                  .hidden = kHidden,
                  .experts = c.experts};
  if (c.bias) {
    args.dscores.b_down = {.gmem = b_down.as<void>(),
                           .expert_stride = kHidden,
                           .row_stride = 1,
                           .column_stride = 1,
                           .block = kHidden};
  }
  args.dlogits = {.gmem_dscores = dscores.as<float>(),
                  .gmem_ids = ids.as<int32_t>(),
                  .gmem_token_offsets = nullptr,
                  .gmem_scores = scores.as<float>(),
                  .gmem_chosen_p = chosen_p.as<float>(),
                  .gmem_logits = logits.as<float>(),
                  .gmem_aux_dlogits = c.aux ? aux.as<float>() : nullptr,
                  .aux_pitch = c.experts,
                  .gmem_dlogits = dlogits.as<float>(),
                  .dlogits_are_scratch = scratch,
                  .gmem_rounded = c.rounded ? rounded.as<void>() : nullptr,
                  .gmem_row_dlogits = by_row ? row_dlogits.as<float>() : nullptr,
                  .gmem_inverse_permutation = rows.as<int32_t>(),
                  .gmem_copy = c.copy_padding < 0 ? nullptr : copy.as<float>(),
                  .copy_pitch = copy_pitch,
                  .tokens = c.tokens,
                  .experts = c.experts,
                  .top_k = c.top_k,
                  .kind = c.kind,
                  .route_scale = kRouteScale,
                  .normalize_scores = c.normalize};
  require(launch(args, cudaStream_t{}), "launch");
  require(cudaDeviceSynchronize(), "router_dlogits");
  Result out{dscores.bytes(), dlogits.bytes(), rounded.bytes(), copy.bytes()};
  if (by_row) {
    Bytes const bytes = row_dlogits.bytes();
    out.row_dlogits.resize(data.ids.size());
    std::memcpy(out.row_dlogits.data(), bytes.data(), bytes.size());
  }
  return out;
}

// The dlogit of every row is that of its (token, expert), where no other expert of the token has one.
bool rows_agree(Case const& c, Data const& data, Launch launch) {
  if (tessera::core::has_softmax_over_all(c.kind) || c.aux) return true;
  Result const out = run(c, data, launch, false, true);
  std::vector<float> dlogits(size_t(c.tokens * c.experts));
  if (dlogits.empty()) return true;
  std::memcpy(dlogits.data(), out.dlogits.data(), out.dlogits.size());
  for (size_t slot = 0; slot < data.ids.size(); ++slot) {
    if (data.rows[slot] < 0) continue;
    size_t const at = slot / size_t(c.top_k) * size_t(c.experts) + size_t(data.ids[slot]);
    if (out.row_dlogits[size_t(data.rows[slot])] != dlogits[at]) return false;
  }
  return true;
}

// Of normalised sigmoids in fp64: dl_k = (g_k - sum of g q)/S p_k (1 - p_k), S with its floor, q = p/S.
bool is_right(Case const& c, Data const& data, Result const& result) {
  if (c.p_scale == 0) return true;
  std::vector<float> dscores(data.ids.size()), dlogits(size_t(c.tokens * c.experts));
  std::memcpy(dscores.data(), result.dscores.data(), result.dscores.size());
  std::memcpy(dlogits.data(), result.dlogits.data(), result.dlogits.size());
  for (size_t token = 0; token < size_t(c.tokens); ++token) {
    size_t const first = token * size_t(c.top_k), end = first + size_t(c.top_k);
    double sum = tessera::core::kNormalizeFloor, mean = 0, largest = 0;
    for (size_t slot = first; slot < end; ++slot) sum += data.chosen_p[slot];
    for (size_t slot = first; slot < end; ++slot) {
      double const g = double{kRouteScale} * dscores[slot];
      mean += g * data.chosen_p[slot] / sum;
      largest = std::max(largest, std::abs(g));
    }
    for (size_t slot = first; slot < end; ++slot) {
      double const p = data.chosen_p[slot], g = double{kRouteScale} * dscores[slot];
      double const want = (g - mean) / sum * p * (1 - p);
      double const have = dlogits[token * size_t(c.experts) + size_t(data.ids[slot])];
      if (!(std::abs(have - want) <= 1e-5 * largest)) return false;
    }
  }
  return true;
}

bool passes(Case const& c) {
  Data const data = make_data(c);
  Result const plain = run(c, data, launch_plain, false);
  bool const same = run(c, data, tessera::cuda::launch_router_dlogits, false) == plain;
  Result scratch = run(c, data, tessera::cuda::launch_router_dlogits, true);
  bool const left_alone =
      scratch.dlogits == Bytes(scratch.dlogits.size(), tessera::cuda_test::kPoison);
  scratch.dlogits = plain.dlogits;
  bool const by_row = rows_agree(c, data, tessera::cuda::launch_router_dlogits) &&
                      rows_agree(c, data, launch_plain);
  bool const right = is_right(c, data, plain);
  bool const passed = same && left_alone && by_row && right && scratch == plain;
  std::printf("%s %s%s%s%s%s\n", passed ? "passed" : "FAILED", c.name, same ? "" : " (bits)",
              left_alone ? "" : " (scratch is written)", by_row ? "" : " (by row)",
              right ? "" : " (values)");
  return passed;
}

// The caller's dlogits of a split backward have the alignment of their elements.
bool refuses_dlogits_on_8_bytes() {
  DeviceBuffer const dlogits(4 * (16 + 2));
  tessera::cuda::RouterGradientArguments args{};
  args.dlogits.kind = RouterKind::topk_softmax;
  args.dlogits.tokens = 1;
  args.dlogits.experts = 16;
  args.dlogits.top_k = 2;
  args.dlogits.gmem_dlogits = dlogits.as<float>() + 2;
  bool const refused = tessera::cuda::launch_router_dlogits(args, nullptr) == cudaErrorInvalidValue;
  std::printf("%s dlogits on a multiple of 8 bytes\n", refused ? "passed" : "FAILED");
  return refused;
}

constexpr Case kCases[] = {
    {.name = "no tokens", .tokens = 0, .experts = 8, .top_k = 2},
    {.name = "one expert", .tokens = 5, .experts = 1, .top_k = 1},
    {.name = "K = E", .tokens = 50, .experts = 32, .top_k = 32},
    {.name = "K = 1", .tokens = 333, .experts = 16, .top_k = 1, .sentinels = 0.1},
    {.name = "K = 2 of 32", .tokens = 333, .experts = 32, .top_k = 2},
    {.name = "K = 3 of 30", .tokens = 333, .experts = 30, .top_k = 3, .bias = true},
    {.name = "K = 4 of 7", .tokens = 333, .experts = 7, .top_k = 4, .sentinels = 0.2},
    {.name = "K = 10 of 512", .tokens = 333, .experts = 512, .top_k = 10, .groups = 4},
    {.name = "K = 16 of 256", .tokens = 333, .experts = 256, .top_k = 16, .aux = true},
    {.name = "K = 17 of 36", .tokens = 333, .experts = 36, .top_k = 17},
    {.name = "7B", .tokens = 2000, .experts = 128, .top_k = 8},
    {.name = "1024 experts", .tokens = 300, .experts = 1024, .top_k = 16, .groups = 8},
    {.name = "60 experts", .tokens = 301, .experts = 60, .top_k = 6, .copy_padding = 4},
    {.name = "61 experts, sentinels", .tokens = 301, .experts = 61, .top_k = 6, .sentinels = 0.3},
    {.name = "sentinels alone", .tokens = 9, .experts = 16, .top_k = 2, .sentinels = 1},
    {.name = "another loss", .tokens = 99, .experts = 16, .top_k = 2, .aux = true},
    {.name = "rows of the copy apart", .tokens = 99, .experts = 16, .top_k = 2, .copy_padding = 3},
    {.name = "no copy, not rounded",
     .tokens = 99,
     .experts = 16,
     .top_k = 2,
     .rounded = false,
     .copy_padding = -1},
    {.name = "bias", .tokens = 200, .experts = 24, .top_k = 4, .bias = true},
    {.name = "softmax-topk",
     .tokens = 400,
     .experts = 100,
     .top_k = 8,
     .kind = RouterKind::softmax_topk},
    {.name = "softmax-topk, sentinels",
     .tokens = 400,
     .experts = 64,
     .top_k = 3,
     .kind = RouterKind::softmax_topk,
     .sentinels = 0.7},
    {.name = "softmax-topk-renorm",
     .tokens = 400,
     .experts = 64,
     .top_k = 8,
     .kind = RouterKind::softmax_topk_renorm},
    {.name = "sigmoid-bias",
     .tokens = 400,
     .experts = 64,
     .top_k = 8,
     .kind = RouterKind::sigmoid_bias},
    {.name = "sigmoid-bias, normalised",
     .tokens = 400,
     .experts = 256,
     .top_k = 8,
     .kind = RouterKind::sigmoid_bias,
     .normalize = true,
     .sentinels = 0.1},
    {.name = "sqrtsoftplus",
     .tokens = 400,
     .experts = 64,
     .top_k = 8,
     .kind = RouterKind::sqrtsoftplus},
    {.name = "tiny p",
     .tokens = 400,
     .experts = 64,
     .top_k = 6,
     .kind = RouterKind::sigmoid_bias,
     .normalize = true,
     .p_scale = 1e-20f},
    {.name = "one tiny p",
     .tokens = 400,
     .experts = 64,
     .top_k = 1,
     .kind = RouterKind::sigmoid_bias,
     .normalize = true,
     .p_scale = 1e-20f},
    {.name = "ordinary p",
     .tokens = 400,
     .experts = 64,
     .top_k = 6,
     .kind = RouterKind::sigmoid_bias,
     .normalize = true,
     .p_scale = 0.1f},
};

}  // namespace

int main() {
  if (!tessera::cuda_test::has_device()) return tessera::cuda_test::kSkipped;
  int failures = 0;
  for (Case const& c : kCases) failures += passes(c) ? 0 : 1;
  failures += refuses_dlogits_on_8_bytes() ? 0 : 1;
  return failures == 0 ? 0 : 1;
}
