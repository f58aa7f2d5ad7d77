// SPDX-License-Identifier: Apache-2.0
// A layer that quantises its operands, by the calls of the library: on an emulated GPU (layer_cuda.hpp), with its plan,
// arguments, order and the kernels that its context takes, beside the same calls on the CPU. x8 has equal bytes; codes
// of h, o and gradients are as near as sums in other orders allow.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include "tessera/tessera.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/sm100/layer_cuda.hpp"
#include "tests/low_precision/layer_codes.hpp"

namespace tessera::emulator {

inline MoeDesc quantised_desc(MoeShape const& shape, Precision precision) {
  MoeDesc desc;
  desc.shape = shape;
  desc.dtype = DType::bf16;
  desc.precision = precision;
  return desc;
}

inline Context context_on(DeviceKind kind) {
  auto made = Context::create({.device = {kind, 0}, .unproven_kernels = kind == DeviceKind::cuda});
  EXPECT_TRUE(made.ok()) << made.status().text();
  return std::move(made).value();
}

// Which experts the slots have: all but the last, with a few sentinels, or the first alone.
enum class Slots { all_but_the_last, one_expert };

// The tensors of a layer on one device; data depend on the shape and the precision alone.
class QuantisedLayer {
 public:
  QuantisedLayer(Context const& context, MoeDesc const& desc,
                 Slots slots_have = Slots::all_but_the_last)
      : context_(context), desc_(desc) {
    MoeShape const& s = desc.shape;
    std::int64_t const width = desc.up_width() * s.intermediate, slots = desc.num_slots();
    bool const turned = desc.layout.orientation == WeightOrientation::transposed;
    bool const is_mxfp8 = desc.precision == Precision::mxfp8;
    std::int64_t const block = desc.scale_block();
    DType const scale = is_mxfp8 ? DType::e8m0 : DType::fp32;
    forward.x = input({s.tokens, s.hidden}, 1, 1.7f);
    bool const routed = desc.router.kind != RouterKind::given;
    if (routed) {
      forward.w_router = backward.w_router = input({s.experts, s.hidden}, 2, 0.1f);
      backward.gradients.dw_router = output(DType::fp32, {s.experts, s.hidden});
    } else {
      give_slots(slots_have);
    }
    float const up = 1.7f / std::sqrt(static_cast<float>(s.hidden));
    float const down = 1.7f / std::sqrt(static_cast<float>(s.intermediate));
    forward.weights.w_up = turned ? input({s.experts, s.hidden, width}, 3, up)
                                  : input({s.experts, width, s.hidden}, 3, up);
    forward.weights.w_down = turned ? input({s.experts, s.intermediate, s.hidden}, 4, down)
                                    : input({s.experts, s.hidden, s.intermediate}, 4, down);
    forward.o = output(DType::bf16, {s.tokens, s.hidden});
    forward.x8 = output(DType::fp8_e4m3, {s.tokens, s.hidden});
    forward.x_scale = output(scale, {s.tokens, s.hidden / block});
    if (desc.save == SavePolicy::h) {
      forward.h = output(DType::fp8_e4m3, {slots, width});
      forward.h_scale = is_mxfp8 ? output(scale, {slots, width / block})
                                 : output(scale, {width / block, padded_scale_rows(slots)});
    }
    forward.routing = memory(routing_bytes(desc).value());
    forward.workspace = memory(workspace_bytes(context, desc, Pass::forward).value());
    backward.d_o = input({s.tokens, s.hidden}, 5, 1.7f);
    backward.x8 = forward.x8;
    backward.x_scale = forward.x_scale;
    backward.h = forward.h;
    backward.h_scale = forward.h_scale;
    backward.routing = {forward.routing.data, forward.routing.bytes};
    backward.weights = forward.weights;
    backward.dx = output(DType::bf16, {s.tokens, s.hidden});
    backward.dscores = output(DType::fp32, {slots});
    backward.gradients.dw_up = like(forward.weights.w_up);
    backward.gradients.dw_down = like(forward.weights.w_down);
    backward.workspace = memory(workspace_bytes(context, desc, Pass::backward).value());
    if (desc.weight_codes) make_codes();
  }

  void run() const {
    Stream const stream{.native = &stream_};
    Status status = moe_forward(context_, desc_, forward, stream);
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
    status = moe_backward(context_, desc_, backward, stream);
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
  }

