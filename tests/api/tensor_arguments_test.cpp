// SPDX-License-Identifier: Apache-2.0
// Every tensor of every call, optional ones too, is refused by its own name where it has no memory, or another shape,
// rank, dtype or device than the call needs; and a required one where it is missing.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>

#include "tests/api/layer.hpp"

namespace tessera::api_test {
namespace {

struct Arguments : testing::Test {
  Context context = value_of(Context::create({.num_threads = 1}));
  int walked = 0;

  /// `args` as they are must be taken; `optional` names tensors that may be absent. `visit(args, f)` calls
  /// f(name, tensor) for each.
  template <class Args, class Visit>
  void walk(Args const& args, std::function<Status(Args const&)> const& call, Visit const& visit,
            std::string const& optional) {
    Status const whole = call(args);
    ASSERT_TRUE(whole.ok()) << whole.text();
    int count = 0;
    Args copy = args;
    visit(copy, [&](char const*, auto&) { ++count; });
    for (int i = 0; i < count; ++i) {
      for (char const* fault : {"absent", "null", "first", "last", "rank", "dtype", "device"}) {
        Args changed = args;
        std::string name;
        bool applies = true;
        int at = 0;
        visit(changed, [&](char const* own, auto& tensor) {
          if (at++ != i) return;
          name = own;
          applies = tensor.present() && spoil(tensor, fault);
        });
        bool const may_be_absent = optional.find(" " + name + " ") != std::string::npos;
        if (!applies || (std::string(fault) == "absent" && may_be_absent)) continue;
        ++walked;
        Status const status = call(changed);
        EXPECT_FALSE(status.ok()) << name << ", " << fault << ": accepted";
        EXPECT_EQ(status.code(), StatusCode::invalid_argument) << status.text();
        EXPECT_NE(std::string(status.text()).find(name), std::string::npos)
            << name << ", " << fault << ": " << status.text();
      }
    }
  }

  /// Whether there is such a fault of this tensor.
  template <class AnyTensor>
  static bool spoil(AnyTensor& tensor, std::string const& fault) {
    if (fault == "absent") tensor = {};
    if (fault == "null") tensor.data = nullptr;
    if (fault == "first") ++tensor.shape[0];
    if (fault == "last") --tensor.shape[tensor.rank - 1];
    if (fault == "rank") {
      if (tensor.rank == 4) return false;
      tensor.shape[tensor.rank] = 1;
      tensor.stride[tensor.rank++] = 1;
    }
    if (fault == "dtype") {
      tensor.dtype = tensor.dtype == DType::fp32 ? DType::bf16 : DType::fp16;
    }
    if (fault == "device") tensor.device = {DeviceKind::cuda, 0};
    return true;
  }

