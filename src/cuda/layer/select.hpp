// SPDX-License-Identifier: Apache-2.0
// The one place that chooses between an op's fast kernel, one for few tokens where it has that, and its plain twin:
// `refuse` says why not a fast one,
// `launch` does what it says.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/aggregate.hpp"
#include "cuda/host/bias_gradient.hpp"
#include "cuda/host/metadata.hpp"
#include "cuda/host/projection.hpp"
#include "cuda/host/projection_backward.hpp"
#include "cuda/host/route.hpp"
#include "cuda/host/router_backward.hpp"
#include "cuda/host/router_loss.hpp"

namespace tessera::cuda {

Refusal refuse(RouterLogitsArguments const& args) noexcept;
Refusal refuse(RouteArguments const& args) noexcept;
Refusal refuse(MetadataArguments const& args) noexcept;
Refusal refuse(UpProjectionFwdArguments const& args) noexcept;
Refusal refuse(DownProjectionFwdArguments const& args) noexcept;
Refusal refuse(AggregateArguments const& args) noexcept;
Refusal refuse(DownProjectionDgradArguments const& args) noexcept;
Refusal refuse(UpProjectionDgradArguments const& args) noexcept;
Refusal refuse(DownProjectionWgradArguments const& args) noexcept;
Refusal refuse(UpProjectionWgradArguments const& args) noexcept;
Refusal refuse(RouterGradientArguments const& args) noexcept;
Refusal refuse(RouterDgradArguments const& args) noexcept;
Refusal refuse(RouterWgradArguments const& args) noexcept;
Refusal refuse(RouterLossArguments const& args) noexcept;
Refusal refuse(BiasGradientArguments const& args) noexcept;

cudaError_t launch(RouterLogitsArguments const& args, int sm_count, cudaStream_t stream) noexcept;
cudaError_t launch(RouteArguments const& args, int sm_count, cudaStream_t stream) noexcept;
cudaError_t launch(MetadataArguments const& args, int sm_count, cudaStream_t stream) noexcept;
cudaError_t launch(UpProjectionFwdArguments const& args, int sm_count,
                   cudaStream_t stream) noexcept;
cudaError_t launch(DownProjectionFwdArguments const& args, int sm_count,
                   cudaStream_t stream) noexcept;
cudaError_t launch(AggregateArguments const& args, int sm_count, cudaStream_t stream) noexcept;
cudaError_t launch(DownProjectionDgradArguments const& args, int sm_count,
                   cudaStream_t stream) noexcept;
cudaError_t launch(UpProjectionDgradArguments const& args, int sm_count,
                   cudaStream_t stream) noexcept;
cudaError_t launch(DownProjectionWgradArguments const& args, int sm_count,
                   cudaStream_t stream) noexcept;
cudaError_t launch(UpProjectionWgradArguments const& args, int sm_count,
                   cudaStream_t stream) noexcept;
cudaError_t launch(RouterGradientArguments const& args, int sm_count, cudaStream_t stream) noexcept;
cudaError_t launch(RouterDgradArguments const& args, int sm_count, cudaStream_t stream) noexcept;
cudaError_t launch(RouterWgradArguments const& args, int sm_count, cudaStream_t stream) noexcept;
cudaError_t launch(RouterLossArguments const& args, int sm_count, cudaStream_t stream) noexcept;
cudaError_t launch(BiasGradientArguments const& args, int sm_count, cudaStream_t stream) noexcept;

/// Whether the kernel for few tokens serves a call.
bool prefers_gemv(RouterLogitsArguments const& args) noexcept;
bool prefers_gemv(UpProjectionFwdArguments const& args) noexcept;
bool prefers_gemv(DownProjectionFwdArguments const& args) noexcept;
template <class Arguments>
bool prefers_gemv(Arguments const&) noexcept {  // the other ops have none
  return false;
}

/// Launched one right after the other, the second in the tail of the first, expert by expert, where both are fast.
template <class First, class Second>
void hand_over(First& first, Second& second, std::int32_t* gmem_word) noexcept {
  if (first.rows == 0 || refuse(first).refused() || refuse(second).refused()) return;
  if (prefers_gemv(first) || prefers_gemv(second)) return;
  first.gmem_handover = second.gmem_handover = reinterpret_cast<std::uint32_t*>(gmem_word);
}

}  // namespace tessera::cuda
