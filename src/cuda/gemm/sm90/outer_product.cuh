// SPDX-License-Identifier: Apache-2.0
// D[r, c] += u[r] * v[segment, c] by the tensor cores: one more k16 step of a tile, in a stage of its own.
//   A, from registers  u in two bf16, u = high + low to 2^-17: high in column 0, low in column 8, else 0
//   B, by TMA          rows segment, segment + 1, .. of v, twice: v[segment] is row 0 and row 8, the others meet zeros
// A v in two bf16 has its second row behind the first: u meets row 1 and row 9 as well, in columns 1 and 9.
// As FMAs on the accumulators it took 1.7% of a backward pass, as the tensor cores stood still meanwhile
// (docs/notebook/2026-11-22-dgrad-limits.md).
#pragma once

#include "../../arch/approx_math.cuh"
#include "../../arch/sm90/wgmma.cuh"
#include "../produce/outer_product.cuh"
#include "../ring.cuh"
#include "accumulators.cuh"

namespace tessera::cuda::gemm {

// Makes an operand of wgmma of u, the factors of this thread's rows.
template <int kRows>
__device__ __forceinline__ void split_outer_rows(float const (&u)[kRows], bool v_in_two,
                                                 uint32_t (&a)[2 * kRows]) {
  bool const has = arch::lane_idx() % 4 == 0;
  TESSERA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    uint32_t const high = arch::pack_bf16(u[i], v_in_two ? u[i] : 0.0f);
    float const low = u[i] - __uint_as_float(high << 16);
    a[i] = has ? high : 0;
    a[kRows + i] = has ? arch::pack_bf16(low, v_in_two ? low : 0.0f) : 0;
  }
}

// Behind the last k_tile, whose wgmmas are in flight on stage `previous`; returns the stage that now is.
template <GemmConfig kGemm>
__device__ __forceinline__ int multiply_outer_product(SharedStorage<kGemm>& smem,
                                                      PipelineState<kGemm>& state,
                                                      Accumulators<kGemm>& acc,
                                                      float const (&u)[Accumulators<kGemm>::kRows],
                                                      bool v_in_two, int previous) {
  uint32_t a[4];
  split_outer_rows(u, v_in_two, a);
  arch::mbarrier_wait(&smem.full[state.stage], state.phase);
  arch::wgmma_fence();
  arch::wgmma_m64n256k16(
      Fragments::of(acc, 0), Fragments::of(acc, 1), a,
      arch::wgmma_descriptor_rows_major<kOuterGroup* int{sizeof(bf16)},
                                        kOuterBox* int{sizeof(bf16)}>(smem.b[state.stage]));
  arch::wgmma_commit();
  arch::wgmma_wait<1>();
  release_stage<kGemm>(smem, previous);
  int const stage = state.stage;
  state.advance();
  return stage;
}

}  // namespace tessera::cuda::gemm
