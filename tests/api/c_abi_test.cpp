// SPDX-License-Identifier: Apache-2.0
// The C ABI: the same results as C++, struct sizes of older and newer callers, errors as codes and text.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.h"
#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

template <class View>
tessera_tensor c_tensor(View const& view) {
  tessera_tensor out = {};
  out.data = const_cast<void*>(view.data);
  out.dtype = static_cast<int32_t>(view.dtype);
  out.rank = view.rank;
  for (int axis = 0; axis < kMaxRank; ++axis) {
    out.shape[axis] = view.shape[axis];
    out.stride[axis] = view.stride[axis];
  }
  return out;
}

struct CAbi : testing::Test {
  Context cpp_context = value_of(Context::create({.num_threads = 2}));
  tessera_context* context = nullptr;
  Layer layer{cpp_context, small_desc(RouterKind::topk_softmax)};
  tessera_moe_desc desc = {};
  tessera_forward_args forward = {};
  tessera_backward_args backward = {};

  void SetUp() override {
    ASSERT_EQ(tessera_context_create(TESSERA_CPU, 0, 2, &context), TESSERA_OK);
    auto const& s = layer.desc.shape;
    desc.size = sizeof(desc);
    desc.tokens = s.tokens;
    desc.hidden = s.hidden;
    desc.intermediate = s.intermediate;
    desc.experts = s.experts;
    desc.top_k = s.top_k;
    desc.bias = 1;
    desc.router = static_cast<int32_t>(RouterKind::topk_softmax);
    auto const& f = layer.forward;
    forward.size = sizeof(forward);
    forward.x = c_tensor(f.x);
    forward.w_router = c_tensor(f.w_router);
    forward.b_router = c_tensor(f.b_router);
    forward.weights.w_up = c_tensor(f.weights.w_up);
    forward.weights.w_down = c_tensor(f.weights.w_down);
    forward.weights.b_up = c_tensor(f.weights.b_up);
    forward.weights.b_down = c_tensor(f.weights.b_down);
    forward.o = c_tensor(f.o);
    forward.h = c_tensor(f.h);
    forward.routing = {layer.routing.data(), layer.routing.size()};
    forward.workspace = {layer.forward_workspace.data(), layer.forward_workspace.size()};
    auto const& b = layer.backward;
    backward.size = sizeof(backward);
    backward.d_o = c_tensor(b.d_o);
    backward.x = forward.x;
    backward.h = forward.h;
    backward.routing = forward.routing;
    backward.w_router = forward.w_router;
    backward.weights = forward.weights;
    backward.dx = c_tensor(b.dx);
    backward.dw_up = c_tensor(b.gradients.dw_up);
    backward.db_router = c_tensor(b.gradients.db_router);
    backward.workspace = {layer.backward_workspace.data(), layer.backward_workspace.size()};
  }
  void TearDown() override { tessera_context_destroy(context); }

  void expect_error(int code, int expected, char const* part) {
    EXPECT_EQ(code, expected);
    EXPECT_NE(std::string(tessera_last_error()).find(part), std::string::npos)
        << tessera_last_error();
  }
};

TEST_F(CAbi, HasTheResultsOfCpp) {
  ASSERT_EQ(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_OK)
      << tessera_last_error();
  ASSERT_EQ(tessera_moe_backward(context, &desc, &backward, nullptr), TESSERA_OK)
      << tessera_last_error();
  Layer same(cpp_context, layer.desc);
  ASSERT_TRUE(same.run_forward().ok());
  ASSERT_TRUE(same.run_backward().ok());
  EXPECT_EQ(layer.o, same.o);
  EXPECT_EQ(layer.dx, same.dx);
  EXPECT_EQ(layer.dw_up, same.dw_up);
  EXPECT_EQ(layer.db_router, same.db_router);
}

// Appended: 0, or a caller that does not know it, means the type of x.
TEST_F(CAbi, ReadsTheTypeOfTheRouter) {
  desc.router_dtype = TESSERA_FP32;
  EXPECT_EQ(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_OK);
  desc.router_dtype = TESSERA_BF16;
  expect_error(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_INVALID_ARGUMENT,
               "router_dtype=bf16 beside dtype=fp32");
  desc.size = offsetof(tessera_moe_desc, router_dtype);
  EXPECT_EQ(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_OK);
}

