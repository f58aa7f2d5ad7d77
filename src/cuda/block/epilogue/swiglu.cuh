// SPDX-License-Identifier: Apache-2.0
// swiglu epilogue: a column group is [64 gate | 64 up], so g and u of one output lie in the same thread. h = (g, u), a = g * sigmoid(g) * u, each rounded once to bf16.
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

  static constexpr int kSteps = 3;

  // Of 64 rows from `row` and one column group, [64 gate | 64 up]: stores g, u, then a.
  template <int kStep>
  __device__ __forceinline__ void step(float const (&acc)[kGroupColumns / 2], WorkTile const& tile,
                                       int row, int group) {
    static_assert(kGemm.b_halves == 2);
    constexpr int kUp = kGroupColumns / 4;
    int const ragged_row = p_.ragged_extent + row - tile.end;
    int const column = tile.n_tile * (kGemm.tile.n / 2) + group * kSlabColumns;
    CUtensorMap const* const map = kStep < 2 ? &p_.h : &p_.a;
    slabs_.store(map, column, kStep == 1, ragged_row, tile.end, [&](int j, int half) {
      int const i = 4 * j + 2 * half;
      if constexpr (kStep < 2) {
        return arch::pack_bf16(acc[kStep * kUp + i], acc[kStep * kUp + i + 1]);
      } else {
        return arch::pack_bf16(silu<kSigmoid>(acc[i]) * acc[kUp + i],
                               silu<kSigmoid>(acc[i + 1]) * acc[kUp + i + 1]);
      }
    });
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  Params const& p_;
  SlabStore<kGemm> slabs_;
};

}  // namespace tessera::cuda::block
