// SPDX-License-Identifier: Apache-2.0
// Layers of different shape on one Context, from several threads, do not disturb each other.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

TEST(Concurrency, LayersOfDifferentShapeShareAContext) {
  Context const context = value_of(Context::create({.num_threads = 3}));
  std::vector<MoeDesc> descs;
  for (int i = 0; i < 4; ++i) {
    MoeDesc desc = small_desc(i % 2 == 0 ? RouterKind::topk_softmax : RouterKind::given);
    desc.shape = {.tokens = 50 + 40 * i,
                  .hidden = 16 + 8 * i,
                  .intermediate = 8 + 4 * i,
                  .experts = 4 + i,
                  .top_k = 1 + i % 3};
    descs.push_back(desc);
  }
  std::vector<std::unique_ptr<Layer>> alone, together;
  for (std::size_t i = 0; i < descs.size(); ++i) {
    alone.push_back(std::make_unique<Layer>(context, descs[i], static_cast<unsigned>(i)));
    together.push_back(std::make_unique<Layer>(context, descs[i], static_cast<unsigned>(i)));
    ASSERT_TRUE(alone[i]->run_forward().ok());
    ASSERT_TRUE(alone[i]->run_backward().ok());
  }
  std::vector<std::thread> threads;
  for (auto& layer : together) {
    threads.emplace_back([&layer] {
      for (int round = 0; round < 20; ++round) {
        if (!layer->run_forward().ok() || !layer->run_backward().ok()) layer->o.clear();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (std::size_t i = 0; i < descs.size(); ++i) {
    EXPECT_EQ(alone[i]->o, together[i]->o) << i;
    EXPECT_EQ(alone[i]->dx, together[i]->dx) << i;
    EXPECT_EQ(alone[i]->dw_up, together[i]->dw_up) << i;
  }
}

}  // namespace
}  // namespace tessera::api_test
