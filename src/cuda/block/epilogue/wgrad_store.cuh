// SPDX-License-Identifier: Apache-2.0
// wgrad_store epilogue (varlen-K): the tile (c, i) of a segment's D, stored as fp32 or rounded once to bf16, in
// either order, or added to what is there.
//   K-major     dW is contiguous along c: slabs of 64 i x 128 bytes of c, the tile's transpose
//   rows-major  dW is contiguous along i: slabs of 64 c x 128 bytes of i
// A column group of 64 i takes one slab of bf16 or two of fp32. Segments without rows store zeros, or
// nothing when adding.
#pragma once

#include "../lent_stages.cuh"
#include "../slab_store.cuh"
#include "../tile_scheduler.cuh"

namespace tessera::cuda::block {

// A half of dW in memory; element (i, c) of a segment lies i / block blocks, i % block rows and c columns further.
struct WgradHalf {
  CUtensorMap map;  // make_weight_map(), i its rows, c its columns
  bf16* gmem;       // read only if bf16 is added to
  int64_t segment_stride, row_stride, column_stride, block_stride;
  int block;
  bool exists;  // false: nobody wants it
};

struct WgradStoreParams {
  WgradHalf halves[2];
  int num_halves;
  int half_groups;    // column groups in a half
  int rows, columns;  // n, d
  bool accumulates;
};

template <GemmConfig kGemm, Major kMajor, bool kFp32>
class WgradStoreEpilogue {
 public:
  using Params = WgradStoreParams;

  __device__ __forceinline__ WgradStoreEpilogue(SharedStorage<kGemm>& smem, Params const& p,
                                                int consumer)
      : p_(p), staging_(smem, consumer) {
    static_assert(kGemm.varlen_k() && kTileGroups % kRound == 0);
    static_assert(kGemm.lent_stages == 0 || kGemm.lent_stages == kTileGroups / kRound);
    thread_ = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
  }

