// SPDX-License-Identifier: Apache-2.0
// Weight gradients of one GPU, from the sources that GPUs get: bit for bit sums over an expert's rows, in their order.
#include "cuda/kernels/projection_wgrad.cuh"

#include <gtest/gtest.h>

#include <type_traits>
#include <vector>

#include "cuda/tuning/gemm_backward.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::fill;
using emulator::Memory;
using emulator::round;
using emulator::widen;
using gemm::Boxes;
using gemm::Major;
using gemm::Sharing;

constexpr emulator::Schedule kSchedules[] = {{.seed = 1},
                                             {.seed = 2, .burst = 64},
                                             {.seed = 3, .copies = 256},
                                             {.seed = 4, .burst = 8, .copies = 2, .lazy = 0.5}};

// Experts' rows where nothing is said of them: they fill no k_tile, and one expert has none.
std::vector<std::int32_t> const kFewRows = {90, 0, 140};

std::vector<std::int32_t> offsets_of(std::vector<std::int32_t> const& rows) {
  std::vector<std::int32_t> out = {0};
  for (std::int32_t const r : rows) out.push_back(out.back() + r);
  return out;
}

// One launch on so many SMs, of dW (E, halves * kIntermediate, hidden) in either order.
template <Major kMajor, Gradient kGradient, Boxes kBoxes, int kIntermediate,
          Sharing kSharing = Sharing::kNone>
class Wgrad {
 public:
  using Config = ProjectionWgradConfig<kMajor, kGradient, kBoxes, kSharing>;
  static constexpr bool kFp32 = kGradient == Gradient::kFp32, kAdds = kGradient != Gradient::kBf16;
  using Value = std::conditional_t<kFp32, float, Bits>;

  Wgrad(std::vector<std::int32_t> const& expert_rows, int hidden)
      : offsets_(offsets_of(expert_rows)),
        hidden_(hidden),
        x_(kTokens * hidden),
        dh_(offsets_.back() * 2 * kIntermediate),
        dw_(experts() * 2 * matrix()) {
    fill(x_.get(), kTokens * hidden, 1, 1.0f);
    fill(dh_.get(), offsets_.back() * 2 * kIntermediate, 2, 0.25f);
    for (int r = 0; r < offsets_.back(); ++r) index_.push_back((11 * r + 5) % kTokens);
    for (int i = 0; kAdds && i < experts() * 2 * matrix(); ++i) dw_[i] = before(i);
  }

  WgradArguments arguments() {
    WgradArguments args = {};
    args.left = {.gmem = x_.get(), .rows = kTokens, .pitch = hidden_};
    args.gmem_gather_index = index_.data();
    args.gmem_expert_offsets = offsets_.data();
    args.gmem_right = dh_.get();
    args.halves = 2;
    for (int half = 0; half < 2; ++half) {
      args.dw[half] = {.gmem = dw_.get() + half * matrix(),
                       .expert_stride = 2 * matrix(),
                       .row_stride = kAlongHidden ? hidden_ : 1,
                       .column_stride = kAlongHidden ? 1 : kIntermediate,
                       .block = kIntermediate};
    }
    args.is_fp32 = kFp32;
    args.accumulates = kAdds;
    args.rows = offsets_.back();
    args.hidden = hidden_;
    args.intermediate = kIntermediate;
    args.experts = experts();
    args.gmem_tile_counter = &counter_;
    return args;
  }

  void expect_right(emulator::Schedule const& schedule) {
    EXPECT_EQ(counter_, 0);
    for (int e = 0; e < experts(); ++e) {
      for (int i = 0; i < 2 * kIntermediate; ++i) {
        for (int c = 0; c < hidden_; ++c) {
          float sum = 0;
          for (int r = begin(e); r < begin(e + 1); ++r) {
            sum += widen(x_[index_[static_cast<std::size_t>(r)] * hidden_ + c]) *
                   widen(dh_[r * 2 * kIntermediate + i]);
          }
          int const half = i / kIntermediate, row = i % kIntermediate;
          int const at = (2 * e + half) * matrix() +
                         (kAlongHidden ? row * hidden_ + c : c * kIntermediate + row);
          float const added = kAdds ? sum + static_cast<float>(at % 7) : sum;
          Value wanted;
          if constexpr (kFp32) {
            wanted = added;
          } else {
            wanted = round(added);
          }
          ASSERT_EQ(dw_[at], wanted) << e << ", " << i << ", " << c << ", " << schedule.seed;
        }
      }
    }
  }

 private:
  static constexpr int kTokens = 300;
  static constexpr bool kAlongHidden = kMajor == Major::kK;

  static Value before(int at) {
    if constexpr (kFp32) {
      return static_cast<float>(at % 7);
    } else {
      return round(static_cast<float>(at % 7));
    }
  }
  [[nodiscard]] int experts() const { return static_cast<int>(offsets_.size()) - 1; }
  [[nodiscard]] int begin(int e) const { return offsets_[static_cast<std::size_t>(e)]; }
  [[nodiscard]] int matrix() const { return hidden_ * kIntermediate; }

