// SPDX-License-Identifier: Apache-2.0
// activation epilogue of scaled operands: hb = accumulators, rounded to bf16; a = act(hb). Gated: a tile is 128 columns
// of gate and the same of up, a block of the scales of either, so a row's scale is that of eight lanes. Either
//   e4m3  codes and scales of hb, as gate and up, and of a before it is rounded
//   bf16  hb and a, rounded
// Pieces run under the next tile's k loop (gemm/sm90/held_tile.cuh).
#pragma once

#include "../arch/approx_math.cuh"
#include "../arch/convert_e4m3.cuh"
#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "activation_math.cuh"
#include "core/fp8.hpp"

namespace tessera::cuda::gemm {

struct ActivationE4m3Params {
  void* gmem_h;          // (rows, 2 * columns); null: not stored
  void* gmem_a;          // (rows, columns); null: not stored
  float* gmem_h_scales;  // (2 * columns / 128, scale_pitch), e4m3 only, as is the next
  float* gmem_a_scales;  // (columns / 128, scale_pitch)
  int64_t scale_pitch;
  Activation activation;
  int columns;  // n
};

// kUnderProducts: pieces run under the warpgroup's own wgmmas, else when it has none in flight.
template <class Core, ActivationKind kKind, Element kOut, bool kUnderProducts>
class ActivationE4m3Epilogue {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using HeldTile = typename Core::HeldTile;
  using Params = ActivationE4m3Params;
  static constexpr bool kPiecesUnderProducts = kUnderProducts;
  static constexpr int kPieces = 2 * HeldTile::kPieces;

  __device__ __forceinline__ ActivationE4m3Epilogue(typename Core::Storage& smem, Params const& p,
                                                    int consumer)
      : p_(p), held_(smem, consumer) {
    static_assert(Function::kGated && kGemm.b_halves() == 2);
  }

  // 64 rows from `row`.
  __device__ __forceinline__ void keep(typename Core::Accumulators const& acc, WorkTile const& tile,
                                       int row) {
    row_ = row + arch::warp_in_warpgroup() * kWarpRows;
    end_ = tile.end;
    n_tile_ = tile.n_tile;
    held_.keep(acc);
  }

  // Pieces in turns of h and a, of the same rows.
  __device__ __forceinline__ void work(int piece) {
    Place const at = held_.place(piece / 2);
    if (piece % 2 == 0) {
      if (p_.gmem_h != nullptr) {
        store_h(at, 0);
        store_h(at, 1);
      }
    } else if (p_.gmem_a != nullptr) {
      store_a(at);
    }
  }

 private:
  using Place = typename HeldTile::Place;
  using Function = ActivationFunction<kKind>;
  static constexpr int kColumns = kGemm.tile.n / 2;  // of a, per tile

  __device__ __forceinline__ bool is_stored(int row) const { return row < end_; }

