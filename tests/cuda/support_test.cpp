// SPDX-License-Identifier: Apache-2.0
// What the CUDA backend decides without a device: which GPUs, which layers, what an error word says.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/host/kernel_limits.hpp"
#include "cuda/layer/architecture.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/error_word.hpp"

namespace tessera::cuda {
namespace {

TEST(CheckArchitecture, ServesHopperAlone) {
  EXPECT_TRUE(check_architecture(0, "NVIDIA H200", 9, 0).ok());
  struct Other {
    char const* name;
    int major, minor;
    char const* capability;
  };
  for (Other const& gpu : {Other{"NVIDIA A100", 8, 0, "8.0"},
                           {"NVIDIA L40S", 8, 9, "8.9"},
                           {"NVIDIA B200", 10, 0, "10.0"},
                           {"NVIDIA B300", 10, 3, "10.3"},
                           {"NVIDIA RTX 5090", 12, 0, "12.0"},
                           {"Tesla V100", 7, 0, "7.0"}}) {
    Status const status = check_architecture(3, gpu.name, gpu.major, gpu.minor);
    EXPECT_EQ(status.code(), StatusCode::environment) << gpu.name;
    std::string const text = status.text();
    for (std::string const part : {"cuda:3", gpu.name, gpu.capability, "use device cpu"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
    }
  }
}

// A build with kernels for one architecture, or for both, takes the GPUs of these and names what it has.
TEST(CheckArchitecture, TakesWhatTheBuildHas) {
  struct Case {
    Built built;
    char const* named;
  };
  for (auto const& [has, named] : {Case{{true, true}, "built for 9.0 and 10.0"},
                                   {{true, false}, "built for 9.0:"},
                                   {{false, true}, "built for 10.0:"}}) {
    auto const taken = [&](int major, int minor) {
      return check_architecture(0, "a GPU", major, minor, Unproven::taken, has);
    };
    EXPECT_EQ(taken(9, 0).ok(), has.sm_90);
    EXPECT_EQ(taken(10, 0).ok(), has.sm_100);
    std::string const text = taken(8, 0).text();
    EXPECT_NE(text.find(named), std::string::npos) << text;
    EXPECT_FALSE(check_architecture(0, "a GPU", 10, 0, Unproven::refused, has).ok());
  }
  std::string const lacks =
      check_architecture(0, "NVIDIA H200", 9, 0, Unproven::taken, {false, true}).text();
  EXPECT_NE(lacks.find("TESSERA_CUDA_ARCHS"), std::string::npos) << lacks;
  std::string const unbuilt =
      check_architecture(0, "NVIDIA B200", 10, 0, Unproven::taken, {true, false}).text();
  EXPECT_NE(unbuilt.find("TESSERA_CUDA_ARCHS"), std::string::npos) << unbuilt;
}

TEST(CheckArchitecture, JoinsHopperGpusAlone) {
  EXPECT_TRUE(check_joins_gpus(Architecture::sm_90).ok());
  Status const status = check_joins_gpus(Architecture::sm_100);
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(std::string(status.text()).find("sm_90a alone"), std::string::npos) << status.text();
}

TEST(CheckArchitecture, MultipliesCodesInTheBlocksOfEachGpu) {
  EXPECT_TRUE(check_multiplies_codes(Architecture::sm_90, Precision::fp8).ok());
  EXPECT_TRUE(check_multiplies_codes(Architecture::sm_100, Precision::mxfp8).ok());
  Status const fp8 = check_multiplies_codes(Architecture::sm_100, Precision::fp8);
  Status const mxfp8 = check_multiplies_codes(Architecture::sm_90, Precision::mxfp8);
  EXPECT_EQ(fp8.code(), StatusCode::unsupported);
  EXPECT_EQ(mxfp8.code(), StatusCode::unsupported);
  EXPECT_TRUE(std::string(fp8.text()).ends_with("use precision mxfp8 or native")) << fp8.text();
  EXPECT_TRUE(std::string(mxfp8.text()).ends_with("use fp8, native or device cpu")) << mxfp8.text();
}

TEST(CheckArchitecture, TakesUnprovenKernelsWhereAsked) {
  EXPECT_TRUE(check_architecture(0, "NVIDIA B200", 10, 0, Unproven::taken).ok());
  EXPECT_TRUE(check_architecture(0, "NVIDIA H200", 9, 0, Unproven::taken).ok());
  EXPECT_FALSE(check_architecture(0, "NVIDIA B300", 10, 3, Unproven::taken).ok());
  EXPECT_FALSE(check_architecture(0, "NVIDIA A100", 8, 0, Unproven::taken).ok());
  std::string const text = check_architecture(0, "NVIDIA B200", 10, 0).text();
  for (std::string const part : {"compiled and emulated, never run on hardware", "unproven_kernels",
                                 "--unproven-kernels", "use_unproven_kernels"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
  }
  EXPECT_EQ(architecture_of(10), Architecture::sm_100);
  EXPECT_EQ(architecture_of(9), Architecture::sm_90);
}

MoeDesc served_desc() {
  MoeDesc desc;
  desc.shape = {.tokens = 16, .hidden = 8, .intermediate = 8, .experts = 64, .top_k = 2};
  desc.dtype = DType::bf16;
  desc.router.kind = RouterKind::topk_softmax;
  return desc;
}

TEST(CheckSupported, ServesBf16) { EXPECT_TRUE(check_supported(served_desc()).ok()); }

TEST(CheckSupported, ServesExpertsThatTakeTokens) {
  MoeDesc desc = served_desc();
  desc.router.round = Rounding::balance_f;
  EXPECT_TRUE(check_supported(desc).ok());
  desc.router = {.kind = RouterKind::expert_choice};
  EXPECT_TRUE(check_supported(desc).ok());
}

MoeDesc quantised_desc() {
  MoeDesc desc = served_desc();
  desc.shape.hidden = 256;
  desc.shape.intermediate = 256;
  desc.precision = Precision::fp8;
  return desc;
}

TEST(CheckSupported, ServesQuantisedOperands) {
  MoeDesc desc = quantised_desc();
  EXPECT_TRUE(check_supported(desc).ok());
  desc.layout.orientation = WeightOrientation::transposed;
  desc.save = SavePolicy::x;
  desc.router.round = Rounding::nr_f;
  EXPECT_TRUE(check_supported(desc).ok());
  desc.precision = Precision::automatic;
  EXPECT_TRUE(check_supported(desc).ok());
  desc.precision = Precision::mxfp8;
  desc.shape.hidden = desc.shape.intermediate = 384;
  EXPECT_TRUE(check_supported(desc).ok());
  desc.layout = {GateUpOrder::blocked, WeightOrientation::rows, 32};
  EXPECT_TRUE(check_supported(desc).ok());
}

TEST(CheckSupported, RefusesWhatIsNotComputedWithQuantisedOperands) {
  struct Refused {
    char const* text;
    void (*change)(MoeDesc&);
  };
  Refused const of_both[] = {
      {"activation=geglu ", [](MoeDesc& d) { d.activation.kind = ActivationKind::geglu; }},
      {"activation=silu ", [](MoeDesc& d) { d.activation.kind = ActivationKind::silu; }},
      {"bias ", [](MoeDesc& d) { d.bias = true; }},
      {"layout transposed, columns of gate and up in turns, ",
       [](MoeDesc& d) { d.layout = {GateUpOrder::interleaved, WeightOrientation::transposed}; }},
      {"layout transposed, columns of gate and up in turns, ",
       [](MoeDesc& d) { d.layout = {GateUpOrder::blocked, WeightOrientation::transposed, 64}; }},
      {"hidden=416 ", [](MoeDesc& d) { d.shape.hidden = 416; }},
      {"intermediate=96 ", [](MoeDesc& d) { d.shape.intermediate = 96; }},
      {"experts=641 ", [](MoeDesc& d) { d.shape.experts = 641; }},
      {"tokens*hidden=",
       [](MoeDesc& d) {
         d.shape.tokens = std::int64_t{1} << 24;
         d.shape.hidden = 8192;
       }},
  };
  auto const expect_refused = [](Refused const& refused, Precision precision) {
    MoeDesc desc = quantised_desc();
    desc.precision = precision;
    refused.change(desc);
    Status const status = check_supported(desc);
    std::string const text = status.text();
    EXPECT_EQ(status.code(), StatusCode::unsupported) << refused.text;
    EXPECT_TRUE(text.starts_with(refused.text)) << text;
    char const* const name = precision == Precision::fp8 ? "precision=fp8" : "precision=mxfp8";
    EXPECT_NE(text.find(name), std::string::npos) << text;
    desc.precision = Precision::native;
    desc.pow2_scales = false;
    EXPECT_TRUE(check_supported(desc).ok()) << refused.text << "is served in native precision";
  };
  for (Refused const& refused : of_both) {
    expect_refused(refused, Precision::fp8);
    expect_refused(refused, Precision::mxfp8);
  }
  expect_refused({"pow2_scales ", [](MoeDesc& d) { d.pow2_scales = true; }}, Precision::fp8);
  expect_refused({"hidden=384 ", [](MoeDesc& d) { d.shape.hidden = 384; }}, Precision::fp8);
  expect_refused({"intermediate=128 ", [](MoeDesc& d) { d.shape.intermediate = 128; }},
                 Precision::fp8);
  expect_refused(
      {"layout blocked:16 ",
       [](MoeDesc& d) { d.layout = {GateUpOrder::blocked, WeightOrientation::rows, 16}; }},
      Precision::mxfp8);
  expect_refused({"slots*2*intermediate=",
                  [](MoeDesc& d) {
                    d.shape.tokens = std::int64_t{1} << 27;
                    d.shape.intermediate = 384;
                  }},
                 Precision::mxfp8);
}

/// Qwen3-30B at 32768 tokens, one of the smallest layers that gain.
MoeDesc gaining_desc() {
  MoeDesc desc = served_desc();
  desc.shape = {.tokens = 32768, .hidden = 2048, .intermediate = 768, .experts = 128, .top_k = 8};
  desc.precision = Precision::automatic;
  return desc;
}

TEST(AutomaticPrecision, TakesFp8WhereItWasFasterAndAbove) {
  EXPECT_TRUE(check_gains_by_fp8(Architecture::sm_90, gaining_desc()).ok());
  MoeDesc desc = gaining_desc();
  desc.shape.hidden = 4096;
  desc.shape.intermediate = 1536;
  desc.save = SavePolicy::x;
  desc.overwrite_h = false;
  EXPECT_TRUE(check_gains_by_fp8(Architecture::sm_90, desc).ok());
  desc = gaining_desc();
  desc.shape.tokens /= 2;
  EXPECT_FALSE(check_gains_by_fp8(Architecture::sm_90, desc).ok());
  desc.weight_codes = true;
  EXPECT_TRUE(check_gains_by_fp8(Architecture::sm_90, desc).ok());
  // Whatever is at least as large as any of them: 7B-n1024, 30B-n256, and with codes 7B-n256 and Qwen3Next.
  desc = gaining_desc();
  for (MoeShape const& shape :
       {MoeShape{.tokens = 24576, .hidden = 1536, .intermediate = 1024, .experts = 32, .top_k = 2},
        MoeShape{
            .tokens = 32768, .hidden = 4096, .intermediate = 256, .experts = 256, .top_k = 16}}) {
    desc.shape = shape;
    EXPECT_TRUE(check_gains_by_fp8(Architecture::sm_90, desc).ok()) << shape.hidden;
  }
  for (MoeShape const& shape :
       {MoeShape{.tokens = 24576, .hidden = 1536, .intermediate = 256, .experts = 128, .top_k = 8},
        MoeShape{
            .tokens = 32768, .hidden = 2048, .intermediate = 512, .experts = 512, .top_k = 10}}) {
    desc.shape = shape;
    desc.weight_codes = false;
    EXPECT_FALSE(check_gains_by_fp8(Architecture::sm_90, desc).ok()) << shape.hidden;
    desc.weight_codes = true;
    EXPECT_TRUE(check_gains_by_fp8(Architecture::sm_90, desc).ok()) << shape.hidden;
  }
  // Rows that rounding may add are none that a shape is sure to have.
  desc = gaining_desc();
  desc.shape.tokens -= 16;
  desc.router.round = Rounding::up;
  EXPECT_FALSE(check_gains_by_fp8(Architecture::sm_90, desc).ok());
}

TEST(AutomaticPrecision, TakesNativeElsewhereAndSaysWhy) {
  struct Native {
    char const* text;
    void (*change)(MoeDesc&);
    Architecture architecture = Architecture::sm_90;
  };
  for (Native const& native : {
           Native{"hidden=1792: fp8 is expected to be faster from 2048 on",
                  [](MoeDesc& d) { d.shape.hidden = 1792; }},
           {"intermediate=512: ", [](MoeDesc& d) { d.shape.intermediate = 512; }},
           {"experts per token * intermediate=5376: ", [](MoeDesc& d) { d.shape.top_k = 7; }},
           {"rows per expert=2047: ", [](MoeDesc& d) { d.shape.tokens -= 1; }},
           {"rows per expert=639: fp8 is expected to be faster from 640 on",
            [](MoeDesc& d) {
              d.shape.tokens = 10239;
              d.weight_codes = true;
            }},
           {"hidden=1536: fp8 is expected to be faster from 4096 on",  // 7B-n256
            [](MoeDesc& d) {
              d.shape = {
                  .tokens = 24576, .hidden = 1536, .intermediate = 256, .experts = 128, .top_k = 8};
            }},
           {"experts per token * intermediate=1536: fp8 is expected to be faster from 2048 on",
            [](MoeDesc& d) {
              d.shape = {
                  .tokens = 32768, .hidden = 1536, .intermediate = 256, .experts = 128, .top_k = 6};
              d.weight_codes = true;
            }},
           {"experts per token * intermediate=0: ", [](MoeDesc& d) { d.shape.tokens = 0; }},
           {"precision=fp8 with dtype=fp32: ", [](MoeDesc& d) { d.dtype = DType::fp32; }},
           {"hidden=2112 ", [](MoeDesc& d) { d.shape.hidden = 2112; }},
           {"intermediate=896 ", [](MoeDesc& d) { d.shape.intermediate = 896; }},
           {"column_chunk=64 ", [](MoeDesc& d) { d.column_chunk = 64; }},
           {"activation=geglu ", [](MoeDesc& d) { d.activation.kind = ActivationKind::geglu; }},
           {"bias ", [](MoeDesc& d) { d.bias = true; }},
           {"precision=fp8 on sm_100a: ", [](MoeDesc&) {}, Architecture::sm_100},
       }) {
    MoeDesc desc = gaining_desc();
    native.change(desc);
    Status const status = check_gains_by_fp8(native.architecture, desc);
    EXPECT_FALSE(status.ok()) << native.text;
    EXPECT_TRUE(std::string(status.text()).starts_with(native.text)) << status.text();
  }
}

TEST(CheckSupported, RefusesTheRestWithAReason) {
  auto const refused = [](auto&& change) {
    MoeDesc desc = served_desc();
    change(desc);
    Status const status = check_supported(desc);
    EXPECT_EQ(status.code(), StatusCode::unsupported) << status.text();
    return std::string(status.text());
  };
  EXPECT_NE(refused([](MoeDesc& d) { d.dtype = DType::fp32; }).find("bf16"), std::string::npos);
  refused([](MoeDesc& d) { d.dtype = DType::fp16; });
  std::string const groups = refused([](MoeDesc& d) {
    d.router.kind = RouterKind::group_limited;
    d.router.groups = d.router.top_groups = 64;
  });
  EXPECT_NE(groups.find("groups=64"), std::string::npos) << groups;
}

// What chooses tokens holds bits of all experts in shared memory; a choice by tokens has no such limit.
TEST(CheckSupported, ExpertsThatTakeTokensAreLimited) {
  MoeDesc rounds = served_desc(), chooses = served_desc(), plain = served_desc();
  rounds.router.round = Rounding::nr_f;
  chooses.router = {.kind = RouterKind::expert_choice};
  for (MoeDesc* const desc : {&rounds, &chooses, &plain}) {
    desc->shape.experts = kMaxChoosingExperts;
    EXPECT_TRUE(check_supported(*desc).ok());
    ++desc->shape.experts;
  }
  for (MoeDesc const* const desc : {&rounds, &chooses}) {
    Status const status = check_supported(*desc);
    EXPECT_EQ(status.code(), StatusCode::unsupported);
    std::string const text = status.text();
    for (std::string const part : {"experts=32769", "up to 32768", "use device cpu"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
    }
  }
  EXPECT_TRUE(check_supported(plain).ok());
  chooses.router.replay = true;
  EXPECT_TRUE(check_supported(chooses).ok()) << "the choice is given";
}

TEST(CheckSupported, GroupedGemms) {
  GroupedGemmArgs args;
  void* const nowhere = nullptr;
  args.a = tensor(nowhere, DType::bf16, {4, 16});
  args.b = tensor(nowhere, DType::bf16, {2, 8, 16});
  EXPECT_TRUE(check_supported(args).ok());
  args.a.dtype = DType::fp32;
  EXPECT_NE(std::string(check_supported(args).text()).find("fp32"), std::string::npos);
  args.a = tensor(nowhere, DType::bf16, {4, 0});
  args.b = tensor(nowhere, DType::bf16, {2, 8, 0});
  EXPECT_EQ(check_supported(args).code(), StatusCode::unsupported);
}

TEST(ErrorWord, KeepsRuleIndexAndValue) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (BadValue const rule : {BadValue::expert_offsets, BadValue::token_offsets,
                              BadValue::topk_counts, BadValue::sequence_offsets}) {
    for (std::int64_t const index :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{0x3fffffff}, std::int64_t{0x7fffffff}}) {
      for (auto const& [value, kept] : {std::pair{std::int64_t{0}, std::int64_t{0}},
                                        {7, 7},
                                        {-1, -1},
                                        {-kMax, -1},
                                        {0x7ffffffe, 0x7ffffffe},
                                        {kMax, 0x7ffffffe}}) {
        std::uint64_t const word = ErrorWord{rule, index, value}.packed();
        EXPECT_NE(word, 0u);
        ErrorWord const back = ErrorWord::unpacked(word);
        EXPECT_EQ(back.rule, rule);
        EXPECT_EQ(back.index, std::min(index, std::int64_t{0x3fffffff}));
        EXPECT_EQ(back.value, kept);
      }
    }
  }
  EXPECT_EQ(ErrorWord::unpacked(0).rule, BadValue::none);
}

}  // namespace
}  // namespace tessera::cuda
