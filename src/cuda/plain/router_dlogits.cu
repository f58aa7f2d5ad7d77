// SPDX-License-Identifier: Apache-2.0
// dlogits of one token by a warp, with g_k = c*ds_k and I the experts of its slots; zero where not stated:
//   topk-softmax (-renorm)        dl_k = q_k (g_k - sum over I of g q),  q = s/c
//   softmax-topk, expert-choice   all e: dl_e = p_e ([e in I] g_e - sum over I of g p)
//   p of its own                  dp_k = (g_k - sum over I of g q)/S with q = p/S where normalised, else g_k;
//                                 dl_k = dp_k p'(l_k)
// merge_repeats: what replayed ids repeat, once. round_dlogits: the operand of dw_router, of a split call.
#include "../host/router_backward.hpp"
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

// What the lanes of a warp know of their token.
struct Token {
  RouterDlogitsArguments const& p;
  int64_t first, end;  // slots
  int lane;
  float const* gmem_logits;
  float* gmem_row;  // (E) of dlogits

  // visit(slot, id) for the slots of this lane that have an expert.
  template <class Visit>
  __device__ void for_each_member(Visit&& visit) const {
    for (int64_t slot = first + lane; slot < end; slot += kLanes) {
      int32_t const id = p.gmem_ids[slot];
      if (id >= 0) visit(slot, id);
    }
  }
  template <class Visit>
  __device__ void for_each_expert(Visit&& visit) const {
    for (int32_t e = lane; e < p.experts; e += kLanes) visit(e);
  }
  // c * sum over the experts j of q_j (ds_k - ds_j): what g_k - sum of g q is where the q add up to 1, without its
  // cancellation.
  __device__ float centered(int64_t k) const {
    float const own = p.gmem_dscores[k];
    float sum = 0;
    for (int64_t j = first; j < end; ++j) {
      if (p.gmem_ids[j] >= 0) sum += p.gmem_scores[j] * (own - p.gmem_dscores[j]);
    }
    return sum;
  }
  // q or p of slot k.
  __device__ float unscaled(int64_t k) const {
    return core::unscaled_score(p.route_scale, p.gmem_scores[k]);
  }

  __device__ void topk_softmax() const {
    for_each_member([&](int64_t k, int32_t id) { gmem_row[id] = unscaled(k) * centered(k); });
  }
  // The p of the chosen add up to 1 - rest, rest being the others': g_k - sum of g p = g_k rest + centered.
  __device__ void softmax_over_all() const {
    bool any = false;
    float mean = 0, largest = -INFINITY;
    for_each_member([&](int64_t k, int32_t) {
      any = true;
      mean += p.gmem_dscores[k] * p.gmem_scores[k];
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
    for_each_member([&](int64_t, int32_t id) { gmem_row[id] = 0; });
    __syncwarp();
    partial = 0;
    for_each_expert([&](int32_t e) { partial += gmem_row[e]; });
    float const rest = plain::warp_sum(partial) / sum;
    for_each_expert([&](int32_t e) { gmem_row[e] = gmem_row[e] / sum * -mean; });
    __syncwarp();
    for_each_member([&](int64_t k, int32_t id) {
      float const g = p.route_scale * p.gmem_dscores[k];
      gmem_row[id] = unscaled(k) * (g * rest + centered(k));
    });
  }
  __device__ void own_p() const {
    float sum = 1;
    if (p.normalize_scores) {
      float partial = 0;
      for_each_member([&](int64_t k, int32_t) { partial += p.gmem_chosen_p[k]; });
      sum = plain::warp_sum(partial) + core::kNormalizeFloor;
    }
    for_each_member([&](int64_t k, int32_t id) {
      float const g = p.normalize_scores ? centered(k) : p.route_scale * p.gmem_dscores[k];
      gmem_row[id] = core::own_p_gradient(p.kind, p.gmem_chosen_p[k], g / sum);
    });
  }
  // Of the slots of this lane, which wrote their dlogits itself.
  __device__ void by_row() const {
    for (int64_t slot = first + lane; slot < end; slot += kLanes) {
      int32_t const row = p.gmem_inverse_permutation[slot], id = p.gmem_ids[slot];
      if (row >= 0) p.gmem_row_dlogits[row] = id >= 0 ? gmem_row[id] : 0;
    }
  }
  __device__ void finish(int64_t t) const {
    for_each_expert([&](int32_t e) {
      float value = gmem_row[e];
      if (p.gmem_aux_dlogits != nullptr) value += p.gmem_aux_dlogits[t * p.aux_pitch + e];
      gmem_row[e] = value;
      if (p.gmem_rounded != nullptr) {
        plain::round_to(static_cast<__nv_bfloat16*>(p.gmem_rounded)[t * p.experts + e], value);
      }
      if (p.gmem_copy != nullptr) p.gmem_copy[t * p.copy_pitch + e] = value;
    });
  }
};

__global__ void __launch_bounds__(plain::kThreads)
    router_dlogits_plain(__grid_constant__ RouterDlogitsArguments const p) {
  int64_t const t = plain::output_idx() / kLanes;
  if (t >= p.tokens) return;
  auto const [first, end] = plain::slots_of(p, t);
  Token const token{p,
                    first,
                    end,
                    int(threadIdx.x) % kLanes,
                    p.gmem_logits + t * p.experts,
                    p.gmem_dlogits + t * p.experts};
  token.for_each_expert([&](int32_t e) { token.gmem_row[e] = 0; });
  __syncwarp();
  if (core::has_softmax_over_all(p.kind)) {
    token.softmax_over_all();
  } else if (core::has_own_p(p.kind)) {
    token.own_p();
  } else {
    token.topk_softmax();
  }
  if (p.gmem_row_dlogits != nullptr) token.by_row();
  __syncwarp();
  token.finish(t);
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

cudaError_t launch_round_dlogits_plain(RoundDlogitsArguments const& args, cudaStream_t stream) {
  return plain::launch(round_dlogits_plain, args.count, stream, args);
}

}  // namespace tessera::cuda
