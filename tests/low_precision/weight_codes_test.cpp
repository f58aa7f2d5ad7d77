// SPDX-License-Identifier: Apache-2.0
// Weights that are handed in as codes: every bit is that of a call which quantises them itself, and what does not fit
// is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/bf16.hpp"
#include "tessera/low_precision.hpp"
#include "tests/low_precision/layer_codes.hpp"
#include "tests/low_precision/support.hpp"

namespace tessera::low_precision_tests {
namespace {

using core::Bf16;

constexpr MoeShape kShape{
    .tokens = 20, .hidden = 256, .intermediate = 128, .experts = 3, .top_k = 2};

MoeDesc fp8_desc(WeightLayout const& layout = {}) {
  MoeDesc desc;
  desc.shape = kShape;
  desc.dtype = DType::bf16;
  desc.layout = layout;
  desc.bias = true;
  desc.precision = Precision::fp8;
  return desc;
}

MoeDesc with_codes(MoeDesc desc) {
  desc.weight_codes = true;
  return desc;
}

/// One call of forward and of backward. Data depend on shape and layout alone.
class Call {
 public:
  explicit Call(MoeDesc const& given) : desc(given) {
    MoeShape const& s = desc.shape;
    std::int64_t const e = s.experts, d = s.hidden, n = s.intermediate, slots = desc.num_slots();
    std::int64_t const width = desc.up_width() * n;
    bool const turned = desc.layout.orientation == WeightOrientation::transposed;
    bool const apart = desc.layout.orientation == WeightOrientation::separate;
    ConstTensor const wide = values({e, width, d}, 1);
    weights.w_up = apart ? values({e, n, d}, 2) : turned ? values({e, d, width}, 2) : wide;
    if (apart) weights.w_gate = values({e, n, d}, 3);
    weights.w_down = turned ? values({e, n, d}, 4) : values({e, d, n}, 4);
    weights.b_up = values({e, apart ? n : width}, 5);
    if (apart) weights.b_gate = values({e, n}, 6);
    weights.b_down = values({e, d}, 7);

    codes = room_for_codes(desc, [this](DType dtype, std::initializer_list<std::int64_t> shape) {
      return room(dtype, shape);
    });

    forward.x = values({s.tokens, d}, 8);
    Tensor const ids = room(DType::int32, {s.tokens, s.top_k});
    Tensor const scores = room(DType::fp32, {s.tokens, s.top_k});
    for (std::int64_t i = 0; i < slots; ++i) {
      static_cast<std::int32_t*>(ids.data)[i] = static_cast<std::int32_t>((i / 2 + i % 2) % e);
      static_cast<float*>(scores.data)[i] = 0.2f + 0.03f * static_cast<float>(i % 17);
    }
    forward.topk_ids = ids;
    forward.topk_weights = scores;
    forward.o = room(DType::bf16, {s.tokens, d});
    forward.x8 = room(DType::fp8_e4m3, {s.tokens, d});
    forward.x_scale = room(DType::fp32, {s.tokens, d / 128});
    if (desc.save == SavePolicy::h) {
      forward.h = room(DType::fp8_e4m3, {slots, width});
      forward.h_scale = room(DType::fp32, {width / 128, padded_scale_rows(slots)});
    }
    forward.routing = memory(routing_bytes(desc).value());
    forward.workspace = memory(workspace_bytes(context(3), desc, Pass::forward).value());

    backward.d_o = values({s.tokens, d}, 9);
    backward.h = forward.h;
    backward.x8 = forward.x8;
    backward.x_scale = forward.x_scale;
    backward.h_scale = forward.h_scale;
    backward.routing = {forward.routing.data, forward.routing.bytes};
    backward.dx = room(DType::bf16, {s.tokens, d});
    backward.dscores = room(DType::fp32, {slots});
    backward.gradients.dw_up = like(weights.w_up);
    if (apart) backward.gradients.dw_gate = like(weights.w_gate);
    backward.gradients.dw_down = like(weights.w_down);
    backward.workspace = memory(workspace_bytes(context(3), desc, Pass::backward).value());

    forward.weights = weights;
    if (desc.weight_codes) {
      forward.weights.w_up = forward.weights.w_gate = forward.weights.w_down = {};
      forward.weight_codes = as_read(codes);
    }
    backward.weights = forward.weights;
    backward.weight_codes = forward.weight_codes;
  }

