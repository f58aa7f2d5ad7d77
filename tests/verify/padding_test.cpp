// SPDX-License-Identifier: Apache-2.0
// Masked calls against the reference in fp64; and implementations that break the mask, each rejected.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "verify/memory.hpp"
#include "verify/runner.hpp"

namespace tessera::verify {
namespace {

constexpr RouterKind kRouters[] = {RouterKind::topk_softmax,        RouterKind::softmax_topk,
                                   RouterKind::softmax_topk_renorm, RouterKind::sigmoid_bias,
                                   RouterKind::group_limited,       RouterKind::sqrtsoftplus};

LayerCase padded_case(RouterKind router, DType dtype = DType::fp32) {
  LayerCase layer_case;
  layer_case.desc.shape = {
      .tokens = 70, .hidden = 16, .intermediate = 12, .experts = 8, .top_k = 3};
  layer_case.desc.bias = true;
  layer_case.desc.dtype = dtype;
  layer_case.desc.router.kind = router;
  layer_case.router_bias = layer_case.aux_dlogits = true;
  layer_case.padding_fraction = 0.3;
  layer_case.seed = 5;
  return layer_case;
}

Context const& one_thread() {
  static Context const context = std::move(Context::create({.num_threads = 1})).value();
  return context;
}
Context const& two_threads() {
  static Context const context = std::move(Context::create({.num_threads = 2})).value();
  return context;
}

std::string text_of(std::vector<std::string> const& failures) {
  std::string text;
  for (std::string const& failure : failures) text += failure + "\n";
  return text;
}

TEST(Padding, TheLibraryPasses) {
  for (RouterKind const router : kRouters) {
    for (DType const dtype : {DType::fp32, DType::bf16}) {
      for (double const fraction : {0.3, 1.0}) {
        for (SavePolicy const save : {SavePolicy::h, SavePolicy::x}) {
          LayerCase layer_case = padded_case(router, dtype);
          layer_case.padding_fraction = fraction;
          layer_case.desc.save = save;
          auto const result = verify_case(one_thread(), two_threads(), layer_case);
          ASSERT_TRUE(result.ok()) << result.status().text();
          EXPECT_TRUE(result.value().ok)
              << static_cast<int>(router) << ": " << text_of(result.value().failures);
          bool const all = fraction == 1.0;
          EXPECT_EQ(result.value().routed_rows == 0, all);
        }
      }
    }
  }
}

/// What is said of a run that `change` has spoilt; the run is of `data`, which `prepare` may have changed.
std::string judged(RouterKind router, std::function<void(LayerData&)> const& prepare,
                   std::function<void(LayerData const&, CandidateResult&)> const& change) {
  LayerData const data = make_data(padded_case(router));
  LayerData given = data;
  prepare(given);
  auto run = run_candidate(one_thread(), given, kPoisons[0], Alignment::element);
  if (!run.ok()) return run.status().text();
  EXPECT_TRUE(run.value().failures.empty()) << text_of(run.value().failures);
  change(data, run.value());
  CaseResult result;
  judge_run(one_thread(), data, run.value(), result);
  return text_of(result.failures);
}

std::int64_t first_token(LayerData const& data, bool padding) {
  std::int64_t t = 0;
  while (is_padding(data, t) != padding) ++t;
  return t;
}

TEST(Padding, WhatBreaksTheMaskIsRejected) {
  auto const none = [](auto&&...) {};
  for (RouterKind const router : kRouters) {
    EXPECT_EQ(judged(router, none, none), "");
    auto const expect = [&](char const* part, std::string const& text) {
      EXPECT_NE(text.find(part), std::string::npos) << part << ", not: " << text;
    };
    expect("has an expert", judged(router, [](LayerData& data) { data.token_mask.clear(); }, none));
    auto const one_too_many = [](LayerData& data) {
      data.token_mask[static_cast<std::size_t>(first_token(data, false))] = 0;
    };
    expect("id out of range", judged(router, one_too_many, none));
    auto const one_too_few = [](LayerData& data) {
      data.token_mask[static_cast<std::size_t>(first_token(data, true))] = 1;
    };
    expect("has an expert", judged(router, one_too_few, none));
    for (auto const& [name, width] :
         {std::pair{"o", 16}, {"dx", 16}, {"dscores", 3}, {"dlogits", 8}}) {
      expect((std::string(name) + " is not 0").c_str(),
             judged(router, none, [&](LayerData const& data, CandidateResult& run) {
               run.tensors.at(name)[static_cast<std::size_t>(first_token(data, true) * width)] =
                   1e-6f;
             }));
    }
    // The padding's own aux_dlogits reach the router's gradient.
    expect("dw_router", judged(router, none, [](LayerData const& data, CandidateResult& run) {
             std::int64_t const t = first_token(data, true);
             for (std::size_t i = 0; i < run.tensors.at("dw_router").size(); ++i) {
               run.tensors.at("dw_router")[i] +=
                   data.aux_dlogits[static_cast<std::size_t>(t) * 8 + i / 16] *
                   data.x[static_cast<std::size_t>(t) * 16 + i % 16];
             }
           }));
  }
}

TEST(Padding, IsForRoutersThatTakeTopK) {
  LayerCase rounded = padded_case(RouterKind::topk_softmax);
  rounded.desc.router.round = Rounding::nr_f;
  rounded.desc.router.tile = 4;
  LayerCase given = padded_case(RouterKind::given);
  given.router_bias = given.aux_dlogits = false;
  for (LayerCase const& layer_case : {rounded, given, padded_case(RouterKind::expert_choice)}) {
    auto const result = verify_case(one_thread(), two_threads(), layer_case);
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(std::string(result.status().text()).rfind("padding: ", 0), 0u)
        << result.status().text();
  }
}

}  // namespace
}  // namespace tessera::verify
