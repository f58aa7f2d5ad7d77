// SPDX-License-Identifier: Apache-2.0
// What else the layer's tables of kernels name: a program takes none of it but what it defines, in whose place these
// definitions, which are weak, do not come.
#include <cstdio>

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include "cuda/host/aggregate.hpp"
#include "cuda/host/bias_gradient.hpp"
#include "cuda/host/choose_tokens.hpp"
#include "cuda/host/experts_fwd.hpp"
#include "cuda/host/low_precision.hpp"
#include "cuda/host/metadata.hpp"
#include "cuda/host/mxfp8.hpp"
#include "cuda/host/projection.hpp"
#include "cuda/host/projection_backward.hpp"
#include "cuda/host/projection_sm100.hpp"
#include "cuda/host/route.hpp"
#include "cuda/host/router_backward.hpp"
#include "cuda/host/router_dlogits_rounded.hpp"
#include "cuda/host/split_fp32.hpp"
#include "cuda/host/token_mask.hpp"
#include "cuda/layer/routing_tables.hpp"
#include "tests/emulator/sm100/layer_cuda.hpp"

namespace tessera::cuda {

cudaError_t never(char const* kernel) {
  std::fprintf(stderr, "%s: not a kernel that this layer takes\n", kernel);
  return cudaErrorNotSupported;
}

#define NEVER(kernel, Arguments) \
  [[gnu::weak]] cudaError_t kernel(Arguments const&, cudaStream_t) { return never(#kernel); }
#define NEVER_ON_SMS(kernel, Arguments) \
  [[gnu::weak]] cudaError_t kernel(Arguments const&, int, cudaStream_t) { return never(#kernel); }

NEVER_ON_SMS(launch_down_projection_dgrad_e4m3, DownProjectionDgradE4m3Arguments)
NEVER_ON_SMS(launch_down_projection_fwd_e4m3, DownProjectionFwdE4m3Arguments)
NEVER_ON_SMS(launch_up_projection_dgrad_e4m3, UpProjectionDgradE4m3Arguments)
NEVER_ON_SMS(launch_up_projection_fwd_e4m3, UpProjectionFwdE4m3Arguments)
NEVER_ON_SMS(launch_down_projection_dgrad_mxfp8, DownProjectionDgradMxfp8Arguments)
NEVER_ON_SMS(launch_down_projection_fwd_mxfp8, DownProjectionFwdMxfp8Arguments)
NEVER_ON_SMS(launch_up_projection_dgrad_mxfp8, UpProjectionDgradMxfp8Arguments)
NEVER_ON_SMS(launch_up_projection_fwd_mxfp8, UpProjectionFwdMxfp8Arguments)
NEVER_ON_SMS(launch_down_projection_dgrad_sm100, DownProjectionDgradArguments)
NEVER_ON_SMS(launch_down_projection_fwd_sm100, DownProjectionFwdArguments)
NEVER_ON_SMS(launch_up_projection_dgrad_sm100, UpProjectionDgradArguments)
NEVER_ON_SMS(launch_up_projection_fwd_sm100, UpProjectionFwdArguments)
NEVER_ON_SMS(launch_projection_wgrad_sm100, WgradArguments)
NEVER_ON_SMS(launch_down_projection_wgrad, DownProjectionWgradArguments)
NEVER_ON_SMS(launch_up_projection_wgrad, UpProjectionWgradArguments)
NEVER(launch_dequantise_rows, DequantiseRowsArguments)
NEVER(launch_quantise_rows, QuantiseRowsArguments)
NEVER(launch_quantise_weights, QuantiseWeightsArguments)
NEVER(launch_turn_scales, TurnScalesArguments)
NEVER(launch_dequantise_rows_mxfp8, DequantiseRowsMxfp8Arguments)
NEVER(launch_quantise_rows_mxfp8, QuantiseRowsMxfp8Arguments)
NEVER(launch_quantise_weights_mxfp8, QuantiseWeightsMxfp8Arguments)
NEVER_ON_SMS(launch_down_projection_dgrad, DownProjectionDgradArguments)
NEVER_ON_SMS(launch_up_projection_dgrad, UpProjectionDgradArguments)
NEVER(launch_down_projection_dgrad_plain, DownProjectionDgradArguments)
NEVER(launch_up_projection_dgrad_plain, UpProjectionDgradArguments)
NEVER(launch_wgrad_plain, WgradArguments)
NEVER_ON_SMS(launch_down_projection_fwd, DownProjectionFwdArguments)
NEVER_ON_SMS(launch_router_dgrad, RouterDgradArguments)
NEVER_ON_SMS(launch_router_logits, RouterLogitsArguments)
NEVER_ON_SMS(launch_router_wgrad, RouterWgradArguments)
NEVER_ON_SMS(launch_up_projection_fwd, UpProjectionFwdArguments)

NEVER(launch_bias_gradient, BiasGradientArguments)
NEVER(launch_bias_gradient_plain, BiasGradientArguments)
NEVER(launch_choose_tokens, ChooseTokensArguments)
NEVER_ON_SMS(launch_experts_fwd_few_tokens, ExpertsFwdArguments)
NEVER(launch_down_projection_fwd_plain, DownProjectionFwdArguments)
NEVER(launch_grouped_rows, GroupedRows)
NEVER(launch_mask_choice, MaskChoice)
NEVER(launch_merge_repeats_plain, MergeRepeatsArguments)
NEVER(launch_metadata_plain, MetadataArguments)
NEVER(launch_pack_dlogits, PackDlogits)
NEVER(launch_round_dlogits_plain, RoundDlogitsArguments)
NEVER(launch_route, RouteArguments)
NEVER(launch_route_outputs, RouteOutputs)
NEVER(launch_route_plain, RouteArguments)
NEVER(launch_router_dgrad_plain, RouterDgradArguments)
NEVER(launch_router_dlogits, RouterGradientArguments)
NEVER(launch_router_dlogits_plain, RouterDlogitsArguments)
NEVER(launch_router_dlogits_rounded, RoundedGradientArguments)
NEVER(launch_router_dlogits_rounded_plain, RoundedDlogitsArguments)
NEVER(launch_router_logits_gemv, RouterLogitsArguments)
NEVER(launch_router_logits_plain, RouterLogitsArguments)
NEVER(launch_router_wgrad_plain, RouterWgradArguments)
NEVER(launch_score_choice_plain, ScoreChoiceArguments)
NEVER(launch_split_fp32_plain, SplitArguments)
NEVER(launch_await_rows_plain, core::AwaitedRows)
NEVER(launch_token_order, TokenOrder)
NEVER(launch_up_projection_fwd_plain, UpProjectionFwdArguments)
NEVER(launch_zero_tail, ZeroTail)

template <>
NEVER(launch_aggregate_plain<__nv_bfloat16>, AggregateArguments)
template <>
NEVER_ON_SMS(launch_aggregate_beside<__nv_bfloat16>, AggregateBesideArguments)
cudaError_t launch_expert_counts(int32_t const*, int64_t, int32_t*, cudaStream_t) {
  return never("launch_expert_counts");
}
[[gnu::weak]] int32_t route_unit_slots(RouteArguments const&) { return 0; }
[[gnu::weak]] bool route_ranks_pairs(RouteArguments const&) { return false; }
[[gnu::weak]] cudaError_t launch_route_and_rank(RouteArguments const&, ChooseTokensArguments const&,
                                                cudaStream_t) {
  return never("launch_route_and_rank");
}

}  // namespace tessera::cuda

cudaError_t cudaMemcpy2DAsync(void*, std::size_t, void const*, std::size_t, std::size_t,
                              std::size_t, cudaMemcpyKind, cudaStream_t) {
  return tessera::cuda::never("cudaMemcpy2DAsync");
}
