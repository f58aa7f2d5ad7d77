// SPDX-License-Identifier: Apache-2.0
// The kernels of an fp32 router: its weights and dlogits as sums of bf16. Where x, or dl, has a single 1, results are
// the fp32 values themselves: all bits of a weight in logits, 16 of them in the gradients.
#include <cmath>
#include <cstdio>
#include <vector>

#include "layer.cuh"
#include "src/cuda/host/projection.hpp"
#include "src/cuda/host/router_backward.hpp"
#include "src/cuda/host/split_fp32.hpp"

namespace tessera::cuda_test {
namespace {

constexpr int kSms = 132;

std::vector<float> fp32_values(int64_t count, uint64_t seed) {
  std::vector<float> out;
  auto const high = values(count, seed), low = values(count, seed + 1);
  for (int64_t i = 0; i < count; ++i) {
    out.push_back(__bfloat162float(high[i]) + __bfloat162float(low[i]) * 0x1p-9f);
  }
  return out;
}

void fail(char const* what, int64_t tokens, int64_t hidden, int64_t experts, double value) {
  std::printf("%s: T %lld, d %lld, E %lld: %.9g\n", what, static_cast<long long>(tokens),
              static_cast<long long>(hidden), static_cast<long long>(experts), value);
}

// Token t has a 1 in column t % d, or values everywhere.
std::vector<__nv_bfloat16> tokens_of(int64_t tokens, int64_t hidden, bool single) {
  auto out = values(tokens * hidden, 11);
  for (int64_t i = 0; single && i < tokens * hidden; ++i) {
    out[i] = __float2bfloat16(i % hidden == i / hidden % hidden ? 1.0f : 0.0f);
  }
  return out;
}

void run_logits(int64_t tokens, int64_t hidden, int32_t experts, bool single) {
  auto const x = tokens_of(tokens, hidden, single);
  int64_t const pitch = hidden + 4;  // of w_router
  auto const w = fp32_values(experts * pitch, 21), bias = fp32_values(experts, 23);
  DeviceBuffer const device_x(x), device_w(w), device_bias(bias);
  DeviceBuffer const terms(2 * static_cast<size_t>(experts * cuda::router_terms_pitch(hidden)));
  DeviceBuffer const logits(4 * static_cast<size_t>(tokens * experts));
  cuda::RouterLogitsArguments const args{.x = {device_x.as<void>(), tokens, hidden},
                                         .w_router = {device_w.as<void>(), experts, pitch},
                                         .gmem_b_router = single ? nullptr : device_bias.as<void>(),
                                         .gmem_logits = logits.as<float>(),
                                         .hidden = hidden,
                                         .experts = experts,
                                         .is_fp32 = true,
                                         .gmem_terms = terms.as<void>()};
  auto const check = [&](char const* what, auto&& launch) {
    std::vector<float> results[2];
    for (auto& result : results) {
      require(cudaMemsetAsync(logits.as<void>(), kPoison, logits.size(), nullptr), "poison");
      require(launch(), what);
      synchronize(nullptr);
      result = logits.values<float>();
    }
    EXPECT(same_bits(results[0], results[1]));
    double worst = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = 0; e < experts; ++e) {
        double exact = single ? 0 : bias[e], size = std::abs(exact);
        for (int64_t c = 0; c < hidden; ++c) {
          double const term = double{__bfloat162float(x[t * hidden + c])} * w[e * pitch + c];
          exact += term;
          size += std::abs(term);
        }
        double const off = std::abs(results[0][t * experts + e] - exact) / size;
        worst = off <= worst ? worst : off;  // NaN too
      }
    }
    bool const holds = worst <= (single ? 0 : 0x1p-17);
    EXPECT(holds);
    if (!holds) fail(what, tokens, hidden, experts, worst);
  };
  check("plain", [&] { return cuda::launch_router_logits_plain(args, nullptr); });
  if (tokens <= cuda::kGemvTokens) {
    check("gemv", [&] { return cuda::launch_router_logits_gemv(args, nullptr); });
  }
  check("GEMM", [&] {
    require(cudaMemsetAsync(terms.as<void>(), kPoison, terms.size(), nullptr), "poison");
    require(cuda::launch_split_fp32_plain(cuda::split_for_logits(device_w.as<float>(), pitch,
                                                                 experts, hidden, terms.as<void>()),
                                          nullptr),
            "split");
    return cuda::launch_router_logits(args, kSms, nullptr);
  });
}

// What is not finite stays what it is, and the largest values do not become infinite.
void run_split() {
  std::vector<float> const from = {1.0f / 3, -INFINITY,       NAN,       3.4e38f,
                                   0.0f,     -0x1.fffffep-3f, 0x1p-100f, 7.0f};
  DeviceBuffer const device_from(from), out(2 * 3 * cuda::kRouterBlock);
  require(cuda::launch_split_fp32_plain(
              cuda::split_for_logits(device_from.as<float>(), 8, 1, 8, out.as<void>()), nullptr),
          "split");
  synchronize(nullptr);
  auto const terms = out.values<__nv_bfloat16>();
  for (size_t c = 0; c < cuda::kRouterBlock; ++c) {
    float const sum = __bfloat162float(terms[c]) + __bfloat162float(terms[c + 64]) +
                      __bfloat162float(terms[c + 128]);
    float const wanted = c < from.size() ? from[c] : 0.0f;
    EXPECT(std::isnan(wanted) ? std::isnan(sum) : sum == wanted);
  }
}

