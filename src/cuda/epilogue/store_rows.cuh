// SPDX-License-Identifier: Apache-2.0
// store epilogue of threads that have a row each: D = accumulators, to which a bias of the segment's column is added or
// an outer product u[row] * v[segment, column], rounded once to bf16. `Core` is what an architecture gives such threads
// (gemm/sm100/core.cuh). They work under the next tile's k loop, so the outer product needs no k step as it does where
// the warps of the epilogue multiply (gemm/sm90/outer_product.cuh).
#pragma once

#include <cuda.h>

#include "../arch/approx_math.cuh"
#include "../gemm/work_tile.hpp"
#include "bias.cuh"

namespace tessera::cuda::gemm {

// v of a segment is the sum of `terms` rows that follow each other.
struct OuterProduct {
  float const* gmem_u;  // (rows); null: none
  bf16 const* gmem_v;
  int64_t segment_stride;
  int64_t pitch;  // of rows of v
  int terms;
};

enum class Adds : uint8_t { kBias, kOuterProduct };

struct StoreRowsParams {
  CUtensorMap d;  // ragged (column, 1 half, row, end), 64 x 1 x 32 x 1
  Bias bias;      // read with Adds::kBias
  OuterProduct outer;
  int columns;
  int ragged_extent;  // of the row dimension of d
};

template <class Core, Adds kAdds = Adds::kBias>
class StoreRows {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = StoreRowsParams;

  __device__ __forceinline__ StoreRows(typename Core::Storage& smem, Params const& p)
      : p_(p), slabs_(smem) {}

  // u of this thread's row is under way before the k loop ends.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row) {
    if constexpr (kAdds == Adds::kOuterProduct) {
      int const own = row + arch::lane_idx();
      bool const reads = p_.outer.gmem_u != nullptr && own < tile.end;
      u_ = __uint_as_float(arch::load_4(p_.outer.gmem_u + own, reads));
    }
  }

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
        if constexpr (kAdds == Adds::kBias) {
          if (p_.bias.gmem != nullptr) add_bias(r, tile.segment, first + column);
        } else {
          if (p_.outer.gmem_u != nullptr) add_outer_product(r, tile.segment, first + column);
        }
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

  // Columns and what is before them are multiples of 8, so that 16 bytes of v are loaded or none.
  __device__ __forceinline__ void add_outer_product(uint32_t (&r)[kLoaded], int segment,
                                                    int column) const {
    bf16 const* gmem = p_.outer.gmem_v + segment * p_.outer.segment_stride + column;
    for (int term = 0; term < p_.outer.terms; ++term, gmem += p_.outer.pitch) {
      TESSERA_UNROLL
      for (int c = 0; c < kLoaded; c += 8) {
        if (column + c >= p_.columns) continue;
        uint4 const v = *reinterpret_cast<uint4 const*>(gmem + c);
        add_pair(r, c, v.x);
        add_pair(r, c + 2, v.y);
        add_pair(r, c + 4, v.z);
        add_pair(r, c + 6, v.w);
      }
    }
  }
  __device__ __forceinline__ void add_pair(uint32_t (&r)[kLoaded], int c, uint32_t bits) const {
    float2 const v = arch::unpack_bf16(bits);
    r[c] = __float_as_uint(fmaf(u_, v.x, __uint_as_float(r[c])));
    r[c + 1] = __float_as_uint(fmaf(u_, v.y, __uint_as_float(r[c + 1])));
  }

  Params const& p_;
  typename Core::Slabs slabs_;
  float u_ = 0.0f;  // of this thread's row
};

}  // namespace tessera::cuda::gemm
