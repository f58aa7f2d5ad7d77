// SPDX-License-Identifier: Apache-2.0
// activation epilogue of threads that have a row each, for MXFP8: hb = accumulators, rounded to bf16; a = act(hb). Both
// leave as codes with a scale for every 32 columns: hb as gate and up, a before it is rounded. A block of the scales is
// what a thread loads at a time. A column group is [64 gate | 64 up]. `Core` is what an architecture gives such threads
// (gemm/sm100/core.cuh).
#pragma once

#include "../arch/store_global.cuh"
#include "../arch/warp.cuh"
#include "../gemm/storage.cuh"
#include "../gemm/work_tile.hpp"
#include "activation_math.cuh"
#include "mx_block.cuh"

namespace tessera::cuda::gemm {

struct ActivationRowsMxfp8Params {
  uint8_t* gmem_h;         // (rows, 2 * columns); null: not stored
  uint8_t* gmem_h_scales;  // (rows, 2 * columns / 32), with gmem_h
  uint8_t* gmem_a;         // (rows, columns); null: not stored
  uint8_t* gmem_a_scales;  // (rows, columns / 32), with gmem_a
  Activation activation;
  int columns;  // n, a multiple of 128
};

template <class Core, ActivationKind kKind>
class ActivationRowsMxfp8 {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = ActivationRowsMxfp8Params;
  static_assert(Activation{.kind = kKind}.gated() && Core::kHalves == 2 &&
                Core::kTileN == kGroupColumns);

  __device__ __forceinline__ ActivationRowsMxfp8(typename Core::Storage&, Params const& p)
      : p_(p) {}

  __device__ __forceinline__ void begin(WorkTile const&, int) {}

  // The warp's 32 rows, of which `row` is the first; releases the accumulators with the last block.
  __device__ __forceinline__ void store(typename Core::Rows& rows, WorkTile const& tile, int row) {
    int const own = row + arch::lane_idx();
    bool const exists = own < tile.end;
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t gate[kBlock], up[kBlock];
      rows.load(gate, block * kBlock);
      rows.load(up, kSlabColumns + block * kBlock);
      rows.loaded();
      if (block == kBlocks - 1) rows.release();
      uint32_t g[kBlock / 2], u[kBlock / 2];
      TESSERA_UNROLL
      for (int i = 0; i < kBlock / 2; ++i) {
        g[i] = arch::pack_bf16(__uint_as_float(gate[2 * i]), __uint_as_float(gate[2 * i + 1]));
        u[i] = arch::pack_bf16(__uint_as_float(up[2 * i]), __uint_as_float(up[2 * i + 1]));
      }
      int const column = tile.n_tile * kSlabColumns + block * kBlock;
      if (exists && p_.gmem_h != nullptr) {
        put(p_.gmem_h, p_.gmem_h_scales, own, 2 * p_.columns, column, mx_codes(g));
        put(p_.gmem_h, p_.gmem_h_scales, own, 2 * p_.columns, p_.columns + column, mx_codes(u));
      }
      if (exists && p_.gmem_a != nullptr) {
        put(p_.gmem_a, p_.gmem_a_scales, own, p_.columns, column, activated(g, u));
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void drain() const {}

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr int kBlock = MxCodes::kColumns, kBlocks = kSlabColumns / kBlock;

  __device__ __forceinline__ MxCodes activated(uint32_t const (&gates)[kBlock / 2],
                                               uint32_t const (&ups)[kBlock / 2]) const {
    float a[kBlock];
    TESSERA_UNROLL
    for (int i = 0; i < kBlock / 2; ++i) {
      float2 const g = arch::unpack_bf16(gates[i]), u = arch::unpack_bf16(ups[i]);
      a[2 * i] = Function::forward(p_.activation, g.x, u.x);
      a[2 * i + 1] = Function::forward(p_.activation, g.y, u.y);
    }
    return mx_codes(a);
  }
  // A block of a matrix (rows, width): a sector of codes, and a byte.
  __device__ __forceinline__ static void put(uint8_t* gmem, uint8_t* gmem_scales, int row,
                                             int width, int column, MxCodes const& codes) {
    uint8_t* const to = gmem + int64_t{row} * width + column;
    arch::store_streaming_16(to, codes.low);
    arch::store_streaming_16(to + kBlock / 2, codes.high);
    gmem_scales[int64_t{row} * (width / kBlock) + column / kBlock] = codes.scale;
  }

  Params const& p_;
};

}  // namespace tessera::cuda::gemm
