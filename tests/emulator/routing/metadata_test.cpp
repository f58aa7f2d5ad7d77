// SPDX-License-Identifier: Apache-2.0
// metadata, from the source that GPUs get, makes the tables of the definition: one block or several clusters of them,
// slots of a fixed number per token or of any, sentinels, all rows with one expert.
#include "cuda/kernels/metadata.cuh"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/cuda/tables_cases.hpp"
#include "tests/emulator/emulator.hpp"

namespace tessera::routing_test {
namespace {

std::string make_tables(TablesCase const& c, Slots const& slots, emulator::Schedule const& schedule,
                        Tables& out) {
  constexpr std::int32_t kUntouched = -9;
  emulator::set_compiled_cluster(reinterpret_cast<void const*>(cuda::metadata_scatter),
                                 cuda::MetadataConfig::kCluster);
  std::size_t const count = slots.ids.size();
  std::vector<std::int32_t> const narrow(slots.ids.begin(), slots.ids.end());
  out.expert_offsets.assign(static_cast<std::size_t>(c.experts) + 1, kUntouched);
  out.sort_permutation.assign(count, kUntouched);
  out.gather_index.assign(count, kUntouched);
  out.inverse_permutation.assign(count, kUntouched);
  out.words.assign(kWords, kNotCleared);
  auto const all = static_cast<std::int64_t>(count);
  std::vector<std::uint64_t> workspace(cuda::metadata_workspace_bytes(all, c.experts) / 8 + 1,
                                       ~std::uint64_t{0});
  cuda::MetadataArguments const args{
      .gmem_ids = c.int64_ids ? static_cast<void const*>(slots.ids.data()) : narrow.data(),
      .ids_are_int64 = c.int64_ids,
      .gmem_token_offsets = c.varies ? slots.token_offsets.data() : nullptr,
      .slots = all,
      .tokens = static_cast<std::int32_t>(c.tokens),
      .top_k = c.top_k,
      .experts = c.experts,
      .gmem_expert_offsets = out.expert_offsets.data(),
      .gmem_sort_permutation = out.sort_permutation.data(),
      .gmem_gather_index = out.gather_index.data(),
      .gmem_inverse_permutation = out.inverse_permutation.data(),
      .gmem_workspace = workspace.data(),
      .cleared = {out.words.data(), kClearedWords},
      .unused = {out.words.data() + kClearedWords + 1, kUnused}};
  CUstream_st stream;
  if (cuda::launch_metadata_config<cuda::MetadataConfig>(args, &stream) != cudaSuccess) {
    return "launch";
  }
  return emulator::run(schedule);
}

void expect_right(std::vector<TablesCase> const& cases) {
  std::size_t number = 0;
  for (TablesCase const& c : cases) {
    SCOPED_TRACE(c.name);
    Slots const slots = make_slots(c);
    Tables emulated;
    emulator::Schedule const& schedule = emulator::kSchedules[number++ % 4];
    ASSERT_EQ(make_tables(c, slots, schedule, emulated), "");
    EXPECT_TRUE(agree(emulated, host_tables(c, slots)));
  }
}

TEST(MetadataByDefinition, OneBlock) {
  expect_right({
      {.name = "no tokens", .tokens = 0, .top_k = 4, .experts = 8},
      {.name = "one token", .tokens = 1, .top_k = 1, .experts = 1},
      {.name = "a full block", .tokens = 256, .top_k = 4, .experts = 16},
      {.name = "1024 experts", .tokens = 100, .top_k = 8, .experts = 1024},
      {.name = "sentinels, int64 ids",
       .tokens = 300,
       .top_k = 3,
       .experts = 33,
       .sentinels = 0.3,
       .int64_ids = true},
      {.name = "only sentinels", .tokens = 300, .top_k = 2, .experts = 4, .sentinels = 1.1},
      {.name = "all to one expert", .tokens = 512, .top_k = 2, .experts = 128, .only_expert = 127},
      {.name = "varying slots",
       .tokens = 200,
       .top_k = 3,
       .experts = 40,
       .sentinels = 0.1,
       .varies = true},
  });
}

TEST(MetadataByDefinition, SeveralBlocks) {
  expect_right({
      {.name = "one slot more than a block", .tokens = 1025, .top_k = 1, .experts = 7},
      {.name = "sentinels", .tokens = 700, .top_k = 5, .experts = 33, .sentinels = 0.3},
      {.name = "only sentinels", .tokens = 700, .top_k = 2, .experts = 4, .sentinels = 1.1},
      {.name = "int64 ids",
       .tokens = 300,
       .top_k = 8,
       .experts = 64,
       .sentinels = 0.2,
       .int64_ids = true},
      {.name = "all to one expert", .tokens = 1500, .top_k = 2, .experts = 128, .only_expert = 127},
      {.name = "1024 experts", .tokens = 350, .top_k = 8, .experts = 1024},
      {.name = "one block more than a cluster", .tokens = 8200, .top_k = 1, .experts = 7},
  });
}

// The token of a slot is searched for between the tokens of its block's ends.
TEST(MetadataByDefinition, VaryingSlots) {
  expect_right({
      {.name = "sentinels",
       .tokens = 711,
       .top_k = 3,
       .experts = 40,
       .sentinels = 0.1,
       .varies = true},
      {.name = "all to one expert",
       .tokens = 1100,
       .top_k = 1,
       .experts = 9,
       .varies = true,
       .only_expert = 3},
      {.name = "many slots of a token",
       .tokens = 9,
       .top_k = 700,
       .experts = 1000,
       .sentinels = 0.01,
       .varies = true},
      {.name = "two clusters", .tokens = 3000, .top_k = 3, .experts = 16, .varies = true},
  });
}

}  // namespace
}  // namespace tessera::routing_test
