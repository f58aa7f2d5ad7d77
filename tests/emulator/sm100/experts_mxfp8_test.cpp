// SPDX-License-Identifier: Apache-2.0
// The experts of a layer of precision mxfp8, forward and backward, by the instances of sm_100a beside the same layer on
// the CPU: operands as tessera::quantise() and quantise_weights() give them, routing tables of the CPU, sums over slots
// by plain loops, weight gradients in bf16. Codes, outputs and gradients are as near as sums in other orders allow.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "cuda/host/mxfp8.hpp"
#include "cuda/host/projection_sm100.hpp"
#include "tessera/tessera.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"

namespace tessera::cuda {
namespace {

using emulator::Bits;
using emulator::Memory;

constexpr MoeShape kShape{
    .tokens = 400, .hidden = 256, .intermediate = 128, .experts = 3, .top_k = 2};
constexpr std::int64_t kT = kShape.tokens, kD = kShape.hidden, kN = kShape.intermediate,
                       kE = kShape.experts, kSlots = kT * kShape.top_k;

MoeDesc mxfp8_desc() {
  MoeDesc desc;
  desc.shape = kShape;
  desc.dtype = DType::bf16;
  desc.precision = Precision::mxfp8;
  return desc;
}

class Tensors {
 public:
  Tensor make(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor out = tensor(static_cast<void*>(nullptr), dtype, shape, {});
    out.data = buffer(static_cast<std::size_t>(out.elements()) * dtype_bytes(dtype)).data;
    return out;
  }
  Buffer buffer(std::size_t bytes) {
    auto const& own =
        memory_.emplace_back(std::make_unique<Memory<std::byte>>(static_cast<std::int64_t>(bytes)));
    return {own->get(), bytes};
  }
  // Rows and blocks differ in size, so that no scale can stand for its neighbour.
  Tensor input(std::initializer_list<std::int64_t> shape, std::uint64_t seed, float size) {
    Tensor const out = make(DType::bf16, shape);
    auto* const values = static_cast<Bits*>(out.data);
    emulator::fill(values, out.elements(), seed, size);
    std::int64_t const width = out.shape[out.rank - 1];
    for (std::int64_t i = 0; i < out.elements(); ++i) {
      auto const power = static_cast<int>((2 * (i / width) + 3 * (i % width / 32)) % 5) - 2;
      values[i] = emulator::round(std::ldexp(emulator::widen(values[i]), power));
    }
    return out;
  }

 private:
  std::vector<std::unique_ptr<Memory<std::byte>>> memory_;
};

// The CPU's layer, and what kernels read.
class Layer {
 public:
  Layer() {
    forward.x = x = tensors.input({kT, kD}, 1, 1.7f);
    Tensor const ids = tensors.make(DType::int32, {kT, 2});
    Tensor const scores = tensors.make(DType::fp32, {kT, 2});
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {  // the last expert gets none
      static_cast<std::int32_t*>(ids.data)[slot] =
          slot % 23 == 10 ? -1 : static_cast<std::int32_t>((slot / 2 + slot % 2) % 2);
      static_cast<float*>(scores.data)[slot] = 0.25f + 0.03125f * static_cast<float>(slot % 19);
    }
    forward.topk_ids = ids;
    forward.topk_weights = scores;
    forward.weights.w_up = tensors.input({kE, 2 * kN, kD}, 3, 0.1f);
    forward.weights.w_down = tensors.input({kE, kD, kN}, 4, 0.15f);
    forward.o = tensors.make(DType::bf16, {kT, kD});
    forward.x8 = tensors.make(DType::fp8_e4m3, {kT, kD});
    forward.x_scale = tensors.make(DType::e8m0, {kT, kD / 32});
    forward.h = tensors.make(DType::fp8_e4m3, {kSlots, 2 * kN});
    forward.h_scale = tensors.make(DType::e8m0, {kSlots, 2 * kN / 32});
    forward.routing = tensors.buffer(routing_bytes(desc).value());
    forward.workspace = tensors.buffer(workspace_bytes(context, desc, Pass::forward).value());
    backward.d_o = d_o = tensors.input({kT, kD}, 5, 1.7f);
    backward.x8 = forward.x8;
    backward.x_scale = forward.x_scale;
    backward.h = forward.h;
    backward.h_scale = forward.h_scale;
    backward.routing = {forward.routing.data, forward.routing.bytes};
    backward.weights = forward.weights;
    backward.dx = tensors.make(DType::bf16, {kT, kD});
    backward.dscores = tensors.make(DType::fp32, {kSlots});
    backward.gradients.dw_up = tensors.make(DType::fp32, {kE, 2 * kN, kD});
    backward.gradients.dw_down = tensors.make(DType::fp32, {kE, kD, kN});
    backward.workspace = tensors.buffer(workspace_bytes(context, desc, Pass::backward).value());
  }

