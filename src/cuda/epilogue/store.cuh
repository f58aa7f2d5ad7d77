// SPDX-License-Identifier: Apache-2.0
// store epilogue: D = accumulators (+ bias of the segment's column), rounded once to bf16.
#pragma once

#include <type_traits>

#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "../gemm/sm90/deferred.cuh"
#include "../gemm/sm90/slab_store.cuh"
#include "bias.cuh"

namespace tessera::cuda::gemm {

struct StoreParams {
  CUtensorMap d;  // ragged (column, 1 half, row, end), 64 x 1 x 64 x 1; unless deferred
  bf16* gmem_d;   // (rows, columns), pitch columns; deferred only
  Bias bias;
  int columns;
  int ragged_extent;  // of the row dimension of d
};

// After the k loop: in slabs, stored by TMA.
template <GemmConfig kGemm>
class StoreInSlabs {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = StoreParams;

  __device__ __forceinline__ StoreInSlabs(SharedStorage<kGemm>& smem, Params const& p, int consumer)
      : p_(p), slabs_(smem, consumer) {}

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 rows from `row`, in rounds of as many slabs as there are.
  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row) {
    static_assert(kGemm.b_halves() == 1 && kSlabs % kRound == 0 && kRound % 2 == 0);
    int const column = tile.n_tile * kGemm.tile.n;
    TESSERA_UNROLL
    for (int first = 0; first < kSlabs; first += kRound) {
      slabs_.begin();
      TESSERA_UNROLL
      for (int slab = 0; slab < kRound; ++slab) {
        int const group = (first + slab) * kSlabColumns / kGroupColumns;
        int const i = slab % 2 * kSecond;
        if (p_.bias.gmem != nullptr) {
          int const c = column + (first + slab) * kSlabColumns;
          if (slab % 2 == 0) {
            add_bias<0>(acc[group], p_.bias, tile.segment, c, p_.columns);
          } else {
            add_bias<kSecond>(acc[group], p_.bias, tile.segment, c, p_.columns);
          }
        }
        slabs_.fill(slab, [&](int j, int half) {
          return arch::pack_bf16(acc[group][i + 4 * j + 2 * half],
                                 acc[group][i + 4 * j + 2 * half + 1]);
        });
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
  static constexpr int kSecond = kGroupColumns / 4;  // register of a group's second slab

  Params const& p_;
  SlabStore<kGemm> slabs_;
};

// Under the next tile's k loop.
template <GemmConfig kGemm>
class StoreDeferred {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kDeferred;
  using Params = StoreParams;

  __device__ __forceinline__ StoreDeferred(SharedStorage<kGemm>& smem, Params const& p,
                                           int consumer)
      : p_(p), rows_(smem, consumer) {
    static_assert(kGemm.b_halves() == 1);
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 rows from `row`.
  __device__ __forceinline__ void keep(Accumulators<kGemm>& acc, WorkTile const& tile, int row) {
    row_ = row + arch::warp_in_warpgroup() * kWarpRows;
    end_ = tile.end;
    column_ = tile.n_tile * kGemm.tile.n;
    keep_group<1>(acc, tile.segment);
    keep_group<0>(acc, tile.segment);
  }

  __device__ __forceinline__ void work(int piece) {
    auto const kept = rows_.take(piece);
    int const row = row_ + kept.row;
    int const column = column_ + kept.group * kGroupColumns + kept.column;
    bf16* const gmem = p_.gmem_d + int64_t{row} * p_.columns + column;
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) {
      uint4 const values = kept.load(slab);
      if (row < end_ && column + slab * kSlabColumns < p_.columns) {
        arch::store_streaming_16(gmem + slab * kSlabColumns, values);
      }
    }
  }

  __device__ __forceinline__ void drain() const {}

 private:
  template <int kG>
  __device__ __forceinline__ void keep_group(Accumulators<kGemm>& acc, int segment) {
    if (p_.bias.gmem != nullptr) {
      int const column = column_ + kG * kGroupColumns;
      add_bias<0>(acc[kG], p_.bias, segment, column, p_.columns);
      add_bias<kGroupColumns / 4>(acc[kG], p_.bias, segment, column + kSlabColumns, p_.columns);
    }
    rows_.template keep<kG>(acc[kG]);
  }

  Params const& p_;
  DeferredRows<kGemm> rows_;
  int row_ = 0;  // the warp's first
  int end_ = 0;
  int column_ = 0;
};

// By a class of its own: GCC 12 fails at the same as one alias.
template <GemmConfig kGemm>
struct StoreEpilogueOf {
  using Type = std::conditional_t<kGemm.defers(), StoreDeferred<kGemm>, StoreInSlabs<kGemm>>;
};
template <GemmConfig kGemm>
using StoreEpilogue = typename StoreEpilogueOf<kGemm>::Type;

}  // namespace tessera::cuda::gemm
