// SPDX-License-Identifier: Apache-2.0
// store epilogue of scaled operands to which an outer product of each segment is added:
//   D[r, c] = rnd(rnd(accumulators) + u[r] v[segment, c])
// v in bf16, or the sum of two rows of bf16, those of an fp32 one (host/split_fp32.hpp). By FMAs of the warpgroup that
// stores, as consumers have no registers for one more step of the tensor cores.
#pragma once

#include "../arch/approx_math.cuh"
#include "../arch/load_global.cuh"
#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"

namespace tessera::cuda::gemm {

struct StoreHeldOuterProductParams {
  bf16* gmem_d;         // (rows, columns)
  int columns;          // whole column groups
  float const* gmem_u;  // (rows)
  bf16 const* gmem_v;   // segment s has rows s * v_rows, .. of `v_pitch` elements
  int64_t v_pitch;
  int v_rows;  // of each segment; more than one: v is the sum of the first two
};

template <class Core>
class StoreHeldOuterProduct {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  static constexpr EpilogueMode kMode = EpilogueMode::kApart;
  using HeldTile = typename Core::HeldTile;
  using Params = StoreHeldOuterProductParams;

  __device__ __forceinline__ StoreHeldOuterProduct(typename Core::Storage& smem, Params const& p)
      : p_(p), held_(smem) {
    static_assert(kGemm.b_halves() == 1);
  }

  // The warp's 16 rows, four at a time, 64 columns of each.
  __device__ __forceinline__ void store(WorkTile const& tile, int consumer, uint32_t) {
    held_.of(consumer);
    int const first_row = tile.row + consumer * kSubtileM + arch::warp_in_warpgroup() * kWarpRows;
    int const slabs = min(4, p_.columns / kSlabColumns - 4 * tile.n_tile);
    int64_t const row_of_v = int64_t{tile.segment} * p_.v_rows * p_.v_pitch;
#pragma unroll 1
    for (int slab = 0; slab < slabs; ++slab) {
      int const column = tile.n_tile * kGemm.tile.n + slab * kSlabColumns + held_.place(0).column;
      bf16 const* const gmem_v = p_.gmem_v + row_of_v + column;
      uint4 const v = arch::load_streaming_16(gmem_v, true);
      uint4 const rest = arch::load_streaming_16(gmem_v + p_.v_pitch, p_.v_rows > 1);
#pragma unroll 1
      for (int piece = 0; piece < HeldTile::kPieces; ++piece) {
        auto const at = held_.place(piece);
        int const row = first_row + at.row;
        float const u = __uint_as_float(arch::load_4(p_.gmem_u + row, row < tile.end));
        uint4 sum = at.load(slab);
        sum.x = add(sum.x, u, v.x, rest.x);
        sum.y = add(sum.y, u, v.y, rest.y);
        sum.z = add(sum.z, u, v.z, rest.z);
        sum.w = add(sum.w, u, v.w, rest.w);
        if (row < tile.end) {
          arch::store_streaming_16(p_.gmem_d + int64_t{row} * p_.columns + column, sum);
        }
        __syncwarp();
      }
    }
  }

 private:
  // Two neighbouring columns.
  __device__ __forceinline__ static uint32_t add(uint32_t d, float u, uint32_t v, uint32_t rest) {
    float2 const sum = arch::unpack_bf16(d), a = arch::unpack_bf16(v), b = arch::unpack_bf16(rest);
    return arch::pack_bf16(fmaf(u, a.x + b.x, sum.x), fmaf(u, a.y + b.y, sum.y));
  }

  Params const& p_;
  HeldTile held_;
};

}  // namespace tessera::cuda::gemm
