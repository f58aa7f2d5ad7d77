// SPDX-License-Identifier: Apache-2.0
// The activations of the fast kernels at every magnitude, compiled for the host: the special functions are as coarse as
// those of a GPU (arch.cuh). tests/cuda/activation_test.cu does the same on a GPU.
#include "cuda/epilogue/activation_math.cuh"

#include <gtest/gtest.h>

#include "tests/cpu/activation_walk.hpp"

namespace tessera::cuda {
namespace {

using namespace activation_walk;

template <ActivationKind kKind>
Answer answer_of(Activation const& act, Point const& p) {
  using Function = gemm::ActivationFunction<kKind>;
  auto const gradient = Function::backward(act, p.g, p.u, p.da);
  return {Function::forward(act, p.g, p.u), gradient.a, gradient.dg, gradient.du};
}

Answer answer(Activation const& act, Point const& p) {
  switch (act.kind) {
#define TESSERA_CASE(kind)   \
  case ActivationKind::kind: \
    return answer_of<ActivationKind::kind>(act, p);
    TESSERA_CASE(swiglu)
    TESSERA_CASE(geglu)
    TESSERA_CASE(geglu_erf)
    TESSERA_CASE(reglu)
    TESSERA_CASE(clamped_swiglu)
    TESSERA_CASE(relu)
    TESSERA_CASE(relu2)
    TESSERA_CASE(silu)
    TESSERA_CASE(gelu)
    TESSERA_CASE(gelu_erf)
#undef TESSERA_CASE
  }
  return {};
}

TEST(Activation, IsRightAtEveryMagnitude) {
  std::vector<Point> const walk = points();
  for (Activation const& act : activations()) {
    std::vector<Answer> answers;
    for (Point const& p : walk) answers.push_back(answer(act, p));
    EXPECT_EQ(first_fault(act, cuda_bounds(act.kind), walk, answers), "");
  }
}

TEST(Activation, DoesAtInfinityWhatIsDocumented) {
  for (InfiniteCase const& c : infinite_cases()) {
    EXPECT_EQ(fault_at_infinity(c, answer(c.activation, c.point)), "");
  }
}

TEST(Activation, LosesTailsAsDocumented) {
  std::vector<Point> const walk = tail_points();
  for (Tail const& tail : kCudaTails) {
    std::vector<Answer> answers;
    for (Point const& p : walk) answers.push_back(answer({.kind = tail.kind}, p));
    EXPECT_EQ(tail_fault(tail, walk, answers), "");
  }
}

}  // namespace
}  // namespace tessera::cuda
