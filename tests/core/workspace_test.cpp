// SPDX-License-Identifier: Apache-2.0
#include "core/workspace.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace tessera::core {
namespace {

TEST(WorkspacePlan, NeedsNothingForNothing) { EXPECT_EQ(WorkspacePlan().bytes(), 0u); }

TEST(WorkspacePlan, KeepsRegionsApartAndAlignedAtAnyAddress) {
  WorkspacePlan plan;
  auto const first = plan.add<float>(3);
  auto const second = plan.add<std::int32_t>(100);
  auto const third = plan.add<double>(1);
  std::vector<std::byte> memory(plan.bytes() + 256);
  for (std::size_t shift = 0; shift < 256; ++shift) {
    std::byte* const base = WorkspacePlan::align(memory.data() + shift);
    auto const address = [&](auto region) {
      return reinterpret_cast<std::uintptr_t>(region.in(base));
    };
    // Rows of a GPU's tiles are whole lines of its L2 wherever a row is.
    EXPECT_EQ(address(first) % 256, 0u);
    EXPECT_EQ(address(second) % 256, 0u);
    EXPECT_EQ(address(third) % 256, 0u);
    EXPECT_GE(address(first), reinterpret_cast<std::uintptr_t>(memory.data() + shift));
    EXPECT_GE(address(second), address(first) + 3 * sizeof(float));
    EXPECT_GE(address(third), address(second) + 100 * sizeof(std::int32_t));
    EXPECT_LE(address(third) + sizeof(double),
              reinterpret_cast<std::uintptr_t>(memory.data() + shift) + plan.bytes());
  }
}

}  // namespace
}  // namespace tessera::core
