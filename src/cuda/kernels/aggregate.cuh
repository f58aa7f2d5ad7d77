// SPDX-License-Identifier: Apache-2.0
// aggregate: o_t = rnd([o_t +] sum over slots j of token t, ascending, of s_j * y[inverse_permutation[j]]).
// Shapes   y (R,d), o (T,d) bf16 or fp32; s (P) fp32 or absent (then 1); inverse_permutation (P);
//          slots of t are [t*K, (t+1)*K), or [token_offsets[t], token_offsets[t+1])
// Work     2*R*d FLOP (R*d without scores); bytes R*d + T*d (2*T*d where it adds to o) elements and 8*P (4*P);
//          memory bound
// Schedule a warp per (token, slice of 32 lanes * 16 bytes), slices of a token side by side
//   lanes      load 32 slots' rows and scores, one each, and hand them round by shuffle
//   per group  issue slots_in_flight row loads of 16 bytes per lane, then add them in slot order
// Numerics fp32 fma in ascending slot order from 0 or o, one rounding; a sentinel (row < 0) is skipped, not
//          multiplied by 0; a token without rows gives +0; bitwise repeatable: yes
// Requires 16-byte aligned bases and rows, T * slices < 2^31; offsets are 64-bit, R*d may exceed 2^31
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/load_global.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/aggregate.hpp"
#include "../tuning/aggregate.hpp"

namespace tessera::cuda {

constexpr int kAggregateVectorBytes = 16;

// Sixteen bytes of a row, added to fp32 sums.
template <class Element>
struct AggregateVector;

template <>
struct AggregateVector<float> {
  static constexpr int kElements = 4;
  __device__ static void add(float (&sum)[kElements], uint4 bits, float score) {
    sum[0] = fmaf(score, __uint_as_float(bits.x), sum[0]);
    sum[1] = fmaf(score, __uint_as_float(bits.y), sum[1]);
    sum[2] = fmaf(score, __uint_as_float(bits.z), sum[2]);
    sum[3] = fmaf(score, __uint_as_float(bits.w), sum[3]);
  }
  __device__ static uint4 round(float const (&sum)[kElements]) {
    return {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
            __float_as_uint(sum[3])};
  }
};

template <>
struct AggregateVector<__nv_bfloat16> {
  static constexpr int kElements = 8;
  // A bf16 is the upper half of the fp32 of the same value; the lower address is the lower half.
  __device__ static void add_pair(float* sum, uint32_t pair, float score) {
    sum[0] = fmaf(score, __uint_as_float(pair << 16), sum[0]);
    sum[1] = fmaf(score, __uint_as_float(pair & 0xffff0000u), sum[1]);
  }
  __device__ static void add(float (&sum)[kElements], uint4 bits, float score) {
    add_pair(sum + 0, bits.x, score);
    add_pair(sum + 2, bits.y, score);
    add_pair(sum + 4, bits.z, score);
    add_pair(sum + 6, bits.w, score);
  }
  __device__ static uint32_t round_pair(float const* sum) {
    uint32_t const low = __bfloat16_as_ushort(__float2bfloat16_rn(sum[0]));
    uint32_t const high = __bfloat16_as_ushort(__float2bfloat16_rn(sum[1]));
    return low | high << 16;
  }
  __device__ static uint4 round(float const (&sum)[kElements]) {
    return {round_pair(sum + 0), round_pair(sum + 2), round_pair(sum + 4), round_pair(sum + 6)};
  }
};

template <class Element>
constexpr int kAggregateSlice = arch::kWarpThreads * AggregateVector<Element>::kElements;

// Adds one group of slots, held by lanes [first, first + slots_in_flight), to this lane's sums.
template <class Config, class Element>
__device__ __forceinline__ void add_group(float (&sum)[AggregateVector<Element>::kElements],
                                          AggregateArguments const& p, int lane_row,
                                          float lane_score, int first, int64_t column) {
  constexpr int kSlots = Config::config.slots_in_flight;
  constexpr uint32_t kAllLanes = 0xffffffffu;
  int rows[kSlots];
  uint4 values[kSlots];
  TESSERA_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    rows[i] = __shfl_sync(kAllLanes, lane_row, first + i);
    auto const* gmem_row = static_cast<Element const*>(p.gmem_y) + int64_t{rows[i]} * p.hidden;
    values[i] = arch::load_streaming_16(gmem_row + column, rows[i] >= 0 && column < p.hidden);
  }
  TESSERA_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    float const score = __shfl_sync(kAllLanes, lane_score, first + i);
    if (rows[i] >= 0) AggregateVector<Element>::add(sum, values[i], score);
  }
}

