// SPDX-License-Identifier: Apache-2.0
// activation epilogue of scaled operands: hb = accumulators, rounded to bf16; a = act(hb). Gated: a tile is 128 columns
// of gate and the same of up, a block of the scales of either, so a row's scale is that of eight lanes. Either
//   e4m3  codes and scales of hb, as gate and up, and of a before it is rounded
//   bf16  hb and a, rounded
// A warpgroup that does nothing else runs it (gemm/sm90/roles_scaled.cuh).
#pragma once

#include "../arch/approx_math.cuh"
#include "../arch/convert_e4m3.cuh"
#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "activation_math.cuh"
#include "block_scale.cuh"
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

template <class Core, ActivationKind kKind, Element kOut>
class ActivationE4m3Epilogue {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  static constexpr EpilogueMode kMode = EpilogueMode::kApart;
  using HeldTile = typename Core::HeldTile;
  using Params = ActivationE4m3Params;

  __device__ __forceinline__ ActivationE4m3Epilogue(typename Core::Storage& smem, Params const& p)
      : p_(p), held_(smem) {
    static_assert(Function::kGated && kGemm.b_halves() == 2);
  }

  __device__ __forceinline__ void begin(WorkTile const&, uint32_t) const {}

  // The warp's 16 rows, four at a time.
  __device__ __forceinline__ void store(WorkTile const& tile, int consumer, uint32_t) {
    held_.of(consumer);
    row_ = tile.row + consumer * kSubtileM + arch::warp_in_warpgroup() * kWarpRows;
    end_ = tile.end;
    n_tile_ = tile.n_tile;
#pragma unroll 1
    for (int piece = 0; piece < HeldTile::kPieces; ++piece) {
      if (p_.gmem_h != nullptr) {
        store_h(piece, 0);
        store_h(piece, 1);
      }
      if (p_.gmem_a != nullptr) store_a(piece);
    }
  }

 private:
  using Place = typename HeldTile::GatedPlace;
  using Function = ActivationFunction<kKind>;
  static constexpr int kColumns = kGemm.tile.n / 2;  // of a, per tile
  static constexpr int kPairs = 8;                   // a lane's, of gate and of up

  // All lanes call these. Shares are read where they are used and places are worked out twice, as registers are few.
  __device__ __forceinline__ void store_h(int piece, int half) const {
    Place const at = held_.gated_place(piece);
    uint32_t h[kPairs];
    TESSERA_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint4 const chunk = at.load(half, i);
      h[4 * i] = chunk.x;
      h[4 * i + 1] = chunk.y;
      h[4 * i + 2] = chunk.z;
      h[4 * i + 3] = chunk.w;
    }
    if constexpr (kOut == Element::kBf16) {
      store_pairs(p_.gmem_h, piece, 2 * p_.columns, half * p_.columns, h);
    } else {
      uint32_t largest = 0;
      TESSERA_UNROLL
      for (int i = 0; i < kPairs; ++i) largest = arch::max_magnitudes_bf16(largest, h[i]);
      core::BlockScale const scale = scale_of_row(max(largest << 16, largest & 0xffff0000u));
      uint32_t codes[kPairs / 2];
      TESSERA_UNROLL
      for (int i = 0; i < kPairs / 2; ++i) {
        codes[i] =
            codes_of(arch::unpack_bf16(h[2 * i]), arch::unpack_bf16(h[2 * i + 1]), scale.inverse);
      }
      store_codes(p_.gmem_h, piece, 2 * p_.columns, half * p_.columns, codes);
      store_scale(p_.gmem_h_scales, piece, half, scale.scale);
    }
  }

  __device__ __forceinline__ void store_a(int piece) const {
    Place const at = held_.gated_place(piece);
    float2 a[kPairs];
    TESSERA_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint4 const gate = at.load(0, i), up = at.load(1, i);
      a[4 * i] = activate(gate.x, up.x);
      a[4 * i + 1] = activate(gate.y, up.y);
      a[4 * i + 2] = activate(gate.z, up.z);
      a[4 * i + 3] = activate(gate.w, up.w);
    }
    if constexpr (kOut == Element::kBf16) {
      uint32_t pairs[kPairs];
      TESSERA_UNROLL
      for (int i = 0; i < kPairs; ++i) pairs[i] = arch::pack_bf16(a[i].x, a[i].y);
      store_pairs(p_.gmem_a, piece, p_.columns, 0, pairs);
    } else {
      float largest = 0;
      TESSERA_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        largest = arch::max_magnitude(arch::max_magnitude(largest, a[i].x), a[i].y);
      }
      core::BlockScale const scale = scale_of_row(__float_as_uint(largest));
      uint32_t codes[kPairs / 2];
      TESSERA_UNROLL
      for (int i = 0; i < kPairs / 2; ++i) {
        codes[i] = codes_of(a[2 * i], a[2 * i + 1], scale.inverse);
      }
      store_codes(p_.gmem_a, piece, p_.columns, 0, codes);
      store_scale(p_.gmem_a_scales, piece, 0, scale.scale);
    }
  }

  // Returns the place of a lane's share in a tensor whose rows are so wide, from column `first` on; null where the row
  // is not the tile's.
  template <class T>
  __device__ __forceinline__ T* share(void* gmem, int piece, int width, int first) const {
    Place const to = held_.gated_place(static_cast<int>(arch::forgotten(uint32_t(piece))));
    int const row = row_ + to.row;
    return row < end_ ? static_cast<T*>(gmem) + int64_t{row} * width + first + n_tile_ * kColumns +
                            to.column
                      : nullptr;
  }
  __device__ __forceinline__ void store_pairs(void* gmem, int piece, int width, int first,
                                              uint32_t const (&pairs)[kPairs]) const {
    bf16* const to = share<bf16>(gmem, piece, width, first);
    if (to != nullptr) {
      arch::store_streaming_16(to, {pairs[0], pairs[1], pairs[2], pairs[3]});
      arch::store_streaming_16(to + kPairs, {pairs[4], pairs[5], pairs[6], pairs[7]});
    }
    __syncwarp();
  }
  __device__ __forceinline__ void store_codes(void* gmem, int piece, int width, int first,
                                              uint32_t const (&codes)[kPairs / 2]) const {
    uint8_t* const to = share<uint8_t>(gmem, piece, width, first);
    if (to != nullptr) arch::store_streaming_16(to, {codes[0], codes[1], codes[2], codes[3]});
    __syncwarp();
  }
  __device__ __forceinline__ void store_scale(float* gmem, int piece, int half, float scale) const {
    int const row =
        row_ + held_.gated_place(static_cast<int>(arch::forgotten(uint32_t(piece)))).row;
    int const block = n_tile_ + half * (p_.columns / kColumns);
    if (row < end_ && HeldTile::is_first_of_gated_row()) gmem[block * p_.scale_pitch + row] = scale;
    __syncwarp();
  }

  __device__ __forceinline__ static uint32_t codes_of(float2 v, float2 w, float r) {
    return arch::pack_e4m3(v.x * r, v.y * r, w.x * r, w.y * r);
  }

  // The scale of a row, from the largest magnitude in each lane's share as bits of fp32.
  __device__ __forceinline__ static core::BlockScale scale_of_row(uint32_t largest) {
    float const scale = block_scale(HeldTile::max_of_gated_row(largest));
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
