// SPDX-License-Identifier: Apache-2.0
// activation_gradient epilogue of scaled operands: with t = accumulators, rounded to bf16, s the row's score and (g, u)
// the values of the codes of h
//   ds partial = <t, act(h)> over 128 columns,  dh = rnd(J_act(h)^T (s t)),  a' = rnd(s act(h))
// dh leaves in bf16 and as codes of what bf16 holds, with a scale for each 128 columns of dg and of du. Codes of dh may
// take the place of those of h: a lane writes where it alone has read.
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
  static constexpr int kGroups = 2;
  static constexpr int kRowNumbers = 1 + 2 * kGroups;  // a score, and scales of g and u
  static constexpr uint32_t kTurnBytes = kRowNumbers * kGemm.tile.m * sizeof(float);
  using HeldTile = typename Core::HeldTile;
  using Params = ActivationGradientE4m3Params;

  template <class Storage>
  __device__ __forceinline__ ActivationGradientE4m3Epilogue(Storage& smem, Params const& p)
      : p_(p), held_(smem), smem_numbers_(arch::shared_address(smem.rows)) {
    static_assert(Function::kGated && kGemm.b_halves() == 1 && kGemm.column_groups() == kGroups);
    static_assert(kGemm.epilogue.row_numbers == kRowNumbers);
  }

  // A lane asks for one of the warp's 16 rows of either consumer.
  __device__ __forceinline__ void begin(WorkTile const& tile, uint32_t turn) const {
    int const row = first_row_of_warp() + own_row_to_ask_for();
    int const of_all = tile.row + row;
    if (of_all < tile.end) {
      uint32_t const to = smem_numbers_ + turn * kTurnBytes + row * sizeof(float);
      uint8_t const* const gmem_codes =
          p_.gmem_h + int64_t{of_all} * (2 * p_.columns) + tile.n_tile * kGemm.tile.n;
      float const* const gmem_scales =
          p_.gmem_h_scales + tile.n_tile * kGroups * p_.scale_pitch + of_all;
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        arch::bulk_prefetch(gmem_codes + half * p_.columns, groups_of(tile) * kGroupColumns);
        TESSERA_UNROLL
        for (int group = 0; group < kGroups; ++group) {
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

  // The warp's 16 rows of one column group, then of the other, four at a time.
  __device__ __forceinline__ void store(WorkTile const& tile, int consumer, uint32_t turn) {
    held_.of(consumer);
    auto const place = held_.place(0);
    smem_t_ = place.smem;
    row_ = consumer * kSubtileM + first_row_of_warp() + place.row;
    smem_own_ = smem_numbers_ + turn * kTurnBytes + row_ * sizeof(float);
    if (consumer == 0) arch::cp_async_wait<0>();  // later ones may be of the next tile
    __syncwarp();
    int const pieces = groups_of(tile) * HeldTile::kPieces;
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) load(codes_[slab], tile, 0, slab, true);
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) differentiate(tile, piece, piece + 1 < pieces);
  }

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr int kRowLanes = 8;  // that share a row, each with 8 columns of either slab
  static constexpr int kLaneColumns = kSlabColumns / kRowLanes;
  static constexpr int kSlabPairs = kLaneColumns / 2, kPairs = 2 * kSlabPairs;  // of a lane

  // A lane's, in one slab.
  struct Codes {
    uint2 gate, up;
  };
  struct RowNumbers {
    float score, gate_scale, up_scale;
  };

  // Column groups that exist; of an odd number the last tile of two has one.
  __device__ __forceinline__ int groups_of(WorkTile const& tile) const {
    return (tile.n_tile + 1) * kGemm.tile.n <= p_.columns ? kGroups : 1;
  }
  __device__ __forceinline__ static uint32_t place_of_scale(int group, int half) {
    return (1 + 2 * group + half) * kGemm.tile.m * sizeof(float);
  }

  // Pieces of a tile are those of its first column group, then of the second.
  __device__ __forceinline__ static int group_of(int piece) { return piece / HeldTile::kPieces; }
  __device__ __forceinline__ static int in_group(int piece) { return piece % HeldTile::kPieces; }
  __device__ __forceinline__ int row_of(WorkTile const& tile, int piece) const {
    return tile.row + row_ + in_group(piece) * HeldTile::kPieceRows;
  }
  __device__ __forceinline__ static int block_of(WorkTile const& tile, int piece) {
    return tile.n_tile * kGroups + group_of(piece);
  }
  // These are worked out where they are used, as registers are few: the warp's first row among a consumer's, and a
  // lane's first column in a slab.
  __device__ __forceinline__ static int first_row_of_warp() {
    return static_cast<int>(arch::forgotten(threadIdx.x) % arch::kWarpgroupThreads /
                            arch::kWarpThreads * kWarpRows);
  }
  __device__ __forceinline__ static int own_row_to_ask_for() {
    uint32_t const thread = arch::forgotten(threadIdx.x);
    return static_cast<int>(thread / kWarpRows % 2 * kSubtileM + thread % kWarpRows);
  }
  __device__ __forceinline__ static int column() {
    return static_cast<int>(arch::forgotten(threadIdx.x) % kRowLanes) * kLaneColumns;
  }
  // A lane's place in h, as gate, in the first slab.
  __device__ __forceinline__ int64_t place_in_h(int row, int block) const {
    return int64_t{row} * (2 * p_.columns) + block * kGroupColumns + column();
  }

  __device__ __forceinline__ void load(Codes& codes, WorkTile const& tile, int piece, int slab,
                                       bool wanted) const {
    int const row = row_of(tile, piece);
    uint8_t const* const gmem =
        p_.gmem_h + place_in_h(row, block_of(tile, piece)) + slab * kSlabColumns;
    wanted = wanted && row < tile.end;
    codes.gate = arch::load_streaming_8(gmem, wanted);
    codes.up = arch::load_streaming_8(gmem + p_.columns, wanted);
  }

  // Stores have predicates: between branches the compiler would have little to overlap.
  __device__ __forceinline__ void differentiate(WorkTile const& tile, int piece, bool has_next) {
    int const row = row_of(tile, piece), group = group_of(piece);
    bool const exists = row < tile.end;
    int const block = block_of(tile, piece);
    int64_t const at = place_in_h(row, block);
    RowNumbers const numbers = numbers_of(group, in_group(piece));
    uint32_t const smem_t = (smem_t_ ^ (in_group(piece) % 2 * HeldTile::kPieceRows << 4)) +
                            in_group(piece) * HeldTile::kPieceBytes +
                            group * (2 * HeldTile::kSlabBytes);
    uint32_t dg[kPairs], du[kPairs];
    float ds = 0;
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) {
      uint4 const held_t = arch::load_shared_16(smem_t + slab * HeldTile::kSlabBytes);
      uint32_t const t[kSlabPairs] = {held_t.x, held_t.y, held_t.z, held_t.w};
      uint32_t a[kSlabPairs];
      TESSERA_UNROLL
      for (int quad = 0; quad < 2; ++quad) {
        float4 const g = arch::unpack_e4m3(quad == 0 ? codes_[slab].gate.x : codes_[slab].gate.y);
        float4 const u = arch::unpack_e4m3(quad == 0 ? codes_[slab].up.x : codes_[slab].up.y);
        int const i = 2 * quad, j = slab * kSlabPairs + i;
        differentiate_pair({g.x, g.y}, {u.x, u.y}, arch::unpack_bf16(t[i]), numbers, dg[j], du[j],
                           a[i], ds);
        differentiate_pair({g.z, g.w}, {u.z, u.w}, arch::unpack_bf16(t[i + 1]), numbers, dg[j + 1],
                           du[j + 1], a[i + 1], ds);
      }
      arch::store_streaming_16(
          p_.gmem_a_scaled + (at - int64_t{row} * p_.columns) + slab * kSlabColumns,
          {a[0], a[1], a[2], a[3]}, exists && p_.gmem_a_scaled != nullptr);
      load(codes_[slab], tile, piece + 1, slab, has_next);
    }
    uint32_t const largest = largest_of_row(dg, du);
    TESSERA_UNROLL
    for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) {
      ds += __shfl_xor_sync(arch::kAllLanes, ds, lanes);
    }
    bool const is_first = exists && column() == 0;
    arch::store_4(p_.gmem_partials + int64_t{row} * (p_.columns / kGroupColumns) + block, ds,
                  is_first && p_.gmem_partials != nullptr);
    float const scales[2] = {block_scale(largest << 16), block_scale(largest & 0xffff0000u)};
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int64_t const to = at + half * p_.columns;
      uint32_t const(&pairs)[kPairs] = half == 0 ? dg : du;
      float const r = arch::reciprocal(scales[half]);
      TESSERA_UNROLL
      for (int slab = 0; slab < 2; ++slab) {
        uint32_t const* const d = pairs + slab * kSlabPairs;
        arch::store_streaming_16(p_.gmem_dh + to + slab * kSlabColumns, {d[0], d[1], d[2], d[3]},
                                 exists && p_.gmem_dh != nullptr);
        arch::store_streaming_8(p_.gmem_dh8 + to + slab * kSlabColumns,
                                {codes_of(d[0], d[1], r), codes_of(d[2], d[3], r)},
                                exists && p_.gmem_dh8 != nullptr);
      }
      int64_t const of_half = half * (p_.columns / kGroupColumns) + block;
      arch::store_4(p_.gmem_dh8_scales + of_half * p_.scale_pitch + row, scales[half],
                    is_first && p_.gmem_dh8 != nullptr);
    }
  }

  __device__ __forceinline__ RowNumbers numbers_of(int group, int piece) const {
    uint32_t const numbers = smem_own_ + piece * (HeldTile::kPieceRows * sizeof(float));
    return {.score = arch::load_shared_4(numbers),
            .gate_scale = arch::load_shared_4(numbers + place_of_scale(group, 0)),
            .up_scale = arch::load_shared_4(numbers + place_of_scale(group, 1))};
  }

  // Two neighbouring columns: t and values of codes -> (dg, du), a'.
  __device__ __forceinline__ void differentiate_pair(float2 g, float2 u, float2 t,
                                                     RowNumbers const& n, uint32_t& dg,
                                                     uint32_t& du, uint32_t& a, float& ds) const {
    float const s = n.score;
    auto const low =
        Function::backward(p_.activation, g.x * n.gate_scale, u.x * n.up_scale, s * t.x);
    auto const high =
        Function::backward(p_.activation, g.y * n.gate_scale, u.y * n.up_scale, s * t.y);
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

  __device__ __forceinline__ static uint32_t codes_of(uint32_t first, uint32_t second, float r) {
    float2 const v0 = arch::unpack_bf16(first), v1 = arch::unpack_bf16(second);
    return arch::pack_e4m3(v0.x * r, v0.y * r, v1.x * r, v1.y * r);
  }

  Params const& p_;
  HeldTile held_;
  uint32_t smem_numbers_;
  int row_ = 0;            // this lane's in piece 0, of the tile
  uint32_t smem_t_ = 0;    // this lane's t in piece 0, first slab
  uint32_t smem_own_ = 0;  // numbers of that row
  Codes codes_[2] = {};    // of the piece to come
};

}  // namespace tessera::cuda::gemm
