// SPDX-License-Identifier: Apache-2.0
// RMSNorm of each row:  y = w * x / r,  r = sqrt(mean(x^2) + eps)
//   dx = (w*dy - x/r * mean(w*dy * x/r)) / r        dw = sum over rows of dy * x/r
#pragma once

#include <cstdint>

#include "tessera/context.hpp"

namespace tessera::lm {

/// Rows of `width` values: `groups` adjacent ones every `stride` values (the heads of a token), or one.
template <class Element>
struct Rows {
  Element* data;
  std::int64_t width;
  std::int64_t groups;
  std::int64_t stride;

  [[nodiscard]] Element* row(std::int64_t i) const {
    return data + (i / groups) * stride + (i % groups) * width;
  }
};

/// One row after the other.
template <class Element>
Rows<Element> dense_rows(Element* data, std::int64_t width) {
  return {data, width, 1, width};
}

/// Writes y, and 1/r into inverse_rms [rows] for the backward pass.
void rms_norm_fwd(Context const& context, std::int64_t rows, Rows<float const> x, float const* w,
                  float eps, Rows<float> y, float* inverse_rms);

/// Writes dx (or adds to it) and dw [width]. dx may be dy.
void rms_norm_bwd(Context const& context, std::int64_t rows, Rows<float const> x, float const* w,
                  float const* inverse_rms, Rows<float const> dy, bool add_to_dx, Rows<float> dx,
                  float* dw);

}  // namespace tessera::lm
