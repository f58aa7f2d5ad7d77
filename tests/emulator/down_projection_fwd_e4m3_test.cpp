// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd of e4m3 operands, from the source that GPUs get: the bits of e4m3_sorted_rows.hpp.
#include <gtest/gtest.h>

#include <vector>

#include "cuda/kernels/down_projection_fwd_e4m3.cuh"
#include "cuda/tuning/low_precision.hpp"
#include "tests/emulator/e4m3_sorted_rows.hpp"
#include "tests/emulator/emulator.hpp"

namespace tessera::cuda {
namespace {

void check(std::vector<int> const& rows, std::int64_t d, std::int64_t n,
           std::vector<emulator::Schedule> const& schedules) {
  emulator::SortedRowsE4m3 const p(rows, d, n);
  for (emulator::Schedule const& schedule : schedules) {
    ASSERT_NO_FATAL_FAILURE(p.check(
        [&](emulator::Bits* gmem_y) {
          DownProjectionFwdE4m3Arguments args = {};
          args.gmem_a = p.a();
          args.gmem_a_scales = p.a_scales();
          args.gmem_expert_offsets = p.offsets();
          args.gmem_w_down = p.w();
          args.gmem_w_down_scales = p.w_scales();
          args.gmem_y = gmem_y;
          args.rows = p.capacity();
          args.hidden = d;
          args.intermediate = n;
          args.experts = p.experts();
          args.gmem_tile_counter = p.counter();
          return launch_down_projection_fwd_e4m3_config<DownProjectionFwdE4m3Config>(args, 2,
                                                                                     nullptr);
        },
        schedule))
        << schedule.seed;
  }
}

// Fewer k_tiles than half of the pieces, and more; tiles without rows, of 1, 64 and 65 rows; several n_tiles.
TEST(DownProjectionFwdE4m3, ShortRows) {
  check({65, 0, 129, 1, 64}, 512, 128,
        {{.seed = 1}, {.seed = 2, .burst = 64}, {.seed = 3, .copies = 256}});
}

TEST(DownProjectionFwdE4m3, LongRows) {
  check({70, 3, 150}, 256, 768, {{.seed = 4}});
  check({130}, 256, 1024, {{.seed = 5}});
}

// The last tile has one block of 128 columns, or is the only one.
TEST(DownProjectionFwdE4m3, HalvesOfATile) {
  check({65, 0, 3}, 384, 256, {{.seed = 6}});
  check({66, 1}, 128, 128, {{.seed = 7}});
}

TEST(DownProjectionFwdE4m3, RefusesPartsOfABlock) {
  DownProjectionFwdE4m3Arguments args = {};
  args.hidden = 320;
  args.intermediate = 128;
  EXPECT_EQ(launch_down_projection_fwd_e4m3_config<DownProjectionFwdE4m3Config>(args, 2, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera::cuda
