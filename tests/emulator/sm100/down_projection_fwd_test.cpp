// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd of sm_100a from its own sources, in several schedules: bit for bit rows times columns in the
// order of k, and within its rounding of fp64. Rows that no expert has, and what lies behind them, nobody writes.
#include <gtest/gtest.h>

#include <string>

#include "cuda/kernels/down_projection_fwd_sm100.cuh"
#include "tests/emulator/sm100/projection.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::kPoison;
using emulator::Memory;
using emulator::Shape;
using gemm::Major;

class Down {
 public:
  explicit Down(Shape const& s) : s_(s), rows_(s) {
    emulator::fill(a_.get(), static_cast<std::int64_t>(a_.size()), 1, 1.0f);
    emulator::fill(w_.get(), static_cast<std::int64_t>(w_.size()), 2, 0.25f);
    emulator::fill(bias_.get(), static_cast<std::int64_t>(bias_.size()), 3, 1.0f);
  }

  template <class Config>
  cudaError_t launch() {
    bool const k_major = Config::gemm.b.major == Major::kK;
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    DownProjectionFwdArguments args = {};
    args.gmem_a = a_.get();
    args.gmem_expert_offsets = rows_.offsets();
    args.w_down = {.gmem = w_.get(),
                   .expert_stride = d * n,
                   .row_stride = k_major ? n : 1,
                   .column_stride = k_major ? 1 : d,
                   .block = d};
    if (s_.bias) {
      args.b_down = {.gmem = bias_.get(), .expert_stride = d, .row_stride = 1, .block = d};
    }
    args.gmem_y = y_.get();
    args.rows = rows_.all();
    args.hidden = d;
    args.intermediate = n;
    args.experts = rows_.experts();
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return launch_down_projection_fwd_sm100<Config>(args, ctas, nullptr);
  }

  std::string compare(bool k_major) const {
    int const d = s_.hidden, n = s_.intermediate;
    for (int r = 0; r < rows_.all(); ++r) {
      std::int64_t const e = rows_.expert_of(r);
      for (int i = 0; i < d; ++i) {
        Bits const y = y_[std::int64_t{r} * d + i];
        if (e == rows_.experts()) {
          if (y != kPoison) return emulator::place(r, i) + " was written";
          continue;
        }
        emulator::Sum const sum{.a = &a_[std::int64_t{r} * n],
                                .b = &w_[e * d * n + (k_major ? std::int64_t{i} * n : i)],
                                .count = n,
                                .b_step = k_major ? 1 : d,
                                .bias = s_.bias ? emulator::widen(bias_[e * d + i]) : 0.0f};
        if (y != sum.rounded()) return emulator::place(r, i) + ", not its bits";
        if (!sum.agrees_with_fp64()) return emulator::place(r, i) + ", not that of fp64";
      }
    }
    for (std::int64_t i = std::int64_t{rows_.all()} * d; i < static_cast<std::int64_t>(y_.size());
         ++i) {
      if (y_[i] != kPoison) return "something was written behind the last row";
    }
    return emulator::counter_fault(counter_[0]);
  }

 private:
  Shape s_;
  emulator::ExpertRows rows_;
  std::int64_t all_ = rows_.all(), experts_ = rows_.experts();
  Memory<Bits> a_{all_ * s_.intermediate}, w_{experts_ * s_.hidden * s_.intermediate},
      bias_{experts_ * s_.hidden};
  Memory<Bits> y_{(all_ + 64) * s_.hidden};
  Memory<std::int32_t> counter_{1, 0};
};

// By one CTA, and by pairs: tiles of 128 and of 256 rows.
using One = DownProjectionFwdSm100<Major::kK>;
using Pair = DownProjectionFwdSm100Pair<Major::kK>;
using OneRowsMajor = DownProjectionFwdSm100<Major::kRows>;
using PairRowsMajor = DownProjectionFwdSm100Pair<Major::kRows>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<Down, Configs...>(shape);
}

// Nine k_tiles, more than the ring has stages, and nine tiles for two CTAs, eight for two pairs, so that both
// accumulators are used twice.
TEST(DownProjectionFwdSm100, RingAndAccumulatorsTurn) {
  expect_right<One>({.rows = {130, 1}, .hidden = 520, .intermediate = 520});
}
TEST(DownProjectionFwdSm100, RingAndAccumulatorsTurnInPairs) {
  expect_right<Pair>({.rows = {130, 1, 300}, .hidden = 264, .intermediate = 520});
}

// The last block of an expert is halved in units of 64 rows, so that CTA 1 of a pair may have none.
TEST(DownProjectionFwdSm100, ExpertsOfAnyRows) {
  Shape const shape{
      .rows = {0, 1, 64, 0, 127, 129, 300, 0}, .hidden = 72, .intermediate = 64, .ctas = 3};
  expect_right<One, Pair>(shape);
}

TEST(DownProjectionFwdSm100, AllRowsToOneExpert) {
  Shape const shape{.rows = {0, 0, 257, 0}, .hidden = 136, .intermediate = 72, .ctas = 1};
  expect_right<One, Pair>(shape);
}

TEST(DownProjectionFwdSm100, NoRows) {
  Shape shape{.rows = {0, 0}, .hidden = 64, .intermediate = 64};
  expect_right<One, Pair>(shape);
  shape.other_rows = 5;
  expect_right<One, Pair>(shape);
}

TEST(DownProjectionFwdSm100, PairsWithoutAnExpert) {
  Shape const shape{.rows = {3, 130}, .hidden = 264, .intermediate = 136, .other_rows = 40};
  expect_right<One, Pair>(shape);
}

TEST(DownProjectionFwdSm100, WeightsInRowsMajorOrder) {
  Shape const ragged{.rows = {9, 150}, .hidden = 328, .intermediate = 136, .ctas = 3};
  expect_right<OneRowsMajor, PairRowsMajor>(ragged);
  Shape const whole{.rows = {70}, .hidden = 256, .intermediate = 64, .ctas = 1};
  expect_right<OneRowsMajor, PairRowsMajor>(whole);
}

TEST(DownProjectionFwdSm100, AddsTheBiasOfTheExpert) {
  Shape const shape{.rows = {40, 0, 129}, .hidden = 328, .intermediate = 72, .bias = true};
  expect_right<One, Pair>(shape);
}

TEST(DownProjectionFwdSm100, RandomShapes) {
  emulator::check_at_random<Down, One, Pair, OneRowsMajor, PairRowsMajor>();
}

}  // namespace
}  // namespace tessera::cuda