  // All of it on the CPU.
  void run() {
    for (Status const& status : {moe_forward(context, desc, forward), quantise_others(),
                                 moe_backward(context, desc, backward)}) {
      ASSERT_TRUE(status.ok()) << status.text();
    }
    tables = routing_view(desc, forward.routing).value();
  }

  Context const context = std::move(Context::create()).value();
  MoeDesc const desc = mxfp8_desc();
  Tensors tensors;
  MoeForwardArgs forward;
  MoeBackwardArgs backward;
  RoutingView tables;
  Tensor x, d_o, d_o8, d_o_scale, x_values;  // the last: those of x8, in bf16
  QuantisedWeights weights;

 private:
  Status quantise_others() {
    weights = {.up = tensors.make(DType::fp8_e4m3, {kE, 2, kN, kD}),
               .up_transposed = tensors.make(DType::fp8_e4m3, {kE, kD, 2 * kN}),
               .down = tensors.make(DType::fp8_e4m3, {kE, kD, kN}),
               .down_transposed = tensors.make(DType::fp8_e4m3, {kE, kN, kD}),
               .up_scales = atoms({kE, 2, scale_atom_bytes(kN, kD / 32)}),
               .down_scales = atoms({kE, scale_atom_bytes(kD, kN / 32)}),
               .up_transposed_scales = atoms({kE, scale_atom_bytes(kD, 2 * kN / 32)}),
               .down_transposed_scales = atoms({kE, scale_atom_bytes(kN, kD / 32)})};
    Status status = quantise_weights(context, desc, forward.weights, ScaleRule::rceil, weights);
    if (!status.ok()) return status;
    d_o8 = tensors.make(DType::fp8_e4m3, {kT, kD});
    d_o_scale = tensors.make(DType::e8m0, {kT, kD / 32});
    status = quantise(context, {.block = QuantiseBlock::row_32,
                                .rule = ScaleRule::rceil,
                                .values = d_o,
                                .codes = d_o8,
                                .scales = d_o_scale});
    if (!status.ok()) return status;
    x_values = tensors.make(DType::bf16, {kT, kD});
    return dequantise(context, {.block = QuantiseBlock::row_32,
                                .codes = forward.x8,
                                .scales = forward.x_scale,
                                .values = x_values});
  }
  Tensor atoms(std::initializer_list<std::int64_t> shape) {
    return tensors.make(DType::e8m0, shape);
  }
};

// The same by kernels, of what the CPU has quantised and routed.
class Kernels {
 public:
  // sm_count: of one SM, kernels for one CTA; else for pairs.
  Kernels(Layer& layer, int sm_count) : layer_(layer), sm_count_(sm_count) {}

  void run() {
    ASSERT_NO_FATAL_FAILURE(run_forward());
    ASSERT_NO_FATAL_FAILURE(run_backward());
    sum_slots();
  }

  Memory<std::uint8_t> h{kSlots * 2 * kN}, h_scales{kSlots * 2 * kN / 32};
  Memory<Bits> o{kT * kD}, dx{kT * kD};
  Memory<float> dscores{kSlots}, dw_up{kE * 2 * kN * kD}, dw_down{kE * kD * kN};

 private:
  void expect_run(cudaError_t error) const {
    ASSERT_EQ(error, cudaSuccess);
    ASSERT_EQ(emulator::run({.seed = 3, .burst = 64, .copies = 64}), "");
    ASSERT_EQ(counter_[0], 0);
  }

