// SPDX-License-Identifier: Apache-2.0
// The router's weight gradient of one GPU, from the sources that GPUs get: bit for bit sums over chunks of tokens, in
// their order; with padding of the real tokens alone, in the chunks that they have by themselves.
#include "cuda/kernels/router_wgrad.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cuda/tuning/gemm_backward.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::fill;
using emulator::Memory;
using emulator::round;
using emulator::widen;

constexpr emulator::Schedule kSchedules[] = {
    {.seed = 1}, {.seed = 2, .burst = 64}, {.seed = 3, .burst = 8, .copies = 2, .lazy = 0.5}};
constexpr int kTokens = 1100, kHidden = 136, kExperts = 24;

// Of tokens in so many chunks, whose places in dl they are: dl (tokens,terms,E), x of token order[i].
std::vector<float> expected(Bits const* dl, Bits const* x, std::vector<std::int32_t> const& order,
                            int terms) {
  auto const tokens = static_cast<std::int64_t>(order.size());
  std::int64_t const chunk = router_wgrad_chunk(tokens, kHidden, terms * kExperts);
  std::vector<float> out;
  for (int e = 0; e < kExperts; ++e) {
    for (int c = 0; c < kHidden; ++c) {
      float all = 0;
      for (int term = 0; term < terms; ++term) {
        for (std::int64_t first = 0; first < tokens; first += chunk) {
          float sum = 0;
          for (std::int64_t i = first; i < std::min(first + chunk, tokens); ++i) {
            sum += widen(dl[(i * terms + term) * kExperts + e]) *
                   widen(x[order[static_cast<std::size_t>(i)] * kHidden + c]);
          }
          all += sum;
        }
      }
      out.push_back(all);
    }
  }
  return out;
}

// is_real(t) of every token; no padding where kGathers is false. fp32 is written, bf16 is added to what was there.
template <bool kGathers, class Value = float, class IsReal>
void expect_right(IsReal is_real, int terms) {
  constexpr bool kFp32 = std::is_same_v<Value, float>;
  std::vector<std::int32_t> order, padding;
  for (std::int32_t t = 0; t < kTokens; ++t) (is_real(t) ? order : padding).push_back(t);
  auto const real = static_cast<std::int64_t>(order.size());
  std::int64_t const columns = terms * kExperts;
  // Rows of dl that no real token has are NaN, as is x of padding: neither may be read into a sum.
  Memory<Bits> x(kTokens * kHidden), dl(kTokens * columns);
  fill(x.get(), kTokens * kHidden, 1, 1.0f);
  fill(dl.get(), real * columns, 2, 0.25f);
  for (std::int32_t const t : padding) {
    std::fill_n(x.get() + t * kHidden, kHidden, round(NAN));
  }
  std::int64_t const most = router_wgrad_most_chunks(kTokens, kHidden, columns);
  ASSERT_GT(most, 1);
  std::vector<std::int32_t> starts;
  for (std::int64_t i = 0; i <= most; ++i) {
    starts.push_back(
        static_cast<std::int32_t>(std::min(i * router_wgrad_chunk(real, kHidden, columns), real)));
  }
  std::vector<float> const wanted = expected(dl.get(), x.get(), order, terms);
  order.insert(order.end(), padding.begin(), padding.end());
  for (emulator::Schedule const& schedule : kSchedules) {
    Memory<float> partials(router_wgrad_partials(kTokens, kHidden, columns));
    Memory<Value> dw(kExperts * kHidden);
    auto const before = [](std::int64_t i) { return static_cast<float>(i % 7); };
    for (std::int64_t i = 0; !kFp32 && i < kExperts * kHidden; ++i) {
      dw[i] = static_cast<Value>(round(before(i)));
    }
    std::int32_t counter = 0;
    std::uint32_t arrived = 0;
    RouterWgradArguments args{};
    args.gmem_dlogits = dl.get();
    args.x = {.gmem = x.get(), .rows = kTokens, .pitch = kHidden};
    args.gmem_dw_router = dw.get();
    args.dw_pitch = kHidden;
    args.is_fp32 = kFp32;
    args.accumulates = !kFp32;
    args.gmem_partials = partials.get();
    args.gmem_arrived = &arrived;
    args.hidden = kHidden;
    args.experts = kExperts;
    args.gmem_tile_counter = &counter;
    args.terms = terms;
    if (kGathers) {
      args.gmem_order = order.data();
      args.gmem_chunk_offsets = starts.data();
    }
    using Config = RouterWgradConfig<128, kGathers>;
    ASSERT_EQ((launch_router_wgrad_config<Config>(args, 3, nullptr)), cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    EXPECT_EQ(counter, 0);
    EXPECT_EQ(arrived, 0u);
    for (std::int64_t i = 0; i < kExperts * kHidden; ++i) {
      float const sum = wanted[static_cast<std::size_t>(i)];
      ASSERT_EQ(dw[i], kFp32 ? static_cast<Value>(sum) : static_cast<Value>(round(sum + before(i))))
          << "expert " << i / kHidden << ", column " << i % kHidden << ", seed " << schedule.seed;
    }
  }
}

TEST(RouterWgrad, InChunksOfTokens) {
  for (int const terms : {1, 2}) expect_right<false>([](int) { return true; }, terms);
}
TEST(RouterWgrad, OfRealTokensInTheChunksThatTheyHaveAlone) {
  expect_right<true>([](int t) { return t > 0 && t % 3 != 1 && t < 1060; }, 1);
  expect_right<true>([](int t) { return t % 5 == 2; }, 2);  // fewer chunks than there may be
  expect_right<true>([](int) { return true; }, 1);
}
TEST(RouterWgrad, AddsToBf16) {
  expect_right<false, Bits>([](int) { return true; }, 1);
  expect_right<true, Bits>([](int t) { return t % 2 == 0; }, 1);
}
TEST(RouterWgrad, OfPaddingAloneIsZero) {
  expect_right<true>([](int) { return false; }, 1);
}

}  // namespace
}  // namespace tessera::cuda
