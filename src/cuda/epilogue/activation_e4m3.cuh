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

// A lane's 16 columns of a row's block: two times 8 bf16.
struct BlockShare {
  uint4 part[2];
  __device__ __forceinline__ uint32_t pair(int i) const {
    uint4 const& p = part[i / 4];
    return i % 4 == 0 ? p.x : i % 4 == 1 ? p.y : i % 4 == 2 ? p.z : p.w;
  }
};

template <class Core, ActivationKind kKind, Element kOut>
class ActivationE4m3Epilogue {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using HeldTile = typename Core::HeldTile;
  using Params = ActivationE4m3Params;
  static constexpr int kPieces = HeldTile::kPieces;

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

  __device__ __forceinline__ void work(int piece) {
    BlockShare const gate{{held_.load(piece, 0), held_.load(piece, 2)}};
    BlockShare const up{{held_.load(piece, 1), held_.load(piece, 3)}};
    int const row = row_ + HeldTile::row(piece);
    int const column = n_tile_ * kColumns + HeldTile::column();
    if constexpr (kOut == Element::kE4m3) {
      store_codes(row, column, gate, up);
    } else {
      store_bf16(row, column, gate, up);
    }
  }

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr int kColumns = kGemm.tile.n / 2;  // of a, per tile
  static constexpr int kShare = 16;                  // columns of a lane

  __device__ __forceinline__ void store_bf16(int row, int column, BlockShare const& gate,
                                             BlockShare const& up) const {
    if (row >= end_) return;
    bf16* const gmem_h = static_cast<bf16*>(p_.gmem_h);
    bf16* const gmem_a = static_cast<bf16*>(p_.gmem_a);
    TESSERA_UNROLL
    for (int part = 0; part < 2; ++part) {
      int const c = column + part * kSlabColumns;
      if (gmem_h != nullptr) {
        bf16* const h = gmem_h + int64_t{row} * (2 * p_.columns) + c;
        arch::store_streaming_16(h, gate.part[part]);
        arch::store_streaming_16(h + p_.columns, up.part[part]);
      }
      if (gmem_a != nullptr) {
        uint32_t a[4];
        TESSERA_UNROLL
        for (int i = 0; i < 4; ++i) {
          float2 const value = activate(gate.pair(4 * part + i), up.pair(4 * part + i));
          a[i] = arch::pack_bf16(value.x, value.y);
        }
        arch::store_streaming_16(gmem_a + int64_t{row} * p_.columns + c, {a[0], a[1], a[2], a[3]});
      }
    }
  }

  // By all lanes: those of rows that do not exist help to find no scale but their own.
  __device__ __forceinline__ void store_codes(int row, int column, BlockShare const& gate,
                                              BlockShare const& up) const {
    float a[kShare];
    float largest = 0;
    TESSERA_UNROLL
    for (int i = 0; i < kShare / 2; ++i) {
      float2 const value = activate(gate.pair(i), up.pair(i));
      a[2 * i] = value.x;
      a[2 * i + 1] = value.y;
      largest = arch::max_magnitude(arch::max_magnitude(largest, value.x), value.y);
    }
    core::BlockScale const a_scale = scale_of_row(__float_as_uint(largest));
    core::BlockScale const gate_scale = scale_of_row(largest_of(gate));
    core::BlockScale const up_scale = scale_of_row(largest_of(up));
    int const lane = arch::lane_idx() % kRowLanes;
    if (row < end_) {
      if (p_.gmem_h != nullptr) {
        auto* const gmem_h =
            static_cast<uint8_t*>(p_.gmem_h) + int64_t{row} * (2 * p_.columns) + column;
        store_share(gmem_h, gate, gate_scale.inverse);
        store_share(gmem_h + p_.columns, up, up_scale.inverse);
        if (lane < 2) {  // gate, up
          int const block = n_tile_ + lane * (p_.columns / kColumns);
          p_.gmem_h_scales[block * p_.scale_pitch + row] =
              lane == 0 ? gate_scale.scale : up_scale.scale;
        }
      }
      if (p_.gmem_a != nullptr) {
        auto* const gmem_a = static_cast<uint8_t*>(p_.gmem_a) + int64_t{row} * p_.columns + column;
        TESSERA_UNROLL
        for (int part = 0; part < 2; ++part) {
          float const* const v = a + part * (kShare / 2);
          float const r = a_scale.inverse;
          arch::store_streaming_8(gmem_a + part * kSlabColumns,
                                  {arch::pack_e4m3(v[0] * r, v[1] * r, v[2] * r, v[3] * r),
                                   arch::pack_e4m3(v[4] * r, v[5] * r, v[6] * r, v[7] * r)});
        }
        if (lane == 2) p_.gmem_a_scales[n_tile_ * p_.scale_pitch + row] = a_scale.scale;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ static void store_share(uint8_t* gmem, BlockShare const& share,
                                                     float r) {
    TESSERA_UNROLL
    for (int part = 0; part < 2; ++part) {
      uint32_t codes[2];
      TESSERA_UNROLL
      for (int i = 0; i < 2; ++i) {
        float2 const first = arch::unpack_bf16(share.pair(4 * part + 2 * i));
        float2 const second = arch::unpack_bf16(share.pair(4 * part + 2 * i + 1));
        codes[i] = arch::pack_e4m3(first.x * r, first.y * r, second.x * r, second.y * r);
      }
      arch::store_streaming_8(gmem + part * kSlabColumns, {codes[0], codes[1]});
    }
  }

  // As bits of fp32.
  __device__ __forceinline__ static uint32_t largest_of(BlockShare const& share) {
    uint32_t largest = 0;
    TESSERA_UNROLL
    for (int i = 0; i < kShare / 2; ++i) {
      largest = arch::max_magnitudes_bf16(largest, share.pair(i));
    }
    return max(largest << 16, largest & 0xffff0000u);
  }

  static constexpr int kRowLanes = 8;
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
