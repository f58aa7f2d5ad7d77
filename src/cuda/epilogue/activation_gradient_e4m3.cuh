// SPDX-License-Identifier: Apache-2.0
// activation_gradient epilogue of scaled operands: with t = accumulators, rounded to bf16, s the row's score and (g, u)
// the values of the codes of h
//   ds partial = <t, act(h)> over 128 columns,  dh = rnd(J_act(h)^T (s t)),  a' = rnd(s act(h))
// dh leaves in bf16 and as codes of what bf16 holds, with a scale for each 128 columns of dg and of du. Codes of dh may
// take the place of those of h: a lane has read its own, and those of its next piece, before it writes.
// A warpgroup that does nothing else runs it (gemm/sm90/roles_scaled.cuh). Before the k loop of a tile is over it asks
// for the tile's scores and scales, which come to shared memory, and for its codes, which come to L2.
#pragma once

#include "../arch/approx_math.cuh"
#include "../arch/bulk_copy.cuh"
#include "../arch/convert_e4m3.cuh"
#include "../arch/cp_async.cuh"
#include "../arch/load_global.cuh"
#include "../arch/load_shared.cuh"
#include "../arch/store_global.cuh"
#include "../gemm/scheduler.cuh"
#include "activation_math.cuh"
#include "block_scale.cuh"

namespace tessera::cuda::gemm {

struct ActivationGradientE4m3Params {
  uint8_t const* gmem_h;        // (rows, 2 * columns)
  float const* gmem_h_scales;   // (2 * columns / 128, scale_pitch)
  float const* gmem_scores;     // by slot
  int const* gmem_permutation;  // row -> slot
  // An output that is null is not stored.
  bf16* gmem_dh;      // (rows, 2 * columns)
  uint8_t* gmem_dh8;  // the same, with scales as h
  float* gmem_dh8_scales;
  bf16* gmem_a_scaled;   // (rows, columns)
  float* gmem_partials;  // (rows, columns / 128)
  int64_t scale_pitch;
  Activation activation;
  int columns;  // n, whole column groups
};

template <class Core, ActivationKind kKind>
class ActivationGradientE4m3Epilogue {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  static constexpr EpilogueMode kMode = EpilogueMode::kApart;
  static constexpr int kRowNumbers = 5;  // a score, and scales of g and u in either column group
  static constexpr uint32_t kTurnBytes = kRowNumbers * kGemm.tile.m * sizeof(float);
  using HeldTile = typename Core::HeldTile;
  using Params = ActivationGradientE4m3Params;

  template <class Storage>
  __device__ __forceinline__ ActivationGradientE4m3Epilogue(Storage& smem, Params const& p)
      : p_(p), held_(smem), smem_numbers_(arch::shared_address(smem.rows)) {
    static_assert(Function::kGated && kGemm.b_halves() == 1 && kGemm.column_groups() == 2);
    static_assert(kGemm.epilogue.row_numbers == kRowNumbers);
  }

  // A lane asks for one of the warp's 16 rows of either consumer.
  __device__ __forceinline__ void begin(WorkTile const& tile, uint32_t turn) const {
    int const lane = arch::lane_idx();
    int const row = lane / 16 * kSubtileM + arch::warp_in_warpgroup() * kWarpRows + lane % 16;
    int const of_all = tile.row + row;
    if (of_all < tile.end) {
      uint32_t const to = smem_numbers_ + turn * kTurnBytes + row * sizeof(float);
      uint8_t const* const gmem_codes =
          p_.gmem_h + int64_t{of_all} * (2 * p_.columns) + tile.n_tile * kGemm.tile.n;
      float const* const gmem_scales =
          p_.gmem_h_scales + tile.n_tile * kGemm.column_groups() * p_.scale_pitch + of_all;
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        arch::bulk_prefetch(gmem_codes + half * p_.columns, groups_of(tile) * kGroupColumns);
        TESSERA_UNROLL
        for (int group = 0; group < 2; ++group) {
          if (group == 1 && groups_of(tile) == 1) break;
          int64_t const block = half * (p_.columns / kGroupColumns) + group;
          arch::cp_async_4(to + place_of_scale(group, half), gmem_scales + block * p_.scale_pitch);
        }
      }
      arch::cp_async_4(to, p_.gmem_scores + p_.gmem_permutation[of_all]);
    }
    arch::cp_async_commit();
    __syncwarp();
  }

