// SPDX-License-Identifier: Apache-2.0
// down_projection_dgrad of sm_100a: operands of a shape, and what a kernel should have made of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/reference/activation.hpp"
#include "cuda/kernels/down_projection_dgrad_sm100.cuh"
#include "tests/emulator/sm100/projection.hpp"

namespace tessera::cuda {

using emulator::Bits;
using emulator::kPoison;
using emulator::Memory;
using emulator::Shape;
using gemm::Major;

class DownDgrad {
 public:
  explicit DownDgrad(Shape const& s) : s_(s), rows_(s) {
    for (int r = 0; r < rows_.all(); ++r) {
      index_[r] = (7 * r + 3) % rows_.all();
      permutation_[r] = rows_.all() - 1 - r;
    }
    emulator::fill(d_o_.get(), static_cast<std::int64_t>(d_o_.size()), 1, 1.0f);
    emulator::fill(w_.get(), static_cast<std::int64_t>(w_.size()), 2, 0.25f);
    emulator::fill(h_.get(), static_cast<std::int64_t>(h_.size()), 3, 2.0f);
    for (int slot = 0; slot < rows_.all(); ++slot) {
      scores_[slot] = 0.125f + 0.01f * static_cast<float>(slot % 70);
    }
  }

  template <class Config>
  cudaError_t launch(bool interleaved = false) {
    gradient_ = &gemm::ActivationFunction<Config::activation>::backward;
    act_.kind = Config::activation;
    bool const k_major = Config::gemm.b.major == Major::kK;
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    DownProjectionDgradArguments args = {};
    args.d_o = {.gmem = d_o_.get(), .rows = rows_.all(), .pitch = d};
    if (s_.gathers) args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = rows_.offsets();
    args.w_down = {.gmem = w_.get(),
                   .expert_stride = d * n,
                   .row_stride = k_major ? 1 : n,
                   .column_stride = k_major ? d : 1,
                   .block = d};
    args.gmem_scores = scores_.get();
    args.gmem_sort_permutation = permutation_.get();
    args.gmem_h = h_.get();
    args.interleaved = interleaved;
    args.activation = act_;
    args.gmem_dh = dh_.get();
    args.gmem_a_scaled = s_.stores_a ? a_.get() : nullptr;
    args.gmem_ds_partials = ds_.get();
    args.rows = rows_.all();
    args.hidden = d;
    args.intermediate = n;
    args.experts = rows_.experts();
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return launch_down_projection_dgrad_sm100<Config>(args, ctas, nullptr);
  }

  std::string compare(bool k_major) const {
    for (int r = 0; r < rows_.all(); ++r) {
      int const expert = rows_.expert_of(r);
      for (int g = 0; g < groups_; ++g) {
        float const ds = ds_[std::int64_t{r} * groups_ + g];
        if (expert == rows_.experts()) {
          if (!std::isnan(ds)) return emulator::place(r, g) + ", ds was written";
          continue;
        }
        Row row{.row = r, .expert = expert, .k_major = k_major};
        int const first = 128 * g;
        for (int i = first; i < std::min(first + 128, s_.intermediate); ++i) {
          std::string const wrong = compare(row, i);
          if (!wrong.empty()) return emulator::place(r, i) + wrong;
        }
        if (ds != row.ds) return emulator::place(r, g) + ", ds has other bits";
        if (!(std::fabs(ds - row.exact_ds) <= row.ds_error)) {
          return emulator::place(r, g) + ", ds is not that of fp64";
        }
      }
    }
    int const first_without = rows_.offsets()[rows_.experts()];
    for (std::int64_t i = std::int64_t{first_without} * width_; i < dh_size(); ++i) {
      if (dh_[i] != kPoison) return "dh was written behind the last row of an expert";
    }
    for (std::int64_t i = s_.stores_a ? std::int64_t{first_without} * s_.intermediate : 0;
         i < static_cast<std::int64_t>(a_.size()); ++i) {
      if (a_[i] != kPoison) return "a' was written where nobody asked for it";
    }
    return emulator::counter_fault(counter_[0]);
  }

 private:
  bool gated() const { return act_.gated(); }
  bool is_gelu() const {
    using enum ActivationKind;
    return act_.kind == geglu || act_.kind == gelu || act_.kind == geglu_erf ||
           act_.kind == gelu_erf;
  }
  std::int64_t dh_size() const { return static_cast<std::int64_t>(dh_.size()); }

  // What is known of a row, and the sums of a group of its columns.
  struct Row {
    int row, expert;
    bool k_major;
    float ds = 0;
    double exact_ds = 0, ds_error = 0;
  };

