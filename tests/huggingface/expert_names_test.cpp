// SPDX-License-Identifier: Apache-2.0
#include "huggingface/expert_names.hpp"

#include <gtest/gtest.h>

namespace tessera::huggingface {
namespace {

TEST(ExpertNames, ComeBackInEveryScheme) {
  struct Case {
    Naming naming;
    ExpertTensor tensor;
    bool separate;
    char const* name;
  };
  std::string const mlp = "model.layers.3.mlp.experts";
  for (Case const& c : {
           Case{Naming::per_expert,
                {mlp, Part::gate, false, 12},
                false,
                "model.layers.3.mlp.experts.12.gate_proj.weight"},
           Case{Naming::per_expert_w123,
                {"block_sparse_moe.experts", Part::down, false, 0},
                false,
                "block_sparse_moe.experts.0.w2.weight"},
           Case{Naming::stacked,
                {mlp, Part::gate_up, true, -1},
                false,
                "model.layers.3.mlp.experts.gate_up_proj_bias"},
           Case{Naming::stacked_linear,
                {"a.block_sparse_moe", Part::down, false, -1},
                false,
                "a.block_sparse_moe.output_linear.weight"},
           Case{Naming::stacked,
                {mlp, Part::up, false, -1},
                false,
                "model.layers.3.mlp.experts.up_proj"},
           Case{Naming::stacked_linear_mlp,
                {"a.mlp", Part::gate_up, false, -1},
                false,
                "a.mlp.input_linear.weight"},
           Case{Naming::stacked_fc,
                {mlp, Part::gate_up, false, -1},
                false,
                "model.layers.3.mlp.experts.fc1.weight"},
           Case{Naming::tessera,
                {mlp, Part::up, false, -1},
                true,
                "model.layers.3.mlp.experts.w_up"},
           Case{Naming::tessera,
                {mlp, Part::gate_up, true, -1},
                false,
                "model.layers.3.mlp.experts.b_up"},
       }) {
    EXPECT_EQ(expert_name(c.naming, c.tensor), c.name);
    EXPECT_EQ(parse_expert_name(c.naming, c.name, c.separate), c.tensor) << c.name;
  }
}

TEST(ExpertNames, OfOtherTensorsAreNone) {
  for (char const* name :
       {"model.layers.3.mlp.shared_experts.gate_proj.weight", "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.mlp.experts.gate_proj.weight", "mlp.experts.-1.gate_proj.weight",
        "mlp.experts.01.gate_proj.weight", "mlp.experts.9999999999999999999.gate_proj.weight",
        "mlp.experts.9223372036854775807.gate_proj.weight", "mlp.experts.1.gate_proj.weight.x",
        "mlp.my_experts.1.gate_proj.weight", ".1.gate_proj.weight", ""}) {
    EXPECT_EQ(parse_expert_name(Naming::per_expert, name, false), std::nullopt) << name;
  }
}

TEST(ExpertNames, OfAttentionAreNone) {
  std::string const name = "model.layers.3.self_attention.experts.input_linear.weight";
  EXPECT_EQ(parse_expert_name(Naming::stacked_linear_mlp, name, false), std::nullopt);
  EXPECT_EQ(parse_expert_name(Naming::stacked_linear, name, false), std::nullopt);
}

TEST(ExpertNames, BiasesHaveNoPlaceInPerExpertNames) {
  EXPECT_EQ(expert_name(Naming::per_expert, {"mlp.experts", Part::gate, true, 0}), "");
}

TEST(ExpertNames, OfGraniteAndMixtralStandInTheirOwnModules) {
  EXPECT_EQ(native_prefix(Naming::stacked_linear, "layers.0.block_sparse_moe.experts"),
            "layers.0.block_sparse_moe");
  EXPECT_EQ(native_prefix(Naming::stacked_linear, "layers.0.block_sparse_moe"),
            "layers.0.block_sparse_moe");
  EXPECT_EQ(native_prefix(Naming::per_expert_w123, "layers.0.mlp.experts"),
            "layers.0.block_sparse_moe.experts");
  EXPECT_EQ(native_prefix(Naming::per_expert_w123, "mlp.experts"), "block_sparse_moe.experts");
  EXPECT_EQ(native_prefix(Naming::per_expert_w123, "my_mlp.experts"), "my_mlp.experts");
  EXPECT_EQ(native_prefix(Naming::per_expert, "layers.0.mlp.experts"), "layers.0.mlp.experts");
  EXPECT_EQ(native_prefix(Naming::tessera, "layers.0.mlp.experts"), "layers.0.mlp.experts");
}

}  // namespace
}  // namespace tessera::huggingface
