// SPDX-License-Identifier: Apache-2.0
// A layer of precision fp8 on a GPU of sm_90, with the kernels of codes from their sources: quantised_layer.hpp.
#include "tests/emulator/sm100/quantised_layer.hpp"

namespace tessera::emulator {
namespace {

class LayerE4m3 : public testing::Test {
 protected:
  LayerE4m3() { cuda::start_played_cuda({.major = 9, .sm_count = 1}); }
};

constexpr MoeShape kCodes{
    .tokens = 37, .hidden = 256, .intermediate = 256, .experts = 4, .top_k = 2};
constexpr Nearness kNear{.o = 32, .dx = 30, .dscores = 27, .dw = 30, .other_codes = 1.0 / 20};

MoeDesc fp8_desc() { return quantised_desc(kCodes, Precision::fp8); }

TEST_F(LayerE4m3, IsNearTheCpu) { expect_near_the_cpu(fp8_desc(), kNear); }

TEST_F(LayerE4m3, RowsOfGateAndUpInTurns) {
  MoeDesc desc = fp8_desc();
  desc.layout.order = GateUpOrder::interleaved;
  expect_near_the_cpu(desc, kNear);
}

TEST_F(LayerE4m3, TransposedWeights) {
  MoeDesc desc = fp8_desc();
  desc.layout = {GateUpOrder::up_first, WeightOrientation::transposed};
  expect_near_the_cpu(desc, kNear);
}

TEST_F(LayerE4m3, HMadeAgainHasEqualBits) {
  MoeDesc made = fp8_desc();
  made.save = SavePolicy::x;
  expect_equal_bits(fp8_desc(), made);
}

TEST_F(LayerE4m3, BackwardByTwoCallsHasEqualBits) { expect_equal_bits_when_split(fp8_desc()); }

TEST_F(LayerE4m3, CodesOfDhOverThoseOfHHaveEqualBits) {
  MoeDesc over = fp8_desc();
  over.overwrite_h = true;
  expect_equal_bits(fp8_desc(), over);
}

TEST_F(LayerE4m3, CodesOfWeightsHaveEqualBits) {
  Context const device = context_on(DeviceKind::cuda);
  for (SavePolicy const save : {SavePolicy::h, SavePolicy::x}) {
    MoeDesc quantises = fp8_desc();
    quantises.save = save;
    if (save == SavePolicy::x) quantises.layout.order = GateUpOrder::interleaved;
    MoeDesc reads = quantises;
    reads.weight_codes = true;
    for (Pass const pass : {Pass::forward, Pass::backward}) {
      EXPECT_LT(workspace_bytes(device, reads, pass).value(),
                workspace_bytes(device, quantises, pass).value());
    }
    expect_equal_bits(quantises, reads);
  }
}

TEST_F(LayerE4m3, CodesOfWeightsAreTheCpus) {
  Context const host = context_on(DeviceKind::cpu), device = context_on(DeviceKind::cuda);
  MoeDesc desc = fp8_desc();
  desc.weight_codes = true;
  desc.layout = {GateUpOrder::up_first, WeightOrientation::transposed};
  QuantisedLayer const cpu(host, desc), gpu(device, desc);
  for (auto const part : {&QuantisedWeights::up, &QuantisedWeights::up_transposed,
                          &QuantisedWeights::up_scales, &QuantisedWeights::down,
                          &QuantisedWeights::down_transposed, &QuantisedWeights::down_scales}) {
    EXPECT_TRUE(equal(cpu.codes.*part, gpu.codes.*part));
  }
}

}  // namespace
}  // namespace tessera::emulator
