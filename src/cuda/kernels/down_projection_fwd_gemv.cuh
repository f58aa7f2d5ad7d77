// SPDX-License-Identifier: Apache-2.0
// down_projection_fwd_gemv: y = a @ w_down[e]^T + b_down[e] -> bf16, few rows
// Shapes   a (R,n) bf16, w_down (E,d,n) with n contiguous, y (R,d)
// Work     2*R*n*d FLOP; bytes: 2*n*d for every kGemvRows rows of an expert
// Schedule grid (columns, rows): the CTA of the first of up to kGemvRows rows of an expert serves them, the others end;
//          a warp takes kColumns values of y side by side (warp/gemv.cuh)
// Numerics fp32 sums of 32 lanes, folded by halves; one rounding; bitwise repeatable: yes
// Requires rows of 16 bytes (layer/select.cpp)
#pragma once

#include "../host/projection.hpp"
#include "../warp/gemv.cuh"

namespace tessera::cuda {

struct DownProjectionFwdGemv {
  static constexpr int kWarps = 4;
  static constexpr int kColumns = 4;  // of a warp
};

template <class Config>
__global__ void __launch_bounds__(Config::kWarps* arch::kWarpThreads)
    down_projection_fwd_gemv(__grid_constant__ DownProjectionFwdArguments const p) {
  constexpr int kColumns = Config::kColumns;
  warp::GemvRows const rows =
      warp::gemv_rows(p.gmem_expert_offsets, p.experts, static_cast<int>(blockIdx.y));
  int64_t const column = (int64_t{blockIdx.x} * Config::kWarps + arch::warp_idx()) * kColumns;
  if (rows.count == 0 || column >= p.hidden) return;
  __nv_bfloat16 const* w[kColumns];
  float bias[kColumns];
  TESSERA_UNROLL
  for (int j = 0; j < kColumns; ++j) {  // d is a multiple of 8: all columns exist
    w[j] = static_cast<__nv_bfloat16 const*>(p.w_down.gmem) +
           p.w_down.row_offset(rows.expert, column + j);
    bias[j] = p.b_down.gmem != nullptr
                  ? __bfloat162float(static_cast<__nv_bfloat16 const*>(
                        p.b_down.gmem)[p.b_down.row_offset(rows.expert, column + j)])
                  : 0.0f;
  }
  auto const* const gmem_a = static_cast<__nv_bfloat16 const*>(p.gmem_a);
  auto* const gmem_y = static_cast<__nv_bfloat16*>(p.gmem_y);
  warp::with_rows(rows.count, [&]<int kRows>(std::integral_constant<int, kRows>) {
    __nv_bfloat16 const* a[kRows];
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      a[i] = gmem_a + (rows.first + min(i, rows.count - 1)) * p.intermediate;
    }
    float sums[kRows][kColumns];
    warp::dot_products(a, w, static_cast<int>(p.intermediate), sums);
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      TESSERA_UNROLL
      for (int c = 0; c < kColumns; ++c) {  // lane c has column c
        if (i < rows.count && arch::lane_idx() == c) {
          gmem_y[(rows.first + i) * p.hidden + column + c] =
              __float2bfloat16_rn(sums[i][c] + bias[c]);
        }
      }
    }
  });
}

template <class Config>
cudaError_t launch_down_projection_fwd_gemv_config(DownProjectionFwdArguments const& args,
                                                   cudaStream_t stream) {
  constexpr int kCtaColumns = Config::kWarps * Config::kColumns;
  static_assert(8 % Config::kColumns == 0);
  if (args.rows == 0) return cudaSuccess;
  if (args.rows > UINT16_MAX) return cudaErrorInvalidValue;
  dim3 const ctas(unsigned((args.hidden + kCtaColumns - 1) / kCtaColumns), unsigned(args.rows));
  down_projection_fwd_gemv<Config><<<ctas, Config::kWarps * arch::kWarpThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace tessera::cuda