// dl has a single 1 in each token, then values: dx and dw_router by the fast kernels and their twins.
void run_backward(int64_t tokens, int64_t hidden, int32_t experts) {
  auto const w = fp32_values(experts * hidden, 31);
  auto const x = tokens_of(tokens, hidden, false);
  DeviceBuffer const device_w(w), device_x(x);
  DeviceBuffer const router(2 * 3 * w.size()), dx(2 * static_cast<size_t>(tokens * hidden)),
      dw(4 * w.size());
  DeviceBuffer const dgrad_dl(2 * 3 * static_cast<size_t>(tokens * experts)),
      wgrad_dl(2 * 2 * static_cast<size_t>(tokens * experts));
  DeviceBuffer const partials(
      4 * static_cast<size_t>(cuda::router_wgrad_partials(tokens, hidden, 2 * experts)));
  DeviceBuffer const words(std::vector<int32_t>(4, 0));
  require(cuda::launch_split_fp32_plain(
              cuda::split_weights_for_dgrad(device_w.as<float>(), hidden, experts, hidden,
                                            router.as<void>()),
              nullptr),
          "split");
  for (bool const single : {true, false}) {
    auto dl = fp32_values(tokens * experts, 33);
    for (int64_t i = 0; single && i < tokens * experts; ++i) {
      dl[i] = i % experts == i / experts % experts ? 1.0f : 0.0f;
    }
    DeviceBuffer const device_dl(dl);
    for (auto const& args : {cuda::split_dlogits_for_dgrad(device_dl.as<float>(), tokens, experts,
                                                           dgrad_dl.as<void>()),
                             cuda::split_dlogits_for_wgrad(device_dl.as<float>(), tokens, experts,
                                                           wgrad_dl.as<void>())}) {
      require(cuda::launch_split_fp32_plain(args, nullptr), "split");
    }
    cuda::RouterDgradArguments const dgrad{.gmem_dlogits = dgrad_dl.as<void>(),
                                           .w_router = {router.as<void>(), 3 * experts, hidden},
                                           .gmem_dx = dx.as<void>(),
                                           .dx_pitch = hidden,
                                           .tokens = tokens,
                                           .hidden = hidden,
                                           .experts = experts,
                                           .gmem_tile_counter = words.as<int32_t>(),
                                           .terms = 3};
    cuda::RouterWgradArguments const wgrad{.gmem_dlogits = wgrad_dl.as<void>(),
                                           .x = {device_x.as<void>(), tokens, hidden},
                                           .gmem_dw_router = dw.as<void>(),
                                           .dw_pitch = hidden,
                                           .is_fp32 = true,
                                           .accumulates = false,
                                           .gmem_partials = partials.as<float>(),
                                           .gmem_arrived = words.as<uint32_t>() + 1,
                                           .hidden = hidden,
                                           .experts = experts,
                                           .gmem_tile_counter = words.as<int32_t>() + 2,
                                           .terms = 2};
    for (bool const fast : {false, true}) {
      require(cudaMemsetAsync(dx.as<void>(), kPoison, dx.size(), nullptr), "poison");
      require(cudaMemsetAsync(dw.as<void>(), kPoison, dw.size(), nullptr), "poison");
      require(fast ? cuda::launch_router_dgrad(dgrad, kSms, nullptr)
                   : cuda::launch_router_dgrad_plain(dgrad, nullptr),
              "router_dgrad");
      require(fast ? cuda::launch_router_wgrad(wgrad, kSms, nullptr)
                   : cuda::launch_router_wgrad_plain(wgrad, nullptr),
              "router_wgrad");
      synchronize(nullptr);
      auto const got_dx = dx.values<__nv_bfloat16>();
      auto const got_dw = dw.values<float>();
      double worst_dx = 0, worst_dw = 0;
      auto const worse = [](double off, double& worst) { worst = off <= worst ? worst : off; };
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < hidden; ++c) {
          double exact = 0, size = 0;
          for (int64_t e = 0; e < experts; ++e) {
            double const term = double{dl[t * experts + e]} * w[e * hidden + c];
            exact += term;
            size += std::abs(term);
          }
          double const off = std::abs(__bfloat162float(got_dx[t * hidden + c]) - exact);
          worse((off - std::abs(exact) * 0x1p-8) / size, worst_dx);  // beyond its own rounding
        }
      }
      for (int64_t e = 0; e < experts; ++e) {
        for (int64_t c = 0; c < hidden; ++c) {
          double exact = 0, size = 1e-30;
          for (int64_t t = 0; t < tokens; ++t) {
            double const term = double{dl[t * experts + e]} * __bfloat162float(x[t * hidden + c]);
            exact += term;
            size += std::abs(term);
          }
          worse(std::abs(got_dw[e * hidden + c] - exact) / size, worst_dw);
        }
      }
      EXPECT(worst_dx <= 0x1p-15);
      EXPECT(worst_dw <= 0x1p-15);
      if (!(worst_dx <= 0x1p-15)) fail("dx", tokens, hidden, experts, worst_dx);
      if (!(worst_dw <= 0x1p-15)) fail("dw_router", tokens, hidden, experts, worst_dw);
    }
  }
}

int run() {
  if (!has_device()) return kSkipped;
  run_split();
  for (bool const single : {true, false}) {
    for (int32_t const experts : {8, 37, 64, 72, 128, 136, 256, 384}) {
      run_logits(150, 264, experts, single);
    }
    run_logits(1, 264, 37, single);
    run_logits(8, 2048, 128, single);
    run_logits(9, 72, 128, single);
    run_logits(1000, 1024, 128, single);
    run_logits(300, 2048, 64, single);
  }
  run_backward(150, 72, 8);
  run_backward(1, 64, 16);
  run_backward(1300, 264, 64);
  run_backward(700, 136, 136);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::run(); }