  void run() const {
    if (desc.weight_codes) {
      Status const made = quantise_weights(context(3), desc, weights, scale_rule(desc), codes);
      ASSERT_TRUE(made.ok()) << made.text();
    }
    Status const first = moe_forward(context(3), desc, forward);
    ASSERT_TRUE(first.ok()) << first.text();
    Status const second = moe_backward(context(3), desc, backward);
    ASSERT_TRUE(second.ok()) << second.text();
  }

  /// All that a caller sees, as bytes.
  [[nodiscard]] std::string results() const {
    std::string out;
    for (Tensor const* const tensor :
         {&forward.o, &forward.x8, &forward.h, &forward.h_scale, &backward.dx, &backward.dscores,
          &backward.gradients.dw_up, &backward.gradients.dw_gate, &backward.gradients.dw_down}) {
      if (tensor->present()) out.append(static_cast<char const*>(tensor->data), bytes_of(*tensor));
    }
    return out;
  }

  MoeDesc desc;
  ExpertWeights weights;
  QuantisedWeights codes;
  MoeForwardArgs forward;
  MoeBackwardArgs backward;

 private:
  static std::size_t bytes_of(Tensor const& t) {
    return static_cast<std::size_t>(t.elements()) * dtype_bytes(t.dtype);
  }
  Buffer memory(std::size_t bytes) {
    auto const& own = memory_.emplace_back(std::make_unique<std::vector<std::byte>>(bytes));
    return {own->data(), bytes};
  }
  Tensor room(DType dtype, std::initializer_list<std::int64_t> shape) {
    Tensor out = tensor(static_cast<void*>(nullptr), dtype, shape);
    out.data = memory(bytes_of(out)).data;
    return out;
  }
  Tensor like(ConstTensor const& weight) {
    return room(DType::bf16, {weight.shape[0], weight.shape[1], weight.shape[2]});
  }
  /// Blocks of 128 x 128 have scales of their own.
  ConstTensor values(std::initializer_list<std::int64_t> shape, std::int64_t seed) {
    Tensor const out = room(DType::bf16, shape);
    std::int64_t const width = out.shape[out.rank - 1];
    for (std::int64_t i = 0; i < out.elements(); ++i) {
      std::int64_t const r = i / width / 128, k = i % width / 128;
      auto const part = static_cast<float>((i * 7919 + seed * 131) % 1009 - 504) / 4000.0f;
      static_cast<Bf16*>(out.data)[i] =
          core::round_to<Bf16>(std::ldexp(part, static_cast<int>((3 * r + 2 * k) % 5) - 2));
    }
    return out;
  }

