// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of sm_100a from its own sources, in several schedules: h bit for bit rows times columns in the
// order of k, and within its rounding of fp64; a the activation of that h. What no expert has, nobody writes.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cuda/kernels/up_projection_fwd_sm100.cuh"
#include "tests/emulator/sm100/projection.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::kPoison;
using emulator::Memory;
using emulator::Shape;
using gemm::Major;

constexpr ActivationKind kKind = ActivationKind::swiglu;

class Up {
 public:
  explicit Up(Shape const& s) : s_(s), rows_(s) {
    for (std::int64_t r = 0; r < all_; ++r) {
      index_[r] = static_cast<std::int32_t>((7 * r + 3) % all_);
    }
    emulator::fill(x_.get(), static_cast<std::int64_t>(x_.size()), 1, 1.0f);
    emulator::fill(w_.get(), static_cast<std::int64_t>(w_.size()), 2, 0.25f);
    emulator::fill(bias_.get(), static_cast<std::int64_t>(bias_.size()), 3, 1.0f);
  }

  template <class Config>
  cudaError_t launch() {
    bool const k_major = Config::gemm.b.major == Major::kK;
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    UpProjectionFwdArguments args = {};
    gathers_ = Config::gemm.gathers();
    args.x = {.gmem = x_.get(), .rows = rows_.all(), .pitch = d};
    if (gathers_) args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = rows_.offsets();
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
    args.gmem_a = stores_a() ? a_.get() : nullptr;
    args.rows = rows_.all();
    args.hidden = d;
    args.intermediate = n;
    args.experts = rows_.experts();
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return launch_up_projection_fwd_sm100<Config>(args, ctas, nullptr);
  }

