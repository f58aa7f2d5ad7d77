// SPDX-License-Identifier: Apache-2.0
// griddepcontrol: two kernels of a stream at once. The second is launched with
// cudaLaunchAttributeProgrammaticStreamSerialization; without that both calls do nothing.
#pragma once

namespace tessera::cuda::arch {

// In the first kernel: once every CTA has called it or ended, CTAs of the second start on SMs that have space for them.
// Few CTAs that wait crowd on the SMs that come free first (docs/adr/0037-early-launches-in-forward.md).
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// In the second: returns when the first has ended and its writes are visible. Of the kernels before the first it says
// something only if the first has waited for them: so every kernel of a chain waits, at the latest before it ends, and
// the first kernel of a call does not start early.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace tessera::cuda::arch
