// SPDX-License-Identifier: Apache-2.0
// bias_gradient: db[half][e](i) = sum over rows r of expert e of weight_r * left[gather_index[r], half*columns + i]:
//                db_up from dh, db_down from dO, each row weighted by its score. It has the bits of its plain twin.
// Shapes   left (T,halves*columns) bf16, db columns of each half and expert, bf16 or fp32; weights (P) fp32 or absent
// Work     2*R*halves*columns FLOP; bytes 2*R*halves*columns, 12*R besides for rows that are gathered and weighted;
//          memory bound
// Schedule a CTA per expert and 64 columns, eight threads a row with 16 bytes each, 32 rows at a time:
//   each thread   indices and scores of four rows | their 16 bytes | add | ..
//   at the end    64 threads add what 32 lanes of rows have for a column
// Numerics fp32 fma, rows l, 32+l, .. of lane l ascending, then the lanes in order, one rounding; bitwise repeatable:
//          yes
// Requires what refuse() asks (layer/select.cpp)
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/approx_math.cuh"
#include "../arch/load_global.cuh"
#include "../arch/shared_address.cuh"
#include "../host/bias_gradient.hpp"

namespace tessera::cuda {

struct BiasGradientConfig {
  static constexpr int kColumns = 64;  // columns of a CTA
  static constexpr int kVector = 8;    // columns of a thread
  static constexpr int kLanes = kBiasGradientLanes;
  static constexpr int kThreads = kLanes * (kColumns / kVector);
  static constexpr int kAhead = 4;  // rows of a lane in flight
};

// This thread's columns of rows first + lane, first + lane + kLanes, .. up to end.
__device__ __forceinline__ void sum_rows(BiasGradientArguments const& p, int64_t first, int64_t end,
                                         int64_t column, bool exists,
                                         float (&sums)[BiasGradientConfig::kVector]) {
  using Config = BiasGradientConfig;
  auto const* const gmem_left = static_cast<__nv_bfloat16 const*>(p.left.gmem) + column;
  int const lane = static_cast<int>(threadIdx.x) / (Config::kColumns / Config::kVector);
  for (int64_t row = first + lane; row < end; row += Config::kLanes * Config::kAhead) {
    int64_t sources[Config::kAhead];
    float weights[Config::kAhead];
    uint4 values[Config::kAhead];
    TESSERA_UNROLL
    for (int i = 0; i < Config::kAhead; ++i) {
      int64_t const at = row + i * Config::kLanes;
      bool const is_row = at < end;
      sources[i] = is_row && p.gmem_gather_index != nullptr ? p.gmem_gather_index[at] : at;
      weights[i] =
          is_row && p.gmem_scores != nullptr ? p.gmem_scores[p.gmem_sort_permutation[at]] : 1.0f;
    }
    TESSERA_UNROLL
    for (int i = 0; i < Config::kAhead; ++i) {
      values[i] = arch::load_streaming_16(gmem_left + sources[i] * p.left.pitch,
                                          exists && row + i * Config::kLanes < end);
    }
    TESSERA_UNROLL
    for (int i = 0; i < Config::kAhead; ++i) {
      uint32_t const pairs[] = {values[i].x, values[i].y, values[i].z, values[i].w};
      TESSERA_UNROLL
      for (int j = 0; j < Config::kVector / 2; ++j) {
        float2 const pair = arch::unpack_bf16(pairs[j]);
        sums[2 * j] = fmaf(weights[i], pair.x, sums[2 * j]);
        sums[2 * j + 1] = fmaf(weights[i], pair.y, sums[2 * j + 1]);
      }
    }
  }
}

__device__ __forceinline__ void store_bias_gradient(float& out, float sum, bool accumulates) {
  out = accumulates ? out + sum : sum;
}
__device__ __forceinline__ void store_bias_gradient(__nv_bfloat16& out, float sum,
                                                    bool accumulates) {
  out = __float2bfloat16_rn(accumulates ? __bfloat162float(out) + sum : sum);
}

template <class Gradient>
__global__ void __launch_bounds__(BiasGradientConfig::kThreads)
    bias_gradient(BiasGradientArguments const p) {
  using Config = BiasGradientConfig;
  __shared__ float smem_sums[Config::kLanes][Config::kColumns];
  constexpr int kThreadsOfRow = Config::kColumns / Config::kVector;
  int64_t const width = p.halves * p.columns;
  int64_t const groups = (width + Config::kColumns - 1) / Config::kColumns;
  int64_t const expert = blockIdx.x / groups;
  int64_t const first_column = blockIdx.x % groups * Config::kColumns;
  int64_t const first = p.gmem_expert_offsets[expert], end = p.gmem_expert_offsets[expert + 1];
  if (p.accumulates && first == end) return;
  int const thread = static_cast<int>(threadIdx.x), vector = thread % kThreadsOfRow;
  int64_t const column = first_column + vector * Config::kVector;
  float sums[Config::kVector] = {};
  sum_rows(p, first, end, column, column < width, sums);
  TESSERA_UNROLL
  for (int j = 0; j < Config::kVector; ++j) {
    smem_sums[thread / kThreadsOfRow][vector * Config::kVector + j] = sums[j];
  }
  __syncthreads();
  int64_t const own = first_column + thread;
  if (thread >= Config::kColumns || own >= width) return;
  WeightRows const& db = p.db[own / p.columns];
  if (db.gmem == nullptr) return;
  float sum = smem_sums[0][thread];
  TESSERA_UNROLL
  for (int lane = 1; lane < Config::kLanes; ++lane) sum += smem_sums[lane][thread];
  auto* const gmem_db = static_cast<Gradient*>(const_cast<void*>(db.gmem));
  store_bias_gradient(gmem_db[db.row_offset(expert, own % p.columns)], sum, p.accumulates);
}

}  // namespace tessera::cuda
