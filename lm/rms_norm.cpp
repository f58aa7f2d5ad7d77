// SPDX-License-Identifier: Apache-2.0
#include "lm/rms_norm.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "lm/simd.hpp"

namespace tessera::lm {

namespace {

constexpr std::int64_t kRowBlock = 64;  // rows per task; also the unit in which dw is summed

TESSERA_LM_SIMD float normalise_row(std::int64_t width, float const* x, float const* w, float eps,
                                    float* y) {
  float const squares = lane_sum(width, [&](std::int64_t i) { return x[i] * x[i]; });
  float const inverse = 1 / std::sqrt(squares / static_cast<float>(width) + eps);
  for (std::int64_t i = 0; i < width; ++i) y[i] = w[i] * (x[i] * inverse);
  return inverse;
}

TESSERA_LM_SIMD void normalise_row_bwd(std::int64_t width, float const* x, float const* w,
                                       float inverse, float const* dy, bool add, float* dx,
                                       float* dw) {
  float const dot = lane_sum(width, [&](std::int64_t i) { return w[i] * dy[i] * x[i]; });
  float const mean = dot * inverse / static_cast<float>(width);
  for (std::int64_t i = 0; i < width; ++i) {
    float const unit = x[i] * inverse;
    float const incoming = dy[i];
    dw[i] += incoming * unit;
    float const before = add ? dx[i] : 0.0f;
    dx[i] = before + (w[i] * incoming - unit * mean) * inverse;
  }
}

}  // namespace

void rms_norm_fwd(Context const& context, std::int64_t rows, Rows<float const> x, float const* w,
                  float eps, Rows<float> y, float* inverse_rms) {
  context.parallel_for((rows + kRowBlock - 1) / kRowBlock, [&](std::int64_t block) {
    std::int64_t const end = std::min(rows, (block + 1) * kRowBlock);
    for (std::int64_t i = block * kRowBlock; i < end; ++i) {
      inverse_rms[i] = normalise_row(x.width, x.row(i), w, eps, y.row(i));
    }
  });
}

void rms_norm_bwd(Context const& context, std::int64_t rows, Rows<float const> x, float const* w,
                  float const* inverse_rms, Rows<float const> dy, bool add_to_dx, Rows<float> dx,
                  float* dw) {
  std::int64_t const blocks = (rows + kRowBlock - 1) / kRowBlock;
  std::vector<float> partials(static_cast<std::size_t>(blocks * x.width), 0.0f);
  context.parallel_for(blocks, [&](std::int64_t block) {
    float* const partial = partials.data() + block * x.width;
    std::int64_t const end = std::min(rows, (block + 1) * kRowBlock);
    for (std::int64_t i = block * kRowBlock; i < end; ++i) {
      normalise_row_bwd(x.width, x.row(i), w, inverse_rms[i], dy.row(i), add_to_dx, dx.row(i),
                        partial);
    }
  });
  std::fill_n(dw, x.width, 0.0f);
  for (std::int64_t block = 0; block < blocks; ++block) {
    float const* const partial = partials.data() + block * x.width;
    for (std::int64_t i = 0; i < x.width; ++i) dw[i] += partial[i];
  }
}

}  // namespace tessera::lm
