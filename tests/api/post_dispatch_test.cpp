// SPDX-License-Identifier: Apache-2.0
// Rows that were grouped ahead of the call, and a backward that recomputes h: the same results as the plain
// entry.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

struct PostDispatch : testing::Test {
  Context context = value_of(Context::create({.num_threads = 2}));
  std::int64_t rows = 19, valid = 16;
  std::vector<std::int32_t> offsets = {0, 4, 4, 11, 15, 16};  // 3 tail rows

  /// The same rows as a top-1 layer: row r goes to its expert, tail rows to nobody.
  MoeDesc plain_desc() const {
    MoeDesc desc = small_desc();
    desc.shape.top_k = 1;
    return desc;
  }
  void give_ids(Layer& layer) const {
    for (std::size_t r = 0; r < layer.ids.size(); ++r) {
      layer.ids[r] = -1;
      for (std::int32_t e = 0; e < 5; ++e) {
        auto const row = static_cast<std::int32_t>(r);
        if (row >= offsets[static_cast<std::size_t>(e)] &&
            row < offsets[static_cast<std::size_t>(e + 1)]) {
          layer.ids[r] = e;
        }
      }
    }
  }
  ConstTensor groups(RowGrouping grouping, std::vector<std::int32_t>& values) const {
    values = offsets;
    if (grouping == RowGrouping::offsets) return tensor(values.data(), {6});
    values.erase(values.begin());
    if (grouping == RowGrouping::counts) {
      for (std::size_t e = 5; e-- > 1;) values[e] -= values[e - 1];
    }
    return tensor(values.data(), {5});
  }
};

TEST_F(PostDispatch, HasTheBitsOfTheSlotEntry) {
  Layer plain(context, plain_desc());
  give_ids(plain);
  ASSERT_TRUE(plain.run_forward().ok());
  ASSERT_TRUE(plain.run_backward().ok());
  for (RowGrouping const grouping :
       {RowGrouping::offsets, RowGrouping::ends, RowGrouping::counts}) {
    MoeDesc desc = plain_desc();
    desc.grouping = grouping;
    Layer grouped(context, desc);
    std::vector<std::int32_t> values;
    grouped.forward.topk_ids = grouped.forward.topk_weights = {};
    grouped.forward.expert_offsets = groups(grouping, values);
    grouped.forward.row_scores = tensor(grouped.weights.data(), {rows});
    std::fill(grouped.o.begin(), grouped.o.end(), std::nanf(""));
    std::fill(grouped.dx.begin(), grouped.dx.end(), std::nanf(""));
    Status const status = grouped.run_forward();
    ASSERT_TRUE(status.ok()) << status.text();
    ASSERT_TRUE(grouped.run_backward().ok());
    EXPECT_EQ(grouped.o, plain.o);
    EXPECT_EQ(grouped.dx, plain.dx);
    EXPECT_EQ(grouped.dscores, plain.dscores);
    EXPECT_EQ(grouped.dw_up, plain.dw_up);
    EXPECT_EQ(grouped.o.back(), 0.0f);  // tail rows
    EXPECT_EQ(grouped.dx.back(), 0.0f);
  }
}

TEST_F(PostDispatch, ScoresDefaultToOne) {
  MoeDesc desc = plain_desc();
  desc.grouping = RowGrouping::offsets;
  Layer with(context, desc), without(context, desc);
  std::vector<std::int32_t> values;
  std::fill(with.weights.begin(), with.weights.end(), 1.0f);
  for (Layer* const layer : {&with, &without}) {
    layer->forward.topk_ids = layer->forward.topk_weights = {};
    layer->forward.expert_offsets = groups(RowGrouping::offsets, values);
  }
  with.forward.row_scores = tensor(with.weights.data(), {rows});
  ASSERT_TRUE(with.run_forward().ok());
  ASSERT_TRUE(without.run_forward().ok());
  EXPECT_EQ(with.o, without.o);
}

