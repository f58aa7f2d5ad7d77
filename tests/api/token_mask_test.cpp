// SPDX-License-Identifier: Apache-2.0
// Padding: a layer whose mask leaves tokens out against the layer of the other tokens alone, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

struct TokenMaskTest : testing::Test {
  Context context = value_of(Context::create({.num_threads = 2}));
  static constexpr std::int64_t kTokens = 70;
  std::vector<std::uint8_t> mask;

  TokenMaskTest() {
    std::mt19937 generator(7);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      mask.push_back(t == 0 || generator() % 3 == 0
                         ? std::uint8_t{0}
                         : static_cast<std::uint8_t>(generator() % 255 + 1));
    }
  }

  static MoeDesc desc_of(RouterKind kind, Rounding round = Rounding::none) {
    MoeDesc desc = small_desc(kind);
    desc.shape.tokens = kTokens;
    desc.router.round = round;
    if (round != Rounding::none) desc.router.tile = 8;
    desc.router.normalize_scores = kind == RouterKind::sqrtsoftplus;
    return desc;
  }
  [[nodiscard]] Floats real_rows(Floats const& rows) const {
    std::size_t const width = rows.size() / mask.size();
    Floats out;
    for (std::size_t t = 0; t < mask.size(); ++t) {
      if (mask[t] == 0) continue;
      auto const first = rows.begin() + static_cast<std::ptrdiff_t>(t * width);
      out.insert(out.end(), first, first + static_cast<std::ptrdiff_t>(width));
    }
    return out;
  }
  void fill_padding(Floats& rows, float value) const {
    std::size_t const width = rows.size() / mask.size();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (mask[i / width] == 0) rows[i] = value;
    }
  }
};

void run(Layer& layer, std::vector<std::int32_t>& counts, bool splits) {
  auto const& s = layer.desc.shape;
  counts.assign(static_cast<std::size_t>(s.experts), -1);
  layer.forward.topk_counts = tensor(counts.data(), {s.experts});
  Status const forward = layer.run_forward();
  ASSERT_TRUE(forward.ok()) << forward.text();
  layer.backward.token_mask = layer.forward.token_mask;
  if (!splits) {
    Status const backward = layer.run_backward();
    ASSERT_TRUE(backward.ok()) << backward.text();
    return;
  }
  std::int64_t const slots = layer.desc.num_slots(), width = layer.desc.up_width() * s.intermediate;
  Floats dh(static_cast<std::size_t>(slots * width)),
      a(static_cast<std::size_t>(slots * s.intermediate)),
      dlogits(static_cast<std::size_t>(s.tokens * s.experts));
  MoeBackwardArgs input = layer.backward, weights = layer.backward;
  input.gradients = {};
  for (MoeBackwardArgs* const args : {&input, &weights}) {
    args->dh = tensor(dh.data(), {slots, width});
    args->a_scaled = tensor(a.data(), {slots, s.intermediate});
    args->dlogits_saved = tensor(dlogits.data(), {s.tokens, s.experts});
  }
  weights.dx = weights.dscores = {};
  weights.aux_dlogits = {};
  std::vector<std::byte> workspace(
      std::max(value_of(workspace_bytes(layer.context, layer.desc, Pass::backward_input)),
               value_of(workspace_bytes(layer.context, layer.desc, Pass::backward_weights))),
      std::byte{0xff});
  input.workspace = weights.workspace = {workspace.data(), workspace.size()};
  Status status = moe_backward_input(layer.context, layer.desc, input);
  ASSERT_TRUE(status.ok()) << status.text();
  status = moe_backward_weights(layer.context, layer.desc, weights);
  ASSERT_TRUE(status.ok()) << status.text();
}

