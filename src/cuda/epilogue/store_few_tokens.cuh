// SPDX-License-Identifier: Apache-2.0
// Epilogues of experts_fwd_few_tokens: a warp stores the sums of 16 rows of weights with up to 8 rows of an expert, or
// adds up 16 columns of o. Arguments are those of host/projection.hpp and host/aggregate.hpp.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../arch/signal.cuh"
#include "../arch/warp.cuh"
#include "../warp/aggregate_vector.cuh"
#include "activate.cuh"

namespace tessera::cuda::few_tokens {

constexpr int kWeightRows = 16;  // of a job

// Up to 8 rows of an expert.
struct RowBlock {
  int32_t expert, first, count;
};

// Columns of a that a job of up makes.
__host__ __device__ constexpr int32_t up_job_columns(bool gated) {
  return gated ? kWeightRows / 2 : kWeightRows;
}

// Values of a and y that others wait for are stored inverted, in cleared rows: none of them is 0 then, as no value is
// the NaN 0xffff. Rounding gives 0x7fff for each NaN.
__device__ __forceinline__ void store_inverted(__nv_bfloat16* gmem, __nv_bfloat16 value) {
  arch::store_relaxed_2(gmem, static_cast<uint16_t>(~__bfloat16_as_ushort(value)));
}

// Looks for values that are not there, two at a time.
class MissingValues {
 public:
  // Subtracting 1 gives bit 15 to a half that has not had it if that is 0, and then perhaps to the other half as well.
  __device__ __forceinline__ void look_at(uint32_t two) { borrows_ |= (two - 0x00010001u) & ~two; }
  __device__ __forceinline__ bool any() const { return (borrows_ & 0x80008000u) != 0; }

 private:
  uint32_t borrows_ = 0;
};

template <class Rows>
__device__ __forceinline__ float bias_of(Rows const& b, int32_t expert, int64_t row) {
  if (b.gmem == nullptr) return 0;
  return __bfloat162float(static_cast<__nv_bfloat16 const*>(b.gmem)[b.row_offset(expert, row)]);
}

// Stores h and, inverted, a of a job of up: lane 4g + q has rows 2q and 2q + 1 of the block.
template <class Arguments>
__device__ __forceinline__ void store_up(Arguments const& p, RowBlock const& block,
                                         int32_t column_block, bool gated, float const (&sums)[4]) {
  int const g = arch::lane_idx() / 4, q = arch::lane_idx() % 4;
  int64_t const n = p.intermediate, width = gated ? 2 * n : n;
  int64_t const column = int64_t{column_block} * up_job_columns(gated) + g;
  auto* const gmem_h = static_cast<__nv_bfloat16*>(p.gmem_h);
  auto* const gmem_a = static_cast<__nv_bfloat16*>(p.gmem_a);
  auto const store = [&](int64_t row, int64_t at, __nv_bfloat16 gate, __nv_bfloat16 up) {
    if (gmem_h != nullptr) {
      gmem_h[row * width + at] = gate;
      if (gated) gmem_h[row * width + n + at] = up;
    }
    store_inverted(gmem_a + row * n + at,
                   __float2bfloat16_rn(
                       gemm::activate(p.activation, __bfloat162float(gate), __bfloat162float(up))));
  };
  // Rows g and g + 8 of the weights: gate and up of one column, or two columns.
#pragma unroll 1
  for (int i = 0; i < (gated ? 2 : 4); ++i) {
    float const first = i % 2 == 0 ? sums[0] : sums[1], second = i % 2 == 0 ? sums[2] : sums[3];
    int const r = 2 * q + i % 2;
    int64_t const at = column + i / 2 * 8;
    if (r >= block.count || at >= n) continue;
    auto const value = [&](int half, float sum) {
      return __float2bfloat16_rn(sum + bias_of(p.b_up[half], block.expert, at));
    };
    store(block.first + r, at, value(0, i < 2 ? first : second),
          gated ? value(1, second) : __nv_bfloat16{});
  }
}

// inverts: an aggregate waits for y.
template <class Arguments>
__device__ __forceinline__ void store_down(Arguments const& p, RowBlock const& block,
                                           int32_t column_block, float const (&sums)[4],
                                           bool inverts) {
  int const g = arch::lane_idx() / 4, q = arch::lane_idx() % 4;
  auto* const gmem_y = static_cast<__nv_bfloat16*>(p.gmem_y);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    int const r = 2 * q + i % 2;
    int64_t const column = int64_t{column_block} * kWeightRows + g + i / 2 * 8;
    if (r >= block.count || column >= p.hidden) continue;
    float const of_half[2] = {i < 2 ? sums[0] : sums[2], i < 2 ? sums[1] : sums[3]};
    __nv_bfloat16* const gmem_value = gmem_y + (block.first + r) * p.hidden + column;
    __nv_bfloat16 const value = __float2bfloat16_rn((i % 2 == 0 ? of_half[0] : of_half[1]) +
                                                    bias_of(p.b_down, block.expert, column));
    if (inverts) {
      store_inverted(gmem_value, value);
    } else {
      *gmem_value = value;
    }
  }
}

// Adds up a block of columns of all tokens: two lanes have 8 columns of a token each. Waits for the values of y, which
// are inverted. By a converged warp.
template <class Arguments>
__device__ __forceinline__ void aggregate_columns(Arguments const& p, int32_t column_block) {
  using Vector = AggregateVector<__nv_bfloat16>;
  constexpr int kAtOnce = 8, kTokens = arch::kWarpThreads / 2;
  int64_t const column =
      int64_t{column_block} * kWeightRows + arch::lane_idx() % 2 * Vector::kElements;
  bool const exists = column < p.hidden;
  bool const varies = p.gmem_token_offsets != nullptr;
  auto const* const gmem_y = static_cast<__nv_bfloat16 const*>(p.gmem_y) + column;
  for (int64_t first = 0; first < p.tokens; first += kTokens) {
    int64_t const token = first + arch::lane_idx() / 2;
    bool const wanted = exists && token < p.tokens;
    int64_t begin = 0, end = 0;
    if (wanted) {
      begin = varies ? p.gmem_token_offsets[token] : token * p.top_k;
      end = varies ? p.gmem_token_offsets[token + 1] : begin + p.top_k;
    }
    float sum[Vector::kElements] = {};
    int64_t slot = begin;
    do {
      int32_t rows[kAtOnce];
      float scores[kAtOnce];
      uint4 values[kAtOnce];
      TESSERA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        bool const is_slot = slot + i < end;
        rows[i] = is_slot ? p.gmem_inverse_permutation[slot + i] : -1;
        scores[i] = is_slot && p.gmem_scores != nullptr ? p.gmem_scores[slot + i] : 1.0f;
      }
      MissingValues missing;
      do {
        missing = {};
        TESSERA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (rows[i] >= 0) values[i] = arch::load_relaxed_16(gmem_y + int64_t{rows[i]} * p.hidden);
        }
        TESSERA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (rows[i] < 0) continue;
          for (uint32_t const two : {values[i].x, values[i].y, values[i].z, values[i].w}) {
            missing.look_at(two);
          }
        }
      } while (__any_sync(arch::kAllLanes, missing.any()));
      TESSERA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (rows[i] < 0) continue;
        uint4 const v = values[i];
        Vector::add(sum, {~v.x, ~v.y, ~v.z, ~v.w}, scores[i]);
      }
      slot += kAtOnce;
    } while (__any_sync(arch::kAllLanes, slot < end));
    if (wanted) {
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.gmem_o) + token * p.o_pitch +
                                column) = Vector::round(sum);
    }
  }
}

}  // namespace tessera::cuda::few_tokens
