// SPDX-License-Identifier: Apache-2.0
// Weights of every layout as rows with strides: each element's address is the one that the reference's layout gives.
// Needs the CUDA headers, no GPU.
#include "cuda/layer/arguments.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/reference/layout.hpp"
#include "cuda/host/tensor_map.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/plan.hpp"
#include "cuda/layer/select.hpp"
#include "small_weights.hpp"

namespace tessera::cuda {
namespace {

void check_up(MoeDesc const& desc, ExpertWeights const& weights, WeightViews const& views) {
  bool const apart = desc.layout.orientation == WeightOrientation::separate;
  bool const turned = desc.layout.orientation == WeightOrientation::transposed;
  std::int64_t const halves = desc.up_width(),
                     stored = apart ? kIntermediate : halves * kIntermediate;
  for (std::int64_t half = 0; half < halves; ++half) {
    bool const gate = halves == 2 && half == 0;
    auto const part = gate ? reference::Part::gate : reference::Part::up;
    ConstTensor const& w = apart && gate ? weights.w_gate : weights.w_up;
    ConstTensor const& b = apart && gate ? weights.b_gate : weights.b_up;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      for (std::int64_t i = 0; i < kIntermediate; ++i) {
        std::int64_t const row = apart ? i : reference::stored_row(desc, part, i);
        EXPECT_EQ(place(views.b_up[half], b, e, i, 0), e * stored + row);
        for (std::int64_t c = 0; c < kHidden; ++c) {
          EXPECT_EQ(place(views.w_up[half], w, e, i, c),
                    turned ? (e * kHidden + c) * stored + row : (e * stored + row) * kHidden + c);
        }
      }
    }
  }
}

void check_down(MoeDesc const& desc, ExpertWeights const& weights, WeightViews const& views) {
  bool const turned = desc.layout.orientation == WeightOrientation::transposed;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (std::int64_t c = 0; c < kHidden; ++c) {
      EXPECT_EQ(place(views.b_down, weights.b_down, e, c, 0), e * kHidden + c);
      for (std::int64_t i = 0; i < kIntermediate; ++i) {
        EXPECT_EQ(
            place(views.w_down, weights.w_down, e, c, i),
            turned ? (e * kIntermediate + i) * kHidden + c : (e * kHidden + c) * kIntermediate + i);
      }
    }
  }
}

TEST(WeightViews, FindEveryElementOfEveryLayout) {
  for (GateUpOrder const order : {GateUpOrder::concat, GateUpOrder::up_first,
                                  GateUpOrder::interleaved, GateUpOrder::blocked}) {
    for (WeightOrientation const orientation :
         {WeightOrientation::rows, WeightOrientation::transposed}) {
      MoeDesc const desc = desc_of({order, orientation, order == GateUpOrder::blocked ? 4 : 0},
                                   ActivationKind::swiglu);
      ExpertWeights const weights = weights_without_memory(desc);
      SCOPED_TRACE(static_cast<int>(order));
      check_up(desc, weights, weight_views(desc, weights));
      check_down(desc, weights, weight_views(desc, weights));
    }
  }
}

TEST(WeightViews, FindSeparateAndUngatedMatrices) {
  MoeDesc const separate =
      desc_of({GateUpOrder::concat, WeightOrientation::separate}, ActivationKind::geglu);
  ExpertWeights weights = weights_without_memory(separate);
  check_up(separate, weights, weight_views(separate, weights));
  for (WeightOrientation const orientation :
       {WeightOrientation::rows, WeightOrientation::transposed}) {
    MoeDesc const desc = desc_of({GateUpOrder::concat, orientation}, ActivationKind::relu2);
    weights = weights_without_memory(desc);
    WeightViews const views = weight_views(desc, weights);
    check_up(desc, weights, views);
    check_down(desc, weights, views);
    EXPECT_EQ(views.w_up[1].gmem, nullptr);
  }
}

