// SPDX-License-Identifier: Apache-2.0
// A layer that quantises its operands, on an emulated GPU beside the same call on the CPU: its plan, arguments and
// order, with the kernels of codes from their sources. x8 has equal bytes; h8, o and gradients are as near as sums in
// other orders allow.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "cuda/layer/backend.hpp"
#include "tessera/tessera.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/sm100/layer_cuda.hpp"

namespace tessera {
namespace {

using emulator::Bits;
using Bytes = emulator::Memory<std::byte>;

MoeDesc fp8_desc(MoeShape const& shape) {
  MoeDesc desc;
  desc.shape = shape;
  desc.dtype = DType::bf16;
  desc.precision = Precision::fp8;
  return desc;
}

// The tensors of a layer on one device; data depend on the shape alone.
class Layer {
 public:
  Layer(Context const& context, MoeDesc const& desc) : context_(context), desc_(desc) {
    MoeShape const& s = desc.shape;
    std::int64_t const width = desc.up_width() * s.intermediate, slots = desc.num_slots();
    bool const turned = desc.layout.orientation == WeightOrientation::transposed;
    forward.x = input({s.tokens, s.hidden}, 1, 1.7f);
    give_slots();
    float const up = 1.7f / std::sqrt(static_cast<float>(s.hidden));
    float const down = 1.7f / std::sqrt(static_cast<float>(s.intermediate));
    forward.weights.w_up = turned ? input({s.experts, s.hidden, width}, 3, up)
                                  : input({s.experts, width, s.hidden}, 3, up);
    forward.weights.w_down = turned ? input({s.experts, s.intermediate, s.hidden}, 4, down)
                                    : input({s.experts, s.hidden, s.intermediate}, 4, down);
    forward.o = output(DType::bf16, {s.tokens, s.hidden});
    forward.x8 = output(DType::fp8_e4m3, {s.tokens, s.hidden});
    forward.x_scale = output(DType::fp32, {s.tokens, s.hidden / 128});
    if (desc.save == SavePolicy::h) {
      forward.h = output(DType::fp8_e4m3, {slots, width});
      forward.h_scale = output(DType::fp32, {width / 128, padded_scale_rows(slots)});
    }
    forward.routing = memory(routing_bytes(desc).value());
    forward.workspace = memory(workspace(Pass::forward));
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
    backward.workspace = memory(workspace(Pass::backward));
    if (desc.weight_codes) make_codes();
  }

  void run() const {
    Status status = run_forward();
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
    status = run_backward();
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_EQ(cuda::finish(), "");
  }

  [[nodiscard]] std::int64_t rows() const {
    RoutingView const view = routing_view(desc_, forward.routing).value();
    return view.expert_offsets[desc_.shape.experts];
  }

  MoeForwardArgs forward;
  MoeBackwardArgs backward;
  QuantisedWeights codes;  ///< with MoeDesc::weight_codes

