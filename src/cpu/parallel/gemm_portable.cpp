// SPDX-License-Identifier: Apache-2.0
// Vectors of four that every compiler knows; the product is rounded before it is added.
#include "cpu/parallel/gemm_kernel_set.hpp"

namespace tessera::cpu {
namespace {

struct Portable {
  static constexpr int kLanes = 4, kRows = 4;
  static constexpr bool kPairs = false;
  using Words = Vectors<kLanes>::Words;
  typedef float Sum __attribute__((vector_size(16)));
  static Words widened(void const* from) {
    std::uint16_t half[kLanes];
    std::memcpy(half, from, sizeof(half));
    return Words{half[0], half[1], half[2], half[3]};
  }
  static Sum broadcast(Word const* from) {
    float const value = __builtin_bit_cast(float, *from);
    return Sum{value, value, value, value};
  }
  static Sum load(Word const* from) {
    Sum out;
    std::memcpy(&out, from, sizeof(out));
    return out;
  }
  static Sum multiply_add(Sum a, Sum b, Sum sum) { return sum + a * b; }
};

}  // namespace

GemmKernels const* portable_gemm_kernels() noexcept {
  static constexpr GemmKernels kKernels = make_kernels<Portable>("portable, 4 x 8 tiles");
  return &kKernels;
}

}  // namespace tessera::cpu
