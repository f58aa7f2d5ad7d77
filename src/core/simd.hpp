// SPDX-License-Identifier: Apache-2.0
// Elementwise loops are compiled once per instruction set and chosen when the library is loaded.
// They round alike in every version: contraction is off and an FMA stands only where the source says so.
#pragma once

// Sanitizers and clang do without the versions: the loops then run as plain code.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(TESSERA_SANITIZED)
#define TESSERA_SIMD \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), noinline))
#else
#define TESSERA_SIMD
#endif

// For helpers of such loops: inlined into each version, so that they are compiled for it; and into device
// code, where they give the same bits (compiled with -fmad=false).
#if defined(__CUDACC__)
#define TESSERA_INLINE __host__ __device__ __forceinline__
#else
#define TESSERA_INLINE inline __attribute__((always_inline))
#endif
