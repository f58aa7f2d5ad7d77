// SPDX-License-Identifier: Apache-2.0
// route, one thread per token: K times the best expert that comes after the previous one; then the scores.
// The same fp32 operations in the same order as the kernel, hence the same bits, for any E and K.
// score_choice: the scores of ids that are given.
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "../host/route.hpp"
#include "core/router_math.hpp"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxGroups = 32;
constexpr int kLanes = 32;

struct Choice {
  uint32_t key;
  int32_t expert;
};

// Larger key first, then lower expert.
__device__ bool before(Choice a, Choice b) {
  return a.key != b.key ? a.key > b.key : a.expert < b.expert;
}

struct Token {
  RouteArguments const& p;
  float const* gmem_logits;
  uint32_t kept_groups = 0xffffffffu;

  __device__ uint32_t key(int32_t expert) const {
    float value = gmem_logits[expert];
    if (core::has_own_p(p.kind)) value = core::own_p(p.kind, value);
    float const bias = p.gmem_selection_bias != nullptr ? p.gmem_selection_bias[expert] : 0.0f;
    return core::ordered_key(value + bias);
  }
  __device__ bool kept(int32_t expert) const {
    return p.kind != RouterKind::group_limited ||
           (kept_groups >> (expert / (p.experts / p.groups)) & 1) != 0;
  }
  // The best expert of [first, last) behind `previous`.
  __device__ Choice next(Choice previous, int32_t first, int32_t last) const {
    Choice best{0, INT_MAX};
    for (int32_t expert = first; expert < last; ++expert) {
      Choice const candidate{key(expert), expert};
      if (kept(expert) && before(previous, candidate) && before(candidate, best)) best = candidate;
    }
    return best;
  }
  __device__ void choose_groups() {
    int32_t const size = p.experts / p.groups;
    uint32_t sums[kMaxGroups];
    for (int32_t g = 0; g < p.groups; ++g) {
      Choice const first = next({0xffffffffu, -1}, g * size, (g + 1) * size);
      float sum = core::key_value(first.key);
      if (size > 1) sum += core::key_value(next(first, g * size, (g + 1) * size).key);
      sums[g] = core::ordered_key(sum);
    }
    kept_groups = 0;
    for (int32_t i = 0; i < p.top_groups; ++i) {
      int32_t best = -1;
      for (int32_t g = 0; g < p.groups; ++g) {
        bool const open = (kept_groups >> g & 1) == 0;
        if (open && (best < 0 || sums[g] > sums[best])) best = g;
      }
      kept_groups |= 1u << best;
    }
  }
};

// Folds 32 interleaved partial sums by halves.
__device__ float fold(float (&partial)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) partial[lane] += partial[lane + half];
  }
  return partial[0];
}

// exp(l - largest) summed over the chosen, or over all experts.
__device__ float softmax_sum(RouteArguments const& p, float const* gmem_logits,
                             int32_t const* gmem_ids, float& largest) {
  int32_t const count = gmem_ids != nullptr ? p.top_k : p.experts;
  auto const logit = [&](int32_t i) { return gmem_logits[gmem_ids != nullptr ? gmem_ids[i] : i]; };
  uint32_t key = 0;
  for (int32_t i = 0; i < count; ++i) {
    uint32_t const own = core::ordered_key(logit(i));
    key = own > key ? own : key;
  }
  largest = core::key_value(key);
  float partial[kLanes] = {};
  for (int32_t i = 0; i < count; ++i) partial[i % kLanes] += core::exp_fp32(logit(i) - largest);
  return fold(partial);
}

__global__ void __launch_bounds__(kThreads) route_plain(__grid_constant__ RouteArguments const p) {
  int64_t const t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= p.tokens) return;
  Token token{p, p.gmem_logits + t * p.experts};
  if (p.kind == RouterKind::group_limited) token.choose_groups();
  int32_t* const gmem_ids = p.gmem_topk_ids + t * p.top_k;
  Choice choice{0xffffffffu, -1};
  for (int32_t k = 0; k < p.top_k; ++k) {
    choice = token.next(choice, 0, p.experts);
    gmem_ids[k] = choice.expert;
  }
  float sum = 1, largest = 0;
  bool const own = core::has_own_p(p.kind);
  if (!own) {
    bool const over_all = p.kind == RouterKind::softmax_topk;
    sum = softmax_sum(p, token.gmem_logits, over_all ? nullptr : gmem_ids, largest);
  } else if (p.normalize_scores) {
    float partial[kLanes] = {};
    for (int32_t k = 0; k < p.top_k; ++k) {
      partial[k % kLanes] += core::own_p(p.kind, token.gmem_logits[gmem_ids[k]]);
    }
    sum = fold(partial) + core::kNormalizeFloor;
  }
  for (int32_t k = 0; k < p.top_k; ++k) {
    float const logit = token.gmem_logits[gmem_ids[k]];
    float const term = own ? core::own_p(p.kind, logit) : core::exp_fp32(logit - largest);
    p.gmem_topk_weights[t * p.top_k + k] = p.route_scale * (term / sum);
    if (own && p.gmem_chosen_p != nullptr) p.gmem_chosen_p[t * p.top_k + k] = term;
  }
}

