// SPDX-License-Identifier: Apache-2.0
// Registers move between warpgroups: those that load give up what those that multiply take. Every
// warp of the warpgroup must execute it; kCount is a multiple of 8 in [24, 256].
#pragma once

namespace tessera::cuda::arch {

template <int kCount>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace tessera::cuda::arch
