// SPDX-License-Identifier: Apache-2.0
#include "lm/linear.hpp"

// BLIS' own header has comments and declarations that -Wpedantic refuses.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wunused-function"
#include <blis.h>
#pragma GCC diagnostic pop

#include <algorithm>

namespace tessera::lm {

namespace {

constexpr std::int64_t kRowBlock = 128;    // rows of y or dx per task
constexpr std::int64_t kWeightBlock = 32;  // rows of dw per task: dw is small, its reduction long

// Calls body(first, count) for the blocks of [0, extent).
template <class Body>
void for_blocks(Context const& context, std::int64_t extent, std::int64_t block, Body const& body) {
  context.parallel_for((extent + block - 1) / block, [&](std::int64_t i) {
    std::int64_t const first = i * block;
    body(first, std::min(block, extent - first));
  });
}

}  // namespace

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Matrix<float const> a,
          Matrix<float const> b, float beta, Matrix<float> c) {
  // BLIS takes operands it only reads as non-const.
  bli_sgemm(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, m, n, k, &alpha, const_cast<float*>(a.data),
            a.row_stride, a.column_stride, const_cast<float*>(b.data), b.row_stride,
            b.column_stride, &beta, c.data, c.row_stride, c.column_stride);
}

void linear_fwd(Context const& context, LinearShape s, float const* x, float const* w, float* y) {
  for_blocks(context, s.rows, kRowBlock, [&](std::int64_t first, std::int64_t count) {
    gemm(count, s.out, s.in, 1, {x + first * s.in, s.in}, {w, 1, s.in}, 0,
         {y + first * s.out, s.out});
  });
}

void linear_dgrad(Context const& context, LinearShape s, float const* dy, float const* w,
                  float* dx) {
  for_blocks(context, s.rows, kRowBlock, [&](std::int64_t first, std::int64_t count) {
    gemm(count, s.in, s.out, 1, {dy + first * s.out, s.out}, {w, s.in}, 0,
         {dx + first * s.in, s.in});
  });
}

void linear_wgrad(Context const& context, LinearShape s, float const* dy, float const* x,
                  float* dw) {
  for_blocks(context, s.out, kWeightBlock, [&](std::int64_t first, std::int64_t count) {
    gemm(count, s.in, s.rows, 1, {dy + first, 1, s.out}, {x, s.in}, 0, {dw + first * s.in, s.in});
  });
}

}  // namespace tessera::lm
