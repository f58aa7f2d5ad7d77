// SPDX-License-Identifier: Apache-2.0
// A k_tile of MXFP8 operands: both atoms of scales are copied to the stage's columns of tensor memory, then four steps
// of 32 k are multiplied, each with its byte of the cells. Multiplications follow copies of their thread in order.
#pragma once

#include "../../arch/sm100/tcgen05_cp.cuh"
#include "../../arch/sm100/tcgen05_descriptor.hpp"
#include "../../arch/sm100/tcgen05_mma.cuh"
#include "accumulators.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
consteval uint32_t mx_instruction(int step) {
  return arch::Mxf8Mma{.m = kGemm.tile.m * kGemm.cluster_m(),
                       .n = kGemm.tile.n,
                       .a_scale_byte = step,
                       .b_scale_byte = step}
      .bits();
}

// As multiply_k_tile() of bf16; k is a multiple of k_tiles.
template <GemmConfig kGemm>
  requires(is_mxfp8(kGemm))
__device__ __forceinline__ void multiply_k_tile(SharedStorage<kGemm>& smem, int stage,
                                                uint32_t tensor, bool is_first, int) {
  constexpr int kCtas = kGemm.cluster_m();
  uint32_t const a_scales = smem.tensor + kAccumulators * kGemm.tile.n +
                            static_cast<uint32_t>(stage * kStageScaleColumns);
  uint32_t const b_scales = a_scales + kScaleAtomColumns;
  auto const atom = [](uint8_t const* smem_atom) {
    return arch::scale_atom(arch::shared_address(smem_atom)).bits();
  };
  arch::tcgen05_cp_scales<kCtas>(a_scales, atom(smem.a_scales[stage]));
  arch::tcgen05_cp_scales<kCtas>(b_scales, atom(smem.b_scales[stage]));
  uint64_t const a = arch::k_major_tile(arch::shared_address(smem.a[stage])).bits();
  uint64_t const b = arch::k_major_tile(arch::shared_address(smem.b[stage])).bits();
  constexpr uint32_t kInstructions[] = {mx_instruction<kGemm>(0), mx_instruction<kGemm>(1),
                                        mx_instruction<kGemm>(2), mx_instruction<kGemm>(3)};
  TESSERA_UNROLL
  for (int step = 0; step < kGemm.tile.k / kMxBlock; ++step) {
    uint32_t const bytes = static_cast<uint32_t>(step) * arch::kKMajorStepBytes;
    arch::tcgen05_mma_mxf8<kCtas>(tensor, arch::plus(a, bytes), arch::plus(b, bytes),
                                  kInstructions[step], a_scales, b_scales,
                                  is_first && step == 0 ? 0 : 1);
  }
}

}  // namespace tessera::cuda::gemm