template <class Config, class Element>
__global__ void __launch_bounds__(Config::config.threads(), Config::config.ctas_per_sm)
    aggregate(__grid_constant__ AggregateArguments const p) {
  static_assert(valid(Config::config));
  using Vector = AggregateVector<Element>;
  auto const slices =
      static_cast<uint32_t>((p.hidden + kAggregateSlice<Element> - 1) / kAggregateSlice<Element>);
  uint32_t const item = blockIdx.x * Config::config.warps + arch::warp_idx();
  int64_t const token = item / slices;
  if (token >= p.tokens) return;
  int const lane = arch::lane_idx();
  int64_t const column =
      int64_t{item % slices} * kAggregateSlice<Element> + lane * Vector::kElements;

  bool const varies = p.gmem_token_offsets != nullptr;
  int64_t const begin = varies ? p.gmem_token_offsets[token] : token * p.top_k;
  int64_t const end = varies ? p.gmem_token_offsets[token + 1] : begin + p.top_k;
  auto* const gmem_o = static_cast<Element*>(p.gmem_o) + token * p.o_pitch + column;
  float sum[Vector::kElements] = {};
  if (p.adds_to_o && column < p.hidden) {
    Vector::add(sum, *reinterpret_cast<uint4 const*>(gmem_o), 1.0f);
  }
  for (int64_t slot = begin; slot < end; slot += arch::kWarpThreads) {
    int row = -1;
    float score = 1;
    if (slot + lane < end) {
      row = p.gmem_inverse_permutation[slot + lane];
      if (p.gmem_scores != nullptr) score = p.gmem_scores[slot + lane];
    }
    for (int first = 0; first < arch::kWarpThreads && slot + first < end;
         first += Config::config.slots_in_flight) {
      add_group<Config, Element>(sum, p, row, score, first, column);
    }
  }
  if (column < p.hidden) *reinterpret_cast<uint4*>(gmem_o) = Vector::round(sum);
}

template <class Config, class Element>
cudaError_t launch_aggregate_config(AggregateArguments const& args, cudaStream_t stream) {
  int64_t const slices = (args.hidden + kAggregateSlice<Element> - 1) / kAggregateSlice<Element>;
  if (args.tokens != 0 && slices > INT32_MAX / args.tokens) return cudaErrorInvalidValue;
  int64_t const ctas = (args.tokens * slices + Config::config.warps - 1) / Config::config.warps;
  if (ctas == 0) return cudaSuccess;
  aggregate<Config, Element>
      <<<static_cast<unsigned>(ctas), Config::config.threads(), 0, stream>>>(args);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch_aggregate(AggregateArguments const& args, cudaStream_t stream) {
  constexpr int64_t kElements = AggregateVector<Element>::kElements;
  auto const misaligned = [](void const* gmem) {
    return reinterpret_cast<uintptr_t>(gmem) % kAggregateVectorBytes != 0;
  };
  if (args.hidden % kElements || args.o_pitch % kElements || misaligned(args.gmem_y) ||
      misaligned(args.gmem_o)) {
    return cudaErrorInvalidValue;
  }
  return args.top_k <= kAggregateFewSlots
             ? launch_aggregate_config<AggregateFourSlots, Element>(args, stream)
             : launch_aggregate_config<AggregateEightSlots, Element>(args, stream);
}

}  // namespace tessera::cuda