/// The gradients of the weights as fp32 or bf16, contiguous.
ExpertGradients gradients_of(MoeDesc const& desc, DType dtype) {
  ExpertGradients gradients = gradients_without_memory(desc);
  for (Tensor* const tensor : {&gradients.dw_up, &gradients.dw_gate, &gradients.dw_down,
                               &gradients.db_up, &gradients.db_gate, &gradients.db_down}) {
    tensor->dtype = dtype;
  }
  return gradients;
}

// Where a gradient is stored is where its weight is, whatever its type; dw_down's rows are the columns of w_down.
TEST(GradientViews, FollowTheWeights) {
  std::vector<WeightLayout> layouts = {{GateUpOrder::concat, WeightOrientation::separate}};
  for (GateUpOrder const order : {GateUpOrder::concat, GateUpOrder::up_first,
                                  GateUpOrder::interleaved, GateUpOrder::blocked}) {
    for (WeightOrientation const orientation :
         {WeightOrientation::rows, WeightOrientation::transposed}) {
      layouts.push_back({order, orientation, order == GateUpOrder::blocked ? 4 : 0});
    }
  }
  for (WeightLayout const& layout : layouts) {
    for (DType const dtype : {DType::fp32, DType::bf16}) {
      MoeDesc const desc = desc_of(layout, ActivationKind::swiglu);
      ExpertGradients const gradients = gradients_of(desc, dtype);
      GradientViews const views = gradient_views(desc, gradients);
      ExpertWeights const like{.w_up = gradients.dw_up,
                               .w_gate = gradients.dw_gate,
                               .w_down = gradients.dw_down,
                               .b_up = gradients.db_up,
                               .b_gate = gradients.db_gate,
                               .b_down = gradients.db_down};
      WeightViews as_weights;
      std::copy_n(views.dw_up, 2, as_weights.w_up);
      std::copy_n(views.db_up, 2, as_weights.b_up);
      check_up(desc, like, as_weights);
      for (std::int64_t e = 0; e < kExperts; ++e) {
        for (std::int64_t i = 0; i < kIntermediate; ++i) {
          for (std::int64_t c = 0; c < kHidden; ++c) {
            bool const turned = layout.orientation == WeightOrientation::transposed;
            EXPECT_EQ(place(views.dw_down, gradients.dw_down, e, i, c),
                      turned ? (e * kIntermediate + i) * kHidden + c
                             : (e * kHidden + c) * kIntermediate + i);
          }
        }
      }
    }
  }
}

TEST(GradientViews, AreNullWhereAGradientIsAbsent) {
  for (WeightOrientation const orientation :
       {WeightOrientation::rows, WeightOrientation::separate}) {
    MoeDesc const desc = desc_of({GateUpOrder::concat, orientation}, ActivationKind::swiglu);
    ExpertGradients gradients = gradients_of(desc, DType::fp32);
    gradients.dw_up = gradients.dw_down = gradients.db_up = {};
    GradientViews const views = gradient_views(desc, gradients);
    bool const apart = orientation == WeightOrientation::separate;
    EXPECT_EQ(views.dw_up[0].gmem != nullptr, apart);  // dw_gate
    EXPECT_EQ(views.db_up[0].gmem != nullptr, apart);
    EXPECT_EQ(views.dw_up[1].gmem, nullptr);
    EXPECT_EQ(views.db_up[1].gmem, nullptr);
    EXPECT_EQ(views.dw_down.gmem, nullptr);
    EXPECT_NE(views.db_down.gmem, nullptr);
  }
}

TEST(WeightViews, FollowStrides) {
  MoeDesc const desc = desc_of({}, ActivationKind::swiglu);
  ExpertWeights weights = weights_without_memory(desc);
  weights.w_up.stride[1] = 7;
  weights.w_up.stride[0] = 1000;
  WeightViews const views = weight_views(desc, weights);
  EXPECT_EQ(place(views.w_up[1], weights.w_up, 2, 3, 4), 2 * 1000 + (kIntermediate + 3) * 7 + 4);
}

