// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd of sm_100a from its own sources, in several schedules: bit for bit rows times columns in the
// order of k, and within its rounding of fp64. Rows that no expert has, and what lies behind them, nobody writes.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels/down_projection_fwd_sm100.cuh"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::Memory;
using gemm::Major;

struct Shape {
  std::vector<int> rows;  // of each expert
  int hidden, intermediate;
  int ctas = 2;
  int other_rows = 0;  // behind those of the experts: pairs without an expert
  bool bias = false;
};

class Down {
 public:
  explicit Down(Shape const& s) : s_(s) {
    for (std::size_t e = 0; e < s.rows.size(); ++e) offsets_.push_back(offsets_.back() + s.rows[e]);
    emulator::fill(a_.get(), static_cast<std::int64_t>(a_.size()), 1, 1.0f);
    emulator::fill(w_.get(), static_cast<std::int64_t>(w_.size()), 2, 0.25f);
    emulator::fill(bias_.get(), static_cast<std::int64_t>(bias_.size()), 3, 1.0f);
  }

  template <class Config>
  void launch() {
    bool const k_major = Config::gemm.b.major == Major::kK;
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    DownProjectionFwdArguments args = {};
    args.gmem_a = a_.get();
    args.gmem_expert_offsets = offsets_.data();
    args.w_down = {.gmem = w_.get(),
                   .expert_stride = d * n,
                   .row_stride = k_major ? n : 1,
                   .column_stride = k_major ? 1 : d,
                   .block = d};
    if (s_.bias) {
      args.b_down = {.gmem = bias_.get(), .expert_stride = d, .row_stride = 1, .block = d};
    }
    args.gmem_y = y_.get();
    args.rows = rows();
    args.hidden = d;
    args.intermediate = n;
    args.experts = static_cast<std::int32_t>(s_.rows.size());
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    ASSERT_EQ(launch_down_projection_fwd_sm100<Config>(args, ctas, nullptr), cudaSuccess);
  }

  std::string compare(bool k_major) const {
    int const d = s_.hidden, n = s_.intermediate;
    std::size_t expert = 0;
    for (int r = 0; r < rows(); ++r) {
      while (expert < s_.rows.size() && r >= offsets_[expert + 1]) ++expert;
      for (int i = 0; i < d; ++i) {
        Bits const y = y_[std::int64_t{r} * d + i];
        std::string const where = "row " + std::to_string(r) + " column " + std::to_string(i);
        if (expert == s_.rows.size()) {
          if (y != kPoison) return where + " was written";
          continue;
        }
        auto const e = static_cast<std::int64_t>(expert);
        Bits const* const w = &w_[e * d * n + (k_major ? std::int64_t{i} * n : i)];
        std::int64_t const step = k_major ? 1 : d;
        Bits const* const a = &a_[std::int64_t{r} * n];
        float const b = s_.bias ? emulator::widen(bias_[e * d + i]) : 0.0f;
        if (y != emulator::round(emulator::dot(a, w, n, step) + b)) return where + ", not its bits";
        double sum = b, size = std::fabs(b);
        for (int k = 0; k < n; ++k) {
          double const product = double{emulator::widen(a[k])} * emulator::widen(w[k * step]);
          sum += product;
          size += std::fabs(product);
        }
        // Half a bf16 of the result, and an fp32 rounding for each addition.
        double const allowed = std::fabs(sum) * 0x1p-8 + size * n * 0x1p-24;
        if (!(std::fabs(emulator::widen(y) - sum) <= allowed)) return where + ", not that of fp64";
      }
    }
    for (std::int64_t i = std::int64_t{rows()} * d; i < static_cast<std::int64_t>(y_.size()); ++i) {
      if (y_[i] != kPoison) return "something was written behind the last row";
    }
    return counter_[0] == 0 ? "" : "the tile counter is left at " + std::to_string(counter_[0]);
  }

 private:
  static constexpr Bits kPoison = 0xffff;
  int rows() const { return offsets_.back() + s_.other_rows; }
  std::int64_t matrices() const {
    return std::int64_t{s_.hidden} * s_.intermediate * static_cast<std::int64_t>(s_.rows.size());
  }
  static int sum(std::vector<int> const& values) {
    int all = 0;
    for (int const value : values) all += value;
    return all;
  }

