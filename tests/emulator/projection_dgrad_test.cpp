// SPDX-License-Identifier: Apache-2.0
// Gradients of activations through both projections, from the sources that GPUs get: bit for bit rows times columns in
// the order of k.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/kernels/down_projection_dgrad.cuh"
#include "cuda/kernels/up_projection_dgrad.cuh"
#include "cuda/tuning/gemm_backward.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/late.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/router_terms.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::dot;
using emulator::fill;
using emulator::fp32_weight;
using emulator::Memory;
using emulator::round;
using emulator::terms_of;
using emulator::widen;
using gemm::Boxes;
using gemm::Major;
using gemm::Tail;

constexpr ActivationKind kKind = ActivationKind::swiglu;

constexpr Columns columns_of(bool interleaved) {
  return interleaved ? Columns::kInterleaved : Columns::kHalves;
}

// Gate half, then up half, each of whose k fill no tile; then, with it, the router's part: dlogit times the expert's
// row, as two bf16. dh comes of the kernel ahead, which has not ended.
template <bool kRouterPart, int kHidden, bool kPartialLast = false, bool kTerms = false>
void expect_right_up_dgrad() {
  constexpr int kRows = 190, kIntermediate = 72, kExperts = 3;
  std::int32_t const offsets[kExperts + 1] = {0, 60, 60, kRows};
  constexpr int kMatrix = kHidden * kIntermediate;
  constexpr int kRouterRows = kTerms ? kDgradTerms : 1;
  Memory<Bits> dh(kRows * 2 * kIntermediate), w(kExperts * 2 * kMatrix),
      w_router(kExperts * kRouterRows * kHidden);
  fill(dh.get(), kRows * 2 * kIntermediate, 1, 1.0f);
  fill(w.get(), kExperts * 2 * kMatrix, 2, 0.25f);
  fill(w_router.get(), kExperts * kRouterRows * kHidden, 3, 0.25f);
  for (int i = 0; kTerms && i < kExperts * kHidden; ++i) {
    auto const [high, middle, low] = terms_of(fp32_weight(i));
    Bits* const at = &w_router[i / kHidden * kDgradTerms * kHidden + i % kHidden];
    at[0] = at[2 * kHidden] = high;
    at[kHidden] = middle;
  }
  std::vector<float> dlogits;
  for (int r = 0; r < kRows; ++r) dlogits.push_back(static_cast<float>(r % 17 - 8) / 7.0f);
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<Bits> dx(kRows * kHidden), coming(kRows * 2 * kIntermediate);
    std::int32_t counter = 0;
    emulator::write_late(nullptr, dh, coming);
    UpProjectionDgradArguments args = {};
    args.gmem_dh = coming.get();
    args.gmem_expert_offsets = offsets;
    for (int half = 0; half < 2; ++half) {
      args.w_up[half] = {.gmem = w.get() + half * kMatrix,
                         .expert_stride = 2 * kMatrix,
                         .row_stride = kHidden,
                         .column_stride = 1,
                         .block = kIntermediate};
    }
    if (kRouterPart) {
      args.gmem_row_dlogits = dlogits.data();
      args.w_router = {.gmem = w_router.get(), .rows = kExperts * kRouterRows, .pitch = kHidden};
      args.router_in_terms = kTerms;
    }
    args.gated = true;
    args.gmem_dx_rows = dx.get();
    args.rows = kRows;
    args.hidden = kHidden;
    args.intermediate = kIntermediate;
    args.experts = kExperts;
    args.gmem_tile_counter = &counter;
    using Config =
        UpProjectionDgradConfig<Major::kRows, kRouterPart ? RouterPart::kAdded : RouterPart::kNone,
                                kPartialLast ? Tail::kPartial : Tail::kWhole>;
    ASSERT_EQ(launch_up_projection_dgrad_config<Config>(args, 2, nullptr), cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    for (int r = 0; r < kRows; ++r) {
      int const expert = r < 60 ? 0 : 2;
      for (int c = 0; c < kHidden; ++c) {
        float sum = 0;
        for (int i = 0; i < 2 * kIntermediate; ++i) {
          sum += widen(dh[r * 2 * kIntermediate + i]) *
                 widen(w[(expert * 2 * kIntermediate + i) * kHidden + c]);
        }
        if (kRouterPart) {
          float const dl = dlogits[static_cast<std::size_t>(r)], high = widen(round(dl));
          Bits const* const v = &w_router[expert * kRouterRows * kHidden + c];
          for (float const u : {high, widen(round(dl - high))}) {
            sum += u * widen(v[0]);
            if (kTerms) sum += u * widen(v[kHidden]);
          }
        }
        ASSERT_EQ(dx[r * kHidden + c], round(sum)) << r << ", " << c << ", " << schedule.seed;
      }
    }
  }
}

