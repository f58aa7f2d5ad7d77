// SPDX-License-Identifier: Apache-2.0
// How the tensor cores of Hopper add up products of e4m3, as far as one H200 has shown it
// (docs/notebook/2026-11-27-fp8-up-projection.md): an instruction adds 32 products to an accumulator. It cuts all 33
// towards 0 at 13 fraction bits of the largest of them, and their sum once more at 13 of its own.
#pragma once

#include <algorithm>
#include <cmath>

namespace tessera::emulator {

constexpr int kE4m3Products = 32, kE4m3FractionBits = 13;

/// Cuts values towards 0 at 13 fraction bits of `largest`.
class CutE4m3 {
 public:
  explicit CutE4m3(double largest) : cuts_(largest != 0 && !std::isnan(largest)) {
    if (!cuts_) return;
    int const exponent = std::ilogb(largest) - kE4m3FractionBits;
    unit_ = std::ldexp(1.0, exponent);
    units_ = std::ldexp(1.0, -exponent);
  }
  double operator()(double value) const {
    return cuts_ ? std::trunc(value * units_) * unit_ : value;
  }

 private:
  bool cuts_;
  double unit_ = 1.0, units_ = 1.0;
};

/// An accumulator after 32 products, each of which fp32 holds exactly. NaN where one of them is.
inline float add_e4m3_products(float accumulator, float const (&products)[kE4m3Products]) {
  double largest = std::fabs(accumulator);
  for (float const p : products) largest = std::max(largest, std::fabs(double{p}));
  CutE4m3 const cut(largest);
  double sum = cut(accumulator);
  for (float const p : products) sum += cut(p);
  return static_cast<float>(CutE4m3(sum)(sum));
}

}  // namespace tessera::emulator
