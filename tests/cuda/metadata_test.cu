// SPDX-License-Identifier: Apache-2.0
// metadata on a GPU: the kernels, their plain twin and the host's own tables agree exactly.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/host/metadata.hpp"
#include "tests/cuda/device_buffer.cuh"
#include "tests/cuda/tables_cases.hpp"

namespace {

using tessera::cuda::MetadataArguments;
using tessera::cuda_test::DeviceBuffer;
using tessera::cuda_test::require;
using tessera::routing_test::agree;
using tessera::routing_test::kClearedWords;
using tessera::routing_test::kNotCleared;
using tessera::routing_test::kUnused;
using tessera::routing_test::kWords;
using tessera::routing_test::Slots;
using tessera::routing_test::Tables;
using tessera::routing_test::TablesCase;

template <class Launch>
Tables device_tables(TablesCase const& c, Slots const& slots, Launch&& launch) {
  size_t const count = slots.ids.size();
  std::vector<int32_t> const narrow(slots.ids.begin(), slots.ids.end());
  DeviceBuffer const wide_ids(slots.ids), narrow_ids(narrow), offsets(slots.token_offsets);
  DeviceBuffer const expert_offsets(4 * (size_t(c.experts) + 1)), sort(4 * count);
  DeviceBuffer const gather(4 * count), inverse(4 * count);
  DeviceBuffer const workspace(tessera::cuda::metadata_workspace_bytes(int64_t(count), c.experts));
  DeviceBuffer const words(std::vector<int32_t>(kWords, kNotCleared));
  MetadataArguments const args{
      .gmem_ids = c.int64_ids ? wide_ids.as<void>() : narrow_ids.as<void>(),
      .ids_are_int64 = c.int64_ids,
      .gmem_token_offsets = c.varies ? offsets.as<int32_t>() : nullptr,
      .slots = int64_t(count),
      .tokens = int32_t(c.tokens),
      .top_k = c.top_k,
      .experts = c.experts,
      .gmem_expert_offsets = expert_offsets.as<int32_t>(),
      .gmem_sort_permutation = sort.as<int32_t>(),
      .gmem_gather_index = gather.as<int32_t>(),
      .gmem_inverse_permutation = inverse.as<int32_t>(),
      .gmem_workspace = workspace.as<void>(),
      .cleared = {words.as<int32_t>(), kClearedWords},
      .unused = {words.as<int32_t>() + kClearedWords + 1, kUnused},
  };
  require(launch(args, cudaStream_t{}), "launch");
  require(cudaDeviceSynchronize(), "metadata");
  return {expert_offsets.values<int32_t>(), sort.values<int32_t>(), gather.values<int32_t>(),
          inverse.values<int32_t>(), words.values<int32_t>()};
}

bool run(TablesCase const& c) {
  Slots const slots = make_slots(c);
  Tables const host = host_tables(c, slots);
  bool const kernel = agree(device_tables(c, slots, tessera::cuda::launch_metadata), host);
  // The twin reads every id once per expert; beyond this it would only wait.
  bool const plain = slots.ids.size() > 100000 ||
                     agree(device_tables(c, slots, tessera::cuda::launch_metadata_plain), host);
  std::printf("%s %s%s%s\n", kernel && plain ? "passed" : "FAILED", c.name,
              kernel ? "" : " (kernel)", plain ? "" : " (plain twin)");
  return kernel && plain;
}

constexpr TablesCase kCases[] = {
    {.name = "no tokens", .tokens = 0, .top_k = 4, .experts = 8},
    {.name = "one token", .tokens = 1, .top_k = 1, .experts = 1},
    {.name = "one block", .tokens = 256, .top_k = 4, .experts = 16},
    {.name = "one token of a decoding step", .tokens = 1, .top_k = 8, .experts = 128},
    {.name = "one block, 1024 experts", .tokens = 100, .top_k = 8, .experts = 1024},
    {.name = "one block, sentinels, int64 ids",
     .tokens = 300,
     .top_k = 3,
     .experts = 33,
     .sentinels = 0.3,
     .int64_ids = true},
    {.name = "one block, only sentinels",
     .tokens = 300,
     .top_k = 2,
     .experts = 4,
     .sentinels = 1.1},
    {.name = "one block, all rows to one expert",
     .tokens = 512,
     .top_k = 2,
     .experts = 128,
     .only_expert = 127},
    {.name = "one block, varying slots",
     .tokens = 200,
     .top_k = 3,
     .experts = 40,
     .sentinels = 0.1,
     .varies = true},
    {.name = "one slot more than a block", .tokens = 1025, .top_k = 1, .experts = 7},
    {.name = "one block more than a cluster", .tokens = 8200, .top_k = 1, .experts = 7},
    {.name = "several loads of a thread",
     .tokens = 150000,
     .top_k = 8,
     .experts = 257,
     .sentinels = 0.01},
    {.name = "sentinels", .tokens = 3000, .top_k = 5, .experts = 33, .sentinels = 0.3},
    {.name = "only sentinels", .tokens = 700, .top_k = 2, .experts = 4, .sentinels = 1.1},
    {.name = "int64 ids",
     .tokens = 900,
     .top_k = 8,
     .experts = 64,
     .sentinels = 0.2,
     .int64_ids = true},
    {.name = "varying slots",
     .tokens = 2111,
     .top_k = 3,
     .experts = 40,
     .sentinels = 0.1,
     .varies = true},
    {.name = "varying slots of many tokens",
     .tokens = 40000,
     .top_k = 4,
     .experts = 128,
     .sentinels = 0.01,
     .varies = true},
    {.name = "all rows to one expert",
     .tokens = 5000,
     .top_k = 2,
     .experts = 128,
     .only_expert = 127},
    {.name = "1024 experts", .tokens = 4000, .top_k = 8, .experts = 1024},
    {.name = "7B-n256", .tokens = 24576, .top_k = 8, .experts = 128},
    {.name = "30B-n256", .tokens = 32768, .top_k = 16, .experts = 256, .sentinels = 0.01},
};

}  // namespace

int main() {
  if (!tessera::cuda_test::has_device()) return tessera::cuda_test::kSkipped;
  bool ok = true;
  for (TablesCase const& c : kCases) ok = run(c) && ok;
  std::printf(ok ? "all passed\n" : "some FAILED\n");
  return ok ? 0 : 1;
}
