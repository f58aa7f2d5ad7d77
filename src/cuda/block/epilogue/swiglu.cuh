// SPDX-License-Identifier: Apache-2.0
// swiglu epilogue: a column group is [64 gate | 64 up], so g and u of one output lie in the same
// thread. h = (g, u), a = g * sigmoid(g) * u, each rounded once to bf16.
#pragma once

#include "../../arch/approx_math.cuh"
#include "../slab_store.cuh"
#include "../tile_scheduler.cuh"

namespace tessera::cuda::block {

// kTanh: (1 + tanh(g/2)) / 2, one special function, absolute error 2^-12.
// kExp: 1 / (1 + 2^(-g log2 e)), two of them, relative error about 2^-21.
enum class Sigmoid : unsigned char { kTanh, kExp };

template <Sigmoid kSigmoid>
__device__ __forceinline__ float silu(float g) {
  if constexpr (kSigmoid == Sigmoid::kTanh) {
    float const half = 0.5f * g;
    return fmaf(half, arch::tanh_approx(half), half);
  } else {
    return g * arch::rcp_approx(1.0f + arch::exp2_approx(g * -1.44269504f));
  }
}

struct SwigluParams {
  CUtensorMap h;      // ragged (column, half, row, end), 64 x 1 x 64 x 1
  CUtensorMap a;      // the same with one half
  int ragged_extent;  // of the row dimension of both
};

template <GemmConfig kGemm, Sigmoid kSigmoid>
class SwigluEpilogue {
 public:
  using Params = SwigluParams;

  __device__ __forceinline__ SwigluEpilogue(SharedStorage<kGemm>& smem, Params const& p,
                                            int consumer)
      : p_(p), slabs_(smem, consumer) {}

  // 64 rows from `row`. Rounds: gate and up of each column group, then a of all groups; a is computed
  // while TMA reads gate and up.
  __device__ __forceinline__ void store(Accumulators<kGemm> const& acc, WorkTile const& tile,
                                        int row) {
    static_assert(kGemm.b_halves == 2 && kGemm.store_slabs == 2);
    int const ragged_row = p_.ragged_extent + row - tile.end;
    int const column = tile.n_tile * (kGemm.tile.n / 2);
    uint32_t a[kGroups][kPairs];
    TESSERA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      slabs_.begin();
      slabs_.fill(0, [&](int j, int half) { return pack(acc[g], 4 * j + 2 * half); });
      slabs_.fill(1, [&](int j, int half) { return pack(acc[g], kUp + 4 * j + 2 * half); });
      slabs_.publish();
      if (slabs_.issuer()) {
        slabs_.store(0, &p_.h, column + g * kSlabColumns, 0, ragged_row, tile.end);
        slabs_.store(1, &p_.h, column + g * kSlabColumns, 1, ragged_row, tile.end);
        slabs_.commit();
      }
      TESSERA_UNROLL
      for (int i = 0; i < kPairs; ++i) a[g][i] = activate(acc[g], 2 * i);
    }
    slabs_.begin();
    TESSERA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      slabs_.fill(g, [&](int j, int half) { return a[g][2 * j + half]; });
    }
    slabs_.publish();
    if (slabs_.issuer()) {
      TESSERA_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        slabs_.store(g, &p_.a, column + g * kSlabColumns, 0, ragged_row, tile.end);
      }
      slabs_.commit();
    }
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  static constexpr int kGroups = kGemm.column_groups();
  static constexpr int kUp = kGroupColumns / 4;     // registers from a gate value to its up value
  static constexpr int kPairs = kGroupColumns / 8;  // of a, per group and thread

  __device__ __forceinline__ static uint32_t pack(float const (&acc)[kGroupColumns / 2], int i) {
    return arch::pack_bf16(acc[i], acc[i + 1]);
  }

  __device__ __forceinline__ static uint32_t activate(float const (&acc)[kGroupColumns / 2],
                                                      int i) {
    return arch::pack_bf16(silu<kSigmoid>(acc[i]) * acc[kUp + i],
                           silu<kSigmoid>(acc[i + 1]) * acc[kUp + i + 1]);
  }

  Params const& p_;
  SlabStore<kGemm> slabs_;
};

}  // namespace tessera::cuda::block
