// SPDX-License-Identifier: Apache-2.0
// up_projection_dgrad of sm_100a from its own sources, in several schedules: bit for bit rows times columns in the
// order of k, gate half before up half, and within its rounding of fp64. Rows that no expert has, and what lies behind
// them, nobody writes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/kernels/up_projection_dgrad_sm100.cuh"
#include "tests/emulator/sm100/projection.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::kPoison;
using emulator::Memory;
using emulator::Shape;
using gemm::Major;

class UpDgrad {
 public:
  explicit UpDgrad(Shape const& s) : s_(s), rows_(s) {
    emulator::fill(dh_.get(), static_cast<std::int64_t>(dh_.size()), 1, 1.0f);
    emulator::fill(w_.get(), static_cast<std::int64_t>(w_.size()), 2, 0.25f);
    emulator::fill(router_.get(), static_cast<std::int64_t>(router_.size()), 3, 4.0f);
    for (int r = 0; r < rows_.all(); ++r) dlogits_[r] = 0.5f - 0.0625f * static_cast<float>(r % 23);
  }

  template <class Config>
  cudaError_t launch() {
    bool const k_major = Config::gemm.b.major == Major::kK;
    std::int64_t const d = s_.hidden, n = s_.intermediate, k = reduced();
    UpProjectionDgradArguments args = {};
    args.gmem_dh = dh_.get();
    args.gmem_expert_offsets = rows_.offsets();
    for (int half = 0; half < (s_.gated ? 2 : 1); ++half) {
      args.w_up[half] = {.gmem = &w_[half * n * (k_major ? 1 : d)],
                         .expert_stride = d * k,
                         .row_stride = k_major ? 1 : d,
                         .column_stride = k_major ? k : 1,
                         .block = n};
    }
    args.gated = s_.gated;
    if (s_.router_terms > 0) {
      args.gmem_row_dlogits = dlogits_.get();
      args.w_router = {.gmem = router_.get(), .rows = all_terms(), .pitch = pitch()};
      args.router_in_terms = s_.router_terms == 2;
    }
    args.gmem_dx_rows = dx_.get();
    args.rows = rows_.all();
    args.hidden = d;
    args.intermediate = n;
    args.experts = rows_.experts();
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return launch_up_projection_dgrad_sm100<Config>(args, ctas, nullptr);
  }

  std::string compare(bool k_major) const {
    int const d = s_.hidden, k = reduced();
    for (int r = 0; r < rows_.all(); ++r) {
      std::int64_t const e = rows_.expert_of(r);
      for (int i = 0; i < d; ++i) {
        Bits const dx = dx_[std::int64_t{r} * d + i];
        if (e == rows_.experts()) {
          if (dx != kPoison) return emulator::place(r, i) + " was written";
          continue;
        }
        emulator::Sum const sum{.a = &dh_[std::int64_t{r} * k],
                                .b = &w_[e * d * k + (k_major ? std::int64_t{i} * k : i)],
                                .count = k,
                                .b_step = k_major ? 1 : d,
                                .more = router_part(r, static_cast<int>(e), i)};
        if (dx != sum.rounded()) return emulator::place(r, i) + ", not its bits";
        if (!sum.agrees_with_fp64()) return emulator::place(r, i) + ", not that of fp64";
      }
    }
    for (std::int64_t i = std::int64_t{rows_.all()} * d; i < static_cast<std::int64_t>(dx_.size());
         ++i) {
      if (dx_[i] != kPoison) return "something was written behind the last row";
    }
    return emulator::counter_fault(counter_[0]);
  }

 private:
  int reduced() const { return (s_.gated ? 2 : 1) * s_.intermediate; }
  // Rows of w_router lie further apart than they are long, and an expert in terms has a third one, which nobody reads.
  std::int64_t pitch() const { return s_.hidden + 8; }
  std::int64_t terms_apart() const { return s_.router_terms == 2 ? 3 : 1; }
  std::int64_t all_terms() const { return terms_apart() * rows_.experts(); }
  std::vector<emulator::Sum::Product> router_part(int row, int expert, int column) const {
    std::vector<emulator::Sum::Product> out;
    for (int term = 0; term < s_.router_terms; ++term) {
      std::int64_t const v = (terms_apart() * expert + term) * pitch() + column;
      out.push_back({dlogits_[row], emulator::widen(router_[v])});
    }
    return out;
  }

  Shape s_;
  emulator::ExpertRows rows_;
  Memory<Bits> dh_{std::int64_t{rows_.all()} * reduced()},
      w_{std::int64_t{s_.hidden} * reduced() * rows_.experts()};
  Memory<Bits> dx_{(rows_.all() + std::int64_t{64}) * s_.hidden};
  Memory<Bits> router_{all_terms() * pitch()};
  Memory<float> dlogits_{rows_.all()};
  Memory<std::int32_t> counter_{1, 0};
};

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<UpDgrad, Configs...>(shape);
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
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionDgradSm100, AllRowsToOneExpert) {
  Shape const shape{.rows = {0, 0, 257, 0}, .hidden = 136, .intermediate = 72, .ctas = 1};
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionDgradSm100, NoRows) {
  Shape shape{.rows = {0, 0}, .hidden = 64, .intermediate = 64};
  expect_right<One, Pair>(shape);
  shape.other_rows = 5;
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionDgradSm100, PairsWithoutAnExpert) {
  Shape const shape{.rows = {3, 130}, .hidden = 72, .intermediate = 136, .other_rows = 40};
  expect_right<One, Pair>(shape);
}

// One half of k; w_up[1] has no memory, and nothing is loaded from it.
TEST(UpProjectionDgradSm100, WithoutAGate) {
  Shape const shape{.rows = {5, 130}, .hidden = 136, .intermediate = 136, .gated = false};
  expect_right<One, Pair>(shape);
}

TEST(UpProjectionDgradSm100, WeightsInKMajorOrder) {
  Shape const ragged{.rows = {9, 150}, .hidden = 328, .intermediate = 136, .ctas = 3};
  expect_right<OneKMajor, PairKMajor>(ragged);
  Shape const whole{.rows = {70}, .hidden = 256, .intermediate = 64, .ctas = 1};
  expect_right<OneKMajor, PairKMajor>(whole);
}

// What the router adds to dx: of w_router in bf16, and of an fp32 one in two terms of three. Columns end inside the
// second part of a slab.
TEST(UpProjectionDgradSm100, AddsTheRoutersPart) {
  Shape shape{.rows = {3, 0, 130}, .hidden = 168, .intermediate = 72, .other_rows = 5};
  for (int const terms : {1, 2}) {
    shape.router_terms = terms;
    expect_right<One, Pair>(shape);
  }
}

TEST(UpProjectionDgradSm100, RandomShapes) {
  emulator::check_at_random<UpDgrad, One, Pair, OneKMajor, PairKMajor>();
}

}  // namespace
}  // namespace tessera::cuda
