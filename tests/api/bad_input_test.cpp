// SPDX-License-Identifier: Apache-2.0
// Every kind of bad input is refused with a text that names the tensor, and nothing was written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

constexpr float kUntouched = 1234.5f;

struct BadInput : testing::Test {
  Context context = value_of(Context::create({.num_threads = 2}));

  static void expect_text(Status const& status, char const* part) {
    EXPECT_FALSE(status.ok()) << "expected: " << part;
    EXPECT_NE(std::string(status.text()).find(part), std::string::npos)
        << "got: " << status.text() << "\nexpected: " << part;
  }
  static void expect_untouched(Floats const& values) {
    for (float const value : values) ASSERT_EQ(value, kUntouched);
  }

  using ForwardChange = std::function<void(MoeDesc&, MoeForwardArgs&)>;
  void forward(char const* part, ForwardChange const& change,
               RouterKind router = RouterKind::given) {
    Layer layer(context, small_desc(router));
    std::fill(layer.o.begin(), layer.o.end(), kUntouched);
    std::fill(layer.h.begin(), layer.h.end(), kUntouched);
    MoeDesc desc = layer.desc;
    MoeForwardArgs args = layer.forward;
    change(desc, args);
    expect_text(moe_forward(context, desc, args), part);
    expect_untouched(layer.o);
    expect_untouched(layer.h);
  }

  using BackwardChange = std::function<void(MoeDesc&, MoeBackwardArgs&)>;
  void backward(char const* part, BackwardChange const& change,
                RouterKind router = RouterKind::given) {
    Layer layer(context, small_desc(router));
    ASSERT_TRUE(layer.run_forward().ok());
    std::fill(layer.dx.begin(), layer.dx.end(), kUntouched);
    std::fill(layer.dw_up.begin(), layer.dw_up.end(), kUntouched);
    MoeDesc desc = layer.desc;
    MoeBackwardArgs args = layer.backward;
    change(desc, args);
    expect_text(moe_backward(context, desc, args), part);
    expect_untouched(layer.dx);
    expect_untouched(layer.dw_up);
  }
};

TEST_F(BadInput, SizesOutOfRange) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  forward("tokens=-1", [](MoeDesc& desc, auto&) { desc.shape.tokens = -1; });
  forward("hidden=0", [](MoeDesc& desc, auto&) { desc.shape.hidden = 0; });
  forward("intermediate=-10", [](MoeDesc& desc, auto&) { desc.shape.intermediate = -10; });
  forward("experts=0", [](MoeDesc& desc, auto&) { desc.shape.experts = 0; });
  forward("top_k=0", [](MoeDesc& desc, auto&) { desc.shape.top_k = 0; });
  forward("tokens=1099511627776", [](MoeDesc& desc, auto&) { desc.shape.tokens = kHuge; });
  forward("hidden=1099511627776", [](MoeDesc& desc, auto&) { desc.shape.hidden = kHuge; });
  forward("2^31", [](MoeDesc& desc, auto&) {
    desc.shape.tokens = 1 << 30;
    desc.shape.top_k = 4;
  });
  forward("2^31", [](MoeDesc& desc, auto&) {
    desc.shape.experts = 1 << 20;
    desc.shape.hidden = 1 << 20;
  });
  forward("2^56", [](MoeDesc& desc, auto&) {
    desc.shape = {
        .tokens = 1 << 30, .hidden = 1 << 30, .intermediate = 1, .experts = 1, .top_k = 1};
  });
  forward("slots=7", [](MoeDesc& desc, auto&) { desc.shape.slots = 7; });
  forward(
      "top_k=6, experts=5", [](MoeDesc& desc, auto&) { desc.shape.top_k = 6; },
      RouterKind::topk_softmax);
}

