// SPDX-License-Identifier: Apache-2.0
// What a layer promises beyond its values: equal bits, skipped and accumulated gradients, split backward,
// sentinels, strided tensors, empty calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

struct LayerTest : testing::Test {
  Context context = value_of(Context::create({.num_threads = 2}));
};

TEST_F(LayerTest, BitsDoNotDependOnThreadsOrWorkspace) {
  MoeDesc desc = small_desc(RouterKind::topk_softmax);
  desc.shape = {.tokens = 700, .hidden = 40, .intermediate = 24, .experts = 6, .top_k = 3};
  Context const one = value_of(Context::create({.num_threads = 1}));
  Context const many = value_of(Context::create({.num_threads = 7}));
  Layer first(one, desc), second(many, desc);
  std::fill(second.forward_workspace.begin(), second.forward_workspace.end(), std::byte{0xff});
  std::fill(second.backward_workspace.begin(), second.backward_workspace.end(), std::byte{0xff});
  for (Layer* const layer : {&first, &second}) {
    ASSERT_TRUE(layer->run_forward().ok());
    ASSERT_TRUE(layer->run_backward().ok());
  }
  EXPECT_EQ(first.o, second.o);
  EXPECT_EQ(first.h, second.h);
  EXPECT_EQ(first.dx, second.dx);
  EXPECT_EQ(first.dw_up, second.dw_up);
  EXPECT_EQ(first.dw_down, second.dw_down);
  EXPECT_EQ(first.db_up, second.db_up);
  EXPECT_EQ(first.db_down, second.db_down);
  EXPECT_EQ(first.dw_router, second.dw_router);
  EXPECT_EQ(first.routing, second.routing);
}

TEST_F(LayerTest, ColumnChunksDoNotChangeBits) {
  MoeDesc desc = small_desc(RouterKind::topk_softmax);
  desc.shape = {.tokens = 300, .hidden = 70, .intermediate = 24, .experts = 6, .top_k = 3};
  MoeDesc chunked_desc = desc;
  for (std::int64_t const chunk : {1, 33, 69, 70, 1000}) {
    chunked_desc.column_chunk = chunk;
    Layer whole(context, desc), chunked(context, chunked_desc);
    for (Layer* const layer : {&whole, &chunked}) {
      ASSERT_TRUE(layer->run_forward().ok());
      ASSERT_TRUE(layer->run_backward().ok());
    }
    EXPECT_EQ(whole.o, chunked.o) << chunk;
    EXPECT_EQ(whole.dx, chunked.dx) << chunk;
    EXPECT_EQ(whole.dw_up, chunked.dw_up) << chunk;
    EXPECT_EQ(whole.dscores, chunked.dscores) << chunk;
    EXPECT_GE(whole.forward_workspace.size(), chunked.forward_workspace.size()) << chunk;
  }
}

// Whole and split backward against every case: verify (src/verify/candidate.cpp).
TEST_F(LayerTest, GradientsOverHAreTheSame) {
  MoeDesc desc = small_desc(RouterKind::topk_softmax);
  Layer apart(context, desc);
  desc.overwrite_h = true;
  Layer over(context, desc);
  for (Layer* const layer : {&apart, &over}) {
    ASSERT_TRUE(layer->run_forward().ok());
    ASSERT_EQ(layer->h, apart.h);
  }
  ASSERT_TRUE(apart.run_backward().ok());
  auto const h = over.h;
  ASSERT_TRUE(over.run_backward().ok());
  EXPECT_NE(over.h, h);
  EXPECT_EQ(over.dx, apart.dx);
  EXPECT_EQ(over.dw_up, apart.dw_up);
  EXPECT_EQ(over.dw_down, apart.dw_down);
  EXPECT_EQ(over.dw_router, apart.dw_router);
}

TEST_F(LayerTest, InferenceHasTheBitsOfTraining) {
  Layer layer(context);
  ASSERT_TRUE(layer.run_forward().ok());
  Floats const trained = layer.o;
  MoeDesc desc = layer.desc;
  desc.save = SavePolicy::none;
  std::vector<std::byte> workspace(value_of(workspace_bytes(context, desc, Pass::forward)));
  MoeForwardArgs args = layer.forward;
  args.h = {};
  args.routing = {};
  args.workspace = {workspace.data(), workspace.size()};
  std::fill(layer.o.begin(), layer.o.end(), 0.0f);
  ASSERT_TRUE(moe_forward(context, desc, args).ok());
  EXPECT_EQ(layer.o, trained);
  EXPECT_EQ(value_of(saved_bytes(desc)).total(), 0u);
}

