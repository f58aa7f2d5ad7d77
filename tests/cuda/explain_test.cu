// SPDX-License-Identifier: Apache-2.0
// explain() on a GPU: every op of the two passes, and that the fast kernels serve a small layer.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cstdio>
#include <string>

#include "first_gpu.cuh"
#include "tessera/tessera.hpp"

namespace tessera::cuda_test {
namespace {

// Names of the ops that a fast kernel serves.
std::string served(Context const& context, RouterKind kind, Pass pass,
                   RowGrouping grouping = RowGrouping::slots) {
  MoeDesc desc;
  desc.shape = {.tokens = 96, .hidden = 72, .intermediate = 40, .experts = 8, .top_k = 3};
  desc.dtype = DType::bf16;
  desc.router.kind = kind;
  desc.grouping = grouping;
  if (grouping != RowGrouping::slots) desc.shape.top_k = 1;
  auto const ops = explain(context, desc, pass);
  if (!ops.ok()) return ops.status().text();
  std::string names;
  for (OpExplanation const& op : ops.value()) {
    Candidate const& fast = op.candidates.at(0);
    names += op.op + (fast.name == "cuda/fast" && fast.chosen ? " " : " (" + fast.reason + ") ");
  }
  return names;
}

bool expect(std::string const& found, std::string const& wanted) {
  if (found == wanted) return true;
  std::printf("FAILED: %s\n   not: %s\n", found.c_str(), wanted.c_str());
  return false;
}

int run(Context const& context) {
  bool ok = expect(served(context, RouterKind::topk_softmax, Pass::forward),
                   "route up_projection_fwd down_projection_fwd aggregate ");
  ok &= expect(served(context, RouterKind::topk_softmax, Pass::backward),
               "down_projection_dgrad router_dlogits router_dgrad up_projection_dgrad aggregate "
               "down_projection_wgrad up_projection_wgrad router_wgrad ");
  ok &= expect(served(context, RouterKind::given, Pass::backward),
               "down_projection_dgrad up_projection_dgrad aggregate down_projection_wgrad "
               "up_projection_wgrad ");
  ok &= expect(served(context, RouterKind::given, Pass::backward, RowGrouping::offsets),
               "down_projection_dgrad up_projection_dgrad down_projection_wgrad "
               "up_projection_wgrad ");
  std::printf(ok ? "all passed\n" : "some FAILED\n");
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::on_first_gpu(tessera::cuda_test::run); }
