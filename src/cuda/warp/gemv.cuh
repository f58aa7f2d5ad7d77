// SPDX-License-Identifier: Apache-2.0
// Dot products for few rows: a warp multiplies kRows rows of x with kWeights rows of weights, which pass it once, in
// vectors of 16 bytes. Memory bound as long as the rows are few: no tile is padded, and every SM reads.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "../arch/approx_math.cuh"
#include "../arch/load_global.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "fold.cuh"

namespace tessera::cuda::warp {

constexpr int kGemvVector = 8;     // bf16 values of a 16-byte load
constexpr int kGemvInFlight = 16;  // loads of weights that a lane has under way, at most
constexpr int kGemvMostSteps = 8;  // of them, of one row
constexpr int kGemvRows = 4;       // of one expert that pass with its weights at once

__device__ __forceinline__ void widen(uint4 bits, float (&values)[kGemvVector]) {
  uint32_t const pairs[4] = {bits.x, bits.y, bits.z, bits.w};
  TESSERA_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const pair = arch::unpack_bf16(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// kGemvVector weights, as they come: bf16 or fp32.
template <class W>
struct GemvWeights {
  static constexpr int kLoads = kGemvVector * int{sizeof(W)} / 16;
  uint4 bits[kLoads];

  __device__ __forceinline__ void load(W const* gmem, bool exists) {
    TESSERA_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      bits[i] = arch::load_streaming_16(gmem + i * (kGemvVector / kLoads), exists);
    }
  }
  __device__ __forceinline__ void values(float (&out)[kGemvVector]) const {
    if constexpr (kLoads == 1) {
      widen(bits[0], out);
    } else {
      TESSERA_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        uint32_t const words[4] = {bits[i].x, bits[i].y, bits[i].z, bits[i].w};
        TESSERA_UNROLL
        for (int j = 0; j < 4; ++j) out[4 * i + j] = __uint_as_float(words[j]);
      }
    }
  }
};

// sums[i][j] = sum over c of x[i][c] * w[j][c], in every lane: lane l adds up the vectors l, l + 32, .. in order, then
// lanes fold by halves. `count` is a multiple of 8, all rows begin at multiples of 16 bytes.
template <class W, int kRows, int kWeights>
__device__ __forceinline__ void dot_products(__nv_bfloat16 const* const (&x)[kRows],
                                             W const* const (&w)[kWeights], int count,
                                             float (&sums)[kRows][kWeights]) {
  constexpr int kStep = arch::kWarpThreads * kGemvVector;
  constexpr int kLoads = kGemvInFlight / kWeights / GemvWeights<W>::kLoads;
  constexpr int kSteps = kLoads < kGemvMostSteps ? kLoads : kGemvMostSteps;
  TESSERA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TESSERA_UNROLL
    for (int j = 0; j < kWeights; ++j) sums[i][j] = 0;
  }
  for (int first = arch::lane_idx() * kGemvVector; first < count; first += kSteps * kStep) {
    GemvWeights<W> weights[kSteps][kWeights];
    TESSERA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      int const c = first + step * kStep;
      TESSERA_UNROLL
      for (int j = 0; j < kWeights; ++j) {
        weights[step][j].load(w[j] + c, c < count);
      }
    }
    TESSERA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      int const c = first + step * kStep;
      if (c >= count) break;
      float w_values[kWeights][kGemvVector];
      TESSERA_UNROLL
      for (int j = 0; j < kWeights; ++j) weights[step][j].values(w_values[j]);
      TESSERA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float x_values[kGemvVector];
        widen(__ldg(reinterpret_cast<uint4 const*>(x[i] + c)), x_values);
        TESSERA_UNROLL
        for (int v = 0; v < kGemvVector; ++v) {
          TESSERA_UNROLL
          for (int j = 0; j < kWeights; ++j) {
            sums[i][j] = fmaf(x_values[v], w_values[j][v], sums[i][j]);
          }
        }
      }
    }
  }
  TESSERA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TESSERA_UNROLL
    for (int j = 0; j < kWeights; ++j) sums[i][j] = fold_sum(sums[i][j]);
  }
}

// Calls body(std::integral_constant<int, kRows>) with the least of 1, 2, 4 that is at least `count`.
template <class Body>
__device__ __forceinline__ void with_rows(int count, Body&& body) {
  static_assert(kGemvRows == 4);
  if (count == 1) {
    body(std::integral_constant<int, 1>{});
  } else if (count == 2) {
    body(std::integral_constant<int, 2>{});
  } else {
    body(std::integral_constant<int, 4>{});
  }
}

}  // namespace tessera::cuda::warp