TEST(WeightViews, IgnoreStridesOfSingleElements) {
  MoeDesc desc = desc_of({}, ActivationKind::swiglu);
  desc.shape.experts = 1;
  ExpertWeights weights = weights_without_memory(desc);
  weights.w_up.stride[0] = -5;  // means nothing
  EXPECT_EQ(weight_views(desc, weights).w_up[0].expert_stride, 2 * kIntermediate * kHidden);
}

// One box for gate and up needs one set of strides: separate tensors may differ in their padding.
TEST(WeightViews, OneBoxNeedsEqualStridesOfBothHalves) {
  alignas(16) static char memory[4096];
  WeightRows const gate{
      .gmem = memory, .expert_stride = 64 * 32, .row_stride = 32, .column_stride = 1, .block = 64};
  WeightRows up = gate;
  up.gmem = memory + 2048;
  EXPECT_TRUE(host::has_tile_map({gate, up}, 2, 64));
  EXPECT_FALSE(host::has_tile_map({up, gate}, 2, 64));  // up lies in front
  EXPECT_FALSE(host::has_tile_map({gate, up}, 2, 60));
  up.row_stride = 40;
  EXPECT_FALSE(host::has_tile_map({gate, up}, 2, 64));
  EXPECT_TRUE(host::has_tile_map({gate, up}, 1, 64));
  up = {
      .gmem = up.gmem, .expert_stride = 64 * 40, .row_stride = 32, .column_stride = 1, .block = 64};
  EXPECT_FALSE(host::has_tile_map({gate, up}, 2, 64));
}

/// A backward call on the desc's shapes, with fp32 gradients that accumulate.
MoeBackwardArgs backward_args(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  MoeBackwardArgs args;
  args.d_o = args.x = args.dx = tensor(nowhere(), DType::bf16, {s.tokens, s.hidden});
  args.h = tensor(nowhere(), DType::bf16, {desc.num_slots(), desc.up_width() * s.intermediate});
  args.weights = weights_without_memory(desc);
  args.gradients = gradients_of(desc, DType::fp32);
  args.gradients.mode = GradientMode::accumulate;
  return args;
}

// Addresses that differ, of nothing.
struct BackwardTables {
  std::int32_t offsets[1], gather[1], sort[1], inverse[1], counters[kNumTileCounters];
  float scores[1], partials[1];
  char h[1], dh[1], a_scaled[1], dx_rows[1];

  RoutingView view() {
    RoutingView out;
    out.expert_offsets = offsets;
    out.gather_index = gather;
    out.sort_permutation = sort;
    out.inverse_permutation = inverse;
    out.scores = scores;
    return out;
  }
  BackwardMemory memory(void* recomputed_h) {
    return {view(), recomputed_h, dh, a_scaled, partials, dx_rows, counters};
  }
};

