// SPDX-License-Identifier: Apache-2.0
// router_dgrad of listed tokens, from the source that GPUs get: bit for bit rows times columns in the order of k, in
// the rows of dx that the list names, while the others stay.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "cuda/kernels/router_dgrad.cuh"
#include "cuda/tuning/gemm_backward.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::dot;
using emulator::fill;
using emulator::Memory;
using emulator::round;

struct Sizes {
  int tokens, listed, experts, hidden, pitch;
  int terms = 1;
};

void expect_right_rows(Sizes const& s) {
  constexpr Bits kStays = 0x1234;
  int const products = s.experts * s.terms;
  Memory<Bits> dlogits(s.tokens * products), w(products * s.hidden);
  fill(dlogits.get(), s.tokens * products, 1, 1.0f);
  fill(w.get(), products * s.hidden, 2, 0.25f);
  // The list has more room than tokens; what stands there is no token.
  std::vector<std::int32_t> list(static_cast<std::size_t>(s.tokens), 1 << 30);
  for (int i = 0; i < s.listed; ++i) {
    list[static_cast<std::size_t>(i)] = (11 * i + 3) % s.tokens;
  }
  std::set<std::int32_t> const named(list.begin(), list.begin() + s.listed);
  ASSERT_EQ(named.size(), static_cast<std::size_t>(s.listed));
  std::int32_t const offsets[] = {0, s.listed};
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<Bits> dx(s.tokens * s.pitch);
    std::fill_n(dx.get(), s.tokens * s.pitch, kStays);
    std::int32_t counter = 0;
    RouterDgradArguments args = {};
    args.gmem_dlogits = dlogits.get();
    args.w_router = {.gmem = w.get(), .rows = products, .pitch = s.hidden};
    args.gmem_dx = dx.get();
    args.dx_pitch = s.pitch;
    args.tokens = s.tokens;
    args.hidden = s.hidden;
    args.experts = s.experts;
    args.gmem_tile_counter = &counter;
    args.terms = s.terms;
    args.gmem_tokens = list.data();
    args.gmem_offsets = offsets;
    args.starts_early = true;
    ASSERT_EQ(launch_router_dgrad_listed_config<RouterDgradListedConfig>(args, 2, nullptr),
              cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    EXPECT_EQ(counter, 0);
    for (int t = 0; t < s.tokens; ++t) {
      bool const is_named = named.contains(t);
      for (int c = 0; c < s.pitch; ++c) {
        Bits const wanted = is_named && c < s.hidden
                                ? round(dot(&dlogits[t * products], &w[c], products, s.hidden))
                                : kStays;
        ASSERT_EQ(dx[t * s.pitch + c], wanted) << t << ", " << c << ", seed " << schedule.seed;
      }
    }
  }
}

TEST(RouterDgrad, OfListedTokens) {
  expect_right_rows({.tokens = 400, .listed = 299, .experts = 72, .hidden = 264, .pitch = 272});
}
TEST(RouterDgrad, OfFewListedTokensOrNone) {
  expect_right_rows({.tokens = 9, .listed = 1, .experts = 8, .hidden = 72, .pitch = 72});
  expect_right_rows({.tokens = 9, .listed = 0, .experts = 8, .hidden = 72, .pitch = 72});
}
TEST(RouterDgrad, OfAllTokensAsListed) {
  expect_right_rows({.tokens = 150, .listed = 150, .experts = 128, .hidden = 136, .pitch = 136});
}
TEST(RouterDgrad, OfListedTokensInTerms) {
  expect_right_rows(
      {.tokens = 140, .listed = 100, .experts = 24, .hidden = 72, .pitch = 80, .terms = 3});
}

}  // namespace
}  // namespace tessera::cuda
