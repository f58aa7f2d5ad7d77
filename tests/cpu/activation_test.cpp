// SPDX-License-Identifier: Apache-2.0
// The CPU backend's activations at every magnitude, by the loops that the layer runs.
#include "cpu/parallel/activation.hpp"

#include <gtest/gtest.h>

#include "tests/cpu/activation_walk.hpp"

namespace tessera::cpu {
namespace {

using namespace activation_walk;

MoeDesc row_of(Activation const& activation, std::size_t count) {
  MoeDesc desc;
  desc.activation = activation;
  desc.shape.intermediate = static_cast<std::int64_t>(count);
  return desc;
}

// One row whose columns are the points, for each da: the loops run over columns.
std::vector<Answer> answers(Activation const& activation, std::vector<Point> const& points) {
  std::size_t const n = points.size();
  MoeDesc const desc = row_of(activation, n);
  std::vector<float> h(2 * n), da(n), a(n), dh(2 * n), a_scaled(n), a_row(n);
  for (std::size_t i = 0; i < n; ++i) {
    h[i] = points[i].g;
    h[n + i] = points[i].u;
    da[i] = points[i].da;
  }
  float const score = 1.0f;
  float da_dot_a = 0.0f;
  activation_forward(desc, 1, h.data(), a.data());
  activation_backward(desc, ActivationBackward<float>{1, h.data(), da.data(), &score, dh.data(),
                                                      a_scaled.data(), &da_dot_a, a_row.data()});
  std::vector<Answer> result(n);
  for (std::size_t i = 0; i < n; ++i) result[i] = {a[i], a_row[i], dh[i], dh[n + i]};
  return result;
}

TEST(Activation, IsRightAtEveryMagnitude) {
  std::vector<Point> const walk = points();
  for (Activation const& act : activations()) {
    EXPECT_EQ(first_fault(act, kCpuBounds, walk, answers(act, walk)), "");
  }
}

TEST(Activation, DoesAtInfinityWhatIsDocumented) {
  for (InfiniteCase const& c : infinite_cases()) {
    EXPECT_EQ(fault_at_infinity(c, answers(c.activation, {c.point}).front()), "");
  }
}

}  // namespace
}  // namespace tessera::cpu