  /// Tensors beyond those of Layer.
  struct More {
    Floats logits, aux_dlogits, dlogits, bias, scores;
    std::vector<std::int32_t> counts, offsets;
    std::vector<std::uint8_t> mask;
    explicit More(MoeDesc const& desc)
        : logits(static_cast<std::size_t>(desc.shape.tokens * desc.shape.experts)),
          aux_dlogits(logits),
          dlogits(logits),
          bias(static_cast<std::size_t>(desc.shape.experts)),
          scores(static_cast<std::size_t>(desc.num_slots())),
          counts(bias.size() * 2),
          offsets(bias.size() + 1),
          mask(static_cast<std::size_t>(desc.shape.tokens), 1) {}
  };
};

template <class Args, class F>
void each_of_forward(Args& a, F const& f) {
  f("x", a.x), f("topk_ids", a.topk_ids), f("topk_weights", a.topk_weights);
  f("w_router", a.w_router), f("b_router", a.b_router), f("selection_bias", a.selection_bias);
  f("expert_offsets", a.expert_offsets), f("row_scores", a.row_scores);
  f("w_up", a.weights.w_up), f("w_gate", a.weights.w_gate), f("w_down", a.weights.w_down);
  f("b_up", a.weights.b_up), f("b_gate", a.weights.b_gate), f("b_down", a.weights.b_down);
  f("o", a.o), f("logits", a.logits), f("expert_counts", a.expert_counts);
  f("topk_counts", a.topk_counts), f("h", a.h), f("token_mask", a.token_mask);
}

template <class Args, class F>
void each_of_backward(Args& a, F const& f) {
  f("d_o", a.d_o), f("x", a.x), f("h", a.h), f("w_router", a.w_router);
  f("aux_dlogits", a.aux_dlogits), f("w_up", a.weights.w_up), f("w_down", a.weights.w_down);
  f("dx", a.dx), f("dscores", a.dscores), f("dlogits", a.dlogits);
  f("dw_up", a.gradients.dw_up), f("dw_down", a.gradients.dw_down);
  f("db_up", a.gradients.db_up), f("db_down", a.gradients.db_down);
  f("dw_router", a.gradients.dw_router), f("db_router", a.gradients.db_router);
  f("token_mask", a.token_mask);
}

TEST_F(Arguments, OfForwardAndBackward) {
  for (RouterKind const kind : {RouterKind::given, RouterKind::sigmoid_bias}) {
    Layer layer(context, small_desc(kind));
    MoeDesc const& desc = layer.desc;
    std::int64_t const t = desc.shape.tokens, e = desc.shape.experts;
    More more(desc);
    MoeForwardArgs args = layer.forward;
    args.expert_counts = tensor(more.counts.data(), {e});
    if (layer.routed()) {
      args.topk_counts = tensor(more.counts.data() + e, {e});
      args.selection_bias = tensor(more.bias.data(), {e});
      args.logits = tensor(more.logits.data(), {t, e});
      args.token_mask = tensor(more.mask.data(), {t});
    }
    std::function<Status(MoeForwardArgs const&)> const forward = [&](MoeForwardArgs const& a) {
      return moe_forward(context, desc, a);
    };
    walk(
        args, forward, [](auto& a, auto const& f) { each_of_forward(a, f); },
        " b_router selection_bias logits expert_counts topk_counts token_mask ");

    MoeBackwardArgs back = layer.backward;
    if (layer.routed()) {
      back.token_mask = args.token_mask;
      back.aux_dlogits = tensor(more.aux_dlogits.data(), {t, e});
      back.dlogits = tensor(more.dlogits.data(), {t, e});
    }
    std::function<Status(MoeBackwardArgs const&)> const backward = [&](MoeBackwardArgs const& a) {
      return moe_backward(context, desc, a);
    };
    // dw_up and dw_down too: an absent gradient is not computed. w_router: only its gradient's users need it.
    walk(
        back, backward, [](auto& a, auto const& f) { each_of_backward(a, f); },
        " aux_dlogits dx dscores dlogits dw_up dw_down db_up db_down dw_router db_router "
        "token_mask ");
  }
  std::printf("%d faults of tensors walked\n", walked);
  EXPECT_GT(walked, 250);
}

TEST_F(Arguments, OfGroupedRowsAndSeparateWeights) {
  MoeDesc desc = small_desc();
  desc.shape.top_k = 1;
  desc.grouping = RowGrouping::offsets;
  desc.layout.orientation = WeightOrientation::separate;
  Layer layer(context, desc);
  std::int64_t const e = desc.shape.experts, d = desc.shape.hidden, n = desc.shape.intermediate;
  More more(desc);
  Floats gate(static_cast<std::size_t>(e * n * d)), b_gate(static_cast<std::size_t>(e * n));
  MoeForwardArgs args = layer.forward;
  args.topk_ids = args.topk_weights = {};
  args.expert_offsets = tensor(more.offsets.data(), {e + 1});
  args.row_scores = tensor(more.scores.data(), {desc.num_slots()});
  args.weights.w_up = tensor(layer.w_up.data(), {e, n, d});
  args.weights.b_up = tensor(layer.b_up.data(), {e, n});
  args.weights.w_gate = tensor(gate.data(), {e, n, d});
  args.weights.b_gate = tensor(b_gate.data(), {e, n});
  std::function<Status(MoeForwardArgs const&)> const forward = [&](MoeForwardArgs const& a) {
    return moe_forward(context, desc, a);
  };
  walk(
      args, forward, [](auto& a, auto const& f) { each_of_forward(a, f); },
      " row_scores logits expert_counts topk_counts token_mask ");
  EXPECT_GT(walked, 60);
}

TEST_F(Arguments, OfRouterLossAndSelectionBias) {
  MoeDesc const desc = small_desc(RouterKind::sigmoid_bias);
  std::int64_t const t = desc.shape.tokens, e = desc.shape.experts;
  More more(desc);
  // One id for each token: of two, the first alone would be a legal shape too. An offset behind the two sequences: a
  // longer shape is legal, and its value is read.
  std::vector<std::int32_t> ids(static_cast<std::size_t>(t), 1),
      starts{0, 4, static_cast<std::int32_t>(t), 0};
  Floats losses(2), sequence_loss(1);
  std::vector<std::byte> workspace(value_of(router_loss_workspace_bytes(context, desc, 2)));
  RouterLossArgs args{.logits = tensor(more.logits.data(), {t, e}),
                      .topk_counts = tensor(more.counts.data(), {e}),
                      .balance = 1,
                      .losses = tensor(losses.data(), {2}),
                      .dlogits = tensor(more.dlogits.data(), {t, e}),
                      .workspace = {workspace.data(), workspace.size()},
                      .token_mask = tensor(more.mask.data(), {t}),
                      .sequence_balance = 1,
                      .topk_ids = tensor(ids.data(), {t, 1}),
                      .sequence_offsets = tensor(starts.data(), {3}),
                      .sequence_loss = tensor(sequence_loss.data(), {1})};
  std::function<Status(RouterLossArgs const&)> const loss = [&](RouterLossArgs const& a) {
    return router_loss(context, desc, a);
  };
  walk(
      args, loss,
      [](auto& a, auto const& f) {
        f("logits", a.logits), f("topk_counts", a.topk_counts), f("losses", a.losses);
        f("dlogits", a.dlogits), f("token_mask", a.token_mask), f("topk_ids", a.topk_ids);
        f("sequence_offsets", a.sequence_offsets), f("sequence_loss", a.sequence_loss);
      },
      " losses dlogits token_mask sequence_loss ");
  SelectionBiasArgs const update{.topk_counts = tensor(more.counts.data(), {e}),
                                 .selection_bias = tensor(more.bias.data(), {e})};
  std::function<Status(SelectionBiasArgs const&)> const call = [&](SelectionBiasArgs const& a) {
    return update_selection_bias(context, a);
  };
  walk(
      update, call,
      [](auto& a, auto const& f) {
        f("topk_counts", a.topk_counts), f("selection_bias", a.selection_bias);
      },
      "");
  EXPECT_GT(walked, 55);
}

}  // namespace
}  // namespace tessera::api_test