TEST_F(TokenMaskTest, LeavesWhatTheOtherTokensGive) {
  std::vector<MoeDesc> descs;
  for (RouterKind const kind :
       {RouterKind::topk_softmax, RouterKind::softmax_topk, RouterKind::sigmoid_bias,
        RouterKind::group_limited, RouterKind::sqrtsoftplus, RouterKind::expert_choice}) {
    descs.push_back(desc_of(kind));
    if (kind == RouterKind::expert_choice || kind == RouterKind::group_limited) continue;
    for (Rounding const round : {Rounding::nr_f, Rounding::sr_f, Rounding::nr_s,
                                 Rounding::balance_f, Rounding::up, Rounding::down}) {
      descs.push_back(desc_of(kind, round));
    }
  }
  for (MoeDesc const& desc : descs) {
    for (bool const splits : {false, true}) {
      Layer masked(context, desc);
      MoeDesc real_desc = desc;
      real_desc.shape.tokens = std::count_if(mask.begin(), mask.end(), [](auto m) { return m; });
      Layer real(context, real_desc);
      std::mt19937 generator(2);
      Floats aux = random_floats(kTokens * desc.shape.experts, 0.1f, generator);
      Floats real_aux = real_rows(aux);
      real.x = real_rows(masked.x);
      real.d_o = real_rows(masked.d_o);
      for (auto& [to, from] : {std::pair{&real.w_router, &masked.w_router},
                               {&real.b_router, &masked.b_router},
                               {&real.w_up, &masked.w_up},
                               {&real.w_down, &masked.w_down},
                               {&real.b_up, &masked.b_up},
                               {&real.b_down, &masked.b_down}}) {
        std::copy(from->begin(), from->end(), to->begin());
      }
      real.forward.x = real.backward.x =
          tensor(real.x.data(), {real_desc.shape.tokens, desc.shape.hidden});
      real.backward.d_o = tensor(real.d_o.data(), {real_desc.shape.tokens, desc.shape.hidden});
      fill_padding(masked.x, NAN);
      fill_padding(masked.d_o, NAN);
      fill_padding(aux, NAN);
      masked.backward.aux_dlogits = tensor(aux.data(), {kTokens, desc.shape.experts});
      real.backward.aux_dlogits =
          tensor(real_aux.data(), {real_desc.shape.tokens, desc.shape.experts});
      masked.forward.token_mask = tensor(mask.data(), {kTokens});

      std::vector<std::int32_t> counts, wanted;
      run(masked, counts, splits);
      run(real, wanted, splits);
      std::string const name = "router " + std::to_string(static_cast<int>(desc.router.kind)) +
                               " round " + std::to_string(static_cast<int>(desc.router.round));
      EXPECT_EQ(counts, wanted) << name;
      EXPECT_EQ(real_rows(masked.o), real.o) << name;
      EXPECT_EQ(real_rows(masked.dx), real.dx) << name;
      EXPECT_EQ(masked.dw_up, real.dw_up) << name;
      EXPECT_EQ(masked.dw_down, real.dw_down) << name;
      EXPECT_EQ(masked.db_up, real.db_up) << name;
      EXPECT_EQ(masked.db_down, real.db_down) << name;
      EXPECT_EQ(masked.dw_router, real.dw_router) << name;
      EXPECT_EQ(masked.db_router, real.db_router) << name;
      EXPECT_GT(std::count_if(masked.dw_router.begin(), masked.dw_router.end(),
                              [](float g) { return g != 0; }),
                0);
      for (std::size_t i = 0; i < masked.o.size(); ++i) {
        if (mask[i / static_cast<std::size_t>(desc.shape.hidden)] != 0) continue;
        EXPECT_EQ(masked.o[i], 0);
        EXPECT_EQ(masked.dx[i], 0);
      }
    }
  }
}

TEST_F(TokenMaskTest, IsRefusedWhereIdsAreGiven) {
  MoeDesc replay = desc_of(RouterKind::topk_softmax);
  replay.router.replay = true;
  for (MoeDesc const& desc : {desc_of(RouterKind::given), replay}) {
    Layer layer(context, desc);
    layer.forward.token_mask = tensor(mask.data(), {kTokens});
    layer.forward.topk_ids = tensor(layer.ids.data(), {kTokens, desc.shape.top_k});
    Status const status = layer.run_forward();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(status.text()).find("an id outside [0,experts)"), std::string::npos)
        << status.text();
  }
  Layer layer(context, desc_of(RouterKind::topk_softmax));
  layer.forward.token_mask = tensor(mask.data(), {kTokens - 1});
  EXPECT_NE(std::string(layer.run_forward().text()).find("token_mask: shape [69]"),
            std::string::npos);
  std::vector<std::int32_t> const integers(kTokens, 1);
  layer.forward.token_mask = tensor(integers.data(), {kTokens});
  EXPECT_NE(std::string(layer.run_forward().text()).find("token_mask: dtype int32; uint8"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::api_test
