// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel/gemm_kernels.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#include "cpu/parallel/gemm_kernel_set.hpp"

namespace tessera::cpu {
namespace {

struct Avx2 {
  static constexpr int kLanes = 8, kRows = 6;
  static constexpr bool kPairs = false;
  using Words = Vectors<kLanes>::Words;
  using Sum = __m256;
  static Words widened(void const* from) {
    return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<__m128i const*>(from)));
  }
  static __m256 broadcast(Word const* from) {
    return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(*from)));
  }
  static __m256 load(Word const* from) {
    return _mm256_loadu_ps(reinterpret_cast<float const*>(from));
  }
  static __m256 multiply_add(__m256 a, __m256 b, __m256 sum) { return _mm256_fmadd_ps(a, b, sum); }
};

}  // namespace

GemmKernels const* avx2_gemm_kernels() noexcept {
  static constexpr GemmKernels kKernels = make_kernels<Avx2>("AVX2 FMA, 6 x 16 tiles");
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kKernels : nullptr;
}

}  // namespace tessera::cpu
#else
namespace tessera::cpu {
GemmKernels const* avx2_gemm_kernels() noexcept { return nullptr; }
}  // namespace tessera::cpu
#endif