  Shape s_;
  std::vector<std::int32_t> offsets_{0};
  Memory<Bits> a_{std::int64_t{sum(s_.rows) + s_.other_rows} * s_.intermediate}, w_{matrices()},
      bias_{std::int64_t{s_.hidden} * static_cast<std::int64_t>(s_.rows.size())};
  Memory<Bits> y_{std::int64_t{sum(s_.rows) + s_.other_rows + 64} * s_.hidden};
  Memory<std::int32_t> counter_{1, 0};
};

constexpr emulator::Schedule kSchedules[] = {{.seed = 1},
                                             {.seed = 2, .burst = 64},
                                             {.seed = 3, .copies = 256},
                                             {.seed = 4, .burst = 8, .copies = 2, .lazy = 0.5}};

template <class Config>
void expect_right(Shape const& shape, emulator::Schedule const& schedule) {
  Down down(shape);
  down.launch<Config>();
  ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
  ASSERT_EQ(down.compare(Config::gemm.b.major == Major::kK), "") << "seed " << schedule.seed;
}
template <class Config>
void expect_right(Shape const& shape) {
  for (emulator::Schedule const& schedule : kSchedules) {
    ASSERT_NO_FATAL_FAILURE(expect_right<Config>(shape, schedule));
  }
}

// By one CTA, and by pairs: tiles of 128 and of 256 rows.
using One = DownProjectionFwdSm100<Major::kK>;
using Pair = DownProjectionFwdSm100Pair<Major::kK>;
using OneRowsMajor = DownProjectionFwdSm100<Major::kRows>;
using PairRowsMajor = DownProjectionFwdSm100Pair<Major::kRows>;

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
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(DownProjectionFwdSm100, AllRowsToOneExpert) {
  Shape const shape{.rows = {0, 0, 257, 0}, .hidden = 136, .intermediate = 72, .ctas = 1};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(DownProjectionFwdSm100, NoRows) {
  Shape shape{.rows = {0, 0}, .hidden = 64, .intermediate = 64};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
  shape.other_rows = 5;
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(DownProjectionFwdSm100, PairsWithoutAnExpert) {
  Shape const shape{.rows = {3, 130}, .hidden = 264, .intermediate = 136, .other_rows = 40};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(DownProjectionFwdSm100, WeightsInRowsMajorOrder) {
  Shape const ragged{.rows = {9, 150}, .hidden = 328, .intermediate = 136, .ctas = 3};
  expect_right<OneRowsMajor>(ragged);
  expect_right<PairRowsMajor>(ragged);
  Shape const whole{.rows = {70}, .hidden = 256, .intermediate = 64, .ctas = 1};
  expect_right<OneRowsMajor>(whole);
  expect_right<PairRowsMajor>(whole);
}

TEST(DownProjectionFwdSm100, AddsTheBiasOfTheExpert) {
  Shape const shape{.rows = {40, 0, 129}, .hidden = 328, .intermediate = 72, .bias = true};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

// Any experts, sizes and schedules.
TEST(DownProjectionFwdSm100, RandomShapes) {
  std::mt19937 rng(11);
  auto const draw = [&](unsigned below) { return static_cast<int>(rng() % below); };
  for (int i = 0; i < 25; ++i) {
    Shape shape{.rows = {}, .hidden = 8 * (1 + draw(36)), .intermediate = 8 * (1 + draw(24))};
    for (int e = draw(5); e >= 0; --e) shape.rows.push_back(draw(3) == 0 ? 0 : draw(200));
    shape.ctas = 1 + draw(3);
    shape.other_rows = draw(2) * draw(70);
    shape.bias = draw(2) != 0;
    emulator::Schedule const schedule{
        .seed = rng(), .burst = 1 << draw(7), .copies = 2 << draw(8), .lazy = draw(2) * 0.5};
    SCOPED_TRACE(std::to_string(i) + ": d " + std::to_string(shape.hidden) + ", n " +
                 std::to_string(shape.intermediate));
    ASSERT_NO_FATAL_FAILURE(expect_right<One>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<Pair>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<OneRowsMajor>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<PairRowsMajor>(shape, schedule));
  }
}

}  // namespace
}  // namespace tessera::cuda
