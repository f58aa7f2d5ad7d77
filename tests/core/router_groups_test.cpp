// SPDX-License-Identifier: Apache-2.0
#include "core/router_groups.hpp"

#include <gtest/gtest.h>

namespace tessera::core {
namespace {

// What stands in the comment of router_groups(), by hand.
TEST(RouterGroups, FollowFromExpertsAndChoices) {
  struct Case {
    std::int64_t experts, top_k, groups, top_groups;
  };
  for (Case const& c : {Case{8, 3, 4, 2}, Case{10, 2, 5, 3}, Case{10, 7, 5, 4}, Case{256, 8, 8, 4},
                        Case{7, 2, 1, 1}, Case{4, 4, 2, 2}, Case{6, 1, 3, 2}, Case{14, 2, 7, 4}}) {
    MoeDesc desc;
    desc.shape.experts = c.experts;
    desc.shape.top_k = c.top_k;
    EXPECT_EQ(router_groups(desc).groups, c.groups) << c.experts;
    EXPECT_EQ(router_groups(desc).top_groups, c.top_groups) << c.experts;
  }
}

TEST(RouterGroups, AreWhatIsAskedFor) {
  MoeDesc desc;
  desc.shape.experts = 16;
  desc.shape.top_k = 2;
  desc.router.groups = 2;
  EXPECT_EQ(router_groups(desc).groups, 2);
  EXPECT_EQ(router_groups(desc).top_groups, 1);
  desc.router.top_groups = 2;
  EXPECT_EQ(router_groups(desc).top_groups, 2);
}

}  // namespace
}  // namespace tessera::core
