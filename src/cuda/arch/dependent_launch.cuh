// SPDX-License-Identifier: Apache-2.0
// griddepcontrol: two kernels of a stream at once. The second is launched with
// cudaLaunchAttributeProgrammaticStreamSerialization; without that both calls do nothing.
#pragma once

namespace tessera::cuda::arch {

// In the first kernel: once every CTA has called it or ended, CTAs of the second start on SMs that have space for them.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// In the second: returns when the first has ended and its writes are visible. Of the kernels before the first it says
// something only if the first has waited for them: so every kernel of a chain waits, at the latest before it ends. Not
// for every CTA of many: it made a forward pass whose aggregate has 18432 CTAs 3% slower
// (docs/adr/0018-one-pair-of-kernels-side-by-side.md).
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace tessera::cuda::arch
