// SPDX-License-Identifier: Apache-2.0
// Normalised scores p/S of tiny p: S = sum of p + 1e-20 is more than their sum, so that they add up to less than 1 and
// every dl_k has a part that the others do not take back. And of other p: there the floor is nothing at all.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/verify/support.hpp"
#include "verify/candidate.hpp"
#include "verify/names.hpp"
#include "verify/tolerance.hpp"

namespace tessera::verify {
namespace {

constexpr std::uint32_t kNan = 0x7fc00000u;

LayerCase normalized_case(RouterKind kind, std::int64_t top_k, Rounding rounding) {
  LayerCase layer_case = small_case(kind);
  layer_case.desc.shape.tokens = 40;
  layer_case.desc.shape.experts = 6;
  layer_case.desc.shape.top_k = top_k;
  layer_case.desc.router.normalize_scores = true;
  layer_case.desc.router.route_scale = 2.5f;
  layer_case.desc.router.round = rounding;
  if (rounding != Rounding::none) layer_case.desc.router.tile = 4;
  return layer_case;
}

TEST(TinyP, GradientsAreTheReferences) {
  Context const context = std::move(Context::create()).value();
  for (RouterKind const kind :
       {RouterKind::sigmoid_bias, RouterKind::group_limited, RouterKind::sqrtsoftplus}) {
    for (std::int64_t const top_k : {1, 2, 3}) {
      for (Rounding const rounding : {Rounding::none, Rounding::nr_f}) {
        LayerCase const layer_case = normalized_case(kind, top_k, rounding);
        // p about 1e-20 where it is e^l, or e^(l/2); a hundred times that; and where S is no more than the sum.
        bool const root = kind == RouterKind::sqrtsoftplus;
        for (float const shift : {root ? 86.0f : 46.0f, root ? 82.0f : 41.0f, 25.0f, 0.0f}) {
          SCOPED_TRACE(case_options(layer_case) + " shift -" + std::to_string(shift));
          LayerData data = make_data(layer_case);
          for (float& bias : data.b_router) bias -= shift;
          auto const run = run_candidate(context, data, kNan, Alignment::element);
          ASSERT_TRUE(run.ok()) << run.status().text();
          auto const inputs = reference_inputs(data, run.value().choice);
          auto const forward = reference::forward(inputs);
          auto const backward =
              reference::backward(inputs, forward, {data.d_o.begin(), data.d_o.end()});
          auto const judged =
              judge(data, inputs, forward, reference_tensors(data, forward, backward),
                    naive_samples(context, data, inputs, forward.metadata), run.value().tensors);
          for (auto const& [name, comparison] : judged) {
            EXPECT_TRUE(comparison.ok) << name << ": " << comparison.reason;
          }
        }
      }
    }
  }
}

// p/S of one p is 1, whatever the logit.
TEST(TinyP, ASingleOrdinaryScoreHasNoGradient) {
  Context const context = std::move(Context::create()).value();
  for (RouterKind const kind :
       {RouterKind::sigmoid_bias, RouterKind::group_limited, RouterKind::sqrtsoftplus}) {
    LayerData data = make_data(normalized_case(kind, 1, Rounding::none));
    for (float& bias : data.b_router) bias -= 20;
    auto const run = run_candidate(context, data, kNan, Alignment::element);
    ASSERT_TRUE(run.ok()) << run.status().text();
    auto const& dlogits = run.value().tensors.at("dlogits");
    EXPECT_TRUE(std::all_of(dlogits.begin(), dlogits.end(), [](float dl) { return dl == 0; }));
  }
}

}  // namespace
}  // namespace tessera::verify
