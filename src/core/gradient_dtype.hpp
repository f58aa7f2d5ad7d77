// SPDX-License-Identifier: Apache-2.0
// The type of a call's weight gradients: all have the same.
#pragma once

#include "tessera/moe.hpp"

namespace tessera::core {

/// fp32 where the first gradient that is present has it, else the storage type.
inline DType gradient_dtype(MoeDesc const& desc, ExpertGradients const& gradients) noexcept {
  for (Tensor const* const tensor :
       {&gradients.dw_up, &gradients.dw_gate, &gradients.dw_down, &gradients.db_up,
        &gradients.db_gate, &gradients.db_down, &gradients.dw_router, &gradients.db_router}) {
    if (tensor->present()) return tensor->dtype == DType::fp32 ? DType::fp32 : desc.dtype;
  }
  return desc.dtype;
}

}  // namespace tessera::core
