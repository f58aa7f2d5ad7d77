// SPDX-License-Identifier: Apache-2.0
// vdpbf16ps: sum += a_odd*b_odd, then a_even*b_even, each product added with one rounding; denormals count as 0.
#include "cpu/parallel/gemm_kernels.hpp"

#if defined(__AVX512BF16__)
#include <immintrin.h>

#include "cpu/parallel/gemm_kernel_set.hpp"

namespace tessera::cpu {
namespace {

struct Avx512Bf16 {
  static constexpr int kLanes = 16, kRows = 14;
  static constexpr bool kPairs = true;
  using Words = Vectors<kLanes>::Words;
  using Sum = __m512;
  static Words widened(void const* from) {
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<__m256i const*>(from)));
  }
  static __m512bh broadcast(Word const* from) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(*from));
  }
  static __m512bh load(Word const* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static __m512 multiply_add(__m512bh a, __m512bh b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, a, b);
  }
};

}  // namespace

GemmKernels const* avx512_bf16_gemm_kernels() noexcept {
  static constexpr GemmKernels kKernels = make_kernels<Avx512Bf16>("AVX-512 BF16, 14 x 32 tiles");
  bool const runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
  return runs ? &kKernels : nullptr;
}

// AMD's cores start vdpbf16ps as often as an fp32 FMA of as many lanes. Intel's start it once in two cycles and the FMA
// twice in one, so that the same products take them twice as long.
bool avx512_bf16_pays() noexcept {
  return avx512_bf16_gemm_kernels() != nullptr && !__builtin_cpu_is("intel");
}

}  // namespace tessera::cpu
#else
namespace tessera::cpu {
GemmKernels const* avx512_bf16_gemm_kernels() noexcept { return nullptr; }
bool avx512_bf16_pays() noexcept { return false; }
}  // namespace tessera::cpu
#endif
