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

#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "../gemm/slabs.cuh"
#include "../gemm/sm90/deferred.cuh"
#include "../gemm/sm90/lent.cuh"
#include "wgrad_sums.cuh"

namespace tessera::cuda::gemm {

// After the k loop: in slabs, stored by TMA.
template <GemmConfig kGemm, Major kMajor, bool kFp32>
class WgradStoreInSlabs {
 public:
  static constexpr EpilogueMode kMode = kGemm.lends() ? EpilogueMode::kLent : EpilogueMode::kInline;
  using Params = WgradStoreParams;

  __device__ __forceinline__ WgradStoreInSlabs(SharedStorage<kGemm>& smem, Params const& p,
                                               int consumer)
      : p_(p), staging_(smem, consumer) {
    static_assert(kGemm.varlen_k() && kTileGroups % kRound == 0);
    static_assert(kGemm.epilogue.lent_stages == 0 ||
                  (!kFp32 && kGemm.epilogue.lent_stages == kTileGroups / kRound));
    thread_ = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
  }

  // By one thread of the producer: what the i-th round of both warpgroups is added to.
  __device__ __forceinline__ static void lend(SharedStorage<kGemm>& smem, Params const& p,
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
        arch::tma_load(lent_slab_b<kGemm>(smem, stage, g) + consumer * kSubtileM * kSlabColumns,
                       &dw.map, full, at.c0, at.c1, at.c2, tile.segment);
      }
    }
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 c from `row`, in rounds of as many slabs as there are; `ring` where they are lent.
  template <class... Ring>
  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row,
                                        Ring&... ring) {
    bool const skips = p_.accumulates && tile.begin == tile.end;
    if (kGemm.epilogue.lent_stages == 0 && skips) return;
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
        if (kGemm.epilogue.lent_stages > 0 && skips) return;
        TESSERA_UNROLL
        for (int slab = 0; slab < Staging<kGemm>::kSlabs; ++slab) {
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
  static constexpr int kRound = Staging<kGemm>::kSlabs / kGroupSlabs;  // column groups
  static constexpr int kPitch = Staging<kGemm>::kPitch;

  using Place = WgradGroup;

  __device__ __forceinline__ static Place place(Params const& p, WorkTile const& tile, int g) {
    return wgrad_group(p, tile.n_tile * kTileGroups + g);
  }

  // Values kFirst.. of `acc`, 64 i of this thread's rows, are column group `g` of the tile
  // and go to the slabs from `smem` on.
  template <int kFirst>
  __device__ __forceinline__ void fill(float (&acc)[kGroupColumns / 2], bf16* smem,
                                       WorkTile const& tile, int g, int row) const {
    if constexpr (kFp32) {
      TESSERA_UNROLL
      for (int part = 0; part < kGroupSlabs; ++part) {
        Fp32Piece<kMajor>::fill(&acc[kFirst + part * Fp32Piece<kMajor>::kValues],
                                smem + part * kPitch);
      }
    } else {
      if (p_.accumulates) {
        if constexpr (kGemm.epilogue.lent_stages > 0) {
          add_staged<kFirst>(acc, smem);
        } else {
          add_old<kFirst>(acc, place(p_, tile, g), tile.segment, row);
        }
      }
      auto const pair = [&](int j, int half) {
        return arch::pack_bf16(acc[kFirst + 4 * j + 2 * half], acc[kFirst + 4 * j + 2 * half + 1]);
      };
      if constexpr (kMajor == Major::kRows) {
        rows_.fill(smem, [&](int i) { return pair(i / 2, i % 2); });
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
    if constexpr (kFp32) {
      Fp32Piece<kMajor>::put(slab, dw, at.i + part * Fp32Piece<kMajor>::kColumns, row, segment,
                             p_.accumulates);
    } else {
      WgradCoordinates const to = wgrad_coordinates<kMajor>(dw, at.i, row);
      arch::tma_store(&dw.map, slab, to.c0, to.c1, to.c2, segment, arch::l2_evict_first());
    }
  }

  Params const& p_;
  Staging<kGemm> staging_;
  SlabRows rows_;
  int thread_;
};

// Under the next tile's k loop: bf16 that replaces what was there, of whole column groups.
template <GemmConfig kGemm, Major kMajor>
class WgradStoreDeferred {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kDeferred;
  using Params = WgradStoreParams;

  __device__ __forceinline__ WgradStoreDeferred(SharedStorage<kGemm>& smem, Params const& p,
                                                int consumer)
      : p_(p), kept_(smem, consumer) {
    static_assert(kGemm.varlen_k() && !kGemm.any_b_layout());  // so n is a multiple of 64
    static_assert(HeldColumns<kGemm>::kSecondColumn == WgradSteps::kSecondRow &&
                  HeldColumns<kGemm>::kPieceColumns == WgradSteps::kPieceRows);
    int const c = Layout::lane_row(), i = Layout::lane_column();
    WgradSteps const& steps = p.steps;
    lane_offset_ = c * steps.column + (i >> steps.block_shift) * steps.block +
                   (i & (1 << steps.block_shift) - 1) * steps.row;
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 c from `row`.
  __device__ __forceinline__ void keep(Accumulators<kGemm>& acc, WorkTile const& tile, int row) {
    int const c = kMajor == Major::kRows ? row + arch::warp_in_warpgroup() * kWarpRows : row;
    columns_left_ = p_.columns - c - Layout::lane_row();
    gmem_ = address(tile.n_tile * kTileGroups + arch::lane_idx() % kTileGroups, c, tile.segment);
    kept_.template keep<1>(acc);
    kept_.template keep<0>(acc);
  }

  __device__ __forceinline__ void work(int piece) {
    auto const kept = kept_.take(piece);
    WgradSteps const& steps = p_.steps;
    if constexpr (kMajor == Major::kRows) {
      int const c = (piece & 3) * Layout::kPieceRows;
      int64_t const offset = lane_offset_ + c * steps.column;
      TESSERA_UNROLL
      for (int slab = 0; slab < 2; ++slab) {
        char* const gmem = address_of((piece >> 2) * 2 + slab);
        if (gmem != nullptr && c < columns_left_) {
          arch::store_streaming_16(gmem + offset, kept.load(slab));
        }
      }
    } else {
      char* const gmem = address_of(piece >> 1);
      if (gmem == nullptr || columns_left_ <= 0) return;
      char* const first = gmem + lane_offset_ + ((piece & 1) != 0 ? steps.second_piece : 0);
      arch::store_streaming_16(first, kept.load(0));
      arch::store_streaming_16(first + steps.second_row, kept.load(1));
    }
  }

  __device__ __forceinline__ void drain() const {}

 private:
  using Layout = std::conditional_t<kMajor == Major::kRows, HeldRows<kGemm>, HeldColumns<kGemm>>;
  static constexpr int kTileGroups = kGemm.tile.n / kSlabColumns;

  // Of c in a column group's first i; null where nobody wants it.
  __device__ __forceinline__ bf16* address(int group, int c, int segment) const {
    WgradGroup const at = wgrad_group(p_, group);
    if (!at.exists) return nullptr;
    WgradHalf const& dw = p_.halves[at.half];
    bf16* const gmem = dw.gmem + segment * dw.segment_stride + c * dw.column_stride;
    if (at.i < dw.block) return gmem + at.i * dw.row_stride;
    return gmem + at.i / dw.block * dw.block_stride + at.i % dw.block * dw.row_stride;
  }
  // Of the g-th column group of the tile that is kept.
  __device__ __forceinline__ char* address_of(int g) const {
    return reinterpret_cast<char*>(
        __shfl_sync(arch::kAllLanes, reinterpret_cast<uint64_t>(gmem_), g));
  }

  Params const& p_;
  DeferredTile<kGemm, Layout> kept_;
  int64_t lane_offset_;   // of this lane's first element of a column group's first piece
  bf16* gmem_ = nullptr;  // address() of the tile's column group of this lane's number
  int columns_left_ = 0;  // from this lane's first c on
};

// By a class of its own, as StoreEpilogueOf.
template <GemmConfig kGemm, Major kMajor, bool kFp32>
struct WgradStoreEpilogueOf {
  using Deferred = std::conditional_t<kFp32, WgradSumsDeferred<kGemm, kMajor>,
                                      WgradStoreDeferred<kGemm, kMajor>>;
  using Type =
      std::conditional_t<kGemm.defers(), Deferred, WgradStoreInSlabs<kGemm, kMajor, kFp32>>;
};
template <GemmConfig kGemm, Major kMajor, bool kFp32>
using WgradStoreEpilogue = typename WgradStoreEpilogueOf<kGemm, kMajor, kFp32>::Type;

}  // namespace tessera::cuda::gemm
