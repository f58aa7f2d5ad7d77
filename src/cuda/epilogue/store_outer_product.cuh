// SPDX-License-Identifier: Apache-2.0
// Deferred store epilogue of tiles to which an outer product of each segment is added (outer_product.cuh):
//   D[r, c] = accumulators + u[r] * v[segment, c], rounded once.
#pragma once

#include "../arch/load_global.cuh"
#include "store.cuh"

namespace tessera::cuda::gemm {

struct StoreOuterProductParams {
  StoreParams store;
  float const* gmem_u;  // (rows)
};

template <class Core>
class StoreOuterProductEpilogue : StoreDeferred<Core> {
 public:
  using Accumulators = typename Core::Accumulators;
  using StoreDeferred<Core>::kMode;
  using Params = StoreOuterProductParams;

  __device__ __forceinline__ StoreOuterProductEpilogue(typename Core::Storage& smem,
                                                       Params const& p, int consumer)
      : StoreDeferred<Core>(smem, p.store, consumer), gmem_u_(p.gmem_u) {
    static_assert(Core::kGemm.epilogue.outer_product);
  }

  // u of this thread's rows is under way before the k loop.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row, int) {
    TESSERA_UNROLL
    for (int i = 0; i < Accumulators::kRows; ++i) {
      int const r = Accumulators::row(row, i);
      u_[i] = __uint_as_float(arch::load_4(gmem_u_ + r, r < tile.end));
    }
  }

  using StoreDeferred<Core>::keep;
  using StoreDeferred<Core>::work;
  using StoreDeferred<Core>::drain;

  __device__ __forceinline__ float const (&outer_rows() const)[Accumulators::kRows] { return u_; }

 private:
  float const* gmem_u_;
  float u_[Accumulators::kRows];  // of this thread's rows
};

}  // namespace tessera::cuda::gemm