  void run_forward() {
    Layer& l = layer_;
    ASSERT_NO_FATAL_FAILURE(
        expect_run(launch_up_projection_fwd_mxfp8({.gmem_x = l.forward.x8.data,
                                                   .gmem_x_scales = l.forward.x_scale.data,
                                                   .gmem_gather_index = l.tables.gather_index,
                                                   .gmem_expert_offsets = l.tables.expert_offsets,
                                                   .gmem_w_up = l.weights.up.data,
                                                   .gmem_w_up_scales = l.weights.up_scales.data,
                                                   .activation = {},
                                                   .gmem_h = h.get(),
                                                   .gmem_h_scales = h_scales.get(),
                                                   .gmem_a = a_.get(),
                                                   .gmem_a_scales = a_scales_.get(),
                                                   .rows = kSlots,
                                                   .hidden = kD,
                                                   .intermediate = kN,
                                                   .experts = kE,
                                                   .gmem_tile_counter = counter_.get()},
                                                  sm_count_, nullptr)));
    ASSERT_NO_FATAL_FAILURE(expect_run(
        launch_down_projection_fwd_mxfp8({.gmem_a = a_.get(),
                                          .gmem_a_scales = a_scales_.get(),
                                          .gmem_expert_offsets = l.tables.expert_offsets,
                                          .gmem_w_down = l.weights.down.data,
                                          .gmem_w_down_scales = l.weights.down_scales.data,
                                          .gmem_y = y_.get(),
                                          .rows = kSlots,
                                          .hidden = kD,
                                          .intermediate = kN,
                                          .experts = kE,
                                          .gmem_tile_counter = counter_.get()},
                                         sm_count_, nullptr)));
  }

  void run_backward() {
    Layer& l = layer_;
    ASSERT_NO_FATAL_FAILURE(expect_run(launch_down_projection_dgrad_mxfp8(
        {.gmem_d_o = l.d_o8.data,
         .gmem_d_o_scales = l.d_o_scale.data,
         .gmem_gather_index = l.tables.gather_index,
         .gmem_expert_offsets = l.tables.expert_offsets,
         .gmem_w_down_t = l.weights.down_transposed.data,
         .gmem_w_down_t_scales = l.weights.down_transposed_scales.data,
         .gmem_scores = l.tables.scores,
         .gmem_sort_permutation = l.tables.sort_permutation,
         .gmem_h = h.get(),
         .gmem_h_scales = h_scales.get(),
         .activation = {},
         .gmem_dh = dh_.get(),
         .gmem_dh8 = dh8_.get(),
         .gmem_dh8_scales = dh8_scales_.get(),
         .gmem_a_scaled = a_scaled_.get(),
         .gmem_ds_partials = ds_.get(),
         .rows = kSlots,
         .hidden = kD,
         .intermediate = kN,
         .experts = kE,
         .gmem_tile_counter = counter_.get()},
        sm_count_, nullptr)));
    ASSERT_NO_FATAL_FAILURE(expect_run(
        launch_up_projection_dgrad_mxfp8({.gmem_dh = dh8_.get(),
                                          .gmem_dh_scales = dh8_scales_.get(),
                                          .gmem_expert_offsets = l.tables.expert_offsets,
                                          .gmem_w_up_t = l.weights.up_transposed.data,
                                          .gmem_w_up_t_scales = l.weights.up_transposed_scales.data,
                                          .gmem_dx_rows = dx_rows_.get(),
                                          .rows = kSlots,
                                          .hidden = kD,
                                          .intermediate = kN,
                                          .experts = kE,
                                          .gmem_tile_counter = counter_.get()},
                                         sm_count_, nullptr)));
    WgradArguments down = wgrad(l.d_o, a_scaled_.get(), 1);
    down.dw[0] = {.gmem = dw_down.get(),
                  .expert_stride = kD * kN,
                  .row_stride = 1,
                  .column_stride = kN,
                  .block = kN};
    ASSERT_NO_FATAL_FAILURE(expect_run(launch_projection_wgrad_sm100(down, sm_count_, nullptr)));
    WgradArguments up = wgrad(l.x_values, dh_.get(), 2);
    for (int half = 0; half < 2; ++half) {
      up.dw[half] = {.gmem = dw_up.get() + half * kN * kD,
                     .expert_stride = 2 * kN * kD,
                     .row_stride = kD,
                     .column_stride = 1,
                     .block = kN};
    }
    ASSERT_NO_FATAL_FAILURE(expect_run(launch_projection_wgrad_sm100(up, sm_count_, nullptr)));
  }
  WgradArguments wgrad(Tensor const& left, Bits const* right, int halves) {
    return {.left = {left.data, kT, kD},
            .gmem_gather_index = layer_.tables.gather_index,
            .gmem_expert_offsets = layer_.tables.expert_offsets,
            .gmem_right = right,
            .halves = halves,
            .dw = {},
            .is_fp32 = true,
            .accumulates = false,
            .rows = kSlots,
            .hidden = kD,
            .intermediate = kN,
            .experts = kE,
            .gmem_tile_counter = counter_.get()};
  }

