// SPDX-License-Identifier: Apache-2.0
// GEMMs of one GPU, from the sources that GPUs get: bit for bit rows times columns in the order of k.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cuda/kernels/down_projection_dgrad.cuh"
#include "cuda/kernels/down_projection_fwd.cuh"
#include "cuda/kernels/router_logits.cuh"
#include "cuda/kernels/up_projection_dgrad.cuh"
#include "cuda/kernels/up_projection_fwd.cuh"
#include "cuda/tuning/gemm.hpp"
#include "cuda/tuning/gemm_backward.hpp"
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

TEST(RouterLogits, AddsTheBias) {
  constexpr int kTokens = 150, kHidden = 136, kExperts = 266;
  Memory<Bits> x(kTokens * kHidden), w(kExperts * kHidden), bias(kExperts);
  fill(x.get(), kTokens * kHidden, 1, 1.0f);
  fill(w.get(), kExperts * kHidden, 2, 0.25f);
  fill(bias.get(), kExperts, 3, 1.0f);
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<float> logits(kTokens * kExperts);
    ASSERT_EQ(launch_router_logits_config<RouterLogitsWide>(
                  {.x = {.gmem = x.get(), .rows = kTokens, .pitch = kHidden},
                   .w_router = {.gmem = w.get(), .rows = kExperts, .pitch = kHidden},
                   .gmem_b_router = bias.get(),
                   .gmem_logits = logits.get(),
                   .hidden = kHidden,
                   .experts = kExperts},
                  2, nullptr),
              cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    for (int t = 0; t < kTokens; ++t) {
      for (int e = 0; e < kExperts; ++e) {
        float const wanted = dot(&x[t * kHidden], &w[e * kHidden], kHidden) + widen(bias[e]);
        ASSERT_EQ(logits[t * kExperts + e], wanted) << t << ", " << e << ", " << schedule.seed;
      }
    }
  }
}

// The three terms of fp32 weights, as host/split_fp32.hpp has them.
struct Terms {
  Bits high, middle, low;
};
Terms terms_of(float value) {
  Bits const high = round(value);
  float const rest = value - widen(high);
  Bits const middle = round(rest);
  return {high, middle, round(rest - widen(middle))};
}
float fp32_weight(int i) { return std::ldexp(static_cast<float>((i * 7919) % 16777213), -26); }

// Each k_tile of x meets the terms of its weights in turn. With few experts, and with two CTAs that share B, for
// which neither tokens nor experts fill tiles.
template <class Config, int kTokens, int kExperts>
void expect_right_terms() {
  constexpr int kHidden = 136, kBlock = 64, kPitch = 3 * 192;
  static_assert(router_terms_pitch(kHidden) == kPitch);
  Memory<Bits> x(kTokens * kHidden), terms(kExperts * kPitch);
  std::vector<float> bias;
  fill(x.get(), kTokens * kHidden, 1, 1.0f);
  for (int e = 0; e < kExperts; ++e) {
    bias.push_back(static_cast<float>(e % 13) / 7.0f);
    for (int i = 0; i < kPitch; ++i) terms[e * kPitch + i] = 0;
    for (int c = 0; c < kHidden; ++c) {
      auto const [high, middle, low] = terms_of(fp32_weight(e * kHidden + c));
      int const at = e * kPitch + c / kBlock * 3 * kBlock + c % kBlock;
      terms[at] = high;
      terms[at + kBlock] = middle;
      terms[at + 2 * kBlock] = low;
    }
  }
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<float> logits(kTokens * kExperts);
    ASSERT_EQ(launch_router_logits_config<Config>(
                  {.x = {.gmem = x.get(), .rows = kTokens, .pitch = kHidden},
                   .w_router = {},
                   .gmem_b_router = bias.data(),
                   .gmem_logits = logits.get(),
                   .hidden = kHidden,
                   .experts = kExperts,
                   .is_fp32 = true,
                   .gmem_terms = terms.get()},
                  2, nullptr),
              cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    for (int t = 0; t < kTokens; ++t) {
      for (int e = 0; e < kExperts; ++e) {
        float sum = 0;
        double exact = bias[static_cast<std::size_t>(e)], size = 0;
        for (int i = 0; i < kPitch; ++i) {
          int const c = i / (3 * kBlock) * kBlock + i % kBlock;
          if (c < kHidden) sum += widen(x[t * kHidden + c]) * widen(terms[e * kPitch + i]);
        }
        for (int c = 0; c < kHidden; ++c) {
          double const term = double{widen(x[t * kHidden + c])} * fp32_weight(e * kHidden + c);
          exact += term;
          size += std::abs(term);
        }
        float const logit = logits[t * kExperts + e];
        ASSERT_EQ(logit, sum + bias[static_cast<std::size_t>(e)])
            << t << ", " << e << ", " << schedule.seed;
        // What bf16 weights would miss by 2^-9 of the terms.
        ASSERT_LE(std::abs(logit - exact), std::ldexp(size + 2, -18)) << t << ", " << e;
      }
    }
  }
}
TEST(RouterLogits, Fp32WeightsOfFewExperts) { expect_right_terms<RouterLogitsTermsFew, 150, 40>(); }
TEST(RouterLogits, Fp32WeightsSharedByTwo) { expect_right_terms<RouterLogitsTerms, 300, 128>(); }
TEST(RouterLogits, Fp32WeightsInTwoTiles) { expect_right_terms<RouterLogitsTerms, 140, 200>(); }