  // The warp's 16 rows of one column group, then of the other, two at a time.
  __device__ __forceinline__ void store(WorkTile const& tile, int consumer, uint32_t turn) {
    held_.of(consumer);
    place_ = held_.group_place();
    row_ = consumer * kSubtileM + arch::warp_in_warpgroup() * kWarpRows + place_.row;
    smem_own_ = smem_numbers_ + turn * kTurnBytes + row_ * sizeof(float);
    if (consumer == 0) arch::cp_async_wait<0>();  // later ones may be of the next tile
    __syncwarp();
#pragma unroll 1
    for (int group = 0; group < groups_of(tile); ++group) {
      int const block = tile.n_tile * kGemm.column_groups() + group;
      Codes codes = load(tile, block, 0);
#pragma unroll 1
      for (int piece = 0; piece < HeldTile::kGroupPieces; ++piece) {
        Codes const own = codes;
        if (piece + 1 < HeldTile::kGroupPieces) codes = load(tile, block, piece + 1);
        differentiate(tile, group, piece, own);
      }
    }
  }

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr int kRowLanes = 16;  // that share a row
  static constexpr int kPairs = 4;      // a lane's pairs of columns

  struct Codes {
    uint2 gate, up;
  };

  // Column groups that exist; of an odd number the last tile has one.
  __device__ __forceinline__ int groups_of(WorkTile const& tile) const {
    return (tile.n_tile + 1) * kGemm.tile.n <= p_.columns ? 2 : 1;
  }
  __device__ __forceinline__ static uint32_t place_of_scale(int group, int half) {
    return (1 + 2 * group + half) * kGemm.tile.m * sizeof(float);
  }

  __device__ __forceinline__ int row_of(WorkTile const& tile, int piece) const {
    return tile.row + row_ + 2 * piece;
  }
  // A lane's place in h, as gate; worked out where it is used, as registers are few.
  __device__ __forceinline__ int64_t place_in_h(int row, int block) const {
    return int64_t{static_cast<int>(arch::forgotten(uint32_t(row)))} * (2 * p_.columns) +
           block * kGroupColumns + HeldTile::group_column();
  }

  __device__ __forceinline__ Codes load(WorkTile const& tile, int block, int piece) const {
    int const row = row_of(tile, piece);
    uint8_t const* const gmem = p_.gmem_h + place_in_h(row, block);
    return {arch::load_streaming_8(gmem, row < tile.end),
            arch::load_streaming_8(gmem + p_.columns, row < tile.end)};
  }

