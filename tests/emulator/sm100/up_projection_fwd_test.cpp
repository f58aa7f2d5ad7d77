// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of sm_100a from its own sources, in several schedules: h bit for bit rows times columns in the
// order of k, and within its rounding of fp64; a the activation of that h. What no expert has, nobody writes.
#include <gtest/gtest.h>

#include "tests/emulator/sm100/up_projection_fwd.hpp"

namespace tessera::cuda {
namespace {

constexpr ActivationKind kKind = ActivationKind::swiglu;

using One = UpProjectionFwdSm100<kKind, Major::kK>;
using Pair = UpProjectionFwdSm100Pair<kKind, Major::kK>;
using Gathered = UpProjectionFwdSm100Gathered<kKind, Major::kK>;
using GatheredPair = UpProjectionFwdSm100GatheredPair<kKind, Major::kK>;
using OneRowsMajor = UpProjectionFwdSm100<kKind, Major::kRows>;
using PairRowsMajor = UpProjectionFwdSm100Pair<kKind, Major::kRows>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<Up, Configs...>(shape);
}

// Two groups of gate and up columns in a tile and half of one, whose last columns do not exist.
TEST(UpProjectionFwdSm100, ExpertsOfAnyRows) {
  Shape const shape{.rows = {0, 1, 64, 127, 0, 129}, .hidden = 136, .intermediate = 136};
  expect_right<One, Pair>(shape);
}

// Ten tiles of nine k_tiles for two CTAs; rows past an expert's end repeat its last one, or are not brought.
TEST(UpProjectionFwdSm100, GathersRows) {
  expect_right<Gathered>({.rows = {0, 1, 65, 129}, .hidden = 520, .intermediate = 136});
}

// The same by pairs, whose relays report rows to CTA 0; CTA 1 of some has none.
TEST(UpProjectionFwdSm100, GathersRowsInPairs) {
  expect_right<GatheredPair>({.rows = {0, 1, 65, 300}, .hidden = 520, .intermediate = 136});
}

TEST(UpProjectionFwdSm100, WithoutH) {
  Shape const shape{.rows = {0, 200}, .hidden = 72, .intermediate = 64, .stores_h = false};
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionFwdSm100, HAlone) {
  Shape const shape{.rows = {0, 200}, .hidden = 72, .intermediate = 136, .stores_a = false};
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionFwdSm100, PairsWithoutAnExpert) {
  Shape const shape{.rows = {3, 70}, .hidden = 64, .intermediate = 72, .other_rows = 9};
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionFwdSm100, WeightsInRowsMajorOrder) {
  Shape const shape{.rows = {9, 150}, .hidden = 136, .intermediate = 128, .ctas = 1};
  expect_right<OneRowsMajor, PairRowsMajor>(shape);
}

TEST(UpProjectionFwdSm100, AddsTheBiasesOfTheExpert) {
  Shape const shape{.rows = {40, 0, 129}, .hidden = 72, .intermediate = 200, .bias = true};
  expect_right<One, Pair>(shape);
}

// Kernels that gather take rows in the order of experts as well: without an index.
TEST(UpProjectionFwdSm100, GathersRowsInTheirOrder) {
  Shape const shape{.rows = {9, 0, 130}, .hidden = 136, .intermediate = 72, .gathers = false};
  expect_right<Gathered, GatheredPair>(shape);
}

// What it does not serve it refuses.
TEST(UpProjectionFwdSm100, RefusesWhatItDoesNotServe) {
  std::int32_t const index[1] = {};
  UpProjectionFwdArguments args = {};
  args.gmem_gather_index = index;
  EXPECT_EQ(launch_up_projection_fwd_sm100<One>(args, 1, nullptr), cudaErrorInvalidValue);
  args = {};
  args.activation.kind = kKind;
  args.interleaved = true;
  EXPECT_EQ(launch_up_projection_fwd_sm100<One>(args, 1, nullptr), cudaErrorInvalidValue);
  args = {};
  EXPECT_EQ(launch_up_projection_fwd_sm100<One>(args, 1, nullptr), cudaErrorInvalidValue)
      << "nothing to store";
}

TEST(UpProjectionFwdSm100, RandomShapes) {
  emulator::check_at_random<Up, One, Pair, Gathered, GatheredPair, OneRowsMajor, PairRowsMajor>();
}

}  // namespace
}  // namespace tessera::cuda