TEST_F(BadInput, EnumsOutOfRange) {
  forward("dtype=77", [](MoeDesc& desc, auto&) { desc.dtype = static_cast<DType>(77); });
  forward("dtype=4", [](MoeDesc& desc, auto&) { desc.dtype = DType::int32; });
  forward("dtype=7: storage is", [](MoeDesc& desc, auto&) { desc.dtype = DType::fp8_e4m3; });
  forward("activation=-1",
          [](MoeDesc& desc, auto&) { desc.activation.kind = static_cast<ActivationKind>(-1); });
  forward("layout.order=4",
          [](MoeDesc& desc, auto&) { desc.layout.order = static_cast<GateUpOrder>(4); });
  forward("layout.orientation=9", [](MoeDesc& desc, auto&) {
    desc.layout.orientation = static_cast<WeightOrientation>(9);
  });
  forward("router=8", [](MoeDesc& desc, auto&) { desc.router.kind = static_cast<RouterKind>(8); });
  forward("round=7", [](MoeDesc& desc, auto&) { desc.router.round = static_cast<Rounding>(7); });
  forward("save=3", [](MoeDesc& desc, auto&) { desc.save = static_cast<SavePolicy>(3); });
  forward("grouping=4", [](MoeDesc& desc, auto&) { desc.grouping = static_cast<RowGrouping>(4); });
  forward("score_position=3",
          [](MoeDesc& desc, auto&) { desc.score_position = static_cast<ScorePosition>(3); });
  forward("ids_dtype=1", [](MoeDesc& desc, auto&) { desc.ids_dtype = DType::fp32; });
  forward("precision=4", [](MoeDesc& desc, auto&) { desc.precision = static_cast<Precision>(4); });
  expect_text(workspace_bytes(context, small_desc(), static_cast<Pass>(5)).status(), "pass=5");
}

TEST_F(BadInput, OptionsThatContradict) {
  forward("layout.block=3", [](MoeDesc& desc, auto&) {
    desc.layout.order = GateUpOrder::blocked;
    desc.layout.block = 3;
  });
  forward("layout.block=2", [](MoeDesc& desc, auto&) { desc.layout.block = 2; });
  forward("layout", [](MoeDesc& desc, auto&) {
    desc.activation.kind = ActivationKind::relu;
    desc.layout.order = GateUpOrder::interleaved;
  });
  forward("clamped_swiglu", [](MoeDesc& desc, auto&) {
    desc.activation = {ActivationKind::clamped_swiglu, std::nanf(""), 7, 1};
  });
  forward("clamped_swiglu", [](MoeDesc& desc, auto&) {
    desc.activation = {ActivationKind::clamped_swiglu, 1, -1, 1};
  });
  forward("route_scale", [](MoeDesc& desc, auto&) { desc.router.route_scale = std::nanf(""); });
  for (SavePolicy const save : {SavePolicy::x, SavePolicy::none}) {
    forward("overwrite_h", [save](MoeDesc& desc, auto&) {
      desc.save = save;
      desc.overwrite_h = true;
    });
  }
}

TEST_F(BadInput, ChoicesThatContradict) {
  auto const refuse = [&](char const* part, std::function<void(MoeDesc&)> const& change) {
    MoeDesc desc = small_desc(RouterKind::topk_softmax);
    change(desc);
    Status const status = workspace_bytes(context, desc, Pass::forward).status();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << status.text();
    expect_text(status, part);
  };
  refuse("token rounding nr-f with router given",
         [](MoeDesc& desc) { desc.router = {.kind = RouterKind::given, .round = Rounding::nr_f}; });
  refuse("token rounding down with replay", [](MoeDesc& desc) {
    desc.router.round = Rounding::down;
    desc.router.replay = true;
  });
  refuse("token rounding up with router expert-choice", [](MoeDesc& desc) {
    desc.router = {.kind = RouterKind::expert_choice, .round = Rounding::up};
  });
  refuse("tile=0", [](MoeDesc& desc) {
    desc.router.round = Rounding::nr_f;
    desc.router.tile = 0;
  });
  refuse("capacity=3: only expert_choice", [](MoeDesc& desc) { desc.router.capacity = 3; });
  refuse("capacity=20, tokens=19",
         [](MoeDesc& desc) { desc.router = {.kind = RouterKind::expert_choice, .capacity = 20}; });
  refuse("capacity=-1",
         [](MoeDesc& desc) { desc.router = {.kind = RouterKind::expert_choice, .capacity = -1}; });
  refuse("replay with router given",
         [](MoeDesc& desc) { desc.router = {.kind = RouterKind::given, .replay = true}; });
  refuse("variable_experts", [](MoeDesc& desc) { desc.shape.variable_experts = true; });
  refuse("slots=5, tokens=0", [](MoeDesc& desc) {
    desc.router.kind = RouterKind::given;
    desc.shape.variable_experts = true;
    desc.shape.tokens = 0;
    desc.shape.slots = 5;
  });
  refuse("slots=", [](MoeDesc& desc) {
    desc.shape.tokens = 1 << 26;
    desc.shape.experts = 64;
    desc.router.round = Rounding::up;
    desc.router.tile = 0x7fffffff;
  });
}

