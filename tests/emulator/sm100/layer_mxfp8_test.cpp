// SPDX-License-Identifier: Apache-2.0
// A layer of precision mxfp8 on a GPU of sm_100a, with the kernels of codes and of weight gradients from their sources:
// quantised_layer.hpp.
#include "tests/emulator/sm100/quantised_layer.hpp"

namespace tessera::emulator {
namespace {

class LayerMxfp8 : public testing::Test {
 protected:
  LayerMxfp8() { play(4); }
  static void play(int sm_count, std::uint64_t seed = 7) {
    cuda::start_played_cuda({.major = 10, .sm_count = sm_count, .seed = seed});
  }
};

// d and n are no multiples of 256, as fp8 needs them; too few rows for pairs of CTAs.
constexpr MoeShape kFew{.tokens = 37, .hidden = 384, .intermediate = 128, .experts = 4, .top_k = 2};
// A layer of codes is at 23 dB beside one of bf16. Here some codes of h, a and dh round another way.
constexpr Nearness kNear{.o = 45, .dx = 45, .dscores = 55, .dw = 48, .other_codes = 1.0 / 50};

MoeDesc mxfp8_desc(MoeShape const& shape = kFew) { return quantised_desc(shape, Precision::mxfp8); }

TEST_F(LayerMxfp8, IsNearTheCpu) { expect_near_the_cpu(mxfp8_desc(), kNear); }

// One code that rounds another way is a larger part of few rows.
TEST_F(LayerMxfp8, FewTokens) {
  MoeShape shape = kFew;
  Nearness near = kNear;
  near.dx = 40;
  for (std::int64_t const tokens : {1, 3}) {
    SCOPED_TRACE(tokens);
    shape.tokens = tokens;
    expect_near_the_cpu(mxfp8_desc(shape), near);
  }
}

TEST_F(LayerMxfp8, OneExpertHasAllRows) {
  MoeShape shape = kFew;
  shape.top_k = 1;
  expect_near_the_cpu(mxfp8_desc(shape), kNear, Slots::one_expert);
}

TEST_F(LayerMxfp8, Layouts) {
  for (WeightLayout const& layout :
       {WeightLayout{GateUpOrder::interleaved, WeightOrientation::rows},
        WeightLayout{GateUpOrder::blocked, WeightOrientation::rows, 32},
        WeightLayout{GateUpOrder::up_first, WeightOrientation::transposed}}) {
    SCOPED_TRACE(static_cast<int>(layout.order));
    MoeDesc desc = mxfp8_desc();
    desc.layout = layout;
    expect_near_the_cpu(desc, kNear);
  }
}

// The router's GEMMs are the plain twins, and its part of dx is in dx before the dx rows are added.
TEST_F(LayerMxfp8, Routers) {
  Nearness near = kNear;
  near.dw_router = 45;
  for (auto const& [kind, round] : {std::pair{RouterKind::topk_softmax, Rounding::none},
                                    {RouterKind::softmax_topk, Rounding::none},
                                    {RouterKind::topk_softmax, Rounding::nr_f}}) {
    SCOPED_TRACE(static_cast<int>(kind));
    MoeDesc desc = mxfp8_desc();
    desc.router.kind = kind;
    desc.router.round = round;
    if (round != Rounding::none) desc.router.tile = 8;
    expect_near_the_cpu(desc, near);
  }
}

// Kernels of pairs of CTAs give the bits of those of one CTA, whatever the order of events is.
TEST_F(LayerMxfp8, BitsDependOnNoScheduleAndOnNoPairs) {
  MoeDesc const desc =
      mxfp8_desc({.tokens = 400, .hidden = 256, .intermediate = 128, .experts = 3, .top_k = 2});
  Context const host = context_on(DeviceKind::cpu), device = context_on(DeviceKind::cuda);
  play(1);
  Context const of_one_sm = context_on(DeviceKind::cuda);
  QuantisedLayer const cpu(host, desc), pairs(device, desc), again(device, desc),
      one(of_one_sm, desc);
  ASSERT_NO_FATAL_FAILURE(cpu.run());
  ASSERT_NO_FATAL_FAILURE(pairs.run());
  expect_near(cpu, pairs, kNear);
  ASSERT_NO_FATAL_FAILURE(one.run());
  play(4, 8);
  ASSERT_NO_FATAL_FAILURE(again.run());
  for (QuantisedLayer const* const other : {&again, &one}) {
    expect_equal_results(pairs, *other);
    EXPECT_TRUE(equal(pairs.forward.h_scale, other->forward.h_scale));
  }
}

TEST_F(LayerMxfp8, HMadeAgainHasEqualBits) {
  MoeDesc made = mxfp8_desc();
  made.save = SavePolicy::x;
  expect_equal_bits(mxfp8_desc(), made);
}

TEST_F(LayerMxfp8, BackwardByTwoCallsHasEqualBits) { expect_equal_bits_when_split(mxfp8_desc()); }

TEST_F(LayerMxfp8, CodesOfDhOverThoseOfHHaveEqualBits) {
  MoeDesc over = mxfp8_desc();
  over.overwrite_h = true;
  expect_equal_bits(mxfp8_desc(), over);
}

// Scales are a 32nd of what has codes: of x and h, and of what the workspace holds.
TEST_F(LayerMxfp8, BytesAreThoseOfCodesAndScales) {
  Context const device = context_on(DeviceKind::cuda);
  MoeDesc const desc = mxfp8_desc();
  std::size_t const x = 37 * 384, h = 74 * 256, weights = 4 * 384 * 256;
  SavedBytes const saved = saved_bytes(desc).value();
  EXPECT_EQ(saved.x, x);
  EXPECT_EQ(saved.x_scale, x / 32);
  EXPECT_EQ(saved.h, h);
  EXPECT_EQ(saved.h_scale, h / 32);
  // Beside codes: y rows in bf16; regions begin at multiples of 256.
  std::size_t const forward = workspace_bytes(device, desc, Pass::forward).value();
  std::size_t const a = 74 * 128, down = weights / 2, y = 2 * 74 * 384;
  std::size_t const held = (a + down) * 33 / 32 + std::max(y, weights * 33 / 32);
  EXPECT_GE(forward, held);
  EXPECT_LT(forward, held + 16 * 256);
}

// What a call launches, and that no GPU has run it.
TEST_F(LayerMxfp8, ExplainsItself) {
  Context const device = context_on(DeviceKind::cuda);
  for (auto const& [pass, of_codes] : {std::pair{Pass::forward, 4}, {Pass::backward, 5}}) {
    auto const ops = explain(device, mxfp8_desc(), pass);
    ASSERT_TRUE(ops.ok()) << ops.status().text();
    int chosen = 0;
    for (OpExplanation const& op : ops.value()) {
      Candidate const& first = op.candidates.front();
      EXPECT_TRUE(first.chosen) << op.op;
      if (op.op == "aggregate") continue;  // a neutral kernel, which Hopper GPUs have run
      EXPECT_NE(first.reason.find("never run on hardware"), std::string::npos) << op.op;
      chosen += first.name == "cuda/mxfp8";
    }
    EXPECT_EQ(chosen, of_codes);
  }
}

TEST_F(LayerMxfp8, RefusesByNameWhatIsNotServed) {
  struct Refused {
    char const* text;
    void (*change)(MoeDesc&);
  };
  Context const device = context_on(DeviceKind::cuda);
  for (Refused const& refused : {
           Refused{"precision=fp8 on sm_100a: ",
                   [](MoeDesc& d) {
                     d.precision = Precision::fp8;
                     d.shape.hidden = d.shape.intermediate = 256;
                   }},
           {"activation=geglu with precision=mxfp8",
            [](MoeDesc& d) { d.activation.kind = ActivationKind::geglu; }},
           {"bias with precision=mxfp8", [](MoeDesc& d) { d.bias = true; }},
           {"hidden=160 with precision=mxfp8", [](MoeDesc& d) { d.shape.hidden = 160; }},
           {"intermediate=96 with precision=mxfp8", [](MoeDesc& d) { d.shape.intermediate = 96; }},
           {"layout transposed, columns of gate and up in turns, with precision=mxfp8",
            [](MoeDesc& d) {
              d.layout = {GateUpOrder::interleaved, WeightOrientation::transposed};
            }},
           {"layout blocked:16 with precision=mxfp8",
            [](MoeDesc& d) { d.layout = {GateUpOrder::blocked, WeightOrientation::rows, 16}; }},
           {"experts=641 with precision=mxfp8", [](MoeDesc& d) { d.shape.experts = 641; }},
           {"weight_codes with precision mxfp8", [](MoeDesc& d) { d.weight_codes = true; }},
       }) {
    MoeDesc desc = mxfp8_desc();
    refused.change(desc);
    for (Pass const pass : {Pass::forward, Pass::backward}) {
      Status const status = workspace_bytes(device, desc, pass).status();
      EXPECT_EQ(std::string(status.text()).find(refused.text), 0) << status.text();
    }
  }
}

TEST_F(LayerMxfp8, IsRefusedOnHopper) {
  cuda::start_played_cuda({.major = 9, .sm_count = 1});
  Context const device = context_on(DeviceKind::cuda);
  Status const status = workspace_bytes(device, mxfp8_desc(), Pass::forward).status();
  EXPECT_EQ(std::string(status.text()).find("precision=mxfp8: Hopper"), 0) << status.text();
}

}  // namespace
}  // namespace tessera::emulator
