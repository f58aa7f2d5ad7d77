// SPDX-License-Identifier: Apache-2.0
// activation_gradient epilogue of threads that have a row each: with t = accumulators (dO w_down), s the row's score
// and (g, u) = h
//   ds partial = <t, act(h)> over 128 columns,   dh = J_act(h)^T (s t),   a' = s act(h)
// from fp32 values, each stored value rounded once. `Core` is what an architecture gives such threads (sm100/core.cuh).
// A warp works alone, on blocks of its 32 rows x 64 columns. Their h comes by TMA, of the first two blocks under the k
// loop; dh takes its place; a' has a slab of its own. A thread adds up ds of its row in the order of columns.
#pragma once

#include <cuda.h>

#include "../arch/tma.cuh"
#include "../arch/warp.cuh"
#include "../gemm/storage.cuh"
#include "../gemm/work_tile.hpp"
#include "activation_gradient_pair.cuh"

namespace tessera::cuda::gemm {

struct ActivationGradientRowsParams {
  CUtensorMap h;                // (column, half, row), 64 x 1 x 32
  CUtensorMap dh;               // ragged (column, half, row, end), 64 x 1 x 32 x 1
  CUtensorMap a_scaled;         // the same with one half; only if stores_a
  float* gmem_partials;         // (rows, groups), by row; null: not stored
  float const* gmem_scores;     // by slot
  int const* gmem_permutation;  // row -> slot
  Activation activation;
  int columns;        // n
  int groups;         // of 128 columns
  int ragged_extent;  // of the row dimension of dh and a_scaled
  bool stores_a;
};

template <class Core, ActivationKind kKind>
class ActivationGradientRows {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = ActivationGradientRowsParams;
  static constexpr int kHalves = ActivationFunction<kKind>::kGated ? 2 : 1;

  __device__ __forceinline__ ActivationGradientRows(typename Core::Storage& smem, Params const& p)
      : p_(p), slabs_(smem) {
    static_assert(Core::kHalves == 1 && Slabs::kBufferSlabs == kHalves &&
                  Slabs::kSlabs == Slabs::kLeftOver + 1);
  }

  // Asks for h of the first two blocks and for the scores of the warp's 32 rows, of which `row` is the first.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row) {
    row_ = row;
    first_column_ = tile.n_tile * Core::kTileN;
    int const columns = min(Core::kTileN, p_.columns - first_column_);
    blocks_ = (columns + kSlabColumns - 1) / kSlabColumns;
    slabs_.template wait_read<0>();
    if (arch::elect_one()) {
      load(0);
      if (blocks_ > 1) load(1);
    }
    __syncwarp();
    int const own = row + arch::lane_idx();
    score_ = own < tile.end ? p_.gmem_scores[p_.gmem_permutation[own]] : 0.0f;
  }

  // Block by block; releases the accumulators with the last one.
  __device__ __forceinline__ void store(typename Core::Rows& rows, WorkTile const& tile, int) {
    float ds = 0.0f;
    for (int block = 0; block < blocks_; ++block) {
      slabs_.wait(block);
      differentiate_block(rows, block, ds);
      slabs_.publish([&] { store_block(block, tile.end); });
      bool const ends_group = block % kGroupBlocks == kGroupBlocks - 1 || block == blocks_ - 1;
      if (ends_group) {
        store_partial(block, tile.end, ds);
        ds = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  using Slabs = typename Core::LoadedSlabs;
  static constexpr int kLoaded = 32;  // columns
  static constexpr int kPartChunks = kLoaded / 8;
  static constexpr int kGroupBlocks = kGroupColumns / kSlabColumns;

  __device__ __forceinline__ int column_of(int block) const {
    return first_column_ + block * kSlabColumns;
  }

  // One lane calls it, as store_block().
  __device__ __forceinline__ void load(int block) const {
    slabs_.load(block, [&](bf16* slab, int half, auto* full) {
      arch::tma_load(slab, &p_.h, full, column_of(block), half, row_);
    });
  }
  __device__ __forceinline__ void store_block(int block, int end) const {
    int const column = column_of(block), ragged_row = p_.ragged_extent + row_ - end;
    uint64_t const policy = arch::l2_evict_first();
    TESSERA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      arch::tma_store(&p_.dh, slabs_.slab_of(block, half), column, half, ragged_row, end, policy);
    }
    if (p_.stores_a) {
      arch::tma_store(&p_.a_scaled, slabs_.slab(Slabs::kLeftOver), column, 0, ragged_row, end,
                      policy);
    }
  }

  // Turns the h of a block into dh.
  __device__ __forceinline__ void differentiate_block(typename Core::Rows& rows, int block,
                                                      float& ds) const {
    bf16* const slab_a = slabs_.slab(Slabs::kLeftOver);
    TESSERA_UNROLL
    for (int part = 0; part < 2; ++part) {
      uint32_t t[kLoaded];
      rows.load(t, block * kSlabColumns + part * kLoaded);
      rows.loaded();
      if (part == 1 && block == blocks_ - 1) rows.release();
      uint4 a[kPartChunks];
      TESSERA_UNROLL
      for (int c = 0; c < kPartChunks; ++c) {
        a[c] = differentiate_chunk(block, part * kPartChunks + c, t, 8 * c, ds);
      }
      if (part == 0) {  // a' and h of the block before have been read
        slabs_.template wait_read<0>();
        if (block > 0 && block + 1 < blocks_ && arch::elect_one()) load(block + 1);
        __syncwarp();
      }
      TESSERA_UNROLL
      for (int c = 0; c < kPartChunks; ++c) slabs_.put(slab_a, part * kPartChunks + c, a[c]);
    }
  }

  // Columns 8 chunk .. + 7 of the block, whose t begins at t[first]. Returns their a'.
  __device__ __forceinline__ uint4 differentiate_chunk(int block, int chunk,
                                                       uint32_t const (&t)[kLoaded], int first,
                                                       float& ds) const {
    bf16* const slab_g = slabs_.slab_of(block, 0);
    bf16* const slab_u = slabs_.slab_of(block, kHalves - 1);
    uint4 g = slabs_.get(slab_g, chunk), u = {}, a;
    if constexpr (kHalves == 2) u = slabs_.get(slab_u, chunk);
    auto const pair = [&](int i, uint32_t& gate, uint32_t& up, uint32_t& scaled) {
      differentiate_pair<kKind>(p_.activation, __uint_as_float(t[first + i]),
                                __uint_as_float(t[first + i + 1]), score_, gate, up, scaled, ds);
    };
    pair(0, g.x, u.x, a.x);
    pair(2, g.y, u.y, a.y);
    pair(4, g.z, u.z, a.z);
    pair(6, g.w, u.w, a.w);
    slabs_.put(slab_g, chunk, g);
    if constexpr (kHalves == 2) slabs_.put(slab_u, chunk, u);
    return a;
  }

  // ds of the group that ends with `block`.
  __device__ __forceinline__ void store_partial(int block, int end, float ds) const {
    int const own = row_ + arch::lane_idx();
    if (p_.gmem_partials != nullptr && own < end) {
      p_.gmem_partials[int64_t{own} * p_.groups + column_of(block) / kGroupColumns] = ds;
    }
    __syncwarp();
  }

  Params const& p_;
  Slabs slabs_;
  int row_;  // first of the warp's 32
  int first_column_, blocks_;
  float score_;  // of this thread's row
};

}  // namespace tessera::cuda::gemm
