// SPDX-License-Identifier: Apache-2.0
// activation epilogue of scaled operands: hb = accumulators, rounded to bf16; a = act(hb). Gated: a tile is 128 columns
// of gate and the same of up, a block of the scales of either, so a row's scale is that of eight lanes. Either
//   e4m3  codes and scales of hb, as gate and up, and of a before it is rounded
//   bf16  hb and a, rounded
// A warpgroup that does nothing else runs it (gemm/sm90/roles_scaled.cuh).
#pragma once

#include <type_traits>

#include "../arch/approx_math.cuh"
#include "../arch/convert_e4m3.cuh"
#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "activation_math.cuh"
#include "block_scale.cuh"
#include "core/fp8.hpp"

namespace tessera::cuda::gemm {

struct ActivationE4m3Params {
  // An output that is null is not stored.
  void* gmem_h;          // (rows, 2 * columns)
  void* gmem_a;          // (rows, columns)
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

  // The warp's 16 rows, four at a time.
  __device__ __forceinline__ void store(WorkTile const& tile, int consumer, uint32_t) {
    held_.of(consumer);
    auto const place = held_.gated_place();
    int const first_row = tile.row + consumer * kSubtileM + arch::warp_in_warpgroup() * kWarpRows;
    int64_t const row = first_row + place.row, column = tile.n_tile * kColumns + place.column;
    smem_ = place.smem;
    rows_left_ = tile.end - first_row - place.row;
    gmem_h_ = static_cast<Out*>(p_.gmem_h) + row * (2 * p_.columns) + column;
    gmem_a_ = static_cast<Out*>(p_.gmem_a) + row * p_.columns + column;
#pragma unroll 1
    for (int piece = 0; piece < HeldTile::kPieces; ++piece) {
      store_piece(piece);
      smem_ = HeldTile::next_piece(smem_);
      rows_left_ -= HeldTile::kPieceRows;
      gmem_h_ += HeldTile::kPieceRows * (2 * p_.columns);
      gmem_a_ += HeldTile::kPieceRows * p_.columns;
    }
    if constexpr (kOut == Element::kE4m3) {
      store_scales(tile, first_row + HeldTile::gated_quarter() * HeldTile::kPieceRows + place.row);
    }
  }

 private:
  using Function = ActivationFunction<kKind>;
  using Out = std::conditional_t<kOut == Element::kBf16, bf16, uint8_t>;
  static constexpr int kColumns = kGemm.tile.n / 2;  // of a, per tile
  static constexpr int kPairs = 8;                   // a lane's, of gate and of up
  static_assert(HeldTile::kPieces == 4);             // a lane keeps the scales of one piece

  // All lanes call it.
  __device__ __forceinline__ void store_piece(int piece) {
    uint32_t gates[kPairs], ups[kPairs];
    load(gates, 0);
    load(ups, 1);
    if (p_.gmem_h != nullptr) {
      if constexpr (kOut == Element::kBf16) {
        store_pairs(gmem_h_, gates);
        store_pairs(gmem_h_ + p_.columns, ups);
      } else {
        store_codes_of_h(piece, gates, ups);
      }
    }
    if (p_.gmem_a != nullptr) store_a(piece, gates, ups);
  }
  __device__ __forceinline__ void load(uint32_t (&pairs)[kPairs], int half) const {
    TESSERA_UNROLL
    for (int chunk = 0; chunk < 2; ++chunk) {
      uint4 const four = HeldTile::load_gated(smem_, half, chunk);
      pairs[4 * chunk] = four.x;
      pairs[4 * chunk + 1] = four.y;
      pairs[4 * chunk + 2] = four.z;
      pairs[4 * chunk + 3] = four.w;
    }
  }

  // The largest magnitudes of gate and up are bf16, so the lanes of a row find them together; those of the first column
  // group work out the scale of gate, the others that of up.
  __device__ __forceinline__ void store_codes_of_h(int piece, uint32_t const (&gates)[kPairs],
                                                   uint32_t const (&ups)[kPairs]) {
    uint32_t const gate = largest_of(gates), up = largest_of(ups);
    auto const larger = [](uint32_t first, uint32_t second) {
      return arch::larger_magnitudes_bf16(first, second);
    };
    uint32_t const largest = HeldTile::fold_gated_row(
        larger(arch::low_halves(gate, up), arch::high_halves(gate, up)), larger);
    bool const has_up = HeldTile::gated_group() != 0;
    float const scale = block_scale((has_up ? largest : largest << 16) & 0x7fff0000u);
    keep(h_scale_, piece, scale);
    float const own = arch::reciprocal(scale);
    float const other = __shfl_xor_sync(arch::kAllLanes, own, 8);
    store_codes(gmem_h_, gates, has_up ? other : own);
    store_codes(gmem_h_ + p_.columns, ups, has_up ? own : other);
  }
  __device__ __forceinline__ static uint32_t largest_of(uint32_t const (&pairs)[kPairs]) {
    uint32_t largest = pairs[0];
    TESSERA_UNROLL
    for (int i = 1; i < kPairs; ++i) largest = arch::larger_magnitudes_bf16(largest, pairs[i]);
    return largest;
  }
  __device__ __forceinline__ void store_codes(Out* to, uint32_t const (&pairs)[kPairs],
                                              float r) const {
    uint32_t codes[kPairs / 2];
    TESSERA_UNROLL
    for (int i = 0; i < kPairs / 2; ++i) {
      codes[i] = codes_of(arch::unpack_bf16(pairs[2 * i]), arch::unpack_bf16(pairs[2 * i + 1]), r);
    }
    store_16(to, codes[0], codes[1], codes[2], codes[3]);
  }

