// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad of sm_100a from its own sources, in several schedules: dh, a' and the partial sums of ds bit
// for bit the activation's gradient of sums in the order of k, and within their roundings of fp64. What no expert has,
// nobody writes.
#include <gtest/gtest.h>

#include "tests/emulator/sm100/down_projection_dgrad.hpp"

namespace tessera::cuda {
namespace {

// Rows-major is w_down as it is usually stored.
using One = DownProjectionDgradSm100<ActivationKind::swiglu, Major::kRows>;
using OneKMajor = DownProjectionDgradSm100<ActivationKind::swiglu, Major::kK>;
using Pair = DownProjectionDgradSm100Pair<ActivationKind::swiglu, Major::kRows>;
using PairKMajor = DownProjectionDgradSm100Pair<ActivationKind::swiglu, Major::kK>;
using OneUngated = DownProjectionDgradSm100<ActivationKind::silu, Major::kRows>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<DownDgrad, Configs...>(shape);
}

// Nine k_tiles, three times the ring; two tiles of four blocks and one of one, so that buffers of h, accumulators and
// their parities turn.
TEST(DownProjectionDgradSm100, RingAndBuffersTurn) {
  expect_right<One>({.rows = {130, 1}, .hidden = 520, .intermediate = 520});
}

TEST(DownProjectionDgradSm100, RingAndBuffersTurnInPairs) {
  expect_right<Pair>({.rows = {130, 1, 300}, .hidden = 328, .intermediate = 264});
}

TEST(DownProjectionDgradSm100, ExpertsOfAnyRows) {
  expect_right<One, Pair>(
      {.rows = {0, 1, 64, 0, 127, 129, 0}, .hidden = 72, .intermediate = 136, .ctas = 3});
}

TEST(DownProjectionDgradSm100, AllRowsToOneExpert) {
  expect_right<One, Pair>({.rows = {0, 0, 257}, .hidden = 136, .intermediate = 72, .ctas = 1});
}

TEST(DownProjectionDgradSm100, NoRows) {
  Shape shape{.rows = {0, 0}, .hidden = 64, .intermediate = 64};
  expect_right<One>(shape);
  shape.other_rows = 5;
  expect_right<One>(shape);
}

TEST(DownProjectionDgradSm100, PairsWithoutAnExpert) {
  expect_right<One>({.rows = {3, 130}, .hidden = 72, .intermediate = 200, .other_rows = 40});
}

TEST(DownProjectionDgradSm100, RowsInTheOrderOfExperts) {
  expect_right<One>({.rows = {9, 70}, .hidden = 136, .intermediate = 64, .gathers = false});
}

TEST(DownProjectionDgradSm100, WithoutScaledA) {
  expect_right<One>({.rows = {40, 129}, .hidden = 64, .intermediate = 320, .stores_a = false});
}

TEST(DownProjectionDgradSm100, WithoutAGate) {
  expect_right<OneUngated>({.rows = {5, 130}, .hidden = 136, .intermediate = 328, .gated = false});
}

TEST(DownProjectionDgradSm100, WeightsInKMajorOrder) {
  expect_right<OneKMajor, PairKMajor>(
      {.rows = {9, 150}, .hidden = 72, .intermediate = 328, .ctas = 3});
  expect_right<OneKMajor>({.rows = {70}, .hidden = 64, .intermediate = 256, .ctas = 1});
}

TEST(DownProjectionDgradSm100, RefusesInterleavedColumns) {
  DownDgrad dgrad({.rows = {3}, .hidden = 64, .intermediate = 64});
  EXPECT_EQ(dgrad.launch<One>(true), cudaErrorInvalidValue);
}

TEST(DownProjectionDgradSm100, RandomShapes) {
  emulator::check_at_random<DownDgrad, One, Pair, OneKMajor, PairKMajor>({.gated = true});
  emulator::check_at_random<DownDgrad, OneUngated>({.gated = false});
}

}  // namespace
}  // namespace tessera::cuda