  __device__ __forceinline__ void differentiate(WorkTile const& tile, int group, int piece,
                                                Codes const& h) const {
    uint32_t const numbers = smem_own_ + 2 * piece * sizeof(float);
    float const s = arch::load_shared_4(numbers);
    float const scale_g = arch::load_shared_4(numbers + place_of_scale(group, 0));
    float const scale_u = arch::load_shared_4(numbers + place_of_scale(group, 1));
    uint4 const held_t = place_.load(group, piece);
    uint32_t const t[kPairs] = {held_t.x, held_t.y, held_t.z, held_t.w};
    uint32_t dg[kPairs], du[kPairs], a[kPairs];
    float ds = 0;
    TESSERA_UNROLL
    for (int quad = 0; quad < 2; ++quad) {
      float4 const g = arch::unpack_e4m3(quad == 0 ? h.gate.x : h.gate.y);
      float4 const u = arch::unpack_e4m3(quad == 0 ? h.up.x : h.up.y);
      int const i = 2 * quad;
      differentiate_pair({g.x * scale_g, g.y * scale_g}, {u.x * scale_u, u.y * scale_u},
                         arch::unpack_bf16(t[i]), s, dg[i], du[i], a[i], ds);
      differentiate_pair({g.z * scale_g, g.w * scale_g}, {u.z * scale_u, u.w * scale_u},
                         arch::unpack_bf16(t[i + 1]), s, dg[i + 1], du[i + 1], a[i + 1], ds);
    }
    TESSERA_UNROLL
    for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) {
      ds += __shfl_xor_sync(arch::kAllLanes, ds, lanes);
    }
    uint32_t const largest = largest_of_row(dg, du);
    int const row = row_of(tile, piece);
    if (row < tile.end) {
      int const block = tile.n_tile * kGemm.column_groups() + group;
      int64_t const at = place_in_h(row, block);
      if (p_.gmem_a_scaled != nullptr) {
        arch::store_streaming_16(p_.gmem_a_scaled + (at - int64_t{row} * p_.columns),
                                 {a[0], a[1], a[2], a[3]});
      }
      if (p_.gmem_dh != nullptr) {
        arch::store_streaming_16(p_.gmem_dh + at, {dg[0], dg[1], dg[2], dg[3]});
        arch::store_streaming_16(p_.gmem_dh + at + p_.columns, {du[0], du[1], du[2], du[3]});
      }
      bool const is_first = HeldTile::group_column() == 0;
      if (p_.gmem_partials != nullptr && is_first) {
        p_.gmem_partials[int64_t{row} * (p_.columns / kGroupColumns) + block] = ds;
      }
      if (p_.gmem_dh8 != nullptr) {
        float const scales[2] = {block_scale(largest << 16), block_scale(largest & 0xffff0000u)};
        arch::store_streaming_8(p_.gmem_dh8 + at, codes_of(dg, scales[0]));
        arch::store_streaming_8(p_.gmem_dh8 + at + p_.columns, codes_of(du, scales[1]));
        if (is_first) {
          float* const gmem = p_.gmem_dh8_scales + block * p_.scale_pitch + row;
          gmem[0] = scales[0];
          gmem[p_.columns / kGroupColumns * p_.scale_pitch] = scales[1];
        }
      }
    }
    __syncwarp();
  }

  // Two neighbouring columns: t, (g, u) -> (dg, du), a'.
  __device__ __forceinline__ void differentiate_pair(float2 g, float2 u, float2 t, float s,
                                                     uint32_t& dg, uint32_t& du, uint32_t& a,
                                                     float& ds) const {
    auto const low = Function::backward(p_.activation, g.x, u.x, s * t.x);
    auto const high = Function::backward(p_.activation, g.y, u.y, s * t.y);
    ds = fmaf(t.x, low.a, ds);
    ds = fmaf(t.y, high.a, ds);
    dg = arch::pack_bf16(low.dg, high.dg);
    du = arch::pack_bf16(low.du, high.du);
    a = arch::pack_bf16(s * low.a, s * high.a);
  }

  // The largest magnitudes of a row's 128 dg and of its du, in the lower and in the upper half.
  __device__ __forceinline__ static uint32_t largest_of_row(uint32_t const (&dg)[kPairs],
                                                            uint32_t const (&du)[kPairs]) {
    uint32_t g = 0, u = 0;
    TESSERA_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      g = arch::max_magnitudes_bf16(g, dg[i]);
      u = arch::max_magnitudes_bf16(u, du[i]);
    }
    uint32_t largest = arch::max_magnitudes_bf16(arch::low_halves(g, u), arch::high_halves(g, u));
    TESSERA_UNROLL
    for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) {
      largest =
          arch::max_magnitudes_bf16(largest, __shfl_xor_sync(arch::kAllLanes, largest, lanes));
    }
    return largest;
  }

  __device__ __forceinline__ static uint2 codes_of(uint32_t const (&pairs)[kPairs], float scale) {
    float const r = arch::reciprocal(scale);
    float2 const v0 = arch::unpack_bf16(pairs[0]), v1 = arch::unpack_bf16(pairs[1]);
    float2 const v2 = arch::unpack_bf16(pairs[2]), v3 = arch::unpack_bf16(pairs[3]);
    return {arch::pack_e4m3(v0.x * r, v0.y * r, v1.x * r, v1.y * r),
            arch::pack_e4m3(v2.x * r, v2.y * r, v3.x * r, v3.y * r)};
  }

  Params const& p_;
  HeldTile held_;
  uint32_t smem_numbers_;
  typename HeldTile::GroupPlace place_ = {};
  int row_ = 0;            // this lane's in piece 0, of the tile
  uint32_t smem_own_ = 0;  // numbers of that row
};

}  // namespace tessera::cuda::gemm
