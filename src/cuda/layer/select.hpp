// SPDX-License-Identifier: Apache-2.0
// The one place that chooses among the kernels of an op (ops.hpp): `refuse` says why a call cannot have the fast one,
// and `launch` launches what that leaves.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/host/experts_fwd.hpp"
#include "cuda/layer/architecture.hpp"
#include "cuda/layer/ops.hpp"
#include "cuda/tuning/sm100.hpp"

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
Refusal refuse(RoundedGradientArguments const& args) noexcept;
Refusal refuse(RouterDgradArguments const& args) noexcept;
Refusal refuse(RouterWgradArguments const& args) noexcept;
Refusal refuse(RouterLossArguments const& args) noexcept;
Refusal refuse(BiasGradientArguments const& args) noexcept;

/// Why the GEMMs of sm_100a do not serve a call that those of sm_90 serve.
Refusal refuse_sm100(RouterLogitsArguments const& args) noexcept;
Refusal refuse_sm100(UpProjectionFwdArguments const& args) noexcept;
Refusal refuse_sm100(DownProjectionDgradArguments const& args) noexcept;
Refusal refuse_sm100(RouterDgradArguments const& args) noexcept;
Refusal refuse_sm100(RouterWgradArguments const& args) noexcept;
template <class Arguments>
Refusal refuse_sm100(Arguments const&) noexcept {
  return {};
}

/// Why no fast kernel of an architecture serves a call.
template <class Arguments>
Refusal refuse(Arguments const& args, Architecture architecture) noexcept {
  Refusal const everywhere = refuse(args);
  bool const more = architecture == Architecture::sm_100 && !everywhere.refused();
  return more ? refuse_sm100(args) : everywhere;
}

/// True where a GEMM of sm_100a is multiplied by pairs of CTAs.
template <class Arguments>
bool takes_pairs(Arguments const& args, int sm_count) noexcept {
  if constexpr (std::is_base_of_v<WgradArguments, Arguments>) {
    return wgrad_takes_pairs_sm100(args.hidden, sm_count);
  } else {
    return takes_pairs_sm100(args.rows, args.experts, sm_count);
  }
}

/// True where the kernel for few tokens serves a call; of experts one of those of has_few_tokens() of plan.hpp.
bool prefers_few_tokens(RouterLogitsArguments const& args) noexcept;
bool prefers_few_tokens(ExpertsFwdArguments const& args) noexcept;

/// The kernel that serves a call.
template <class Arguments>
cudaError_t launch(Arguments const& args, Architecture architecture, int sm_count,
                   cudaStream_t stream) noexcept {
  constexpr Op<Arguments> const& op = kOp<Arguments>;
  static_assert(op.fast != nullptr && op.plain != nullptr, "ops.hpp has no row for this op");
  if constexpr (op.few_tokens != nullptr) {
    if (prefers_few_tokens(args)) return op.few_tokens(args, sm_count, stream);
  }
  if (refuse(args, architecture).refused()) return op.plain(args, stream);
  if constexpr (op.sm100 != nullptr) {
    if (architecture == Architecture::sm_100) return op.sm100(args, sm_count, stream);
  }
  return op.fast(args, sm_count, stream);
}

/// Launches two ops one right after the other. Where both are fast kernels of sm_90, the second starts in the tail of
/// the first.
template <class First, class Second>
void hand_over(First& first, Second& second, Architecture architecture,
               std::int32_t* gmem_word) noexcept {
  static_assert(kOp<First>.few_tokens == nullptr && kOp<Second>.few_tokens == nullptr,
                "who waits for a word needs a kernel that writes it: GEMMs alone do");
  if (architecture != Architecture::sm_90) return;
  if (first.rows == 0 || refuse(first).refused() || refuse(second).refused()) return;
  first.gmem_handover = second.gmem_handover = reinterpret_cast<std::uint32_t*>(gmem_word);
}

}  // namespace tessera::cuda
