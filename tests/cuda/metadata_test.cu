// SPDX-License-Identifier: Apache-2.0
// metadata on a GPU: the kernels, their plain twin and the host's own tables agree exactly.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cuda/host/metadata.hpp"
#include "tests/cuda/device_buffer.cuh"

namespace {

using tessera::cuda::MetadataArguments;
using tessera::cuda_test::DeviceBuffer;
using tessera::cuda_test::require;

struct Case {
  char const* name;
  int64_t tokens;
  int32_t top_k, experts;
  double sentinels = 0;
  bool varies = false;  // 0 .. 2K slots per token
  bool int64_ids = false;
  int32_t only_expert = -1;  // all slots go there
};

struct Tables {
  std::vector<int32_t> expert_offsets, sort_permutation, gather_index, inverse_permutation, words;
};

// The words of the kernels behind, which read none where there is no slot, and one that is none of them.
constexpr int32_t kClearedWords = 12, kNotCleared = 77;

struct Slots {
  std::vector<int64_t> ids;
  std::vector<int32_t> token_offsets;
};

Slots make_slots(Case const& c) {
  std::mt19937_64 random(99);
  Slots slots;
  slots.token_offsets.push_back(0);
  for (int64_t t = 0; t < c.tokens; ++t) {
    auto const count = c.varies ? int32_t(random() % uint64_t(2 * c.top_k + 1)) : c.top_k;
    slots.token_offsets.push_back(slots.token_offsets.back() + count);
    for (int32_t k = 0; k < count; ++k) {
      bool const sentinel = double(random() % 10000) < 10000 * c.sentinels;
      int64_t const outside[] = {-1, c.experts, int64_t{1} << 31, -(int64_t{1} << 31)};
      int64_t id = c.only_expert >= 0 ? c.only_expert : int64_t(random() % uint64_t(c.experts));
      if (sentinel) id = outside[random() % (c.int64_ids ? 4 : 2)];
      slots.ids.push_back(id);
    }
  }
  return slots;
}

// The definition, walked slot by slot.
Tables host_tables(Case const& c, Slots const& slots) {
  size_t const count = slots.ids.size();
  Tables out;
  out.expert_offsets.assign(size_t(c.experts) + 1, 0);
  auto const valid = [&](int64_t id) { return id >= 0 && id < c.experts; };
  for (int64_t id : slots.ids) {
    if (valid(id)) ++out.expert_offsets[size_t(id) + 1];
  }
  for (int32_t e = 0; e < c.experts; ++e) {
    out.expert_offsets[size_t(e) + 1] += out.expert_offsets[size_t(e)];
  }
  out.words.assign(kClearedWords + 1, 0);
  out.words.back() = kNotCleared;
  out.sort_permutation.assign(count, -1);
  out.gather_index.assign(count, 0);
  out.inverse_permutation.assign(count, -1);
  std::vector<int32_t> next(out.expert_offsets.begin(), out.expert_offsets.end() - 1);
  int32_t token = 0;
  for (size_t j = 0; j < count; ++j) {
    while (slots.token_offsets[size_t(token) + 1] <= int64_t(j)) ++token;
    if (!valid(slots.ids[j])) continue;
    auto const row = size_t(next[size_t(slots.ids[j])]++);
    out.inverse_permutation[j] = int32_t(row);
    out.sort_permutation[row] = int32_t(j);
    out.gather_index[row] = token;
  }
  return out;
}

template <class Launch>
Tables device_tables(Case const& c, Slots const& slots, Launch&& launch) {
  size_t const count = slots.ids.size();
  std::vector<int32_t> const narrow(slots.ids.begin(), slots.ids.end());
  DeviceBuffer const wide_ids(slots.ids), narrow_ids(narrow), offsets(slots.token_offsets);
  DeviceBuffer const expert_offsets(4 * (size_t(c.experts) + 1)), sort(4 * count);
  DeviceBuffer const gather(4 * count), inverse(4 * count);
  DeviceBuffer const workspace(tessera::cuda::metadata_workspace_bytes(int64_t(count), c.experts));
  DeviceBuffer const words(std::vector<int32_t>(kClearedWords + 1, kNotCleared));
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
  };
  require(launch(args, cudaStream_t{}), "launch");
  require(cudaDeviceSynchronize(), "metadata");
  return {expert_offsets.values<int32_t>(), sort.values<int32_t>(), gather.values<int32_t>(),
          inverse.values<int32_t>(), words.values<int32_t>()};
}

// Prints where tables differ first.
bool agree(Tables const& a, Tables const& b) {
  auto const same = [](char const* name, std::vector<int32_t> const& x,
                       std::vector<int32_t> const& y) {
    for (size_t i = 0; i < x.size(); ++i) {
      if (x[i] == y[i]) continue;
      std::printf("%s[%zu] = %d, not %d\n", name, i, x[i], y[i]);
      return false;
    }
    return true;
  };
  return same("expert_offsets", a.expert_offsets, b.expert_offsets) &&
         same("sort_permutation", a.sort_permutation, b.sort_permutation) &&
         same("gather_index", a.gather_index, b.gather_index) &&
         same("inverse_permutation", a.inverse_permutation, b.inverse_permutation) &&
         (a.sort_permutation.empty() || same("words", a.words, b.words));
}

bool run(Case const& c) {
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

constexpr Case kCases[] = {
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
  for (Case const& c : kCases) ok = run(c) && ok;
  std::printf(ok ? "all passed\n" : "some FAILED\n");
  return ok ? 0 : 1;
}
