// SPDX-License-Identifier: Apache-2.0
// router_dlogits after token rounding on a GPU: one kernel, and the plain twins one after the other, agree bit for bit;
// dlogits by row are those of their tokens, or 0 where these are listed; router_dgrad of the list writes their rows of
// dx, as its plain twin has them to a rounding, and no other. What is right is `tessera verify`'s job. Exit 0 passed, 1
// failed, 77 skipped (no GPU).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
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

// A call with rows makes this beside dlogits.
struct Rows {
  explicit Rows(RoundedCase const& c, RoundedData const& data)
      : row_dlogits(4 * data.ids.size()),
        tokens(4 * static_cast<size_t>(c.tokens)),
        is_listed(static_cast<size_t>(c.tokens)),
        words(std::vector<int32_t>(4, 0)) {}

  void give_to(cuda::RoundedGradientArguments& args) const {
    args.rounded.dlogits.gmem_row_dlogits = row_dlogits.as<float>();
    args.rounded.dlogits.gmem_inverse_permutation = args.dscores.gmem_inverse_permutation;
    args.listed = {.gmem_tokens = tokens.as<int32_t>(),
                   .gmem_offsets = words.as<int32_t>(),
                   .gmem_is_listed = is_listed.as<uint8_t>(),
                   .gmem_counter = words.as<uint64_t>() + 1};
  }
  bool right(RoundedCase const& c, RoundedData const& data, std::vector<float> const& dl) const {
    std::vector<bool> const wanted = listed_tokens(c, data);
    auto const flags = is_listed.values<uint8_t>();
    auto const by_row = row_dlogits.values<float>();
    auto list = tokens.values<int32_t>();
    std::vector<int32_t> listed;
    for (int64_t t = 0; t < c.tokens; ++t) {
      if (wanted[t]) listed.push_back(static_cast<int32_t>(t));
      if (flags[t] != (wanted[t] ? 1 : 0)) return false;
      for (int32_t i = data.offsets[t]; i < data.offsets[t + 1]; ++i) {
        float const value = wanted[t] ? 0.0f : dl[t * c.experts + data.ids[i]];
        if (by_row[data.rows[i]] != value) return false;
      }
    }
    auto const held = words.values<int32_t>();
    auto const count = static_cast<int32_t>(listed.size());
    if (held != std::vector<int32_t>{0, c.tokens > 0 ? count : 0, 0, 0}) return false;
    std::sort(list.begin(), list.begin() + count);
    return std::equal(listed.begin(), listed.end(), list.begin());
  }
  // Multiplies the rows of dl that are listed.
  bool right_dgrad(RoundedCase const& c, DeviceBuffer const& rounded) const {
    constexpr int64_t kHidden = 328, kPitch = 336;
    constexpr int kSms = 7;
    if (c.experts % 8 != 0 || c.tokens == 0) return true;
    std::vector<__nv_bfloat16> w;
    for (int64_t i = 0; i < c.experts * kHidden; ++i) {
      w.push_back(__float2bfloat16_rn(static_cast<float>((i * 2654435761u >> 8) % 255) / 128 - 1));
    }
    DeviceBuffer const device_w(w), counter(std::vector<int32_t>{0});
    DeviceBuffer dx(2 * static_cast<size_t>(c.tokens * kPitch));
    cuda::RouterDgradArguments args{.gmem_dlogits = rounded.as<void>(),
                                    .w_router = {device_w.as<void>(), c.experts, kHidden},
                                    .gmem_dx = dx.as<void>(),
                                    .dx_pitch = kPitch,
                                    .tokens = c.tokens,
                                    .hidden = kHidden,
                                    .experts = static_cast<int32_t>(c.experts),
                                    .gmem_tile_counter = counter.as<int32_t>(),
                                    .gmem_tokens = tokens.as<int32_t>(),
                                    .gmem_offsets = words.as<int32_t>()};
    auto const made = [&](auto&& launch) {
      dx.poison();
      require(launch(), "router_dgrad");
      require(cudaDeviceSynchronize(), "router_dgrad");
      return dx.values<uint16_t>();
    };
    auto const plain = made([&] { return cuda::launch_router_dgrad_plain(args, nullptr); });
    auto const fast = made([&] { return cuda::launch_router_dgrad(args, kSms, nullptr); });
    auto const again = made([&] { return cuda::launch_router_dgrad(args, kSms, nullptr); });
    auto const flags = is_listed.values<uint8_t>();
    auto const value = [](uint16_t bits) {
      return static_cast<double>(__bfloat162float(__ushort_as_bfloat16(bits)));
    };
    for (int64_t i = 0; i < c.tokens * kPitch; ++i) {
      bool const stays = i % kPitch >= kHidden || flags[i / kPitch] == 0;
      if (stays ? plain[i] != 0xffff || fast[i] != 0xffff
                : !(std::abs(value(fast[i]) - value(plain[i])) <=
                    std::abs(value(plain[i])) * 0x1p-7 + 1e-4)) {
        std::printf("  dx of token %lld\n", static_cast<long long>(i / kPitch));
        return false;
      }
    }
    return fast == again;
  }

  DeviceBuffer row_dlogits, tokens, is_listed, words;
};

cudaError_t launch_plain(cuda::RoundedGradientArguments const& args, cudaStream_t stream) {
  cudaError_t const error = cuda::launch_dscores_plain(args.dscores, stream);
  return error == cudaSuccess ? cuda::launch_router_dlogits_rounded_plain(args.rounded, stream)
                              : error;
}

template <class Launch>
Result run(RoundedCase const& c, RoundedData const& data, Launch* launch, bool& right) {
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
  Rows const of_rows(c, data);
  bool const by_row = c.rows && launch != &launch_plain;
  if (by_row) of_rows.give_to(args);
  for (int i = 0; i < (by_row ? 2 : 1);
       ++i) {  // the second finds the counters as the first left them
    require(launch(args, cudaStream_t{}), "launch");
    require(cudaDeviceSynchronize(), "router_dlogits");
    right = right && (!by_row || of_rows.right(c, data, copy.values<float>()));
  }
  if (by_row) right = right && of_rows.right_dgrad(c, rounded);
  return {dscores.bytes(), dlogits.bytes(), rounded.bytes(), copy.bytes()};
}

bool passes(RoundedCase const& c) {
  RoundedData const data = make_rounded_data(c);
  bool right = true;
  Result const plain = run(c, data, &launch_plain, right);
  bool const same = run(c, data, &cuda::launch_router_dlogits_rounded, right) == plain;
  std::printf("%s %s%s%s\n", same && right ? "passed" : "FAILED", c.name, c.rows ? ", by row" : "",
              right ? "" : ": rows, list or dx");
  return same && right;
}

}  // namespace
}  // namespace tessera::routing_test

int main() {
  using namespace tessera::routing_test;
  if (!tessera::cuda_test::has_device()) return tessera::cuda_test::kSkipped;
  std::vector<RoundedCase> cases = rounded_cases();
  cases.push_back({.name = "7B", .tokens = 3000, .experts = 128, .top_k = 8});
  cases.push_back({.name = "1024 experts", .tokens = 301, .experts = 1024, .top_k = 16});
  cases.push_back({.name = "7B, few dropped, few added",
                   .tokens = 24576,
                   .experts = 128,
                   .top_k = 8,
                   .kept = 0.99,
                   .added = 0.0006,
                   .rows = true});
  int failures = 0;
  for (RoundedCase const& c : cases) failures += passes(c) ? 0 : 1;
  return failures == 0 ? 0 : 1;
}
