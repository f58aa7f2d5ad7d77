// SPDX-License-Identifier: Apache-2.0
// dlogits of one token by a warp, with g_k = c*ds_k and I the experts of its slots; zero where not stated:
//   topk-softmax (-renorm)        dl_k = q_k (g_k - sum over I of g q),  q = s/c
//   softmax-topk, expert-choice   all e: dl_e = p_e ([e in I] g_e - sum over I of g p)
//   p of its own                  dp_k = (g_k - sum over I of g q)/S with q = p/S where normalised, else g_k;
//                                 dl_k = dp_k p'(l_k)
// router_dlogits_rounded: after token rounding, by the formulas of cpu/parallel/router_backward.cpp for I and what was
// added.
// merge_repeats: what replayed ids repeat, once. round_dlogits: the operand of dw_router, of a split call.
#include "../host/router_backward.hpp"
#include "../host/token_mask.hpp"
#include "core/router_math.hpp"
#include "dot.cuh"
#include "warp.cuh"

namespace tessera::cuda {
namespace {

using plain::kLanes;

__global__ void __launch_bounds__(plain::kThreads)
    merge_repeats_plain(MergeRepeatsArguments const p) {
  int64_t const t = plain::output_idx() / kLanes;
  if (t >= p.tokens) return;
  auto const [first, end] = plain::slots_of(p, t);
  for (int64_t slot = first + threadIdx.x % kLanes; slot < end; slot += kLanes) {
    int32_t const id = p.gmem_ids[slot];
    bool repeated = false;
    float sum = 0;
    for (int64_t other = first; other < end; ++other) {
      if (p.gmem_ids[other] != id) continue;
      repeated = repeated || other < slot;
      sum += p.gmem_dscores[other];
    }
    p.gmem_merged_ids[slot] = repeated ? -1 : id;
    p.gmem_merged_dscores[slot] = sum;
  }
}

// Experts of one token, each once, and what the formulas read of each: places [first, end), id negative: none.
struct Experts {
  int64_t first, end;
  int32_t const* gmem_ids;
  float const* gmem_scores;
  float const* gmem_dscores;
  float const* gmem_p;  // null: from the logits

  // visit(place, id) for the experts of this lane.
  template <class Visit>
  __device__ void for_each(Visit&& visit) const {
    for (int64_t k = first + threadIdx.x % kLanes; k < end; k += kLanes) {
      if (gmem_ids[k] >= 0) visit(k, gmem_ids[k]);
    }
  }
  // c * sum over the experts j of q_j (ds_k - ds_j): what g_k - sum of g q is where the q add up to 1, without its
  // cancellation.
  __device__ float centered(int64_t k) const {
    float const own = gmem_dscores[k];
    float sum = 0;
    for (int64_t j = first; j < end; ++j) {
      if (gmem_ids[j] >= 0) sum += gmem_scores[j] * (own - gmem_dscores[j]);
    }
    return sum;
  }
};

// The lanes of a warp know this of their token.
struct Token {
  RouterDlogitsArguments const& p;
  int64_t token;
  int lane;
  float const* gmem_logits;
  float* gmem_row;  // (E) of dlogits

  __device__ Token(RouterDlogitsArguments const& args, int64_t t)
      : p(args),
        token(t),
        lane(int(threadIdx.x) % kLanes),
        gmem_logits(args.gmem_logits + t * args.experts),
        gmem_row(args.gmem_dlogits + t * args.experts) {
    for_each_expert([&](int32_t e) { gmem_row[e] = 0; });
    __syncwarp();
  }

  template <class Visit>
  __device__ void for_each_expert(Visit&& visit) const {
    for (int32_t e = lane; e < p.experts; e += kLanes) visit(e);
  }
  // q or p of an expert.
  __device__ float unscaled(Experts const& experts, int64_t k) const {
    return core::unscaled_score(p.route_scale, experts.gmem_scores[k]);
  }
  __device__ float own_p(Experts const& experts, int64_t k, int32_t id) const {
    return experts.gmem_p != nullptr ? experts.gmem_p[k] : core::own_p(p.kind, gmem_logits[id]);
  }

