// SPDX-License-Identifier: Apache-2.0
// Every gradient of the reference against central differences of L = <o, dO>, in fp64.
#include <gtest/gtest.h>

#include <cmath>

#include "cpu/reference/activation.hpp"
#include "tests/verify/support.hpp"
#include "verify/names.hpp"

namespace tessera::verify {
namespace {

constexpr double kStep = 1e-5;

double loss(reference::Inputs const& inputs, reference::Values const& d_o) {
  auto const o = reference::forward(inputs).o;
  return reference::dot(o.data(), d_o.data(), std::ssize(o));
}

/// Compares up to 40 elements of `gradient` with differences along `values`, a member of `inputs`.
void expect_gradient(reference::Inputs& inputs, reference::Values const& d_o,
                     reference::Values& values, reference::Values const& gradient,
                     char const* name) {
  ASSERT_EQ(values.size(), gradient.size()) << name;
  std::size_t const stride = values.size() / 40 + 1;
  for (std::size_t i = 0; i < values.size(); i += stride) {
    double const value = values[i];
    values[i] = value + kStep;
    double const above = loss(inputs, d_o);
    values[i] = value - kStep;
    double const below = loss(inputs, d_o);
    values[i] = value;
    double const difference = (above - below) / (2 * kStep);
    EXPECT_NEAR(gradient[i], difference, 2e-7 * (1 + std::abs(difference)))
        << name << '[' << i << ']';
  }
}

/// Whether some h is so near a kink that a difference would straddle it.
bool near_kink(MoeDesc const& desc, reference::Forward const& f) {
  for (std::size_t i = 0; i < f.h_up.size(); ++i) {
    double const gate = f.h_gate.empty() ? 0 : f.h_gate[i];
    if (reference::distance_to_kink(desc.activation, gate, f.h_up[i]) < 1e-3) return true;
  }
  return false;
}

void expect_all_gradients(LayerCase layer_case) {
  for (;; ++layer_case.seed) {
    LayerData const data = make_data(layer_case);
    reference::Inputs inputs = reference_inputs(data, exact_choice(data));
    reference::Values const d_o(data.d_o.begin(), data.d_o.end());
    auto const forward = reference::forward(inputs);
    if (near_kink(data.desc, forward)) continue;
    auto const b = reference::backward(inputs, forward, d_o);
    auto& w = inputs.weights;
    expect_gradient(inputs, d_o, inputs.x, b.dx, "dx");
    expect_gradient(inputs, d_o, w.w_up, b.gradients.w_up, "dw_up");
    expect_gradient(inputs, d_o, w.w_gate, b.gradients.w_gate, "dw_gate");
    expect_gradient(inputs, d_o, w.w_down, b.gradients.w_down, "dw_down");
    expect_gradient(inputs, d_o, w.b_up, b.gradients.b_up, "db_up");
    expect_gradient(inputs, d_o, w.b_gate, b.gradients.b_gate, "db_gate");
    expect_gradient(inputs, d_o, w.b_down, b.gradients.b_down, "db_down");
    if (data.desc.router.kind == RouterKind::given) {
      expect_gradient(inputs, d_o, inputs.scores, b.dscores, "dscores");
    } else {
      expect_gradient(inputs, d_o, inputs.w_router, b.dw_router, "dw_router");
      expect_gradient(inputs, d_o, inputs.b_router, b.db_router, "db_router");
    }
    return;
  }
}

TEST(FiniteDifference, EveryActivation) {
  for (auto const& activation : kActivationNames) {
    SCOPED_TRACE(activation.name);
    LayerCase layer_case = small_case();
    layer_case.desc.activation.kind = activation.value;
    if (activation.value == ActivationKind::clamped_swiglu) {
      layer_case.desc.activation.limit = 1;  // so that both sides of the clamp occur
    }
    expect_all_gradients(layer_case);
  }
}

TEST(FiniteDifference, EveryLayout) {
  for (auto const& layout : kLayoutNames) {
    SCOPED_TRACE(layout.name);
    LayerCase layer_case = small_case();
    layer_case.desc.layout = layout.value;
    if (layout.value.order == GateUpOrder::blocked) layer_case.desc.layout.block = 3;
    expect_all_gradients(layer_case);
  }
}

TEST(FiniteDifference, EveryRouter) {
  for (auto const& [name, router] : kRouterNames) {
    if (router == RouterKind::given) continue;
    for (bool const normalize : {false, true}) {
      SCOPED_TRACE(name);
      LayerCase layer_case = small_case(router);
      layer_case.desc.router.route_scale = 1.5f;
      layer_case.desc.router.normalize_scores = normalize;
      expect_all_gradients(layer_case);
    }
  }
}

TEST(FiniteDifference, EveryRoundingOfEveryRouter) {
  for (auto const& [router_name, router] : kRouterNames) {
    if (router == RouterKind::given || router == RouterKind::expert_choice) continue;
    for (auto const& [name, rounding] : kRoundingNames) {
      SCOPED_TRACE(std::string(router_name) + " " + name);
      LayerCase layer_case = small_case(router);
      layer_case.desc.router.round = rounding;
      layer_case.desc.router.tile = 4;
      layer_case.desc.router.route_scale = 1.5f;
      layer_case.desc.router.normalize_scores = true;
      expect_all_gradients(layer_case);
    }
  }
}

TEST(FiniteDifference, ReplayedIdsOfEveryRouter) {
  for (auto const& [name, router] : kRouterNames) {
    if (router == RouterKind::given) continue;
    SCOPED_TRACE(name);
    LayerCase layer_case = small_case(router);
    layer_case.desc.router.replay = true;
    layer_case.desc.router.normalize_scores = true;
    layer_case.sentinel_fraction = 0.2;
    layer_case.repeat_experts = true;
    expect_all_gradients(layer_case);
    layer_case.desc.shape.variable_experts = true;
    expect_all_gradients(layer_case);
  }
}

TEST(FiniteDifference, SentinelsRepeatsAndVariableCounts) {
  LayerCase layer_case = small_case();
  layer_case.sentinel_fraction = 0.3;
  layer_case.repeat_experts = true;
  expect_all_gradients(layer_case);
  layer_case.repeat_experts = false;
  layer_case.desc.shape.variable_experts = true;
  expect_all_gradients(layer_case);
}

}  // namespace
}  // namespace tessera::verify
