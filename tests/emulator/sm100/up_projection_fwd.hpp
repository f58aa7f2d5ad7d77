// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd of sm_100a: operands of a shape, and what a kernel should have made of them.
#pragma once

#include <cmath>
#include <string>

#include "cpu/reference/activation.hpp"
#include "cuda/kernels/up_projection_fwd_sm100.cuh"
#include "tests/emulator/sm100/projection.hpp"

namespace tessera::cuda {

using emulator::Bits;
using emulator::kPoison;
using emulator::Memory;
using emulator::Shape;
using gemm::Major;

class Up {
 public:
  explicit Up(Shape const& s) : s_(s), rows_(s) {
    for (std::int64_t r = 0; r < all_; ++r) {
      index_[r] = static_cast<std::int32_t>((7 * r + 3) % all_);
    }
    emulator::fill(x_.get(), static_cast<std::int64_t>(x_.size()), 1, 1.0f);
    emulator::fill(w_.get(), static_cast<std::int64_t>(w_.size()), 2, 0.25f);
    emulator::fill(bias_.get(), static_cast<std::int64_t>(bias_.size()), 3, 1.0f);
  }

  template <class Config>
  cudaError_t launch() {
    bool const k_major = Config::gemm.b.major == Major::kK;
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    forward_ = &gemm::ActivationFunction<Config::activation>::forward;
    act_.kind = Config::activation;
    UpProjectionFwdArguments args = {};
    gathers_ = Config::gemm.gathers() && s_.gathers;
    args.x = {.gmem = x_.get(), .rows = rows_.all(), .pitch = d};
    if (gathers_) args.gmem_gather_index = index_.get();
    args.gmem_expert_offsets = rows_.offsets();
    for (int half = 0; half < halves(); ++half) {
      args.w_up[half] = {.gmem = w_.get() + half * n * d,
                         .expert_stride = halves() * n * d,
                         .row_stride = k_major ? d : 1,
                         .column_stride = k_major ? 1 : n,
                         .block = n};
      if (!s_.bias) continue;
      args.b_up[half] = {.gmem = bias_.get() + half * n,
                         .expert_stride = halves() * n,
                         .row_stride = 1,
                         .block = n};
    }
    args.activation = act_;
    args.gmem_h = s_.stores_h ? h_.get() : nullptr;
    args.gmem_a = stores_a() ? a_.get() : nullptr;
    args.rows = rows_.all();
    args.hidden = d;
    args.intermediate = n;
    args.experts = rows_.experts();
    args.gmem_tile_counter = counter_.get();
    int const ctas = s_.ctas * Config::gemm.cluster_m();
    return launch_up_projection_fwd_sm100<Config>(args, ctas, nullptr);
  }

  std::string compare(bool k_major) const {
    int const n = s_.intermediate;
    for (int r = 0; r < rows_.all(); ++r) {
      int const expert = rows_.expert_of(r);
      for (int i = 0; i < n; ++i) {
        std::string const where = emulator::place(r, i);
        Bits const a = a_[std::int64_t{r} * n + i];
        Bits const stored[2] = {h_[std::int64_t{r} * halves() * n + i],
                                h_[std::int64_t{r} * halves() * n + (halves() - 1) * n + i]};
        if (expert == rows_.experts()) {
          if (a != kPoison || stored[0] != kPoison || stored[1] != kPoison) {
            return where + " was written";
          }
          continue;
        }
        float h[2] = {};
        for (int half = 0; half < halves(); ++half) {
          emulator::Sum const sum = sum_of_h(r, expert, half, i, k_major);
          Bits const rounded = sum.rounded();
          if (!sum.agrees_with_fp64()) return where + ", h is not that of fp64";
          if (stored[half] != (s_.stores_h ? rounded : kPoison))
            return where + ", h has other bits";
          h[half] = emulator::widen(rounded);
        }
        float const wanted = forward_(act_, h[0], h[1]);
        if (!stores_a()) {
          if (a != kPoison) return where + ", a was written";
          continue;
        }
        if (a != emulator::round(wanted)) return where + ", a has other bits";
        // A rounding to bf16, and the relative error of tanh.approx, 2^-11, ahead of a sum that may cancel.
        double const exact = reference::activate(act_, h[0], act_.gated() ? h[1] : h[0]);
        bool const clamped = act_.kind == ActivationKind::clamped_swiglu;
        double const up = act_.gated() ? std::fabs(h[1]) + (clamped ? act_.up_offset : 0) : 1;
        double const allowed = std::fabs(exact) * 0x1p-8 + std::fabs(h[0]) * up * 0x1p-11;
        if (!(std::fabs(emulator::widen(a) - exact) <= allowed)) {
          return where + ", a is not that of fp64";
        }
      }
    }
    return emulator::counter_fault(counter_[0]);
  }

 private:
  int halves() const { return act_.gated() ? 2 : 1; }
  bool stores_a() const { return s_.stores_a || !s_.stores_h; }
  emulator::Sum sum_of_h(int row, int expert, int half, int column, bool k_major) const {
    std::int64_t const d = s_.hidden, n = s_.intermediate;
    std::int64_t const first = (std::int64_t{halves()} * expert + half) * n;  // gate or up column 0
    return {.a = &x_[(gathers_ ? index_[row] : row) * d],
            .b = &w_[first * d + (k_major ? column * d : std::int64_t{column})],
            .count = s_.hidden,
            .b_step = k_major ? 1 : n,
            .bias = s_.bias ? emulator::widen(bias_[first + column]) : 0.0f};
  }

  Shape s_;
  emulator::ExpertRows rows_;
  std::int64_t all_ = rows_.all(), columns_ = std::int64_t{2} * rows_.experts() * s_.intermediate;
  Memory<Bits> x_{all_ * s_.hidden}, w_{columns_ * s_.hidden}, bias_{columns_};
  Memory<Bits> h_{all_ * 2 * s_.intermediate}, a_{all_ * s_.intermediate};
  Memory<std::int32_t> index_{all_};  // row -> row of x, in another order
  Memory<std::int32_t> counter_{1, 0};
  bool gathers_ = false;
  Activation act_{.kind = ActivationKind::swiglu,
                  .limit = 1.0f};  // what others than clamped swiglu read is 0 or nothing
  float (*forward_)(Activation const&, float, float) = nullptr;
};

}  // namespace tessera::cuda
