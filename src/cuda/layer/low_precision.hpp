// SPDX-License-Identifier: Apache-2.0
// The ops of a layer whose operands are quantised (Precision::fp8 and mxfp8), from the tensors of a call: projections
// and gradients of activations multiply codes, by the kernels of quantised_kernels.hpp; gradients of weights multiply
// bf16, x^ made of the codes that forward saved.
#pragma once

#include "cuda/host/low_precision.hpp"
#include "cuda/layer/architecture.hpp"
#include "cuda/layer/sequence.hpp"
#include "tessera/moe.hpp"

namespace tessera::cuda {

/// Refuses architectures without kernels for codes of the precision, and tensors whose addresses or strides are no
/// multiples of 16 bytes. Errors: unsupported.
Status check_quantised(Architecture architecture, MoeDesc const& desc,
                       MoeForwardArgs const& args) noexcept;
Status check_quantised(Architecture architecture, MoeDesc const& desc, MoeBackwardArgs const& args,
                       Pass pass) noexcept;

/// x to x8, weights to codes, up and down projection: x to the rows of y.
void add_quantised_projections(MoeDesc const& desc, MoeForwardArgs const& args,
                               ForwardPlan const& plan, std::byte* base, RoutingView const& tables,
                               void* gmem_y, Sequence& sequence) noexcept;

/// Makes h8 again, from x8: SavePolicy::x.
void add_h8(MoeDesc const& desc, MoeBackwardArgs const& args, BackwardPlan const& plan,
            std::byte* base, RoutingView const& tables, Sequence& sequence) noexcept;

/// `like` of codes of dO, w_down and h. dh8 is made too where dx is wanted.
void add_quantised_down_dgrad(MoeDesc const& desc, MoeBackwardArgs const& args,
                              BackwardPlan const& plan, std::byte* base,
                              DownProjectionDgradArguments const& like,
                              Sequence& sequence) noexcept;
/// `like` of codes of dh and w_up.
void add_quantised_up_dgrad(MoeDesc const& desc, MoeBackwardArgs const& args,
                            BackwardPlan const& plan, std::byte* base,
                            UpProjectionDgradArguments const& like, Sequence& sequence) noexcept;

/// x^ [T,d] in bf16, which gradients of weights read.
void add_dequantised_x(MoeDesc const& desc, MoeBackwardArgs const& args, void* gmem_x,
                       Sequence& sequence) noexcept;

}  // namespace tessera::cuda
