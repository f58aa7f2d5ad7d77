// SPDX-License-Identifier: Apache-2.0
// Tensors of ranks of several hosts, and the fixture of tests of their rails.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "expert_parallel/transport/engine.hpp"
#include "tests/expert_parallel/host_ranks.hpp"

namespace tessera::expert_parallel::hosts {

inline std::vector<Bits> draw(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<Bits> values(static_cast<std::size_t>(count));
  for (Bits& value : values) value = core::round_to<core::Bf16>(normal(random)).bits;
  return values;
}

enum class Routing : std::uint8_t { random, skewed, one_expert, sentinels };

inline Problem make_problem(std::int32_t hosts, std::int32_t ranks,
                            std::vector<std::int64_t> tokens, Routing routing,
                            std::int32_t top_k = 3) {
  Problem p = {
      .hosts = hosts, .ranks = ranks, .tokens = std::move(tokens), .experts = 12, .top_k = top_k};
  std::mt19937 random(static_cast<unsigned>(hosts * 100 + ranks));
  for (std::int64_t const count : p.tokens) p.begins.push_back(p.begins.back() + count);
  p.max_tokens = *std::max_element(p.tokens.begin(), p.tokens.end()) + 1;
  std::int64_t const all = p.begins.back();
  std::uniform_real_distribution<float> uniform;
  for (std::int64_t i = 0; i < all * top_k; ++i) {
    float const u = uniform(random);
    auto id = static_cast<std::int32_t>(12 * (routing == Routing::skewed ? u * u * u : u));
    if (routing == Routing::one_expert) id = i % top_k == 0 ? 11 : -1;
    if (routing == Routing::sentinels && u < 0.4f) id = i % 2 == 0 ? -7 : 12;
    p.ids.push_back(id);
    p.scores.push_back(id < 0 || id >= 12 ? std::numeric_limits<float>::quiet_NaN()
                                          : uniform(random));
  }
  p.x = draw(all * p.hidden, random);
  p.d_o = draw(all * p.hidden, random);
  p.w_up = draw(p.experts * 2 * p.intermediate * p.hidden, random);
  p.w_down = draw(p.experts * p.intermediate * p.hidden, random);
  return p;
}

class HostsTest : public testing::Test {
 protected:
  void SetUp() override {
    nccl.tells = false;
    nccl.failing_group = 0;
    nccl.wrong = nccl.aborted = 0;
  }
  void TearDown() override {
    EXPECT_EQ(nccl.wrong, 0) << "a message of another length than awaited";
    EXPECT_EQ(nccl.communicators, 0) << "left behind";
  }
  [[nodiscard]] static Expected<std::unique_ptr<Rail>> open(HostPlace const& place,
                                                            NcclUniqueId const& id,
                                                            double time_limit = 20) {
    return Rail::open({.place = place,
                       .time_limit = time_limit,
                       .id = id,
                       .nccl_path = FAKE_NCCL_PATH,
                       .nccl_nvls_enable = "0"},
                      kDevice, kStream);
  }
  /// Opens the rails of two hosts of one rank.
  static void open_two(std::unique_ptr<Rail> (&rails)[2], double time_limit = 20) {
    NcclUniqueId const id = make_id();
    std::thread joining([&] { rails[1] = open({1, 2, 0}, id, time_limit).value(); });
    rails[0] = open({0, 2, 0}, id, time_limit).value();
    joining.join();
  }
  [[nodiscard]] static NcclUniqueId make_id() {
    auto const id = make_unique_id({.nccl_path = FAKE_NCCL_PATH, .nccl_nvls_enable = "0"});
    EXPECT_TRUE(id.ok()) << id.status().text();
    return id.value();
  }

  FakeMessages& nccl = messages_of_nccl();
};

}  // namespace tessera::expert_parallel::hosts
