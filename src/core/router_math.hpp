// SPDX-License-Identifier: Apache-2.0
// CPU and GPU routers share this, bit for bit: an expert's own p, keys as integers in the order of selection, and the
// size of the blocks in which losses add up.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/fp32_math.hpp"
#include "tessera/shape.hpp"

namespace tessera::core {

/// Routers whose p belongs to one expert alone: p = sigmoid(l), or sqrt(log(1 + e^l)).
TESSERA_INLINE bool has_own_p(RouterKind kind) noexcept {
  return kind == RouterKind::sigmoid_bias || kind == RouterKind::group_limited ||
         kind == RouterKind::sqrtsoftplus;
}

TESSERA_INLINE float own_p(RouterKind kind, float logit) noexcept {
  return kind == RouterKind::sqrtsoftplus ? std::sqrt(softplus_fp32(logit)) : sigmoid_fp32(logit);
}

/// Routers whose scores are softmax probabilities over all experts.
TESSERA_INLINE bool has_softmax_over_all(RouterKind kind) noexcept {
  return kind == RouterKind::softmax_topk || kind == RouterKind::expert_choice;
}

/// True where backward needs the logits besides ids and scores: the gradient reaches experts that no slot names. Else
/// it needs the chosen p of routers with a p of their own.
TESSERA_INLINE bool saves_logits(MoeDesc const& desc) noexcept {
  return has_softmax_over_all(desc.router.kind) || desc.router.round != Rounding::none;
}
TESSERA_INLINE bool saves_chosen_p(MoeDesc const& desc) noexcept {
  return has_own_p(desc.router.kind) && !saves_logits(desc);
}

/// Larger integers for larger keys; NaN above all numbers, -0 equal to +0; 0 is below every key.
TESSERA_INLINE std::uint32_t ordered_key(float key) noexcept {
  auto const bits = __builtin_bit_cast(std::uint32_t, key + 0.0f);
  // All bits of a negative number turn, the sign alone of others: without a branch, as kernels have many keys.
  auto const sign = static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 31);
  std::uint32_t const ordered = bits ^ (sign | 0x80000000u);
  return key != key ? 0xffffffffu : ordered;
}

/// The key again (some NaN for NaN).
TESSERA_INLINE float key_value(std::uint32_t ordered) noexcept {
  return __builtin_bit_cast(float, (ordered >> 31) != 0 ? ordered & 0x7fffffffu : ~ordered);
}

/// Added to the sum of the chosen p before scores are divided by it.
constexpr float kNormalizeFloor = 1e-20f;

/// S, by which the chosen p are divided, and what the quotients lack of adding up to 1: 0 where the floor is too small
/// to change S. So a single score is 1 and its gradient exactly 0, unless its p is tiny.
struct Normalizer {
  float sum = 1.0f, rest = 0.0f;
};
TESSERA_INLINE Normalizer normalizer(float sum_of_p) noexcept {
  float const sum = sum_of_p + kNormalizeFloor;
  return {sum, (sum - sum_of_p) / sum};
}

/// q or p of a score c*q, c*p; c = 0 makes every score and gradient 0.
TESSERA_INLINE float unscaled_score(float scale, float score) noexcept {
  return scale == 0.0f ? 0.0f : score / scale;
}

/// Tokens whose losses warp_sum adds up first; then it adds up the blocks' sums.
constexpr int kLossTokens = 32;

/// dl_k = g/S * p'(l_k), of the routers with a p of their own. p'/S comes first: g/S overflows where all p are 0.
TESSERA_INLINE float own_p_gradient(RouterKind kind, float p, float g, float sum) noexcept {
  float slope = p * (1.0f - p);
  if (kind == RouterKind::sqrtsoftplus) {
    slope = p == 0.0f ? 0.0f : -expm1_fp32(-p * p) / (2.0f * p);
  }
  return g * (slope / sum);
}

}  // namespace tessera::core