TEST(BackwardArguments, HandArraysFromOpToOp) {
  MoeDesc desc = desc_of({}, ActivationKind::swiglu);
  desc.router.kind = RouterKind::topk_softmax;
  BackwardTables t;
  BackwardArguments const a = backward_arguments(desc, backward_args(desc), t.memory(nullptr));
  EXPECT_EQ(a.down_dgrad.gmem_h, nowhere());
  EXPECT_EQ(a.down_dgrad.gmem_dh, t.dh);
  EXPECT_EQ(a.down_dgrad.gmem_ds_partials, t.partials);
  EXPECT_EQ(a.down_wgrad.gmem_right, t.a_scaled);
  EXPECT_EQ(a.down_wgrad.halves, 1);
  EXPECT_EQ(a.up_dgrad.gmem_dh, t.dh);
  EXPECT_EQ(a.aggregate.gmem_y, a.up_dgrad.gmem_dx_rows);
  EXPECT_EQ(a.aggregate.gmem_scores, nullptr);
  EXPECT_TRUE(a.aggregate.adds_to_o);  // to the router's part
  EXPECT_EQ(a.up_wgrad.gmem_right, t.dh);
  EXPECT_EQ(a.up_wgrad.halves, 2);
  EXPECT_EQ(a.db_up.left.pitch, 2 * kIntermediate);
  EXPECT_EQ(a.db_up.gmem_scores, nullptr);
  EXPECT_EQ(a.db_down.gmem_scores, t.scores);
  for (std::int32_t const* const gather :
       {a.down_dgrad.gmem_gather_index, a.down_wgrad.gmem_gather_index,
        a.up_wgrad.gmem_gather_index, a.db_down.gmem_gather_index}) {
    EXPECT_EQ(gather, t.gather);
  }
  EXPECT_EQ(a.db_up.gmem_gather_index, nullptr);  // dh has a row of its own
  EXPECT_TRUE(a.down_wgrad.is_fp32 && a.up_wgrad.is_fp32 && a.db_up.is_fp32 && a.db_down.is_fp32);
  EXPECT_TRUE(a.down_wgrad.accumulates && a.up_wgrad.accumulates && a.db_up.accumulates &&
              a.db_down.accumulates);
  std::vector<std::int32_t const*> counters = {
      a.recompute.gmem_tile_counter, a.down_dgrad.gmem_tile_counter, a.down_wgrad.gmem_tile_counter,
      a.up_dgrad.gmem_tile_counter, a.up_wgrad.gmem_tile_counter};
  std::sort(counters.begin(), counters.end());
  EXPECT_EQ(std::adjacent_find(counters.begin(), counters.end()), counters.end());
}

TEST(BackwardArguments, GatherNothingFromGroupedRowsAndRecomputeH) {
  MoeDesc desc = desc_of({}, ActivationKind::relu2);
  desc.grouping = RowGrouping::offsets;
  desc.shape.top_k = 1;
  desc.save = SavePolicy::x;
  BackwardTables t;
  BackwardArguments const a = backward_arguments(desc, backward_args(desc), t.memory(t.h));
  for (std::int32_t const* const gather :
       {a.recompute.gmem_gather_index, a.down_dgrad.gmem_gather_index,
        a.down_wgrad.gmem_gather_index, a.up_wgrad.gmem_gather_index,
        a.db_down.gmem_gather_index}) {
    EXPECT_EQ(gather, nullptr);
  }
  EXPECT_FALSE(a.aggregate.adds_to_o);
  EXPECT_EQ(a.recompute.gmem_h, t.h);
  EXPECT_EQ(a.recompute.gmem_a, nullptr);
  EXPECT_EQ(a.down_dgrad.gmem_h, t.h);
  EXPECT_EQ(a.up_wgrad.halves, 1);
  EXPECT_FALSE(a.up_dgrad.gated);
}

// The layout of gpt-oss: dh has the order of w_up's columns, so all that reads it sees one matrix of 2n rows.
TEST(BackwardArguments, SeeColumnsOfGateAndUpInTurnAsOneMatrix) {
  MoeDesc const desc =
      desc_of({GateUpOrder::interleaved, WeightOrientation::transposed}, ActivationKind::swiglu);
  MoeBackwardArgs const args = backward_args(desc);
  BackwardTables t;
  BackwardArguments const a = backward_arguments(desc, args, t.memory(t.h));
  EXPECT_TRUE(a.recompute.interleaved && a.down_dgrad.interleaved);
  EXPECT_FALSE(a.up_dgrad.gated);
  EXPECT_EQ(a.up_wgrad.halves, 1);
  EXPECT_EQ(a.db_up.halves, 1);
  constexpr std::int64_t kColumns = 2 * kIntermediate;
  EXPECT_EQ(a.up_dgrad.intermediate, kColumns);
  EXPECT_EQ(a.up_wgrad.intermediate, kColumns);
  EXPECT_EQ(a.db_up.columns, kColumns);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (std::int64_t i = 0; i < kColumns; ++i) {
      EXPECT_EQ(place(a.db_up.db[0], args.gradients.db_up, e, i, 0), e * kColumns + i);
      for (std::int64_t c = 0; c < kHidden; ++c) {
        std::int64_t const at = (e * kHidden + c) * kColumns + i;
        EXPECT_EQ(place(a.up_dgrad.w_up[0], args.weights.w_up, e, i, c), at);
        EXPECT_EQ(place(a.up_wgrad.dw[0], args.gradients.dw_up, e, i, c), at);
      }
    }
  }
  MoeDesc const rows =
      desc_of({GateUpOrder::interleaved, WeightOrientation::rows}, ActivationKind::swiglu);
  EXPECT_EQ(backward_arguments(rows, backward_args(rows), t.memory(t.h)).up_wgrad.halves, 2);
}