// The slots of one token, as score_choice sees them.
struct TokenSlots {
  ScoreChoiceArguments const& p;
  float const* gmem_logits;
  int64_t first, end;

  __device__ int32_t id(int64_t slot) const { return p.gmem_ids[slot]; }
  // True for the first slot that names its expert.
  __device__ bool counts(int64_t slot) const {
    if (id(slot) < 0) return false;
    for (int64_t j = first; j < slot; ++j) {
      if (id(j) == id(slot)) return false;
    }
    return true;
  }
  // visit(logit, place) for what the sum runs over: all experts, or each named one once.
  template <class Visit>
  __device__ void for_each_member(Visit&& visit) const {
    if (core::has_softmax_over_all(p.kind)) {
      for (int32_t e = 0; e < p.experts; ++e) visit(gmem_logits[e], e);
      return;
    }
    int32_t place = 0;
    for (int64_t j = first; j < end; ++j) {
      if (counts(j)) visit(gmem_logits[id(j)], place++);
    }
  }
};

__global__ void __launch_bounds__(kThreads)
    score_choice_plain(__grid_constant__ ScoreChoiceArguments const p) {
  int64_t const t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= p.tokens) return;
  bool const varies = p.gmem_token_offsets != nullptr;
  int64_t const first = varies ? p.gmem_token_offsets[t] : t * p.top_k;
  int64_t const end = varies ? p.gmem_token_offsets[t + 1] : first + p.top_k;
  TokenSlots const slots{p, p.gmem_logits + t * p.experts, first, end};
  bool const own = core::has_own_p(p.kind);
  uint32_t key = 0;
  if (!own) {
    slots.for_each_member([&](float logit, int32_t) {
      uint32_t const candidate = core::ordered_key(logit);
      key = candidate > key ? candidate : key;
    });
  }
  float const largest = core::key_value(key);
  auto const term = [&](float logit) {
    return own ? core::own_p(p.kind, logit) : core::exp_fp32(logit - largest);
  };
  float sum = 1;
  if (!own || p.normalize_scores) {
    float partial[kLanes] = {};
    slots.for_each_member(
        [&](float logit, int32_t place) { partial[place % kLanes] += term(logit); });
    sum = own ? fold(partial) + core::kNormalizeFloor : fold(partial);
  }
  for (int64_t j = first; j < end; ++j) {
    int32_t const id = slots.id(j);
    float const value = id < 0 ? 0.0f : term(slots.gmem_logits[id]);
    p.gmem_scores[j] = id < 0 ? 0.0f : p.route_scale * (value / sum);
    if (p.gmem_chosen_p != nullptr) p.gmem_chosen_p[j] = value;
  }
}

}  // namespace

cudaError_t launch_score_choice_plain(ScoreChoiceArguments const& args, cudaStream_t stream) {
  if (args.kind == RouterKind::given) return cudaErrorInvalidValue;
  if (args.tokens == 0) return cudaSuccess;
  int64_t const ctas = (args.tokens + kThreads - 1) / kThreads;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  score_choice_plain<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_route_plain(RouteArguments const& args, cudaStream_t stream) {
  bool const groups_fit =
      args.kind != RouterKind::group_limited || (args.groups >= 1 && args.groups <= kMaxGroups);
  if (args.kind == RouterKind::given || args.kind == RouterKind::expert_choice || args.top_k < 1 ||
      args.top_k > args.experts || !groups_fit) {
    return cudaErrorInvalidValue;
  }
  if (args.tokens == 0) return cudaSuccess;
  int64_t const ctas = (args.tokens + kThreads - 1) / kThreads;
  if (ctas > INT32_MAX) return cudaErrorInvalidValue;
  route_plain<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda
