// SPDX-License-Identifier: Apache-2.0
// router_dlogits after token rounding on a GPU: one kernel, and the plain twins one after the other, agree bit for bit.
// What is right is `tessera verify`'s job. Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/host/router_dlogits_rounded.hpp"
#include "tests/cuda/device_buffer.cuh"
#include "tests/cuda/rounded_dlogits_cases.hpp"

namespace tessera::routing_test {
namespace {

using cuda_test::DeviceBuffer;
using cuda_test::require;
using Bytes = std::vector<unsigned char>;

struct Result {
  Bytes dscores, dlogits, rounded, copy;
  bool operator==(Result const&) const = default;
};

cudaError_t launch_plain(cuda::RoundedGradientArguments const& args, cudaStream_t stream) {
  cudaError_t const error = cuda::launch_dscores_plain(args.dscores, stream);
  return error == cudaSuccess ? cuda::launch_router_dlogits_rounded_plain(args.rounded, stream)
                              : error;
}

template <class Launch>
Result run(RoundedCase const& c, RoundedData const& data, Launch* launch) {
  auto const pairs = static_cast<size_t>(c.tokens * c.experts);
  auto const members = static_cast<size_t>(c.tokens * c.top_k);
  DeviceBuffer const offsets(data.offsets), ids(data.ids), rows(data.rows),
      unrounded(data.unrounded), scores(data.scores), logits(data.logits), aux(data.aux),
      partials(data.partials), mask(data.mask);
  DeviceBuffer const dscores(4 * data.ids.size()), dlogits(4 * pairs), rounded(2 * pairs),
      copy(4 * pairs), member_scores(4 * members), member_dscores(4 * members),
      added(4 * data.ids.size());
  cuda::RoundedGradientArguments args{};
  args.dscores.gmem_ds_partials = partials.as<float>();
  args.dscores.groups = kGroups;
  args.dscores.gmem_inverse_permutation = rows.as<int32_t>();
  args.dscores.gmem_dscores = dscores.as<float>();
  args.dscores.slots = static_cast<int64_t>(data.ids.size());
  args.dscores.experts = static_cast<int32_t>(c.experts);
  args.rounded.gmem_unrounded_ids = unrounded.as<int32_t>();
  args.rounded.gmem_member_scores = member_scores.as<float>();
  args.rounded.gmem_member_dscores = member_dscores.as<float>();
  args.rounded.gmem_added_ids = added.as<int32_t>();
  cuda::RouterDlogitsArguments& p = args.rounded.dlogits;
  p.gmem_dscores = dscores.as<float>();
  p.gmem_ids = ids.as<int32_t>();
  p.gmem_token_offsets = offsets.as<int32_t>();
  p.gmem_scores = scores.as<float>();
  p.gmem_logits = logits.as<float>();
  p.gmem_aux_dlogits = c.aux ? aux.as<float>() : nullptr;
  p.aux_pitch = c.experts;
  p.gmem_dlogits = dlogits.as<float>();
  p.gmem_rounded = rounded.as<void>();
  p.gmem_copy = copy.as<float>();
  p.copy_pitch = c.experts;
  p.tokens = c.tokens;
  p.experts = static_cast<int32_t>(c.experts);
  p.top_k = static_cast<int32_t>(c.top_k);
  p.kind = c.kind;
  p.route_scale = kRouteScale;
  p.normalize_scores = c.normalize;
  p.gmem_token_mask = mask.as<uint8_t>();
  require(launch(args, cudaStream_t{}), "launch");
  require(cudaDeviceSynchronize(), "router_dlogits");
  return {dscores.bytes(), dlogits.bytes(), rounded.bytes(), copy.bytes()};
}

bool passes(RoundedCase const& c) {
  RoundedData const data = make_rounded_data(c);
  Result const plain = run(c, data, &launch_plain);
  bool const same = run(c, data, &cuda::launch_router_dlogits_rounded) == plain;
  std::printf("%s %s\n", same ? "passed" : "FAILED", c.name);
  return same;
}

}  // namespace
}  // namespace tessera::routing_test

int main() {
  using namespace tessera::routing_test;
  if (!tessera::cuda_test::has_device()) return tessera::cuda_test::kSkipped;
  std::vector<RoundedCase> cases = rounded_cases();
  cases.push_back({.name = "7B", .tokens = 3000, .experts = 128, .top_k = 8});
  cases.push_back({.name = "1024 experts", .tokens = 301, .experts = 1024, .top_k = 16});
  int failures = 0;
  for (RoundedCase const& c : cases) failures += passes(c) ? 0 : 1;
  return failures == 0 ? 0 : 1;
}
