// SPDX-License-Identifier: Apache-2.0
// What a layer that quantises launches on Hopper: kernels of codes from the sources that GPUs get; for gradients of
// weights, which multiply bf16, loops behind all that was launched before, as the fast kernels have tests of their own.
#include "cuda/host/projection_backward.hpp"
#include "cuda/instances/down_projection_dgrad_e4m3.cu"
#include "cuda/instances/down_projection_fwd_e4m3.cu"
#include "cuda/instances/quantise.cu"
#include "cuda/instances/up_projection_dgrad_e4m3.cu"
#include "cuda/instances/up_projection_fwd_e4m3.cu"
#include "cuda/plain/dscores.cu"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/sm100/layer_cuda.hpp"

namespace tessera::cuda {

using emulator::Bits;

// Of fp32 gradients that are written.
cudaError_t add_up_rows(WgradArguments const& args) {
  if (!finish().empty() || !args.is_fp32 || args.accumulates) return cudaErrorLaunchFailure;
  auto const* const left = static_cast<Bits const*>(args.left.gmem);
  auto const* const right = static_cast<Bits const*>(args.gmem_right);
  int64_t const n = args.intermediate, d = args.hidden;
  for (int64_t expert = 0; expert < args.experts; ++expert) {
    for (int64_t i = 0; i < args.halves * n; ++i) {
      WeightRows const& dw = args.dw[i / n];
      auto* const out = static_cast<float*>(const_cast<void*>(dw.gmem));
      for (int64_t c = 0; c < d; ++c) {
        float sum = 0;
        for (int64_t row = args.gmem_expert_offsets[expert];
             row < args.gmem_expert_offsets[expert + 1]; ++row) {
          sum += emulator::widen(right[row * args.halves * n + i]) *
                 emulator::widen(left[args.gmem_gather_index[row] * args.left.pitch + c]);
        }
        out[dw.row_offset(expert, i % n) + c * dw.column_stride] = sum;
      }
    }
  }
  return cudaSuccess;
}
cudaError_t launch_down_projection_wgrad(DownProjectionWgradArguments const& args, int,
                                         cudaStream_t) {
  return add_up_rows(args);
}
cudaError_t launch_up_projection_wgrad(UpProjectionWgradArguments const& args, int, cudaStream_t) {
  return add_up_rows(args);
}

}  // namespace tessera::cuda
