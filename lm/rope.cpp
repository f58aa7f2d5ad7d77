// SPDX-License-Identifier: Apache-2.0
#include "lm/rope.hpp"

#include <algorithm>
#include <cmath>

#include "lm/simd.hpp"

namespace tessera::lm {

namespace {

constexpr std::int64_t kRowBlock = 256;

TESSERA_LM_SIMD void rotate_row(std::int64_t half, float const* cosine, float const* sine,
                                float direction, float* x) {
  for (std::int64_t i = 0; i < half; ++i) {
    float const first = x[i], second = x[i + half];
    float const turned = direction * sine[i];
    x[i] = first * cosine[i] - second * turned;
    x[i + half] = second * cosine[i] + first * turned;
  }
}

void rotate_rows(Context const& context, std::int64_t rows, std::int64_t length, std::int64_t half,
                 float const* cosine, float const* sine, float direction, Rows<float> x) {
  context.parallel_for((rows + kRowBlock - 1) / kRowBlock, [&](std::int64_t block) {
    std::int64_t const end = std::min(rows, (block + 1) * kRowBlock);
    for (std::int64_t i = block * kRowBlock; i < end; ++i) {
      std::int64_t const position = i / x.groups % length;
      rotate_row(half, cosine + position * half, sine + position * half, direction, x.row(i));
    }
  });
}

}  // namespace

RopeTable::RopeTable(std::int64_t positions, std::int64_t head_dim, double theta)
    : half_(head_dim / 2) {
  for (std::int64_t position = 0; position < positions; ++position) {
    for (std::int64_t i = 0; i < half_; ++i) {
      double const exponent = -2.0 * static_cast<double>(i) / static_cast<double>(head_dim);
      double const angle = static_cast<double>(position) * std::pow(theta, exponent);
      cosine_.push_back(static_cast<float>(std::cos(angle)));
      sine_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

void RopeTable::rotate(Context const& context, std::int64_t rows, std::int64_t length,
                       Rows<float> x) const {
  rotate_rows(context, rows, length, half_, cosine_.data(), sine_.data(), 1, x);
}

void RopeTable::rotate_back(Context const& context, std::int64_t rows, std::int64_t length,
                            Rows<float> x) const {
  rotate_rows(context, rows, length, half_, cosine_.data(), sine_.data(), -1, x);
}

}  // namespace tessera::lm
