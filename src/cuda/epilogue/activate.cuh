// SPDX-License-Identifier: Apache-2.0
// An activation function that is known at run time alone, for kernels that seldom need it.
#pragma once

#include "activation_math.cuh"

namespace tessera::cuda::gemm {

// a = f(g, u)
__device__ __forceinline__ float activate(Activation const& act, float g, float u) {
  using enum ActivationKind;
  switch (act.kind) {
    case swiglu:
      return ActivationFunction<swiglu>::forward(act, g, u);
    case geglu:
      return ActivationFunction<geglu>::forward(act, g, u);
    case geglu_erf:
      return ActivationFunction<geglu_erf>::forward(act, g, u);
    case reglu:
      return ActivationFunction<reglu>::forward(act, g, u);
    case clamped_swiglu:
      return ActivationFunction<clamped_swiglu>::forward(act, g, u);
    case relu:
      return ActivationFunction<relu>::forward(act, g, u);
    case relu2:
      return ActivationFunction<relu2>::forward(act, g, u);
    case silu:
      return ActivationFunction<silu>::forward(act, g, u);
    case gelu:
      return ActivationFunction<gelu>::forward(act, g, u);
    case gelu_erf:
      return ActivationFunction<gelu_erf>::forward(act, g, u);
  }
  return 0;
}

}  // namespace tessera::cuda::gemm