TEST_F(BadInput, WhatIsNotServedSaysSo) {
  auto const unsupported = [&](char const* part, std::function<void(MoeDesc&)> const& change) {
    MoeDesc desc = small_desc();
    change(desc);
    Status const status = workspace_bytes(context, desc, Pass::forward).status();
    EXPECT_EQ(status.code(), StatusCode::unsupported) << status.text();
    expect_text(status, part);
  };
  unsupported("dtype=3", [](MoeDesc& desc) { desc.dtype = DType::fp16; });
  unsupported("score_position=input",
              [](MoeDesc& desc) { desc.score_position = ScorePosition::input; });
}

TEST_F(BadInput, TensorsOfForward) {
  forward("x: missing", [](auto&, MoeForwardArgs& args) { args.x = {}; });
  forward("x: null", [](auto&, MoeForwardArgs& args) { args.x.data = nullptr; });
  forward("x: shape [18,12]", [](auto&, MoeForwardArgs& args) { args.x.shape[0] = 18; });
  forward("x: on cuda:0, but the call's context is on cpu; all of a call is on one device: move it",
          [](auto&, MoeForwardArgs& args) { args.x.device = {DeviceKind::cuda, 0}; });
  forward("o: missing", [](auto&, MoeForwardArgs& args) { args.o = {}; });
  forward("o: address",
          [](auto&, MoeForwardArgs& args) { args.o.data = static_cast<char*>(args.o.data) + 1; });
  forward("o: stride 11", [](auto&, MoeForwardArgs& args) { args.o.stride[0] = 11; });
}

TEST_F(BadInput, MemoryOfForward) {
  forward("x and o overlap",
          [](auto&, MoeForwardArgs& args) { args.o.data = const_cast<void*>(args.x.data); });
  forward("workspace", [](auto&, MoeForwardArgs& args) { args.workspace.bytes -= 1; });
  forward("workspace", [](auto&, MoeForwardArgs& args) { args.workspace.data = nullptr; });
  forward("routing", [](auto&, MoeForwardArgs& args) { args.routing.bytes -= 4; });
  forward("routing", [](auto&, MoeForwardArgs& args) { args.routing = {}; });
  forward("h: missing", [](auto&, MoeForwardArgs& args) { args.h = {}; });
  forward("h: given", [](MoeDesc& desc, auto&) { desc.save = SavePolicy::none; });
  forward("h: stride", [](auto&, MoeForwardArgs& args) { args.h.stride[0] += 4; });
}

TEST_F(BadInput, WeightsAndRouting) {
  forward("w_up: shape", [](auto&, MoeForwardArgs& args) { args.weights.w_up.shape[1] = 10; });
  forward("w_gate: given",
          [](auto&, MoeForwardArgs& args) { args.weights.w_gate = args.weights.w_up; });
  forward("b_down: missing", [](auto&, MoeForwardArgs& args) { args.weights.b_down = {}; });
  forward("b_up: given", [](MoeDesc& desc, auto&) { desc.bias = false; });
  forward("topk_ids: dtype", [](MoeDesc& desc, auto&) { desc.ids_dtype = DType::int64; });
  forward("topk_ids: missing", [](auto&, MoeForwardArgs& args) { args.topk_ids = {}; });
  forward("w_router: given", [](auto&, MoeForwardArgs& args) { args.w_router = args.x; });
  forward("logits: given", [](auto&, MoeForwardArgs& args) { args.logits = args.o; });
  forward("row_scores", [](auto&, MoeForwardArgs& args) { args.row_scores = args.topk_weights; });
  forward(
      "topk_ids: given", [](auto&, MoeForwardArgs& args) { args.topk_ids = args.x; },
      RouterKind::topk_softmax);
  forward(
      "w_router: missing", [](auto&, MoeForwardArgs& args) { args.w_router = {}; },
      RouterKind::topk_softmax);
}

