// SPDX-License-Identifier: Apache-2.0
// aggregate: o_t = rnd([o_t +] sum over slots j of token t, ascending, of s_j * y[inverse_permutation[j]]).
// Shapes   y (R,d), o (T,d) bf16 or fp32; s (P) fp32 or absent (then 1); inverse_permutation (P);
//          slots of t are [t*K, (t+1)*K), or [token_offsets[t], token_offsets[t+1])
// Work     2*R*d FLOP (R*d without scores); bytes R*d + T*d (2*T*d where it adds to o) elements and 8*P (4*P);
//          memory bound
// Schedule a warp per (token, `slices` slices of 32 lanes * 16 bytes), those of a token side by side
//   lanes      load 32 slots' rows and scores, one each, and hand them round by shuffle
//   per group  issue slots_in_flight row loads of 16 bytes per lane, then add them in slot order
// Numerics fp32 fma in ascending slot order from 0 or o, one rounding; a sentinel (row < 0) is skipped, not
//          multiplied by 0; a token without rows gives +0; bitwise repeatable: yes
// Requires 16-byte aligned bases and rows, T * warps of a token < 2^31; offsets are 64-bit, R*d may exceed 2^31
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/dependent_launch.cuh"
#include "../arch/load_global.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/warp.cuh"
#include "../host/aggregate.hpp"
#include "../host/launch.hpp"
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
// A warp has so many columns at a time.
template <class Config, class Element>
constexpr int kAggregateColumns = Config::config.slices * kAggregateSlice<Element>;

// Adds one group of slots, held by lanes [first, first + slots_in_flight), to this lane's sums.
template <class Config, class Element>
__device__ __forceinline__ void add_group(
    float (&sum)[Config::config.slices][AggregateVector<Element>::kElements],
    AggregateArguments const& p, int lane_row, float lane_score, int first, int64_t column) {
  constexpr int kSlots = Config::config.slots_in_flight, kSlices = Config::config.slices;
  int rows[kSlots];
  uint4 values[kSlots][kSlices];
  TESSERA_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    rows[i] = __shfl_sync(arch::kAllLanes, lane_row, first + i);
    auto const* gmem_row = static_cast<Element const*>(p.gmem_y) + int64_t{rows[i]} * p.hidden;
    TESSERA_UNROLL
    for (int s = 0; s < kSlices; ++s) {
      int64_t const c = column + s * kAggregateSlice<Element>;
      values[i][s] = arch::load_streaming_16(gmem_row + c, rows[i] >= 0 && c < p.hidden);
    }
  }
  TESSERA_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    float const score = __shfl_sync(arch::kAllLanes, lane_score, first + i);
    if (rows[i] >= 0) {
      TESSERA_UNROLL
      for (int s = 0; s < kSlices; ++s) AggregateVector<Element>::add(sum[s], values[i][s], score);
    }
  }
}

