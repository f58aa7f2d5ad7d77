// SPDX-License-Identifier: Apache-2.0
// activation epilogue: h = accumulators (+ bias), rounded to bf16; a = act(that h), rounded: the a that backward
// computes again from the h it reads. Both are stored under the next tile's k loop (deferred.cuh).
// Gated: a column group is [64 gate | 64 up], so g and u of one output lie in the same columns of its two slabs.
// Interleaved: B's columns are g0 u0 g1 u1 .., and h is stored so; a lane's 8 columns of a slab are 4 of a.
#pragma once

#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "activation_math.cuh"
#include "bias.cuh"

namespace tessera::cuda::gemm {

struct ActivationParams {
  bf16* gmem_h;  // (rows, halves * columns); null: not stored
  bf16* gmem_a;  // (rows, columns); null: not stored
  Bias bias[2];  // of the halves
  Activation activation;
  int columns;  // n
};

template <class Core, ActivationKind kKind, bool kInterleaved = false>
class ActivationEpilogue {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kDeferred;
  using Params = ActivationParams;

  __device__ __forceinline__ ActivationEpilogue(typename Core::Storage& smem, Params const& p,
                                                int consumer)
      : p_(p), rows_(smem, consumer) {
    static_assert(kGemm.b_halves() == (kInterleaved ? 1 : kHalves));
    static_assert(kGated || !kInterleaved);
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  // 64 rows from `row`.
  __device__ __forceinline__ void keep(Accumulators& acc, WorkTile const& tile, int row) {
    row_ = row + arch::warp_in_warpgroup() * kWarpRows;
    end_ = tile.end;
    column_ = tile.n_tile * kColumns;
    keep_group<1>(acc, tile.segment);
    keep_group<0>(acc, tile.segment);
  }

  __device__ __forceinline__ void work(int piece) {
    auto const held = rows_.take(piece);
    int const row = row_ + held.row;
    if constexpr (kInterleaved) {
      TESSERA_UNROLL
      for (int slab = 0; slab < 2; ++slab) {
        int const column = column_ + held.group * kGroup + (slab * kSlabColumns + held.column) / 2;
        if (row < end_ && column < p_.columns) store_interleaved(row, column, held.load(slab));
      }
      return;
    }
    int const column = column_ + held.group * kGroup + held.column;
    if (row >= end_ || column >= p_.columns) return;
    if constexpr (kGated) {
      uint4 const gate = held.load(0), up = held.load(1);
      if (p_.gmem_h != nullptr) {
        bf16* const gmem_h = p_.gmem_h + int64_t{row} * (2 * p_.columns) + column;
        arch::store_streaming_16(gmem_h, gate);
        arch::store_streaming_16(gmem_h + p_.columns, up);
      }
      store_a(row, column, gate, up);
    } else {
      TESSERA_UNROLL
      for (int slab = 0; slab < 2; ++slab) {
        int const c = column + slab * kSlabColumns;
        if (c >= p_.columns) break;
        uint4 const h = held.load(slab);
        if (p_.gmem_h != nullptr) {
          arch::store_streaming_16(p_.gmem_h + int64_t{row} * p_.columns + c, h);
        }
        store_a(row, c, h, h);
      }
    }
  }

  __device__ __forceinline__ void drain() const {}

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr bool kGated = Function::kGated;
  static constexpr int kHalves = kGated ? 2 : 1;
  static constexpr int kColumns = kGemm.tile.n / kHalves;  // of a, per tile
  static constexpr int kGroup = kGroupColumns / kHalves;   // columns per column group

  template <int kG>
  __device__ __forceinline__ void keep_group(Accumulators& acc, int segment) {
    if (p_.bias[0].gmem != nullptr) {
      int const column = column_ + kG * kGroup;
      if constexpr (kInterleaved) {
        add_interleaved_bias(acc, 2 * kG, p_.bias, segment, column, p_.columns);
        rows_.template keep<kG>(acc);
        return;
      }
      add_bias(acc, 2 * kG, p_.bias[0], segment, column, p_.columns);
      add_bias(acc, 2 * kG + 1, p_.bias[kHalves - 1], segment,
               kGated ? column : column + kSlabColumns, p_.columns);
    }
    rows_.template keep<kG>(acc);
  }

  // Kinds that are not gated ignore `up`.
  __device__ __forceinline__ void store_a(int row, int column, uint4 gate, uint4 up) const {
    if (p_.gmem_a == nullptr) return;
    arch::store_streaming_16(p_.gmem_a + int64_t{row} * p_.columns + column,
                             {activate(gate.x, up.x), activate(gate.y, up.y),
                              activate(gate.z, up.z), activate(gate.w, up.w)});
  }

  // Four columns of a from `column` on.
  __device__ __forceinline__ void store_interleaved(int row, int column, uint4 h) const {
    if (p_.gmem_h != nullptr) {
      arch::store_streaming_16(p_.gmem_h + (int64_t{row} * p_.columns + column) * 2, h);
    }
    if (p_.gmem_a == nullptr) return;
    arch::store_streaming_8(p_.gmem_a + int64_t{row} * p_.columns + column,
                            {activate(arch::low_halves(h.x, h.y), arch::high_halves(h.x, h.y)),
                             activate(arch::low_halves(h.z, h.w), arch::high_halves(h.z, h.w))});
  }

  __device__ __forceinline__ uint32_t activate(uint32_t gates, uint32_t ups) const {
    float2 const g = arch::unpack_bf16(gates), u = arch::unpack_bf16(ups);
    return arch::pack_bf16(Function::forward(p_.activation, g.x, u.x),
                           Function::forward(p_.activation, g.y, u.y));
  }

  Params const& p_;
  typename Core::DeferredRows rows_;
  int row_ = 0;  // the warp's first
  int end_ = 0;
  int column_ = 0;  // of a
};

}  // namespace tessera::cuda::gemm