// Appended last: 0, or a caller that does not know it, means native.
TEST_F(CAbi, ReadsThePrecision) {
  EXPECT_EQ(offsetof(tessera_moe_desc, precision) + 16, sizeof(tessera_moe_desc));
  size_t x = 1, h = 1;
  ASSERT_EQ(tessera_moe_saved_scales(&desc, &x, &h), TESSERA_OK);
  EXPECT_EQ(x + h, 0u);
  desc.precision = 1;
  expect_error(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_UNSUPPORTED,
               "precision=fp8 with dtype=fp32");
  tessera_moe_desc low = desc;
  low.dtype = TESSERA_BF16;
  low.hidden = low.intermediate = 128;
  ASSERT_EQ(tessera_moe_saved_scales(&low, &x, nullptr), TESSERA_OK);
  EXPECT_EQ(x, 4u * static_cast<size_t>(low.tokens));
  low.precision = 2;
  ASSERT_EQ(tessera_moe_saved_scales(&low, &x, nullptr), TESSERA_OK);
  EXPECT_EQ(x, 4u * static_cast<size_t>(low.tokens));
  low.precision = 3;
  expect_error(tessera_moe_saved_scales(&low, &x, nullptr), TESSERA_INVALID_ARGUMENT,
               "precision=auto: what is saved depends on the device");
  int32_t chosen = -1;
  for (auto const& [asked, taken] : {std::pair{1, 1}, {2, 2}, {3, 0}, {0, 0}}) {
    low.precision = asked;
    ASSERT_EQ(tessera_moe_precision(context, &low, &chosen), TESSERA_OK);
    EXPECT_EQ(chosen, taken);
  }
  expect_error(tessera_moe_precision(context, &low, nullptr), TESSERA_INVALID_ARGUMENT,
               "precision: null pointer");
  expect_error(tessera_moe_precision(nullptr, &low, &chosen), TESSERA_INVALID_ARGUMENT, "context");
  desc.pow2_scales = 1;
  desc.precision = 0;
  expect_error(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_INVALID_ARGUMENT,
               "pow2_scales with precision native");
  desc.pow2_scales = 0;
  desc.weight_codes = 1;
  expect_error(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_INVALID_ARGUMENT,
               "weight_codes with precision native");
  desc.size = offsetof(tessera_moe_desc, precision);
  EXPECT_EQ(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_OK);
}

TEST_F(CAbi, MakesCodesOfWeights) {
  desc.dtype = TESSERA_BF16;
  desc.hidden = desc.intermediate = 128;
  desc.experts = desc.top_k = 1;
  std::vector<uint16_t> const up(2 * 128 * 128, 0x3f80), down(128 * 128, 0x4000);  // 1 and 2
  std::vector<uint8_t> up8(up.size()), down8(down.size()), turned8(down.size());
  Floats up_scales(2), down_scales(1);
  auto const of = [](auto& memory, int dtype, std::initializer_list<int64_t> shape) {
    tessera_tensor out = {};
    out.data = const_cast<void*>(static_cast<void const*>(memory.data()));
    out.dtype = dtype;
    out.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), out.shape);
    int64_t stride = 1;
    for (int axis = out.rank - 1; axis >= 0; --axis) {
      out.stride[axis] = stride;
      stride *= out.shape[axis];
    }
    return out;
  };
  tessera_expert_weights weights = {};
  weights.w_up = of(up, TESSERA_BF16, {1, 256, 128});
  weights.w_down = of(down, TESSERA_BF16, {1, 128, 128});
  tessera_weight_codes codes = {};
  codes.up = of(up8, TESSERA_FP8_E4M3, {1, 2, 128, 128});
  codes.up_scales = of(up_scales, TESSERA_FP32, {1, 1, 1, 2});
  codes.down = of(down8, TESSERA_FP8_E4M3, {1, 128, 128});
  codes.down_scales = of(down_scales, TESSERA_FP32, {1, 1, 1});
  codes.down_transposed = of(turned8, TESSERA_FP8_E4M3, {1, 128, 128});
  ASSERT_EQ(tessera_quantise_weights(context, &desc, &weights, &codes, nullptr), TESSERA_OK)
      << tessera_last_error();
  EXPECT_EQ(up8, std::vector<uint8_t>(up.size(), 0x7e));  // 448
  EXPECT_EQ(turned8, std::vector<uint8_t>(down.size(), 0x7e));
  EXPECT_EQ(up_scales, Floats(2, 1.0f * (1.0f / 448)));
  EXPECT_EQ(down_scales, Floats(1, 2.0f * (1.0f / 448)));
  codes.up_scales = {};
  expect_error(tessera_quantise_weights(context, &desc, &weights, &codes, nullptr),
               TESSERA_INVALID_ARGUMENT, "up_scales");
  expect_error(tessera_quantise_weights(context, &desc, &weights, nullptr, nullptr),
               TESSERA_INVALID_ARGUMENT, "weights or codes: null");
}

