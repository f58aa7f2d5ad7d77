// SPDX-License-Identifier: Apache-2.0
// Words by which threads of other CTAs (gpu scope) or other GPUs (sys scope) learn that data is there:
// release what was written, count or store; load with acquire, then read. And values that say by themselves that they
// are there, for which nothing is released.
#pragma once

#include <cstdint>

namespace tessera::cuda::arch {

__device__ __forceinline__ uint32_t load_acquire_sys(uint32_t const* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire_gpu(uint32_t const* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Orders nothing: for words whose value is all there is to know.
__device__ __forceinline__ uint32_t load_relaxed_sys(uint32_t const* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_relaxed_sys(uint64_t const* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release_gpu(uint32_t* word, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Returns the value before; acquires what earlier counters released.
__device__ __forceinline__ uint32_t count_acq_rel_gpu(uint32_t* word, uint32_t increment) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(increment)
               : "memory");
  return before;
}

// Orders nothing. atomicAdd of one lane would be followed at once by a shuffle of its result.
__device__ __forceinline__ uint32_t count_relaxed_gpu(uint32_t* word, uint32_t increment) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(increment)
               : "memory");
  return before;
}

__device__ __forceinline__ uint64_t count_relaxed_gpu(uint64_t* word, uint64_t increment) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(word), "l"(increment)
               : "memory");
  return before;
}

// Counts with a release alone and returns nothing: the caller goes on at once.
__device__ __forceinline__ void add_release_gpu(uint32_t* word, uint32_t increment) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(increment) : "memory");
}

// Values of 2 bytes that are all there is to know, which other CTAs load several at a time, past L1, which may hold
// what was there before. PTX says nothing of accesses of unequal widths; the aligned 2 bytes of a value come whole.
__device__ __forceinline__ void store_relaxed_2(void* gmem, uint16_t value) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(gmem), "h"(value) : "memory");
}

__device__ __forceinline__ uint2 load_relaxed_8(void const* gmem) {
  uint2 bits;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(bits.x), "=r"(bits.y)
               : "l"(gmem)
               : "memory");
  return bits;
}

__device__ __forceinline__ uint4 load_relaxed_16(void const* gmem) {
  uint4 bits;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(gmem)
               : "memory");
  return bits;
}

__device__ __forceinline__ void fence_acq_rel_gpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

}  // namespace tessera::cuda::arch