TEST_F(BadInput, TokenOffsets) {
  Layer layer(context);
  std::fill(layer.o.begin(), layer.o.end(), kUntouched);
  MoeDesc desc = layer.desc;
  desc.shape.variable_experts = true;
  desc.shape.slots = desc.shape.tokens * 2;
  std::vector<std::byte> routing(value_of(routing_bytes(desc)));
  auto const attempt = [&](std::function<void(std::vector<std::int32_t>&)> const& change) {
    std::vector<std::int32_t> offsets;
    for (std::int32_t t = 0; t <= desc.shape.tokens; ++t) offsets.push_back(2 * t);
    change(offsets);
    MoeForwardArgs args = layer.forward;
    args.topk_ids = tensor(layer.ids.data(), {desc.shape.slots});
    args.topk_weights = tensor(layer.weights.data(), {desc.shape.slots});
    args.token_offsets = tensor(offsets.data(), {desc.shape.tokens + 1});
    args.routing = {routing.data(), routing.size()};
    return moe_forward(context, desc, args);
  };
  expect_text(attempt([](auto& offsets) { offsets[0] = 1; }), "token_offsets[0]=1");
  expect_text(attempt([](auto& offsets) { offsets[3] = 100000; }), "token_offsets[3]");
  expect_text(attempt([](auto& offsets) { offsets[4] = -2; }), "token_offsets[4]=-2");
  expect_text(attempt([](auto& offsets) { offsets.back() -= 1; }), "token_offsets[19]");
  expect_untouched(layer.o);
  EXPECT_TRUE(attempt([](auto&) {}).ok());
}

TEST_F(BadInput, TensorsOfBackward) {
  backward("d_o: missing", [](auto&, MoeBackwardArgs& args) { args.d_o = {}; });
  backward("h: missing", [](auto&, MoeBackwardArgs& args) { args.h = {}; });
  backward("routing", [](auto&, MoeBackwardArgs& args) { args.routing.bytes = 3; });
  backward("save=none", [](MoeDesc& desc, auto&) { desc.save = SavePolicy::none; });
  backward("d_o and dx overlap",
           [](auto&, MoeBackwardArgs& args) { args.dx.data = const_cast<void*>(args.d_o.data); });
  backward("w_up and dw_up overlap", [](auto&, MoeBackwardArgs& args) {
    args.gradients.dw_up.data = const_cast<void*>(args.weights.w_up.data);
  });
  backward("dw_down: shape",
           [](auto&, MoeBackwardArgs& args) { args.gradients.dw_down.shape[2] = 3; });
  backward("gradients.mode=2", [](auto&, MoeBackwardArgs& args) {
    args.gradients.mode = static_cast<GradientMode>(2);
  });
  backward("dh: given", [](auto&, MoeBackwardArgs& args) { args.dh = args.dx; });
  backward("h: rank 99", [](MoeDesc& desc, MoeBackwardArgs& args) {
    desc.overwrite_h = true;
    args.h.rank = 99;
  });
  backward("h is written", [](MoeDesc& desc, MoeBackwardArgs& args) {
    desc.overwrite_h = true;
    args.h.data = args.x.data;
  });
  backward("dw_router: given",
           [](auto&, MoeBackwardArgs& args) { args.gradients.dw_router = args.dx; });
  backward(
      "w_router: missing", [](auto&, MoeBackwardArgs& args) { args.w_router = {}; },
      RouterKind::topk_softmax);
}

TEST_F(BadInput, SavedAndRoutingQueries) {
  MoeDesc desc = small_desc();
  desc.shape.hidden = -1;
  expect_text(saved_bytes(desc).status(), "hidden=-1");
  expect_text(routing_bytes(desc).status(), "hidden=-1");
  std::int32_t word = 0;
  expect_text(routing_view(small_desc(), {&word, sizeof(word)}).status(), "routing");
}

// NaN in the data is not an error: it must stay where it belongs.
TEST_F(BadInput, NanReachesOnlyItsOwnToken) {
  Layer clean(context), poisoned(context);
  std::int64_t const d = clean.desc.shape.hidden;
  poisoned.x[static_cast<std::size_t>(3 * d + 1)] = std::nanf("");
  poisoned.d_o[static_cast<std::size_t>(3 * d + 5)] = std::numeric_limits<float>::infinity();
  for (Layer* const layer : {&clean, &poisoned}) {
    ASSERT_TRUE(layer->run_forward().ok());
    ASSERT_TRUE(layer->run_backward().ok());
  }
  for (std::size_t i = 0; i < clean.o.size(); ++i) {
    bool const own = static_cast<std::int64_t>(i) / d == 3;
    EXPECT_EQ(std::isnan(poisoned.o[i]), own) << i;
    if (!own) {
      EXPECT_EQ(poisoned.o[i], clean.o[i]);
      EXPECT_EQ(poisoned.dx[i], clean.dx[i]);
    }
  }
}

}  // namespace
}  // namespace tessera::api_test