TEST_F(CAbi, LeavesDhInH) {
  ASSERT_EQ(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_OK);
  Floats const h = layer.h;
  ASSERT_EQ(tessera_moe_backward(context, &desc, &backward, nullptr), TESSERA_OK);
  EXPECT_EQ(layer.h, h);
  Floats const dx = layer.dx;
  desc.overwrite_h = 1;
  size_t bytes = 0;
  ASSERT_EQ(tessera_moe_workspace(context, &desc, TESSERA_PASS_BACKWARD, &bytes), TESSERA_OK);
  EXPECT_LT(bytes, layer.backward_workspace.size());
  ASSERT_EQ(tessera_moe_backward(context, &desc, &backward, nullptr), TESSERA_OK);
  EXPECT_NE(layer.h, h);
  EXPECT_EQ(layer.dx, dx);
}

TEST_F(CAbi, AnswersQueries) {
  EXPECT_EQ(tessera_abi_version(), TESSERA_ABI_VERSION);
  EXPECT_STREQ(tessera_version(), TESSERA_VERSION);
  size_t bytes = 0, x = 0, h = 0, routing = 0;
  ASSERT_EQ(tessera_moe_workspace(context, &desc, TESSERA_PASS_FORWARD, &bytes), TESSERA_OK);
  EXPECT_EQ(bytes, layer.forward_workspace.size());
  ASSERT_EQ(tessera_moe_saved(&desc, &x, &h, &routing), TESSERA_OK);
  EXPECT_EQ(x, layer.x.size() * sizeof(float));
  EXPECT_EQ(h, layer.h.size() * sizeof(float));
  EXPECT_EQ(routing, layer.routing.size());
}

TEST_F(CAbi, ReadsAnOlderCallersMissingTailAsDefaults) {
  tessera_moe_desc older = desc;
  older.size = offsetof(tessera_moe_desc, groups);
  older.route_scale = 77;  // beyond what this caller knows: must not be read
  std::vector<std::byte> exact(older.size);
  std::memcpy(exact.data(), &older, exact.size());
  auto const* const short_desc = reinterpret_cast<tessera_moe_desc const*>(exact.data());
  ASSERT_EQ(tessera_moe_forward(context, short_desc, &forward, nullptr), TESSERA_OK)
      << tessera_last_error();
  Layer same(cpp_context, layer.desc);
  ASSERT_TRUE(same.run_forward().ok());
  EXPECT_EQ(layer.o, same.o);
}

TEST_F(CAbi, RefusesANewerCallersFieldsUnlessZero) {
  struct Newer {
    tessera_moe_desc desc;
    int64_t later;
  } newer = {desc, 0};
  newer.desc.size = sizeof(newer);
  EXPECT_EQ(tessera_moe_forward(context, &newer.desc, &forward, nullptr), TESSERA_OK);
  newer.later = 1;
  expect_error(tessera_moe_forward(context, &newer.desc, &forward, nullptr), TESSERA_UNSUPPORTED,
               "tessera_moe_desc");
}

