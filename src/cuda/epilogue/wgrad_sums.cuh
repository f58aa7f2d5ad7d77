// SPDX-License-Identifier: Apache-2.0
// Weight gradients in fp32, on their way from accumulators to memory by TMA, stored or added: 32 i of a warpgroup's
// 64 c at a time, a piece of 8 KB.
//
// Stored or added under the next tile's k loop by WgradSumsDeferred (gemm/sm90/deferred_sums.cuh), or after its own by
// WgradStoreInSlabs (wgrad_store.cuh).
#pragma once

#include "../arch/tma.cuh"
#include "../gemm/scheduler.cuh"
#include "../gemm/slabs.cuh"
#include "wgrad_place.cuh"

namespace tessera::cuda::gemm {

// Slabs of fp32 as TMA stores or adds them.
template <Major kMajor>
struct WgradSums {
  // One thread puts 64 c from `row`, 32 i from `i` of a half.
  __device__ __forceinline__ static void put(bf16 const* smem, WgradHalf const& dw, int i, int row,
                                             int segment, bool adds) {
    WgradCoordinates at = wgrad_coordinates<kMajor>(dw, i, row);
    put_box(smem, dw, at, segment, adds);
    if constexpr (kMajor == Major::kK) {
      at.c0 += Fp32Slab::kBoxRows;
      put_box(smem + Fp32Slab::kBoxBytes / sizeof(bf16), dw, at, segment, adds);
    }
  }

 private:
  __device__ __forceinline__ static void put_box(bf16 const* smem, WgradHalf const& dw,
                                                 WgradCoordinates at, int segment, bool adds) {
    if (adds) {
      arch::tma_reduce_add(&dw.map, smem, at.c0, at.c1, at.c2, segment);
    } else {
      arch::tma_store(&dw.map, smem, at.c0, at.c1, at.c2, segment, arch::l2_evict_first());
    }
  }
};

// Adds sums of whole column groups.
template <class Core, Major kMajor>
class WgradSumsDeferred {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kDeferred;
  using Params = WgradStoreParams;

  __device__ __forceinline__ WgradSumsDeferred(typename Core::Storage& smem, Params const& p,
                                               int consumer)
      : p_(p), held_(smem, consumer) {
    static_assert(kGemm.varlen_k() && !kGemm.any_b_layout());  // so n is a multiple of 64
    static_assert(kDeferredPieces * Fp32Slab::kColumns == kGemm.tile.n);
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 c from `row`.
  __device__ __forceinline__ void keep(Accumulators& acc, WorkTile const& tile, int row) {
    wanted_ = !(p_.accumulates && tile.begin == tile.end);
    if (!wanted_) return;
    n_tile_ = tile.n_tile;
    segment_ = tile.segment;
    row_ = row;
    held_.keep(acc);
  }

  __device__ __forceinline__ void work(int piece) {
    if (!wanted_) return;
    held_.take(piece, [&](bf16 const* smem) {
      WgradGroup const at = wgrad_group(p_, n_tile_ * (kGemm.tile.n / kSlabColumns) + piece / 2);
      if (at.exists) {
        WgradSums<kMajor>::put(smem, p_.halves[at.half], at.i + piece % 2 * Fp32Slab::kColumns,
                               row_, segment_, p_.accumulates);
        arch::tma_store_commit();
      }
    });
  }

  __device__ __forceinline__ void drain() const { held_.drain(); }

 private:
  Params const& p_;
  typename Core::template DeferredSums<kMajor> held_;
  int n_tile_ = 0, segment_ = 0, row_ = 0;
  bool wanted_ = false;
};

}  // namespace tessera::cuda::gemm