// Of the layouts only blocks lack fast kernels: all of w_up's where they are transposed, else up_projection_dgrad's.
TEST(Refuse, NoLayoutButTransposedBlocks) {
  for (GateUpOrder const order : {GateUpOrder::concat, GateUpOrder::up_first,
                                  GateUpOrder::interleaved, GateUpOrder::blocked}) {
    for (WeightOrientation const orientation :
         {WeightOrientation::rows, WeightOrientation::transposed}) {
      MoeDesc desc = desc_of({order, orientation, order == GateUpOrder::blocked ? 32 : 0},
                             ActivationKind::clamped_swiglu);
      desc.shape.hidden = 72;
      desc.shape.intermediate = 96;
      desc.bias = order != GateUpOrder::blocked;
      BackwardTables t;
      BackwardArguments const a = backward_arguments(
          desc, backward_args(desc),
          {t.view(), nowhere(), nowhere(), nowhere(), nullptr, nowhere(), t.counters});
      bool const served = order != GateUpOrder::blocked || orientation == WeightOrientation::rows;
      EXPECT_EQ(!refuse(a.recompute).refused(), served) << refuse(a.recompute).text;
      EXPECT_EQ(!refuse(a.up_wgrad).refused(), served) << refuse(a.up_wgrad).text;
      EXPECT_EQ(!refuse(a.up_dgrad).refused(), order != GateUpOrder::blocked)
          << refuse(a.up_dgrad).text;
      EXPECT_FALSE(refuse(a.down_dgrad).refused()) << refuse(a.down_dgrad).text;
      EXPECT_FALSE(refuse(a.down_wgrad).refused()) << refuse(a.down_wgrad).text;
    }
  }
}

// Rows of a call without rows are not cleared, as nothing makes its tables.
TEST(PrefersFewTokens, CallsWithRowsAlone) {
  for (std::int64_t const tokens : {0, 1, 8, 9}) {
    MoeDesc desc;
    desc.shape = {.tokens = tokens, .hidden = 64, .intermediate = 32, .experts = 4, .top_k = 2};
    desc.dtype = DType::bf16;
    desc.router.kind = RouterKind::given;
    MoeForwardArgs args;
    args.x = tensor(static_cast<void const*>(nowhere()), DType::bf16, {tokens, 64},
                    Device{DeviceKind::cuda, 0});
    args.o = tensor(nowhere(), DType::bf16, {tokens, 64}, Device{DeviceKind::cuda, 0});
    args.weights = weights_without_memory(desc);
    ExpertArguments const experts = expert_arguments(
        desc, args, {{}, nowhere(), nowhere(), static_cast<std::int32_t*>(nowhere())});
    EXPECT_EQ(has_few_tokens(desc), tokens == 1 || tokens == 8) << tokens;
    EXPECT_TRUE(prefers_few_tokens(
        experts_fwd_arguments(experts, false, static_cast<std::int32_t*>(nowhere()))));
    // Rows of o that are no multiple of 16 bytes apart are added up by the plain twin, behind GEMMs.
    ExpertArguments odd = experts;
    odd.aggregate.o_pitch = 68;
    EXPECT_FALSE(prefers_few_tokens(
        experts_fwd_arguments(odd, false, static_cast<std::int32_t*>(nowhere()))));
  }
}