TEST_F(PostDispatch, RefusesBadGroups) {
  auto const refused = [&](RowGrouping grouping, auto&& change, char const* part) {
    MoeDesc desc = plain_desc();
    desc.grouping = grouping;
    Layer layer(context, desc);
    std::vector<std::int32_t> values;
    layer.forward.topk_ids = layer.forward.topk_weights = {};
    layer.forward.expert_offsets = groups(grouping, values);
    change(values);
    std::fill(layer.o.begin(), layer.o.end(), 7.0f);
    Status const status = layer.run_forward();
    EXPECT_NE(std::string(status.text()).find(part), std::string::npos) << status.text();
    EXPECT_EQ(layer.o, Floats(layer.o.size(), 7.0f));
  };
  refused(RowGrouping::offsets, [](auto& v) { v[0] = 1; }, "expert_offsets[0]=1");
  refused(RowGrouping::offsets, [](auto& v) { v[2] = 3; }, "expert_offsets[2]=3");
  refused(RowGrouping::offsets, [](auto& v) { v[5] = 20; }, "expert_offsets[5]=20");
  refused(RowGrouping::counts, [](auto& v) { v[3] = -1; }, "counts[3]=-1");
  refused(RowGrouping::counts, [](auto& v) { v[4] = 0x7fffffff; }, "counts[4]=2147483647");
  refused(RowGrouping::ends, [](auto& v) { v[1] = 100; }, "ends[1]=100");
}

// Rows of x and d_o that are tokens, some of them of several rows and one of none, as ExpertParallel::dispatch() brings
// them.
TEST_F(PostDispatch, BackwardMayGatherTokens) {
  constexpr std::int64_t kTokens = 7;
  auto const token_of = [](std::size_t row) { return row * 5 % 6; };  // never the last one
  for (SavePolicy const save : {SavePolicy::h, SavePolicy::x}) {
    MoeDesc desc = plain_desc();
    desc.grouping = RowGrouping::offsets;
    desc.save = save;
    Layer spread(context, desc);
    auto const d = static_cast<std::size_t>(desc.shape.hidden);
    Floats x(kTokens * d, std::nanf("")), d_o = x;
    for (std::size_t row = 0; row < static_cast<std::size_t>(valid); ++row) {
      for (std::size_t i = 0; i < d; ++i) {
        std::size_t const at = token_of(row) * d + i;
        x[at] = static_cast<float>(at % 17) - 8.0f;
        d_o[at] = static_cast<float>(at % 23) - 11.0f;
        spread.x[row * d + i] = x[at];
        spread.d_o[row * d + i] = d_o[at];
      }
    }
    std::vector<std::int32_t> values;
    spread.forward.topk_ids = spread.forward.topk_weights = {};
    spread.forward.expert_offsets = groups(RowGrouping::offsets, values);
    spread.forward.row_scores = tensor(spread.weights.data(), {rows});
    if (save == SavePolicy::x) {
      spread.forward.h = {};
      spread.backward.h = {};
    }
    ASSERT_TRUE(spread.run_forward().ok());
    MoeDesc gathered = desc;
    gathered.shape.tokens = kTokens;
    gathered.shape.variable_experts = true;
    gathered.shape.slots = rows;
    ASSERT_EQ(value_of(routing_bytes(gathered)), spread.routing.size());
    std::vector<std::byte> routing = spread.routing;
    RoutingView const tables = value_of(routing_view(gathered, {routing.data(), routing.size()}));
    for (std::size_t row = 0; row < static_cast<std::size_t>(valid); ++row) {
      tables.gather_index[row] = static_cast<std::int32_t>(token_of(row));
    }
    ASSERT_TRUE(spread.run_backward().ok());
    Floats dx(spread.dx.size(), std::nanf(""));
    std::vector<std::byte> workspace(value_of(workspace_bytes(context, gathered, Pass::backward)));
    MoeBackwardArgs args = spread.backward;
    args.x = tensor(x.data(), {kTokens, desc.shape.hidden});
    args.d_o = tensor(d_o.data(), {kTokens, desc.shape.hidden});
    args.dx = tensor(dx.data(), {rows, desc.shape.hidden});
    args.routing = ConstBuffer(routing.data(), routing.size());
    args.workspace = {workspace.data(), workspace.size()};
    Floats const dscores = spread.dscores, dw_up = spread.dw_up, dw_down = spread.dw_down;
    Floats const db_up = spread.db_up, db_down = spread.db_down;
    for (Floats* const out :
         {&spread.dscores, &spread.dw_up, &spread.dw_down, &spread.db_up, &spread.db_down}) {
      std::fill(out->begin(), out->end(), std::nanf(""));
    }
    Status const status = moe_backward(context, gathered, args);
    ASSERT_TRUE(status.ok()) << status.text();
    auto const end = dx.begin() + valid * desc.shape.hidden;
    EXPECT_TRUE(std::equal(dx.begin(), end, spread.dx.begin()));
    EXPECT_EQ(spread.dscores, dscores);
    EXPECT_EQ(spread.dw_up, dw_up);
    EXPECT_EQ(spread.dw_down, dw_down);
    EXPECT_EQ(spread.db_up, db_up);
    EXPECT_EQ(spread.db_down, db_down);
    EXPECT_GT(*std::max_element(dx.begin(), end), 0.0f);
  }
}

