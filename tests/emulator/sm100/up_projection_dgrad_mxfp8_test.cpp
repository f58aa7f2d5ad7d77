// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of MXFP8 operands from its own sources, in several schedules: sorted_rows_mxfp8.hpp says how.
#include <gtest/gtest.h>

#include "cuda/kernels/up_projection_dgrad_mxfp8.cuh"
#include "cuda/tuning/mxfp8.hpp"
#include "tests/emulator/sm100/sorted_rows_mxfp8.hpp"

namespace tessera::cuda {
namespace {

using emulator::Shape;

struct UpDgradMx {
  static std::int64_t columns(Shape const& s) { return s.hidden; }
  static std::int64_t k(Shape const& s) { return 2 * s.intermediate; }
  template <class Config>
  static cudaError_t launch(Shape const& s, emulator::ExpertRows const& rows,
                            emulator::MxMatrix const& a, emulator::MxMatrix const& w,
                            emulator::Bits* d, std::int32_t* counter, int ctas) {
    UpProjectionDgradMxfp8Arguments args = {};
    args.gmem_dh = a.codes();
    args.gmem_dh_scales = a.scales();
    args.gmem_expert_offsets = rows.offsets();
    args.gmem_w_up_t = w.codes();
    args.gmem_w_up_t_scales = w.scales();
    args.gmem_dx_rows = d;
    args.rows = rows.all();
    args.hidden = s.hidden;
    args.intermediate = s.intermediate;
    args.experts = rows.experts();
    args.gmem_tile_counter = counter;
    return launch_up_projection_dgrad_mxfp8_config<Config>(args, ctas, nullptr);
  }
};

// By one CTA, and by pairs: tiles of 128 and of 256 rows.
using One = UpProjectionDgradMxfp8Config<1>;
using Pair = UpProjectionDgradMxfp8Config<2>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<emulator::SortedRowsMx<UpDgradMx>, Configs...>(shape);
}

TEST(UpProjectionDgradMxfp8, AllRowsToOneExpert) {
  expect_right<One, Pair>(emulator::mx_one_expert());
}

// More k_tiles in all than the ring has stages, several tiles for each CTA or pair.
TEST(UpProjectionDgradMxfp8, RingAndAccumulatorsTurn) {
  expect_right<One>({.rows = {130, 1}, .hidden = 256, .intermediate = 256, .ctas = 1});
}
TEST(UpProjectionDgradMxfp8, RingAndAccumulatorsTurnInPairs) {
  expect_right<Pair>({.rows = {130, 260}, .hidden = 256, .intermediate = 384, .ctas = 1});
}

TEST(UpProjectionDgradMxfp8, ExpertsOfAnyRows) { expect_right<One, Pair>(emulator::mx_any_rows()); }

TEST(UpProjectionDgradMxfp8, NoRows) { expect_right<One, Pair>(emulator::mx_no_rows()); }

TEST(UpProjectionDgradMxfp8, PairsWithoutAnExpert) {
  expect_right<One, Pair>({.rows = {3, 130}, .hidden = 256, .intermediate = 128, .other_rows = 40});
}

TEST(UpProjectionDgradMxfp8, RefusesPartsOfATile) {
  emulator::expect_parts_of_a_tile_refused<emulator::SortedRowsMx<UpDgradMx>, One>();
}

TEST(UpProjectionDgradMxfp8, RandomShapes) {
  emulator::check_at_random<emulator::SortedRowsMx<UpDgradMx>, One, Pair>(emulator::kMxAtRandom);
}

}  // namespace
}  // namespace tessera::cuda
