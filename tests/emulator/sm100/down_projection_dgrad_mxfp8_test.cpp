// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad of MXFP8 operands from its own sources, in several schedules: dh and a' bit for bit the
// activation's gradient at the values of the codes of h, of sums in the order of k, and within their roundings of fp64;
// codes and scales of dh byte for byte those of core/fp8.hpp. What no expert has, nobody writes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "cuda/kernels/down_projection_dgrad_mxfp8.cuh"
#include "cuda/tuning/mxfp8.hpp"
#include "tests/emulator/sm100/mxfp8_operands.hpp"

namespace tessera::cuda {
namespace {

using core::E4m3;
using emulator::Bits;
using emulator::kPoison;
using emulator::Memory;
using emulator::MxBlock;
using emulator::MxMatrix;
using emulator::MxScales;
using emulator::MxSum;
using emulator::Shape;
using emulator::Silu;

constexpr ActivationKind kKind = ActivationKind::swiglu;

class DownDgradMx {
 public:
  // in_place: codes of dh take the place of those of h.
  explicit DownDgradMx(Shape const& s) : s_(s), rows_(s) {
    for (int r = 0; r < rows_.all(); ++r) {
      index_[r] = (r + rows_.all() / 2 + 1) % rows_.all();
      permutation_[r] = rows_.all() - 1 - r;
    }
    for (int slot = 0; slot < rows_.all(); ++slot) {
      scores_[slot] = 0.125f + 0.01f * static_cast<float>(slot % 70);
    }
    if (in_place()) {
      std::memcpy(dh8_.get(), h_.codes(), static_cast<std::size_t>(all_ * 2 * n_));
      std::memcpy(dh8_scales_.get(), h_.scales(), static_cast<std::size_t>(all_ * 2 * n_ / kBlock));
    }
  }

  template <class Config>
  cudaError_t launch() {
    DownProjectionDgradMxfp8Arguments args = {};
    args.gmem_d_o = d_o_.codes();
    args.gmem_d_o_scales = d_o_.scales();
    if (s_.gathers) args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = rows_.offsets();
    args.gmem_w_down_t = w_.codes();
    args.gmem_w_down_t_scales = w_.scales();
    args.gmem_scores = scores_.get();
    args.gmem_sort_permutation = permutation_.get();
    args.gmem_h = in_place() ? dh8_.get() : h_.codes();
    args.gmem_h_scales = in_place() ? dh8_scales_.get() : h_.scales();
    args.activation = {.kind = kKind};
    args.gmem_dh = dh_.get();
    args.gmem_dh8 = dh8_.get();
    args.gmem_dh8_scales = dh8_scales_.get();
    args.gmem_a_scaled = s_.stores_a ? a_.get() : nullptr;
    args.gmem_ds_partials = ds_.get();
    args.rows = all_;
    args.hidden = s_.hidden;
    args.intermediate = n_;
    args.experts = rows_.experts();
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return launch_down_projection_dgrad_mxfp8_config<Config>(args, ctas, nullptr);
  }

  std::string compare(bool) const {
    int const assigned = rows_.offsets()[rows_.experts()];
    for (int r = 0; r < assigned; ++r) {
      for (std::int64_t group = 0; group < n_ / 128; ++group) {
        Sums sums;
        for (std::int64_t block = 4 * group; block < 4 * group + 4; ++block) {
          std::string const said = compare_block(r, rows_.expert_of(r), block, sums);
          if (!said.empty()) {
            return "row " + std::to_string(r) + ", block " + std::to_string(block) + ": " + said;
          }
        }
        float const ds = ds_[r * (n_ / 128) + group];
        if (!(ds == sums.ds) && !(std::isnan(ds) && std::isnan(sums.ds))) {
          return emulator::place(r, static_cast<int>(group)) + ", ds has other bits";
        }
        if (!std::isnan(sums.exact) && !(std::fabs(ds - sums.exact) <= sums.error)) {
          return emulator::place(r, static_cast<int>(group)) + ", ds is not that of fp64";
        }
      }
    }
    for (std::int64_t i = assigned * n_; i < (all_ + kPast) * n_; ++i) {
      if (a_[i] != kPoison) return "a' was written behind the last row of an expert";
      if (dh_[2 * i] != kPoison) return "dh was written behind the last row of an expert";
      E4m3 const before = in_place() && i < all_ * n_ ? h_.codes()[2 * i] : E4m3{0xff};
      if (dh8_[2 * i].bits != before.bits) return "codes behind the last row were written";
    }
    for (std::int64_t i = assigned * 2 * n_ / kBlock; i < (all_ + kPast) * 2 * n_ / kBlock; ++i) {
      bool const was_h = in_place() && i < all_ * 2 * n_ / kBlock;
      if (dh8_scales_[i] != (was_h ? h_.scales()[i] : 0xff)) {
        return "a scale behind the last row was written";
      }
    }
    return emulator::counter_fault(counter_[0]);
  }