// Counters, a and y of a call with few tokens are one piece, which is cleared. Logits, ids and the workspace of
// metadata lie behind it.
TEST(PrefersFewTokens, RowsThatAreCleared) {
  MoeDesc desc;
  desc.shape = {.tokens = 3, .hidden = 72, .intermediate = 40, .experts = 4, .top_k = 2};
  desc.dtype = DType::bf16;
  for (RouterKind const kind : {RouterKind::given, RouterKind::topk_softmax}) {
    desc.router.kind = kind;
    ForwardPlan const few = plan_forward(desc, 4096);
    EXPECT_LT(few.counters.offset, few.a.offset);
    EXPECT_LT(few.a.offset, few.y.offset);
    std::size_t const end = few.counters.offset + 4 * static_cast<std::size_t>(few.cleared_words);
    EXPECT_EQ(end, few.y.offset + 2 * 6 * 72);
    EXPECT_GE(few.metadata.offset, end);
    EXPECT_GE(kind == RouterKind::given ? few.ids.offset : few.logits.offset, end);
  }
  auto const words = [](MoeDesc const& other) { return plan_forward(other, 4096).cleared_words; };
  MoeDesc chunks = desc, odd = desc, many = desc, wide = desc;
  chunks.column_chunk = 32;
  odd.shape.hidden = 76;
  many.shape.tokens = 9;
  wide.shape.hidden = std::int64_t{1} << 28;
  for (MoeDesc const& other : {chunks, odd, many, wide}) EXPECT_EQ(words(other), kNumTileCounters);
}

// A tile's number along n has 16 bits in what the scheduler announces.
TEST(Refuse, MoreColumnsThanTilesCanBeNumbered) {
  constexpr std::int64_t kMax = std::int64_t{1} << 22;
  RouterDgradArguments args{};
  args.hidden = kMax;
  args.experts = 8;
  EXPECT_FALSE(refuse(args).refused()) << refuse(args).text;
  args.hidden = kMax + 8;
  EXPECT_STREQ(refuse(args).text, "d=4194312: at most 4194304");
  DownProjectionFwdArguments down{};
  down.hidden = kMax + 8;
  down.intermediate = 8;
  EXPECT_STREQ(refuse(down).text, "d=4194312: at most 4194304");
  down.hidden = 8;
  down.intermediate = kMax + 8;
  EXPECT_STREQ(refuse(down).text, "n=4194312: at most 4194304");
}

// Kernels count rows in 32 bits with a sign, and 16 bytes of gathered rows without one. Elements are not counted so:
// there may be more of them than 2^31.
TEST(Refuse, RowsThatIntegersOfKernelsDoNotHold) {
  constexpr std::int64_t kRows = std::int64_t{1} << 30, kTokens = 1 << 20, kWide = 1 << 14;
  auto const check = [](auto args, auto& size, std::int64_t most, std::string const& name) {
    size = most;
    EXPECT_FALSE(refuse(args()).refused()) << refuse(args()).text;
    size = most + 1;
    EXPECT_EQ(refuse(args()).text,
              name + "=" + std::to_string(most + 1) + ": at most " + std::to_string(most));
    size = most;
  };
  RouterLogitsArguments logits{};
  logits.experts = 8;
  logits.hidden = logits.x.pitch = logits.w_router.pitch = kWide;
  check([&] { return logits; }, logits.x.rows, kRows, "tokens");
  RouterDgradArguments dgrad{};
  dgrad.experts = 8;
  dgrad.hidden = dgrad.dx_pitch = dgrad.w_router.pitch = kWide;
  check([&] { return dgrad; }, dgrad.tokens, kRows, "tokens");

  auto const gathered = [&](auto args, MatrixRows& source, std::int64_t& rows) {
    source = {nullptr, kTokens, kWide};  // 2^34 elements
    check(args, rows, kRows, "rows");
    source.rows = 2 * kTokens - 1;
    EXPECT_FALSE(refuse(args()).refused()) << refuse(args()).text;
    source.rows = 2 * kTokens;
    EXPECT_STREQ(refuse(args()).text, "tokens * d / 8=4294967296: at most 4294967295");
  };
  WeightRows const weights = {.row_stride = kWide, .column_stride = 1, .block = kWide};
  auto const sized = [](auto& args) {
    args.hidden = kWide;
    args.intermediate = 1024;
    args.experts = 8;
  };
  UpProjectionFwdArguments up{};
  up.w_up[0] = up.w_up[1] = weights;
  sized(up);
  gathered([&] { return up; }, up.x, up.rows);
  DownProjectionDgradArguments down_dgrad{};
  down_dgrad.w_down = weights;
  sized(down_dgrad);
  gathered([&] { return down_dgrad; }, down_dgrad.d_o, down_dgrad.rows);
  DownProjectionWgradArguments down_wgrad{};
  sized(down_wgrad);
  gathered([&] { return down_wgrad; }, down_wgrad.left, down_wgrad.rows);
  UpProjectionWgradArguments up_wgrad{};
  sized(up_wgrad);
  gathered([&] { return up_wgrad; }, up_wgrad.left, up_wgrad.rows);
  DownProjectionFwdArguments down{};
  down.w_down = weights;
  sized(down);
  check([&] { return down; }, down.rows, kRows, "rows");
  UpProjectionDgradArguments up_dgrad{};
  up_dgrad.w_up[0] = up_dgrad.w_up[1] = weights;
  sized(up_dgrad);
  check([&] { return up_dgrad; }, up_dgrad.rows, kRows, "rows");
}