  // A row of y or dx for each slot that has one.
  void sum_slots() {
    RoutingView const& tables = layer_.tables;
    for (std::int64_t token = 0; token < kT; ++token) {
      for (std::int64_t c = 0; c < kD; ++c) {
        float sum = 0, sum_dx = 0;
        for (std::int64_t slot = 2 * token; slot < 2 * token + 2; ++slot) {
          std::int64_t const row = tables.inverse_permutation[slot];
          if (row < 0) continue;
          sum += tables.scores[slot] * emulator::widen(y_[row * kD + c]);
          sum_dx += emulator::widen(dx_rows_[row * kD + c]);
        }
        o[token * kD + c] = emulator::round(sum);
        dx[token * kD + c] = emulator::round(sum_dx);
      }
    }
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
      std::int64_t const row = tables.inverse_permutation[slot];
      dscores[slot] = row < 0 ? 0 : ds_[row];  // n is one group of columns
    }
  }

  Layer& layer_;
  int sm_count_;
  Memory<std::uint8_t> a_{kSlots * kN}, a_scales_{kSlots * kN / 32};
  Memory<std::uint8_t> dh8_{kSlots * 2 * kN}, dh8_scales_{kSlots * 2 * kN / 32};
  Memory<Bits> y_{kSlots * kD}, dh_{kSlots * 2 * kN}, a_scaled_{kSlots * kN}, dx_rows_{kSlots * kD};
  Memory<float> ds_{kSlots};
  Memory<std::int32_t> counter_{1, 0};
};

float value_at(Bits const* values, std::int64_t i) { return emulator::widen(values[i]); }
float value_at(float const* values, std::int64_t i) { return values[i]; }

// 20 log10(|want| / |want - have|), infinite where all are equal; -infinity where `want` is nothing but zeros.
template <class T>
double db(Tensor const& want, Memory<T> const& have) {
  double signal = 0, noise = 0;
  for (std::int64_t i = 0; i < want.elements(); ++i) {
    double const a = value_at(static_cast<T const*>(want.data), i), b = value_at(have.get(), i);
    signal += a * a;
    noise += (a - b) * (a - b);
  }
  return 10 * std::log10(signal / noise);
}

template <class T>
bool equal(Memory<T> const& a, Memory<T> const& b) {
  return std::memcmp(a.get(), b.get(), a.size() * sizeof(T)) == 0;
}

void expect_near(Layer const& cpu, Kernels const& gpu) {
  auto const* const want = static_cast<std::uint8_t const*>(cpu.forward.h.data);
  std::int64_t const count = cpu.tables.expert_offsets[kE] * 2 * kN;
  std::int64_t other = 0;
  for (std::int64_t i = 0; i < count; ++i) other += want[i] != gpu.h[i];
  EXPECT_LT(other, count / 50);
  auto const* const scales = static_cast<std::uint8_t const*>(cpu.forward.h_scale.data);
  for (std::int64_t i = 0; i < count / 32; ++i) {
    ASSERT_LE(std::abs(scales[i] - gpu.h_scales[i]), 1) << "row " << i / (2 * kN / 32);
  }
  // A layer of codes is at 23 dB beside one of bf16. Here some codes of h, a and dh round another way.
  EXPECT_GT(db(cpu.forward.o, gpu.o), 45);
  EXPECT_GT(db(cpu.backward.dx, gpu.dx), 45);
  EXPECT_GT(db(cpu.backward.dscores, gpu.dscores), 60);
  EXPECT_GT(db(cpu.backward.gradients.dw_up, gpu.dw_up), 50);
  EXPECT_GT(db(cpu.backward.gradients.dw_down, gpu.dw_down), 50);
}

TEST(ExpertsMxfp8, AreNearTheCpuByOneCtaAndByPairs) {
  Layer layer;
  ASSERT_NO_FATAL_FAILURE(layer.run());
  Kernels one(layer, 1), pairs(layer, 4);
  ASSERT_NO_FATAL_FAILURE(one.run());
  expect_near(layer, one);
  ASSERT_NO_FATAL_FAILURE(pairs.run());
  EXPECT_TRUE(equal(one.h, pairs.h) && equal(one.h_scales, pairs.h_scales));
  EXPECT_TRUE(equal(one.o, pairs.o));
  EXPECT_TRUE(equal(one.dx, pairs.dx));
  EXPECT_TRUE(equal(one.dscores, pairs.dscores));
  EXPECT_TRUE(equal(one.dw_up, pairs.dw_up));
  EXPECT_TRUE(equal(one.dw_down, pairs.dw_down));
}

}  // namespace
}  // namespace tessera::cuda
