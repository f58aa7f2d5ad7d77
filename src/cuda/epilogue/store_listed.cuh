// SPDX-License-Identifier: Apache-2.0
// Deferred store epilogue whose rows go where a list says: row i of D lies in row list[i] of memory.
#pragma once

#include "../arch/warp.cuh"
#include "store.cuh"

namespace tessera::cuda::gemm {

struct StoreListedParams {
  StoreParams store;
  int const* gmem_list;  // (rows), each row of memory once
  int64_t pitch;         // elements from one row of memory to the next
};

template <class Core>
class StoreListedEpilogue : StoreDeferred<Core> {
  using Base = StoreDeferred<Core>;

 public:
  using Accumulators = typename Core::Accumulators;
  using Base::kMode;
  using Params = StoreListedParams;

  __device__ __forceinline__ StoreListedEpilogue(typename Core::Storage& smem, Params const& p,
                                                 int consumer)
      : Base(smem, p.store, consumer), p_(p) {}

  // The places of a tile's rows are under way before its k loop, under which those of the tile before are stored: a
  // lane has one of the warp's 16.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row, int) {
    int const own = row + arch::warp_in_warpgroup() * kWarpRows + arch::lane_idx() % kWarpRows;
    ahead_ = own < tile.end ? p_.gmem_list[own] : 0;
  }
  __device__ __forceinline__ void keep(Accumulators& acc, WorkTile const& tile, int row) {
    places_ = ahead_;
    Base::keep(acc, tile, row);
  }
  __device__ __forceinline__ void work(int piece) {
    Base::work(piece, [this](int row) {
      return int64_t{__shfl_sync(arch::kAllLanes, places_, row)} * p_.pitch;
    });
  }

  using Base::drain;

 private:
  Params const& p_;
  int ahead_ = 0;
  int places_ = 0;
};

}  // namespace tessera::cuda::gemm