// The dlogits of a split backward are the caller's, aligned to their elements; the workspace's are aligned further.
TEST(Refuse, DlogitsWithoutSixteenBytes) {
  alignas(16) float memory[4] = {};
  RouterGradientArguments args{};
  args.dlogits.experts = 16;
  args.dlogits.top_k = 2;
  args.dlogits.gmem_dlogits = memory;
  EXPECT_FALSE(refuse(args).refused());
  args.dlogits.gmem_dlogits = memory + 2;
  EXPECT_STREQ(refuse(args).text, "dlogits: not aligned to 16 bytes");
  args.dlogits.dlogits_are_scratch = true;
  EXPECT_FALSE(refuse(args).refused());
  args.dlogits.gmem_token_offsets = static_cast<std::int32_t const*>(nowhere());
  EXPECT_STREQ(refuse(args).text, "experts per token vary");
}

// <dO, b_down> is read by 16 bytes; without a bias neither matters.
TEST(Refuse, BiasesWithoutSixteenBytes) {
  alignas(16) std::uint16_t memory[64] = {};
  RouterGradientArguments args{};
  args.dlogits.experts = 2;
  args.dlogits.top_k = 1;
  args.dlogits.dlogits_are_scratch = true;
  auto& dscores = args.dscores;
  dscores.d_o = {memory, 2, 16};
  dscores.b_down = {.gmem = memory, .expert_stride = 16, .row_stride = 1, .block = 16};
  dscores.hidden = 16;
  EXPECT_FALSE(refuse(args).refused()) << refuse(args).text;
  auto const refused = [&](auto change, char const* text) {
    RouterGradientArguments changed = args;
    change(changed.dscores);
    EXPECT_STREQ(refuse(changed).text, text);
    changed.dscores.b_down = {};
    EXPECT_FALSE(refuse(changed).refused()) << refuse(changed).text;
  };
  refused([](DscoresArguments& d) { d.hidden = 12; },
          "d=12: rows of 16 bytes need a multiple of 8");
  refused([](DscoresArguments& d) { d.d_o.pitch = 20; },
          "pitch of d_o=20: rows of 16 bytes need a multiple of 8");
  refused([&](DscoresArguments& d) { d.d_o.gmem = memory + 4; }, "d_o: not aligned to 16 bytes");
  refused([&](DscoresArguments& d) { d.b_down.gmem = memory + 4; },
          "b_down: not aligned to 16 bytes");
  refused([](DscoresArguments& d) { d.b_down.expert_stride = 20; },
          "pitch of a bias=20: rows of 16 bytes need a multiple of 8");
  refused([](DscoresArguments& d) { d.b_down.row_stride = 2; }, "b_down: not contiguous");
}

