// SPDX-License-Identifier: Apache-2.0
// Values in storage precision: rounding to nearest even, and the bytes a tensor holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/tensor.hpp"

namespace tessera::verify {

/// `value` rounded once to `dtype`; NaN and infinities stay what they are.
float round_to(DType dtype, float value) noexcept;
void round_all(DType dtype, std::span<float> values) noexcept;

/// Distance of the values of `dtype` around `value`: rounding to nearest is off by half of it at most. 0 for fp32.
float spacing_at(DType dtype, float value) noexcept;

/// Relative size of one rounding plus its headroom: 2^-8 bf16, 2^-11 fp16, 2^-21 fp32.
double unit_roundoff(DType dtype) noexcept;

/// Writes already rounded values as `dtype` to `to`, and reads them back. fp32, bf16, fp16.
void pack(DType dtype, std::span<float const> values, void* to) noexcept;
std::vector<float> unpack(DType dtype, void const* from, std::size_t count);

}  // namespace tessera::verify
