// SPDX-License-Identifier: Apache-2.0
// Cluster launch control: a CTA that runs takes the number of a cluster of its grid that has not started, which then
// does not start. A request behind a refused one is undefined.
#pragma once

#include <cstdint>

#include "../mbarrier.cuh"

namespace tessera::cuda::arch {

// Where the answer comes, 16 bytes.
struct alignas(16) LaunchAnswer {
  uint64_t words[2];
};

// Asks; the answer's 16 bytes are reported to smem_full, at the same place in every CTA of the cluster.
__device__ __forceinline__ void cluster_launch_request(LaunchAnswer* smem_answer,
                                                       Mbarrier* smem_full) {
  asm volatile(
      "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
      ".multicast::cluster::all.b128 [%0], [%1];" ::"r"(shared_address(smem_answer)),
      "r"(shared_address(smem_full))
      : "memory");
}

// The first CTA of the cluster that was taken, along x, or -1 where none was left.
__device__ __forceinline__ int cluster_launch_taken(LaunchAnswer const* smem_answer) {
  int cta;
  asm volatile(
      "{\n"
      ".reg .b128 answer;\n"
      ".reg .pred taken;\n"
      "ld.shared.b128 answer, [%1];\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 taken, answer;\n"
      "mov.s32 %0, -1;\n"
      "@taken clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, answer;\n"
      "}"
      : "=r"(cta)
      : "r"(shared_address(smem_answer))
      : "memory");
  return cta;
}

}  // namespace tessera::cuda::arch
