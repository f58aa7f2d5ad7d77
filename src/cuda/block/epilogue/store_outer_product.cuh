// SPDX-License-Identifier: Apache-2.0
// store epilogue with a term of rank one in every segment: D[r, c] = accumulators + u[r] * v[segment, c], rounded once.
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

  // 64 rows from `row`; `ring` where stages are lent. Nothing of the thread's place is kept between tiles: the
  // accumulators leave few registers.
  template <class... Ring>
  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row,
                                        Ring&... ring) {
    int const thread = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    int const own_row = row + thread / arch::kWarpThreads * 16 + arch::lane_idx() / 4;
    float const u[2] = {u_of(own_row, tile.end), u_of(own_row + 8, tile.end)};
    int const first = tile.n_tile * kGemm.tile.n + arch::lane_idx() % 4 * 2;
    int const left = p_.store.columns - first;
    bf16 const* const gmem_v = p_.term.gmem_v + tile.segment * p_.term.v_pitch + first;
    TESSERA_UNROLL
    for (int g = 0; g < kGemm.column_groups(); ++g) {
      TESSERA_UNROLL
      for (int j = 0; j < kGroupColumns / 8; j += kBatch) {
        uint32_t pairs[kBatch];
        TESSERA_UNROLL
        for (int b = 0; b < kBatch; ++b) {
          int const c = g * kGroupColumns + 8 * (j + b);
          pairs[b] = arch::load_4(gmem_v + c, c < left);
        }
        TESSERA_UNROLL
        for (int b = 0; b < kBatch; ++b) {
          // A bf16 is the upper half of the fp32 of the same value; the lower address is the lower half.
          float const v[2] = {__uint_as_float(pairs[b] << 16),
                              __uint_as_float(pairs[b] & 0xffff0000u)};
          TESSERA_UNROLL
          for (int i = 0; i < 4; ++i) {
            float& value = acc[g][4 * (j + b) + i];
            value = fmaf(u[i / 2], v[i % 2], value);
          }
        }
      }
    }
    store_.store(acc, tile, row, ring...);
  }

  __device__ __forceinline__ void settle()
    requires(kGemm.lent_stages > 0)
  {
    store_.settle();
  }
  __device__ __forceinline__ void drain() const { store_.drain(); }

 private:
  // Loads in flight; more where nothing hides them.
  static constexpr int kBatch = kGemm.ping_pong() ? 4 : 16;

  __device__ __forceinline__ float u_of(int row, int end) const {
    return row < end ? p_.term.gmem_u[row] : 0.0f;
  }

  Params const& p_;
  StoreEpilogue<kGemm> store_;
};

}  // namespace tessera::cuda::block
