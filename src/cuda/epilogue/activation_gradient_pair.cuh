// SPDX-License-Identifier: Apache-2.0
// The arithmetic that epilogues of down_projection_dgrad share.
#pragma once

#include "../arch/approx_math.cuh"
#include "activation_math.cuh"

namespace tessera::cuda::gemm {

// The backward pass of two neighbouring columns, with s the row's score: t and packed (g, u) become (dg, du) and
// a' = s a, each value rounded once; ds grows by t a.
template <ActivationKind kKind>
__device__ __forceinline__ void differentiate_pair(Activation const& act, float t_left,
                                                   float t_right, float s, uint32_t& g, uint32_t& u,
                                                   uint32_t& a, float& ds) {
  using Function = ActivationFunction<kKind>;
  float2 const gate = arch::unpack_bf16(g);
  float2 const up = arch::unpack_bf16(u);
  auto const low = Function::backward(act, gate.x, up.x, s * t_left);
  auto const high = Function::backward(act, gate.y, up.y, s * t_right);
  ds = fmaf(t_left, low.a, ds);
  ds = fmaf(t_right, high.a, ds);
  g = arch::pack_bf16(low.dg, high.dg);
  u = arch::pack_bf16(low.du, high.du);
  a = arch::pack_bf16(s * low.a, s * high.a);
}

}  // namespace tessera::cuda::gemm
