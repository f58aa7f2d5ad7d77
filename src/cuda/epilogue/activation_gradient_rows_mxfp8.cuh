// SPDX-License-Identifier: Apache-2.0
// activation_gradient epilogue of threads that have a row each, for MXFP8: with t = accumulators (dO w_down), s the
// row's score and (g, u) the values of the codes of h
//   ds partial = <t, act(h)> over 128 columns,  dh = rnd(J_act(h)^T (s t)),  a' = rnd(s act(h))
// dh leaves in bf16, for the weight gradient, and as codes of what bf16 holds, with a scale for every 32 columns of dg
// and of du. `Core` is what an architecture gives such threads (sm100/core.cuh).
// A warp works alone, on its 32 rows x 128 columns. The codes of gate and up come by TMA under the k loop, into a slab
// each; those of dg and du take their place, and may do so in memory: a warp reads no other codes, and writes none. The
// other slabs hold 64 columns of dg, du and a'.
#pragma once

#include <cuda.h>

#include "../arch/load_global.cuh"
#include "../arch/tma.cuh"
#include "../arch/warp.cuh"
#include "../gemm/storage.cuh"
#include "../gemm/work_tile.hpp"
#include "activation_math.cuh"
#include "mx_block.cuh"

namespace tessera::cuda::gemm {

struct ActivationGradientRowsMxfp8Params {
  CUtensorMap h;    // codes (column, half, row), 128 x 1 x 32
  CUtensorMap dh8;  // ragged codes (column, half, row, end), 128 x 1 x 32 x 1; only if stores_dh8
  CUtensorMap dh;   // ragged bf16, 64 x 1 x 32 x 1; only if stores_dh
  CUtensorMap a_scaled;          // the same with one half; only if stores_a
  uint8_t const* gmem_h_scales;  // (rows, 2 * columns / 32)
  uint8_t* gmem_dh8_scales;      // the same; may be gmem_h_scales
  float* gmem_partials;          // (rows, columns / 128); null: not stored
  float const* gmem_scores;      // by slot
  int const* gmem_permutation;   // row -> slot
  Activation activation;
  int columns;        // n, a multiple of 128
  int ragged_extent;  // of the row dimension of dh8, dh and a_scaled
  bool stores_dh8, stores_dh, stores_a;
};

template <class Core, ActivationKind kKind>
class ActivationGradientRowsMxfp8 {
 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = ActivationGradientRowsMxfp8Params;

  __device__ __forceinline__ ActivationGradientRowsMxfp8(typename Core::Storage& smem,
                                                         Params const& p)
      : p_(p), slabs_(smem) {
    static_assert(Function::kGated && Core::kHalves == 1 && Core::kTileN == kGroupColumns);
    static_assert(Slabs::kBufferSlabs == 2 && Slabs::kSlabs == kSlabOfA + 1);
  }

  // Asks for h, its scales, and the scores of the warp's 32 rows, of which `row` is the first.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row) {
    row_ = row;
    slabs_.template wait_read<0>();
    if (arch::elect_one()) {
      slabs_.load(0, [&](bf16* slab, int half, auto* full) {
        arch::tma_load(slab, &p_.h, full, tile.n_tile * kGroupColumns, half, row);
      });
    }
    __syncwarp();
    int const own = row + arch::lane_idx();
    bool const exists = own < tile.end;
    score_ = exists ? p_.gmem_scores[p_.gmem_permutation[own]] : 0.0f;
    uint8_t const* const gmem = p_.gmem_h_scales + place_of_scales(own, tile.n_tile);
    gate_scales_ = arch::load_4(gmem, exists);
    up_scales_ = arch::load_4(gmem + p_.columns / kBlock, exists);
  }

