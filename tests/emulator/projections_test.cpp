// SPDX-License-Identifier: Apache-2.0
// Both projections of forward, from the sources that GPUs get: bit for bit rows times columns in the order of k.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/kernels/down_projection_fwd.cuh"
#include "cuda/kernels/up_projection_fwd.cuh"
#include "cuda/tuning/gemm.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::dot;
using emulator::fill;
using emulator::Memory;
using emulator::round;
using emulator::widen;
using gemm::Boxes;
using gemm::Loader;
using gemm::Major;
using gemm::Tail;

constexpr ActivationKind kKind = ActivationKind::swiglu;

constexpr Columns columns_of(bool interleaved) {
  return interleaved ? Columns::kInterleaved : Columns::kHalves;
}

struct Shape {
  std::vector<int> rows;  // of each expert
  int hidden, intermediate;
  int ctas = 2;
};

// Both projections of some experts, and what they should give.
class Projections {
 public:
  explicit Projections(Shape const& s)
      : s_(s),
        experts_(static_cast<int>(s.rows.size())),
        tokens_(0),
        offsets_(experts_ + 1),
        w_up_(2 * matrix() * experts_),
        w_down_(matrix() * experts_),
        b_up_(2 * s.intermediate * experts_),
        counters_(2, 0),
        handover_(1, 0) {
    for (int e = 0; e < experts_; ++e) {
      offsets_[e] = tokens_;
      tokens_ += s_.rows[static_cast<std::size_t>(e)];
    }
    offsets_[experts_] = tokens_;
    fill(w_up_.get(), static_cast<std::int64_t>(w_up_.size()), 1, 0.25f);
    fill(w_down_.get(), static_cast<std::int64_t>(w_down_.size()), 2, 0.25f);
    fill(x_.get(), static_cast<std::int64_t>(x_.size()), 3, 1.0f);
    fill(b_up_.get(), static_cast<std::int64_t>(b_up_.size()), 4, 1.0f);
    for (int r = 0; r < tokens_; ++r) index_[r] = (7 * r + 3) % kTokens;
  }

  template <bool kGather, Major kMajor, bool kInterleaved>
  void launch_up(bool hands_over) {
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    UpProjectionFwdArguments args = {};
    args.x = {.gmem = x_.get(), .rows = kTokens, .pitch = d};
    if (kGather) args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = offsets_.get();
    for (int half = 0; half < 2; ++half) {
      args.w_up[half] = rows<kMajor>(w_up_.get() + half * n * d, 2 * n * d, n, d);
      if (!kInterleaved) continue;
      args.w_up[half] = {.gmem = w_up_.get() + half,
                         .expert_stride = 2 * n * d,
                         .row_stride = 2,
                         .column_stride = 2 * n,
                         .block = n};
      args.b_up[half] = {.gmem = b_up_.get() + half,
                         .expert_stride = 2 * n,
                         .row_stride = 2,
                         .column_stride = 0,
                         .block = n};
    }
    args.interleaved = kInterleaved;
    args.activation = {.kind = kKind};
    args.gmem_h = h_.get();
    args.gmem_a = a_.get();
    args.rows = tokens_;
    args.hidden = d;
    args.intermediate = n;
    args.experts = experts_;
    args.gmem_tile_counter = counters_.get();
    args.gmem_handover = hands_over ? handover_.get() : nullptr;
    using Config = UpProjectionFwdConfig<kKind, kGather ? Loader::kGather : Loader::kTma, kMajor,
                                         Boxes::kAny, columns_of(kInterleaved)>;
    ASSERT_EQ(launch_up_projection_fwd_config<Config>(args, s_.ctas, nullptr), cudaSuccess);
  }

  template <class Config, Major kMajor>
  void launch_down(bool takes_over) {
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    DownProjectionFwdArguments args = {};
    args.gmem_a = a_.get();
    args.gmem_expert_offsets = offsets_.get();
    args.w_down = rows<kMajor>(w_down_.get(), d * n, d, n);
    args.gmem_y = y_.get();
    args.rows = tokens_;
    args.hidden = d;
    args.intermediate = n;
    args.experts = experts_;
    args.gmem_tile_counter = counters_.get() + 1;
    args.gmem_handover = takes_over ? handover_.get() : nullptr;
    ASSERT_EQ(launch_down_projection_fwd_config<Config>(args, s_.ctas, nullptr), cudaSuccess);
  }

  // Weights as launched: K-major, or rows-major; with columns of gate and up in turn, and biases.
  std::string compare(bool gathered, bool rows_major, bool interleaved) const {
    int const d = s_.hidden, n = s_.intermediate;
    int expert = 0;
    for (int r = 0; r < tokens_; ++r) {
      while (r >= offsets_[expert + 1]) ++expert;
      Bits const* const x = x_.get() + std::int64_t{gathered ? index_[r] : r} * d;
      for (int i = 0; i < 2 * n; ++i) {
        Bits const* const half = w_up_.get() + (2 * expert + i / n) * matrix();
        Bits wanted = product(x, half, i % n, n, d, rows_major);
        if (interleaved) {
          float const h = dot(x, w_up_.get() + 2 * expert * matrix() + i, d, 2 * n);
          wanted = round(h + widen(b_up_[2 * expert * n + i]));
        }
        if (h_[std::int64_t{r} * 2 * n + i] != wanted) return where("h", r, i);
      }
      for (int i = 0; i < n; ++i) {
        Bits const* const h = h_.get() + std::int64_t{r} * 2 * n;
        Bits const g = h[interleaved ? 2 * i : i], u = h[interleaved ? 2 * i + 1 : n + i];
        float const a =
            gemm::ActivationFunction<kKind>::forward({.kind = kKind}, widen(g), widen(u));
        if (a_[std::int64_t{r} * n + i] != round(a)) return where("a", r, i);
      }
      for (int i = 0; i < d; ++i) {
        Bits const wanted = product(a_.get() + std::int64_t{r} * n,
                                    w_down_.get() + expert * matrix(), i, d, n, rows_major);
        if (y_[std::int64_t{r} * d + i] != wanted) return where("y", r, i);
      }
    }
    return counters_[0] == 0 && counters_[1] == 0 ? "" : "a tile counter is left";
  }