 private:
  // Codes take the place of the weights.
  void make_codes() {
    std::int64_t const e = desc_.shape.experts, d = desc_.shape.hidden,
                       n = desc_.shape.intermediate, w = desc_.up_width();
    codes.up = output(DType::fp8_e4m3, {e, w, n, d});
    codes.up_transposed = output(DType::fp8_e4m3, {e, d, w * n});
    codes.up_scales = output(DType::fp32, {e, n / 128, d / 128, w});
    codes.down = output(DType::fp8_e4m3, {e, d, n});
    codes.down_transposed = output(DType::fp8_e4m3, {e, n, d});
    codes.down_scales = output(DType::fp32, {e, d / 128, n / 128});
    MoeDesc of_weights = desc_;
    of_weights.weight_codes = false;
    Status const made =
        context_.cuda() == nullptr
            ? quantise_weights(context_, desc_, forward.weights, scale_rule(desc_), codes)
            : cuda::quantise_weights(*context_.cuda(), of_weights, forward.weights, codes,
                                     {.native = &stream_});
    EXPECT_TRUE(made.ok()) << made.text();
    EXPECT_EQ(cuda::finish(), "");
    forward.weight_codes = {.up = codes.up,
                            .up_scales = codes.up_scales,
                            .down = codes.down,
                            .down_scales = codes.down_scales,
                            .up_transposed = codes.up_transposed,
                            .down_transposed = codes.down_transposed};
    backward.weight_codes = forward.weight_codes;
    forward.weights = backward.weights = {};
  }
  // On the GPU the backend's calls, which judge no layer.
  [[nodiscard]] Status run_forward() const {
    if (context_.cuda() == nullptr) return moe_forward(context_, desc_, forward);
    return cuda::moe_forward(*context_.cuda(), desc_, forward,
                             routing_view(desc_, forward.routing).value(), forward.routing.bytes,
                             {.native = &stream_});
  }
  [[nodiscard]] Status run_backward() const {
    if (context_.cuda() == nullptr) return moe_backward(context_, desc_, backward);
    return cuda::moe_backward(*context_.cuda(), desc_, backward,
                              routing_view(desc_, forward.routing).value(), Pass::backward,
                              {.native = &stream_});
  }
  [[nodiscard]] std::size_t workspace(Pass pass) const {
    if (context_.cuda() == nullptr) return workspace_bytes(context_, desc_, pass).value();
    return cuda::workspace_bytes(desc_, pass, forward.routing.bytes);
  }
  Buffer memory(std::size_t bytes) {
    auto const& own =
        memory_.emplace_back(std::make_unique<Bytes>(static_cast<std::int64_t>(bytes)));
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
    emulator::fill(values, out.elements(), seed, scale);
    // Scales of neighbours differ, so that none can stand for another: of rows, or of rows of blocks, and of blocks.
    std::int64_t const width = out.shape[out.rank - 1], rows = out.rank == 2 ? 1 : 128;
    for (std::int64_t i = 0; i < out.elements(); ++i) {
      std::int64_t const row = i / width / rows, block = i % width / 128;
      values[i] = emulator::round(
          std::ldexp(emulator::widen(values[i]), static_cast<int>((2 * row + 3 * block) % 5) - 2));
    }
    return out;
  }
  // The last expert gets none; a few slots are sentinels.
  void give_slots() {
    MoeShape const& s = desc_.shape;
    Tensor const ids = output(DType::int32, {s.tokens, s.top_k});
    Tensor const scores = output(DType::fp32, {s.tokens, s.top_k});
    for (std::int64_t slot = 0; slot < s.tokens * s.top_k; ++slot) {
      std::int64_t const token = slot / s.top_k, choice = slot % s.top_k;
      static_cast<std::int32_t*>(ids.data)[slot] =
          slot % 11 == 10 ? -1
                          : static_cast<std::int32_t>((token * token + choice) % (s.experts - 1));
      static_cast<float*>(scores.data)[slot] = 0.25f + 0.03125f * static_cast<float>(slot % 19);
    }
    forward.topk_ids = ids;
    forward.topk_weights = scores;
  }

  Context const& context_;
  MoeDesc desc_;
  std::vector<std::unique_ptr<Bytes>> memory_;
  mutable CUstream_st stream_;
};

std::size_t bytes_of(Tensor const& t) {
  return static_cast<std::size_t>(t.elements()) * dtype_bytes(t.dtype);
}
bool equal(Tensor const& a, Tensor const& b) {
  return bytes_of(a) == bytes_of(b) && std::memcmp(a.data, b.data, bytes_of(a)) == 0;
}

// 20 log10(|want| / |want - have|).
double db(Tensor const& want, Tensor const& have) {
  double signal = 0, noise = 0;
  auto const at = [](Tensor const& t, std::int64_t i) -> double {
    return t.dtype == DType::fp32 ? static_cast<float const*>(t.data)[i]
                                  : emulator::widen(static_cast<Bits const*>(t.data)[i]);
  };
  for (std::int64_t i = 0; i < want.elements(); ++i) {
    double const a = at(want, i), b = at(have, i);
    signal += a * a;
    noise += (a - b) * (a - b);
  }
  return noise == 0 ? 999 : 10 * std::log10(signal / noise);
}

void expect_codes_of_h(Layer const& cpu, Layer const& gpu) {
  auto const* const want = static_cast<std::uint8_t const*>(cpu.forward.h.data);
  auto const* const have = static_cast<std::uint8_t const*>(gpu.forward.h.data);
  std::int64_t const rows = cpu.rows(), count = rows * cpu.forward.h.shape[1];
  std::int64_t other = 0;
  for (std::int64_t i = 0; i < count; ++i) other += want[i] != have[i];
  EXPECT_LT(other, count / 20);
  Tensor const& scales = cpu.forward.h_scale;
  for (std::int64_t i = 0; i < scales.elements(); ++i) {
    float const scale = static_cast<float const*>(scales.data)[i];
    float const own = static_cast<float const*>(gpu.forward.h_scale.data)[i];
    ASSERT_NEAR(own, scale, scale / 128) << "row " << i % scales.shape[1] << " of " << rows;
  }
}

class LayerE4m3 : public testing::Test {
 protected:
  LayerE4m3() { cuda::start_played_cuda({.major = 9, .sm_count = 1}); }
  [[nodiscard]] static Context context(DeviceKind kind) {
    auto made = Context::create({.device = {kind, 0}});
    EXPECT_TRUE(made.ok()) << made.status().text();
    return std::move(made).value();
  }

