// SPDX-License-Identifier: Apache-2.0
// The types of a call's weight gradients: all have the same, but for those of an fp32 router beside other experts.
#pragma once

#include "tessera/moe.hpp"

namespace tessera::core {

/// True if the router is fp32 and the experts are not.
inline bool has_fp32_router(MoeDesc const& desc) noexcept {
  return desc.router_storage() == DType::fp32 && desc.dtype != DType::fp32;
}

/// fp32 where the first gradient that is present has it, else the storage type. An fp32 router's do not say.
inline DType gradient_dtype(MoeDesc const& desc, ExpertGradients const& gradients) noexcept {
  bool const router_too = !has_fp32_router(desc);
  Tensor const none;
  Tensor const* const dw_router = router_too ? &gradients.dw_router : &none;
  Tensor const* const db_router = router_too ? &gradients.db_router : &none;
  for (Tensor const* const tensor :
       {&gradients.dw_up, &gradients.dw_gate, &gradients.dw_down, &gradients.db_up,
        &gradients.db_gate, &gradients.db_down, dw_router, db_router}) {
    if (tensor->present()) return tensor->dtype == DType::fp32 ? DType::fp32 : desc.dtype;
  }
  return desc.dtype;
}

/// The type of dw_router and db_router.
inline DType router_gradient_dtype(MoeDesc const& desc, ExpertGradients const& gradients) noexcept {
  return has_fp32_router(desc) ? DType::fp32 : gradient_dtype(desc, gradients);
}

}  // namespace tessera::core
