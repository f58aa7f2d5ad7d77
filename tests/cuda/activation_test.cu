// SPDX-License-Identifier: Apache-2.0
// The activations of the fast kernels and of their plain twins on a GPU, at every magnitude, and the tails that
// tanh.approx loses. tests/emulator/activation_test.cpp does the same without a GPU.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "core/activation_math.hpp"
#include "cuda/epilogue/activation_math.cuh"
#include "device_buffer.cuh"
#include "tests/cpu/activation_walk.hpp"

namespace tessera::cuda_test {
namespace {

using namespace activation_walk;

struct DeviceAnswer {
  float forward, a, dg, du;
};

template <ActivationKind kKind>
__global__ void fast_answers(Activation const act, Point const* gmem_points, int count,
                             DeviceAnswer* gmem_answers) {
  using Function = cuda::gemm::ActivationFunction<kKind>;
  int const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  Point const p = gmem_points[i];
  auto const gradient = Function::backward(act, p.g, p.u, p.da);
  gmem_answers[i] = {Function::forward(act, p.g, p.u), gradient.a, gradient.dg, gradient.du};
}

template <class Act>
__global__ void plain_answers(Act const act, Point const* gmem_points, int count,
                              DeviceAnswer* gmem_answers) {
  int const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  Point const p = gmem_points[i];
  auto const gradient = act.backward(p.g, p.u, p.da);
  gmem_answers[i] = {act.forward(p.g, p.u), gradient.a, gradient.dg, gradient.du};
}

// Calls visit(kind as a type) for the kind.
template <int kKind = 0, class Visit>
void visit_kind(ActivationKind kind, Visit&& visit) {
  if constexpr (kKind <= static_cast<int>(ActivationKind::gelu_erf)) {
    if (static_cast<int>(kind) != kKind) return visit_kind<kKind + 1>(kind, visit);
    visit(std::integral_constant<ActivationKind, static_cast<ActivationKind>(kKind)>{});
  }
}

std::vector<Answer> answers(bool fast, Activation const& act, std::vector<Point> const& points) {
  int const count = static_cast<int>(points.size());
  DeviceBuffer const asked(points), found(points.size() * sizeof(DeviceAnswer));
  int const threads = 256, ctas = (count + threads - 1) / threads;
  if (fast) {
    visit_kind(act.kind, [&](auto kind) {
      fast_answers<decltype(kind)::value>
          <<<ctas, threads>>>(act, asked.as<Point>(), count, found.as<DeviceAnswer>());
    });
  } else {
    core::visit_activation(act, [&](auto function) {
      plain_answers<<<ctas, threads>>>(function, asked.as<Point>(), count,
                                       found.as<DeviceAnswer>());
    });
  }
  require(cudaGetLastError(), "launch");
  std::vector<Answer> result;
  for (DeviceAnswer const& a : found.values<DeviceAnswer>()) {
    result.push_back({a.forward, a.a, a.dg, a.du});
  }
  return result;
}

bool is_empty(std::string const& fault, bool fast) {
  if (!fault.empty()) std::printf("FAILED, %s: %s\n", fast ? "fast" : "plain", fault.c_str());
  return fault.empty();
}

int run() {
  bool ok = true;
  std::vector<Point> const walk = points(), tails = tail_points();
  for (bool const fast : {true, false}) {
    for (Activation const& act : activations()) {
      Bounds const& bounds = fast ? cuda_bounds(act.kind) : kCpuBounds;
      ok &= is_empty(first_fault(act, bounds, walk, answers(fast, act, walk)), fast);
    }
    for (InfiniteCase const& c : infinite_cases()) {
      ok &= is_empty(fault_at_infinity(c, answers(fast, c.activation, {c.point}).front()), fast);
    }
  }
  for (Tail const& tail : kCudaTails) {
    ok &= is_empty(tail_fault(tail, tails, answers(true, {.kind = tail.kind}, tails)), true);
  }
  std::printf("%zu points, %zu activations: %s\n", walk.size(), activations().size(),
              ok ? "passed" : "FAILED");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() {
  using namespace tessera::cuda_test;
  return has_device() ? run() : kSkipped;
}
