// SPDX-License-Identifier: Apache-2.0
// Which transfer an exchange takes, and what then crosses the link.
#include "expert_parallel/plan/choose_transfer.hpp"
#include "expert_parallel/plan/ready_experts.hpp"

#include <gtest/gtest.h>

#include <set>

namespace tessera::expert_parallel {
namespace {

TEST(Transfers, RowsCrossOnceWhereTheLinkWouldDecide) {
  auto const choice = [](std::int32_t ranks, std::int32_t hidden, std::int32_t intermediate,
                         std::int32_t experts, std::int32_t top_k, bool gated) {
    return choose_transfer({.ranks = ranks,
                            .max_tokens = 8192,
                            .hidden = hidden,
                            .intermediate = intermediate,
                            .experts = experts,
                            .max_top_k = top_k,
                            .gated = gated});
  };
  EXPECT_EQ(choice(1, 2048, 768, 128, 8, true), Transfer::direct);
  EXPECT_EQ(choice(2, 2048, 768, 128, 8, true), Transfer::once);  // four fifths of the GEMMs' time
  EXPECT_EQ(choice(4, 2048, 768, 128, 8, true), Transfer::once);
  EXPECT_EQ(choice(8, 2048, 768, 128, 8, true), Transfer::once);
  EXPECT_EQ(choice(8, 7168, 2048, 256, 8, true), Transfer::direct);
  EXPECT_EQ(choice(8, 2048, 2048, 32, 2, true), Transfer::direct);
  EXPECT_EQ(choice(4, 2048, 768, 128, 2, true), Transfer::direct);   // nearly as many rows
  EXPECT_EQ(choice(4, 7168, 2048, 256, 8, true), Transfer::direct);  // GEMMs take longer
  EXPECT_EQ(choice(4, 2048, 1024, 32, 8, true), Transfer::once);
  EXPECT_EQ(choice(4, 2048, 1536, 32, 8, true), Transfer::direct);
  EXPECT_EQ(choice(4, 2048, 1024, 32, 8, false), Transfer::once);  // two matrices, fewer FLOP
}

// 30 of 64 experts of Qwen3-30B over two GPUs: the link takes 0.46 of the time of the GEMM on own rows.
TEST(Transfers, ExpertsBeginWithOwnRowsForAsLongAsTheLinkTakes) {
  auto const ready = [](std::int32_t ranks, std::int32_t hidden, std::int32_t intermediate,
                        std::int32_t experts, std::int32_t top_k, std::int32_t max_tokens) {
    ExchangeShape const s = {.ranks = ranks,
                             .max_tokens = max_tokens,
                             .hidden = hidden,
                             .intermediate = intermediate,
                             .experts = experts,
                             .max_top_k = top_k};
    return s.local_experts() - first_ready_expert(s);
  };
  EXPECT_EQ(ready(2, 2048, 768, 128, 8, 8192), 30);
  EXPECT_EQ(ready(2, 2048, 768, 128, 8, 4096), 30);
  EXPECT_EQ(ready(2, 7168, 2048, 256, 8, 8192), 23);
  EXPECT_EQ(ready(4, 2048, 768, 128, 8, 8192), 32);  // all: the link takes longer
  EXPECT_EQ(ready(8, 2048, 768, 128, 8, 8192), 16);
  EXPECT_EQ(ready(1, 2048, 768, 128, 8, 8192), 0);  // nobody else's tokens come
}

TEST(Transfers, OwnersAddUpWhereTheLinkWouldDecideEvenThen) {
  auto const choice = [](std::int32_t ranks, std::int32_t hidden, std::int32_t intermediate,
                         std::int32_t experts, std::int32_t top_k, bool partial_combine = true,
                         std::int32_t max_tokens = 8192) {
    return choose_transfer({.ranks = ranks,
                            .max_tokens = max_tokens,
                            .hidden = hidden,
                            .intermediate = intermediate,
                            .experts = experts,
                            .max_top_k = top_k},
                           partial_combine);
  };
  EXPECT_EQ(choice(1, 2048, 768, 128, 8), Transfer::direct);
  EXPECT_EQ(choice(2, 2048, 768, 128, 8), Transfer::once);  // five rows for eight results
  EXPECT_EQ(choice(4, 2048, 768, 128, 8), Transfer::partial_combine);
  EXPECT_EQ(choice(8, 2048, 768, 128, 8), Transfer::partial_combine);
  EXPECT_EQ(choice(4, 2048, 768, 128, 2), Transfer::direct);   // hardly any sums
  EXPECT_EQ(choice(4, 7168, 2048, 256, 8), Transfer::direct);  // GEMMs take longer
  // Few tokens save less than sums cost.
  EXPECT_EQ(choice(4, 2048, 768, 128, 8, true, 4096), Transfer::partial_combine);
  EXPECT_EQ(choice(4, 2048, 768, 128, 8, true, 2048), Transfer::once);
  // Unless it is asked for, no owner adds up.
  for (std::int32_t const ranks : {1, 2, 4, 8}) {
    for (std::int32_t const top_k : {1, 2, 4, 8}) {
      EXPECT_NE(choice(ranks, 2048, 768, 128, top_k, false), Transfer::partial_combine);
    }
  }
}

// Rows and results of a token that cross, as the mean over all that it may choose, an expert more than once.
struct Across {
  double rows = 0, results = 0;
};
Across across(ExchangeShape const& shape) {
  std::int64_t const experts = shape.experts;
  std::int64_t routings = 1;
  for (std::int32_t k = 0; k < shape.max_top_k; ++k) routings *= experts;
  Across sum;
  for (std::int64_t routing = 0; routing < routings; ++routing) {
    std::set<std::int32_t> owners, sums;
    for (std::int64_t rest = routing, k = 0; k < shape.max_top_k; ++k, rest /= experts) {
      auto const e = static_cast<std::int32_t>(rest % experts);
      std::int32_t const owner = shape.owner(e);
      if (owner == 0) continue;  // the token's rank
      owners.insert(owner);
      bool const is_added = e - owner * shape.local_experts() < shape.partial_experts();
      if (!is_added || sums.insert(owner).second) ++sum.results;
    }
    sum.rows += static_cast<double>(owners.size());
  }
  return {sum.rows / static_cast<double>(routings), sum.results / static_cast<double>(routings)};
}

TEST(Transfers, CountsWhatCrosses) {
  for (std::int32_t const ranks : {1, 2, 4, 8}) {
    for (std::int32_t const local : {1, 3, 4}) {
      for (std::int32_t const top_k : {1, 2, 3}) {
        ExchangeShape shape = {.ranks = ranks,
                               .experts = ranks * local,
                               .max_top_k = top_k,
                               .transfer = Transfer::partial_combine};
        Across const counted = across(shape);
        EXPECT_NEAR(rows_across(shape, Transfer::partial_combine), counted.rows, 1e-9);
        EXPECT_NEAR(results_across(shape), counted.results, 1e-9);
        // Nothing is added up: every pair has a result.
        shape.transfer = Transfer::once;
        EXPECT_NEAR(results_across(shape), across(shape).results, 1e-9);
        EXPECT_NEAR(results_across(shape), rows_across(shape, Transfer::direct), 1e-9);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::expert_parallel