TEST_F(CAbi, RefusesBadPointersAndSizes) {
  expect_error(tessera_moe_forward(nullptr, &desc, &forward, nullptr), TESSERA_INVALID_ARGUMENT,
               "context");
  expect_error(tessera_moe_forward(context, nullptr, &forward, nullptr), TESSERA_INVALID_ARGUMENT,
               "tessera_moe_desc");
  expect_error(tessera_moe_forward(context, &desc, nullptr, nullptr), TESSERA_INVALID_ARGUMENT,
               "tessera_forward_args");
  expect_error(tessera_moe_backward(context, &desc, nullptr, nullptr), TESSERA_INVALID_ARGUMENT,
               "tessera_backward_args");
  expect_error(tessera_moe_workspace(context, &desc, 0, nullptr), TESSERA_INVALID_ARGUMENT,
               "bytes");
  EXPECT_EQ(tessera_check_device_values(context), TESSERA_OK);
  expect_error(tessera_check_device_values(nullptr), TESSERA_INVALID_ARGUMENT, "context");
  expect_error(tessera_context_create(TESSERA_CPU, 0, 0, nullptr), TESSERA_INVALID_ARGUMENT,
               "context");
  tessera_context* other = nullptr;
  expect_error(tessera_context_create(TESSERA_CUDA, 1000, 0, &other), TESSERA_ENVIRONMENT,
               "cuda:1000");
  EXPECT_EQ(other, nullptr);
  expect_error(tessera_context_create_with(TESSERA_CPU, 0, 1, 2, &other), TESSERA_INVALID_ARGUMENT,
               "flags=2");
  EXPECT_EQ(other, nullptr);
  EXPECT_EQ(tessera_context_create_with(TESSERA_CPU, 0, 1, TESSERA_UNPROVEN_KERNELS, &other),
            TESSERA_OK);
  tessera_context_destroy(other);
  desc.size = 0;
  expect_error(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_INVALID_ARGUMENT,
               "tessera_moe_desc.size=0");
  tessera_context_destroy(nullptr);
}

TEST_F(CAbi, RoundsTokensAndLetsExpertsChoose) {
  MoeDesc cpp = layer.desc;
  for (bool const choose : {false, true}) {
    cpp.router = choose ? Router{.kind = RouterKind::expert_choice, .capacity = 3}
                        : Router{.kind = RouterKind::topk_softmax,
                                 .round = Rounding::sr_f,
                                 .tile = 4,
                                 .seed = 7,
                                 .step = 8,
                                 .layer = 9};
    Layer same(cpp_context, cpp);
    std::vector<std::int32_t> counts(5), expected(5);
    same.forward.topk_counts = tensor(expected.data(), {5});
    ASSERT_TRUE(same.run_forward().ok());
    Floats const o = same.o;
    same.o.assign(o.size(), 0);
    desc.router = static_cast<int32_t>(cpp.router.kind);
    desc.round = static_cast<int32_t>(cpp.router.round);
    desc.tile = choose ? 0 : 4;
    desc.seed = choose ? 0 : 7;
    desc.step = choose ? 0 : 8;
    desc.layer = choose ? 0 : 9;
    desc.capacity = cpp.router.capacity;
    forward.topk_counts = c_tensor(tensor(counts.data(), {5}));
    forward.o = c_tensor(same.forward.o);
    forward.h = c_tensor(same.forward.h);
    forward.routing = {same.routing.data(), same.routing.size()};
    forward.workspace = {same.forward_workspace.data(), same.forward_workspace.size()};
    ASSERT_EQ(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_OK)
        << tessera_last_error();
    EXPECT_EQ(same.o, o);
    EXPECT_EQ(counts, expected);
  }
}

