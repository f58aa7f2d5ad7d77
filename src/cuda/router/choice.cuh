// SPDX-License-Identifier: Apache-2.0
// This file has what the kernels of the top-k choice do (route, route_and_rank): keys as ordered integers, the choice
// of a token by its warp or by a part of it, and the scores of the chosen.
// Numerics fp32, to be compiled without contraction; sums fold 32 lanes by halves: the bits of core::warp_sum
#pragma once

#include <cstdint>

#include <climits>

#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/route.hpp"
#include "../warp/fold.cuh"
#include "core/router_math.hpp"

namespace tessera::cuda {

// The largest of kLanes neighbours, in each of them.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of(uint32_t key) {
  if constexpr (kLanes == arch::kWarpThreads) {
    return __reduce_max_sync(arch::kAllLanes, key);
  } else {
    TESSERA_UNROLL
    for (int half = kLanes / 2; half > 0; half /= 2) {
      key = max(key, __shfl_xor_sync(arch::kAllLanes, key, half));
    }
    return key;
  }
}

// The kLength largest keys of a lane, largest first; 0 behind the last.
template <int kLength>
struct SortedKeys {
  uint32_t key[kLength];

  __device__ static void exchange(uint32_t& high, uint32_t& low) {
    uint32_t const larger = max(high, low);
    low = min(high, low);
    high = larger;
  }
  // Batcher's odd-even merge sort.
  __device__ void sort() {
    TESSERA_UNROLL
    for (int run = 1; run < kLength; run *= 2) {
      TESSERA_UNROLL
      for (int step = run; step > 0; step /= 2) {
        TESSERA_UNROLL
        for (int i = 0; i + step < kLength; ++i) {
          bool const begins = i >= step % run && (i - step % run) / step % 2 == 0;
          bool const same_pair_of_runs = i / (2 * run) == (i + step) / (2 * run);
          if (begins && same_pair_of_runs) exchange(key[i], key[i + step]);
        }
      }
    }
  }
  // Two descending lists face to face: the larger of each pair are the largest of all, a bitonic sequence.
  __device__ void merge(SortedKeys const& other) {
    TESSERA_UNROLL
    for (int i = 0; i < kLength; ++i) key[i] = max(key[i], other.key[kLength - 1 - i]);
    TESSERA_UNROLL
    for (int half = kLength / 2; half > 0; half /= 2) {
      TESSERA_UNROLL
      for (int i = 0; i < kLength; ++i) {
        if ((i & half) == 0) exchange(key[i], key[i + half]);
      }
    }
  }
  template <int kValues>
  __device__ void take(uint32_t const (&values)[kValues]) {
    TESSERA_UNROLL
    for (int first = 0; first < kValues; first += kLength) {
      SortedKeys next;
      TESSERA_UNROLL
      for (int i = 0; i < kLength; ++i) next.key[i] = first + i < kValues ? values[first + i] : 0;
      next.sort();
      if (first == 0) {
        *this = next;
      } else {
        merge(next);
      }
    }
  }
  __device__ void pop() {
    TESSERA_UNROLL
    for (int i = 1; i < kLength; ++i) key[i - 1] = key[i];
    key[kLength - 1] = 0;
  }
};

// Logits become what experts are selected by; expert(i): whose the i-th is. has_own_p, here and below: that of the
// router (core::has_own_p), a constant in route_shared.
template <int kValues>
__device__ __forceinline__ void select_by(RouteArguments const& p, bool has_own_p,
                                          float (&value)[kValues], int (*expert)(int)) {
  if (has_own_p) {
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) value[i] = core::own_p(p.kind, value[i]);
  }
  if (p.gmem_selection_bias != nullptr) {
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      value[i] += expert(i) < p.experts ? p.gmem_selection_bias[expert(i)] : 0.0f;
    }
  }
}

// Keys of one token, kValues a lane; 0 stands for no expert.
template <int kValues>
struct TokenKeys {
  uint32_t key[kValues];

  __device__ static int expert(int i) { return i * arch::kWarpThreads + arch::lane_idx(); }

