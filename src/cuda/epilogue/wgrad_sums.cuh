// SPDX-License-Identifier: Apache-2.0
// Weight gradients in fp32, on their way from accumulators to memory by TMA, stored or added: 32 i of a warpgroup's
// 64 c at a time, a piece of 8 KB.
//
// Under the next tile's k loop (WgradSumsDeferred): nothing rounds a tile of 64 KB per warpgroup, so it is kept as
//   pieces 0 to 3  in slabs of their own, which takes a stage of B off the ring
//   pieces 4 to 7  in 64 registers, until TMA has read the slabs; then they take their places
// and TMA gets one piece behind some k_tile of the next tile, from warp w pieces w and w + 4. The pace is the point:
// additions to what is not in L2 take all SMs together a third of the bandwidth of stores, 5.5 bytes a cycle and SM;
// with all of a tile at once they fill the way to L2 for most of the next tile's k loop, on which its loads come late.
//   consumers | keep: wait read | fill 0-3, fence | mma .. piece 0 .. 3 .. | wait read | fill 4-7, fence | .. piece 7
// Lesson 10 of docs/lessons.md. Model: tests/cuda/pace_model_test.py.
#pragma once

#include "../arch/named_barrier.cuh"
#include "../arch/proxy_fence.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/store_shared.cuh"
#include "../arch/tma.cuh"
#include "../arch/warp.cuh"
#include "../gemm/scheduler.cuh"
#include "../gemm/sm90/deferred.cuh"
#include "wgrad_place.cuh"

namespace tessera::cuda::gemm {

// In shared memory rows of 128 bytes, swizzled:
//   K-major     two boxes of 32 i x 32 c, the transpose
//   rows-major  a box of 64 c x 32 i
template <Major kMajor>
struct Fp32Piece {
  static constexpr int kColumns = 32;
  static constexpr int kValues = 16;  // a thread's
  static constexpr int kBytes = kSubtileM * kColumns * sizeof(float);
  static constexpr int kBoxBytes = kBytes / 2;  // K-major
  static constexpr int kBoxRows = kSubtileM / 2;

