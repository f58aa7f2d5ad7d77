// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of sm_100a from its own sources, in several schedules: h bit for bit rows times columns in the
// order of k, and within its rounding of fp64; a the activation of that h. What no expert has, nobody writes.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernels/up_projection_fwd_sm100.cuh"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::Memory;
using gemm::Major;

constexpr ActivationKind kKind = ActivationKind::swiglu;
constexpr Bits kPoison = 0xffff;

struct Shape {
  std::vector<int> rows;  // of each expert
  int hidden, intermediate;
  int ctas = 2;
  int other_rows = 0;  // behind those of the experts: pairs without an expert
  bool bias = false;
  bool stores_h = true;
};

class Up {
 public:
  explicit Up(Shape const& s) : s_(s) {
    for (std::size_t e = 0; e < s.rows.size(); ++e) offsets_.push_back(offsets_.back() + s.rows[e]);
    for (std::int64_t r = 0; r < all_; ++r) {
      index_[r] = static_cast<std::int32_t>((7 * r + 3) % all_);
    }
    emulator::fill(x_.get(), static_cast<std::int64_t>(x_.size()), 1, 1.0f);
    emulator::fill(w_.get(), static_cast<std::int64_t>(w_.size()), 2, 0.25f);
    emulator::fill(bias_.get(), static_cast<std::int64_t>(bias_.size()), 3, 1.0f);
  }

  template <class Config>
  void launch() {
    bool const k_major = Config::gemm.b.major == Major::kK;
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    UpProjectionFwdArguments args = {};
    gathers_ = Config::gemm.gathers();
    args.x = {.gmem = x_.get(), .rows = rows(), .pitch = d};
    if (gathers_) args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = offsets_.data();
    for (int half = 0; half < 2; ++half) {
      args.w_up[half] = {.gmem = w_.get() + half * n * d,
                         .expert_stride = 2 * n * d,
                         .row_stride = k_major ? d : 1,
                         .column_stride = k_major ? 1 : n,
                         .block = n};
      if (!s_.bias) continue;
      args.b_up[half] = {
          .gmem = bias_.get() + half * n, .expert_stride = 2 * n, .row_stride = 1, .block = n};
    }
    args.activation = {.kind = kKind};
    args.gmem_h = s_.stores_h ? h_.get() : nullptr;
    args.gmem_a = a_.get();
    args.rows = rows();
    args.hidden = d;
    args.intermediate = n;
    args.experts = static_cast<std::int32_t>(s_.rows.size());
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    ASSERT_EQ(launch_up_projection_fwd_sm100<Config>(args, ctas, nullptr), cudaSuccess);
  }

  std::string compare(bool k_major) const {
    int const n = s_.intermediate;
    std::size_t expert = 0;
    for (int r = 0; r < rows(); ++r) {
      while (expert < s_.rows.size() && r >= offsets_[expert + 1]) ++expert;
      for (int i = 0; i < n; ++i) {
        std::string const where = "row " + std::to_string(r) + " column " + std::to_string(i);
        Bits const a = a_[std::int64_t{r} * n + i];
        Bits const stored[2] = {h_[std::int64_t{r} * 2 * n + i],
                                h_[std::int64_t{r} * 2 * n + n + i]};
        if (expert == s_.rows.size()) {
          if (a != kPoison || stored[0] != kPoison || stored[1] != kPoison) {
            return where + " was written";
          }
          continue;
        }
        float h[2];
        for (int half = 0; half < 2; ++half) {
          Bits rounded = 0;
          std::string const wrong = product(r, static_cast<int>(expert), half, i, k_major, rounded);
          if (!wrong.empty()) return where + wrong;
          if (stored[half] != (s_.stores_h ? rounded : kPoison))
            return where + ", h has other bits";
          h[half] = emulator::widen(rounded);
        }
        float const wanted = gemm::ActivationFunction<kKind>::forward({.kind = kKind}, h[0], h[1]);
        if (a != emulator::round(wanted)) return where + ", a has other bits";
        // A rounding to bf16, and the relative error of tanh.approx, 2^-11, ahead of a sum that may cancel.
        double const product = double{h[0]} * h[1];
        double const exact = product / (1 + std::exp(-double{h[0]}));
        double const allowed = std::fabs(exact) * 0x1p-8 + std::fabs(product) * 0x1p-11;
        if (!(std::fabs(emulator::widen(a) - exact) <= allowed)) {
          return where + ", a is not that of fp64";
        }
      }
    }
    return counter_[0] == 0 ? "" : "the tile counter is left at " + std::to_string(counter_[0]);
  }

 private:
  int rows() const { return offsets_.back() + s_.other_rows; }
  static int sum(std::vector<int> const& values) {
    int all = 0;
    for (int const value : values) all += value;
    return all;
  }
  // The h of a row, and whether fp64 agrees with it.
  std::string product(int row, int expert, int half, int column, bool k_major,
                      Bits& rounded) const {
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    Bits const* const w = &w_[(std::int64_t{2} * expert + half) * n * d +
                              (k_major ? column * d : std::int64_t{column})];
    std::int64_t const step = k_major ? 1 : n;
    Bits const* const x = &x_[(gathers_ ? index_[row] : row) * d];
    float const b =
        s_.bias ? emulator::widen(bias_[(std::int64_t{2} * expert + half) * n + column]) : 0.0f;
    rounded = emulator::round(emulator::dot(x, w, s_.hidden, step) + b);
    double sum = b, size = std::fabs(b);
    for (int k = 0; k < s_.hidden; ++k) {
      double const one = double{emulator::widen(x[k])} * emulator::widen(w[k * step]);
      sum += one;
      size += std::fabs(one);
    }
    double const allowed = std::fabs(sum) * 0x1p-8 + size * s_.hidden * 0x1p-24;
    return std::fabs(emulator::widen(rounded) - sum) <= allowed ? "" : ", h is not that of fp64";
  }

  Shape s_;
  std::vector<std::int32_t> offsets_{0};
  std::int64_t all_ = sum(s_.rows) + s_.other_rows,
               matrices_ =
                   std::int64_t{2} * static_cast<std::int64_t>(s_.rows.size()) * s_.intermediate;
  Memory<Bits> x_{all_ * s_.hidden}, w_{matrices_ * s_.hidden}, bias_{matrices_};
  Memory<Bits> h_{all_ * 2 * s_.intermediate}, a_{all_ * s_.intermediate};
  Memory<std::int32_t> index_{all_};  // row -> row of x, in another order
  Memory<std::int32_t> counter_{1, 0};
  bool gathers_ = false;
};

constexpr emulator::Schedule kSchedules[] = {{.seed = 1},
                                             {.seed = 2, .burst = 64},
                                             {.seed = 3, .copies = 256},
                                             {.seed = 4, .burst = 8, .copies = 2, .lazy = 0.5}};

template <class Config>
void expect_right(Shape const& shape, emulator::Schedule const& schedule) {
  Up up(shape);
  up.launch<Config>();
  ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
  ASSERT_EQ(up.compare(Config::gemm.b.major == Major::kK), "") << "seed " << schedule.seed;
}
template <class Config>
void expect_right(Shape const& shape) {
  for (emulator::Schedule const& schedule : kSchedules) {
    ASSERT_NO_FATAL_FAILURE(expect_right<Config>(shape, schedule));
  }
}

using One = UpProjectionFwdSm100<kKind, Major::kK>;
using Pair = UpProjectionFwdSm100Pair<kKind, Major::kK>;
using Gathered = UpProjectionFwdSm100Gathered<kKind, Major::kK>;
using OneRowsMajor = UpProjectionFwdSm100<kKind, Major::kRows>;
using PairRowsMajor = UpProjectionFwdSm100Pair<kKind, Major::kRows>;

// Two groups of gate and up columns in a tile and half of one, whose last columns do not exist.
TEST(UpProjectionFwdSm100, ExpertsOfAnyRows) {
  Shape const shape{.rows = {0, 1, 64, 127, 0, 129}, .hidden = 136, .intermediate = 136};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

// Ten tiles of nine k_tiles for two CTAs; rows past an expert's end repeat its last one, or are not brought.
TEST(UpProjectionFwdSm100, GathersRows) {
  expect_right<Gathered>({.rows = {0, 1, 65, 129}, .hidden = 520, .intermediate = 136});
}

TEST(UpProjectionFwdSm100, WithoutH) {
  Shape const shape{.rows = {0, 200}, .hidden = 72, .intermediate = 64, .stores_h = false};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(UpProjectionFwdSm100, PairsWithoutAnExpert) {
  Shape const shape{.rows = {3, 70}, .hidden = 64, .intermediate = 72, .other_rows = 9};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

TEST(UpProjectionFwdSm100, WeightsInRowsMajorOrder) {
  Shape const shape{.rows = {9, 150}, .hidden = 136, .intermediate = 128, .ctas = 1};
  expect_right<OneRowsMajor>(shape);
  expect_right<PairRowsMajor>(shape);
}

TEST(UpProjectionFwdSm100, AddsTheBiasesOfTheExpert) {
  Shape const shape{.rows = {40, 0, 129}, .hidden = 72, .intermediate = 200, .bias = true};
  expect_right<One>(shape);
  expect_right<Pair>(shape);
}

// What it does not serve it refuses.
TEST(UpProjectionFwdSm100, RefusesGatheredRowsAndInterleavedColumns) {
  std::int32_t const index[1] = {};
  UpProjectionFwdArguments args = {};
  args.gmem_gather_index = index;
  EXPECT_EQ(launch_up_projection_fwd_sm100<One>(args, 1, nullptr), cudaErrorInvalidValue);
  args = {};
  args.interleaved = true;
  EXPECT_EQ(launch_up_projection_fwd_sm100<One>(args, 1, nullptr), cudaErrorInvalidValue);
}

// Any experts, sizes and schedules.
TEST(UpProjectionFwdSm100, RandomShapes) {
  std::mt19937 rng(11);
  auto const draw = [&](unsigned below) { return static_cast<int>(rng() % below); };
  for (int i = 0; i < 25; ++i) {
    Shape shape{.rows = {}, .hidden = 8 * (1 + draw(36)), .intermediate = 8 * (1 + draw(24))};
    for (int e = draw(5); e >= 0; --e) shape.rows.push_back(draw(3) == 0 ? 0 : draw(200));
    shape.ctas = 1 + draw(3);
    shape.other_rows = draw(2) * draw(70);
    shape.bias = draw(2) != 0;
    shape.stores_h = draw(4) != 0;
    emulator::Schedule const schedule{
        .seed = rng(), .burst = 1 << draw(7), .copies = 2 << draw(8), .lazy = draw(2) * 0.5};
    SCOPED_TRACE(std::to_string(i) + ": d " + std::to_string(shape.hidden) + ", n " +
                 std::to_string(shape.intermediate));
    ASSERT_NO_FATAL_FAILURE(expect_right<One>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<Pair>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<Gathered>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<OneRowsMajor>(shape, schedule));
    ASSERT_NO_FATAL_FAILURE(expect_right<PairRowsMajor>(shape, schedule));
  }
}

}  // namespace
}  // namespace tessera::cuda
