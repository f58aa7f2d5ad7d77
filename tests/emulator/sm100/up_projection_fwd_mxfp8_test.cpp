// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of MXFP8 operands from its own sources, in several schedules: codes and scales of h and of a are
// those of core/fp8.hpp, byte for byte, of sums in the order of k, which are within their rounding of fp64. What no
// expert has, nobody writes.
#include <gtest/gtest.h>

#include <string>

#include "cuda/kernels/up_projection_fwd_mxfp8.cuh"
#include "cuda/tuning/mxfp8.hpp"
#include "tests/emulator/sm100/mxfp8_operands.hpp"

namespace tessera::cuda {
namespace {

using core::E4m3;
using emulator::Memory;
using emulator::MxBlock;
using emulator::MxMatrix;
using emulator::MxScales;
using emulator::MxSum;
using emulator::Shape;

constexpr ActivationKind kKind = ActivationKind::swiglu;

class UpMx {
 public:
  explicit UpMx(Shape const& s) : s_(s), rows_(s) {
    for (std::int64_t r = 0; r < all_; ++r) {
      index_[r] = static_cast<std::int32_t>((r + all_ / 2 + 1) % all_);
    }
  }

  template <class Config>
  cudaError_t launch() {
    UpProjectionFwdMxfp8Arguments args = {};
    args.gmem_x = x_.codes();
    args.gmem_x_scales = x_.scales();
    if (s_.gathers) args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = rows_.offsets();
    args.gmem_w_up = w_.codes();
    args.gmem_w_up_scales = w_.scales();
    args.activation = {.kind = kKind};
    if (s_.stores_h) {
      args.gmem_h = h_.get();
      args.gmem_h_scales = h_scales_.get();
    }
    if (s_.stores_a) {
      args.gmem_a = a_.get();
      args.gmem_a_scales = a_scales_.get();
    }
    args.rows = all_;
    args.hidden = s_.hidden;
    args.intermediate = n_;
    args.experts = rows_.experts();
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return launch_up_projection_fwd_mxfp8_config<Config>(args, ctas, nullptr);
  }

  std::string compare(bool) const {
    for (int r = 0; r < all_; ++r) {
      int const expert = rows_.expert_of(r);
      for (std::int64_t block = 0; block < n_ / kBlock; ++block) {
        std::string const said =
            expert == rows_.experts() ? wrote(r, block) : compare_block(r, expert, block);
        if (!said.empty())
          return "row " + std::to_string(r) + ", block " + std::to_string(block) + ": " + said;
      }
    }
    for (std::int64_t i = all_ * n_; i < (all_ + kPast) * n_; ++i) {
      if (a_[i].bits != 0xff || h_[2 * i].bits != 0xff)
        return "something behind the last row was written";
    }
    return emulator::counter_fault(counter_[0]);
  }

 private:
  static constexpr std::int64_t kBlock = emulator::kMxColumns, kPast = 64;

  std::string compare_block(int r, int expert, std::int64_t block) const {
    float h[2][kBlock], a[kBlock];
    int const token = s_.gathers ? index_[r] : r;
    for (int c = 0; c < kBlock; ++c) {
      for (int half = 0; half < 2; ++half) {
        MxSum const sum(x_, token, w_, (2 * expert + half) * n_ + block * kBlock + c);
        if (!sum.agrees_with_fp64()) return "h is not that of fp64";
        h[half][c] = emulator::widen(emulator::round(sum.value));
      }
      a[c] = gemm::ActivationFunction<kKind>::forward({.kind = kKind}, h[0][c], h[1][c]);
    }
    for (int half = 0; half < 2; ++half) {
      if (!s_.stores_h) break;
      std::int64_t const at = r * (2 * n_ / kBlock) + half * (n_ / kBlock) + block;
      std::string const said = MxBlock(h[half]).differs(&h_[at * kBlock], h_scales_[at]);
      if (!said.empty()) return (half == 0 ? "gate has " : "up has ") + said;
    }
    if (s_.stores_a) {
      std::int64_t const at = r * (n_ / kBlock) + block;
      std::string const said = MxBlock(a).differs(&a_[at * kBlock], a_scales_[at]);
      if (!said.empty()) return "a has " + said;
    }
    if (s_.stores_h && s_.stores_a) return "";
    return wrote(r, block, s_.stores_h, s_.stores_a);
  }
  // What of a block was written, of tensors that were not to be.
  std::string wrote(int r, std::int64_t block, bool but_h = false, bool but_a = false) const {
    std::int64_t const at = r * (n_ / kBlock) + block, at_h = at + r * (n_ / kBlock);
    for (std::int64_t c = 0; c < kBlock; ++c) {
      if (!but_a && a_[at * kBlock + c].bits != 0xff) return "a was written";
      if (!but_h && h_[at_h * kBlock + c].bits != 0xff) return "h was written";
    }
    // 0xff is also the scale of NaN, which no row here has where nothing is written.
    if (!but_a && a_scales_[at] != 0xff) return "a scale of a was written";
    if (!but_h && h_scales_[at_h] != 0xff) return "a scale of h was written";
    return "";
  }