  // All lanes call it, for gate or up. Each part is read again, as registers are few.
  __device__ __forceinline__ void store_h(Place const& at, int half) const {
    int const row = row_ + at.row;
    bool const exists = is_stored(row);
    int64_t const place =
        int64_t{row} * (2 * p_.columns) + half * p_.columns + n_tile_ * kColumns + at.column;
    if constexpr (kOut == Element::kBf16) {
      TESSERA_UNROLL
      for (int part = 0; part < 2; ++part) {
        uint4 const share = at.load(2 * part + half);
        if (exists) {
          arch::store_streaming_16(static_cast<bf16*>(p_.gmem_h) + place + part * kSlabColumns,
                                   share);
        }
      }
    } else {
      core::BlockScale const scale =
          scale_of_row(max(largest_of(at.load(half)), largest_of(at.load(2 + half))));
      TESSERA_UNROLL
      for (int part = 0; part < 2; ++part) {
        uint2 const codes = codes_of(at.load(2 * part + half), scale.inverse);
        if (exists) {
          arch::store_streaming_8(static_cast<uint8_t*>(p_.gmem_h) + place + part * kSlabColumns,
                                  codes);
        }
      }
      if (exists && is_first_of_row()) {
        int const block = n_tile_ + half * (p_.columns / kColumns);
        p_.gmem_h_scales[block * p_.scale_pitch + row] = scale.scale;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store_a(Place const& at) const {
    int const row = row_ + at.row;
    bool const exists = is_stored(row);
    int64_t const place = int64_t{row} * p_.columns + n_tile_ * kColumns + at.column;
    if constexpr (kOut == Element::kBf16) {
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        uint4 const gate = at.load(2 * part), up = at.load(2 * part + 1);
        if (exists) {
          arch::store_streaming_16(
              static_cast<bf16*>(p_.gmem_a) + place + part * kSlabColumns,
              {rounded(activate(gate.x, up.x)), rounded(activate(gate.y, up.y)),
               rounded(activate(gate.z, up.z)), rounded(activate(gate.w, up.w))});
        }
      }
    } else {
      float largest = 0;
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        uint4 const gate = at.load(2 * part), up = at.load(2 * part + 1);
        largest = larger(largest, activate(gate.x, up.x));
        largest = larger(largest, activate(gate.y, up.y));
        largest = larger(largest, activate(gate.z, up.z));
        largest = larger(largest, activate(gate.w, up.w));
      }
      core::BlockScale const scale = scale_of_row(__float_as_uint(largest));
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        uint4 const gate = at.load(2 * part), up = at.load(2 * part + 1);
        uint2 const codes = {
            codes_of(activate(gate.x, up.x), activate(gate.y, up.y), scale.inverse),
            codes_of(activate(gate.z, up.z), activate(gate.w, up.w), scale.inverse)};
        if (exists) {
          arch::store_streaming_8(static_cast<uint8_t*>(p_.gmem_a) + place + part * kSlabColumns,
                                  codes);
        }
      }
      if (exists && is_first_of_row()) {
        p_.gmem_a_scales[n_tile_ * p_.scale_pitch + row] = scale.scale;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ static uint32_t rounded(float2 v) { return arch::pack_bf16(v.x, v.y); }
  __device__ __forceinline__ static float larger(float largest, float2 v) {
    return arch::max_magnitude(arch::max_magnitude(largest, v.x), v.y);
  }
  __device__ __forceinline__ static uint32_t codes_of(float2 v, float2 w, float r) {
    return arch::pack_e4m3(v.x * r, v.y * r, w.x * r, w.y * r);
  }
  __device__ __forceinline__ static uint2 codes_of(uint4 share, float r) {
    return {codes_of(arch::unpack_bf16(share.x), arch::unpack_bf16(share.y), r),
            codes_of(arch::unpack_bf16(share.z), arch::unpack_bf16(share.w), r)};
  }

  // The largest magnitude, as bits of fp32.
  __device__ __forceinline__ static uint32_t largest_of(uint4 share) {
    uint32_t const largest = arch::max_magnitudes_bf16(
        arch::max_magnitudes_bf16(
            arch::max_magnitudes_bf16(arch::max_magnitudes_bf16(0, share.x), share.y), share.z),
        share.w);
    return max(largest << 16, largest & 0xffff0000u);
  }

  static constexpr int kRowLanes = 8;
  __device__ __forceinline__ static bool is_first_of_row() {
    return arch::lane_idx() % kRowLanes == 0;
  }
  // The scale of a row of eight lanes, from the largest magnitude in each lane's share.
  __device__ __forceinline__ static core::BlockScale scale_of_row(uint32_t largest) {
    TESSERA_UNROLL
    for (int half = kRowLanes / 2; half > 0; half /= 2) {
      largest = max(largest, __shfl_xor_sync(arch::kAllLanes, largest, half));
    }
    float const scale = core::fp32_scale(largest).scale;
    return {scale, arch::reciprocal(scale)};
  }

  __device__ __forceinline__ float2 activate(uint32_t gates, uint32_t ups) const {
    float2 const g = arch::unpack_bf16(gates), u = arch::unpack_bf16(ups);
    return {Function::forward(p_.activation, g.x, u.x), Function::forward(p_.activation, g.y, u.y)};
  }

  Params const& p_;
  HeldTile held_;
  int row_ = 0;  // the warp's first
  int end_ = 0;
  int n_tile_ = 0;
};

}  // namespace tessera::cuda::gemm
