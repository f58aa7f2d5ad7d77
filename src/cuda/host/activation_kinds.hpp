// SPDX-License-Identifier: Apache-2.0
// From an activation at run time to the instances of it: each activation has a file of its own.
#pragma once

#include <type_traits>

#include "projection.hpp"

namespace tessera::cuda {

// launch(std::integral_constant<ActivationKind, kind>{})
template <class Launch>
cudaError_t with_activation_kind(ActivationKind kind, Launch launch) {
  using enum ActivationKind;
  switch (kind) {
    case swiglu:
      return launch(std::integral_constant<ActivationKind, swiglu>{});
    case geglu:
      return launch(std::integral_constant<ActivationKind, geglu>{});
    case geglu_erf:
      return launch(std::integral_constant<ActivationKind, geglu_erf>{});
    case reglu:
      return launch(std::integral_constant<ActivationKind, reglu>{});
    case clamped_swiglu:
      return launch(std::integral_constant<ActivationKind, clamped_swiglu>{});
    case relu:
      return launch(std::integral_constant<ActivationKind, relu>{});
    case relu2:
      return launch(std::integral_constant<ActivationKind, relu2>{});
    case silu:
      return launch(std::integral_constant<ActivationKind, silu>{});
    case gelu:
      return launch(std::integral_constant<ActivationKind, gelu>{});
    case gelu_erf:
      return launch(std::integral_constant<ActivationKind, gelu_erf>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace tessera::cuda