TEST_F(CAbi, GivesLossesAndUpdatesTheBias) {
  std::int64_t const tokens = layer.desc.shape.tokens;
  Floats logits(static_cast<std::size_t>(tokens) * 5, 0.0f), losses(2), dlogits(logits.size());
  std::vector<std::int32_t> const counts = {8, 8, 8, 8, 6};
  size_t bytes = 0;
  ASSERT_EQ(tessera_router_loss_workspace(context, &desc, &bytes), TESSERA_OK);
  std::vector<std::byte> workspace(bytes);
  tessera_router_loss_args args = {};
  args.size = sizeof(args);
  args.logits = c_tensor(tensor(logits.data(), {tokens, 5}));
  args.topk_counts = c_tensor(tensor(counts.data(), {5}));
  args.balance = 0.5f;
  args.z = 1;
  args.losses = c_tensor(tensor(losses.data(), {2}));
  args.dlogits = c_tensor(tensor(dlogits.data(), {tokens, 5}));
  args.workspace = {workspace.data(), workspace.size()};
  ASSERT_EQ(tessera_router_loss(context, &desc, &args, nullptr), TESSERA_OK)
      << tessera_last_error();
  EXPECT_NEAR(losses[0], 0.5f, 1e-6f);
  EXPECT_NEAR(losses[1], std::log(5.0f) * std::log(5.0f), 1e-5f);
  EXPECT_GT(dlogits[0], dlogits[4]);  // d_loss 0 means 1; expert 4 is the least used
  // Sequences of two tokens and of the others; padding in both.
  std::vector<std::int64_t> const offsets = {0, 2, tokens};
  std::vector<std::int32_t> const ids(static_cast<std::size_t>(tokens), 1);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(tokens), 1);
  mask[1] = mask[static_cast<std::size_t>(tokens) - 1] = 0;
  Floats sequence_loss(1, -1.0f);
  args.topk_ids = c_tensor(tensor(ids.data(), {tokens, 1}));
  args.sequence_offsets = c_tensor(tensor(offsets.data(), {3}));
  args.token_mask = c_tensor(tensor(mask.data(), {tokens}));
  args.sequence_loss = c_tensor(tensor(sequence_loss.data(), {1}));
  args.sequence_balance = 2;
  ASSERT_EQ(tessera_router_loss_workspace_of(context, &desc, 2, &bytes), TESSERA_OK);
  workspace.resize(bytes);
  args.workspace = {workspace.data(), workspace.size()};
  ASSERT_EQ(tessera_router_loss(context, &desc, &args, nullptr), TESSERA_OK)
      << tessera_last_error();
  EXPECT_NEAR(sequence_loss[0], 2 * 5 * 0.2f, 1e-5f);
  EXPECT_NEAR(losses[0], 0.5f, 1e-6f);
  EXPECT_EQ(dlogits[5], 0);
  expect_error(tessera_router_loss_workspace_of(context, &desc, -1, &bytes),
               TESSERA_INVALID_ARGUMENT, "sequences=-1");
  Floats bias(5, 0.0f);
  tessera_selection_bias_args update = {};
  update.size = sizeof(update);
  update.topk_counts = args.topk_counts;
  update.selection_bias = c_tensor(tensor(bias.data(), {5}));
  update.rate = 0.25f;
  ASSERT_EQ(tessera_update_selection_bias(context, &update, nullptr), TESSERA_OK)
      << tessera_last_error();
  EXPECT_EQ(bias, (Floats{-0.25f, -0.25f, -0.25f, -0.25f, 0.25f}));
  update.size = 0;
  expect_error(tessera_update_selection_bias(context, &update, nullptr), TESSERA_INVALID_ARGUMENT,
               "tessera_selection_bias_args.size=0");
  expect_error(tessera_router_loss_workspace(context, &desc, nullptr), TESSERA_INVALID_ARGUMENT,
               "bytes");
}

struct Member {
  char const* name;
  std::size_t offset;
};

// Expects call(args) to name each of the tensors where that one alone is wrong, so that all of them are copied; `rest`
// is what the struct has besides them, so that none is missing here.
template <class Args, class Call>
void expect_named(Args const& args, std::vector<Member> const& tensors, std::size_t rest,
                  Call&& call) {
  EXPECT_EQ(tensors.size() * sizeof(tessera_tensor) + rest, sizeof(Args));
  ASSERT_EQ(call(args), TESSERA_OK) << tessera_last_error();
  float value = 0;
  tessera_tensor wrong = {};
  wrong.data = &value;
  wrong.dtype = TESSERA_E8M0;
  wrong.rank = 4;
  std::fill_n(wrong.shape, 4, 1);
  std::fill_n(wrong.stride, 4, 1);
  for (Member const& tensor : tensors) {
    Args changed = args;
    std::memcpy(reinterpret_cast<char*>(&changed) + tensor.offset, &wrong, sizeof(wrong));
    EXPECT_EQ(call(changed), TESSERA_INVALID_ARGUMENT) << tensor.name;
    EXPECT_EQ(std::string(tessera_last_error()).find(tensor.name + std::string(":")), 0u)
        << tensor.name << ": " << tessera_last_error();
  }
}

