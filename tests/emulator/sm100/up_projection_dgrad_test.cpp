// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of sm_100a from its own sources, in several schedules: bit for bit rows times columns in the
// order of k, gate half before up half, and within its rounding of fp64. Rows that no expert has, and what lies behind
// them, nobody writes.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels/up_projection_dgrad_sm100.cuh"
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
  bool gated = true;
};

class UpDgrad {
 public:
  explicit UpDgrad(Shape const& s) : s_(s) {
    for (std::size_t e = 0; e < s.rows.size(); ++e) offsets_.push_back(offsets_.back() + s.rows[e]);
    emulator::fill(dh_.get(), static_cast<std::int64_t>(dh_.size()), 1, 1.0f);
    emulator::fill(w_.get(), static_cast<std::int64_t>(w_.size()), 2, 0.25f);
  }

  UpProjectionDgradArguments arguments(bool rows_major) {
    std::int64_t const d = s_.hidden, n = s_.intermediate, k = reduced(s_);
    UpProjectionDgradArguments args = {};
    args.gmem_dh = dh_.get();
    args.gmem_expert_offsets = offsets_.data();
    for (int half = 0; half < (s_.gated ? 2 : 1); ++half) {
      args.w_up[half] = {.gmem = &w_[half * n * (rows_major ? d : 1)],
                         .expert_stride = d * k,
                         .row_stride = rows_major ? d : 1,
                         .column_stride = rows_major ? 1 : k,
                         .block = n};
    }
    args.gated = s_.gated;
    args.gmem_dx_rows = dx_.get();
    args.rows = rows();
    args.hidden = d;
    args.intermediate = n;
    args.experts = static_cast<std::int32_t>(s_.rows.size());
    args.gmem_tile_counter = counter_.get();
    return args;
  }

  template <class Config>
  cudaError_t launch(UpProjectionDgradArguments const& args) {
    return launch_up_projection_dgrad_sm100<Config>(args, s_.ctas * Config::gemm.cluster_m(),
                                                    nullptr);
  }

  std::string compare(bool rows_major) const {
    int const d = s_.hidden, k = reduced(s_);
    std::size_t expert = 0;
    for (int r = 0; r < rows(); ++r) {
      while (expert < s_.rows.size() && r >= offsets_[expert + 1]) ++expert;
      for (int i = 0; i < d; ++i) {
        Bits const dx = dx_[std::int64_t{r} * d + i];
        std::string const where = "row " + std::to_string(r) + " column " + std::to_string(i);
        if (expert == s_.rows.size()) {
          if (dx != kPoison) return where + " was written";
          continue;
        }
        auto const e = static_cast<std::int64_t>(expert);
        Bits const* const w = &w_[e * d * k + (rows_major ? i : std::int64_t{i} * k)];
        std::int64_t const step = rows_major ? d : 1;
        Bits const* const dh = &dh_[std::int64_t{r} * k];
        if (dx != emulator::round(emulator::dot(dh, w, k, step))) return where + ", not its bits";
        double sum = 0, size = 0;
        for (int j = 0; j < k; ++j) {
          double const product = double{emulator::widen(dh[j])} * emulator::widen(w[j * step]);
          sum += product;
          size += std::fabs(product);
        }
        // Half a bf16 of the result, and an fp32 rounding for each addition.
        double const allowed = std::fabs(sum) * 0x1p-8 + size * k * 0x1p-24;
        if (!(std::fabs(emulator::widen(dx) - sum) <= allowed)) return where + ", not that of fp64";
      }
    }
    for (std::int64_t i = std::int64_t{rows()} * d; i < static_cast<std::int64_t>(dx_.size());
         ++i) {
      if (dx_[i] != kPoison) return "something was written behind the last row";
    }
    return counter_[0] == 0 ? "" : "the tile counter is left at " + std::to_string(counter_[0]);
  }

 private:
  static constexpr Bits kPoison = 0xffff;
  static int reduced(Shape const& s) { return (s.gated ? 2 : 1) * s.intermediate; }
  static std::int64_t all_rows(Shape const& s) {
    std::int64_t all = s.other_rows;
    for (int const rows : s.rows) all += rows;
    return all;
  }
  int rows() const { return offsets_.back() + s_.other_rows; }

  Shape s_;
  std::vector<std::int32_t> offsets_{0};
  Memory<Bits> dh_{all_rows(s_) * reduced(s_)},
      w_{std::int64_t{s_.hidden} * reduced(s_) * static_cast<std::int64_t>(s_.rows.size())};
  Memory<Bits> dx_{(all_rows(s_) + 64) * s_.hidden};
  Memory<std::int32_t> counter_{1, 0};
};

constexpr emulator::Schedule kSchedules[] = {{.seed = 1},
                                             {.seed = 2, .burst = 64},
                                             {.seed = 3, .copies = 256},
                                             {.seed = 4, .burst = 8, .copies = 2, .lazy = 0.5}};

