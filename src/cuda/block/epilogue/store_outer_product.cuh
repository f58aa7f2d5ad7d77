// SPDX-License-Identifier: Apache-2.0
// Deferred store epilogue with a term of rank one in every segment:
//   D[r, c] = accumulators + u[r] * v[segment, c], rounded once.
#pragma once

#include "../../arch/load_global.cuh"
#include "store.cuh"

namespace tessera::cuda::block {

struct OuterProduct {
  float const* gmem_u;  // (rows)
  bf16 const* gmem_v;   // (segments, columns); columns and pitch even, 4-byte aligned
  int64_t v_pitch;      // elements
};

struct StoreOuterProductParams {
  StoreParams store;
  OuterProduct term;
};

template <GemmConfig kGemm>
class StoreOuterProductEpilogue {
 public:
  using Params = StoreOuterProductParams;

  __device__ __forceinline__ StoreOuterProductEpilogue(SharedStorage<kGemm>& smem, Params const& p,
                                                       int consumer)
      : p_(p), store_(smem, p.store, consumer) {}

  // What this thread's values need of u and v is under way before the k loop.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row, int) {
    int const own_row = row + arch::warp_in_warpgroup() * kWarpRows + arch::lane_idx() / 4;
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const r = own_row + half * 8;
      u_[half] = __uint_as_float(arch::load_4(p_.term.gmem_u + r, r < tile.end));
    }
    int const first = tile.n_tile * kGemm.tile.n + arch::lane_idx() % 4 * 2;
    int const left = p_.store.columns - first;
    bf16 const* const gmem_v = p_.term.gmem_v + tile.segment * p_.term.v_pitch + first;
    TESSERA_UNROLL
    for (int i = 0; i < kPairs; ++i) v_[i] = arch::load_4(gmem_v + 8 * i, 8 * i < left);
  }

  // 64 rows from `row`.
  __device__ __forceinline__ void keep(Accumulators<kGemm>& acc, WorkTile const& tile, int row) {
    TESSERA_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      // A bf16 is the upper half of the fp32 of the same value; the lower address is the lower half.
      float const v[2] = {__uint_as_float(v_[i] << 16), __uint_as_float(v_[i] & 0xffff0000u)};
      TESSERA_UNROLL
      for (int k = 0; k < 4; ++k) {
        float& value = acc[i / kGroupPairs][4 * (i % kGroupPairs) + k];
        value = fmaf(u_[k / 2], v[k % 2], value);
      }
    }
    store_.keep(acc, tile, row);
  }
  __device__ __forceinline__ void work(int piece) { store_.work(piece); }

 private:
  static constexpr int kGroupPairs = kGroupColumns / 8;
  static constexpr int kPairs = kGemm.column_groups() * kGroupPairs;  // of columns, of a thread

  Params const& p_;
  StoreDeferred<kGemm> store_;
  float u_[2];  // rows lane/4 and lane/4 + 8
  uint32_t v_[kPairs];
};

}  // namespace tessera::cuda::block