  // Block by block of 32 columns; releases the accumulators with the last one.
  __device__ __forceinline__ void store(typename Core::Rows& rows, WorkTile const& tile, int) {
    float ds = 0.0f;
    uint32_t dg_scales = 0, du_scales = 0;
    slabs_.wait(0);
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t t[kBlock], dg[kBlock / 2], du[kBlock / 2], a[kBlock / 2];
      rows.load(t, block * kBlock);
      rows.loaded();
      if (block == kBlocks - 1) rows.release();
      differentiate(block, t, dg, du, a, ds);
      dg_scales |= put_codes(0, block, dg) << 8 * block;
      du_scales |= put_codes(1, block, du) << 8 * block;
      int const part = block % kSlabBlocks;
      if (part == 0) slabs_.template wait_read<0>();  // what the slabs held has been stored
      put_pairs(kSlabOfDg, part, dg);
      put_pairs(kSlabOfDg + 1, part, du);
      put_pairs(kSlabOfA, part, a);
      if (part == kSlabBlocks - 1) {
        slabs_.publish([&] { store_slabs(tile, block); });
      }
    }
    int const own = row_ + arch::lane_idx();
    if (own < tile.end) {
      if (p_.stores_dh8) {
        uint8_t* const gmem = p_.gmem_dh8_scales + place_of_scales(own, tile.n_tile);
        *reinterpret_cast<uint32_t*>(gmem) = dg_scales;
        *reinterpret_cast<uint32_t*>(gmem + p_.columns / kBlock) = du_scales;
      }
      if (p_.gmem_partials != nullptr) {
        p_.gmem_partials[int64_t{own} * (p_.columns / kGroupColumns) + tile.n_tile] = ds;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  using Function = ActivationFunction<kKind>;
  using Slabs = typename Core::LoadedSlabs;
  static constexpr int kBlock = MxCodes::kColumns, kBlocks = kGroupColumns / kBlock;
  static constexpr int kSlabBlocks = kSlabColumns / kBlock;
  static constexpr int kSlabOfDg = 2, kSlabOfA = 4;  // behind the two of codes, du between

  // Returns the place of the four scales of gate; those of up come columns / 32 later.
  __device__ __forceinline__ int64_t place_of_scales(int row, int n_tile) const {
    return int64_t{row} * (2 * p_.columns / kBlock) + n_tile * (kGroupColumns / kBlock);
  }

  // dg, du and a' of a block, as pairs of bf16.
  __device__ __forceinline__ void differentiate(int block, uint32_t const (&t)[kBlock],
                                                uint32_t (&dg)[kBlock / 2],
                                                uint32_t (&du)[kBlock / 2],
                                                uint32_t (&a)[kBlock / 2], float& ds) const {
    float const scale_g = mx_scale(gate_scales_ >> 8 * block & 0xff);
    float const scale_u = mx_scale(up_scales_ >> 8 * block & 0xff);
    TESSERA_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint4 const g = slabs_.get(slabs_.slab(0), kChunks * block + chunk);
      uint4 const u = slabs_.get(slabs_.slab(1), kChunks * block + chunk);
      uint32_t const gates[] = {g.x, g.y, g.z, g.w}, ups[] = {u.x, u.y, u.z, u.w};
      TESSERA_UNROLL
      for (int four = 0; four < 4; ++four) {
        float4 const g4 = arch::unpack_e4m3(gates[four]), u4 = arch::unpack_e4m3(ups[four]);
        float const gate[] = {g4.x * scale_g, g4.y * scale_g, g4.z * scale_g, g4.w * scale_g};
        float const up[] = {u4.x * scale_u, u4.y * scale_u, u4.z * scale_u, u4.w * scale_u};
        TESSERA_UNROLL
        for (int i = 0; i < 4; i += 2) {
          int const c = 16 * chunk + 4 * four + i;
          float const left = __uint_as_float(t[c]), right = __uint_as_float(t[c + 1]);
          auto const low = Function::backward(p_.activation, gate[i], up[i], score_ * left);
          auto const high =
              Function::backward(p_.activation, gate[i + 1], up[i + 1], score_ * right);
          ds = fmaf(left, low.a, ds);
          ds = fmaf(right, high.a, ds);
          dg[c / 2] = arch::pack_bf16(low.dg, high.dg);
          du[c / 2] = arch::pack_bf16(low.du, high.du);
          a[c / 2] = arch::pack_bf16(score_ * low.a, score_ * high.a);
        }
      }
    }
  }

  // Over the codes of h in the slab; returns the scale.
  __device__ __forceinline__ uint32_t put_codes(int slab, int block,
                                                uint32_t const (&pairs)[kBlock / 2]) const {
    MxCodes const codes = mx_codes(pairs);
    slabs_.put(slabs_.slab(slab), kChunks * block, codes.low);
    slabs_.put(slabs_.slab(slab), kChunks * block + 1, codes.high);
    return codes.scale;
  }
  // The `part`-th half of a slab of bf16.
  __device__ __forceinline__ void put_pairs(int slab, int part,
                                            uint32_t const (&pairs)[kBlock / 2]) const {
    TESSERA_UNROLL
    for (int i = 0; i < kBlock / 2; i += 4) {
      slabs_.put(slabs_.slab(slab), kBlock / 8 * part + i / 4,
                 {pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]});
    }
  }

  // One lane calls it: the 64 columns that end with `block`, and behind the last block all codes.
  __device__ __forceinline__ void store_slabs(WorkTile const& tile, int block) const {
    int const first = tile.n_tile * kGroupColumns;
    int const column = first + block / kSlabBlocks * kSlabColumns;
    int const ragged_row = p_.ragged_extent + row_ - tile.end;
    uint64_t const policy = arch::l2_evict_first();
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (p_.stores_dh) {
        arch::tma_store(&p_.dh, slabs_.slab(kSlabOfDg + half), column, half, ragged_row, tile.end,
                        policy);
      }
      if (p_.stores_dh8 && block == kBlocks - 1) {
        arch::tma_store(&p_.dh8, slabs_.slab(half), first, half, ragged_row, tile.end, policy);
      }
    }
    if (p_.stores_a) {
      arch::tma_store(&p_.a_scaled, slabs_.slab(kSlabOfA), column, 0, ragged_row, tile.end, policy);
    }
  }

  static constexpr int kChunks = kBlock / 16;  // of 16 codes

  Params const& p_;
  Slabs slabs_;
  int row_;      // first of the warp's 32
  float score_;  // of this thread's row, as are its scales of four blocks
  uint32_t gate_scales_, up_scales_;
};

}  // namespace tessera::cuda::gemm
