// SPDX-License-Identifier: Apache-2.0
// wgrad_store epilogue (varlen-K): the tile (c, i) of a segment's D, stored as fp32 or rounded once to bf16, in
// either order, or added to what is there.
//   K-major     dW is contiguous along c: slabs of 64 i x 128 bytes of c, the tile's transpose
//   rows-major  dW is contiguous along i: slabs of 64 c x 128 bytes of i
// A column group of 64 i takes one slab of bf16 or two of fp32. Segments without rows store zeros, or
// nothing when adding. TMA adds fp32. What bf16 is added to comes by lent stages before the k loop ends, of which every
// round has one then; without them it is read from memory. bf16 that replaces what was there (deferred.cuh), and
// fp32 (wgrad_sums.cuh), may be stored under the next tile's k loop.
#pragma once

#include <type_traits>

#include "../arch/approx_math.cuh"
#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "../gemm/slabs.cuh"
#include "wgrad_sums.cuh"

namespace tessera::cuda::gemm {

// Works after the k loop: it stages values in slabs, which TMA stores.
template <class Core, Major kMajor, bool kFp32>
class WgradStoreInSlabs {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = kGemm.lends() ? EpilogueMode::kLent : EpilogueMode::kInline;
  using Params = WgradStoreParams;

  __device__ __forceinline__ WgradStoreInSlabs(typename Core::Storage& smem, Params const& p,
                                               int consumer)
      : p_(p), staging_(smem, consumer) {
    static_assert(kGemm.varlen_k() && kTileGroups % kRound == 0);
    static_assert(kGemm.epilogue.lent_stages == 0 ||
                  (!kFp32 && kGemm.epilogue.lent_stages == kTileGroups / kRound));
  }

