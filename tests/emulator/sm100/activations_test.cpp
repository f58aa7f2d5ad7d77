// SPDX-License-Identifier: Apache-2.0
// Kernels of sm_100a with every activation: bit for bit the activation's function of sums in the order of k, and within
// its error of the oracle in fp64. swiglu has more tests in up_projection_fwd_test.cpp and
// down_projection_dgrad_test.cpp.
#include <gtest/gtest.h>

#include "tests/emulator/sm100/down_projection_dgrad.hpp"
#include "tests/emulator/sm100/up_projection_fwd.hpp"

namespace tessera::cuda {
namespace {

// Every activation: gated ones beside swiglu, whose up_offset counts in clamped swiglu alone, and those with one half,
// whose columns fill a tile and begin another.
template <ActivationKind kOther>
void expect_right_up() {
  using GatheredOther = UpProjectionFwdSm100Gathered<kOther, Major::kK>;
  using GatheredPairOther = UpProjectionFwdSm100GatheredPair<kOther, Major::kK>;
  using GatheredRowsMajor = UpProjectionFwdSm100Gathered<kOther, Major::kRows>;
  Shape const shape{.rows = {0, 130, 1}, .hidden = 72, .intermediate = 328, .other_rows = 3};
  Shape const biased{.rows = {260}, .hidden = 64, .intermediate = 64, .bias = true};
  SCOPED_TRACE(static_cast<int>(kOther));
  emulator::check<Up, GatheredOther>(shape, emulator::kSchedules[0]);
  emulator::check<Up, GatheredRowsMajor>(shape, emulator::kSchedules[1]);
  emulator::check<Up, GatheredPairOther>(biased, emulator::kSchedules[0]);
}

TEST(UpProjectionFwdSm100, GatedActivations) {
  using enum ActivationKind;
  expect_right_up<geglu>();
  expect_right_up<geglu_erf>();
  expect_right_up<reglu>();
  expect_right_up<clamped_swiglu>();
}

TEST(UpProjectionFwdSm100, ActivationsWithoutAGate) {
  using enum ActivationKind;
  expect_right_up<relu>();
  expect_right_up<relu2>();
  expect_right_up<silu>();
  expect_right_up<gelu>();
  expect_right_up<gelu_erf>();
}

// Every activation beside swiglu, by one CTA and by a pair.
template <ActivationKind kOther>
void expect_right_down() {
  using OneOther = DownProjectionDgradSm100<kOther, Major::kRows>;
  using PairOther = DownProjectionDgradSm100Pair<kOther, Major::kRows>;
  bool const gated = Activation{.kind = kOther}.gated();
  Shape const shape{.rows = {0, 130, 1}, .hidden = 72, .intermediate = 136, .gated = gated};
  SCOPED_TRACE(static_cast<int>(kOther));
  emulator::check<DownDgrad, OneOther>(shape, emulator::kSchedules[0]);
  emulator::check<DownDgrad, PairOther>(shape, emulator::kSchedules[1]);
}

TEST(DownProjectionDgradSm100, GatedActivations) {
  using enum ActivationKind;
  expect_right_down<geglu>();
  expect_right_down<geglu_erf>();
  expect_right_down<reglu>();
  expect_right_down<clamped_swiglu>();
}

TEST(DownProjectionDgradSm100, ActivationsWithoutAGate) {
  using enum ActivationKind;
  expect_right_down<relu>();
  expect_right_down<relu2>();
  expect_right_down<silu>();
  expect_right_down<gelu>();
  expect_right_down<gelu_erf>();
}

}  // namespace
}  // namespace tessera::cuda
