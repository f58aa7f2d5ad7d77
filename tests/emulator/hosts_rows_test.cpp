// SPDX-License-Identifier: Apache-2.0
// The kernels of passes over hosts on a CPU: which tokens go to which host, the message that takes them there, and the
// sum of what comes back, against what these are by definition.
#include <cuda_runtime.h>

#include "expert_parallel/hosts/rows.cuh"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "tests/emulator/emulator.hpp"

namespace tessera::expert_parallel::hosts {
namespace {

constexpr int kHosts = 3, kPerHost = 4, kTopK = 2, kHidden = 24;

struct Tokens {
  std::int64_t count;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<std::uint16_t> x;

  explicit Tokens(std::int64_t tokens) : count(tokens), x(size(tokens * kHidden)) {
    std::mt19937 random(static_cast<unsigned>(tokens));
    for (std::int64_t i = 0; i < tokens * kTopK; ++i) {
      ids.push_back(static_cast<std::int32_t>(random() % (kHosts * kPerHost + 4)) - 2);
      weights.push_back(static_cast<float>(i + 1));
    }
    std::iota(x.begin(), x.end(), std::uint16_t{1});
  }
  static std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }
  [[nodiscard]] std::int32_t local_id(std::int64_t pair, int host) const {
    std::int32_t const id = ids[size(pair)] - host * kPerHost;
    return id >= 0 && id < kPerHost ? id : -1;
  }
  [[nodiscard]] std::vector<std::int32_t> that_go(int host) const {
    std::vector<std::int32_t> list;
    for (std::int64_t t = 0; t < count; ++t) {
      bool goes = false;
      for (int k = 0; k < kTopK; ++k) goes = goes || local_id(t * kTopK + k, host) >= 0;
      if (goes) list.push_back(static_cast<std::int32_t>(t));
    }
    return list;
  }
};

TEST(HostsRows, TokensThatGoToEachHost) {
  for (std::int64_t const count : {0, 1, 5, 700, 1500}) {  // fewer and more than threads
    Tokens const tokens(count);
    std::size_t const all = Tokens::size(kHosts * count);
    std::vector<std::int32_t> token(all, 77), place(all, 77);
    std::vector<std::int64_t> counts(kHosts, 77);
    EXPECT_EQ(launch_choose({.gmem_topk_ids = tokens.ids.data(),
                             .tokens = count,
                             .top_k = kTopK,
                             .hosts = kHosts,
                             .experts = kPerHost,
                             .gmem_token = token.data(),
                             .gmem_place = place.data(),
                             .gmem_counts = counts.data()},
                            nullptr),
              cudaSuccess);
    EXPECT_EQ(emulator::run({.seed = 1}), "");
    for (int host = 0; host < kHosts; ++host) {
      std::vector<std::int32_t> const wanted = tokens.that_go(host);
      auto const begin = static_cast<std::ptrdiff_t>(host * count);
      ASSERT_EQ(counts[static_cast<std::size_t>(host)], static_cast<std::int64_t>(wanted.size()));
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), token.begin() + begin));
      std::vector<std::int32_t> places(Tokens::size(count), -1);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        places[static_cast<std::size_t>(wanted[i])] = static_cast<std::int32_t>(i);
      }
      EXPECT_TRUE(std::equal(places.begin(), places.end(), place.begin() + begin));
    }
  }
}

