// SPDX-License-Identifier: Apache-2.0
// Deferred store epilogue of tiles to which an outer product of each segment is added (outer_product.cuh):
//   D[r, c] = accumulators + u[r] * v[segment, c], rounded once.
#pragma once

#include "../arch/load_global.cuh"
#include "../gemm/sm90/outer_product.cuh"
#include "store.cuh"

namespace tessera::cuda::gemm {

struct StoreOuterProductParams {
  StoreParams store;
  float const* gmem_u;  // (rows)
};

template <GemmConfig kGemm>
class StoreOuterProductEpilogue : StoreDeferred<kGemm> {
 public:
  using StoreDeferred<kGemm>::kMode;
  using Params = StoreOuterProductParams;

  __device__ __forceinline__ StoreOuterProductEpilogue(SharedStorage<kGemm>& smem, Params const& p,
                                                       int consumer)
      : StoreDeferred<kGemm>(smem, p.store, consumer), gmem_u_(p.gmem_u) {
    static_assert(kGemm.epilogue.outer_product);
  }

  // u of this thread's rows is under way before the k loop.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row, int) {
    int const own_row = row + arch::warp_in_warpgroup() * kWarpRows + arch::lane_idx() / 4;
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const r = own_row + half * 8;
      u_[half] = __uint_as_float(arch::load_4(gmem_u_ + r, r < tile.end));
    }
  }

  using StoreDeferred<kGemm>::keep;
  using StoreDeferred<kGemm>::work;
  using StoreDeferred<kGemm>::drain;

  __device__ __forceinline__ float const (&outer_rows() const)[2] { return u_; }

 private:
  float const* gmem_u_;
  float u_[2];  // rows lane/4 and lane/4 + 8
};

}  // namespace tessera::cuda::gemm