  // 64 c from `row`, in rounds of as many slabs as there are; `ring` where they are lent.
  template <class... Ring>
  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row,
                                        Ring&... ring) {
    bool const skips = p_.accumulates && tile.begin == tile.end;
    if (kGemm.lent_stages == 0 && skips) return;
    TESSERA_UNROLL
    for (int first = 0; first < kTileGroups; first += kRound) {
      bf16* const slabs = staging_.begin(ring...);
      TESSERA_UNROLL
      for (int g = 0; g < kRound; ++g) {
        float (&part)[kGroupColumns / 2] = acc[(first + g) / 2];
        bf16* const smem = slabs + g * kGroupSlabs * kPitch;
        if ((first + g) % 2 == 0) {
          fill<0>(part, smem, tile, first + g, row);
        } else {
          fill<kGroupColumns / 4>(part, smem, tile, first + g, row);
        }
      }
      staging_.publish([&] {
        if (kGemm.lent_stages > 0 && skips) return;
        TESSERA_UNROLL
        for (int slab = 0; slab < Staging<kGemm>::kSlabs; ++slab) {
          store_slab(slabs + slab * kPitch, slab % kGroupSlabs,
                     place(tile, first + slab / kGroupSlabs), tile.segment, row);
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
  static constexpr int kTileGroups = kGemm.tile.n / kSlabColumns;  // column groups
  static constexpr int kGroupSlabs = kFp32 ? 2 : 1;
  static constexpr int kRound = Staging<kGemm>::kSlabs / kGroupSlabs;  // column groups
  static constexpr int kPitch = Staging<kGemm>::kPitch;

  struct Place {
    int half, i;
    bool exists;
  };

  __device__ __forceinline__ Place place(WorkTile const& tile, int g) const {
    int const group = tile.n_tile * kTileGroups + g;
    int const half = group >= p_.half_groups ? 1 : 0;
    bool const exists = group < p_.num_halves * p_.half_groups && p_.halves[half].exists;
    return {half, (group - half * p_.half_groups) * kSlabColumns, exists};
  }

  // Values kFirst.. of `acc`, 64 i of this thread's rows, are column group `g` of the tile
  // and go to the slabs from `smem` on.
  template <int kFirst>
  __device__ __forceinline__ void fill(float (&acc)[kGroupColumns / 2], bf16* smem,
                                       WorkTile const& tile, int g, int row) const {
    if constexpr (kFp32) {
      fill_fp32<kFirst>(acc, smem);
    } else {
      if (p_.accumulates) add_old<kFirst>(acc, place(tile, g), tile.segment, row);
      auto const pair = [&](int j, int half) {
        return arch::pack_bf16(acc[kFirst + 4 * j + 2 * half], acc[kFirst + 4 * j + 2 * half + 1]);
      };
      if constexpr (kMajor == Major::kRows) {
        rows_.fill(smem, pair);
      } else {
        fill_transposed(smem, pair);
      }
    }
  }

  // Row i of the slab takes this warp's 16 c.
  template <typename Pair>
  __device__ __forceinline__ void fill_transposed(bf16* slab, Pair pair) const {
    int const lane = arch::lane_idx();
    int const chunk = thread_ / arch::kWarpThreads * 2 + (lane / 8 & 1);
    uint32_t const smem_row =
        arch::shared_address(slab) + (lane / 16 * 8 + lane % 8) * 128 + ((chunk ^ lane % 8) << 4);
    TESSERA_UNROLL
    for (int j = 0; j < kSlabColumns / 8; j += 2) {
      arch::stmatrix_x4_transposed(smem_row + j * 8 * 128, pair(j, 0), pair(j, 1), pair(j + 1, 0),
                                   pair(j + 1, 1));
    }
  }

  template <int kFirst>
  __device__ __forceinline__ void fill_fp32(float const (&acc)[kGroupColumns / 2],
                                            bf16* slabs) const {
    int const lane = arch::lane_idx();
    int const warp = thread_ / arch::kWarpThreads;
    TESSERA_UNROLL
    for (int j = 0; j < kSlabColumns / 8; ++j) {
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float const* const value = &acc[kFirst + 4 * j + 2 * half];
        if constexpr (kMajor == Major::kRows) {
          int const c = warp * 16 + lane / 4 + 8 * half;
          int const chunk = j % 4 * 2 + lane % 4 / 2;
          auto* const smem = reinterpret_cast<float2*>(slab_bytes(slabs, j / 4) + c * 128 +
                                                       ((chunk ^ (c & 7)) << 4) + lane % 2 * 8);
          *smem = {value[0], value[1]};
        } else {
          TESSERA_UNROLL
          for (int bit = 0; bit < 2; ++bit) {
            int const i = 8 * j + lane % 4 * 2 + bit;
            int const chunk = warp % 2 * 4 + 2 * half + lane / 16;
            *reinterpret_cast<float*>(slab_bytes(slabs, warp / 2) + i * 128 +
                                      ((chunk ^ (i & 7)) << 4) + lane / 4 % 4 * 4) = value[bit];
          }
        }
      }
    }
  }

  __device__ __forceinline__ static char* slab_bytes(bf16* slabs, int slab) {
    return reinterpret_cast<char*>(slabs + slab * kPitch);
  }

  // bf16 has no room for a rounded sum: the old value joins the fp32 sum.
  template <int kFirst>
  __device__ __forceinline__ void add_old(float (&acc)[kGroupColumns / 2], Place at, int segment,
                                          int row) const {
    if (!at.exists) return;
    int const lane = arch::lane_idx();
    WgradHalf const& dw = p_.halves[at.half];
    bf16 const* const gmem = dw.gmem + segment * dw.segment_stride;
    TESSERA_UNROLL
    for (int j = 0; j < kSlabColumns / 8; ++j) {
      TESSERA_UNROLL
      for (int value = 0; value < 4; ++value) {
        int const c = row + thread_ / arch::kWarpThreads * 16 + lane / 4 + value / 2 * 8;
        int const i = at.i + 8 * j + lane % 4 * 2 + value % 2;
        if (c >= p_.columns || i >= p_.rows) continue;
        acc[kFirst + 4 * j + value] +=
            __bfloat162float(gmem[i / dw.block * dw.block_stride + i % dw.block * dw.row_stride +
                                  c * dw.column_stride]);
      }
    }
  }

  // By one thread: the `part`-th slab of a group.
  __device__ __forceinline__ void store_slab(bf16* slab, int part, Place at, int segment,
                                             int row) const {
    if (!at.exists) return;
    WgradHalf const& dw = p_.halves[at.half];
    int const inner = part * (kSlabColumns / 2);
    int c0 = at.i + inner;
    int c1 = row;
    int c2 = 0;
    if constexpr (kMajor == Major::kK) {
      c0 = row + inner;
      c1 = at.i % dw.block;
      c2 = at.i / dw.block;
    }
    if (kFp32 && p_.accumulates) {
      arch::tma_reduce_add(&dw.map, slab, c0, c1, c2, segment);
    } else {
      arch::tma_store(&dw.map, slab, c0, c1, c2, segment, arch::l2_evict_first());
    }
  }

  Params const& p_;
  Staging<kGemm> staging_;
  SlabRows rows_;
  int thread_;
};

}  // namespace tessera::cuda::block