  // Column i: what is wrong, or nothing; adds to the sums of the group.
  std::string compare(Row& at, int i) const {
    std::int64_t const d = s_.hidden, n = s_.intermediate, r = at.row;
    emulator::Sum const sum{.a = &d_o_[(s_.gathers ? index_[r] : r) * d],
                            .b = &w_[at.expert * d * n + (at.k_major ? i * d : std::int64_t{i})],
                            .count = s_.hidden,
                            .b_step = at.k_major ? 1 : n};
    float const t = emulator::dot(sum.a, sum.b, sum.count, sum.b_step);
    float const s = scores_[permutation_[r]];
    Bits const g_bits = h_[r * width_ + i], u_bits = gated() ? h_[r * width_ + n + i] : Bits{0};
    float const g = emulator::widen(g_bits), u = emulator::widen(u_bits);
    gemm::ActivationGradient const wanted = gradient_(act_, g, u, s * t);
    at.ds = std::fmaf(t, wanted.a, at.ds);
    Bits const dg = dh_[r * width_ + i];
    if (dg != emulator::round(wanted.dg)) return ", dg has other bits";
    Bits const du = gated() ? dh_[r * width_ + n + i] : Bits{0};
    if (gated() && du != emulator::round(wanted.du)) return ", du has other bits";
    Bits const a = a_[r * n + i];
    if (s_.stores_a && a != emulator::round(s * wanted.a)) return ", a' has other bits";
    // A rounding to bf16, those of the sum, and the error of tanh.approx, 2^-12 of the sigmoid.
    double const exact = sum.exact(), t_error = sum.size() * d * 0x1p-24;
    double const of_gate = gated() ? g : 0, of_up = gated() ? u : g;
    double const value = reference::activate(act_, of_gate, of_up);
    auto const slopes = reference::activation_gradient(act_, of_gate, of_up, 1.0);
    double const slope_g = gated() ? slopes.gate : slopes.up, slope_u = slopes.up;
    bool const clamped = act_.kind == ActivationKind::clamped_swiglu;
    double const up = gated() ? std::fabs(u) + (clamped ? act_.up_offset : 0) : 1;
    auto const agrees = [](Bits value, double of_fp64, double error) {
      return std::fabs(emulator::widen(value) - of_fp64) <= std::fabs(of_fp64) * 0x1p-8 + error;
    };
    double const sigmoid_error = 0x1p-12 + 0x1p-20;
    double const size = std::fabs(g), steep = is_gelu() ? size * size * size : 0.0;
    double const slope_error = std::fabs(s * exact * up) * sigmoid_error * (1 + 2 * size + steep);
    if (!agrees(dg, s * exact * slope_g, slope_error + std::fabs(s * slope_g) * 2 * t_error)) {
      return ", dg is not that of fp64";
    }
    double const phi_error = size * sigmoid_error;
    if (gated() && !agrees(du, s * exact * slope_u,
                           std::fabs(s * exact) * phi_error + std::fabs(s * slope_u) * t_error)) {
      return ", du is not that of fp64";
    }
    if (s_.stores_a && !agrees(a, s * value, std::fabs(s * up) * phi_error)) {
      return ", a' is not that of fp64";
    }
    at.exact_ds += exact * value;
    at.ds_error += std::fabs(exact) * (up * phi_error + std::fabs(value) * 0x1p-16) +
                   std::fabs(value) * t_error;
    return "";
  }

  Shape s_;
  emulator::ExpertRows rows_;
  std::int64_t all_ = rows_.all(), width_ = std::int64_t{s_.gated ? 2 : 1} * s_.intermediate;
  int groups_ = static_cast<int>(score_groups(s_.intermediate));
  Memory<Bits> d_o_{all_ * s_.hidden},
      w_{std::int64_t{rows_.experts()} * s_.hidden * s_.intermediate}, h_{all_ * width_};
  Memory<Bits> dh_{(all_ + 64) * width_}, a_{(all_ + 64) * s_.intermediate};
  Memory<float> ds_{all_ * groups_}, scores_{all_};
  Memory<std::int32_t> index_{all_}, permutation_{all_};  // row -> row of dO, row -> slot
  Memory<std::int32_t> counter_{1, 0};
  gemm::ActivationGradient (*gradient_)(Activation const&, float, float, float) = nullptr;
  Activation act_{.kind = ActivationKind::swiglu, .limit = 1.0f};
};

}  // namespace tessera::cuda