TEST_F(PostDispatch, RowsThatGatherTokensAreOfBackwardPasses) {
  MoeDesc desc = plain_desc();
  desc.grouping = RowGrouping::offsets;
  desc.shape.variable_experts = true;
  desc.shape.slots = rows;
  auto const says = [](Status const& status, char const* part) {
    EXPECT_FALSE(status.ok());
    EXPECT_NE(std::string(status.text()).find(part), std::string::npos) << status.text();
  };
  says(moe_forward(context, desc, {}), "of backward passes");
  says(routing_of_groups(context, desc, {}), "of backward passes");
  desc.grouping = RowGrouping::counts;
  says(routing_bytes(desc).status(), "set grouping offsets");
  desc.grouping = RowGrouping::offsets;
  desc.dtype = DType::bf16;
  desc.precision = Precision::fp8;
  says(routing_bytes(desc).status(), "native");
}

// Of a forward pass without scores, for a backward pass that has some.
TEST_F(PostDispatch, TablesWithoutAForwardPass) {
  for (RowGrouping const grouping :
       {RowGrouping::offsets, RowGrouping::ends, RowGrouping::counts}) {
    MoeDesc desc = plain_desc();
    desc.grouping = grouping;
    Layer with(context, desc), without(context, desc);
    std::vector<std::int32_t> values;
    ConstTensor const offsets_of_rows = groups(grouping, values);
    ConstTensor const scores = tensor(with.weights.data(), {rows});
    for (Layer* const layer : {&with, &without}) {
      layer->forward.topk_ids = layer->forward.topk_weights = {};
      layer->forward.expert_offsets = offsets_of_rows;
      std::fill(layer->dx.begin(), layer->dx.end(), std::nanf(""));
    }
    with.forward.row_scores = scores;
    ASSERT_TRUE(with.run_forward().ok());
    ASSERT_TRUE(without.run_forward().ok());
    ASSERT_NE(with.routing, without.routing) << "ones for scores";
    Buffer const routing = {without.routing.data(), without.routing.size()};
    std::vector<std::byte> const ones = without.routing;
    std::fill(without.routing.begin(), without.routing.end(), std::byte{0xaa});
    ASSERT_TRUE(routing_of_groups(context, desc, {offsets_of_rows, {}, routing}).ok());
    EXPECT_EQ(without.routing, ones);
    Status const status = routing_of_groups(context, desc, {offsets_of_rows, scores, routing});
    ASSERT_TRUE(status.ok()) << status.text();
    EXPECT_EQ(without.routing, with.routing);
    if (grouping == RowGrouping::offsets) {  // as DispatchTables have them
      std::vector<std::int32_t> own_offsets = values;
      DispatchTables const tables = {
          .expert_offsets =
              tensor(own_offsets.data(), {static_cast<std::int64_t>(own_offsets.size())}),
          .row_scores = tensor(with.weights.data(), {rows})};
      std::fill(without.routing.begin(), without.routing.end(), std::byte{0xaa});
      Status const made = routing_of_tables(context, desc, tables, routing);
      ASSERT_TRUE(made.ok()) << made.text();
      EXPECT_EQ(without.routing, with.routing);
    }
    ASSERT_TRUE(with.run_backward().ok());
    ASSERT_TRUE(without.run_backward().ok());
    EXPECT_EQ(without.dx, with.dx);
    EXPECT_EQ(without.dw_up, with.dw_up);
    EXPECT_EQ(without.dscores, with.dscores);
  }
}

