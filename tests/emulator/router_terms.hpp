// SPDX-License-Identifier: Apache-2.0
// An fp32 router's weights, and the bf16 terms that they are split into.
#pragma once

#include <cmath>

#include "tests/emulator/memory.hpp"

namespace tessera::emulator {

// The three terms of fp32 weights, as host/split_fp32.hpp has them.
struct Terms {
  Bits high, middle, low;
};
inline Terms terms_of(float value) {
  Bits const high = round(value);
  float const rest = value - widen(high);
  Bits const middle = round(rest);
  return {high, middle, round(rest - widen(middle))};
}
inline float fp32_weight(int i) {
  return std::ldexp(static_cast<float>((i * 7919) % 16777213), -26);
}

}  // namespace tessera::emulator
