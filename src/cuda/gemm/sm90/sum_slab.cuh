// SPDX-License-Identifier: Apache-2.0
// Brings a warpgroup's accumulators into slabs of fp32 (gemm/slabs.cuh), half of a slab of accumulators in each.
#pragma once

#include "../../arch/shared_address.cuh"
#include "../../arch/store_shared.cuh"
#include "../../arch/warp.cuh"
#include "../slabs.cuh"
#include "accumulators.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm, Major kMajor>
struct SumSlab {
  static constexpr int kValues = 16;  // of a thread

  // Columns 32 * part.. of a slab of the accumulators.
  __device__ __forceinline__ static void fill(Accumulators<kGemm>& acc, int slab, int part,
                                              bf16* smem_slab) {
    fill(&Fragments::of(acc, slab / 2)[(slab % 2 * 2 + part) * kValues], smem_slab);
  }

  // A warpgroup calls it; value: kValues sums of this thread, in the order of wgmma's fragments.
  __device__ __forceinline__ static void fill(float const* value, bf16* smem_slab) {
    int const lane = arch::lane_idx(), warp = arch::warp_in_warpgroup();
    uint32_t const smem = arch::shared_address(smem_slab);
    if constexpr (kMajor == Major::kRows) {
      // Two rows whose numbers differ in bit 0 share their banks: odd ones store their values in another order.
      int const row = lane / 4;
      bool const odd = row % 2 != 0;
      uint32_t const smem_row = smem + (warp * kWarpRows + row) * 128 + lane % 2 * 8;
      TESSERA_UNROLL
      for (int j = 0; j < 2; ++j) {
        uint32_t const chunk = ((2 * j + lane % 4 / 2) ^ row ^ (odd ? 4 : 0)) << 4;
        TESSERA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float const* const left = value + 4 * j + 2 * half;
          float const* const right = left + kValues / 2;
          uint32_t const to = smem_row + half * (8 * 128) + chunk;
          arch::store_shared_8(to, odd ? right[0] : left[0], odd ? right[1] : left[1]);
          arch::store_shared_8(to ^ 4 << 4, odd ? left[0] : right[0], odd ? left[1] : right[1]);
        }
      }
    } else {
      uint32_t const smem_box = smem + warp / 2 * Fp32Slab::kBoxBytes + lane / 4 % 4 * 4;
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        TESSERA_UNROLL
        for (int bit = 0; bit < 2; ++bit) {
          int const i = lane % 4 * 2 + bit;
          int const chunk = warp % 2 * 4 + 2 * half + lane / 16;
          uint32_t const to = smem_box + i * 128 + ((chunk ^ i) << 4);
          TESSERA_UNROLL
          for (int j = 0; j < Fp32Slab::kColumns / 8; ++j) {
            arch::store_shared_4(to + j * (8 * 128), value[4 * j + 2 * half + bit]);
          }
        }
      }
    }
  }
};

}  // namespace tessera::cuda::gemm