  // All loads are issued before the first value is used.
  __device__ __forceinline__ void load(RouteArguments const& p, bool has_own_p,
                                       float const* gmem_logits) {
    float value[kValues];
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      value[i] = expert(i) < p.experts ? gmem_logits[expert(i)] : 0.0f;
    }
    select_by(p, has_own_p, value, expert);
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      key[i] = expert(i) < p.experts ? core::ordered_key(value[i]) : 0;
    }
  }

  struct Best {
    uint32_t key;
    int expert;
  };
  // The best of this lane's experts in [first, last), the lowest among equals.
  __device__ Best best_of_lane(int first, int last) const {
    Best own{0, INT_MAX};
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      bool const inside = expert(i) >= first && expert(i) < last;
      if (inside && key[i] > own.key) own = {key[i], expert(i)};
    }
    return own;
  }
  // The two best of this lane's experts that come after `last` in the order of choice. Keys of experts that do
  // not exist are 0 and never win: no bounds.
  __device__ void best_after(Best last, Best& first, Best& second) const {
    first = second = {0, INT_MAX};
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      bool const after = key[i] < last.key || (key[i] == last.key && expert(i) > last.expert);
      if (after && key[i] > first.key) {
        second = first;
        first = {key[i], expert(i)};
      } else if (after && key[i] > second.key) {
        second = {key[i], expert(i)};
      }
    }
  }
  // The best of all lanes, the same in every lane.
  __device__ static Best best_of_warp(Best own) {
    uint32_t const largest = __reduce_max_sync(arch::kAllLanes, own.key);
    int const candidate = own.key == largest ? own.expert : INT_MAX;
    return {largest, __reduce_min_sync(arch::kAllLanes, candidate)};
  }
  __device__ Best best(int first, int last) const {
    return best_of_warp(best_of_lane(first, last));
  }
  __device__ void remove(int chosen) {
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      if (expert(i) == chosen) key[i] = 0;
    }
  }

  // The k-th choice in lane k, in order: among equal keys the lowest expert.
  __device__ int choose_in_order(int top_k) const {
    int choice = 0;
    Best own, next;
    best_after({UINT_MAX, -1}, own, next);
    for (int k = 0; k < top_k; ++k) {
      int const expert = best_of_warp(own).expert;
      if (arch::lane_idx() == k) choice = expert;
      if (own.expert == expert) {
        Best const taken = own;
        own = next;
        next = {0, INT_MAX};
        if (own.key == 0) best_after(taken, own, next);
      }
    }
    return choice;
  }

  // The same for keys that differ, which is usual: then only keys are compared, and an expert is found by its key.
  __device__ int choose(int top_k) const {
    constexpr int kLength = 4;
    SortedKeys<kLength> list;
    list.take(key);
    uint32_t chosen_key = 0, chosen_lanes = 0;  // of the k-th choice, in lane k
    bool in_doubt = false;  // equal keys, or a lane that may have more to offer than its list
    for (int k = 0; k < top_k; ++k) {
      uint32_t const largest = __reduce_max_sync(arch::kAllLanes, list.key[0]);
      bool const wins = list.key[0] == largest;
      uint32_t const winners = __ballot_sync(arch::kAllLanes, wins);
      if (arch::lane_idx() == k) {
        chosen_key = largest;
        chosen_lanes = winners;
      }
      in_doubt = in_doubt || (winners & (winners - 1)) != 0;
      if (wins) {
        in_doubt = in_doubt || list.key[1] == largest;
        list.pop();
        if (kValues > kLength) in_doubt = in_doubt || list.key[0] == 0;
      }
    }
    if (__any_sync(arch::kAllLanes, in_doubt)) return choose_in_order(top_k);
    int const winner = (__ffs(static_cast<int>(chosen_lanes)) - 1) & (arch::kWarpThreads - 1);
    int choice = 0;
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      uint32_t const candidate = __shfl_sync(arch::kAllLanes, key[i], winner);
      if (candidate == chosen_key) choice = i * arch::kWarpThreads + winner;
    }
    return choice;
  }

  // Keeps the top_groups groups with the largest sums of their two largest keys.
  __device__ void mask_groups(RouteArguments const& p) {
    int const size = p.experts / p.groups;
    uint32_t group_key = 0;  // of group `lane`
    for (int g = 0; g < p.groups; ++g) {
      Best const first = best(g * size, (g + 1) * size);
      float sum = core::key_value(first.key);
      if (size > 1) {
        TokenKeys rest = *this;
        rest.remove(first.expert);
        sum += core::key_value(rest.best(g * size, (g + 1) * size).key);
      }
      if (arch::lane_idx() == g) group_key = core::ordered_key(sum);
    }
    uint32_t kept = 0;
    for (int i = 0; i < p.top_groups; ++i) {
      uint32_t const largest = __reduce_max_sync(arch::kAllLanes, group_key);
      int const winner = __ffs(__ballot_sync(arch::kAllLanes, group_key == largest)) - 1;
      kept |= 1u << winner;
      if (arch::lane_idx() == winner) group_key = 0;
    }
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      int const group = expert(i) / size;
      if (group < p.groups && (kept >> group & 1) == 0) key[i] = 0;
    }
  }
};