  // One thread of the producer calls it: it loads what the i-th round of both warpgroups is added to.
  __device__ __forceinline__ static void lend(typename Core::Storage& smem, Params const& p,
                                              int stage, WorkTile const& tile, int i)
    requires(kGemm.lends())
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
        WgradCoordinates const at =
            wgrad_coordinates<kMajor>(dw, places[g].i, tile.row + consumer * kSubtileM);
        arch::tma_load(
            Core::LentStages::tile_slab_b(smem, stage, g) + consumer * kSubtileM * kSlabColumns,
            &dw.map, full, at.c0, at.c1, at.c2, tile.segment);
      }
    }
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 c from `row`, in rounds of as many slabs as there are; `ring` where they are lent.
  template <class... Ring>
  __device__ __forceinline__ void store(Accumulators& acc, WorkTile const& tile, int row,
                                        Ring&... ring) {
    bool const skips = p_.accumulates && tile.begin == tile.end;
    if (kGemm.epilogue.lent_stages == 0 && skips) return;
    TESSERA_UNROLL
    for (int first = 0; first < kTileGroups; first += kRound) {
      bf16* const slabs = staging_.begin(ring...);
      TESSERA_UNROLL
      for (int g = 0; g < kRound; ++g) {
        fill(acc, slabs + g * kGroupSlabs * kPitch, tile, first + g, row);
      }
      staging_.publish([&] {
        if (kGemm.epilogue.lent_stages > 0 && skips) return;
        TESSERA_UNROLL
        for (int slab = 0; slab < Core::Staging::kSlabs; ++slab) {
          store_slab(slabs + slab * kPitch, slab % kGroupSlabs,
                     place(p_, tile, first + slab / kGroupSlabs), tile.segment, row);
        }
      });
    }
  }

  __device__ __forceinline__ void settle() { staging_.settle(); }
  __device__ __forceinline__ void drain() const { staging_.drain(); }

 private:
  static constexpr int kTileGroups = kGemm.tile.n / kSlabColumns;  // column groups
  static constexpr int kGroupSlabs = kFp32 ? 2 : 1;
  static constexpr int kRound = Core::Staging::kSlabs / kGroupSlabs;  // column groups
  static constexpr int kPitch = Core::Staging::kPitch;

  using Place = WgradGroup;
  using Fill = std::conditional_t<kMajor == Major::kRows, typename Core::SlabRows,
                                  typename Core::SlabColumns>;

  __device__ __forceinline__ static Place place(Params const& p, WorkTile const& tile, int g) {
    return wgrad_group(p, tile.n_tile * kTileGroups + g);
  }

  // 64 i of this thread's rows, the tile's column group `g`, go to the slabs from `smem` on.
  __device__ __forceinline__ void fill(Accumulators& acc, bf16* smem, WorkTile const& tile, int g,
                                       int row) const {
    if constexpr (kFp32) {
      TESSERA_UNROLL
      for (int part = 0; part < kGroupSlabs; ++part) {
        Core::template SumSlab<kMajor>::fill(acc, g, part, smem + part * kPitch);
      }
    } else {
      if (p_.accumulates) {
        if constexpr (kGemm.epilogue.lent_stages > 0) {
          add_staged(acc, g, smem);
        } else {
          add_old(acc, g, place(p_, tile, g), tile.segment, row);
        }
      }
      fill_.fill(smem, [&](int i) { return acc.packed(g, i); });
    }
  }

  // The old values, which the slab holds, join the fp32 sums, and these are rounded once.
  __device__ __forceinline__ void add_staged(Accumulators& acc, int g, bf16 const* slab) const {
    TESSERA_UNROLL
    for (int strip = 0; strip < Accumulators::kStrips; ++strip) {
      uint32_t old[Accumulators::kStripPairs];
      fill_.load(slab, strip, old);
      acc.for_each_pair(g, strip, [&](int i, int, float& left, float& right) {
        float2 const values = arch::unpack_bf16(old[i]);
        left += values.x;
        right += values.y;
      });
    }
  }

  // A sum rounded to bf16 would be rounded twice: the old value joins the fp32 sum.
  __device__ __forceinline__ void add_old(Accumulators& acc, int g, Place at, int segment,
                                          int row) const {
    if (!at.exists) return;
    WgradHalf const& dw = p_.halves[at.half];
    bf16 const* const gmem = dw.gmem + segment * dw.segment_stride;
    auto const add = [&](float& value, int c, int i) {
      if (c >= p_.columns || i >= p_.rows) return;
      value += __bfloat162float(gmem[i / dw.block * dw.block_stride + i % dw.block * dw.row_stride +
                                     c * dw.column_stride]);
    };
    acc.for_each_columns(g, at.i, [&](int i, auto rows) {
      rows(row, [&](int c, float& left, float& right) {
        add(left, c, i);
        add(right, c, i + 1);
      });
    });
  }

  // One thread calls it for the `part`-th slab of a group.
  __device__ __forceinline__ void store_slab(bf16* slab, int part, Place at, int segment,
                                             int row) const {
    if (!at.exists) return;
    WgradHalf const& dw = p_.halves[at.half];
    if constexpr (kFp32) {
      WgradSums<kMajor>::put(slab, dw, at.i + part * Fp32Slab::kColumns, row, segment,
                             p_.accumulates);
    } else {
      WgradCoordinates const to = wgrad_coordinates<kMajor>(dw, at.i, row);
      arch::tma_store(&dw.map, slab, to.c0, to.c1, to.c2, segment, arch::l2_evict_first());
    }
  }

  Params const& p_;
  typename Core::Staging staging_;
  Fill fill_;
};

// Works under the next tile's k loop: it stores bf16 that replaces what was there, in whole column groups.
template <class Core, Major kMajor>
class WgradStoreDeferred {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kDeferred;
  using Params = WgradStoreParams;

