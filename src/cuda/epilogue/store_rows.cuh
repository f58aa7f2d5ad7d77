// SPDX-License-Identifier: Apache-2.0
// store epilogue of threads that have a row each: D = accumulators (+ bias of the segment's column), rounded once to
// bf16. `Core` is what an architecture gives such threads (gemm/sm100/core.cuh).
#pragma once

#include <cuda.h>

#include "../arch/approx_math.cuh"
#include "../gemm/work_tile.hpp"
#include "bias.cuh"

namespace tessera::cuda::gemm {

struct StoreRowsParams {
  CUtensorMap d;  // ragged (column, 1 half, row, end), 64 x 1 x 32 x 1
  Bias bias;
  int columns;
  int ragged_extent;  // of the row dimension of d
};

template <class Core>
class StoreRows {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = StoreRowsParams;

  __device__ __forceinline__ StoreRows(typename Core::Storage& smem, Params const& p)
      : p_(p), slabs_(smem) {}

  __device__ __forceinline__ void begin(WorkTile const&, int) {}

  // The warp's 32 rows, of which `row` is the first, slab by slab; releases the accumulators with the last one.
  __device__ __forceinline__ void store(typename Core::Rows& rows, WorkTile const& tile, int row) {
    int const first = tile.n_tile * Core::kTileN;
    int const slabs = min(Core::kTileN, p_.columns - first + kSlabColumns - 1) / kSlabColumns;
    for (int slab = 0; slab < slabs; ++slab) {
      slabs_.begin();
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t r[kLoaded];
        int const column = slab * kSlabColumns + half * kLoaded;
        rows.load(r, column);
        rows.loaded();
        if (half == 1 && slab == slabs - 1) rows.release();
        if (p_.bias.gmem != nullptr) add_bias(r, tile.segment, first + column);
        TESSERA_UNROLL
        for (int c = 0; c < kLoaded; c += 8) {
          slabs_.put((half * kLoaded + c) / 8,
                     {pair(r, c), pair(r, c + 2), pair(r, c + 4), pair(r, c + 6)});
        }
      }
      slabs_.store(&p_.d, first + slab * kSlabColumns, 0, p_.ragged_extent + row - tile.end,
                   tile.end);
    }
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  static constexpr int kLoaded = 32;  // columns

  __device__ __forceinline__ static uint32_t pair(uint32_t const (&r)[kLoaded], int c) {
    return arch::pack_bf16(__uint_as_float(r[c]), __uint_as_float(r[c + 1]));
  }
  // All lanes have the same columns: their loads are one.
  __device__ __forceinline__ void add_bias(uint32_t (&r)[kLoaded], int segment, int column) const {
    bf16 const* gmem =
        p_.bias.gmem + segment * p_.bias.segment_stride + int64_t{column} * p_.bias.column_stride;
    TESSERA_UNROLL
    for (int c = 0; c < kLoaded; ++c) {
      float const b = arch::load_bf16(gmem + c * p_.bias.column_stride, column + c < p_.columns);
      r[c] = __float_as_uint(__uint_as_float(r[c]) + b);
    }
  }

  Params const& p_;
  typename Core::Slabs slabs_;
};

}  // namespace tessera::cuda::gemm
