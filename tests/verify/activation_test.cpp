// SPDX-License-Identifier: Apache-2.0
// The reference's activations at every magnitude.
#include "cpu/reference/activation.hpp"

#include <gtest/gtest.h>

#include "tests/cpu/activation_walk.hpp"

namespace tessera::reference {
namespace {

using namespace activation_walk;

Answer answer(Activation const& act, Point const& p) {
  double const a = act.gated() ? activate(act, p.g, p.u) : activate(act, 0, p.g);
  auto const gradient = act.gated() ? activation_gradient(act, p.g, p.u, p.da)
                                    : activation_gradient(act, 0, p.g, p.da);
  return {a, a, act.gated() ? gradient.gate : gradient.up, gradient.up};
}

TEST(ReferenceActivation, IsRightAtEveryMagnitude) {
  std::vector<Point> const walk = points();
  for (Activation const& act : activations()) {
    std::vector<Answer> answers;
    for (Point const& p : walk) answers.push_back(answer(act, p));
    EXPECT_EQ(first_fault(act, kReferenceBounds, walk, answers), "");
  }
}

TEST(ReferenceActivation, DoesAtInfinityWhatIsDocumented) {
  for (InfiniteCase const& c : infinite_cases()) {
    EXPECT_EQ(fault_at_infinity(c, answer(c.activation, c.point)), "");
  }
}

}  // namespace
}  // namespace tessera::reference
