// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd_gemv: h = x[gather_index] @ w_up[e]^T + b_up[e] -> bf16, a = act(rounded h) -> bf16, few rows
// Shapes   x (T,d) bf16, w_up (E,w*n,d) in the layouts of WeightRows with d contiguous, h (R,w*n) as [gate half | up
//          half], a (R,n)
// Work     2*R*w*n*d FLOP; bytes: 2*w*n*d for every kGemvRows rows of an expert
// Schedule grid (columns, rows): the CTA of the first of up to kGemvRows rows of an expert serves them, the others end;
//          a warp takes kColumns values of a, gate and up rows of each side by side (warp/gemv.cuh)
// Numerics fp32 sums of 32 lanes, folded by halves; one rounding per stored value; bitwise repeatable: yes
// Requires rows of 16 bytes (layer/select.cpp)
#pragma once

#include "../host/projection.hpp"
#include "../warp/gemv.cuh"
#include "core/activation_math.hpp"

namespace tessera::cuda {

struct UpProjectionFwdGemv {
  static constexpr int kWarps = 4;
  static constexpr int kColumns = 2;  // of a warp
};

template <class Config, class Act>
__global__ void __launch_bounds__(Config::kWarps* arch::kWarpThreads)
    up_projection_fwd_gemv(__grid_constant__ UpProjectionFwdArguments const p, Act const act) {
  constexpr int kHalves = Act::kGated ? 2 : 1;
  constexpr int kColumns = Config::kColumns;
  warp::GemvRows const rows =
      warp::gemv_rows(p.gmem_expert_offsets, p.experts, static_cast<int>(blockIdx.y));
  int64_t const n = p.intermediate;
  int64_t const column = (int64_t{blockIdx.x} * Config::kWarps + arch::warp_idx()) * kColumns;
  if (rows.count == 0 || column >= n) return;
  // n is a multiple of 8: both columns exist.
  __nv_bfloat16 const* w[kHalves * kColumns];
  float bias[kHalves * kColumns];
  TESSERA_UNROLL
  for (int j = 0; j < kHalves * kColumns; ++j) {
    WeightRows const& half = p.w_up[j % kHalves];
    WeightRows const& b = p.b_up[j % kHalves];
    int64_t const i = column + j / kHalves;
    w[j] = static_cast<__nv_bfloat16 const*>(half.gmem) + half.row_offset(rows.expert, i);
    bias[j] = b.gmem != nullptr ? __bfloat162float(static_cast<__nv_bfloat16 const*>(
                                      b.gmem)[b.row_offset(rows.expert, i)])
                                : 0.0f;
  }
  auto const* const gmem_x = static_cast<__nv_bfloat16 const*>(p.x.gmem);
  auto* const gmem_h = static_cast<__nv_bfloat16*>(p.gmem_h);
  auto* const gmem_a = static_cast<__nv_bfloat16*>(p.gmem_a);
  warp::with_rows(rows.count, [&]<int kRows>(std::integral_constant<int, kRows>) {
    __nv_bfloat16 const* x[kRows];
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int64_t const row = rows.first + min(i, rows.count - 1);
      x[i] = gmem_x + (p.gmem_gather_index != nullptr ? p.gmem_gather_index[row] : row) * p.x.pitch;
    }
    float sums[kRows][kHalves * kColumns];
    warp::dot_products(x, w, static_cast<int>(p.hidden), sums);
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int64_t const row = rows.first + i;
      if (i >= rows.count || arch::lane_idx() >= kColumns) continue;
      TESSERA_UNROLL
      for (int c = 0; c < kColumns; ++c) {  // lane c has column c
        if (arch::lane_idx() != c) continue;
        __nv_bfloat16 h[2] = {};
        TESSERA_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          h[half] = __float2bfloat16_rn(sums[i][c * kHalves + half] + bias[c * kHalves + half]);
        }
        int64_t const at = column + c;
        if (gmem_h != nullptr) {
          gmem_h[row * kHalves * n + at] = h[0];
          if (kHalves == 2) gmem_h[row * kHalves * n + n + at] = h[1];
        }
        if (gmem_a != nullptr) {
          gmem_a[row * n + at] =
              __float2bfloat16_rn(act.forward(__bfloat162float(h[0]), __bfloat162float(h[1])));
        }
      }
    }
  });
}

template <class Config>
cudaError_t launch_up_projection_fwd_gemv_config(UpProjectionFwdArguments const& args,
                                                 cudaStream_t stream) {
  constexpr int kCtaColumns = Config::kWarps * Config::kColumns;
  static_assert(8 % Config::kColumns == 0);
  if (args.rows == 0) return cudaSuccess;
  if (args.rows > UINT16_MAX) return cudaErrorInvalidValue;
  dim3 const ctas(unsigned((args.intermediate + kCtaColumns - 1) / kCtaColumns),
                  unsigned(args.rows));
  core::visit_activation(args.activation, [&](auto act) {
    up_projection_fwd_gemv<Config>
        <<<ctas, Config::kWarps * arch::kWarpThreads, 0, stream>>>(args, act);
  });
  return cudaGetLastError();
}

}  // namespace tessera::cuda