TEST(UpProjectionDgrad, RunsThroughBothHalves) { expect_right_up_dgrad<false, 200>(); }
TEST(UpProjectionDgrad, AddsTheRoutersPart) { expect_right_up_dgrad<true, 200>(); }
TEST(UpProjectionDgrad, AddsTheFp32RoutersPart) { expect_right_up_dgrad<true, 200, false, true>(); }
TEST(UpProjectionDgrad, LastTileWithoutAllBoxes) {
  expect_right_up_dgrad<true, 320, true>();
  expect_right_up_dgrad<false, 72, true>();
}

// Rows in the order of their experts, of which whole blocks may be there ahead of the others.
struct Grouped {
  std::vector<std::int32_t> offsets, ready_blocks = {};  // empty: all are there
  int count() const { return offsets.back(); }
  int expert(int row) const {
    auto const next = std::upper_bound(offsets.begin(), offsets.end(), row);
    return static_cast<int>(next - offsets.begin()) - 1;
  }
  bool is_ready(int row) const {
    auto const e = static_cast<std::size_t>(expert(row));
    return row - offsets[e] < core::kReadyRows * ready_blocks[e];
  }
};

// Has the tokens of rows that are ready in `to` at once, and a kernel on another stream bring the others, late, and say
// so by the word.
void bring_rows(cudaStream_t stream, Memory<Bits> const& from,
                std::vector<std::int32_t> const& index, Grouped const& rows, int hidden,
                Memory<Bits>& to, std::uint32_t& arrivals) {
  for (int r = 0; r < rows.count(); ++r) {
    if (!rows.is_ready(r)) continue;
    std::int64_t const at = std::int64_t{index[static_cast<std::size_t>(r)]} * hidden;
    std::copy_n(from.get() + at, hidden, to.get() + at);
  }
  launch_in(stream, 1, 1, 0, [&from, &to, &arrivals] {
    for (int i = 0; i < 2000; ++i) arch::load_acquire_gpu(&arrivals);
    std::copy_n(from.get(), from.size(), to.get());
    arch::add_release_gpu(&arrivals, 1);
  });
}

