// SPDX-License-Identifier: Apache-2.0
// The router's logits, from the sources that GPUs get: bit for bit rows times columns in the order of k.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cuda/kernels/router_logits.cuh"
#include "cuda/tuning/gemm.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/router_terms.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::dot;
using emulator::fill;
using emulator::fp32_weight;
using emulator::Memory;
using emulator::terms_of;
using emulator::widen;

TEST(RouterLogits, AddsTheBias) {
  constexpr int kTokens = 150, kHidden = 136, kExperts = 266;
  Memory<Bits> x(kTokens * kHidden), w(kExperts * kHidden), bias(kExperts);
  fill(x.get(), kTokens * kHidden, 1, 1.0f);
  fill(w.get(), kExperts * kHidden, 2, 0.25f);
  fill(bias.get(), kExperts, 3, 1.0f);
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<float> logits(kTokens * kExperts);
    ASSERT_EQ(launch_router_logits_config<RouterLogitsWide>(
                  {.x = {.gmem = x.get(), .rows = kTokens, .pitch = kHidden},
                   .w_router = {.gmem = w.get(), .rows = kExperts, .pitch = kHidden},
                   .gmem_b_router = bias.get(),
                   .gmem_logits = logits.get(),
                   .hidden = kHidden,
                   .experts = kExperts},
                  2, nullptr),
              cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    for (int t = 0; t < kTokens; ++t) {
      for (int e = 0; e < kExperts; ++e) {
        float const wanted = dot(&x[t * kHidden], &w[e * kHidden], kHidden) + widen(bias[e]);
        ASSERT_EQ(logits[t * kExperts + e], wanted) << t << ", " << e << ", " << schedule.seed;
      }
    }
  }
}

// Each k_tile of x meets the terms of its weights in turn. With few experts, and with two CTAs that share B, for
// which neither tokens nor experts fill tiles.
template <class Config, int kTokens, int kExperts>
void expect_right_terms() {
  constexpr int kHidden = 136, kBlock = 64, kPitch = 3 * 192;
  static_assert(router_terms_pitch(kHidden) == kPitch);
  Memory<Bits> x(kTokens * kHidden), terms(kExperts * kPitch);
  std::vector<float> bias;
  fill(x.get(), kTokens * kHidden, 1, 1.0f);
  for (int e = 0; e < kExperts; ++e) {
    bias.push_back(static_cast<float>(e % 13) / 7.0f);
    for (int i = 0; i < kPitch; ++i) terms[e * kPitch + i] = 0;
    for (int c = 0; c < kHidden; ++c) {
      auto const [high, middle, low] = terms_of(fp32_weight(e * kHidden + c));
      int const at = e * kPitch + c / kBlock * 3 * kBlock + c % kBlock;
      terms[at] = high;
      terms[at + kBlock] = middle;
      terms[at + 2 * kBlock] = low;
    }
  }
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<float> logits(kTokens * kExperts);
    ASSERT_EQ(launch_router_logits_config<Config>(
                  {.x = {.gmem = x.get(), .rows = kTokens, .pitch = kHidden},
                   .w_router = {},
                   .gmem_b_router = bias.data(),
                   .gmem_logits = logits.get(),
                   .hidden = kHidden,
                   .experts = kExperts,
                   .is_fp32 = true,
                   .gmem_terms = terms.get()},
                  2, nullptr),
              cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    for (int t = 0; t < kTokens; ++t) {
      for (int e = 0; e < kExperts; ++e) {
        float sum = 0;
        double exact = bias[static_cast<std::size_t>(e)], size = 0;
        for (int i = 0; i < kPitch; ++i) {
          int const c = i / (3 * kBlock) * kBlock + i % kBlock;
          if (c < kHidden) sum += widen(x[t * kHidden + c]) * widen(terms[e * kPitch + i]);
        }
        for (int c = 0; c < kHidden; ++c) {
          double const term = double{widen(x[t * kHidden + c])} * fp32_weight(e * kHidden + c);
          exact += term;
          size += std::abs(term);
        }
        float const logit = logits[t * kExperts + e];
        ASSERT_EQ(logit, sum + bias[static_cast<std::size_t>(e)])
            << t << ", " << e << ", " << schedule.seed;
        // Weights of bf16 would miss this: their error is 2^-9 of the terms.
        ASSERT_LE(std::abs(logit - exact), std::ldexp(size + 2, -18)) << t << ", " << e;
      }
    }
  }
}
TEST(RouterLogits, Fp32WeightsOfFewExperts) { expect_right_terms<RouterLogitsTermsFew, 150, 40>(); }
TEST(RouterLogits, Fp32WeightsSharedByTwo) { expect_right_terms<RouterLogitsTerms, 300, 128>(); }
TEST(RouterLogits, Fp32WeightsInTwoTiles) { expect_right_terms<RouterLogitsTerms, 140, 200>(); }

}  // namespace
}  // namespace tessera::cuda