TEST_F(LayerTest, AbsentGradientsAreSkipped) {
  Layer whole(context), part(context);
  for (Layer* const layer : {&whole, &part}) ASSERT_TRUE(layer->run_forward().ok());
  part.backward.gradients = {};
  part.backward.dscores = {};
  ASSERT_TRUE(whole.run_backward().ok());
  ASSERT_TRUE(part.run_backward().ok());
  EXPECT_EQ(part.dx, whole.dx);
  EXPECT_EQ(part.dw_up, Floats(part.dw_up.size(), 0.0f));
  EXPECT_EQ(part.db_down, Floats(part.db_down.size(), 0.0f));
  EXPECT_NE(whole.dw_up, Floats(part.dw_up.size(), 0.0f));
}

TEST_F(LayerTest, AccumulateAddsTheWholeSumOnce) {
  Layer written(context, small_desc(RouterKind::topk_softmax));
  Layer added(context, small_desc(RouterKind::topk_softmax));
  for (Layer* const layer : {&written, &added}) ASSERT_TRUE(layer->run_forward().ok());
  std::fill(added.dw_up.begin(), added.dw_up.end(), 2.5f);
  std::fill(added.dw_down.begin(), added.dw_down.end(), 2.5f);
  std::fill(added.dw_router.begin(), added.dw_router.end(), 2.5f);
  std::fill(added.db_up.begin(), added.db_up.end(), 2.5f);
  added.backward.gradients.mode = GradientMode::accumulate;
  ASSERT_TRUE(written.run_backward().ok());
  ASSERT_TRUE(added.run_backward().ok());
  auto const expect_sum = [](Floats const& sum, Floats const& value) {
    for (std::size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], 2.5f + value[i]) << i;
  };
  expect_sum(added.dw_up, written.dw_up);
  expect_sum(added.dw_down, written.dw_down);
  expect_sum(added.dw_router, written.dw_router);
  expect_sum(added.db_up, written.db_up);
}

TEST_F(LayerTest, SplitBackwardHasTheBitsOfTheWhole) {
  for (RouterKind const router : {RouterKind::given, RouterKind::topk_softmax}) {
    Layer whole(context, small_desc(router)), split(context, small_desc(router));
    for (Layer* const layer : {&whole, &split}) ASSERT_TRUE(layer->run_forward().ok());
    ASSERT_TRUE(whole.run_backward().ok());

    auto const& s = split.desc.shape;
    std::int64_t const slots = split.desc.num_slots(), n = s.intermediate;
    Floats dh(static_cast<std::size_t>(slots * 2 * n)),
        a_scaled(static_cast<std::size_t>(slots * n)),
        dlogits(static_cast<std::size_t>(s.tokens * s.experts));
    MoeBackwardArgs args = split.backward;
    args.dh = tensor(dh.data(), {slots, 2 * n});
    args.a_scaled = tensor(a_scaled.data(), {slots, n});
    if (split.routed()) args.dlogits_saved = tensor(dlogits.data(), {s.tokens, s.experts});
    MoeBackwardArgs input = args, weights = args;
    input.gradients = {};
    weights.dx = {};
    weights.dscores = {};
    weights.weights = {};
    weights.h = {};
    for (auto const& [pass, call_args, call] :
         {std::tuple{Pass::backward_input, input, &moe_backward_input},
          std::tuple{Pass::backward_weights, weights, &moe_backward_weights}}) {
      std::vector<std::byte> workspace(value_of(workspace_bytes(context, split.desc, pass)));
      MoeBackwardArgs with_workspace = call_args;
      with_workspace.workspace = {workspace.data(), workspace.size()};
      Status const status = call(context, split.desc, with_workspace, {});
      ASSERT_TRUE(status.ok()) << status.text();
    }
    EXPECT_EQ(split.dx, whole.dx);
    EXPECT_EQ(split.dscores, whole.dscores);
    EXPECT_EQ(split.dw_up, whole.dw_up);
    EXPECT_EQ(split.dw_down, whole.dw_down);
    EXPECT_EQ(split.db_up, whole.db_up);
    EXPECT_EQ(split.dw_router, whole.dw_router);
  }
}