 private:
  static constexpr std::int64_t kBlock = emulator::kMxColumns, kPast = 64;

  bool in_place() const { return s_.accumulates; }

  // Of a group of columns of a row.
  struct Sums {
    float ds = 0;
    double exact = 0, error = 0;
  };

  std::string compare_block(int r, int expert, std::int64_t block, Sums& sums) const {
    float dh[2][kBlock];
    for (int c = 0; c < kBlock; ++c) {
      std::string const said = compare_column(r, expert, block * kBlock + c, sums);
      if (!said.empty()) return "column " + std::to_string(c) + said;
      for (int half = 0; half < 2; ++half) {
        dh[half][c] = emulator::widen(dh_[r * 2 * n_ + half * n_ + block * kBlock + c]);
      }
    }
    for (int half = 0; half < 2; ++half) {
      std::int64_t const at = r * (2 * n_ / kBlock) + half * (n_ / kBlock) + block;
      std::string const said = MxBlock(dh[half]).differs(&dh8_[at * kBlock], dh8_scales_[at]);
      if (!said.empty()) return (half == 0 ? "dg has " : "du has ") + said;
    }
    return "";
  }

  std::string compare_column(int r, int expert, std::int64_t i, Sums& sums) const {
    MxSum const sum(d_o_, s_.gathers ? index_[r] : r, w_, expert * n_ + i);
    if (!sum.agrees_with_fp64()) return ", t is not that of fp64";
    float const t = sum.value, s = scores_[permutation_[r]];
    float const g = h_.floats(r)[i] * h_.factors(r)[i / kBlock];
    float const u = h_.floats(r)[n_ + i] * h_.factors(r)[(n_ + i) / kBlock];
    auto const wanted = gemm::ActivationFunction<kKind>::backward({.kind = kKind}, g, u, s * t);
    sums.ds = std::fmaf(t, wanted.a, sums.ds);
    Bits const dg = dh_[r * 2 * n_ + i], du = dh_[r * 2 * n_ + n_ + i], a = a_[r * n_ + i];
    if (!emulator::same(dg, emulator::round(wanted.dg))) return ", dg has other bits";
    if (!emulator::same(du, emulator::round(wanted.du))) return ", du has other bits";
    if (a != (s_.stores_a ? emulator::round(s * wanted.a) : kPoison)) return ", a' has other bits";
    // A rounding to bf16, those of the sum, and the error of tanh.approx, 2^-12 of the sigmoid.
    Silu const f(g);
    double const exact = sum.exact, t_error = sum.size * s_.hidden * 0x1p-24;
    auto const agrees = [&](Bits value, double of_fp64, double error) {
      if (sum.is_nan()) return std::isnan(emulator::widen(value));
      return std::fabs(emulator::widen(value) - of_fp64) <= std::fabs(of_fp64) * 0x1p-8 + error;
    };
    double const sigmoid_error = 0x1p-12 + 0x1p-20, phi_error = std::fabs(g) * sigmoid_error;
    double const slope_error = std::fabs(s * exact * u) * sigmoid_error * (1 + std::fabs(g));
    if (!agrees(dg, s * exact * f.slope * u, slope_error + std::fabs(s * u) * 2 * t_error)) {
      return ", dg is not that of fp64";
    }
    if (!agrees(du, s * exact * f.phi,
                std::fabs(s * exact) * phi_error + std::fabs(s * f.phi) * t_error)) {
      return ", du is not that of fp64";
    }
    double const a_exact = s * f.phi * u;
    if (s_.stores_a && std::fabs(emulator::widen(a) - a_exact) >
                           std::fabs(a_exact) * 0x1p-8 + std::fabs(s * u) * phi_error) {
      return ", a' is not that of fp64";
    }
    sums.exact += exact * f.phi * u;
    sums.error += std::fabs(exact * u) * (phi_error + std::fabs(f.phi) * 0x1p-16) +
                  std::fabs(f.phi * u) * t_error;
    return "";
  }

