// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_bound.hpp"

#include <blis.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace tessera::cli {
namespace {

/// A row-major matrix, or its transpose.
struct Operand {
  float* data;
  std::int64_t row_stride, col_stride;
};
Operand rows_of(float* data, std::int64_t columns) { return {data, columns, 1}; }
Operand transposed(Operand const& m) { return {m.data, m.col_stride, m.row_stride}; }

void multiply(std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t gemm_k, Operand const& a,
              Operand const& b, Operand const& c) {
  if (gemm_m == 0) return;
  float one = 1, zero = 0;
  bli_sgemm(BLIS_NO_TRANSPOSE, BLIS_NO_TRANSPOSE, gemm_m, gemm_n, gemm_k, &one, a.data,
            a.row_stride, a.col_stride, b.data, b.row_stride, b.col_stride, &zero, c.data,
            c.row_stride, c.col_stride);
}

/// Small non-zero numbers, so that no product is trivial or denormal.
std::vector<float> filled(std::int64_t count) {
  std::vector<float> values(count);
  for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 251 - 125) / 128;
  return values;
}

}  // namespace

BlasBound::BlasBound(Context const& context, MoeDesc const& desc, std::int64_t rows)
    : context_(context),
      hidden_(desc.shape.hidden),
      intermediate_(desc.shape.intermediate),
      up_columns_(desc.up_width() * desc.shape.intermediate) {
  std::int64_t const experts = desc.shape.experts;
  for (std::int64_t e = 0; e < experts; ++e) {
    std::int64_t const first = rows * e / experts;
    experts_.push_back({first, rows * (e + 1) / experts - first});
  }
  x_ = filled(rows * hidden_);
  y_ = filled(rows * hidden_);
  h_ = filled(rows * up_columns_);
  a_ = filled(rows * intermediate_);
  w_up_ = filled(experts * up_columns_ * hidden_);
  w_down_ = filled(experts * hidden_ * intermediate_);
  dw_up_ = w_up_;
  dw_down_ = w_down_;
}

void BlasBound::forward() {
  context_.parallel_for(std::ssize(experts_), [this](std::int64_t e) {
    auto const [first, rows] = experts_[e];
    Operand const x = rows_of(&x_[first * hidden_], hidden_);
    Operand const h = rows_of(&h_[first * up_columns_], up_columns_);
    Operand const a = rows_of(&a_[first * intermediate_], intermediate_);
    Operand const y = rows_of(&y_[first * hidden_], hidden_);
    Operand const w_up = rows_of(&w_up_[e * up_columns_ * hidden_], hidden_);
    Operand const w_down = rows_of(&w_down_[e * hidden_ * intermediate_], intermediate_);
    multiply(rows, up_columns_, hidden_, x, transposed(w_up), h);
    multiply(rows, hidden_, intermediate_, a, transposed(w_down), y);
  });
}

void BlasBound::backward() {
  context_.parallel_for(std::ssize(experts_), [this](std::int64_t e) {
    auto const [first, rows] = experts_[e];
    Operand const x = rows_of(&x_[first * hidden_], hidden_);
    Operand const h = rows_of(&h_[first * up_columns_], up_columns_);
    Operand const a = rows_of(&a_[first * intermediate_], intermediate_);
    Operand const y = rows_of(&y_[first * hidden_], hidden_);
    Operand const w_up = rows_of(&w_up_[e * up_columns_ * hidden_], hidden_);
    Operand const w_down = rows_of(&w_down_[e * hidden_ * intermediate_], intermediate_);
    Operand const dw_up = rows_of(&dw_up_[e * up_columns_ * hidden_], hidden_);
    Operand const dw_down = rows_of(&dw_down_[e * hidden_ * intermediate_], intermediate_);
    multiply(rows, intermediate_, hidden_, y, w_down, a);
    multiply(rows, hidden_, up_columns_, h, w_up, y);
    multiply(hidden_, intermediate_, rows, transposed(y), a, dw_down);
    multiply(up_columns_, hidden_, rows, transposed(h), x, dw_up);
  });
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double copy_bytes_per_second(Context const& context) {
  constexpr std::int64_t kChunk = 1 << 20, kChunks = 128;  // bytes; far beyond the caches
  std::vector<char> from(kChunk * kChunks, 1), to(kChunk * kChunks, 2);
  double best = 0;
  for (int repeat = 0; repeat < 7; ++repeat) {
    double const start = now_seconds();
    context.parallel_for(kChunks, [&](std::int64_t chunk) {
      std::memcpy(&to[chunk * kChunk], &from[chunk * kChunk], kChunk);
    });
    best = std::max(best, 2.0 * kChunk * kChunks / (now_seconds() - start));
  }
  return best;
}

}  // namespace tessera::cli