// Of no tokens, as a rank of a data-parallel group may have none: dlogits_saved is null then.
TEST_F(LayerTest, SplitBackwardOfNoTokensWritesAllGradients) {
  MoeDesc desc = small_desc(RouterKind::topk_softmax);
  desc.shape.tokens = 0;
  Layer layer(context, desc);
  for (Floats* const values : {&layer.dw_up, &layer.dw_down, &layer.db_up, &layer.db_down,
                               &layer.dw_router, &layer.db_router}) {
    std::fill(values->begin(), values->end(), 777.0f);
  }
  ASSERT_TRUE(layer.run_forward().ok());
  MoeBackwardArgs args = layer.backward;
  args.dx = {};
  args.dscores = {};
  args.weights = {};
  args.h = {};
  args.dh = tensor(static_cast<float*>(nullptr), {0, 2 * desc.shape.intermediate});
  args.a_scaled = tensor(static_cast<float*>(nullptr), {0, desc.shape.intermediate});
  args.dlogits_saved = tensor(static_cast<float*>(nullptr), {0, desc.shape.experts});
  std::vector<std::byte> workspace(
      value_of(workspace_bytes(context, desc, Pass::backward_weights)));
  args.workspace = {workspace.data(), workspace.size()};
  Status const status = moe_backward_weights(context, desc, args, {});
  ASSERT_TRUE(status.ok()) << status.text();
  for (Floats const* const values : {&layer.dw_up, &layer.dw_down, &layer.db_up, &layer.db_down,
                                     &layer.dw_router, &layer.db_router}) {
    EXPECT_EQ(*values, Floats(values->size(), 0.0f));
  }
}

TEST_F(LayerTest, SentinelsOwnNothingWhateverTheirScore) {
  Layer layer(context);
  layer.ids[0] = layer.ids[1] = 5;  // token 0: both, id E
  layer.ids[4] = -7;
  layer.ids[7] = 1 << 30;
  for (std::size_t const slot : {0u, 1u, 4u, 7u}) layer.weights[slot] = std::nanf("");
  ASSERT_TRUE(layer.run_forward().ok());
  ASSERT_TRUE(layer.run_backward().ok());
  std::int64_t const d = layer.desc.shape.hidden;
  for (std::int64_t c = 0; c < d; ++c) {
    EXPECT_EQ(layer.o[static_cast<std::size_t>(c)], 0.0f);
    EXPECT_EQ(layer.dx[static_cast<std::size_t>(c)], 0.0f);
  }
  for (float const value : layer.o) EXPECT_TRUE(std::isfinite(value));
  for (float const value : layer.dw_up) EXPECT_TRUE(std::isfinite(value));
  RoutingView const tables = layer.tables();
  EXPECT_EQ(tables.expert_offsets[5], layer.desc.num_slots() - 4);
  for (std::size_t const slot : {0u, 1u, 4u, 7u}) {
    EXPECT_EQ(tables.inverse_permutation[slot], -1);
    EXPECT_EQ(layer.dscores[slot], 0.0f);
  }
}

// Rows of `pitch` floats, NaN behind the values of each.
Floats padded(Floats const& values, std::int64_t columns, std::int64_t pitch) {
  auto const rows = static_cast<std::int64_t>(values.size()) / columns;
  Floats out(static_cast<std::size_t>(rows * pitch), std::nanf(""));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(values.begin() + r * columns, columns, out.begin() + r * pitch);
  }
  return out;
}

// Rows of `pitch` floats whose first ones are those of `dense`; the others are still NaN.
void expect_padded(Floats const& rows, Floats const& dense, std::int64_t columns,
                   std::int64_t pitch) {
  Floats const wanted = padded(dense, columns, pitch);
  ASSERT_EQ(rows.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (static_cast<std::int64_t>(i) % pitch < columns) {
      EXPECT_EQ(rows[i], wanted[i]) << i;
    } else {
      EXPECT_TRUE(std::isnan(rows[i])) << i;
    }
  }
}

TEST_F(LayerTest, ServesStridedTensors) {
  Layer layer(context), strided(context);
  auto const& s = layer.desc.shape;
  std::int64_t const pitch = s.hidden + 3;
  Floats const x = padded(layer.x, s.hidden, pitch);
  Floats o(x.size(), std::nanf("")), dx = o;
  auto const with_pitch = [&](auto view, auto* data) {
    view.data = data;
    view.stride[0] = pitch;
    return view;
  };
  strided.forward.x = with_pitch(strided.forward.x, x.data());
  strided.forward.o = with_pitch(strided.forward.o, o.data());
  strided.backward.x = strided.forward.x;
  strided.backward.dx = with_pitch(strided.backward.dx, dx.data());
  for (Layer* const each : {&layer, &strided}) {
    ASSERT_TRUE(each->run_forward().ok());
    ASSERT_TRUE(each->run_backward().ok());
  }
  EXPECT_EQ(layer.dw_up, strided.dw_up);
  expect_padded(o, layer.o, s.hidden, pitch);
  expect_padded(dx, layer.dx, s.hidden, pitch);
}