  void expect_near(MoeDesc const& desc) {
    Context const host = context(DeviceKind::cpu), device = context(DeviceKind::cuda);
    Layer const cpu(host, desc), gpu(device, desc);
    ASSERT_NO_FATAL_FAILURE(cpu.run());
    ASSERT_NO_FATAL_FAILURE(gpu.run());
    EXPECT_TRUE(equal(cpu.forward.x8, gpu.forward.x8));
    EXPECT_TRUE(equal(cpu.forward.x_scale, gpu.forward.x_scale));
    EXPECT_EQ(cpu.rows(), gpu.rows());
    expect_codes_of_h(cpu, gpu);
    double const least = 30;
    EXPECT_GT(db(cpu.forward.o, gpu.forward.o), 32);
    EXPECT_GT(db(cpu.backward.dx, gpu.backward.dx), least);
    EXPECT_GT(db(cpu.backward.dscores, gpu.backward.dscores), least - 3);
    EXPECT_GT(db(cpu.backward.gradients.dw_up, gpu.backward.gradients.dw_up), least);
    EXPECT_GT(db(cpu.backward.gradients.dw_down, gpu.backward.gradients.dw_down), least);
  }

  void expect_equal_bits(MoeDesc const& one, MoeDesc const& other) {
    Context const device = context(DeviceKind::cuda);
    Layer const a(device, one), b(device, other);
    ASSERT_NO_FATAL_FAILURE(a.run());
    ASSERT_NO_FATAL_FAILURE(b.run());
    EXPECT_TRUE(equal(a.forward.o, b.forward.o));
    EXPECT_TRUE(equal(a.backward.dx, b.backward.dx));
    EXPECT_TRUE(equal(a.backward.dscores, b.backward.dscores));
    EXPECT_TRUE(equal(a.backward.gradients.dw_up, b.backward.gradients.dw_up));
    EXPECT_TRUE(equal(a.backward.gradients.dw_down, b.backward.gradients.dw_down));
  }
};

constexpr MoeShape kCodes{
    .tokens = 37, .hidden = 256, .intermediate = 256, .experts = 4, .top_k = 2};

TEST_F(LayerE4m3, IsNearTheCpu) { expect_near(fp8_desc(kCodes)); }

TEST_F(LayerE4m3, RowsOfGateAndUpInTurns) {
  MoeDesc desc = fp8_desc(kCodes);
  desc.layout.order = GateUpOrder::interleaved;
  expect_near(desc);
}

TEST_F(LayerE4m3, TransposedWeights) {
  MoeDesc desc = fp8_desc(kCodes);
  desc.layout = {GateUpOrder::up_first, WeightOrientation::transposed};
  expect_near(desc);
}

TEST_F(LayerE4m3, HMadeAgainHasEqualBits) {
  MoeDesc const saved = fp8_desc(kCodes);
  MoeDesc made = saved;
  made.save = SavePolicy::x;
  expect_equal_bits(saved, made);
}

TEST_F(LayerE4m3, CodesOfDhOverThoseOfHHaveEqualBits) {
  MoeDesc const apart = fp8_desc(kCodes);
  MoeDesc over = apart;
  over.overwrite_h = true;
  expect_equal_bits(apart, over);
}

TEST_F(LayerE4m3, CodesOfWeightsHaveEqualBits) {
  for (SavePolicy const save : {SavePolicy::h, SavePolicy::x}) {
    MoeDesc quantises = fp8_desc(kCodes);
    quantises.save = save;
    if (save == SavePolicy::x) quantises.layout.order = GateUpOrder::interleaved;
    MoeDesc reads = quantises;
    reads.weight_codes = true;
    EXPECT_LT(cuda::workspace_bytes(reads, Pass::forward, 0),
              cuda::workspace_bytes(quantises, Pass::forward, 0));
    EXPECT_LT(cuda::workspace_bytes(reads, Pass::backward, 0),
              cuda::workspace_bytes(quantises, Pass::backward, 0));
    expect_equal_bits(quantises, reads);
  }
}

TEST_F(LayerE4m3, CodesOfWeightsAreTheCpus) {
  Context const host = context(DeviceKind::cpu), device = context(DeviceKind::cuda);
  MoeDesc desc = fp8_desc(kCodes);
  desc.weight_codes = true;
  desc.layout = {GateUpOrder::up_first, WeightOrientation::transposed};
  Layer const cpu(host, desc), gpu(device, desc);
  for (auto const part : {&QuantisedWeights::up, &QuantisedWeights::up_transposed,
                          &QuantisedWeights::up_scales, &QuantisedWeights::down,
                          &QuantisedWeights::down_transposed, &QuantisedWeights::down_scales}) {
    EXPECT_TRUE(equal(cpu.codes.*part, gpu.codes.*part));
  }
}

}  // namespace
}  // namespace tessera
