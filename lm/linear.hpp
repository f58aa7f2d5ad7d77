// SPDX-License-Identifier: Apache-2.0
// Dense GEMMs of the model, by BLIS:
//   y = x w^T        dx = dy w        dw = dy^T x        with x [T,in], w [out,in], y [T,out]
// Work is cut into blocks of fixed size, whatever the number of threads: equal bits for all of them.
#pragma once

#include <cstdint>

#include "tessera/context.hpp"

namespace tessera::lm {

/// A strided view of a matrix, strides in elements.
template <class Element>
struct Matrix {
  Element* data;
  std::int64_t row_stride;
  std::int64_t column_stride = 1;

  [[nodiscard]] Matrix transposed() const { return {data, column_stride, row_stride}; }
};

/// c = alpha * a b + beta * c on the calling thread; c [m,n], a [m,k], b [k,n].
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Matrix<float const> a,
          Matrix<float const> b, float beta, Matrix<float> c);

struct LinearShape {
  std::int64_t rows;  ///< T
  std::int64_t in, out;
};

void linear_fwd(Context const& context, LinearShape shape, float const* x, float const* w,
                float* y);
void linear_dgrad(Context const& context, LinearShape shape, float const* dy, float const* w,
                  float* dx);
void linear_wgrad(Context const& context, LinearShape shape, float const* dy, float const* x,
                  float* dw);

}  // namespace tessera::lm
