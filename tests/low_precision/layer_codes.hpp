// SPDX-License-Identifier: Apache-2.0
// Codes of a layer's weights, in blocks of 128, in tests of layers that read them.
#pragma once

#include <cstdint>

#include "tessera/low_precision.hpp"
#include "tessera/moe.hpp"

namespace tessera::low_precision_tests {

/// All codes and scales that a layer of `desc` may read. make(dtype, shape) returns a tensor with memory.
template <class Make>
QuantisedWeights room_for_codes(MoeDesc const& desc, Make&& make) {
  std::int64_t const e = desc.shape.experts, d = desc.shape.hidden, n = desc.shape.intermediate,
                     w = desc.up_width();
  return {.up = make(DType::fp8_e4m3, {e, w, n, d}),
          .up_transposed = make(DType::fp8_e4m3, {e, d, w * n}),
          .down = make(DType::fp8_e4m3, {e, d, n}),
          .down_transposed = make(DType::fp8_e4m3, {e, n, d}),
          .up_scales = make(DType::fp32, {e, n / 128, d / 128, w}),
          .down_scales = make(DType::fp32, {e, d / 128, n / 128})};
}

/// The same, as calls of a layer take them.
inline WeightCodes as_read(QuantisedWeights const& codes) {
  return {.up = codes.up,
          .up_scales = codes.up_scales,
          .down = codes.down,
          .down_scales = codes.down_scales,
          .up_transposed = codes.up_transposed,
          .down_transposed = codes.down_transposed};
}

}  // namespace tessera::low_precision_tests