  Shape s_;
  emulator::ExpertRows rows_;
  std::int64_t all_ = rows_.all(), n_ = s_.intermediate;
  MxMatrix d_o_{1, all_, s_.hidden, MxScales::words, 1, 1.0f, true};
  MxMatrix w_{rows_.experts(), n_, s_.hidden, MxScales::atoms, 2, 0.25f};
  MxMatrix h_{1, all_, 2 * n_, MxScales::words, 3, 1.0f};
  Memory<Bits> dh_{(all_ + kPast) * 2 * n_}, a_{(all_ + kPast) * n_};
  Memory<E4m3> dh8_{(all_ + kPast) * 2 * n_};
  Memory<std::uint8_t> dh8_scales_{(all_ + kPast) * 2 * n_ / kBlock};
  Memory<float> ds_{(all_ + kPast) * n_ / 128}, scores_{all_ + 1};
  Memory<std::int32_t> index_{all_ + 1}, permutation_{all_ + 1};  // row -> row of dO, row -> slot
  Memory<std::int32_t> counter_{1, 0};
};

// By one CTA, and by pairs: tiles of 128 and of 256 rows.
using One = DownProjectionDgradMxfp8Config<kKind, 1>;
using Pair = DownProjectionDgradMxfp8Config<kKind, 2>;

template <class... Configs>
void expect_right(Shape const& shape) {
  emulator::check<DownDgradMx, Configs...>(shape);
}

TEST(DownProjectionDgradMxfp8, AllRowsToOneExpert) {
  expect_right<One, Pair>(emulator::mx_one_expert());
}

// More k_tiles in all than the ring has stages, several tiles for each CTA or pair.
TEST(DownProjectionDgradMxfp8, RingAndAccumulatorsTurn) {
  expect_right<One>({.rows = {130, 1}, .hidden = 256, .intermediate = 256, .ctas = 1});
}
TEST(DownProjectionDgradMxfp8, RingAndAccumulatorsTurnInPairs) {
  expect_right<Pair>({.rows = {130, 260}, .hidden = 256, .intermediate = 256, .ctas = 1});
}

TEST(DownProjectionDgradMxfp8, ExpertsOfAnyRows) {
  expect_right<One, Pair>(emulator::mx_any_rows());
}

TEST(DownProjectionDgradMxfp8, NoRows) { expect_right<One, Pair>(emulator::mx_no_rows()); }

// accumulates: in the place of h.
TEST(DownProjectionDgradMxfp8, InThePlaceOfH) {
  expect_right<One, Pair>({.rows = {3, 130},
                           .hidden = 128,
                           .intermediate = 256,
                           .other_rows = 40,
                           .stores_a = false,
                           .gathers = false,
                           .accumulates = true});
}

TEST(DownProjectionDgradMxfp8, RefusesPartsOfATile) {
  emulator::expect_parts_of_a_tile_refused<DownDgradMx, One>();
}

TEST(DownProjectionDgradMxfp8, RandomShapes) {
  emulator::check_at_random<DownDgradMx, One, Pair>(emulator::kMxAtRandom);
}

}  // namespace
}  // namespace tessera::cuda
