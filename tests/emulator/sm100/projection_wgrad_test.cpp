// SPDX-License-Identifier: Apache-2.0
// Weight gradients of sm_100a from their own sources, in several schedules: bit for bit sums over an expert's rows in
// their order, rounded once or added once, and within their roundings of fp64; in every order of dW.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda/kernels/projection_wgrad_sm100.cuh"
#include "tests/emulator/sm100/projection.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::Memory;
using emulator::Shape;
using gemm::Major;

class Wgrad {
 public:
  explicit Wgrad(Shape const& s) : s_(s), rows_(s) {
    for (int r = 0; r < rows_.all(); ++r) index_[r] = (11 * r + 5) % rows_.all();
    emulator::fill(left_.get(), static_cast<std::int64_t>(left_.size()), 1, 1.0f);
    emulator::fill(right_.get(), std::int64_t{rows_.offsets()[rows_.experts()]} * width(), 2,
                   0.25f);  // NaNs behind the experts' rows
  }

  template <class Config>
  cudaError_t launch() {
    is_fp32_ = Config::fp32;
    along_d_ = Config::d_major == Major::kK;
    for (std::int64_t i = 0; i < count_; ++i) {
      fp32_[i] = old(i);
      bf16_[i] = emulator::round(old(i));
    }
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    WgradArguments args = {};
    args.left = {.gmem = left_.get(), .rows = rows_.all(), .pitch = d};
    if (s_.gathers) args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = rows_.offsets();
    args.gmem_right = right_.get();
    args.halves = halves_;
    for (int half = 0; half < halves_; ++half) {
      if (half == s_.skipped_half) continue;
      args.dw[half] = {.gmem = is_fp32_ ? static_cast<void*>(fp32_.get() + place(0, half, 0, 0))
                                        : bf16_.get() + place(0, half, 0, 0),
                       .expert_stride = d * n * halves_,
                       .row_stride = along_d_ ? d : 1,
                       .column_stride = along_d_ ? 1 : n,
                       .block = block(),
                       .block_stride = block() * halves_ * d};
    }
    args.is_fp32 = is_fp32_;
    args.accumulates = s_.accumulates;
    args.rows = rows_.all();
    args.hidden = d;
    args.intermediate = n;
    args.experts = rows_.experts();
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return launch_projection_wgrad_sm100<Config>(args, ctas, nullptr);
  }

  std::string compare(bool) const {
    for (int e = 0; e < rows_.experts(); ++e) {
      for (int half = 0; half < halves_; ++half) {
        for (int i = 0; i < s_.intermediate; ++i) {
          for (int c = 0; c < s_.hidden; ++c) {
            std::string const wrong = compare(e, half, i, c);
            if (wrong.empty()) continue;
            return "expert " + std::to_string(e) + " half " + std::to_string(half) + ' ' +
                   emulator::place(i, c) + wrong;
          }
        }
      }
    }
    return emulator::counter_fault(counter_[0]);
  }

 private:
  std::int64_t width() const { return std::int64_t{halves_} * s_.intermediate; }
  std::int64_t block() const { return s_.block == 0 || !along_d_ ? s_.intermediate : s_.block; }
  static float old(std::int64_t i) { return static_cast<float>(i % 7) - 2.5f; }

  // Element (i, c): in blocks of gate and up in turn, contiguous along d or along n.
  std::int64_t place(std::int64_t expert, int half, std::int64_t i, std::int64_t c) const {
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    std::int64_t const first = expert * halves_ * n * d;
    if (!along_d_) return first + half * n * d + c * n + i;
    return first + (i / block() * halves_ * block() + half * block() + i % block()) * d + c;
  }

  std::string compare(int e, int half, int i, int c) const {
    std::int64_t const at = place(e, half, i, c), d = s_.hidden;
    int const begin = rows_.offsets()[e], end = rows_.offsets()[e + 1];
    bool const unchanged = half == s_.skipped_half || (s_.accumulates && begin == end);
    float sum = 0;
    double exact = 0, size = 0;
    for (int r = begin; r < end && !unchanged; ++r) {
      float const left = emulator::widen(left_[(s_.gathers ? index_[r] : r) * d + c]);
      float const right = emulator::widen(right_[r * width() + half * s_.intermediate + i]);
      sum += left * right;
      exact += double{left} * right;
      size += std::fabs(double{left} * right);
    }
    float const before = unchanged || s_.accumulates ? old(at) : 0.0f;
    float const wanted = sum + before;
    if (is_fp32_ ? fp32_[at] != wanted : bf16_[at] != emulator::round(wanted)) {
      return ", not its bits";
    }
    double const rounding = is_fp32_ ? 0x1p-24 : 0x1p-8;
    double const allowed = std::fabs(exact + before) * rounding + size * (end - begin) * 0x1p-24;
    double const value = is_fp32_ ? fp32_[at] : emulator::widen(bf16_[at]);
    return std::fabs(value - (exact + before)) <= allowed ? "" : ", not that of fp64";
  }

