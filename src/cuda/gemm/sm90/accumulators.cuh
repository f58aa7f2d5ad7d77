// SPDX-License-Identifier: Apache-2.0
// 64 rows x tile.n columns of fp32 sums, as the threads of a warpgroup hold them after the k loop. Epilogues see rows,
// columns and values; which thread holds which value, gemm/sm90 alone knows.
//   slab    64 columns of the tile, 128 bytes of bf16
//   pair    two neighbouring columns of one row. A thread holds kPairs pairs of each slab. Pair i lies at one place of
//           every slab, so that results of pair i may be stored as pair i of another slab (SlabRows)
//   strip   16 columns of a slab; a thread's pairs of strip m are kStripPairs * m and those that follow
//   quad    a thread's share of the warp's 16 rows x kQuadColumns columns, for those who store sums and read them again
//   rows    a thread's pairs lie in kRows rows, the same ones in all slabs
// Pass indices that are constants after unrolling: with others the compiler puts the sums on the stack, and the report
// of tools/ptxas_report.py shows it.
#pragma once

#include "../../arch/approx_math.cuh"
#include "../../arch/warp.cuh"
#include "../storage.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
class Accumulators {
 public:
  static constexpr int kSlabs = kGemm.tile.n / kSlabColumns;
  static constexpr int kRows = 2;
  static constexpr int kStrips = kSlabColumns / 16;
  static constexpr int kStripPairs = 4;
  static constexpr int kPairs = kStrips * kStripPairs;
  static constexpr int kQuadColumns = 8;

  // The i-th of this thread's rows where the first of the warp's 16, or of the 64, is called `first`.
  __device__ __forceinline__ static int warp_row(int first, int i) {
    return first + arch::lane_idx() / 4 + 8 * i;
  }
  __device__ __forceinline__ static int row(int first, int i) {
    return first + arch::warp_in_warpgroup() * kWarpRows + arch::lane_idx() / 4 + 8 * i;
  }

  // Adds up what the lanes have that share this thread's rows; every lane of the warp calls it, and has the sum.
  __device__ __forceinline__ static float sum_of_row(float value) {
    value += __shfl_xor_sync(arch::kAllLanes, value, 1);
    value += __shfl_xor_sync(arch::kAllLanes, value, 2);
    return value;
  }
  // Is true in one of those lanes.
  __device__ __forceinline__ static bool speaks_for_row() { return arch::lane_idx() % 4 == 0; }

  // A thread's columns in a slab: the first one where the slab's is called `first`, and the step to the next two; and
  // the same where pairs of columns are counted.
  static constexpr int kColumnStep = 8, kColumnPairStep = kColumnStep / 2;
  __device__ __forceinline__ static int column(int first) {
    return first + arch::lane_idx() % 4 * 2;
  }
  __device__ __forceinline__ static int column_pair(int first) {
    return first + arch::lane_idx() % 4;
  }

  // Calls f(column, rows) for the columns `column`, column + 1 of a slab, ascending, that this thread has values of;
  // `first` is what the slab's first column is called. rows(first, g) calls g(row, left, right) for each of the
  // thread's rows, and `first` is what the first of the 64 is called.
  template <class F>
  __device__ __forceinline__ void for_each_columns(int slab, int first, F f) {
    visit<kColumnStep>(slab, 1, column(first), f);
  }
  // Does so for so many slabs whose columns come in pairs, as gate and up do where they are interleaved: f(pair,
  // rows), and `first` is what their first pair of columns is called.
  template <class F>
  __device__ __forceinline__ void for_each_column_pair(int slab, int slabs, int first, F f) {
    visit<kColumnPairStep>(slab, slabs, column_pair(first), f);
  }

  // Calls f(row, column, value) for each value of this thread; `row` and `column` are what the first ones are called.
  template <class F>
  __device__ __forceinline__ void for_each(int row, int column, F f) {
    TESSERA_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      for_each_columns(slab, column + slab * kSlabColumns, [&](int c, auto rows) {
        rows(row, [&](int r, float& left, float& right) {
          f(r, c, left);
          f(r, c + 1, right);
        });
      });
    }
  }

  // Calls f(i, row, left, right) for each of the thread's pairs of a strip: the i-th, in its row-th row.
  template <class F>
  __device__ __forceinline__ void for_each_pair(int slab, int strip, F f) {
    TESSERA_UNROLL
    for (int i = 0; i < kStripPairs; ++i) {
      int const pair = strip * kStripPairs + i;
      f(i, i % kRows, value(slab, pair, 0), value(slab, pair, 1));
    }
  }

  // Pair i of a slab, rounded to bf16.
  __device__ __forceinline__ uint32_t packed(int slab, int i) const {
    return arch::pack_bf16(value(slab, i, 0), value(slab, i, 1));
  }

  // Quad i is of the tile's columns from kQuadColumns * i on.
  __device__ __forceinline__ float4 quad(int i) const {
    constexpr int kQuads = kSlabColumns / kQuadColumns;
    int const slab = i / kQuads, pair = i % kQuads * 2;
    return {value(slab, pair, 0), value(slab, pair, 1), value(slab, pair + 1, 0),
            value(slab, pair + 1, 1)};
  }
  // Value j of a quad is of this row among the warp's 16, and of this column among the quad's.
  __device__ __forceinline__ static int quad_row(int j) { return warp_row(0, j / 2); }
  __device__ __forceinline__ static int quad_column(int j) {
    return arch::lane_idx() % 4 * 2 + j % 2;
  }

 private:
  friend struct Fragments;

  template <int kStep, class F>
  __device__ __forceinline__ void visit(int slab, int slabs, int first, F f) {
    TESSERA_UNROLL
    for (int j = 0; j < slabs * (kPairs / kRows); ++j) {
      f(first + kStep * j, [&](int first_row, auto g) {
        TESSERA_UNROLL
        for (int i = 0; i < kRows; ++i) {
          int const pair = j % (kPairs / kRows) * kRows + i;
          float& left = value(slab + j / (kPairs / kRows), pair, 0);
          float& right = value(slab + j / (kPairs / kRows), pair, 1);
          g(row(first_row, i), left, right);
        }
      });
    }
  }

  // wgmma's fragment order (arch/sm90/wgmma.cuh) has pair i in columns 8 * (i / 2) and row i % 2.
  __device__ __forceinline__ float& value(int slab, int i, int right) {
    return values_[slab / 2][slab % 2 * (2 * kPairs) + 2 * i + right];
  }
  __device__ __forceinline__ float const& value(int slab, int i, int right) const {
    return values_[slab / 2][slab % 2 * (2 * kPairs) + 2 * i + right];
  }

  float values_[kGemm.column_groups()][kGroupColumns / 2];
};

// Fragments are what wgmmas write: the sums of 128 columns in fragment order. For gemm/sm90 alone.
struct Fragments {
  template <GemmConfig kGemm>
  __device__ __forceinline__ static float (&of(Accumulators<kGemm>& acc,
                                               int group))[kGroupColumns / 2] {
    return acc.values_[group];
  }
};

}  // namespace tessera::cuda::gemm
