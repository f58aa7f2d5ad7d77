// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of e4m3 operands, from the source that GPUs get: the bits of e4m3_sorted_rows.hpp, whose k is
// both halves of dh.
#include <gtest/gtest.h>

#include <vector>

#include "cuda/kernels/up_projection_dgrad_e4m3.cuh"
#include "cuda/tuning/low_precision.hpp"
#include "tests/emulator/e4m3_sorted_rows.hpp"
#include "tests/emulator/emulator.hpp"

namespace tessera::cuda {
namespace {

UpProjectionDgradE4m3Arguments arguments(emulator::SortedRowsE4m3 const& p, std::int64_t d,
                                         std::int64_t n, emulator::Bits* gmem_dx_rows) {
  UpProjectionDgradE4m3Arguments args = {};
  args.gmem_dh = p.a();
  args.gmem_dh_scales = p.a_scales();
  args.gmem_expert_offsets = p.offsets();
  args.gmem_w_up_t = p.w();
  args.gmem_w_up_t_scales = p.w_scales();
  args.gmem_dx_rows = gmem_dx_rows;
  args.rows = p.capacity();
  args.hidden = d;
  args.intermediate = n;
  args.experts = p.experts();
  args.gmem_tile_counter = p.counter();
  return args;
}

void check(std::vector<int> const& rows, std::int64_t d, std::int64_t n,
           std::vector<emulator::Schedule> const& schedules) {
  emulator::SortedRowsE4m3 const p(rows, d, 2 * n);
  for (emulator::Schedule const& schedule : schedules) {
    ASSERT_NO_FATAL_FAILURE(p.check(
        [&](emulator::Bits* gmem_dx_rows) {
          return launch_up_projection_dgrad_e4m3_config<UpProjectionDgradE4m3Config>(
              arguments(p, d, n, gmem_dx_rows), 2, nullptr);
        },
        schedule))
        << schedule.seed;
  }
}

TEST(UpProjectionDgradE4m3, ShortRows) {
  check({65, 0, 129, 1, 64}, 512, 128,
        {{.seed = 1}, {.seed = 2, .burst = 64}, {.seed = 3, .copies = 256}});
}

TEST(UpProjectionDgradE4m3, LongRows) { check({70, 3, 150}, 256, 384, {{.seed = 4}}); }

TEST(UpProjectionDgradE4m3, HalvesOfATile) { check({65, 0, 3}, 384, 128, {{.seed = 5}}); }

TEST(UpProjectionDgradE4m3, RefusesPartsOfABlock) {
  UpProjectionDgradE4m3Arguments args = {};
  args.hidden = 256;
  args.intermediate = 192;
  EXPECT_EQ(launch_up_projection_dgrad_e4m3_config<UpProjectionDgradE4m3Config>(args, 2, nullptr),
            cudaErrorInvalidValue);
  args.hidden = 320;
  args.intermediate = 128;
  EXPECT_EQ(launch_up_projection_dgrad_e4m3_config<UpProjectionDgradE4m3Config>(args, 2, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace tessera::cuda
