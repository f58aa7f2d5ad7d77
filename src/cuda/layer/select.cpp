// SPDX-License-Identifier: Apache-2.0
#include "cuda/layer/select.hpp"

#include <cuda_bf16.h>

#include <cstdio>

namespace tessera::cuda {
namespace {

using Int = long long;  // for %lld

constexpr std::int64_t kMaxExperts = 1024, kMaxTopK = 32, kVector = 8;
constexpr std::uintptr_t kAlignment = 16;

template <class... Values>
Refusal refusal(char const* format, Values... values) noexcept {
  Refusal out;
  std::snprintf(out.text, sizeof(out.text), format, values...);
  return out;
}

bool aligned(void const* gmem) noexcept {
  return reinterpret_cast<std::uintptr_t>(gmem) % kAlignment == 0;
}

}  // namespace

Refusal refuse(RouterLogitsArguments const& args) noexcept { return refuse_router_logits(args); }
Refusal refuse(UpProjectionFwdArguments const& args) noexcept {
  return refuse_up_projection_fwd(args);
}
Refusal refuse(DownProjectionFwdArguments const& args) noexcept {
  return refuse_down_projection_fwd(args);
}

Refusal refuse(RouteArguments const& args) noexcept {
  if (args.experts > kMaxExperts) {
    return refusal("experts=%d: at most %lld", args.experts, static_cast<Int>(kMaxExperts));
  }
  if (args.top_k > kMaxTopK) {
    return refusal("top_k=%d: at most %lld", args.top_k, static_cast<Int>(kMaxTopK));
  }
  return {};
}

Refusal refuse(MetadataArguments const& args) noexcept {
  if (args.experts > kMaxExperts) {
    return refusal("experts=%d: at most %lld", args.experts, static_cast<Int>(kMaxExperts));
  }
  return {};
}

Refusal refuse(AggregateArguments const& args) noexcept {
  if (args.hidden % kVector != 0 || args.o_pitch % kVector != 0) {
    return refusal("hidden=%lld, rows of o %lld apart: multiples of %lld are needed",
                   static_cast<Int>(args.hidden), static_cast<Int>(args.o_pitch),
                   static_cast<Int>(kVector));
  }
  if (!aligned(args.gmem_y) || !aligned(args.gmem_o)) {
    return refusal("%s", "o: its address is no multiple of 16 bytes");
  }
  return {};
}

cudaError_t launch(RouterLogitsArguments const& args, int sm_count, cudaStream_t stream) noexcept {
  return refuse(args).refused() ? launch_router_logits_plain(args, stream)
                                : launch_router_logits(args, sm_count, stream);
}
cudaError_t launch(UpProjectionFwdArguments const& args, int sm_count,
                   cudaStream_t stream) noexcept {
  return refuse(args).refused() ? launch_up_projection_fwd_plain(args, stream)
                                : launch_up_projection_fwd(args, sm_count, stream);
}
cudaError_t launch(DownProjectionFwdArguments const& args, int sm_count,
                   cudaStream_t stream) noexcept {
  return refuse(args).refused() ? launch_down_projection_fwd_plain(args, stream)
                                : launch_down_projection_fwd(args, sm_count, stream);
}
cudaError_t launch(RouteArguments const& args, int, cudaStream_t stream) noexcept {
  return refuse(args).refused() ? launch_route_plain(args, stream) : launch_route(args, stream);
}
cudaError_t launch(MetadataArguments const& args, int, cudaStream_t stream) noexcept {
  return refuse(args).refused() ? launch_metadata_plain(args, stream)
                                : launch_metadata(args, stream);
}
cudaError_t launch(AggregateArguments const& args, int, cudaStream_t stream) noexcept {
  return refuse(args).refused() ? launch_aggregate_plain<__nv_bfloat16>(args, stream)
                                : launch_aggregate<__nv_bfloat16>(args, stream);
}

}  // namespace tessera::cuda
