// SPDX-License-Identifier: Apache-2.0
// activation epilogue of threads that have a row each: h = accumulators (+ bias), rounded to bf16; a = act(that h),
// rounded. A column group is [64 gate | 64 up]. `Core` is what an architecture gives such threads (sm100/core.cuh).
// The halves of h are stored first, then a, which loads the accumulators again: a thread holds 64 of them at a time.
#pragma once

#include <cuda.h>

#include "../arch/approx_math.cuh"
#include "../gemm/work_tile.hpp"
#include "activation_math.cuh"
#include "bias.cuh"

namespace tessera::cuda::gemm {

struct ActivationRowsParams {
  CUtensorMap h;  // ragged (column, halves, row, end), 64 x 1 x 32 x 1; only if stores_h
  CUtensorMap a;  // ragged (column, 1 half, row, end), 64 x 1 x 32 x 1; only if stores_a
  Bias bias[2];   // of the halves
  Activation activation;
  int columns;              // n
  int ragged_extent;        // of the row dimensions of h and a
  bool stores_h, stores_a;  // one of them at least
};

template <class Core, ActivationKind kKind>
class ActivationRows {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = ActivationRowsParams;
  static constexpr int kHalves = ActivationFunction<kKind>::kGated ? 2 : 1;
  static_assert(Core::kHalves == kHalves);

  __device__ __forceinline__ ActivationRows(typename Core::Storage& smem, Params const& p)
      : p_(p), slabs_(smem) {}

  __device__ __forceinline__ void begin(WorkTile const&, int) {}

  // The warp's 32 rows, of which `row` is the first; releases the accumulators when all are loaded.
  __device__ __forceinline__ void store(typename Core::Rows& rows, WorkTile const& tile, int row) {
    constexpr int kTileColumns = Core::kTileN / kHalves;
    int const first = tile.n_tile * kTileColumns;
    int const groups = min(kTileColumns, p_.columns - first + kSlabColumns - 1) / kSlabColumns;
    int const ragged_row = p_.ragged_extent + row - tile.end;
    for (int group = 0; group < groups; ++group) {
      int const column = first + group * kSlabColumns;
      if (p_.stores_h) {
        for (int half = 0; half < kHalves; ++half) {
          slabs_.begin();
          TESSERA_UNROLL
          for (int part = 0; part < 2; ++part) {
            uint32_t r[kLoaded];
            rows.load(r, place(group, half, part));
            rows.loaded();
            bool const is_last = half == kHalves - 1 && part == 1 && group == groups - 1;
            if (!p_.stores_a && is_last) rows.release();
            add_bias(r, half, tile.segment, column + part * kLoaded);
            TESSERA_UNROLL
            for (int c = 0; c < kLoaded; c += 8) {
              slabs_.put((part * kLoaded + c) / 8,
                         {pair(r, c), pair(r, c + 2), pair(r, c + 4), pair(r, c + 6)});
            }
          }
          slabs_.store(&p_.h, column, half, ragged_row, tile.end);
        }
      }
      if (!p_.stores_a) continue;
      slabs_.begin();
      TESSERA_UNROLL
      for (int part = 0; part < 2; ++part) {
        uint32_t gate[kLoaded], up[kHalves == 2 ? kLoaded : 1];
        rows.load(gate, place(group, 0, part));
        if constexpr (kHalves == 2) rows.load(up, place(group, 1, part));
        rows.loaded();
        if (part == 1 && group == groups - 1) rows.release();
        add_bias(gate, 0, tile.segment, column + part * kLoaded);
        if constexpr (kHalves == 2) add_bias(up, 1, tile.segment, column + part * kLoaded);
        TESSERA_UNROLL
        for (int c = 0; c < kLoaded; c += 8) {
          slabs_.put((part * kLoaded + c) / 8,
                     {activated(gate, up, c), activated(gate, up, c + 2),
                      activated(gate, up, c + 4), activated(gate, up, c + 6)});
        }
      }
      slabs_.store(&p_.a, column, 0, ragged_row, tile.end);
    }
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  static constexpr int kLoaded = 32;  // columns

  __device__ __forceinline__ static int place(int group, int half, int part) {
    return (group * kHalves + half) * kSlabColumns + part * kLoaded;
  }
  __device__ __forceinline__ static uint32_t pair(uint32_t const (&r)[kLoaded], int c) {
    return arch::pack_bf16(__uint_as_float(r[c]), __uint_as_float(r[c + 1]));
  }
  // Two columns of a, from the rounded h.
  template <int kUp>
  __device__ __forceinline__ uint32_t activated(uint32_t const (&gate)[kLoaded],
                                                uint32_t const (&up)[kUp], int c) const {
    float2 const g = arch::unpack_bf16(pair(gate, c));
    float2 u = {};
    if constexpr (kHalves == 2) u = arch::unpack_bf16(pair(up, c));
    using Function = ActivationFunction<kKind>;
    return arch::pack_bf16(Function::forward(p_.activation, g.x, u.x),
                           Function::forward(p_.activation, g.y, u.y));
  }
  // All lanes have the same columns: their loads are one.
  __device__ __forceinline__ void add_bias(uint32_t (&r)[kLoaded], int half, int segment,
                                           int column) const {
    Bias const& bias = p_.bias[half];
    if (bias.gmem == nullptr) return;
    bf16 const* gmem =
        bias.gmem + segment * bias.segment_stride + int64_t{column} * bias.column_stride;
    TESSERA_UNROLL
    for (int c = 0; c < kLoaded; ++c) {
      float const b = arch::load_bf16(gmem + c * bias.column_stride, column + c < p_.columns);
      r[c] = __float_as_uint(__uint_as_float(r[c]) + b);
    }
  }

  Params const& p_;
  typename Core::Slabs slabs_;
};

}  // namespace tessera::cuda::gemm