TEST(HostsRows, Messages) {
  Tokens const tokens(5);
  int const host = 1;
  std::vector<std::int32_t> const listed = tokens.that_go(host);
  ASSERT_FALSE(listed.empty());
  ASSERT_LT(listed.size(), 5U);
  for (bool const counted : {false, true}) {
    std::int64_t const rows = counted ? static_cast<std::int64_t>(listed.size()) : 7;
    std::vector<std::uint16_t> x(Tokens::size(rows * kHidden), 0xffff);
    std::vector<float> weights(Tokens::size(rows * kTopK), -1);
    std::vector<std::int32_t> ids(weights.size(), 77);
    EXPECT_EQ(launch_pack({.rows = rows,
                           .tokens = tokens.count,
                           .gmem_token = counted ? listed.data() : nullptr,
                           .words = kHidden / 8,
                           .gmem_x = tokens.x.data(),
                           .gmem_topk_weights = tokens.weights.data(),
                           .gmem_topk_ids = tokens.ids.data(),
                           .top_k = kTopK,
                           .first_expert = host * kPerHost,
                           .experts = kPerHost,
                           .gmem_rows = x.data(),
                           .gmem_row_weights = weights.data(),
                           .gmem_row_ids = ids.data()},
                          nullptr),
              cudaSuccess);
    EXPECT_EQ(emulator::run({.seed = 1}), "");
    for (std::int64_t row = 0; row < rows; ++row) {
      std::int64_t const token = counted ? listed[Tokens::size(row)] : row;
      bool const there = token < tokens.count;
      for (std::int64_t i = 0; i < kHidden; ++i) {
        ASSERT_EQ(x[Tokens::size(row * kHidden + i)],
                  there ? tokens.x[Tokens::size(token * kHidden + i)] : 0);
      }
      for (std::int64_t k = 0; k < kTopK; ++k) {
        std::int64_t const at = row * kTopK + k, from = token * kTopK + k;
        ASSERT_EQ(weights[Tokens::size(at)], there ? tokens.weights[Tokens::size(from)] : 0);
        ASSERT_EQ(ids[Tokens::size(at)], there ? tokens.local_id(from, host) : -1);
      }
    }
  }
}

template <class Element>
void check_sum(bool listed) {
  constexpr std::int64_t kCount = 70, kColumns = 5;
  std::vector<std::int32_t> place(kHosts * kCount);
  std::vector<std::vector<Element>> partials(kHosts);
  std::vector<Element> sum(kCount * kColumns);
  int const own = 1;
  SumPartials p = {.tokens = kCount,
                   .columns = kColumns,
                   .hosts = kHosts,
                   .host = own,
                   .gmem_place = listed ? place.data() : nullptr,
                   .gmem_sum = sum.data(),
                   .fp32 = sizeof(Element) == 4};
  for (int h = 0; h < kHosts; ++h) {
    auto& of_host = partials[static_cast<std::size_t>(h)];
    for (std::int64_t i = 0; i < kCount * kColumns; ++i) {
      of_host.push_back(core::round_to<Element>(static_cast<float>(i * 3 + h) * 0.37f));
    }
    p.gmem_partial[h] = of_host.data();
    // Of the own host they are not read.
    for (std::int64_t t = 0; t < kCount; ++t) {
      place[Tokens::size(h * kCount + t)] =
          h == own ? -1 : static_cast<std::int32_t>(t % 3 == h ? -1 : kCount - 1 - t);
    }
  }
  EXPECT_EQ(launch_sum(p, nullptr), cudaSuccess);
  EXPECT_EQ(emulator::run({.seed = 1}), "");
  for (std::int64_t i = 0; i < kCount * kColumns; ++i) {
    std::int64_t const token = i / kColumns;
    float wanted = 0;
    for (int h = 0; h < kHosts; ++h) {
      bool const by_place = listed && h != own;
      if (by_place && token % 3 == h) continue;
      std::int64_t const row = by_place ? kCount - 1 - token : token;
      wanted += core::to_fp32(
          partials[static_cast<std::size_t>(h)][Tokens::size(row * kColumns + i % kColumns)]);
    }
    ASSERT_EQ(core::to_fp32(sum[Tokens::size(i)]), core::to_fp32(core::round_to<Element>(wanted)));
  }
}

TEST(HostsRows, Sums) {
  for (bool const listed : {false, true}) {
    check_sum<core::Bf16>(listed);
    check_sum<float>(listed);
  }
}

}  // namespace
}  // namespace tessera::expert_parallel::hosts
