// SPDX-License-Identifier: Apache-2.0
// An epilogue sees this of sm_100a: how its warp reads accumulators, and how it stores.
#pragma once

#include "accumulators.cuh"
#include "slabs.cuh"

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
struct TensorMemoryCore {
  static constexpr int kTileN = kGemm.tile.n;
  static constexpr int kHalves = kGemm.b_halves();
  using Storage = SharedStorage<kGemm>;
  using Rows = AccumulatorRows<kGemm>;
  using Slabs = WarpSlabs<kGemm>;
  using LoadedSlabs = LoadedWarpSlabs<kGemm>;
};

}  // namespace tessera::cuda::gemm
