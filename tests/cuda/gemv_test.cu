// SPDX-License-Identifier: Apache-2.0
// The kernels for few tokens against their plain twins: rows of an expert from none to more than pass at once, sizes
// that fill no warp, every layout with contiguous rows, biases, activations, in poisoned memory, equal bits again.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "layer.cuh"
#include "src/cuda/host/projection.hpp"

namespace tessera::cuda_test {
namespace {

using cuda::WeightRows;

struct Case {
  char const* name;
  int64_t hidden, intermediate;
  std::vector<int32_t> rows;  // of each expert
  ActivationKind activation = ActivationKind::swiglu;
  bool bias = false, interleaved = false, stores_h = true;
};

std::vector<Case> cases() {
  using Kind = ActivationKind;
  return {
      {"one row", 2048, 768, {0, 0, 1, 0}},
      {"one to five rows", 512, 256, {1, 2, 3, 4, 5, 0}},
      {"no multiple of a warp's step", 200, 104, {2, 0, 7, 1}, Kind::swiglu, true},
      {"least sizes", 8, 8, {1, 3}, Kind::geglu, true, true},
      {"long rows", 7168, 64, {0, 8}, Kind::swiglu, false, true, false},
      {"long n", 64, 2880, {1, 1, 1, 1}, Kind::clamped_swiglu, true, true},
      {"not gated", 320, 136, {3, 1}, Kind::gelu, true},
      {"relu2, nothing kept", 264, 72, {1, 6}, Kind::relu2, false, false, false},
      {"more experts than threads", 128, 64, std::vector<int32_t>(300, 1)},
  };
}

// |value - expected| of bf16 values that differ in the order of their sums: one rounding, and what cancels.
bool close(std::vector<__nv_bfloat16> const& values, std::vector<__nv_bfloat16> const& expected,
           double scale) {
  if (values.size() != expected.size()) return false;
  for (size_t i = 0; i < values.size(); ++i) {
    double const a = __bfloat162float(values[i]), b = __bfloat162float(expected[i]);
    if (!(std::abs(a - b) <= std::abs(b) * 0x1p-7 + scale * 0x1p-16)) return false;
  }
  return true;
}

bool any(std::vector<__nv_bfloat16> const& values) {
  return std::any_of(values.begin(), values.end(),
                     [](__nv_bfloat16 v) { return __bfloat162float(v) != 0.0f; });
}

struct Experts {
  explicit Experts(Case const& c) : count(static_cast<int32_t>(c.rows.size())) {
    for (int32_t const r : c.rows) offsets.push_back(offsets.back() + r);
    rows = offsets.back();
    capacity = rows + 3;  // rows past the last expert are neither read nor written
    for (int64_t i = 0; i < capacity; ++i) gather.push_back(static_cast<int32_t>(i * 5 % capacity));
  }
  int32_t count;
  int64_t rows = 0, capacity = 0;
  std::vector<int32_t> offsets{0}, gather;
};

void check(Case const& c, char const* what, bool holds) {
  if (!holds) std::printf("%s: %s\n", c.name, what);
  EXPECT(holds);
}

void run_up(Case const& c) {
  Experts const e(c);
  int64_t const d = c.hidden, n = c.intermediate;
  Activation const activation{.kind = c.activation};
  int64_t const halves = activation.gated() ? 2 : 1;
  DeviceBuffer const x(values(e.capacity * d, 1)), w(values(e.count * halves * n * d, 2)),
      b(values(e.count * halves * n, 3)), offsets(e.offsets), gather(e.gather);
  auto const half = [&](DeviceBuffer const& buffer, int64_t h, int64_t columns) {
    bool const turns = c.interleaved && halves == 2;
    return WeightRows{.gmem = buffer.as<__nv_bfloat16>() + (turns ? h * columns : h * n * columns),
                      .expert_stride = halves * n * columns,
                      .row_stride = turns ? 2 * columns : columns,
                      .column_stride = 1,
                      .block = n};
  };
  DeviceBuffer const h(2 * static_cast<size_t>(e.capacity * halves * n)),
      a(2 * static_cast<size_t>(e.capacity * n));
  cuda::UpProjectionFwdArguments args{.x = {x.as<void>(), e.capacity, d},
                                      .gmem_gather_index = gather.as<int32_t>(),
                                      .gmem_expert_offsets = offsets.as<int32_t>(),
                                      .w_up = {half(w, 0, d), half(w, halves - 1, d)},
                                      .b_up = {},
                                      .activation = activation,
                                      .gmem_h = c.stores_h ? h.as<void>() : nullptr,
                                      .gmem_a = a.as<void>(),
                                      .rows = e.capacity,
                                      .hidden = d,
                                      .intermediate = n,
                                      .experts = e.count,
                                      .gmem_tile_counter = nullptr};
  if (c.bias) {
    args.b_up[0] = half(b, 0, 1);
    args.b_up[1] = half(b, halves - 1, 1);
  }
  struct Results {
    Bytes h, a;
    std::vector<__nv_bfloat16> h_values, a_values;
  };
  auto const run = [&](auto* launch) {
    require(cudaMemsetAsync(h.as<void>(), kPoison, h.size(), nullptr), "poison");
    require(cudaMemsetAsync(a.as<void>(), kPoison, a.size(), nullptr), "poison");
    require(launch(args, nullptr), "up_projection_fwd");
    synchronize(nullptr);
    Results out{h.bytes(), a.bytes(), h.values<__nv_bfloat16>(), a.values<__nv_bfloat16>()};
    out.h_values.resize(static_cast<size_t>(c.stores_h ? e.rows * halves * n : 0));
    out.a_values.resize(static_cast<size_t>(e.rows * n));
    return out;
  };
  Results const plain = run(&cuda::launch_up_projection_fwd_plain);
  Results const gemv = run(&cuda::launch_up_projection_fwd_gemv);
  Results const again = run(&cuda::launch_up_projection_fwd_gemv);
  double const scale = std::sqrt(static_cast<double>(d));
  check(c, "a is not zero", any(plain.a_values));
  check(c, "h", close(gemv.h_values, plain.h_values, scale));
  check(c, "a", close(gemv.a_values, plain.a_values, scale * scale));
  check(c, "equal bits", gemv.h == again.h && gemv.a == again.a);
  auto const tail_of = [](Bytes const& bytes, int64_t values) {
    return Bytes(bytes.begin() + 2 * values, bytes.end());
  };
  check(c, "rows of no expert",
        tail_of(gemv.a, e.rows * n) == tail_of(plain.a, e.rows * n) &&
            tail_of(gemv.h, e.rows * halves * n) == tail_of(plain.h, e.rows * halves * n));
}

void run_down(Case const& c) {
  Experts const e(c);
  int64_t const d = c.hidden, n = c.intermediate;
  DeviceBuffer const a(values(e.capacity * n, 4)), w(values(e.count * d * n, 5)),
      b(values(e.count * d, 6)), offsets(e.offsets);
  DeviceBuffer const y(2 * static_cast<size_t>(e.capacity * d));
  auto const rows_of = [&](DeviceBuffer const& buffer, int64_t columns) {
    return WeightRows{.gmem = buffer.as<void>(),
                      .expert_stride = d * columns,
                      .row_stride = columns,
                      .column_stride = 1,
                      .block = d};
  };
  cuda::DownProjectionFwdArguments const args{.gmem_a = a.as<void>(),
                                              .gmem_expert_offsets = offsets.as<int32_t>(),
                                              .w_down = rows_of(w, n),
                                              .b_down = c.bias ? rows_of(b, 1) : WeightRows{},
                                              .gmem_y = y.as<void>(),
                                              .rows = e.capacity,
                                              .hidden = d,
                                              .intermediate = n,
                                              .experts = e.count,
                                              .gmem_tile_counter = nullptr};
  auto const run = [&](auto* launch) {
    require(cudaMemsetAsync(y.as<void>(), kPoison, y.size(), nullptr), "poison");
    require(launch(args, nullptr), "down_projection_fwd");
    synchronize(nullptr);
    return y.values<__nv_bfloat16>();
  };
  auto plain = run(&cuda::launch_down_projection_fwd_plain);
  auto gemv = run(&cuda::launch_down_projection_fwd_gemv);
  Bytes const first = y.bytes();
  run(&cuda::launch_down_projection_fwd_gemv);
  check(c, "y, equal bits", y.bytes() == first);
  plain.resize(static_cast<size_t>(e.rows * d));
  gemv.resize(plain.size());
  check(c, "y is not zero", any(plain));
  check(c, "y", close(gemv, plain, std::sqrt(static_cast<double>(n))));
}

void run_logits(int64_t tokens, int64_t hidden, int32_t experts, bool bias) {
  DeviceBuffer const x(values(tokens * hidden, 7)), w(values(experts * hidden, 8)),
      b(values(experts, 9)), logits(sizeof(float) * static_cast<size_t>(tokens * experts));
  cuda::RouterLogitsArguments const args{.x = {x.as<void>(), tokens, hidden},
                                         .w_router = {w.as<void>(), experts, hidden},
                                         .gmem_b_router = bias ? b.as<void>() : nullptr,
                                         .gmem_logits = logits.as<float>(),
                                         .hidden = hidden,
                                         .experts = experts};
  auto const run = [&](auto* launch) {
    require(cudaMemsetAsync(logits.as<void>(), kPoison, logits.size(), nullptr), "poison");
    require(launch(args, nullptr), "router_logits");
    synchronize(nullptr);
    return logits.values<float>();
  };
  auto const plain = run(&cuda::launch_router_logits_plain);
  auto const gemv = run(&cuda::launch_router_logits_gemv);
  double worst = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    double const difference = std::abs(static_cast<double>(gemv[i]) - plain[i]);
    worst = std::isnan(difference) ? difference : std::max(worst, difference);
  }
  bool const holds = worst <= 1e-6 * static_cast<double>(hidden);
  if (!holds) {
    std::printf("T %lld d %lld E %d: off by %g\n", static_cast<long long>(tokens),
                static_cast<long long>(hidden), experts, worst);
  }
  EXPECT(holds);
  EXPECT(same_bits(gemv, run(&cuda::launch_router_logits_gemv)));
}

int run() {
  if (!has_device()) return kSkipped;
  for (Case const& c : cases()) {
    run_up(c);
    run_down(c);
  }
  run_logits(1, 2048, 128, false);
  run_logits(8, 200, 37, true);
  run_logits(5, 7168, 256, true);
  run_logits(3, 8, 1, false);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::run(); }
