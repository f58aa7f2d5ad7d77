// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd of MXFP8 operands from its own sources, in several schedules: sorted_rows_mxfp8.hpp says how.
#include <gtest/gtest.h>

#include "cuda/kernels/down_projection_fwd_mxfp8.cuh"
#include "cuda/tuning/mxfp8.hpp"
#include "tests/emulator/sm100/sorted_rows_mxfp8.hpp"

namespace tessera::cuda {
namespace {

using emulator::Shape;

struct DownMx {
  static std::int64_t columns(Shape const& s) { return s.hidden; }
  static std::int64_t k(Shape const& s) { return s.intermediate; }
  template <class Config>
  static cudaError_t launch(Shape const& s, emulator::ExpertRows const& rows,
                            emulator::MxMatrix const& a, emulator::MxMatrix const& w,
                            emulator::Bits* d, std::int32_t* counter, int ctas) {
    DownProjectionFwdMxfp8Arguments args = {};
    args.gmem_a = a.codes();
    args.gmem_a_scales = a.scales();
    args.gmem_expert_offsets = rows.offsets();
    args.gmem_w_down = w.codes();
    args.gmem_w_down_scales = w.scales();
    args.gmem_y = d;
    args.rows = rows.all();
    args.hidden = s.hidden;
    args.intermediate = s.intermediate;
    args.experts = rows.experts();
    args.gmem_tile_counter = counter;
    return launch_down_projection_fwd_mxfp8_config<Config>(args, ctas, nullptr);
  }
};

// By one CTA, and by pairs: tiles of 128 and of 256 rows.
using One = DownProjectionFwdMxfp8Config<1>;
using Pair = DownProjectionFwdMxfp8Config<2>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<emulator::SortedRowsMx<DownMx>, Configs...>(shape);
}

TEST(DownProjectionFwdMxfp8, AllRowsToOneExpert) {
  expect_right<One, Pair>(emulator::mx_one_expert());
}

// More k_tiles in all than the ring has stages, several tiles for each CTA or pair.
TEST(DownProjectionFwdMxfp8, RingAndAccumulatorsTurn) {
  expect_right<One>({.rows = {130, 1}, .hidden = 256, .intermediate = 256, .ctas = 1});
}
TEST(DownProjectionFwdMxfp8, RingAndAccumulatorsTurnInPairs) {
  expect_right<Pair>({.rows = {130, 260}, .hidden = 256, .intermediate = 384, .ctas = 1});
}

TEST(DownProjectionFwdMxfp8, ExpertsOfAnyRows) { expect_right<One, Pair>(emulator::mx_any_rows()); }

TEST(DownProjectionFwdMxfp8, NoRows) { expect_right<One, Pair>(emulator::mx_no_rows()); }

TEST(DownProjectionFwdMxfp8, PairsWithoutAnExpert) {
  expect_right<One, Pair>({.rows = {3, 130}, .hidden = 256, .intermediate = 128, .other_rows = 40});
}

TEST(DownProjectionFwdMxfp8, RefusesPartsOfATile) {
  emulator::expect_parts_of_a_tile_refused<emulator::SortedRowsMx<DownMx>, One>();
}

TEST(DownProjectionFwdMxfp8, RandomShapes) {
  emulator::check_at_random<emulator::SortedRowsMx<DownMx>, One, Pair>(emulator::kMxAtRandom);
}

}  // namespace
}  // namespace tessera::cuda
