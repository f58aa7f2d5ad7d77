// SPDX-License-Identifier: Apache-2.0
// What kernels may ask of a rank. Emulated kernels (tests/emulator) test that they reach each other's windows, the
// model of the protocol how they would do so without addresses.
#include <gtest/gtest.h>

#include <type_traits>

#include "expert_parallel/transport/windows.hpp"

namespace tessera::expert_parallel {
namespace {

template <OtherWay kWay, bool kAddressed>
concept Compiles = requires { typename std::bool_constant<has_way(kWay, kAddressed)>; };

TEST(Windows, AKernelThatNeedsAnAddressDoesNotCompileWithoutOne) {
  EXPECT_TRUE((Compiles<OtherWay::kSent, true>));
  EXPECT_TRUE((Compiles<OtherWay::kStaged, true>));
  EXPECT_FALSE((Compiles<OtherWay::kSent, false>));
  EXPECT_FALSE((Compiles<OtherWay::kStaged, false>));
}

TEST(Windows, ArePassedToKernelsByValue) {
  EXPECT_TRUE(std::is_trivially_copyable_v<Windows>);
  EXPECT_EQ(sizeof(Windows), kMaxRanks * sizeof(char*));
}

}  // namespace
}  // namespace tessera::expert_parallel