// h becomes dh, a' and the scores' gradients on its way through the epilogue. With kInPlace dh has the memory of h: a
// tile stores what it alone has read. With kInterleaved columns of h are g0 u0 g1 u1 .., and w_down is transposed.
template <bool kWide, int kIntermediate, bool kInPlace = false, bool kInterleaved = false>
void expect_right_down_dgrad(Grouped const& grouped = {.offsets = {0, 60, 60, 190}}) {
  constexpr int kTokens = 300, kHidden = 136;
  int const rows = grouped.count();
  auto const experts = static_cast<std::int32_t>(grouped.offsets.size()) - 1;
  constexpr int kMatrix = kHidden * kIntermediate;
  auto const groups = static_cast<int>(score_groups(kIntermediate));
  Memory<Bits> d_o(kTokens * kHidden), w(experts * kMatrix), h(rows * 2 * kIntermediate);
  fill(d_o.get(), kTokens * kHidden, 1, 1.0f);
  fill(w.get(), experts * kMatrix, 2, 0.25f);
  fill(h.get(), rows * 2 * kIntermediate, 3, 2.0f);
  std::vector<std::int32_t> index, permutation;
  std::vector<float> scores;
  for (int r = 0; r < rows; ++r) {
    index.push_back((11 * r + 5) % kTokens);
    permutation.push_back(rows - 1 - r);
    scores.push_back(0.1f + static_cast<float>(r % 13) / 13.0f);
  }
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<Bits> dh(rows * 2 * kIntermediate), a(rows * kIntermediate);
    if (kInPlace) fill(dh.get(), rows * 2 * kIntermediate, 3, 2.0f);
    Memory<float> partials(rows * groups);
    std::int32_t counter = 0;
    DownProjectionDgradArguments args = {};
    args.d_o = {.gmem = d_o.get(), .rows = kTokens, .pitch = kHidden};
    args.gmem_gather_index = index.data();
    args.gmem_expert_offsets = grouped.offsets.data();
    args.w_down = {.gmem = w.get(),
                   .expert_stride = kMatrix,
                   .row_stride = kInterleaved ? 1 : kIntermediate,
                   .column_stride = kInterleaved ? kHidden : 1,
                   .block = kHidden};
    args.interleaved = kInterleaved;
    args.gmem_scores = scores.data();
    args.gmem_sort_permutation = permutation.data();
    args.gmem_h = kInPlace ? dh.get() : h.get();
    args.activation = {.kind = kKind};
    args.gmem_dh = dh.get();
    args.gmem_a_scaled = a.get();
    args.gmem_ds_partials = partials.get();
    args.rows = rows;
    args.hidden = kHidden;
    args.intermediate = kIntermediate;
    args.experts = experts;
    args.gmem_tile_counter = &counter;
    std::uint32_t arrivals = 0;
    Memory<Bits> arriving(kTokens * kHidden);
    CUstream_st other;
    if (!grouped.ready_blocks.empty()) {
      args.awaited = {grouped.ready_blocks.data(), &arrivals, 1};
      args.d_o.gmem = arriving.get();
      bring_rows(&other, d_o, index, grouped, kHidden, arriving, arrivals);
    }
    constexpr Major kMajor = kInterleaved ? Major::kK : Major::kRows;
    using Config = DownProjectionDgradConfig<kKind, kMajor, Boxes::kAny,
                                             kWide ? TileWidth::k256 : TileWidth::k128,
                                             columns_of(kInterleaved)>;
    ASSERT_EQ(launch_down_projection_dgrad_config<Config>(args, 2, nullptr), cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    for (int r = 0; r < rows; ++r) {
      auto const row = static_cast<std::size_t>(r);
      Bits const* const x = &d_o[index[row] * kHidden];
      Bits const* const matrix = &w[grouped.expert(r) * kMatrix];
      float const s = scores[static_cast<std::size_t>(permutation[row])];
      std::vector<double> ds(static_cast<std::size_t>(groups), 0.0);
      for (int i = 0; i < kIntermediate; ++i) {
        float const t = kInterleaved ? dot(x, matrix + i * kHidden, kHidden)
                                     : dot(x, matrix + i, kHidden, kIntermediate);
        int const at = r * 2 * kIntermediate + (kInterleaved ? 2 * i : i);
        constexpr int kUp = kInterleaved ? 1 : kIntermediate;
        Bits const* const gate = &h[at];
        auto const g = gemm::ActivationFunction<kKind>::backward({.kind = kKind}, widen(gate[0]),
                                                                 widen(gate[kUp]), s * t);
        Bits const* const got = &dh[at];
        ASSERT_EQ(got[0], round(g.dg)) << r << ", " << i << ", " << schedule.seed;
        ASSERT_EQ(got[kUp], round(g.du)) << r << ", " << i << ", " << schedule.seed;
        ASSERT_EQ(a[r * kIntermediate + i], round(s * g.a)) << r << ", " << i;
        ds[static_cast<std::size_t>(i / kScoreGroup)] += double{t} * double{g.a};
      }
      for (int group = 0; group < groups; ++group) {  // added up by four lanes
        double const wanted = ds[static_cast<std::size_t>(group)];
        ASSERT_NEAR(partials[r * groups + group], wanted, 1e-4 * (1 + std::abs(wanted))) << r;
      }
    }
  }
}

TEST(DownProjectionDgrad, InLentStages) { expect_right_down_dgrad<true, 200>(); }
TEST(DownProjectionDgrad, InPingPong) { expect_right_down_dgrad<false, 72>(); }
TEST(DownProjectionDgrad, RowsThatComeMeanwhile) {
  Grouped const rows = {.offsets = {0, 60, 60, 460}, .ready_blocks = {0, 0, 1}};
  expect_right_down_dgrad<true, 200, true>(rows);
  expect_right_down_dgrad<false, 72>(rows);
}
// More experts than a warp looks at together, in either turn.
TEST(DownProjectionDgrad, RowsOfManyExpertsThatComeMeanwhile) {
  Grouped rows = {.offsets = {0}};
  for (int e = 0; e < 70; ++e) {
    int const count = e % 9 == 4 ? 150 : e % 4;
    rows.offsets.push_back(rows.offsets.back() + count);
    rows.ready_blocks.push_back(count == 0 || e % 5 == 0 ? 0 : 1);
  }
  expect_right_down_dgrad<false, 72>(rows);
}
TEST(DownProjectionDgrad, InThePlaceOfH) {
  expect_right_down_dgrad<true, 200, true>();
  expect_right_down_dgrad<false, 72, true>();
}
TEST(DownProjectionDgrad, ColumnsOfGateAndUpInTurn) {
  expect_right_down_dgrad<true, 200, false, true>();
  expect_right_down_dgrad<false, 72, true, true>();
}

}  // namespace
}  // namespace tessera::cuda