TEST_F(CAbi, CopiesEveryTensorOfALayer) {
  using F = tessera_forward_args;
  using B = tessera_backward_args;
#define MEMBER(Struct, name) {#name, offsetof(Struct, name)}
#define WEIGHT(Struct, name) {#name, offsetof(Struct, weights.name)}
#define CODES(Struct, name) {"weight_codes." #name, offsetof(Struct, weight_codes.name)}
  expect_named(forward,
               {MEMBER(F, x),
                MEMBER(F, topk_ids),
                MEMBER(F, topk_weights),
                MEMBER(F, token_offsets),
                MEMBER(F, w_router),
                MEMBER(F, b_router),
                MEMBER(F, selection_bias),
                MEMBER(F, expert_offsets),
                MEMBER(F, row_scores),
                WEIGHT(F, w_up),
                WEIGHT(F, w_gate),
                WEIGHT(F, w_down),
                WEIGHT(F, b_up),
                WEIGHT(F, b_gate),
                WEIGHT(F, b_down),
                MEMBER(F, o),
                MEMBER(F, logits),
                MEMBER(F, expert_counts),
                MEMBER(F, h),
                MEMBER(F, topk_counts),
                MEMBER(F, token_mask),
                MEMBER(F, x8),
                MEMBER(F, x_scale),
                MEMBER(F, h_scale),
                CODES(F, up),
                CODES(F, up_scales),
                CODES(F, down),
                CODES(F, down_scales),
                CODES(F, up_transposed),
                CODES(F, down_transposed)},
               sizeof(uint64_t) + 2 * sizeof(tessera_buffer),
               [&](F const& args) { return tessera_moe_forward(context, &desc, &args, nullptr); });
  expect_named(backward,
               {MEMBER(B, d_o),
                MEMBER(B, x),
                MEMBER(B, h),
                MEMBER(B, w_router),
                MEMBER(B, b_router),
                WEIGHT(B, w_up),
                WEIGHT(B, w_gate),
                WEIGHT(B, w_down),
                WEIGHT(B, b_up),
                WEIGHT(B, b_gate),
                WEIGHT(B, b_down),
                MEMBER(B, dx),
                MEMBER(B, dscores),
                MEMBER(B, dlogits),
                MEMBER(B, dw_up),
                MEMBER(B, dw_gate),
                MEMBER(B, dw_down),
                MEMBER(B, db_up),
                MEMBER(B, db_gate),
                MEMBER(B, db_down),
                MEMBER(B, dw_router),
                MEMBER(B, db_router),
                MEMBER(B, dh),
                MEMBER(B, a_scaled),
                MEMBER(B, dlogits_saved),
                MEMBER(B, aux_dlogits),
                MEMBER(B, token_mask),
                MEMBER(B, x8),
                MEMBER(B, x_scale),
                MEMBER(B, h_scale),
                CODES(B, up),
                CODES(B, up_scales),
                CODES(B, down),
                CODES(B, down_scales),
                CODES(B, up_transposed),
                CODES(B, down_transposed)},
               2 * sizeof(uint64_t) + 2 * sizeof(tessera_buffer),
               [&](B const& args) { return tessera_moe_backward(context, &desc, &args, nullptr); });
#undef MEMBER
#undef WEIGHT
#undef CODES
}

TEST_F(CAbi, RefusesWithTheTextOfCpp) {
  forward.x.shape[0] = 3;
  expect_error(tessera_moe_forward(context, &desc, &forward, nullptr), TESSERA_INVALID_ARGUMENT,
               "x: shape [3,12]");
  EXPECT_EQ(tessera_moe_workspace(context, &desc, TESSERA_PASS_FORWARD, &forward.workspace.bytes),
            TESSERA_OK);
  EXPECT_STREQ(tessera_last_error(), "");
}

}  // namespace
}  // namespace tessera::api_test