// Whoever forgot the scores would get wrong gradients in silence.
TEST_F(PostDispatch, TablesWithoutScoresAreRefused) {
  MoeDesc desc = plain_desc();
  desc.grouping = RowGrouping::offsets;
  std::vector<std::int32_t> values;
  groups(RowGrouping::offsets, values);
  DispatchTables const tables = {
      .expert_offsets = tensor(values.data(), {static_cast<std::int64_t>(values.size())})};
  std::vector<std::byte> routing(value_of(routing_bytes(desc)), std::byte{7});
  Status const status = routing_of_tables(context, desc, tables, {routing.data(), routing.size()});
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(std::string(status.text()).find("row_scores: absent"), std::string::npos)
      << status.text();
  EXPECT_EQ(routing, std::vector<std::byte>(routing.size(), std::byte{7}));
}

TEST_F(PostDispatch, TablesOfBadGroupsAreNotWritten) {
  MoeDesc desc = plain_desc();
  desc.grouping = RowGrouping::offsets;
  std::vector<std::int32_t> values;
  GroupedRoutingArgs args = {.expert_offsets = groups(RowGrouping::offsets, values)};
  std::vector<std::byte> routing(value_of(routing_bytes(desc)), std::byte{7});
  args.routing = {routing.data(), routing.size()};
  auto const refused = [&](MoeDesc const& of, char const* part) {
    Status const status = routing_of_groups(context, of, args);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(status.text()).find(part), std::string::npos) << status.text();
    EXPECT_EQ(routing, std::vector<std::byte>(routing.size(), std::byte{7}));
  };
  refused(plain_desc(), "grouping=slots");
  values[2] = 3;
  refused(desc, "expert_offsets[2]=3");
  values[2] = 4;
  args.routing.bytes -= 4;
  refused(desc, "routing");
  args.routing.bytes += 4;
  args.expert_offsets = tensor(reinterpret_cast<std::int32_t*>(routing.data()), {6});
  refused(desc, "overlap");
}

TEST_F(PostDispatch, NeedsOneSlotPerRow) {
  MoeDesc desc = small_desc();
  desc.grouping = RowGrouping::offsets;
  EXPECT_EQ(saved_bytes(desc).status().code(), StatusCode::invalid_argument);
  desc.shape.top_k = 1;
  EXPECT_TRUE(saved_bytes(desc).ok());
  desc.router.kind = RouterKind::topk_softmax;
  EXPECT_FALSE(saved_bytes(desc).ok());
}

TEST_F(PostDispatch, RecomputedHGivesTheBitsOfSavedH) {
  for (RouterKind const router : {RouterKind::given, RouterKind::topk_softmax}) {
    Layer saved(context, small_desc(router));
    MoeDesc desc = small_desc(router);
    desc.save = SavePolicy::x;
    Layer recomputed(context, desc);
    recomputed.forward.h = {};
    recomputed.backward.h = {};
    for (Layer* const layer : {&saved, &recomputed}) {
      Status const forward = layer->run_forward();
      ASSERT_TRUE(forward.ok()) << forward.text();
      Status const backward = layer->run_backward();
      ASSERT_TRUE(backward.ok()) << backward.text();
    }
    EXPECT_EQ(saved.o, recomputed.o);
    EXPECT_EQ(saved.dx, recomputed.dx);
    EXPECT_EQ(saved.dw_up, recomputed.dw_up);
    EXPECT_EQ(saved.dw_down, recomputed.dw_down);
    EXPECT_EQ(value_of(saved_bytes(desc)).h, 0u);
  }
}

}  // namespace
}  // namespace tessera::api_test