  Shape s_;
  emulator::ExpertRows rows_;
  int halves_ = s_.gated ? 2 : 1;
  std::int64_t count_ = rows_.experts() * width() * s_.hidden;
  Memory<Bits> left_{std::int64_t{rows_.all()} * s_.hidden}, right_{rows_.all() * width()};
  Memory<float> fp32_{count_};
  Memory<Bits> bf16_{count_};
  Memory<std::int32_t> index_{rows_.all()};
  Memory<std::int32_t> counter_{1, 0};
  bool is_fp32_ = false, along_d_ = true;
};

using AlongD = ProjectionWgradSm100<Major::kK, false>;
using AlongN = ProjectionWgradSm100<Major::kRows, false>;
using PairAlongD = ProjectionWgradSm100Pair<Major::kK, false>;
using PairAlongNFp32 = ProjectionWgradSm100Pair<Major::kRows, true>;
using AlongDFp32 = ProjectionWgradSm100<Major::kK, true>;
using AlongNFp32 = ProjectionWgradSm100<Major::kRows, true>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<Wgrad, Configs...>(shape);
}
void expect_right_in_every_order(Shape const& shape) {
  expect_right<AlongD, AlongN, AlongDFp32, AlongNFp32>(shape);
}

// Three tiles along d, whose last has 8 of 128, and two of 256 and of 16 columns, for each expert: both accumulators
// are used twice. Six k_tiles are more than the ring has stages, and the last has some of its rows.
TEST(ProjectionWgradSm100, RingAndAccumulatorsTurn) {
  expect_right<AlongD>({.rows = {330, 90}, .hidden = 264, .intermediate = 136});
}

// The last pair has nothing for its CTA 1.
TEST(ProjectionWgradSm100, RingAndAccumulatorsTurnInPairs) {
  expect_right<PairAlongD>({.rows = {460, 90}, .hidden = 264, .intermediate = 136});
}

// Experts that fill no step of k, one, or a k_tile; those without rows get zeros.
TEST(ProjectionWgradSm100, ExpertsOfAnyRows) {
  expect_right_in_every_order(
      {.rows = {0, 1, 16, 17, 64, 65, 0}, .hidden = 40, .intermediate = 72, .ctas = 3});
}

// Old values come of memory; those of experts without rows stay.
TEST(ProjectionWgradSm100, AddsToWhatWasThere) {
  expect_right_in_every_order(
      {.rows = {90, 0, 40}, .hidden = 136, .intermediate = 200, .accumulates = true});
}

TEST(ProjectionWgradSm100, AHalfThatNobodyWants) {
  for (int const half : {0, 1}) {
    Shape shape{.rows = {20, 3}, .hidden = 72, .intermediate = 168, .skipped_half = half};
    expect_right<AlongD, AlongNFp32>(shape);
    shape.accumulates = true;
    expect_right<AlongD, AlongN>(shape);
  }
}

// So that tiles follow each other closely, and each has one slab to store.
TEST(ProjectionWgradSm100, OneGroupInATile) {
  expect_right<AlongD, AlongN>({.rows = {0, 0, 3, 0, 0, 1, 0, 0},
                                .hidden = 8,
                                .intermediate = 64,
                                .ctas = 1,
                                .gated = false});
}

TEST(ProjectionWgradSm100, BlocksOfGateAndUpInTurn) {
  Shape shape{.rows = {70, 5}, .hidden = 72, .intermediate = 96, .block = 16};
  expect_right<AlongD, AlongDFp32>(shape);
  shape.accumulates = true;
  expect_right<AlongD, AlongDFp32>(shape);
}

TEST(ProjectionWgradSm100, OneHalf) {
  expect_right<AlongD, AlongN>(
      {.rows = {30, 0, 101}, .hidden = 72, .intermediate = 136, .gated = false, .gathers = false});
}

// Rows of no expert lie behind the experts', and are NaN.
TEST(ProjectionWgradSm100, PairsWithoutAnExpert) {
  expect_right<AlongD, PairAlongD>(
      {.rows = {3, 70}, .hidden = 64, .intermediate = 64, .other_rows = 40});
}

TEST(ProjectionWgradSm100, NoRows) {
  Shape shape{.rows = {0, 0}, .hidden = 64, .intermediate = 64, .other_rows = 1};
  expect_right<AlongD>(shape);
  shape.accumulates = true;
  expect_right<AlongD>(shape);
}

TEST(ProjectionWgradSm100, RandomShapes) {
  emulator::check_at_random<Wgrad, AlongD, AlongN, AlongDFp32, AlongNFp32, PairAlongD,
                            PairAlongNFp32>();
}

}  // namespace
}  // namespace tessera::cuda
