// SPDX-License-Identifier: Apache-2.0
// wgrad epilogue (varlen-K) of threads that have a row each: the tile (c, i) of a segment's D, stored as fp32 or
// rounded once to bf16, in either order, or added to what is there. `Core` is what an architecture gives such threads
// (sm100/core.cuh). A warp stores its 32 c of a column group of 64 i from slabs:
//   rows-major, bf16  32 c x 64 i: a thread writes its row
//   rows-major, fp32  twice 32 c x 32 i: the same
//   K-major, bf16     64 i x 32 c, the transpose, rows of 64 bytes: fragments of 16 c through stmatrix
//   K-major, fp32     twice 32 i x 32 c: a thread writes its column
// TMA adds fp32. What bf16 is added to comes by TMA into the slab before, that of the first two groups under the k
// loop: it joins the fp32 sum, which is rounded once. Segments without rows store zeros, or nothing when adding.
#pragma once

#include <cuda.h>

#include "../arch/approx_math.cuh"
#include "../arch/shared_address.cuh"
#include "../arch/stmatrix.cuh"
#include "../arch/store_shared.cuh"
#include "../arch/tma.cuh"
#include "../arch/warp.cuh"
#include "../gemm/work_tile.hpp"
#include "wgrad_place.cuh"

namespace tessera::cuda::gemm {

template <class Core, Major kMajor, bool kFp32>
class WgradRows {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = WgradStoreParams;

  __device__ __forceinline__ WgradRows(typename Core::Storage& smem, Params const& p)
      : p_(p), slabs_(smem) {
    static_assert(Slabs::kSlabs == kLoadBuffers);
  }

  // Asks for what the first two groups are added to. The tile's 32 c of this warp begin at `row`.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row) {
    if (kFp32 || !adds(tile)) return;
    slabs_.template wait_read<0>();
    if (arch::elect_one()) {
      load(tile, row, 0);
      load(tile, row, 1);
    }
    __syncwarp();
  }

