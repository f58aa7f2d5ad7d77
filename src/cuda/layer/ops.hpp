// SPDX-License-Identifier: Apache-2.0
// The kernels of each op, a row by the type of its arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "cuda/host/aggregate.hpp"
#include "cuda/host/bias_gradient.hpp"
#include "cuda/host/metadata.hpp"
#include "cuda/host/projection.hpp"
#include "cuda/host/projection_backward.hpp"
#include "cuda/host/projection_sm100.hpp"
#include "cuda/host/route.hpp"
#include "cuda/host/router_backward.hpp"
#include "cuda/host/router_dlogits_rounded.hpp"
#include "cuda/host/router_loss.hpp"
#include "cuda/host/split_fp32.hpp"

namespace tessera::cuda {

template <class Arguments>
struct Op {
  cudaError_t (*fast)(Arguments const& args, int sm_count, cudaStream_t stream);
  cudaError_t (*plain)(Arguments const& args, cudaStream_t stream);  // serves every call
  /// Serves calls of few tokens, as prefers_few_tokens() says.
  cudaError_t (*few_tokens)(Arguments const& args, int sm_count, cudaStream_t stream) = nullptr;
  /// Takes the place of `fast` on sm_100a; null: `fast` runs there too, or the op has no kernel yet.
  cudaError_t (*sm100)(Arguments const& args, int sm_count, cudaStream_t stream) = nullptr;
};
template <class Arguments>
inline constexpr Op<Arguments> kOp{};  // no op: launch() refuses to compile it

// A launcher that needs no number of SMs: it takes all that there are.
template <auto kLaunch>
inline constexpr auto kOfAnySms =
    [](auto const& args, int /*sm_count*/, cudaStream_t stream) { return kLaunch(args, stream); };

template <>
inline constexpr Op<RouterLogitsArguments> kOp<RouterLogitsArguments>{
    .fast =
        [](RouterLogitsArguments const& args, int sm_count, cudaStream_t stream) {
          if (args.is_fp32 && args.x.rows > 0) {
            cudaError_t const error = launch_split_fp32_plain(
                split_for_logits(static_cast<float const*>(args.w_router.gmem), args.w_router.pitch,
                                 args.experts, args.hidden, args.gmem_terms),
                stream);
            if (error != cudaSuccess) return error;
          }
          return launch_router_logits(args, sm_count, stream);
        },
    .plain = launch_router_logits_plain,
    .few_tokens = kOfAnySms<launch_router_logits_gemv>};
template <>
inline constexpr Op<RouteArguments> kOp<RouteArguments>{.fast = kOfAnySms<launch_route>,
                                                        .plain = launch_route_plain};
template <>
inline constexpr Op<MetadataArguments> kOp<MetadataArguments>{.fast = kOfAnySms<launch_metadata>,
                                                              .plain = launch_metadata_plain};
template <>
inline constexpr Op<UpProjectionFwdArguments> kOp<UpProjectionFwdArguments>{
    .fast = launch_up_projection_fwd,
    .plain = launch_up_projection_fwd_plain,
    .sm100 = launch_up_projection_fwd_sm100};
template <>
inline constexpr Op<DownProjectionFwdArguments> kOp<DownProjectionFwdArguments>{
    .fast = launch_down_projection_fwd,
    .plain = launch_down_projection_fwd_plain,
    .sm100 = launch_down_projection_fwd_sm100};
template <>
inline constexpr Op<AggregateArguments> kOp<AggregateArguments>{
    .fast = kOfAnySms<launch_aggregate<__nv_bfloat16>>,
    .plain = launch_aggregate_plain<__nv_bfloat16>};
template <>
inline constexpr Op<DownProjectionDgradArguments> kOp<DownProjectionDgradArguments>{
    .fast = launch_down_projection_dgrad,
    .plain = launch_down_projection_dgrad_plain,
    .sm100 = launch_down_projection_dgrad_sm100};
template <>
inline constexpr Op<UpProjectionDgradArguments> kOp<UpProjectionDgradArguments>{
    .fast = launch_up_projection_dgrad,
    .plain = launch_up_projection_dgrad_plain,
    .sm100 = launch_up_projection_dgrad_sm100};
template <>
inline constexpr Op<DownProjectionWgradArguments> kOp<DownProjectionWgradArguments>{
    .fast = launch_down_projection_wgrad,
    .plain = [](DownProjectionWgradArguments const& args,
                cudaStream_t stream) { return launch_wgrad_plain(args, stream); },
    .sm100 =
        [](DownProjectionWgradArguments const& args, int sm_count, cudaStream_t stream) {
          return launch_projection_wgrad_sm100(args, sm_count, stream);
        }};
template <>
inline constexpr Op<UpProjectionWgradArguments> kOp<UpProjectionWgradArguments>{
    .fast = launch_up_projection_wgrad,
    .plain = [](UpProjectionWgradArguments const& args,
                cudaStream_t stream) { return launch_wgrad_plain(args, stream); },
    .sm100 =
        [](UpProjectionWgradArguments const& args, int sm_count, cudaStream_t stream) {
          return launch_projection_wgrad_sm100(args, sm_count, stream);
        }};
template <>
inline constexpr Op<RouterGradientArguments> kOp<RouterGradientArguments>{
    .fast = kOfAnySms<launch_router_dlogits>,
    .plain = [](RouterGradientArguments const& args, cudaStream_t stream) {
      cudaError_t const error = launch_dscores_plain(args.dscores, stream);
      return error == cudaSuccess ? launch_router_dlogits_plain(args.dlogits, stream) : error;
    }};
template <>
inline constexpr Op<RoundedGradientArguments> kOp<RoundedGradientArguments>{
    .fast = kOfAnySms<launch_router_dlogits_rounded>,
    .plain = [](RoundedGradientArguments const& args, cudaStream_t stream) {
      cudaError_t const error = launch_dscores_plain(args.dscores, stream);
      return error == cudaSuccess ? launch_router_dlogits_rounded_plain(args.rounded, stream)
                                  : error;
    }};
template <>
inline constexpr Op<RouterDgradArguments> kOp<RouterDgradArguments>{
    .fast = launch_router_dgrad, .plain = launch_router_dgrad_plain};
template <>
inline constexpr Op<RouterWgradArguments> kOp<RouterWgradArguments>{
    .fast = launch_router_wgrad, .plain = launch_router_wgrad_plain};
template <>
inline constexpr Op<RouterLossArguments> kOp<RouterLossArguments>{
    .fast = kOfAnySms<launch_router_loss>, .plain = launch_router_loss_plain};
template <>
inline constexpr Op<BiasGradientArguments> kOp<BiasGradientArguments>{
    .fast = kOfAnySms<launch_bias_gradient>, .plain = launch_bias_gradient_plain};

}  // namespace tessera::cuda