template <class Config>
void expect_right(Shape const& shape, emulator::Schedule const& schedule) {
  bool const rows_major = Config::gemm.b.major == Major::kRows;
  UpDgrad dgrad(shape);
  ASSERT_EQ(dgrad.launch<Config>(dgrad.arguments(rows_major)), cudaSuccess);
  ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
  ASSERT_EQ(dgrad.compare(rows_major), "") << "seed " << schedule.seed;
}
template <class Config>
void expect_right(Shape const& shape) {
  for (emulator::Schedule const& schedule : kSchedules) {
    ASSERT_NO_FATAL_FAILURE(expect_right<Config>(shape, schedule));
  }
}

// By one CTA, and by pairs: tiles of 128 and of 256 rows. Rows-major is w_up as it is usually stored.
using One = UpProjectionDgradSm100<Major::kRows>;
using Pair = UpProjectionDgradSm100Pair<Major::kRows>;
using OneKMajor = UpProjectionDgradSm100<Major::kK>;
using PairKMajor = UpProjectionDgradSm100Pair<Major::kK>;

// Ten k_tiles, more than the ring has stages, of which each half ends inside one; enough tiles for both accumulators.
TEST(UpProjectionDgradSm100, RingAndAccumulatorsTurn) {
  expect_right<One>({.rows = {130, 1}, .hidden = 520, .intermediate = 264});
}
TEST(UpProjectionDgradSm100, RingAndAccumulatorsTurnInPairs) {
  expect_right<Pair>({.rows = {130, 1, 300}, .hidden = 264, .intermediate = 264});
}

TEST(UpProjectionDgradSm100, ExpertsOfAnyRows) {
  Shape const shape{.rows = {0, 1, 127, 129, 0}, .hidden = 72, .intermediate = 64, .ctas = 3};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(UpProjectionDgradSm100, AllRowsToOneExpert) {
  Shape const shape{.rows = {0, 0, 257, 0}, .hidden = 136, .intermediate = 72, .ctas = 1};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(UpProjectionDgradSm100, NoRows) {
  Shape shape{.rows = {0, 0}, .hidden = 64, .intermediate = 64};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
  shape.other_rows = 5;
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(UpProjectionDgradSm100, PairsWithoutAnExpert) {
  Shape const shape{.rows = {3, 130}, .hidden = 72, .intermediate = 136, .other_rows = 40};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

// One half of k; w_up[1] has no memory, and nothing is loaded from it.
TEST(UpProjectionDgradSm100, WithoutAGate) {
  Shape const shape{.rows = {5, 130}, .hidden = 136, .intermediate = 136, .gated = false};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(UpProjectionDgradSm100, WeightsInKMajorOrder) {
  Shape const ragged{.rows = {9, 150}, .hidden = 328, .intermediate = 136, .ctas = 3};
  expect_right<OneKMajor>(ragged);
  expect_right<PairKMajor>(ragged);
  Shape const whole{.rows = {70}, .hidden = 256, .intermediate = 64, .ctas = 1};
  expect_right<OneKMajor>(whole);
  expect_right<PairKMajor>(whole);
}

// What the router adds is not computed: a call that asks for it must not get a dx without it.
TEST(UpProjectionDgradSm100, RefusesTheRoutersPart) {
  UpDgrad dgrad({.rows = {3}, .hidden = 64, .intermediate = 64});
  UpProjectionDgradArguments args = dgrad.arguments(true);
  float const dlogits[3] = {1, 2, 3};
  args.gmem_row_dlogits = dlogits;
  EXPECT_EQ(dgrad.launch<One>(args), cudaErrorInvalidValue);
  EXPECT_EQ(dgrad.launch<Pair>(args), cudaErrorInvalidValue);
}

// Any experts, sizes and schedules.
TEST(UpProjectionDgradSm100, RandomShapes) {
  std::mt19937 rng(12);
  auto const draw = [&](unsigned below) { return static_cast<int>(rng() % below); };
  for (int i = 0; i < 25; ++i) {
    Shape shape{.rows = {}, .hidden = 8 * (1 + draw(36)), .intermediate = 8 * (1 + draw(18))};
    for (int e = draw(5); e >= 0; --e) shape.rows.push_back(draw(3) == 0 ? 0 : draw(200));
    shape.ctas = 1 + draw(3);
    shape.other_rows = draw(2) * draw(70);
    shape.gated = draw(3) != 0;
    emulator::Schedule const schedule{
        .seed = rng(), .burst = 1 << draw(7), .copies = 2 << draw(8), .lazy = draw(2) * 0.5};
    SCOPED_TRACE(std::to_string(i) + ": d " + std::to_string(shape.hidden) + ", n " +
                 std::to_string(shape.intermediate));
    ASSERT_NO_FATAL_FAILURE(expect_right<One>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<Pair>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<OneKMajor>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<PairKMajor>(shape, schedule));
  }
}

}  // namespace
}  // namespace tessera::cuda