  // Group by group; releases the accumulators with the last one.
  __device__ __forceinline__ void store(typename Core::Rows& rows, WorkTile const& tile, int row) {
    bool const skips = p_.accumulates && tile.begin == tile.end;
    for (int group = 0; group < kGroups; ++group) {
      if (skips || !place(tile, group).exists) {
        if (group == kGroups - 1) rows.release();
        if (!kFp32 && adds(tile)) load_next(tile, row, group);
        continue;
      }
      if constexpr (kFp32) {
        TESSERA_UNROLL
        for (int part = 0; part < 2; ++part) store_sums(rows, tile, row, group, part);
      } else {
        store_rounded(rows, tile, row, group);
      }
    }
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  using Slabs = typename Core::LoadedSlabs;
  static constexpr int kLoaded = 32;  // columns
  static constexpr int kGroups = Core::kTileN / kSlabColumns;

  __device__ __forceinline__ bool adds(WorkTile const& tile) const {
    return p_.accumulates && tile.begin != tile.end;
  }
  __device__ __forceinline__ WgradGroup place(WorkTile const& tile, int group) const {
    return wgrad_group(p_, tile.n_tile * kGroups + group);
  }

  // One lane calls it: the old values of a group, if there are any; groups alternate between the buffers.
  __device__ __forceinline__ void load(WorkTile const& tile, int row, int group) const {
    WgradGroup const at = place(tile, group);
    if (!at.exists) return;
    WgradHalf const& dw = p_.halves[at.half];
    WgradCoordinates const from = wgrad_coordinates<kMajor>(dw, at.i, row);
    slabs_.load(group, [&](bf16* slab, int, auto* full) {
      arch::tma_load(slab, &dw.map, full, from.c0, from.c1, from.c2, tile.segment);
    });
  }

  // Asks for what the group after `group` is added to, once the slab of the group before has been read. begin() has
  // asked for the first two.
  __device__ __forceinline__ void load_next(WorkTile const& tile, int row, int group) const {
    slabs_.template wait_read<0>();
    if (group > 0 && group + 1 < kGroups && arch::elect_one()) load(tile, row, group + 1);
    __syncwarp();
  }

  // 32 i of a group.
  __device__ __forceinline__ void store_sums(typename Core::Rows& rows, WorkTile const& tile,
                                             int row, int group, int part) {
    bf16* const slab = slabs_.slab(part);
    uint32_t r[kLoaded];
    rows.load(r, group * kSlabColumns + part * kLoaded);
    rows.loaded();
    if (group == kGroups - 1 && part == 1) rows.release();
    slabs_.template wait_read<1>();
    TESSERA_UNROLL
    for (int i = 0; i < kLoaded; i += 4) {
      if constexpr (kMajor == Major::kRows) {
        slabs_.put(slab, i / 4, {r[i], r[i + 1], r[i + 2], r[i + 3]});
      } else {
        TESSERA_UNROLL
        for (int j = i; j < i + 4; ++j) {
          arch::store_shared_4(column_place(slab, j), __uint_as_float(r[j]));
        }
      }
    }
    slabs_.publish([&] {
      WgradGroup const at = place(tile, group);
      WgradHalf const& dw = p_.halves[at.half];
      WgradCoordinates const to = wgrad_coordinates<kMajor>(dw, at.i + part * kLoaded, row);
      if (p_.accumulates) {
        arch::tma_reduce_add(&dw.map, slab, to.c0, to.c1, to.c2, tile.segment);
      } else {
        put(dw, slab, to, tile.segment);
      }
    });
  }

  __device__ __forceinline__ void store_rounded(typename Core::Rows& rows, WorkTile const& tile,
                                                int row, int group) {
    bool const adds_old = p_.accumulates;
    bf16* const slab = adds_old ? slabs_.slab_of(group, 0) : slabs_.slab(turn_);
    if (adds_old) {
      slabs_.wait(group);
    } else {
      slabs_.template wait_read<1>();
      turn_ ^= 1;
    }
    TESSERA_UNROLL
    for (int part = 0; part < 2; ++part) {
      uint32_t r[kLoaded];
      if constexpr (kMajor == Major::kRows) {
        rows.load(r, group * kSlabColumns + part * kLoaded);
      } else {
        rows.load_fragments(r, part, group * kSlabColumns);
      }
      rows.loaded();
      if (part == 1 && group == kGroups - 1) rows.release();
      if constexpr (kMajor == Major::kRows) {
        fill_rows(slab, part, r, adds_old);
      } else {
        fill_columns(slab, part, r, adds_old);
      }
      if (part == 0 && adds_old) load_next(tile, row, group);
    }
    slabs_.publish([&] {
      WgradGroup const at = place(tile, group);
      WgradHalf const& dw = p_.halves[at.half];
      put(dw, slab, wgrad_coordinates<kMajor>(dw, at.i, row), tile.segment);
    });
  }

  __device__ __forceinline__ static void put(WgradHalf const& dw, bf16 const* slab,
                                             WgradCoordinates const& to, int segment) {
    arch::tma_store(&dw.map, slab, to.c0, to.c1, to.c2, segment, arch::l2_evict_first());
  }

  __device__ __forceinline__ static uint32_t rounded(uint32_t first, uint32_t second,
                                                     uint32_t old) {
    float2 const values = arch::unpack_bf16(old);
    return arch::pack_bf16(__uint_as_float(first) + values.x, __uint_as_float(second) + values.y);
  }
  __device__ __forceinline__ static uint32_t rounded(uint32_t first, uint32_t second) {
    return arch::pack_bf16(__uint_as_float(first), __uint_as_float(second));
  }

  // 32 i of this thread's c.
  __device__ __forceinline__ void fill_rows(bf16* slab, int part, uint32_t const (&r)[kLoaded],
                                            bool adds_old) const {
    TESSERA_UNROLL
    for (int i = 0; i < kLoaded; i += 8) {
      int const chunk = (part * kLoaded + i) / 8;
      uint4 values;
      if (adds_old) {
        uint4 const old = slabs_.get(slab, chunk);
        values = {rounded(r[i], r[i + 1], old.x), rounded(r[i + 2], r[i + 3], old.y),
                  rounded(r[i + 4], r[i + 5], old.z), rounded(r[i + 6], r[i + 7], old.w)};
      } else {
        values = {rounded(r[i], r[i + 1]), rounded(r[i + 2], r[i + 3]), rounded(r[i + 4], r[i + 5]),
                  rounded(r[i + 6], r[i + 7])};
      }
      slabs_.put(slab, chunk, values);
    }
  }

  // 64 i of 16 c, the `part`-th, as fragments: matrices of 8 i x 8 c, four at a time.
  __device__ __forceinline__ void fill_columns(bf16* slab, int part, uint32_t const (&r)[kLoaded],
                                               bool adds_old) const {
    TESSERA_UNROLL
    for (int j = 0; j < kLoaded; j += 8) {
      uint32_t const place = matrix_row(slab, part, j / 4);
      uint32_t m[4];
      if (adds_old) {
        uint32_t old[4];
        arch::ldmatrix_x4_transposed(place, old[0], old[1], old[2], old[3]);
        TESSERA_UNROLL
        for (int i = 0; i < 4; ++i) m[i] = rounded(r[j + 2 * i], r[j + 2 * i + 1], old[i]);
      } else {
        TESSERA_UNROLL
        for (int i = 0; i < 4; ++i) m[i] = rounded(r[j + 2 * i], r[j + 2 * i + 1]);
      }
      arch::stmatrix_x4_transposed(place, m[0], m[1], m[2], m[3]);
    }
  }

  // Bit 0 of a lane's matrix selects 8 c, bit 1 the next 8 i behind 8 `eights`. Rows of i have 64 bytes here; TMA
  // swizzles by the place in 128.
  __device__ __forceinline__ static uint32_t matrix_row(bf16 const* slab, int part, int eights) {
    int const lane = arch::lane_idx();
    int const i = (eights + lane / 16) * 8 + lane % 8;
    int const line = i / 2, chunk = i % 2 * 4 + part * 2 + (lane / 8 & 1);
    return arch::shared_address(slab) + line * kStageRowBytes + ((chunk ^ (line & 7)) << 4);
  }
  // fp32: this thread's c of row i.
  __device__ __forceinline__ static uint32_t column_place(bf16 const* slab, int i) {
    int const lane = arch::lane_idx();
    return arch::shared_address(slab) + i * kStageRowBytes + ((lane / 4 ^ (i & 7)) << 4) +
           lane % 4 * 4;
  }

  Params const& p_;
  Slabs slabs_;
  int turn_ =
      0;  // the slab that is filled next, of bf16 that replaces what was there: some groups have none
};

}  // namespace tessera::cuda::gemm
