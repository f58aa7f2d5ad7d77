// SPDX-License-Identifier: Apache-2.0
// CUDA as the layer sees it, on an emulated GPU: what its GEMMs launch is emulated, in the order of the stream; what
// the neutral kernels make (routing tables, aggregate) plain loops make, behind all that was launched before. Any other
// GEMM, of sm_90 or the plain twin, makes the call fail: so a call that passes has taken those of sm_100a.
#pragma once

#include <cstdint>
#include <string>

#include <cuda_runtime_api.h>

namespace tessera::cuda {

struct PlayedGpu {
  int major;  // compute capability
  int sm_count;
  std::uint64_t seed = 7;  // of the order in which things happen
};
void start_played_cuda(PlayedGpu const& gpu);

// Runs what is on the stream. What went wrong; empty: nothing.
std::string finish();

// Says which kernel was asked for, and refuses it.
cudaError_t never(char const* kernel);

}  // namespace tessera::cuda
