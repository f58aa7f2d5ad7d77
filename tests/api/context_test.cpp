// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

TEST(Context, ReportsItsThreads) {
  EXPECT_EQ(value_of(Context::create({.num_threads = 3})).num_threads(), 3);
  EXPECT_GE(value_of(Context::create()).num_threads(), 1);
}

TEST(Context, RefusesWhatItCannotHave) {
  EXPECT_EQ(Context::create({.num_threads = -1}).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(Context::create({.num_threads = 100000}).status().code(), StatusCode::invalid_argument);
  // One more than any machine has, so that this holds with and without GPUs.
  Status const no_device = Context::create({.device = {DeviceKind::cuda, 1000}}).status();
  EXPECT_EQ(no_device.code(), StatusCode::environment);
  EXPECT_NE(std::string(no_device.text()).find("cuda:1000"), std::string::npos);
  EXPECT_EQ(Context::create({.device = {static_cast<DeviceKind>(5), 0}}).status().code(),
            StatusCode::invalid_argument);
}

TEST(Context, SharesItsThreads) {
  Context const context = value_of(Context::create({.num_threads = 2}));
  std::vector<std::atomic<int>> runs(100);
  context.parallel_for(100, [&](std::int64_t i) { ++runs[static_cast<std::size_t>(i)]; });
  for (auto const& run : runs) EXPECT_EQ(run.load(), 1);
}

TEST(Context, CanBeMoved) {
  Context first = value_of(Context::create({.num_threads = 2}));
  Context second = std::move(first);
  EXPECT_EQ(second.num_threads(), 2);
}

TEST(Backends, NameTheCpuAndWhyCudaIsMissing) {
  auto const all = value_of(backends());
  ASSERT_EQ(all.size(), 2u);
  EXPECT_STREQ(all[0].name, "cpu");
  EXPECT_TRUE(all[0].available);
  EXPECT_STREQ(all[1].name, "cuda");
  EXPECT_FALSE(all[1].detail.empty());
}

TEST(CheckDeviceValues, FindsNothingOnTheCpu) {
  EXPECT_TRUE(check_device_values(value_of(Context::create({.num_threads = 1}))).ok());
}

TEST(Explain, ListsEveryOpWithOneChoice) {
  Context const context = value_of(Context::create({.num_threads = 1}));
  MoeDesc desc = small_desc(RouterKind::topk_softmax);
  auto const names = [&](Pass pass) {
    std::vector<std::string> out;
    for (auto const& op : value_of(explain(context, desc, pass))) {
      int chosen = 0;
      for (auto const& candidate : op.candidates) {
        chosen += candidate.chosen ? 1 : 0;
        EXPECT_FALSE(candidate.reason.empty());
      }
      EXPECT_EQ(chosen, 1) << op.op;
      EXPECT_EQ(op.flops > 0, op.op != "router_dlogits") << op.op;  // counts no GEMM
      EXPECT_GT(op.bytes, 0);
      out.push_back(op.op);
    }
    return out;
  };
  EXPECT_EQ(names(Pass::forward), (std::vector<std::string>{"route", "up_projection_fwd",
                                                            "down_projection_fwd", "aggregate"}));
  std::vector<std::string> const input = {"down_projection_dgrad", "router_dlogits", "router_dgrad",
                                          "up_projection_dgrad", "aggregate"};
  std::vector<std::string> const weights = {"down_projection_wgrad", "up_projection_wgrad",
                                            "router_wgrad"};
  auto both = input;
  both.insert(both.end(), weights.begin(), weights.end());
  EXPECT_EQ(names(Pass::backward_input), input);
  EXPECT_EQ(names(Pass::backward_weights), weights);
  EXPECT_EQ(names(Pass::backward), both);
  desc = small_desc();
  desc.save = SavePolicy::x;
  EXPECT_EQ(names(Pass::backward_input),
            (std::vector<std::string>{"up_projection_fwd", "down_projection_dgrad",
                                      "up_projection_dgrad", "aggregate"}));
  MoeDesc bad = desc;
  bad.shape.experts = 0;
  EXPECT_FALSE(explain(context, bad, Pass::forward).ok());
}

}  // namespace
}  // namespace tessera::api_test