  __device__ void topk_softmax(Experts const& members) const {
    members.for_each(
        [&](int64_t k, int32_t id) { gmem_row[id] += unscaled(members, k) * members.centered(k); });
  }
  // The p of the chosen add up to 1 - rest, rest being the others': g_k - sum of g p = g_k rest + centered.
  __device__ void softmax_over_all(Experts const& chosen) const {
    bool any = false;
    float mean = 0, largest = -INFINITY;
    chosen.for_each([&](int64_t k, int32_t) {
      any = true;
      mean += chosen.gmem_dscores[k] * chosen.gmem_scores[k];
    });
    if (!__any_sync(plain::kAllLanes, any)) return;
    mean = plain::warp_sum(mean);
    for_each_expert([&](int32_t e) { largest = fmaxf(largest, gmem_logits[e]); });
    largest = plain::warp_max(largest);
    float partial = 0;
    for_each_expert([&](int32_t e) {
      gmem_row[e] = core::exp_fp32(gmem_logits[e] - largest);
      partial += gmem_row[e];
    });
    float const sum = plain::warp_sum(partial);
    __syncwarp();
    chosen.for_each([&](int64_t, int32_t id) { gmem_row[id] = 0; });
    __syncwarp();
    partial = 0;
    for_each_expert([&](int32_t e) { partial += gmem_row[e]; });
    float const rest = plain::warp_sum(partial) / sum;
    for_each_expert([&](int32_t e) { gmem_row[e] = gmem_row[e] / sum * -mean; });
    __syncwarp();
    chosen.for_each([&](int64_t k, int32_t id) {
      float const g = p.route_scale * chosen.gmem_dscores[k];
      gmem_row[id] = unscaled(chosen, k) * (g * rest + chosen.centered(k));
    });
    __syncwarp();
  }
  // S of the members, 1 where they are not normalised.
  __device__ core::Normalizer normalizer(Experts const& members) const {
    if (!p.normalize_scores) return {};
    float partial = 0;
    members.for_each([&](int64_t k, int32_t id) { partial += own_p(members, k, id); });
    return core::normalizer(plain::warp_sum(partial));
  }
  // The normalised q of the members add up to 1 - rest: g_k - sum of g q = g_k rest + centered.
  __device__ void own_p_scores(Experts const& members, Experts const& added) const {
    auto const [sum, rest] = normalizer(members);
    float partial = 0;
    added.for_each([&](int64_t k, int32_t id) {
      partial += added.gmem_scores[k] * added.gmem_dscores[k];
      float const g = p.route_scale * added.gmem_dscores[k];
      gmem_row[id] = core::own_p_gradient(p.kind, own_p(added, k, id), g, sum);
    });
    float const of_added = plain::warp_sum(partial);
    members.for_each([&](int64_t k, int32_t id) {
      float g = p.route_scale * members.gmem_dscores[k];
      if (p.normalize_scores) g = g * rest + members.centered(k) - of_added;
      gmem_row[id] = core::own_p_gradient(p.kind, own_p(members, k, id), g, sum);
    });
  }
  // Writes the slots of this lane, which wrote their dlogits itself.
  __device__ void by_row(Experts const& slots) const {
    for (int64_t slot = slots.first + lane; slot < slots.end; slot += kLanes) {
      int32_t const row = p.gmem_inverse_permutation[slot], id = p.gmem_ids[slot];
      if (row >= 0) p.gmem_row_dlogits[row] = id >= 0 ? gmem_row[id] : 0;
    }
  }
  __device__ void finish() const {
    __syncwarp();
    for_each_expert([&](int32_t e) {
      float value = gmem_row[e];
      if (p.gmem_aux_dlogits != nullptr && is_real(p.gmem_token_mask, token)) {
        value += p.gmem_aux_dlogits[token * p.aux_pitch + e];
      }
      gmem_row[e] = value;
      if (p.gmem_rounded != nullptr) {
        plain::round_to(static_cast<__nv_bfloat16*>(p.gmem_rounded)[token * p.experts + e], value);
      }
      if (p.gmem_copy != nullptr) p.gmem_copy[token * p.copy_pitch + e] = value;
    });
  }
};

__device__ Experts experts_of_slots(RouterDlogitsArguments const& p, int64_t t) {
  auto const [first, end] = plain::slots_of(p, t);
  return {first, end, p.gmem_ids, p.gmem_scores, p.gmem_dscores, p.gmem_chosen_p};
}

__global__ void __launch_bounds__(plain::kThreads)
    router_dlogits_plain(__grid_constant__ RouterDlogitsArguments const p) {
  int64_t const t = plain::output_idx() / kLanes;
  if (t >= p.tokens) return;
  Experts const slots = experts_of_slots(p, t);
  Token const token(p, t);
  if (core::has_softmax_over_all(p.kind)) {
    token.softmax_over_all(slots);
  } else if (core::has_own_p(p.kind)) {
    token.own_p_scores(slots, {});
  } else {
    token.topk_softmax(slots);
  }
  if (p.gmem_row_dlogits != nullptr) token.by_row(slots);
  token.finish();
}

// Splits a token's experts: those of the top-k choice, with scores and dscores, 0 where token rounding dropped them;
// and the slots of the others, which it added.
struct SplitToken {
  RoundedDlogitsArguments const& args;
  RouterDlogitsArguments const& p = args.dlogits;
  Token const& token;
  Experts slots;
  int64_t first = token.token * p.top_k;  // of its top-k choice

