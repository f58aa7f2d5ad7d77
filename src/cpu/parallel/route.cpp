// SPDX-License-Identifier: Apache-2.0
// l = x w_router^T + b_router;  I_t = the K largest logits, ties to the lower id, NaN above all;
// topk-softmax: s = c*softmax over I_t (softmax-topk-renorm is the same function of l)
//
// exp, the maximum (= the first key) and the sum in slot order are one fixed fp32 sequence: for equal logits
// the scores are equal bit for bit on every device.
#include <algorithm>
#include <bit>
#include <limits>

#include "core/fp32_math.hpp"
#include "cpu/parallel/ops.hpp"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kTokenBlock = 256;

/// Ascending keys = descending logit, then ascending id; NaN first, -0 equal to +0.
std::uint64_t selection_key(float logit, std::uint32_t expert) noexcept {
  std::uint32_t ordered = 0;
  if (logit == logit) {
    auto const bits = std::bit_cast<std::uint32_t>(logit + 0.0f);
    std::uint32_t const ascending = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    ordered = ~ascending;  // never 0: that would need the NaN with all bits set
  }
  return std::uint64_t{ordered} << 32 | expert;
}

void store_id(Selection const& out, std::int64_t token, std::int64_t k,
              std::uint32_t expert) noexcept {
  std::int64_t const at = token * out.ids_pitch + k;
  if (out.ids_dtype == DType::int64) {
    static_cast<std::int64_t*>(out.ids)[at] = expert;
  } else {
    static_cast<std::int32_t*>(out.ids)[at] = static_cast<std::int32_t>(expert);
  }
}

}  // namespace

std::int64_t select_scratch_floats(MoeDesc const& desc) noexcept { return 2 * desc.shape.experts; }

void router_logits(MoeDesc const& desc, ConstRows x, RouterWeights const& router,
                   MutableRows logits, Threads const& threads) noexcept {
  std::int64_t const d = desc.shape.hidden, experts = desc.shape.experts,
                     tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
  threads.pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t const first = block * kTokenBlock, count = std::min(kTokenBlock, tokens - first);
    ConstMatrix const w_router{router.w_router.data, router.w_router.pitch, 1};
    gemm(count, experts, d, {x[first], x.pitch, 1}, w_router.transposed(), 0.0f,
         {logits[first], logits.pitch, 1});
    if (router.b_router == nullptr) return;
    for (std::int64_t t = first; t < first + count; ++t) {
      for (std::int64_t e = 0; e < experts; ++e) logits[t][e] += router.b_router[e];
    }
  });
}

void select_experts(MoeDesc const& desc, ConstRows logits, float const* selection_bias,
                    Selection const& out, Threads const& threads) noexcept {
  std::int64_t const experts = desc.shape.experts, k_max = desc.shape.top_k,
                     tokens = desc.shape.tokens;
  std::int64_t const blocks = (tokens + kTokenBlock - 1) / kTokenBlock;
  threads.pool.run(blocks, [&](std::int64_t block, int slot) {
    auto* const keys = reinterpret_cast<std::uint64_t*>(threads.scratch(slot));
    for (std::int64_t t = block * kTokenBlock; t < std::min(tokens, (block + 1) * kTokenBlock);
         ++t) {
      float const* const l = logits[t];
      for (std::int64_t e = 0; e < experts; ++e) {
        float const bias = selection_bias != nullptr ? selection_bias[e] : 0.0f;
        keys[e] = selection_key(l[e] + bias, static_cast<std::uint32_t>(e));
      }
      std::partial_sort(keys, keys + k_max, keys + experts);
      float* const weights = out.weights[t];
      float largest = l[static_cast<std::uint32_t>(keys[0])];
      for (std::int64_t k = 0; k < k_max; ++k) {
        auto const expert = static_cast<std::uint32_t>(keys[k]);
        store_id(out, t, k, expert);
        weights[k] = l[expert];
        largest = largest > l[expert] ? largest : l[expert];
      }
      float sum = 0.0f;
      for (std::int64_t k = 0; k < k_max; ++k) {
        weights[k] = core::exp_fp32(weights[k] - largest);
        sum += weights[k];
      }
      for (std::int64_t k = 0; k < k_max; ++k)
        weights[k] = desc.router.route_scale * (weights[k] / sum);
    }
  });
}

}  // namespace tessera::cpu