  // Backward by two calls, the first without gradients of weights.
  void run_split() {
    MoeShape const& s = desc_.shape;
    std::int64_t const width = desc_.up_width() * s.intermediate, slots = desc_.num_slots();
    Stream const stream{.native = &stream_};
    ASSERT_TRUE(moe_forward(context_, desc_, forward, stream).ok());
    ASSERT_EQ(cuda::finish(), "");
    MoeBackwardArgs input = backward, weights = backward;
    input.gradients = {};
    if (desc_.save == SavePolicy::h) input.x8 = input.x_scale = {};
    input.dh = weights.dh = output(DType::bf16, {slots, width});
    input.a_scaled = weights.a_scaled = output(DType::bf16, {slots, s.intermediate});
    input.workspace = memory(workspace_bytes(context_, desc_, Pass::backward_input).value());
    Status status = moe_backward_input(context_, desc_, input, stream);
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
    weights.h = weights.h_scale = {};
    weights.weights = {};
    weights.dx = weights.dscores = {};
    weights.workspace = memory(workspace_bytes(context_, desc_, Pass::backward_weights).value());
    status = moe_backward_weights(context_, desc_, weights, stream);
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
  }

  [[nodiscard]] std::int64_t rows() const {
    RoutingView const view = routing_view(desc_, forward.routing).value();
    return view.expert_offsets[desc_.shape.experts];
  }

  MoeForwardArgs forward;
  MoeBackwardArgs backward;
  QuantisedWeights codes;  // with MoeDesc::weight_codes

 private:
  // Codes take the place of the weights.
  void make_codes() {
    auto const make = [this](DType dtype, std::initializer_list<std::int64_t> shape) {
      return output(dtype, shape);
    };
    codes = low_precision_tests::room_for_codes(desc_, make);
    Status const made = quantise_weights(context_, desc_, forward.weights, scale_rule(desc_), codes,
                                         {.native = &stream_});
    EXPECT_TRUE(made.ok()) << made.text();
    EXPECT_EQ(cuda::finish(), "");
    forward.weight_codes = low_precision_tests::as_read(codes);
    backward.weight_codes = forward.weight_codes;
    forward.weights = backward.weights = {};
  }
  Buffer memory(std::size_t bytes) {
    auto const& own =
        memory_.emplace_back(std::make_unique<Memory<std::byte>>(static_cast<std::int64_t>(bytes)));
    return {own->get(), bytes};
  }
  Tensor output(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor out = tensor(static_cast<void*>(nullptr), dtype, shape, context_.device());
    out.data = memory(static_cast<std::size_t>(out.elements()) * dtype_bytes(dtype)).data;
    return out;
  }
  Tensor like(ConstTensor const& weight) {
    return output(DType::fp32, {weight.shape[0], weight.shape[1], weight.shape[2]});
  }
  ConstTensor input(std::initializer_list<std::int64_t> shape, std::uint64_t seed, float scale) {
    Tensor const out = output(DType::bf16, shape);
    auto* const values = static_cast<Bits*>(out.data);
    fill(values, out.elements(), seed, scale);
    // Scales of neighbours differ, so that none can stand for another: of rows, or of rows of blocks, and of blocks.
    bool const in_squares = out.rank > 2 && desc_.precision == Precision::fp8;
    std::int64_t const width = out.shape[out.rank - 1], rows = in_squares ? desc_.scale_block() : 1;
    for (std::int64_t i = 0; i < out.elements(); ++i) {
      std::int64_t const row = i / width / rows, block = i % width / desc_.scale_block();
      values[i] = emulator::round(
          std::ldexp(widen(values[i]), static_cast<int>((2 * row + 3 * block) % 5) - 2));
    }
    return out;
  }
  void give_slots(Slots have) {
    MoeShape const& s = desc_.shape;
    Tensor const ids = output(DType::int32, {s.tokens, s.top_k});
    Tensor const scores = output(DType::fp32, {s.tokens, s.top_k});
    for (std::int64_t slot = 0; slot < s.tokens * s.top_k; ++slot) {
      std::int64_t const token = slot / s.top_k, choice = slot % s.top_k;
      std::int64_t const all = slot % 11 == 10 ? -1 : (token * token + choice) % (s.experts - 1);
      static_cast<std::int32_t*>(ids.data)[slot] =
          have == Slots::one_expert ? 0 : static_cast<std::int32_t>(all);
      static_cast<float*>(scores.data)[slot] = 0.25f + 0.03125f * static_cast<float>(slot % 19);
    }
    forward.topk_ids = ids;
    forward.topk_weights = scores;
  }