  __device__ Experts members() const {
    return {first,
            first + p.top_k,
            args.gmem_unrounded_ids,
            args.gmem_member_scores,
            args.gmem_member_dscores,
            nullptr};
  }
  __device__ Experts added() const {
    Experts out = slots;
    out.gmem_ids = args.gmem_added_ids;
    out.gmem_p = nullptr;
    return out;
  }
  __device__ void split() const {
    for (int64_t slot = slots.first + token.lane; slot < slots.end; slot += kLanes) {
      int32_t id = p.gmem_ids[slot];
      for (int64_t k = first; k < first + p.top_k; ++k) {
        if (args.gmem_unrounded_ids[k] == id) id = -1;
      }
      args.gmem_added_ids[slot] = id;
    }
    members().for_each([&](int64_t k, int32_t id) {
      float dscore = 0;
      for (int64_t slot = slots.first; slot < slots.end; ++slot) {
        if (p.gmem_ids[slot] == id) dscore = p.gmem_dscores[slot];
      }
      args.gmem_member_dscores[k] = dscore;
    });
    score_members();
    __syncwarp();
  }
  __device__ void score_members() const {
    bool const own_p = core::has_own_p(p.kind);
    float largest = -INFINITY, partial = 0;
    if (!own_p) {
      members().for_each(
          [&](int64_t, int32_t id) { largest = fmaxf(largest, token.gmem_logits[id]); });
      largest = plain::warp_max(largest);
      members().for_each(
          [&](int64_t, int32_t id) { partial += core::exp_fp32(token.gmem_logits[id] - largest); });
    }
    float const sum = own_p ? token.normalizer(members()).sum : plain::warp_sum(partial);
    members().for_each([&](int64_t k, int32_t id) {
      float const logit = token.gmem_logits[id];
      float const term = own_p ? core::own_p(p.kind, logit) : core::exp_fp32(logit - largest);
      args.gmem_member_scores[k] = p.route_scale * (term / sum);
    });
  }
};

__global__ void __launch_bounds__(plain::kThreads)
    router_dlogits_rounded_plain(__grid_constant__ RoundedDlogitsArguments const args) {
  RouterDlogitsArguments const& p = args.dlogits;
  int64_t const t = plain::output_idx() / kLanes;
  if (t >= p.tokens) return;
  Token const token(p, t);
  SplitToken const rounded{.args = args, .token = token, .slots = experts_of_slots(p, t)};
  rounded.split();
  if (core::has_own_p(p.kind)) {
    token.own_p_scores(rounded.members(), rounded.added());
  } else {
    token.softmax_over_all(rounded.added());
    token.topk_softmax(rounded.members());
  }
  token.finish();
}

__global__ void __launch_bounds__(plain::kThreads)
    round_dlogits_plain(RoundDlogitsArguments const p) {
  int64_t const i = plain::output_idx();
  if (i < p.count) {
    plain::round_to(static_cast<__nv_bfloat16*>(p.gmem_rounded)[i], p.gmem_dlogits[i]);
  }
}

}  // namespace

cudaError_t launch_merge_repeats_plain(MergeRepeatsArguments const& args, cudaStream_t stream) {
  return plain::launch(merge_repeats_plain, args.tokens * kLanes, stream, args);
}

cudaError_t launch_router_dlogits_plain(RouterDlogitsArguments const& args, cudaStream_t stream) {
  if (args.kind == RouterKind::given) return cudaErrorInvalidValue;
  return plain::launch(router_dlogits_plain, args.tokens * kLanes, stream, args);
}

cudaError_t launch_router_dlogits_rounded_plain(RoundedDlogitsArguments const& args,
                                                cudaStream_t stream) {
  RouterKind const kind = args.dlogits.kind;
  if (kind == RouterKind::given || core::has_softmax_over_all(kind)) return cudaErrorInvalidValue;
  return plain::launch(router_dlogits_rounded_plain, args.dlogits.tokens * kLanes, stream, args);
}

cudaError_t launch_round_dlogits_plain(RoundDlogitsArguments const& args, cudaStream_t stream) {
  return plain::launch(round_dlogits_plain, args.count, stream, args);
}

}  // namespace tessera::cuda
