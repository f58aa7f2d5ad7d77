// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel/gemm_kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__FMA__)
#include <immintrin.h>

#include "cpu/parallel/gemm_kernel_set.hpp"

namespace tessera::cpu {
namespace {

struct Avx512 {
  static constexpr int kLanes = 16, kRows = 14;
  static constexpr bool kPairs = false;
  using Words = Vectors<kLanes>::Words;
  using Sum = __m512;
  static Words widened(void const* from) {
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<__m256i const*>(from)));
  }
  static __m512 broadcast(Word const* from) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*from)));
  }
  static __m512 load(Word const* from) { return _mm512_loadu_ps(from); }
  static __m512 multiply_add(__m512 a, __m512 b, __m512 sum) { return _mm512_fmadd_ps(a, b, sum); }
};

}  // namespace

GemmKernels const* avx512_gemm_kernels() noexcept {
  static constexpr GemmKernels kKernels = make_kernels<Avx512>("AVX-512 FMA, 14 x 32 tiles");
  bool const runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  return runs ? &kKernels : nullptr;
}

}  // namespace tessera::cpu
#else
namespace tessera::cpu {
GemmKernels const* avx512_gemm_kernels() noexcept { return nullptr; }
}  // namespace tessera::cpu
#endif