 private:
  static constexpr int kTokens = 400;

  std::int64_t matrix() const { return std::int64_t{s_.hidden} * s_.intermediate; }
  template <Major kMajor>
  static WeightRows rows(Bits const* gmem, std::int64_t expert_stride, std::int64_t rows,
                         std::int64_t columns) {
    bool const k_major = kMajor == Major::kK;
    return {.gmem = gmem,
            .expert_stride = expert_stride,
            .row_stride = k_major ? columns : 1,
            .column_stride = k_major ? 1 : rows,
            .block = rows};
  }
  static Bits product(Bits const* x, Bits const* w, int row, int rows, int count, bool rows_major) {
    return round(rows_major ? dot(x, w + row, count, rows)
                            : dot(x, w + std::int64_t{row} * count, count));
  }
  static std::string where(char const* what, int row, int column) {
    return std::string(what) + " row " + std::to_string(row) + " column " + std::to_string(column);
  }

  Shape s_;
  int experts_, tokens_;
  Memory<std::int32_t> offsets_;
  Memory<Bits> w_up_, w_down_, b_up_;
  Memory<std::int32_t> counters_;
  Memory<std::uint32_t> handover_;
  Memory<Bits> x_{std::int64_t{kTokens} * s_.hidden};
  Memory<std::int32_t> index_{kTokens};
  Memory<Bits> h_{std::int64_t{kTokens} * 2 * s_.intermediate},
      a_{std::int64_t{kTokens} * s_.intermediate}, y_{std::int64_t{kTokens} * s_.hidden};
};

// One after the other, and the second in the tail of the first.
template <bool kGather, Major kMajor, template <Major> class Down, bool kInterleaved = false>
void expect_right(Shape const& shape) {
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    for (bool const handed_over : {false, true}) {
      Projections p(shape);
      p.launch_up<kGather, kMajor, kInterleaved>(handed_over);
      if (!handed_over) {
        ASSERT_EQ(emulator::run(schedule), "") << "up, seed " << schedule.seed;
      }
      p.launch_down<Down<kMajor>, kMajor>(handed_over);
      ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
      ASSERT_EQ(p.compare(kGather, kMajor == Major::kRows, kInterleaved), "")
          << "seed " << schedule.seed << (handed_over ? ", handed over" : "");
    }
  }
}

TEST(Projections, GatheredRowsAndDeferredEpilogues) {
  expect_right<true, Major::kK, DownProjectionFwdWide>(
      {.rows = {70, 0, 129, 1}, .hidden = 136, .intermediate = 72});
}

// 9 k_tiles of down: the warp that schedules sleeps, then draws.
TEST(Projections, TilesDrawnWithinAKLoop) {
  expect_right<false, Major::kK, DownProjectionFwdWide>(
      {.rows = {70, 0, 129, 1}, .hidden = 136, .intermediate = 520});
}

TEST(Projections, SortedRowsAndResidentWeights) {
  expect_right<false, Major::kK, DownProjectionFwdResident>(
      {.rows = {70, 0, 129, 1}, .hidden = 136, .intermediate = 72});
}

TEST(Projections, WeightsInRowsMajorOrder) {
  expect_right<true, Major::kRows, DownProjectionFwdWide>(
      {.rows = {9, 150}, .hidden = 128, .intermediate = 64, .ctas = 3});
  expect_right<false, Major::kRows, DownProjectionFwdResident>(
      {.rows = {9, 150}, .hidden = 128, .intermediate = 64, .ctas = 1});
}

// 144 columns of w_up make one tile of 256, 400 a second one.
TEST(Projections, ColumnsOfGateAndUpInTurn) {
  expect_right<true, Major::kRows, DownProjectionFwdWide, true>(
      {.rows = {70, 0, 129, 1}, .hidden = 136, .intermediate = 72});
  expect_right<false, Major::kRows, DownProjectionFwdWide, true>(
      {.rows = {9, 150}, .hidden = 128, .intermediate = 200, .ctas = 3});
}

template <Major kMajor>
using DownProjectionFwdPartial = DownProjectionFwdWide<kMajor, Tail::kHalved>;

// The last tile has two boxes of four, by a layout loaded box by box, and one and three by those loaded at once.
TEST(Projections, LastTilesWithoutAllBoxes) {
  expect_right<true, Major::kK, DownProjectionFwdPartial>(
      {.rows = {9, 0, 70}, .hidden = 328, .intermediate = 72});
  expect_right<true, Major::kRows, DownProjectionFwdPartial>(
      {.rows = {9, 70}, .hidden = 320, .intermediate = 64, .ctas = 3});
  expect_right<true, Major::kK, DownProjectionFwdPartial>(
      {.rows = {9, 70}, .hidden = 192, .intermediate = 64});
}

}  // namespace
}  // namespace tessera::cuda