  // By a warpgroup; value: kValues accumulators of this thread.
  __device__ __forceinline__ static void fill(float const* value, bf16* smem_piece) {
    int const lane = arch::lane_idx(), warp = arch::warp_in_warpgroup();
    uint32_t const smem = arch::shared_address(smem_piece);
    if constexpr (kMajor == Major::kRows) {
      // Two rows whose numbers differ in bit 0 share their banks: odd ones store their values in another order.
      int const row = lane / 4;
      bool const odd = row % 2 != 0;
      uint32_t const smem_row = smem + (warp * kWarpRows + row) * 128 + lane % 2 * 8;
      TESSERA_UNROLL
      for (int j = 0; j < 2; ++j) {
        uint32_t const chunk = ((2 * j + lane % 4 / 2) ^ row ^ (odd ? 4 : 0)) << 4;
        TESSERA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float const* const left = value + 4 * j + 2 * half;
          float const* const right = left + kValues / 2;
          uint32_t const to = smem_row + half * (8 * 128) + chunk;
          arch::store_shared_8(to, odd ? right[0] : left[0], odd ? right[1] : left[1]);
          arch::store_shared_8(to ^ 4 << 4, odd ? left[0] : right[0], odd ? left[1] : right[1]);
        }
      }
    } else {
      uint32_t const smem_box = smem + warp / 2 * kBoxBytes + lane / 4 % 4 * 4;
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        TESSERA_UNROLL
        for (int bit = 0; bit < 2; ++bit) {
          int const i = lane % 4 * 2 + bit;
          int const chunk = warp % 2 * 4 + 2 * half + lane / 16;
          uint32_t const to = smem_box + i * 128 + ((chunk ^ i) << 4);
          TESSERA_UNROLL
          for (int j = 0; j < kColumns / 8; ++j) {
            arch::store_shared_4(to + j * (8 * 128), value[4 * j + 2 * half + bit]);
          }
        }
      }
    }
  }

  // By one thread: 64 c from `row`, 32 i from `i` of a half.
  __device__ __forceinline__ static void put(bf16 const* smem, WgradHalf const& dw, int i, int row,
                                             int segment, bool adds) {
    WgradCoordinates at = wgrad_coordinates<kMajor>(dw, i, row);
    put_box(smem, dw, at, segment, adds);
    if constexpr (kMajor == Major::kK) {
      at.c0 += kBoxRows;
      put_box(smem + kBoxBytes / sizeof(bf16), dw, at, segment, adds);
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

// Of whole column groups.
template <GemmConfig kGemm, Major kMajor>
class WgradSumsDeferred {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kDeferred;
  using Params = WgradStoreParams;

  __device__ __forceinline__ WgradSumsDeferred(SharedStorage<kGemm>& smem, Params const& p,
                                               int consumer)
      : p_(p), smem_slabs_(&smem.slabs[consumer][0][0]), barrier_(kBarrierSlabs + consumer) {
    static_assert(kGemm.varlen_k() && !kGemm.any_b_layout());  // so n is a multiple of 64
    static_assert(kGemm.epilogue.slabs == kSlabs && kGemm.column_groups() == 2);
    static_assert(kDeferredPieces * Piece::kColumns == kGemm.tile.n);
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 c from `row`.
  __device__ __forceinline__ void keep(Accumulators<kGemm>& acc, WorkTile const& tile, int row) {
    wanted_ = !(p_.accumulates && tile.begin == tile.end);
    if (!wanted_) return;
    n_tile_ = tile.n_tile;
    segment_ = tile.segment;
    row_ = row;
    // The exclusive or with a zero that ptxas does not know hides the copy from it (lesson 8).
    uint32_t const zero = threadIdx.x >> 16;
    TESSERA_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      later_[i] = __uint_as_float(__float_as_uint(acc[1][i]) ^ zero);
    }
    fill_slabs(acc[0]);
  }

  __device__ __forceinline__ void work(int piece) {
    if (!wanted_) return;
    if (piece == kSlabs) fill_slabs(later_);
    int const place = piece % kSlabs;
    if (arch::warp_in_warpgroup() == place && arch::lane_idx() == 0) {
      WgradGroup const at = wgrad_group(p_, n_tile_ * (kGemm.tile.n / kSlabColumns) + piece / 2);
      if (at.exists) {
        Piece::put(slab(place), p_.halves[at.half], at.i + piece % 2 * Piece::kColumns, row_,
                   segment_, p_.accumulates);
        arch::tma_store_commit();
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void drain() const {
    if (arch::lane_idx() == 0) arch::tma_store_wait_read<0>();
  }

 private:
  using Piece = Fp32Piece<kMajor>;
  static constexpr int kSlabs = 4;  // a warp's each
  static constexpr int kHalf = kSlabs * Piece::kValues;
  static_assert(2 * kSlabs == kDeferredPieces);

  __device__ __forceinline__ bf16* slab(int i) const {
    return smem_slabs_ + i * (Piece::kBytes / sizeof(bf16));
  }

  __device__ __forceinline__ void fill_slabs(float const (&values)[kHalf]) const {
    drain();
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
    TESSERA_UNROLL
    for (int i = 0; i < kSlabs; ++i) Piece::fill(&values[i * Piece::kValues], slab(i));
    arch::fence_proxy_async_shared();
    arch::named_barrier_sync(barrier_, arch::kWarpgroupThreads);
  }

  Params const& p_;
  bf16* smem_slabs_;
  int barrier_;
  float later_[kHalf];  // pieces 4 to 7
  int n_tile_ = 0, segment_ = 0, row_ = 0;
  bool wanted_ = false;
};

}  // namespace tessera::cuda::gemm