  __device__ __forceinline__ void store_a(int piece, uint32_t const (&gates)[kPairs],
                                          uint32_t const (&ups)[kPairs]) {
    if constexpr (kOut == Element::kBf16) {
      uint32_t pairs[kPairs];
      TESSERA_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        float2 const a = activate(gates[i], ups[i]);
        pairs[i] = arch::pack_bf16(a.x, a.y);
      }
      store_pairs(gmem_a_, pairs);
    } else {
      float2 a[kPairs];
      float largest = 0;
      TESSERA_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        a[i] = activate(gates[i], ups[i]);
        largest = arch::max_magnitude(arch::max_magnitude(largest, a[i].x), a[i].y);
      }
      float const scale = block_scale(HeldTile::fold_gated_row(
          __float_as_uint(largest),
          [](uint32_t first, uint32_t second) { return max(first, second); }));
      keep(a_scale_, piece, scale);
      float const r = arch::reciprocal(scale);
      uint32_t codes[kPairs / 2];
      TESSERA_UNROLL
      for (int i = 0; i < kPairs / 2; ++i) codes[i] = codes_of(a[2 * i], a[2 * i + 1], r);
      store_16(gmem_a_, codes[0], codes[1], codes[2], codes[3]);
    }
  }

  __device__ __forceinline__ void store_pairs(Out* to, uint32_t const (&pairs)[kPairs]) const {
    store_16(to, pairs[0], pairs[1], pairs[2], pairs[3]);
    store_16(to + kPairs, pairs[4], pairs[5], pairs[6], pairs[7]);
  }
  __device__ __forceinline__ void store_16(Out* to, uint32_t x, uint32_t y, uint32_t z,
                                           uint32_t w) const {
    arch::store_streaming_16(to, {x, y, z, w}, rows_left_ > 0);
    __syncwarp();
  }

  // All eight lanes that have a row know its scale; one keeps it until all pieces are stored.
  __device__ __forceinline__ static void keep(float& kept, int piece, float scale) {
    kept = HeldTile::gated_quarter() == piece ? scale : kept;
  }
  // Scales of the row of the piece that the lane has kept.
  __device__ __forceinline__ void store_scales(WorkTile const& tile, int row) const {
    int const group = HeldTile::gated_group();
    bool const exists = row < tile.end;
    int64_t const block = tile.n_tile + group * (p_.columns / kColumns);
    arch::store_4(p_.gmem_h_scales + block * p_.scale_pitch + row, h_scale_,
                  exists && p_.gmem_h != nullptr);
    arch::store_4(p_.gmem_a_scales + tile.n_tile * p_.scale_pitch + row, a_scale_,
                  exists && group == 0 && p_.gmem_a != nullptr);
    __syncwarp();
  }

  __device__ __forceinline__ static uint32_t codes_of(float2 v, float2 w, float r) {
    return arch::pack_e4m3(v.x * r, v.y * r, w.x * r, w.y * r);
  }

  __device__ __forceinline__ float2 activate(uint32_t gates, uint32_t ups) const {
    float2 const g = arch::unpack_bf16(gates), u = arch::unpack_bf16(ups);
    return {Function::forward(p_.activation, g.x, u.x), Function::forward(p_.activation, g.y, u.y)};
  }

  Params const& p_;
  HeldTile held_;
  // These are of the piece at hand: a lane's place in the slabs, in h, as gate, and in a; the rows of the expert from
  // its row on.
  uint32_t smem_ = 0;
  Out* gmem_h_ = nullptr;
  Out* gmem_a_ = nullptr;
  int rows_left_ = 0;
  float h_scale_ = 0, a_scale_ = 0;  // kept
};

}  // namespace tessera::cuda::gemm