TEST_F(LayerTest, ServesStridedScores) {
  Layer layer(context), strided(context);
  std::int64_t const k = layer.desc.shape.top_k;
  Floats const weights = padded(strided.weights, k, k + 1);
  strided.forward.topk_weights = tensor(weights.data(), {layer.desc.shape.tokens, k});
  strided.forward.topk_weights.stride[0] = k + 1;
  for (Layer* const each : {&layer, &strided}) {
    ASSERT_TRUE(each->run_forward().ok());
    ASSERT_TRUE(each->run_backward().ok());
  }
  EXPECT_EQ(layer.o, strided.o);
  EXPECT_EQ(layer.dscores, strided.dscores);
  EXPECT_EQ(layer.dw_down, strided.dw_down);
}

TEST_F(LayerTest, ServesStridedLogits) {
  MoeDesc const desc = small_desc(RouterKind::topk_softmax);
  std::int64_t const t = desc.shape.tokens, e = desc.shape.experts, pitch = e + 2;
  std::mt19937 generator(5);
  Floats const aux = random_floats(t * e, 0.1f, generator), aux_padded = padded(aux, e, pitch);
  Layer layer(context, desc), strided(context, desc);
  Floats logits(aux.size()), dlogits(aux.size());
  Floats logits_padded = padded(logits, e, pitch), dlogits_padded = logits_padded;
  auto const with_pitch = [&](auto* data) {
    auto view = tensor(data, {t, e});
    view.stride[0] = pitch;
    return view;
  };
  layer.forward.logits = tensor(logits.data(), {t, e});
  layer.backward.aux_dlogits = tensor(aux.data(), {t, e});
  layer.backward.dlogits = tensor(dlogits.data(), {t, e});
  strided.forward.logits = with_pitch(logits_padded.data());
  strided.backward.aux_dlogits = with_pitch(aux_padded.data());
  strided.backward.dlogits = with_pitch(dlogits_padded.data());
  for (Layer* const each : {&layer, &strided}) {
    Status const forward = each->run_forward();
    ASSERT_TRUE(forward.ok()) << forward.text();
    Status const backward = each->run_backward();
    ASSERT_TRUE(backward.ok()) << backward.text();
  }
  EXPECT_EQ(layer.dx, strided.dx);
  EXPECT_EQ(layer.dw_router, strided.dw_router);
  expect_padded(logits_padded, logits, e, pitch);
  expect_padded(dlogits_padded, dlogits, e, pitch);
}

TEST_F(LayerTest, NoTokensIsAValidCall) {
  MoeDesc desc = small_desc(RouterKind::topk_softmax);
  desc.shape.tokens = 0;
  Layer layer(context, desc);
  std::fill(layer.dw_up.begin(), layer.dw_up.end(), 9.0f);
  std::fill(layer.db_down.begin(), layer.db_down.end(), 9.0f);
  std::fill(layer.dw_router.begin(), layer.dw_router.end(), 9.0f);
  std::fill(layer.db_router.begin(), layer.db_router.end(), 9.0f);
  Status const forward = layer.run_forward();
  ASSERT_TRUE(forward.ok()) << forward.text();
  ASSERT_TRUE(layer.run_backward().ok());
  EXPECT_EQ(layer.dw_up, Floats(layer.dw_up.size(), 0.0f));
  EXPECT_EQ(layer.db_down, Floats(layer.db_down.size(), 0.0f));
  EXPECT_EQ(layer.dw_router, Floats(layer.dw_router.size(), 0.0f));
  EXPECT_EQ(layer.db_router, Floats(layer.db_router.size(), 0.0f));
}

TEST_F(LayerTest, CountsRowsPerExpert) {
  Layer layer(context, small_desc(RouterKind::topk_softmax));
  std::vector<std::int32_t> counts(5, -1);
  layer.forward.expert_counts = tensor(counts.data(), {5});
  ASSERT_TRUE(layer.run_forward().ok());
  std::int32_t total = 0;
  for (std::size_t e = 0; e < 5; ++e) {
    EXPECT_EQ(counts[e], layer.tables().expert_offsets[e + 1] - layer.tables().expert_offsets[e]);
    total += counts[e];
  }
  EXPECT_EQ(total, 38);
}

}  // namespace
}  // namespace tessera::api_test