  Context const& context_;
  MoeDesc desc_;
  std::vector<std::unique_ptr<Memory<std::byte>>> memory_;
  mutable CUstream_st stream_;
};

inline bool equal(Tensor const& a, Tensor const& b) {
  auto const bytes_of = [](Tensor const& t) {
    return static_cast<std::size_t>(t.elements()) * dtype_bytes(t.dtype);
  };
  return bytes_of(a) == bytes_of(b) && std::memcmp(a.data, b.data, bytes_of(a)) == 0;
}

// 20 log10(|want| / |want - have|).
inline double db(Tensor const& want, Tensor const& have) {
  double signal = 0, noise = 0;
  auto const at = [](Tensor const& t, std::int64_t i) -> double {
    return t.dtype == DType::fp32 ? static_cast<float const*>(t.data)[i]
                                  : widen(static_cast<Bits const*>(t.data)[i]);
  };
  for (std::int64_t i = 0; i < want.elements(); ++i) {
    double const a = at(want, i), b = at(have, i);
    signal += a * a;
    noise += (a - b) * (a - b);
  }
  return noise == 0 ? 999 : 10 * std::log10(signal / noise);
}

// The least that tensors of the GPU are beside those of the CPU, in dB, and the part of the codes of h that may differ.
struct Nearness {
  double o, dx, dscores, dw;
  double other_codes;
  double dw_router = 0;
};

inline void expect_near(QuantisedLayer const& cpu, QuantisedLayer const& gpu,
                        Nearness const& least) {
  EXPECT_TRUE(equal(cpu.forward.x8, gpu.forward.x8));
  EXPECT_TRUE(equal(cpu.forward.x_scale, gpu.forward.x_scale));
  ASSERT_EQ(cpu.rows(), gpu.rows());
  ASSERT_GT(cpu.rows(), 0);
  if (cpu.forward.h.present()) {
    auto const* const want = static_cast<std::uint8_t const*>(cpu.forward.h.data);
    auto const* const have = static_cast<std::uint8_t const*>(gpu.forward.h.data);
    std::int64_t const count = cpu.rows() * cpu.forward.h.shape[1];
    std::int64_t other = 0;
    for (std::int64_t i = 0; i < count; ++i) other += want[i] != have[i];
    EXPECT_LT(static_cast<double>(other), static_cast<double>(count) * least.other_codes);
  }
  Tensor const &scales = cpu.forward.h_scale, &own_scales = gpu.forward.h_scale;
  for (std::int64_t i = 0; scales.present() && i < scales.elements(); ++i) {
    if (scales.dtype == DType::e8m0) {
      auto const byte = [&](Tensor const& t) -> int {
        return static_cast<std::uint8_t const*>(t.data)[i];
      };
      ASSERT_LE(std::abs(byte(own_scales) - byte(scales)), 1) << "scale " << i;
    } else {
      float const scale = static_cast<float const*>(scales.data)[i];
      ASSERT_NEAR(static_cast<float const*>(own_scales.data)[i], scale, scale / 128)
          << "scale " << i;
    }
  }
  EXPECT_GT(db(cpu.forward.o, gpu.forward.o), least.o);
  EXPECT_GT(db(cpu.backward.dx, gpu.backward.dx), least.dx);
  EXPECT_GT(db(cpu.backward.dscores, gpu.backward.dscores), least.dscores);
  EXPECT_GT(db(cpu.backward.gradients.dw_up, gpu.backward.gradients.dw_up), least.dw);
  EXPECT_GT(db(cpu.backward.gradients.dw_down, gpu.backward.gradients.dw_down), least.dw);
  if (cpu.backward.gradients.dw_router.present()) {
    EXPECT_GT(db(cpu.backward.gradients.dw_router, gpu.backward.gradients.dw_router),
              least.dw_router);
  }
}

// One layer on the CPU and on the played GPU.
inline void expect_near_the_cpu(MoeDesc const& desc, Nearness const& least,
                                Slots slots = Slots::all_but_the_last) {
  Context const host = context_on(DeviceKind::cpu), device = context_on(DeviceKind::cuda);
  QuantisedLayer const cpu(host, desc, slots), gpu(device, desc, slots);
  ASSERT_NO_FATAL_FAILURE(cpu.run());
  ASSERT_NO_FATAL_FAILURE(gpu.run());
  expect_near(cpu, gpu, least);
}

inline void expect_equal_results(QuantisedLayer const& a, QuantisedLayer const& b) {
  EXPECT_TRUE(equal(a.forward.o, b.forward.o));
  EXPECT_TRUE(equal(a.backward.dx, b.backward.dx));
  EXPECT_TRUE(equal(a.backward.dscores, b.backward.dscores));
  EXPECT_TRUE(equal(a.backward.gradients.dw_up, b.backward.gradients.dw_up));
  EXPECT_TRUE(equal(a.backward.gradients.dw_down, b.backward.gradients.dw_down));
}

// Two layers on the played GPU.
inline void expect_equal_bits(MoeDesc const& one, MoeDesc const& other) {
  Context const device = context_on(DeviceKind::cuda);
  QuantisedLayer const a(device, one), b(device, other);
  ASSERT_NO_FATAL_FAILURE(a.run());
  ASSERT_NO_FATAL_FAILURE(b.run());
  expect_equal_results(a, b);
}

// Backward by one call and by two.
inline void expect_equal_bits_when_split(MoeDesc const& desc) {
  Context const device = context_on(DeviceKind::cuda);
  QuantisedLayer const whole(device, desc);
  QuantisedLayer split(device, desc);
  ASSERT_NO_FATAL_FAILURE(whole.run());
  ASSERT_NO_FATAL_FAILURE(split.run_split());
  expect_equal_results(whole, split);
}

}  // namespace tessera::emulator