  std::vector<std::unique_ptr<std::vector<std::byte>>> memory_;
};

TEST(WeightCodes, HaveTheBitsOfACallThatQuantises) {
  WeightLayout const layouts[] = {{},
                                  {.order = GateUpOrder::interleaved},
                                  {GateUpOrder::up_first, WeightOrientation::transposed},
                                  {.orientation = WeightOrientation::separate}};
  for (auto const& layout : layouts) {
    for (bool const pow2 : {false, true}) {
      MoeDesc desc = fp8_desc(layout);
      desc.pow2_scales = pow2;
      desc.save = pow2 ? SavePolicy::x : SavePolicy::h;
      Call const quantises(desc), reads(with_codes(desc));
      ASSERT_NO_FATAL_FAILURE(quantises.run());
      ASSERT_NO_FATAL_FAILURE(reads.run());
      EXPECT_TRUE(quantises.results() == reads.results())
          << "order " << static_cast<int>(layout.order) << ", orientation "
          << static_cast<int>(layout.orientation) << ", pow2 " << pow2;
    }
  }
}

TEST(WeightCodes, APassNeedsNoMoreThanItReads) {
  Call const right(with_codes(fp8_desc()));
  ASSERT_NO_FATAL_FAILURE(right.run());
  Call call(with_codes(fp8_desc()));
  call.forward.weight_codes.up_transposed = call.forward.weight_codes.down_transposed = {};
  call.backward.weight_codes.up = call.backward.weight_codes.down = {};
  ASSERT_NO_FATAL_FAILURE(call.run());
  EXPECT_TRUE(call.results() == right.results());
}

TEST(WeightCodes, RefusesWhatDoesNotFit) {
  auto const expect = [](StatusCode code, char const* text, MoeDesc const& desc, auto&& change) {
    Call call(with_codes(fp8_desc()));
    call.desc = desc;
    change(call);
    for (Status const& status : {moe_forward(context(3), call.desc, call.forward),
                                 moe_backward(context(3), call.desc, call.backward)}) {
      if (status.ok()) continue;  // it does not read what is wrong
      EXPECT_EQ(status.code(), code) << status.text();
      EXPECT_NE(std::string(status.text()).find(text), std::string::npos) << status.text();
      return;
    }
    ADD_FAILURE() << text << " was accepted";
  };
  MoeDesc const desc = with_codes(fp8_desc());
  auto const invalid = StatusCode::invalid_argument;
  expect(invalid, "w_up: ", desc, [](Call& c) { c.forward.weights.w_up = c.weights.w_up; });
  expect(invalid, "w_down: ", desc, [](Call& c) { c.backward.weights.w_down = c.weights.w_down; });
  expect(invalid, "weight_codes.up: ", desc, [](Call& c) { c.forward.weight_codes.up = {}; });
  expect(invalid, "weight_codes.down_scales: ", desc,
         [](Call& c) { c.backward.weight_codes.down_scales = {}; });
  expect(invalid, "weight_codes.down_transposed: ", desc,
         [](Call& c) { c.backward.weight_codes.down_transposed = {}; });
  expect(invalid, "weight_codes.down: ", desc, [](Call& c) { c.forward.weight_codes.down = {}; });
  expect(invalid, "weight_codes.up_scales: ", desc,
         [](Call& c) { c.forward.weight_codes.up_scales = {}; });
  expect(invalid, "weight_codes.up_scales: ", desc,
         [](Call& c) { c.backward.weight_codes.up_scales = {}; });
  expect(invalid, "weight_codes.up_transposed: ", desc,
         [](Call& c) { c.backward.weight_codes.up_transposed = {}; });
  expect(invalid, "weight_codes.up: ", desc,  // of another shape
         [](Call& c) { c.forward.weight_codes.up = c.codes.up_transposed; });
  expect(invalid, "weight_codes.up_scales: ", desc,
         [](Call& c) { c.forward.weight_codes.up_scales.dtype = DType::e8m0; });
  expect(invalid, "weight_codes.down: ", desc, [](Call& c) {
    c.forward.weight_codes.down.stride[1] = 1;
    c.forward.weight_codes.down.stride[2] = 256;
  });
  expect(invalid, "weight_codes.down: stride 65536 of dimension 0; it must be contiguous", desc,
         [](Call& c) { c.forward.weight_codes.down.stride[0] = 65536; });
  expect(invalid, "weight_codes.up: ", fp8_desc(),
         [](Call& c) { c.forward.weights = c.backward.weights = c.weights; });
  MoeDesc other = desc;
  other.precision = Precision::native;
  expect(invalid, "weight_codes with precision native: only layers of fp8 read codes", other,
         [](Call&) {});
  other.precision = Precision::mxfp8;
  expect(invalid, "weight_codes with precision mxfp8", other, [](Call&) {});
}

// h is made again from x there.
TEST(WeightCodes, BackwardReadsCodesOfUpWithoutH) {
  MoeDesc desc = with_codes(fp8_desc());
  desc.save = SavePolicy::x;
  Call call(desc);
  ASSERT_NO_FATAL_FAILURE(call.run());
  call.backward.weight_codes.up = {};
  Status const status = moe_backward(context(3), desc, call.backward);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(std::string(status.text()).find("weight_codes.up: "), std::string::npos)
      << status.text();
}

}  // namespace
}  // namespace tessera::low_precision_tests