// sum over all experts of exp(l - largest), and that largest logit.
template <int kValues>
__device__ __forceinline__ float softmax_sum(RouteArguments const& p, float const* gmem_logits,
                                             float& largest) {
  float logits[kValues];
  uint32_t own = 0;
  TESSERA_UNROLL
  for (int i = 0; i < kValues; ++i) {
    int const expert = TokenKeys<kValues>::expert(i);
    logits[i] = expert < p.experts ? gmem_logits[expert] : 0.0f;
    uint32_t const key = expert < p.experts ? core::ordered_key(logits[i]) : 0;
    own = key > own ? key : own;
  }
  largest = core::key_value(__reduce_max_sync(arch::kAllLanes, own));
  float sum = 0;
  TESSERA_UNROLL
  for (int i = 0; i < kValues; ++i) {
    bool const inside = TokenKeys<kValues>::expert(i) < p.experts;
    if (inside) sum += core::exp_fp32(logits[i] - largest);
  }
  return warp::fold_sum(sum);
}

// The scores of a lane's choices.
template <int kChoices>
struct ChoiceScores {
  float value[kChoices];
};

// Lane q of kLanes holds the chosen logits q, q + kLanes, ..; writes their scores and p. kValues: those of a lane in a
// softmax over all experts, which takes a whole warp.
template <int kLanes, int kChoices, int kValues>
__device__ __forceinline__ ChoiceScores<kChoices> store_scores(
    RouteArguments const& p, bool has_own_p, float const* gmem_logits,
    float const (&logit)[kChoices], bool const (&chosen)[kChoices], int64_t slot) {
  float term[kChoices] = {}, sum = 1;
  auto const sum_of_terms = [&] {
    float own = term[0];
    TESSERA_UNROLL
    for (int c = 1; c < kChoices; ++c) own += term[c];
    return warp::fold_sum<kLanes>(own);
  };
  auto const exponentiate = [&](float largest) {
    TESSERA_UNROLL
    for (int c = 0; c < kChoices; ++c) {
      if (chosen[c]) term[c] = core::exp_fp32(logit[c] - largest);
    }
  };
  if (has_own_p) {
    TESSERA_UNROLL
    for (int c = 0; c < kChoices; ++c) {
      if (chosen[c]) term[c] = core::own_p(p.kind, logit[c]);
      if (chosen[c] && p.gmem_chosen_p != nullptr) p.gmem_chosen_p[slot + c * kLanes] = term[c];
    }
    if (p.normalize_scores) sum = sum_of_terms() + core::kNormalizeFloor;
  } else if (kLanes == arch::kWarpThreads && p.kind == RouterKind::softmax_topk) {
    float largest;
    sum = softmax_sum<kValues>(p, gmem_logits, largest);
    exponentiate(largest);
  } else {
    uint32_t own = core::ordered_key(chosen[0] ? logit[0] : -INFINITY);
    TESSERA_UNROLL
    for (int c = 1; c < kChoices; ++c) {
      own = max(own, core::ordered_key(chosen[c] ? logit[c] : -INFINITY));
    }
    exponentiate(core::key_value(largest_of<kLanes>(own)));
    sum = sum_of_terms();
  }
  ChoiceScores<kChoices> scores;
  TESSERA_UNROLL
  for (int c = 0; c < kChoices; ++c) {
    scores.value[c] = p.route_scale * (term[c] / sum);
    if (chosen[c]) p.gmem_topk_weights[slot + c * kLanes] = scores.value[c];
  }
  return scores;
}

// A token's choices by kLanes lanes with kValues experts each: lane q has choices q and q + kLanes.
template <int kLanes, int kValues>
struct SharedToken {
  static constexpr int kExperts = kLanes * kValues;
  static constexpr int kChoices = 2;  // of a lane
  static constexpr uint32_t kExpertBits = kExperts - 1;