  std::string compare(bool k_major) const {
    int const n = s_.intermediate;
    for (int r = 0; r < rows_.all(); ++r) {
      int const expert = rows_.expert_of(r);
      for (int i = 0; i < n; ++i) {
        std::string const where = emulator::place(r, i);
        Bits const a = a_[std::int64_t{r} * n + i];
        Bits const stored[2] = {h_[std::int64_t{r} * 2 * n + i],
                                h_[std::int64_t{r} * 2 * n + n + i]};
        if (expert == rows_.experts()) {
          if (a != kPoison || stored[0] != kPoison || stored[1] != kPoison) {
            return where + " was written";
          }
          continue;
        }
        float h[2];
        for (int half = 0; half < 2; ++half) {
          emulator::Sum const sum = sum_of_h(r, expert, half, i, k_major);
          Bits const rounded = sum.rounded();
          if (!sum.agrees_with_fp64()) return where + ", h is not that of fp64";
          if (stored[half] != (s_.stores_h ? rounded : kPoison))
            return where + ", h has other bits";
          h[half] = emulator::widen(rounded);
        }
        float const wanted = gemm::ActivationFunction<kKind>::forward({.kind = kKind}, h[0], h[1]);
        if (!stores_a()) {
          if (a != kPoison) return where + ", a was written";
          continue;
        }
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
    return emulator::counter_fault(counter_[0]);
  }

 private:
  bool stores_a() const { return s_.stores_a || !s_.stores_h; }
  emulator::Sum sum_of_h(int row, int expert, int half, int column, bool k_major) const {
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    std::int64_t const first = (std::int64_t{2} * expert + half) * n;  // gate or up column 0
    return {.a = &x_[(gathers_ ? index_[row] : row) * d],
            .b = &w_[first * d + (k_major ? column * d : std::int64_t{column})],
            .count = s_.hidden,
            .b_step = k_major ? 1 : n,
            .bias = s_.bias ? emulator::widen(bias_[first + column]) : 0.0f};
  }

  Shape s_;
  emulator::ExpertRows rows_;
  std::int64_t all_ = rows_.all(), columns_ = std::int64_t{2} * rows_.experts() * s_.intermediate;
  Memory<Bits> x_{all_ * s_.hidden}, w_{columns_ * s_.hidden}, bias_{columns_};
  Memory<Bits> h_{all_ * 2 * s_.intermediate}, a_{all_ * s_.intermediate};
  Memory<std::int32_t> index_{all_};  // row -> row of x, in another order
  Memory<std::int32_t> counter_{1, 0};
  bool gathers_ = false;
};

using One = UpProjectionFwdSm100<kKind, Major::kK>;
using Pair = UpProjectionFwdSm100Pair<kKind, Major::kK>;
using Gathered = UpProjectionFwdSm100Gathered<kKind, Major::kK>;
using GatheredPair = UpProjectionFwdSm100GatheredPair<kKind, Major::kK>;
using OneRowsMajor = UpProjectionFwdSm100<kKind, Major::kRows>;
using PairRowsMajor = UpProjectionFwdSm100Pair<kKind, Major::kRows>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<Up, Configs...>(shape);
}

// Two groups of gate and up columns in a tile and half of one, whose last columns do not exist.
TEST(UpProjectionFwdSm100, ExpertsOfAnyRows) {
  Shape const shape{.rows = {0, 1, 64, 127, 0, 129}, .hidden = 136, .intermediate = 136};
  expect_right<One, Pair>(shape);
}

// Ten tiles of nine k_tiles for two CTAs; rows past an expert's end repeat its last one, or are not brought.
TEST(UpProjectionFwdSm100, GathersRows) {
  expect_right<Gathered>({.rows = {0, 1, 65, 129}, .hidden = 520, .intermediate = 136});
}

// The same by pairs, whose relays report rows to CTA 0; CTA 1 of some has none.
TEST(UpProjectionFwdSm100, GathersRowsInPairs) {
  expect_right<GatheredPair>({.rows = {0, 1, 65, 300}, .hidden = 520, .intermediate = 136});
}

TEST(UpProjectionFwdSm100, WithoutH) {
  Shape const shape{.rows = {0, 200}, .hidden = 72, .intermediate = 64, .stores_h = false};
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionFwdSm100, HAlone) {
  Shape const shape{.rows = {0, 200}, .hidden = 72, .intermediate = 136, .stores_a = false};
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionFwdSm100, PairsWithoutAnExpert) {
  Shape const shape{.rows = {3, 70}, .hidden = 64, .intermediate = 72, .other_rows = 9};
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionFwdSm100, WeightsInRowsMajorOrder) {
  Shape const shape{.rows = {9, 150}, .hidden = 136, .intermediate = 128, .ctas = 1};
  expect_right<OneRowsMajor, PairRowsMajor>(shape);
}

TEST(UpProjectionFwdSm100, AddsTheBiasesOfTheExpert) {
  Shape const shape{.rows = {40, 0, 129}, .hidden = 72, .intermediate = 200, .bias = true};
  expect_right<One, Pair>(shape);
}

// What it does not serve it refuses.
TEST(UpProjectionFwdSm100, RefusesWhatItDoesNotServe) {
  std::int32_t const index[1] = {};
  UpProjectionFwdArguments args = {};
  args.gmem_gather_index = index;
  EXPECT_EQ(launch_up_projection_fwd_sm100<One>(args, 1, nullptr), cudaErrorInvalidValue);
  args = {};
  args.interleaved = true;
  EXPECT_EQ(launch_up_projection_fwd_sm100<One>(args, 1, nullptr), cudaErrorInvalidValue);
  args = {};
  EXPECT_EQ(launch_up_projection_fwd_sm100<One>(args, 1, nullptr), cudaErrorInvalidValue)
      << "nothing to store";
}

TEST(UpProjectionFwdSm100, RandomShapes) {
  emulator::check_at_random<Up, One, Pair, Gathered, GatheredPair, OneRowsMajor, PairRowsMajor>();
}

}  // namespace
}  // namespace tessera::cuda