// A warp's part of a token.
template <class Config, class Element>
__device__ __forceinline__ void aggregate_part(AggregateArguments const& p, int64_t token,
                                               uint32_t part) {
  using Vector = AggregateVector<Element>;
  constexpr int kSlices = Config::config.slices;
  int const lane = arch::lane_idx();
  int64_t const column =
      int64_t{part} * kAggregateColumns<Config, Element> + lane * Vector::kElements;

  bool const varies = p.gmem_token_offsets != nullptr;
  int64_t const begin = varies ? p.gmem_token_offsets[token] : token * p.top_k;
  int64_t const end = varies ? p.gmem_token_offsets[token + 1] : begin + p.top_k;
  auto* const gmem_o = static_cast<Element*>(p.gmem_o) + token * p.o_pitch + column;
  float sum[kSlices][Vector::kElements] = {};
  TESSERA_UNROLL
  for (int s = 0; s < kSlices; ++s) {
    int const c = s * kAggregateSlice<Element>;
    if (p.adds_to_o && column + c < p.hidden) {
      Vector::add(sum[s], *reinterpret_cast<uint4 const*>(gmem_o + c), 1.0f);
    }
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
  TESSERA_UNROLL
  for (int s = 0; s < kSlices; ++s) {
    int const c = s * kAggregateSlice<Element>;
    if (column + c < p.hidden) *reinterpret_cast<uint4*>(gmem_o + c) = Vector::round(sum[s]);
  }
}

// Warps that share a token.
template <class Config, class Element>
__host__ __device__ constexpr int64_t aggregate_parts(int64_t hidden) {
  constexpr int kColumns = kAggregateColumns<Config, Element>;
  return (hidden + kColumns - 1) / kColumns;
}

template <class Config, class Element>
__global__ void __launch_bounds__(Config::config.threads(), Config::config.ctas_per_sm)
    aggregate(__grid_constant__ AggregateArguments const p) {
  static_assert(valid(Config::config));
  auto const parts = static_cast<uint32_t>(aggregate_parts<Config, Element>(p.hidden));
  uint32_t const item = blockIdx.x * Config::config.warps + arch::warp_idx();
  int64_t const token = item / parts;
  if (token < p.tokens) aggregate_part<Config, Element>(p, token, item % parts);
}

// Beside the previous kernel of the stream, on the SMs that it leaves and then on all: as many CTAs as the device
// holds, whose warps draw tokens. Every warp draws once in vain, so that the last ticket is known; it leaves the
// counter as the next launch expects it.
template <class Config, class Element>
__global__ void __launch_bounds__(Config::config.threads(), Config::config.ctas_per_sm)
    aggregate_beside(__grid_constant__ AggregateBesideArguments const params) {
  AggregateArguments const& p = params.aggregate;
  arch::let_next_kernel_start();  // router_wgrad
  __threadfence();  // what was visible to the previous kernel is so here, also through L1
  auto const parts = static_cast<uint32_t>(aggregate_parts<Config, Element>(p.hidden));
  int64_t const last_ticket = p.tokens + int64_t{gridDim.x} * Config::config.warps - 1;
  auto const draw = [&] {
    return arch::lane_idx() == 0 ? atomicAdd(params.gmem_token_counter, 1u) : 0u;
  };
  uint32_t ticket = __shfl_sync(arch::kAllLanes, draw(), 0);
  while (ticket < p.tokens) {
    uint32_t const next = draw();
    for (uint32_t part = 0; part < parts; ++part) {
      aggregate_part<Config, Element>(p, ticket, part);
    }
    ticket = __shfl_sync(arch::kAllLanes, next, 0);
  }
  if (ticket == last_ticket && arch::lane_idx() == 0) *params.gmem_token_counter = 0;
  // Whoever comes next in the stream comes after both.
  if (blockIdx.x == gridDim.x - 1) arch::wait_for_previous_kernel();
}

template <class Config, class Element>
cudaError_t launch_aggregate_config(AggregateArguments const& args, cudaStream_t stream) {
  int64_t const parts = aggregate_parts<Config, Element>(args.hidden);
  if (args.tokens != 0 && parts > INT32_MAX / args.tokens) return cudaErrorInvalidValue;
  int64_t const ctas = (args.tokens * parts + Config::config.warps - 1) / Config::config.warps;
  if (ctas == 0) return cudaSuccess;
  aggregate<Config, Element>
      <<<static_cast<unsigned>(ctas), Config::config.threads(), 0, stream>>>(args);
  return cudaGetLastError();
}

template <class Config, class Element>
cudaError_t launch_aggregate_beside_config(AggregateBesideArguments const& args, int sm_count,
                                           cudaStream_t stream) {
  if (args.aggregate.tokens == 0) return cudaSuccess;
  return host::launch_early(aggregate_beside<Config, Element>, true,
                            unsigned(sm_count * Config::config.ctas_per_sm),
                            Config::config.threads(), 0, stream, args);
}

// Rows and bases of 16 bytes.
template <class Element>
bool aggregate_serves(AggregateArguments const& args) {
  constexpr int64_t kElements = AggregateVector<Element>::kElements;
  auto const aligned = [](void const* gmem) {
    return reinterpret_cast<uintptr_t>(gmem) % kAggregateVectorBytes == 0;
  };
  return args.hidden % kElements == 0 && args.o_pitch % kElements == 0 && aligned(args.gmem_y) &&
         aligned(args.gmem_o);
}

template <class Element>
cudaError_t launch_aggregate(AggregateArguments const& args, cudaStream_t stream) {
  if (!aggregate_serves<Element>(args)) return cudaErrorInvalidValue;
  return with_aggregate_config(args.top_k, [&]<class Config>(Config) {
    return launch_aggregate_config<Config, Element>(args, stream);
  });
}

template <class Element>
cudaError_t launch_aggregate_beside(AggregateBesideArguments const& args, int sm_count,
                                    cudaStream_t stream) {
  constexpr int64_t kMaxTokens = int64_t{1} << 31;  // tickets are 32-bit
  if (!aggregate_serves<Element>(args.aggregate) || args.aggregate.tokens > kMaxTokens) {
    return cudaErrorInvalidValue;
  }
  return with_aggregate_config(args.aggregate.top_k, [&]<class Config>(Config) {
    return launch_aggregate_beside_config<Config, Element>(args, sm_count, stream);
  });
}

}  // namespace tessera::cuda