// What makes the tables shares the memory of y, but for what route leaves to metadata, 3 bytes a slot. At 7B-n256 h, o
// and the workspace stay below SonicMoE's 946 MiB.
TEST(ForwardPlan, HoldsWhatMakesTheTablesInThePlaceOfY) {
  MoeDesc desc = desc_of({}, ActivationKind::swiglu);
  desc.shape = {.tokens = 24576, .hidden = 1536, .intermediate = 256, .experts = 128, .top_k = 8};
  desc.router.kind = RouterKind::topk_softmax;
  std::int64_t const slots = desc.num_slots();
  auto const a_and_y = static_cast<std::size_t>(2 * slots * (256 + 1536));
  std::size_t const forward = workspace_bytes(desc, Pass::forward, 0);
  EXPECT_GE(forward, a_and_y);
  EXPECT_LE(forward, a_and_y + static_cast<std::size_t>(3 * slots) + 256 * 4);
  auto const kept = static_cast<std::size_t>(2 * slots * 2 * 256 + 2 * 24576 * 1536);
  EXPECT_LE(forward + kept, std::size_t{946} << 20);
  // Few columns: then the logits are what is largest.
  desc.shape.hidden = 8;
  EXPECT_GE(workspace_bytes(desc, Pass::forward, 0),
            static_cast<std::size_t>(2 * slots * 256 + 4 * 24576 * 128));
}

// From 2^29 elements of y to 2^42: each doubling of the tokens adds twice what the one before added.
TEST(ForwardPlan, GrowsWithTheTokensBeyond32Bits) {
  MoeDesc desc = desc_of({}, ActivationKind::swiglu);
  for (RouterKind const kind : {RouterKind::given, RouterKind::topk_softmax}) {
    desc.router.kind = kind;
    for (Pass const pass : {Pass::forward, Pass::backward, Pass::backward_input}) {
      double before = 0, added = 0;
      for (int log2 = 14; log2 <= 27; ++log2) {
        desc.shape = {.tokens = std::int64_t{1} << log2,
                      .hidden = 4096,
                      .intermediate = 1024,
                      .experts = 64,
                      .top_k = 8};
        auto const bytes = static_cast<double>(workspace_bytes(desc, pass, 0));
        EXPECT_GE(bytes, 2.0 * 8 * 1024 * static_cast<double>(desc.shape.tokens));
        if (added > 0) {
          EXPECT_NEAR(bytes - before, 2 * added, 0.01 * added);
        }
        added = before > 0 ? bytes - before : 0;
        before = bytes;
      }
    }
  }
}

// Every pass has what it uses; a whole backward shares the memory of a_scaled and dx rows.
TEST(BackwardPlan, HoldsTheLargestOfWhatIsNeverAliveAtOnce) {
  MoeDesc desc = desc_of({}, ActivationKind::swiglu);
  desc.shape = {.tokens = 4096, .hidden = 64, .intermediate = 96, .experts = 16, .top_k = 2};
  std::int64_t const slots = desc.num_slots();
  auto const bytes = [&](Pass pass) { return workspace_bytes(desc, pass, 0); };
  constexpr std::size_t kPadding = 256 * 12;
  std::size_t const given = bytes(Pass::backward);
  auto const expected = static_cast<std::size_t>(slots * (2 * (2 * 96 + 96) + 4));
  EXPECT_GE(given, expected);
  EXPECT_LE(given, expected + kPadding);
  EXPECT_LE(bytes(Pass::backward_weights), kPadding);
  desc.router.kind = RouterKind::topk_softmax;
  auto const routed = expected + static_cast<std::size_t>(4 * slots + 6 * 4096 * 16);
  EXPECT_GE(bytes(Pass::backward), routed);
  // h that is recomputed gives way to dh.
  std::size_t const kept = bytes(Pass::backward);
  desc.save = SavePolicy::x;
  EXPECT_GE(bytes(Pass::backward), kept);
  EXPECT_LE(bytes(Pass::backward), kept + kPadding);
}

}  // namespace
}  // namespace tessera::cuda
