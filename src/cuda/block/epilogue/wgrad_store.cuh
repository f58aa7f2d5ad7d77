// SPDX-License-Identifier: Apache-2.0
// wgrad_store epilogue (varlen-K): the tile (c, i) of a segment's D, stored as fp32 or rounded once to bf16, in
// either order, or added to what is there.
//   K-major     dW is contiguous along c: slabs of 64 i x 128 bytes of c, the tile's transpose
//   rows-major  dW is contiguous along i: slabs of 64 c x 128 bytes of i
// A column group of 64 i takes one slab of bf16 or two of fp32. Segments without rows store zeros, or
// nothing when adding. TMA adds fp32. What bf16 is added to comes by lent stages before the k loop ends, of which every
// round has one then; without them it is read from memory.
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
    static_assert(kGemm.lent_stages == 0 ||
                  kGemm.lent_stages + kGemm.own_round == kTileGroups / kRound);
    thread_ = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
  }

  // By one thread of the producer: what the i-th round of both warpgroups is added to.
  __device__ __forceinline__ static void lend(SharedStorage<kGemm>& smem, Params const& p,
                                              int stage, WorkTile const& tile, int i)
    requires(kGemm.lent_stages > 0 && !kFp32 && !kGemm.own_round)
  {
    constexpr uint32_t kSlabBytes = kSubtileM * kSlabColumns * sizeof(bf16);
    arch::Mbarrier* const full = &smem.full[stage];
    bool const adds = p.accumulates && tile.begin != tile.end;
    Place places[kRound];
    uint32_t bytes = 0;
    TESSERA_UNROLL
    for (int g = 0; g < kRound; ++g) {
      places[g] = place(p, tile, i * kRound + g);
      if (adds && places[g].exists) bytes += kGemm.consumer_warpgroups * kSlabBytes;
    }
    arch::mbarrier_arrive_expect_tx(full, bytes);
    TESSERA_UNROLL
    for (int g = 0; g < kRound; ++g) {
      if (!adds || !places[g].exists) continue;
      WgradHalf const& dw = p.halves[places[g].half];
      TESSERA_UNROLL
      for (int consumer = 0; consumer < kGemm.consumer_warpgroups; ++consumer) {
        SlabCoordinates const at = coordinates(dw, places[g].i, 0, tile.row + consumer * kSubtileM);
        arch::tma_load(lent_slab_b<kGemm>(smem, stage, g) + consumer * kSubtileM * kSlabColumns,
                       &dw.map, full, at.c0, at.c1, at.c2, tile.segment);
      }
    }
  }

  // 64 c from `row`, in rounds of as many slabs as there are; `ring` where they are lent.
  template <class... Ring>
  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row,
                                        Ring&... ring) {
    bool const skips = p_.accumulates && tile.begin == tile.end;
    if (kGemm.lent_stages == 0 && skips) return;
    TESSERA_UNROLL
    for (int first = 0; first < kTileGroups; first += kRound) {
      bf16* const slabs = staging_.begin(first / kRound, ring...);
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
      staging_.publish(first / kRound, [&] {
        if (kGemm.lent_stages > 0 && skips) return;
        TESSERA_UNROLL
        for (int slab = 0; slab < Staging<kGemm>::kSlabs; ++slab) {
          store_slab(slabs + slab * kPitch, slab % kGroupSlabs,
                     place(p_, tile, first + slab / kGroupSlabs), tile.segment, row);
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

  __device__ __forceinline__ static Place place(Params const& p, WorkTile const& tile, int g) {
    int const group = tile.n_tile * kTileGroups + g;
    int const half = group >= p.half_groups ? 1 : 0;
    bool const exists = group < p.num_halves * p.half_groups && p.halves[half].exists;
    return {half, (group - half * p.half_groups) * kSlabColumns, exists};
  }

  struct SlabCoordinates {
    int c0, c1, c2;
  };

  // Of the `part`-th slab of the group from `i` on, 64 c from `row`.
  __device__ __forceinline__ static SlabCoordinates coordinates(WgradHalf const& dw, int i,
                                                                int part, int row) {
    int const inner = part * (kSlabColumns / 2);
    if constexpr (kMajor == Major::kK) return {row + inner, i % dw.block, i / dw.block};
    return {i + inner, row, 0};
  }

  // Values kFirst.. of `acc`, 64 i of this thread's rows, are column group `g` of the tile
  // and go to the slabs from `smem` on.
  template <int kFirst>
  __device__ __forceinline__ void fill(float (&acc)[kGroupColumns / 2], bf16* smem,
                                       WorkTile const& tile, int g, int row) const {
    if constexpr (kFp32) {
      fill_fp32<kFirst>(acc, smem);
    } else {
      if (!kGemm.own_round && p_.accumulates) {
        if constexpr (kGemm.lent_stages > 0) {
          add_staged<kFirst>(acc, smem);
        } else {
          add_old<kFirst>(acc, place(p_, tile, g), tile.segment, row);
        }
      }
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

  // Row i of the slab holds this warp's 16 c: where this lane's row of its first 16 i lies.
  __device__ __forceinline__ uint32_t transposed_row(bf16 const* slab) const {
    int const lane = arch::lane_idx();
    int const chunk = thread_ / arch::kWarpThreads * 2 + (lane / 8 & 1);
    return arch::shared_address(slab) + (lane / 16 * 8 + lane % 8) * 128 +
           ((chunk ^ lane % 8) << 4);
  }

  template <typename Pair>
  __device__ __forceinline__ void fill_transposed(bf16* slab, Pair pair) const {
    uint32_t const smem_row = transposed_row(slab);
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

  // The old values, which the slab holds, join the fp32 sums, and these are rounded once.
  template <int kFirst>
  __device__ __forceinline__ void add_staged(float (&acc)[kGroupColumns / 2],
                                             bf16 const* slab) const {
    TESSERA_UNROLL
    for (int j = 0; j < kSlabColumns / 8; j += 2) {
      uint32_t old[4];
      if constexpr (kMajor == Major::kRows) {
        arch::ldmatrix_x4(rows_.matrix_row(slab, j), old[0], old[1], old[2], old[3]);
      } else {
        arch::ldmatrix_x4_transposed(transposed_row(slab) + j * 8 * 128, old[0], old[1], old[2],
                                     old[3]);
      }
      TESSERA_UNROLL
      for (int pair = 0; pair < 4; ++pair) {
        float2 const values = arch::unpack_bf16(old[pair]);
        acc[kFirst + 4 * j + 2 * pair] += values.x;
        acc[kFirst + 4 * j + 2 * pair + 1] += values.y;
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
    SlabCoordinates const to = coordinates(dw, at.i, part, row);
    if (kFp32 && p_.accumulates) {
      arch::tma_reduce_add(&dw.map, slab, to.c0, to.c1, to.c2, segment);
    } else {
      arch::tma_store(&dw.map, slab, to.c0, to.c1, to.c2, segment, arch::l2_evict_first());
    }
  }

  Params const& p_;
  Staging<kGemm> staging_;
  SlabRows rows_;
  int thread_;
};

}  // namespace tessera::cuda::block
