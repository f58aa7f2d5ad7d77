// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd, plainly (one thread per output, fp32): see up_projection_fwd.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda::plain {

struct UpProjectionFwd {
  void const* gmem_x;         // (T,d) bf16, or (R,d) in expert order without gather_index
  int const* gather_index;    // [R] or null
  void const* gmem_w_up;      // (E,2n,d) bf16, gate rows then up rows
  int const* expert_offsets;  // [E+1]
  int experts, hidden, intermediate;
  float* gmem_h;  // (R,2n)
  float* gmem_a;  // (R,n)
};

// rows >= R bounds the grid; rows past expert_offsets[E] are not written.
[[nodiscard]] cudaError_t up_projection_fwd(UpProjectionFwd const& p, int64_t rows,
                                            cudaStream_t stream);

}  // namespace tessera::cuda::plain