  std::vector<std::int32_t> offsets_, index_;
  int hidden_;
  Memory<Bits> x_, dh_;
  Memory<Value> dw_;
  std::int32_t counter_ = 0;
};

// dW of gathered rows, contiguous along d or along n. fp32 is added to what was there; bf16 replaces it, or is added to
// it. A kernel that adds to bf16 lets the next kernel start.
template <Major kMajor, Gradient kGradient, Boxes kBoxes, int kIntermediate,
          Sharing kSharing = Sharing::kNone>
void expect_right_wgrad(std::vector<std::int32_t> const& expert_rows = kFewRows, int hidden = 200) {
  using Case = Wgrad<kMajor, kGradient, kBoxes, kIntermediate, kSharing>;
  for (emulator::Schedule const& schedule : kSchedules) {
    Case wgrad(expert_rows, hidden);
    WgradArguments args = wgrad.arguments();
    args.starts_early = kGradient == Gradient::kAddedToBf16;
    ASSERT_EQ(launch_projection_wgrad_config<typename Case::Config>(args, 2, nullptr), cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    wgrad.expect_right(schedule);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(ProjectionWgrad, AlongHidden) {
  expect_right_wgrad<Major::kK, Gradient::kBf16, Boxes::kTile, 64>();
}
TEST(ProjectionWgrad, AlongIntermediate) {
  expect_right_wgrad<Major::kRows, Gradient::kBf16, Boxes::kTile, 128>();
}
TEST(ProjectionWgrad, AnyLayout) {
  expect_right_wgrad<Major::kK, Gradient::kBf16, Boxes::kAny, 72>();
}
TEST(ProjectionWgrad, AddsInFp32) {
  expect_right_wgrad<Major::kK, Gradient::kFp32, Boxes::kTile, 128>();
}
TEST(ProjectionWgrad, AddsToBf16InLentStages) {
  expect_right_wgrad<Major::kK, Gradient::kAddedToBf16, Boxes::kTile, 128>();
  expect_right_wgrad<Major::kRows, Gradient::kAddedToBf16, Boxes::kTile, 64>();
}

// Of 40 experts the last but two has most of the rows, others more than twice the mean, some none. They come in another
// order than they stand in, each of their tiles once.
std::vector<std::int32_t> skewed_rows() {
  std::vector<std::int32_t> rows;
  for (int e = 0; e < 40; ++e) rows.push_back(e % 9 == 4 ? 0 : 5 + 7 * e % 19);
  rows[37] = 700;
  rows[20] = 301;
  rows[3] = 170;
  rows[33] = 140;
  return rows;
}

TEST(ProjectionWgrad, LongReductionsFirst) {
  expect_right_wgrad<Major::kK, Gradient::kBf16, Boxes::kTile, 64>(skewed_rows(), 136);
  expect_right_wgrad<Major::kRows, Gradient::kFp32, Boxes::kTile, 64>(skewed_rows(), 136);
}
TEST(ProjectionWgrad, LongReductionsInPairs) {
  expect_right_wgrad<Major::kRows, Gradient::kBf16, Boxes::kTile, 64, Sharing::kMulticast>(
      skewed_rows(), 136);
  expect_right_wgrad<Major::kK, Gradient::kFp32, Boxes::kTile, 64, Sharing::kMulticast>(
      skewed_rows(), 136);
}
TEST(ProjectionWgrad, OneExpertHasAllRows) {
  expect_right_wgrad<Major::kK, Gradient::kFp32, Boxes::kTile, 64>({0, 0, 333, 0});
}

// The segments of tiles in the order in which one CTA draws them, by what the kernel's warps read.
template <gemm::GemmConfig kGemm>
std::vector<int> order_of(std::vector<std::int32_t> const& rows, int m_tiles, int n_tiles) {
  std::vector<std::int32_t> const offsets = offsets_of(rows);
  std::vector<int> out;
  int counter = 0;
  gemm::GemmParams p{};
  p.gmem_offsets = offsets.data();
  p.segments = static_cast<int>(rows.size());
  p.m_tiles = m_tiles;
  p.n_tiles = n_tiles;
  p.gmem_tile_counter = &counter;
  emulator::launch(1, 1, kGemm.threads(), sizeof(gemm::SharedStorage<kGemm>), [&] {
    auto& smem = gemm::shared_storage<kGemm>();
    gemm::set_up<kGemm>(smem, p);
    gemm::TileScheduler<kGemm> scheduler(smem, p);
    gemm::WorkQueue<kGemm, true> queue(smem);
    bool const schedules = threadIdx.x < arch::kWarpThreads;
    if (schedules) scheduler.announce_first(0);
    for (gemm::WorkTile tile; queue.read(tile);) {
      if (threadIdx.x == 0) {
        out.push_back(tile.segment);
        EXPECT_EQ(tile.begin, offsets[static_cast<std::size_t>(tile.segment)]);
        EXPECT_EQ(tile.end, offsets[static_cast<std::size_t>(tile.segment) + 1]);
      }
      if (schedules) scheduler.step(0, 1);
    }
  });
  EXPECT_EQ(emulator::run({.seed = 7}), "");
  EXPECT_EQ(counter, 0);
  return out;
}

std::vector<int> repeated(std::vector<int> const& segments, int times) {
  std::vector<int> out;
  for (int const s : segments) out.insert(out.end(), static_cast<std::size_t>(times), s);
  return out;
}

TEST(ProjectionWgrad, SegmentsOfTwiceTheMeanComeFirst) {
  constexpr gemm::GemmConfig kGemm =
      ProjectionWgradConfig<Major::kK, Gradient::kBf16, Boxes::kTile>::gemm;
  auto const order = [](std::vector<std::int32_t> const& rows) {
    return order_of<kGemm>(rows, 2, 3);
  };
  // Alike, also where some are twice as long as others.
  EXPECT_EQ(order({640, 660, 1000, 0, 620, 1279, 640}), repeated({0, 1, 2, 3, 4, 5, 6}, 6));
  // The mean is 400: 800 rows keep their place, 801 do not.
  EXPECT_EQ(order({100, 300, 800, 400}), repeated({0, 1, 2, 3}, 6));
  EXPECT_EQ(order({100, 300, 801, 399}), repeated({2, 0, 1, 3}, 6));
  // Classes: more than 2000, more than 1000, more than 500; then the others, as they stand.
  EXPECT_EQ(
      order({10, 600, 1100, 20, 2500, 4000, 900, 1600, 0,  30, 10, 10, 10, 10, 10, 10,  10, 10,
             10, 10,  10,   10, 10,   10,   10,  10,   10, 10, 10, 10, 10, 10, 10, 950, 10}),
      repeated({4,  5,  2,  7,  1,  6,  33, 0,  3,  8,  9,  10, 11, 12, 13, 14, 15, 16,
                17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 34},
               6));
  // Two k_tiles or less are not long.
  EXPECT_EQ(order({1, 0, 0, 0, 0, 0, 0, 0, 128}), repeated({0, 1, 2, 3, 4, 5, 6, 7, 8}, 6));
  EXPECT_EQ(order({1, 0, 0, 0, 0, 0, 0, 0, 129}), repeated({8, 0, 1, 2, 3, 4, 5, 6, 7}, 6));
  EXPECT_EQ(order({0, 0, 0}), repeated({0, 1, 2}, 6));
  EXPECT_EQ(order({0, 5000, 0}), repeated({1, 0, 2}, 6));
}

// Runs a launch on one SM, whose arrays have room for more rows than there are, and returns the turns before another
// kernel may start, as a share of all.
double share_before_next(std::vector<std::int32_t> const& rows, bool starts_early, int room = 0) {
  Wgrad<Major::kK, Gradient::kBf16, Boxes::kTile, 64> wgrad(rows, 64);
  WgradArguments args = wgrad.arguments();
  std::uint32_t word = gemm::kHandedOver;
  args.starts_early = starts_early;
  if (!starts_early) args.gmem_handover = &word;
  args.rows += room;
  using Config = typename decltype(wgrad)::Config;
  EXPECT_EQ(launch_projection_wgrad_config<Config>(args, 1, nullptr), cudaSuccess);
  EXPECT_EQ(emulator::run({.seed = 5}), "");
  return static_cast<double>(emulator::turns_before_next_grid()) /
         static_cast<double>(emulator::turns());
}

// Eight tiles of four k_tiles, or one of 25 that comes first and seven of one.
TEST(ProjectionWgrad, ALongTileDoesNotHoldTheNextKernelUp) {
  std::vector<std::int32_t> const alike(8, 256), skewed = {64, 64, 64, 64, 1600, 64, 64, 64};
  for (std::vector<std::int32_t> const& rows : {alike, skewed}) {
    double const first = share_before_next(rows, true), third = share_before_next(rows, false);
    EXPECT_GT(first, 0.02);
    EXPECT_LT(first, 0.3);
    EXPECT_GT(third, 0.1);
    EXPECT_LT(third, 0.6);
  }
}

// The next kernel needs what the previous one made, also where the rows that there are take fewer k_tiles than those
// that there is room for, after which it may start.
TEST(ProjectionWgrad, TheNextKernelStartsAfterThePreviousOne) {
  for (bool const starts_early : {true, false}) {
    for (int const room : {0, 4000}) {
      std::uint64_t end = 0;
      emulator::launch(1, 1, arch::kWarpThreads, 0, [&] {
        while (emulator::turns() < 400'000) {
          emulator::yield();
          emulator::changed();
        }
        end = emulator::turns();
      });
      share_before_next({64, 64, 700, 64}, starts_early, room);
      EXPECT_GT(emulator::turns_before_next_grid(), end) << starts_early << ", " << room;
      EXPECT_GE(end, 400'000U);
    }
  }
}

}  // namespace
}  // namespace tessera::cuda
