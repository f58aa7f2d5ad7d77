// SPDX-License-Identifier: Apache-2.0
// Element types as error texts call them.
#pragma once

#include "tessera/tensor.hpp"

namespace tessera::core {

inline char const* dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::fp32:
      return "fp32";
    case DType::bf16:
      return "bf16";
    case DType::fp16:
      return "fp16";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
    case DType::uint8:
      return "uint8";
    case DType::fp8_e4m3:
      return "fp8_e4m3";
    case DType::e8m0:
      return "e8m0";
    case DType::none:
      return "none";
  }
  return "unknown";
}

}  // namespace tessera::core