  __device__ __forceinline__ WgradStoreDeferred(typename Core::Storage& smem, Params const& p,
                                                int consumer)
      : p_(p), held_(smem, consumer) {
    static_assert(kGemm.varlen_k() && !kGemm.any_b_layout());  // so n is a multiple of 64
    using Columns = typename Core::DeferredColumns::Layout;
    static_assert(Columns::kSecondColumn == WgradSteps::kSecondRow &&
                  Columns::kPieceColumns == WgradSteps::kPieceRows);
    int const c = Layout::lane_row(), i = Layout::lane_column();
    WgradSteps const& steps = p.steps;
    lane_offset_ = c * steps.column + (i >> steps.block_shift) * steps.block +
                   (i & (1 << steps.block_shift) - 1) * steps.row;
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 c from `row`.
  __device__ __forceinline__ void keep(Accumulators& acc, WorkTile const& tile, int row) {
    int const c = kMajor == Major::kRows ? row + arch::warp_in_warpgroup() * kWarpRows : row;
    columns_left_ = p_.columns - c - Layout::lane_row();
    gmem_ = address(tile.n_tile * kTileGroups + arch::lane_idx() % kTileGroups, c, tile.segment);
    held_.template keep<1>(acc);
    held_.template keep<0>(acc);
  }

  __device__ __forceinline__ void work(int piece) {
    auto const held = held_.take(piece);
    WgradSteps const& steps = p_.steps;
    if constexpr (kMajor == Major::kRows) {
      int const c = (piece & 3) * Layout::kPieceRows;
      int64_t const offset = lane_offset_ + c * steps.column;
      TESSERA_UNROLL
      for (int slab = 0; slab < 2; ++slab) {
        char* const gmem = address_of((piece >> 2) * 2 + slab);
        if (gmem != nullptr && c < columns_left_) {
          arch::store_streaming_16(gmem + offset, held.load(slab));
        }
      }
    } else {
      char* const gmem = address_of(piece >> 1);
      if (gmem == nullptr || columns_left_ <= 0) return;
      char* const first = gmem + lane_offset_ + ((piece & 1) != 0 ? steps.second_piece : 0);
      arch::store_streaming_16(first, held.load(0));
      arch::store_streaming_16(first + steps.second_row, held.load(1));
    }
  }

  __device__ __forceinline__ void drain() const {}

 private:
  using Held = std::conditional_t<kMajor == Major::kRows, typename Core::DeferredRows,
                                  typename Core::DeferredColumns>;
  using Layout = typename Held::Layout;
  static constexpr int kTileGroups = kGemm.tile.n / kSlabColumns;

  // Returns the address of c in a column group's first i; null where nobody wants it.
  __device__ __forceinline__ bf16* address(int group, int c, int segment) const {
    WgradGroup const at = wgrad_group(p_, group);
    if (!at.exists) return nullptr;
    WgradHalf const& dw = p_.halves[at.half];
    bf16* const gmem = dw.gmem + segment * dw.segment_stride + c * dw.column_stride;
    if (at.i < dw.block) return gmem + at.i * dw.row_stride;
    return gmem + at.i / dw.block * dw.block_stride + at.i % dw.block * dw.row_stride;
  }
  // Returns the address of the g-th column group of the tile that is held.
  __device__ __forceinline__ char* address_of(int g) const {
    return reinterpret_cast<char*>(
        __shfl_sync(arch::kAllLanes, reinterpret_cast<uint64_t>(gmem_), g));
  }

  Params const& p_;
  Held held_;
  int64_t lane_offset_;   // of this lane's first element of a column group's first piece
  bf16* gmem_ = nullptr;  // address() of the tile's column group of this lane's number
  int columns_left_ = 0;  // from this lane's first c on
};

// This is a class of its own, as StoreEpilogueOf is.
template <class Core, Major kMajor, bool kFp32>
struct WgradStoreEpilogueOf {
  using Deferred =
      std::conditional_t<kFp32, WgradSumsDeferred<Core, kMajor>, WgradStoreDeferred<Core, kMajor>>;
  using Type =
      std::conditional_t<Core::kGemm.defers(), Deferred, WgradStoreInSlabs<Core, kMajor, kFp32>>;
};
template <class Core, Major kMajor, bool kFp32>
using WgradStoreEpilogue = typename WgradStoreEpilogueOf<Core, kMajor, kFp32>::Type;

}  // namespace tessera::cuda::gemm
