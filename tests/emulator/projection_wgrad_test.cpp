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

// dW of gathered rows, in segments that fill no k_tile, one of them empty; contiguous along d or along n. fp32 is added
// to what was there; bf16 replaces it, or is added to it. A kernel that adds to bf16 lets the next kernel start under
// its second tile.
template <Major kMajor, Gradient kGradient, Boxes kBoxes, int kIntermediate>
void expect_right_wgrad() {
  constexpr bool kFp32 = kGradient == Gradient::kFp32, kAdds = kGradient != Gradient::kBf16;
  using Value = std::conditional_t<kFp32, float, Bits>;
  constexpr int kTokens = 300, kRows = 230, kHidden = 200, kExperts = 3;
  constexpr int kMatrix = kHidden * kIntermediate;
  constexpr bool kAlongHidden = kMajor == Major::kK;
  std::int32_t const offsets[kExperts + 1] = {0, 90, 90, kRows};
  Memory<Bits> x(kTokens * kHidden), dh(kRows * 2 * kIntermediate);
  fill(x.get(), kTokens * kHidden, 1, 1.0f);
  fill(dh.get(), kRows * 2 * kIntermediate, 2, 0.25f);
  std::vector<std::int32_t> index;
  for (int r = 0; r < kRows; ++r) index.push_back((11 * r + 5) % kTokens);
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<Value> dw(kExperts * 2 * kMatrix);
    for (int i = 0; kAdds && i < kExperts * 2 * kMatrix; ++i) {
      if constexpr (kFp32) {
        dw[i] = static_cast<float>(i % 7);
      } else {
        dw[i] = round(static_cast<float>(i % 7));
      }
    }
    std::int32_t counter = 0;
    WgradArguments args = {};
    args.left = {.gmem = x.get(), .rows = kTokens, .pitch = kHidden};
    args.gmem_gather_index = index.data();
    args.gmem_expert_offsets = offsets;
    args.gmem_right = dh.get();
    args.halves = 2;
    for (int half = 0; half < 2; ++half) {
      args.dw[half] = {.gmem = dw.get() + half * kMatrix,
                       .expert_stride = 2 * kMatrix,
                       .row_stride = kAlongHidden ? kHidden : 1,
                       .column_stride = kAlongHidden ? 1 : kIntermediate,
                       .block = kIntermediate};
    }
    args.is_fp32 = kFp32;
    args.accumulates = kAdds;
    args.starts_early = kGradient == Gradient::kAddedToBf16;
    args.rows = kRows;
    args.hidden = kHidden;
    args.intermediate = kIntermediate;
    args.experts = kExperts;
    args.gmem_tile_counter = &counter;
    using Config = ProjectionWgradConfig<kMajor, kGradient, kBoxes>;
    ASSERT_EQ(launch_projection_wgrad_config<Config>(args, 2, nullptr), cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    for (int e = 0; e < kExperts; ++e) {
      for (int i = 0; i < 2 * kIntermediate; ++i) {
        for (int c = 0; c < kHidden; ++c) {
          float sum = 0;
          for (int r = offsets[e]; r < offsets[e + 1]; ++r) {
            sum += widen(x[index[static_cast<std::size_t>(r)] * kHidden + c]) *
                   widen(dh[r * 2 * kIntermediate + i]);
          }
          int const half = i / kIntermediate, row = i % kIntermediate;
          int const at = (2 * e + half) * kMatrix +
                         (kAlongHidden ? row * kHidden + c : c * kIntermediate + row);
          float const added = kAdds ? sum + static_cast<float>(at % 7) : sum;
          Value wanted;
          if constexpr (kFp32) {
            wanted = added;
          } else {
            wanted = round(added);
          }
          ASSERT_EQ(dw[at], wanted) << e << ", " << i << ", " << c << ", " << schedule.seed;
        }
      }
    }
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

}  // namespace
}  // namespace tessera::cuda