  __device__ static int lane() { return arch::lane_idx() % kLanes; }
  __device__ static int expert(int i) { return 4 * (i / 4 * kLanes + lane()) + i % 4; }

  // The logits of this lane's experts; `missing` stands for no expert.
  __device__ __forceinline__ static void load_logits(int experts, float const* gmem_logits,
                                                     float missing, float (&value)[kValues]) {
    TESSERA_UNROLL
    for (int i = 0; i < kValues; i += 4) {
      float4 four{missing, missing, missing, missing};
      if (expert(i) < experts) four = *reinterpret_cast<float4 const*>(gmem_logits + expert(i));
      value[i] = four.x;
      value[i + 1] = four.y;
      value[i + 2] = four.z;
      value[i + 3] = four.w;
    }
  }

  // Keys whose last bits are the expert's; 0 stands for no expert.
  __device__ __forceinline__ static void load(RouteArguments const& p, bool has_own_p,
                                              float const* gmem_logits, uint32_t (&keys)[kValues]) {
    float value[kValues];
    load_logits(p.experts, gmem_logits, 0.0f, value);
    select_by(p, has_own_p, value, expert);
    TESSERA_UNROLL
    for (int i = 0; i < kValues; ++i) {
      uint32_t const key = core::ordered_key(value[i]);
      keys[i] = expert(i) < p.experts ? (key & ~kExpertBits) | static_cast<uint32_t>(expert(i)) : 0;
    }
  }

  // The choices of the lane's token; where rounded keys leave them in doubt, by the whole warp, whose first token is
  // `first` of p. All lanes call it.
  __device__ __forceinline__ static void choose(RouteArguments const& p, bool has_own_p,
                                                int64_t first, float const* gmem_logits,
                                                int (&choice)[kChoices]) {
    uint32_t keys[kValues];
    load(p, has_own_p, gmem_logits, keys);
    uint32_t doubts = __ballot_sync(arch::kAllLanes, choose_by(keys, p.top_k, choice));
    while (doubts != 0) {
      int const in_warp = (__ffs(static_cast<int>(doubts)) - 1) / kLanes;
      doubts &= ~(((1u << kLanes) - 1) << in_warp * kLanes);
      TokenKeys<(kExperts + arch::kWarpThreads - 1) / arch::kWarpThreads> exact;
      exact.load(p, has_own_p, p.gmem_logits + min(first + in_warp, p.tokens - 1) * p.experts);
      int const of_lane = exact.choose(p.top_k);
      TESSERA_UNROLL
      for (int c = 0; c < kChoices; ++c) {
        int const chosen = __shfl_sync(arch::kAllLanes, of_lane, lane() + c * kLanes);
        if (arch::lane_idx() / kLanes == in_warp) choice[c] = chosen;
      }
    }
  }

 private:
  // Returns whether rounded keys leave the choice in doubt.
  __device__ static bool choose_by(uint32_t const (&keys)[kValues], int top_k,
                                   int (&choice)[kChoices]) {
    constexpr int kLength = 8;
    SortedKeys<kLength> list;
    list.take(keys);
    bool in_doubt = false;
    uint32_t last = 0;
    for (int k = 0;; ++k) {
      uint32_t const largest = largest_of<kLanes>(list.key[0]);
      in_doubt = in_doubt || (k > 0 && ((largest ^ last) & ~kExpertBits) == 0);
      if (k == top_k) return in_doubt;  // the first that is not chosen
      last = largest;
      TESSERA_UNROLL
      for (int c = 0; c < kChoices; ++c) {
        if (k == lane() + c * kLanes) choice[c] = static_cast<int>(largest & kExpertBits);
      }
      bool const wins = list.key[0] == largest;
      if (wins) {
        list.pop();
        if (kValues > kLength) in_doubt = in_doubt || list.key[0] == 0;
      }
    }
  }
};

// Sums over all experts go by 32 lanes, groups by experts in order: those take a warp per token.
inline bool shares_warps(RouteArguments const& args) {
  return args.experts <= 512 && args.experts % 4 == 0 &&
         reinterpret_cast<uintptr_t>(args.gmem_logits) % sizeof(float4) == 0 &&
         !core::has_softmax_over_all(args.kind) && args.kind != RouterKind::group_limited;
}

}  // namespace tessera::cuda