// Gate half, then up half, each of whose k fill no tile; then, with it, the router's part: dlogit times the expert's
// row, as two bf16.
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
    Memory<Bits> dx(kRows * kHidden);
    std::int32_t counter = 0;
    UpProjectionDgradArguments args = {};
    args.gmem_dh = dh.get();
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

// h becomes dh, a' and the scores' gradients on its way through the epilogue. With kInPlace dh has the memory of h: a
// tile stores what it alone has read. With kInterleaved columns of h are g0 u0 g1 u1 .., and w_down is transposed.
template <bool kWide, int kIntermediate, bool kInPlace = false, bool kInterleaved = false>
void expect_right_down_dgrad() {
  constexpr int kTokens = 300, kRows = 190, kHidden = 136, kExperts = 3;
  constexpr int kMatrix = kHidden * kIntermediate;
  auto const groups = static_cast<int>(score_groups(kIntermediate));
  std::int32_t const offsets[kExperts + 1] = {0, 60, 60, kRows};
  Memory<Bits> d_o(kTokens * kHidden), w(kExperts * kMatrix), h(kRows * 2 * kIntermediate);
  fill(d_o.get(), kTokens * kHidden, 1, 1.0f);
  fill(w.get(), kExperts * kMatrix, 2, 0.25f);
  fill(h.get(), kRows * 2 * kIntermediate, 3, 2.0f);
  std::vector<std::int32_t> index, permutation;
  std::vector<float> scores;
  for (int r = 0; r < kRows; ++r) {
    index.push_back((11 * r + 5) % kTokens);
    permutation.push_back(kRows - 1 - r);
    scores.push_back(0.1f + static_cast<float>(r % 13) / 13.0f);
  }
  for (emulator::Schedule const& schedule : emulator::kSchedules) {
    Memory<Bits> dh(kRows * 2 * kIntermediate), a(kRows * kIntermediate);
    if (kInPlace) fill(dh.get(), kRows * 2 * kIntermediate, 3, 2.0f);
    Memory<float> partials(kRows * groups);
    std::int32_t counter = 0;
    DownProjectionDgradArguments args = {};
    args.d_o = {.gmem = d_o.get(), .rows = kTokens, .pitch = kHidden};
    args.gmem_gather_index = index.data();
    args.gmem_expert_offsets = offsets;
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
    args.rows = kRows;
    args.hidden = kHidden;
    args.intermediate = kIntermediate;
    args.experts = kExperts;
    args.gmem_tile_counter = &counter;
    constexpr Major kMajor = kInterleaved ? Major::kK : Major::kRows;
    using Config = DownProjectionDgradConfig<kKind, kMajor, Boxes::kAny,
                                             kWide ? TileWidth::k256 : TileWidth::k128,
                                             columns_of(kInterleaved)>;
    ASSERT_EQ(launch_down_projection_dgrad_config<Config>(args, 2, nullptr), cudaSuccess);
    ASSERT_EQ(emulator::run(schedule), "") << "seed " << schedule.seed;
    for (int r = 0; r < kRows; ++r) {
      auto const row = static_cast<std::size_t>(r);
      Bits const* const x = &d_o[index[row] * kHidden];
      Bits const* const matrix = &w[(r < 60 ? 0 : 2) * kMatrix];
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
