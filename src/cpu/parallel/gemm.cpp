// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel/gemm.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wunused-function"
#include <blis.h>
#pragma GCC diagnostic pop

namespace tessera::cpu {

void gemm(std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t gemm_k, ConstMatrix a,
          ConstMatrix b, float beta, Matrix c) noexcept {
  float alpha = 1.0f;
  // BLIS takes its read-only operands as plain pointers and does not write them.
  bli_sgemm(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, gemm_m, gemm_n, gemm_k, &alpha,
            const_cast<float*>(a.data), a.row_stride, a.col_stride, const_cast<float*>(b.data),
            b.row_stride, b.col_stride, &beta, c.data, c.row_stride, c.col_stride);
}

}  // namespace tessera::cpu