  Shape s_;
  emulator::ExpertRows rows_;
  std::int64_t all_ = rows_.all(), n_ = s_.intermediate;
  Memory<std::int32_t> index_{all_ + 1};
  MxMatrix x_{1, all_, s_.hidden, MxScales::words, 1, 1.0f, true};
  MxMatrix w_{2 * std::int64_t{rows_.experts()}, n_, s_.hidden, MxScales::atoms, 2, 0.25f};
  Memory<E4m3> h_{(all_ + kPast) * 2 * n_}, a_{(all_ + kPast) * n_};
  Memory<std::uint8_t> h_scales_{(all_ + kPast) * 2 * n_ / kBlock};
  Memory<std::uint8_t> a_scales_{(all_ + kPast) * n_ / kBlock};
  Memory<std::int32_t> counter_{1, 0};
};

// By one CTA, and by pairs: tiles of 128 and of 256 rows.
using One = UpProjectionFwdMxfp8Config<kKind, 1>;
using Pair = UpProjectionFwdMxfp8Config<kKind, 2>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<UpMx, Configs...>(shape);
}

TEST(UpProjectionFwdMxfp8, AllRowsToOneExpert) {
  expect_right<One, Pair>(emulator::mx_one_expert());
}

// More k_tiles in all than the ring has stages, several tiles for each CTA or pair, both halves of an atom.
TEST(UpProjectionFwdMxfp8, RingAndAccumulatorsTurn) {
  expect_right<One>({.rows = {130, 1}, .hidden = 384, .intermediate = 128, .ctas = 1});
}
TEST(UpProjectionFwdMxfp8, RingAndAccumulatorsTurnInPairs) {
  expect_right<Pair>({.rows = {130, 260}, .hidden = 384, .intermediate = 128, .ctas = 1});
}

TEST(UpProjectionFwdMxfp8, ExpertsOfAnyRows) { expect_right<One, Pair>(emulator::mx_any_rows()); }

TEST(UpProjectionFwdMxfp8, NoRows) { expect_right<One, Pair>(emulator::mx_no_rows()); }

TEST(UpProjectionFwdMxfp8, PairsWithoutAnExpert) {
  expect_right<One, Pair>(
      {.rows = {3, 130}, .hidden = 256, .intermediate = 256, .other_rows = 40, .gathers = false});
}

TEST(UpProjectionFwdMxfp8, OneOutputOfTwo) {
  expect_right<One, Pair>({.rows = {33}, .hidden = 128, .intermediate = 128, .stores_h = false});
  expect_right<One, Pair>({.rows = {33}, .hidden = 128, .intermediate = 128, .stores_a = false});
}

TEST(UpProjectionFwdMxfp8, RefusesPartsOfATile) {
  emulator::expect_parts_of_a_tile_refused<UpMx, One>();
}

TEST(UpProjectionFwdMxfp8, RandomShapes) {
  emulator::check_at_random<UpMx, One, Pair>(emulator::kMxAtRandom);
}

}  // namespace
}  // namespace tessera::cuda
