// SPDX-License-Identifier: Apache-2.0
// store epilogue: D = accumulators (+ bias of the segment's column), rounded once to bf16.
#pragma once

#include <type_traits>

#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "bias.cuh"

namespace tessera::cuda::gemm {

struct StoreParams {
  CUtensorMap d;  // ragged (column, 1 half, row, end), 64 x 1 x 64 x 1; unless deferred
  bf16* gmem_d;   // (rows, columns), pitch columns; deferred only
  Bias bias;
  int columns;
  int ragged_extent;  // of the row dimension of d
};

// Works after the k loop: it stages rows in slabs, which TMA stores.
template <class Core>
class StoreInSlabs {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = StoreParams;

  __device__ __forceinline__ StoreInSlabs(typename Core::Storage& smem, Params const& p,
                                          int consumer)
      : p_(p), slabs_(smem, consumer) {}

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 rows from `row`, in rounds of as many slabs as there are.
  __device__ __forceinline__ void store(Accumulators& acc, WorkTile const& tile, int row) {
    static_assert(kGemm.b_halves() == 1 && kSlabs % kRound == 0 && kRound % 2 == 0);
    int const column = tile.n_tile * kGemm.tile.n;
    TESSERA_UNROLL
    for (int first = 0; first < kSlabs; first += kRound) {
      slabs_.begin();
      TESSERA_UNROLL
      for (int slab = 0; slab < kRound; ++slab) {
        if (p_.bias.gmem != nullptr) {
          add_bias(acc, first + slab, p_.bias, tile.segment, column + (first + slab) * kSlabColumns,
                   p_.columns);
        }
        rows_.fill(slabs_.address(slab), [&](int i) { return acc.packed(first + slab, i); });
      }
      slabs_.publish();
      if (slabs_.issuer()) {
        TESSERA_UNROLL
        for (int slab = 0; slab < kRound; ++slab) {
          slabs_.store(slab, &p_.d, column + (first + slab) * kSlabColumns, 0,
                       p_.ragged_extent + row - tile.end, tile.end);
        }
        slabs_.commit();
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void settle() {}
  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  static constexpr int kSlabs = kGemm.tile.n / kSlabColumns;
  static constexpr int kRound = kGemm.epilogue.slabs;

  Params const& p_;
  typename Core::Slabs slabs_;
  typename Core::SlabRows rows_;
};

// Works under the next tile's k loop.
template <class Core>
class StoreDeferred {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kDeferred;
  using Params = StoreParams;

  __device__ __forceinline__ StoreDeferred(typename Core::Storage& smem, Params const& p,
                                           int consumer)
      : p_(p), rows_(smem, consumer) {
    static_assert(kGemm.b_halves() == 1);
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 rows from `row`.
  __device__ __forceinline__ void keep(Accumulators& acc, WorkTile const& tile, int row) {
    row_ = row + arch::warp_in_warpgroup() * kWarpRows;
    end_ = tile.end;
    column_ = tile.n_tile * kGemm.tile.n;
    keep_group<1>(acc, tile.segment);
    keep_group<0>(acc, tile.segment);
  }

  __device__ __forceinline__ void work(int piece) {
    work(piece, [this](int row) { return int64_t{row_ + row} * p_.columns; });
  }

  __device__ __forceinline__ void drain() const {}

 protected:
  // first_of(row): where row `row` of the warp's 16 begins, in elements.
  template <class FirstOf>
  __device__ __forceinline__ void work(int piece, FirstOf&& first_of) {
    auto const held = rows_.take(piece);
    int const row = row_ + held.row;
    int const column = column_ + held.group * kGroupColumns + held.column;
    bf16* const gmem = p_.gmem_d + first_of(held.row) + column;
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) {
      uint4 const values = held.load(slab);
      if (row < end_ && column + slab * kSlabColumns < p_.columns) {
        arch::store_streaming_16(gmem + slab * kSlabColumns, values);
      }
    }
  }

 private:
  template <int kG>
  __device__ __forceinline__ void keep_group(Accumulators& acc, int segment) {
    if (p_.bias.gmem != nullptr) {
      int const column = column_ + kG * kGroupColumns;
      add_bias(acc, 2 * kG, p_.bias, segment, column, p_.columns);
      add_bias(acc, 2 * kG + 1, p_.bias, segment, column + kSlabColumns, p_.columns);
    }
    rows_.template keep<kG>(acc);
  }

  Params const& p_;
  typename Core::DeferredRows rows_;
  int row_ = 0;  // the warp's first
  int end_ = 0;
  int column_ = 0;
};

// This is a class of its own, as GCC 12 fails at the same as one alias.
template <class Core>
struct StoreEpilogueOf {
  using Type = std::conditional_t<Core::kGemm.defers(), StoreDeferred<Core>, StoreInSlabs<Core>>;
};
template <class Core>
using StoreEpilogue = typename StoreEpilogueOf<Core>::Type;

}  // namespace tessera::cuda::gemm
