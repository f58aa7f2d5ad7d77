// SPDX-License-Identifier: Apache-2.0
// swiglu epilogue: the accumulators of a tile are [gate | up], tile_n/2 columns each, so g and u of
// one output lie in the same thread. h = (g, u), a = g * sigmoid(g) * u, each rounded once to bf16.
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

  // 64 rows from `row`.
  __device__ __forceinline__ void store(float const (&acc)[kGemm.tile.n / 2], WorkTile const& tile,
                                        int row) {
    static_assert(kGemm.b_halves == 2 && kHalfN % kSlabColumns == 0);
    int const ragged_row = p_.ragged_extent + row - tile.end;
    TESSERA_UNROLL
    for (int s = 0; s < kHalfN / kSlabColumns; ++s) {
      float const* const gate = acc + s * (kSlabColumns / 2);
      float const* const up = gate + kGemm.tile.n / 4;
      int const column = tile.n_tile * kHalfN + s * kSlabColumns;
      slabs_.store(&p_.h, column, 0, ragged_row, tile.end, [&](int j, int half) {
        int const i = 4 * j + 2 * half;
        return arch::pack_bf16(gate[i], gate[i + 1]);
      });
      slabs_.store(&p_.h, column, 1, ragged_row, tile.end, [&](int j, int half) {
        int const i = 4 * j + 2 * half;
        return arch::pack_bf16(up[i], up[i + 1]);
      });
      slabs_.store(&p_.a, column, 0, ragged_row, tile.end, [&](int j, int half) {
        int const i = 4 * j + 2 * half;
        return arch::pack_bf16(silu<kSigmoid>(gate[i]) * up[i],
                               silu<kSigmoid>(gate[i + 1]) * up[i + 1]);
      });
    }
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  static constexpr int kHalfN = kGemm.tile.n / 2;

  Params const& p_;
  SlabStore<kGemm> slabs_;
};

}  // namespace tessera::cuda::block
