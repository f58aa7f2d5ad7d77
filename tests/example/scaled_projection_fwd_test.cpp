// SPDX-License-Identifier: Apache-2.0
// The kernel to copy, run on a CPU from the source that GPUs get: y bit for bit, under several schedules.
#include "tests/example/scaled_projection_fwd.cuh"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/tuning/gemm.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/lent_sums.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda::example {
namespace {

using emulator::Bits;
using emulator::Memory;

constexpr Bits kUnwritten = 0xffff;  // what Memory begins as
// A tile of rows behind those of the experts, which nobody may write.
constexpr std::int64_t kRowsBehind = 128;

struct Shape {
  std::vector<int> rows;  // of each expert
  int hidden, intermediate, ctas;
  bool has_bias;
};

// What is wrong, or nothing.
std::string run(Shape const& s, emulator::Schedule const& schedule) {
  std::int64_t const d = s.hidden, n = s.intermediate;
  int const experts = static_cast<int>(s.rows.size());
  Memory<std::int32_t> offsets(experts + 1), counter(1, 0);
  offsets[0] = 0;
  for (int e = 0; e < experts; ++e) {
    offsets[e + 1] = offsets[e] + s.rows[static_cast<std::size_t>(e)];
  }
  std::int64_t const rows = offsets[experts];
  Memory<Bits> a((rows + kRowsBehind) * n), w_down(experts * d * n), b_down(experts * d),
      y((rows + kRowsBehind) * d);
  Memory<float> scale(experts);
  emulator::fill(a.get(), rows * n, 1, 1.0f);
  emulator::fill(w_down.get(), experts * d * n, 2, 0.25f);
  emulator::fill(b_down.get(), experts * d, 3, 1.0f);
  for (int e = 0; e < experts; ++e) scale[e] = 0.3f + 1.1f * static_cast<float>(e);

  DownProjectionFwdArguments args = {};
  args.gmem_a = a.get();
  args.gmem_expert_offsets = offsets.get();
  args.w_down = {.gmem = w_down.get(),
                 .expert_stride = d * n,
                 .row_stride = n,
                 .column_stride = 1,
                 .block = d};
  if (s.has_bias) {
    args.b_down = {
        .gmem = b_down.get(), .expert_stride = d, .row_stride = 1, .column_stride = 0, .block = d};
  }
  args.gmem_y = y.get();
  args.rows = rows + kRowsBehind;
  args.hidden = d;
  args.intermediate = n;
  args.experts = experts;
  args.gmem_tile_counter = counter.get();
  using Config = DownProjectionFwdWide<gemm::Major::kK>;
  EXPECT_EQ(launch_scaled_projection_fwd_config<Config>(args, scale.get(), s.ctas, nullptr),
            cudaSuccess);
  std::string const fault = emulator::run(schedule);
  if (!fault.empty()) return fault;

  int expert = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    while (r >= offsets[expert + 1]) ++expert;
    for (std::int64_t i = 0; i < d; ++i) {
      float const product =
          emulator::dot(&a[r * n], &w_down[(expert * d + i) * n], s.intermediate) * scale[expert];
      float const bias = s.has_bias ? emulator::widen(b_down[expert * d + i]) : 0.0f;
      if (y[r * d + i] == emulator::round(s.has_bias ? product + bias : product)) continue;
      return "row " + std::to_string(r) + " column " + std::to_string(i);
    }
  }
  for (std::int64_t i = rows * d; i < (rows + kRowsBehind) * d; ++i) {
    if (y[i] != kUnwritten) return "row " + std::to_string(i / d) + " is no expert's, but written";
  }
  return counter[0] == 0 ? "" : "the tile counter is left";
}

constexpr emulator::Schedule kSchedules[] = {
    {.seed = 1}, {.seed = 2, .burst = 64}, {.seed = 4, .burst = 8, .copies = 2, .lazy = 0.5}};

void expect_right(Shape const& shape) {
  for (emulator::Schedule const& schedule : kSchedules) {
    EXPECT_EQ(run(shape, schedule), "") << "seed " << schedule.seed;
  }
}

// An empty expert, blocks that are not full, a second tile of few columns.
TEST(ScaledProjectionFwd, ScalesTheRowsOfEachExpertByItsOwn) {
  expect_right(
      {.rows = {70, 0, 129, 1}, .hidden = 264, .intermediate = 72, .ctas = 2, .has_bias = false});
}

TEST(ScaledProjectionFwd, AddsTheBiasBehindTheScale) {
  expect_right({.rows = {9, 130}, .hidden = 136, .intermediate = 520, .ctas = 1, .has_bias = true});
}

// The epilogue alone, with sums that lie in memory.
TEST(ScaledStore, TakesSumsFromAnywhere) {
  gemm::StoreParams store = {};
  float const scale[2] = {9.0f, 0.375f};
  ScaledStoreParams const p = {.store = store, .gmem_scale = scale};
  EXPECT_EQ(emulator::stored<ScaledStore>(p, store, scale[1]), "");
}

}  // namespace
}  // namespace tessera::cuda::example
