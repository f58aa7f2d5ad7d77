// SPDX-License-Identifier: Apache-2.0
// store epilogue: D = accumulators (+ bias of the segment's column), rounded once to bf16.
#pragma once

#include "../bias.cuh"
#include "../lent_stages.cuh"
#include "../slab_store.cuh"
#include "../tile_scheduler.cuh"

namespace tessera::cuda::block {

struct StoreParams {
  CUtensorMap d;  // ragged (column, 1 half, row, end), 64 x 1 x 64 x 1
  Bias bias;
  int columns;
  int ragged_extent;  // of the row dimension of d
};

template <GemmConfig kGemm>
class StoreEpilogue {
 public:
  using Params = StoreParams;

  __device__ __forceinline__ StoreEpilogue(SharedStorage<kGemm>& smem, Params const& p,
                                           int consumer)
      : p_(p), staging_(smem, consumer) {
    static_assert(kGemm.lent_stages == 0 || kGemm.lent_stages == kSlabs / kRound);
  }

  // 64 rows from `row`, in rounds of as many slabs as there are; `ring` where they are lent.
  template <class... Ring>
  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row,
                                        Ring&... ring) {
    static_assert(kGemm.b_halves == 1 && kSlabs % kRound == 0 && kRound % 2 == 0);
    int const column = tile.n_tile * kGemm.tile.n;
    TESSERA_UNROLL
    for (int first = 0; first < kSlabs; first += kRound) {
      bf16* const slabs = staging_.begin(first / kRound, ring...);
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
        rows_.fill(slabs + slab * kPitch, [&](int j, int half) {
          return arch::pack_bf16(acc[group][i + 4 * j + 2 * half],
                                 acc[group][i + 4 * j + 2 * half + 1]);
        });
      }
      staging_.publish(first / kRound, [&] {
        TESSERA_UNROLL
        for (int slab = 0; slab < kRound; ++slab) {
          arch::tma_store(&p_.d, slabs + slab * kPitch, column + (first + slab) * kSlabColumns, 0,
                          p_.ragged_extent + row - tile.end, tile.end, arch::l2_evict_first());
        }
      });
    }
  }

  __device__ __forceinline__ void settle()
    requires(kGemm.lent_stages > 0)
  {
    staging_.settle();
  }
  __device__ __forceinline__ void drain() const { staging_.drain(); }

 private:
  static constexpr int kSlabs = kGemm.tile.n / kSlabColumns;
  static constexpr int kRound = Staging<kGemm>::kSlabs;
  static constexpr int kPitch = Staging<kGemm>::kPitch;
  static constexpr int kSecond = kGroupColumns / 4;  // register of a group's second slab

  Params const& p_;
  Staging<kGemm> staging_;
  SlabRows rows_;
};

}  // namespace tessera::cuda::block
