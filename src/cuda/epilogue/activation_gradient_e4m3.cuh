// SPDX-License-Identifier: Apache-2.0
// activation_gradient epilogue of scaled operands: with t = accumulators, rounded to bf16, s the row's score and (g, u)
// the values of the codes of h
//   ds partial = <t, act(h)> over 128 columns,  dh = rnd(J_act(h)^T (s t)),  a' = rnd(s act(h))
// dh leaves in bf16 and as codes of what bf16 holds, with a scale for each 128 columns of dg and of du. Codes of dh may
// take the place of those of h: a warp writes where it alone reads, behind what it has read.
// A warpgroup that does nothing else runs it (gemm/sm90/roles_scaled.cuh), and the consumers wait for it when it waits
// for memory. So all that it reads comes to shared memory by cp.async: a tile's scores and scales while the tile before
// is stored, codes two pieces ahead of their turn. It has no registers to load them into earlier.
#pragma once

#include "../arch/approx_math.cuh"
#include "../arch/convert_e4m3.cuh"
#include "../arch/cp_async.cuh"
#include "../arch/load_shared.cuh"
#include "../arch/store_global.cuh"
#include "../arch/store_shared.cuh"
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
  // Rows of an expert that have to be left for an output of a row to be stored, less one: 0, or more than there are.
  int none_of_dh, none_of_dh8, none_of_a_scaled;
};

template <class Core, ActivationKind kKind>
class ActivationGradientE4m3Epilogue {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  static constexpr EpilogueMode kMode = EpilogueMode::kApart;
  static constexpr int kGroups = 2;
  static constexpr int kOwnNumbers = 2 + 2 * kGroups;  // a score, scales of g and u, and ds
  static constexpr int kAhead = 2;  // pieces whose codes are asked for ahead of their turn
  static constexpr int kRowNumbers = kOwnNumbers + 8;  // and the place of their codes
  using HeldTile = typename Core::HeldTile;
  using Params = ActivationGradientE4m3Params;

  template <class Storage>
  __device__ __forceinline__ ActivationGradientE4m3Epilogue(Storage& smem, Params const& p)
      : p_(p), held_(smem), smem_numbers_(arch::shared_address(smem.rows)) {
    static_assert(Function::kGated && kGemm.b_halves() == 1 && kGemm.column_groups() == kGroups);
    static_assert(kGemm.epilogue.row_numbers == kRowNumbers);
    static_assert(kOwnNumbers * kNumberBytes + 4 * kCodeBytes == kTurnBytes);
  }

  // Asks for what the first tile begins with.
  __device__ __forceinline__ void start(WorkTile const& tile) {
    begin(tile, 0);
    arch::cp_async_wait<0>();
    follow(0);
    fetched_ = {tile};
    TESSERA_UNROLL
    for (int piece = 0; piece < kAhead; ++piece) fetch();
  }

  // Waits for what the last tile has asked for without need: nothing may come when the CTA has ended.
  __device__ __forceinline__ static void finish() { arch::cp_async_wait<0>(); }

  // Asks for the numbers of the tile that comes next, a lane for those of one of the warp's 16 rows of either consumer:
  // for its scales, and for where its score lies.
  __device__ __forceinline__ void begin(WorkTile const& tile, uint32_t turn) {
    ahead_ = tile;
    int const row = first_row_of_warp() + own_row_to_ask_for();
    int const of_all = tile.row + row;
    if (of_all < tile.end) {
      uint32_t const to = numbers_of(row, turn);
      arch::cp_async_4(to, p_.gmem_permutation + of_all);
      float const* const gmem_scales =
          p_.gmem_h_scales + tile.n_tile * kGroups * p_.scale_pitch + of_all;
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        TESSERA_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          if (group == 1 && groups_of(tile) == 1) break;
          int64_t const block = half * (p_.columns / kGroupColumns) + group;
          arch::cp_async_4(to + place_of_scale(group, half), gmem_scales + block * p_.scale_pitch);
        }
      }
    }
    arch::cp_async_commit();
    __syncwarp();
  }

  // Asks for the scores of that tile. Their places have come, as pieces that were asked for later have been waited for.
  __device__ __forceinline__ void follow(uint32_t turn) const {
    int const row = first_row_of_warp() + own_row_to_ask_for();
    if (ahead_.row + row < ahead_.end) {
      uint32_t const to = numbers_of(row, turn);
      arch::cp_async_4(to, p_.gmem_scores + __float_as_uint(arch::load_shared_4(to)));
    }
    arch::cp_async_commit();
    __syncwarp();
  }

  // Stores the warp's 16 rows of one column group, then of the other, four at a time.
  __device__ __forceinline__ void store(WorkTile const& tile, int consumer, uint32_t turn) {
    held_.of(consumer);
    auto const place = held_.place(0);
    int const row = consumer * kSubtileM + first_row_of_warp() + place.row;
    smem_t_ = place.smem;
    smem_row_ = numbers_of(row, turn);
    rows_left_ = tile.end - tile.row - row;
    at_ = int64_t{tile.row + row} * (2 * p_.columns) + tile.n_tile * kGemm.tile.n + place.column;
    int const groups = groups_of(tile);
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
#pragma unroll 1
      for (int piece = 0; piece < HeldTile::kPieces; ++piece) {
        differentiate(tile.n_tile * kGroups + group, piece);
      }
      __syncwarp();
      store_numbers(tile, consumer, group, turn);
      __syncwarp();
    }
  }

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr int kRowLanes = 8;  // that share a row, each with 8 columns of either slab
  static constexpr int kLaneColumns = kSlabColumns / kRowLanes;
  static constexpr int kSlabPairs = kLaneColumns / 2, kPairs = 2 * kSlabPairs;  // of a lane

  // Column groups that exist; of an odd number the last tile of two has one.
  __device__ __forceinline__ int groups_of(WorkTile const& tile) const {
    return (tile.n_tile + 1) * kGemm.tile.n <= p_.columns ? kGroups : 1;
  }

  // Numbers of a row lie apart by those of all rows: its score, scales of g and u of each group, ds.
  static constexpr uint32_t kNumberBytes = kGemm.tile.m * sizeof(float);
  static constexpr uint32_t kGroupNumberBytes = 2 * kNumberBytes;
  static constexpr uint32_t kPlaceOfDs = (kOwnNumbers - 1) * kNumberBytes;
  static constexpr uint32_t kTurnBytes = kRowNumbers * kNumberBytes;
  __device__ __forceinline__ static uint32_t place_of_scale(int group, int half) {
    return kNumberBytes + group * kGroupNumberBytes + half * kNumberBytes;
  }
  __device__ __forceinline__ uint32_t numbers_of(int row, uint32_t turn) const {
    return smem_numbers_ + turn * kTurnBytes + row * sizeof(float);
  }

  // Codes of a piece lie behind the numbers of either turn, as [warp][gate, up][slab][row].
  static constexpr uint32_t kCodeRowBytes = kSlabColumns;
  static constexpr uint32_t kCodeSlabBytes = HeldTile::kPieceRows * kCodeRowBytes;
  static constexpr uint32_t kCodeBytes = 4 * kCodeSlabBytes;  // of a warp
  __device__ __forceinline__ uint32_t codes_of_warp(int piece) const {
    return smem_numbers_ + kOwnNumbers * kNumberBytes + piece % kAhead * kTurnBytes +
           first_row_of_warp() / kWarpRows * kCodeBytes;
  }

  // These are worked out where they are used, as registers are few: the warp's first row among a consumer's, and a
  // lane's number among those of a row.
  __device__ __forceinline__ static int first_row_of_warp() {
    return static_cast<int>(arch::forgotten(threadIdx.x) % arch::kWarpgroupThreads /
                            arch::kWarpThreads * kWarpRows);
  }
  __device__ __forceinline__ static int own_row_to_ask_for() {
    uint32_t const thread = arch::forgotten(threadIdx.x);
    return static_cast<int>(thread / kWarpRows % 2 * kSubtileM + thread % kWarpRows);
  }
  __device__ __forceinline__ static int lane() {
    return static_cast<int>(arch::forgotten(threadIdx.x) % arch::kWarpThreads);
  }

  // The piece that is asked for next.
  struct Fetched {
    WorkTile tile;
    int consumer = 0, group = 0, piece = 0;
  };

  // Asks for the codes of that piece, 16 bytes of gate and of up for each lane, in the place of codes that have been
  // read, and goes on to the piece behind it.
  __device__ __forceinline__ void fetch() {
    auto& [tile, consumer, group, piece] = fetched_;
    int const own = lane(), chunk = own % 8;
    int const row = tile.row + consumer * kSubtileM + first_row_of_warp() +
                    piece * HeldTile::kPieceRows + own / 8;
    uint8_t const* const gate = p_.gmem_h + int64_t{row} * (2 * p_.columns) +
                                (tile.n_tile * kGroups + group) * kGroupColumns + chunk * 16;
    uint32_t const to = codes_of_warp(piece) + chunk / 4 * kCodeSlabBytes +
                        own / 8 * kCodeRowBytes + chunk % 4 * 16;
    int const bytes = row < tile.end ? 16 : 0;
    arch::cp_async_16(to, gate, bytes);
    arch::cp_async_16(to + 2 * kCodeSlabBytes, gate + p_.columns, bytes);
    arch::cp_async_commit();
    if (++piece < HeldTile::kPieces) return;
    piece = 0;
    if (++group < groups_of(tile)) return;
    group = 0;
    if (++consumer < 2 && tile.rows > kSubtileM) return;
    consumer = 0;
    tile = ahead_;
  }

  // Stores have predicates: between branches the compiler would have little to overlap.
  __device__ __forceinline__ void differentiate(int block, int piece) {
    // Loaded here, as behind the barrier ptxas would do it late.
    uint4 const first_t = arch::load_shared_16(smem_t_);
    arch::cp_async_wait<1>();  // the latest may be the next piece's
    __syncwarp();
    float const s = arch::load_shared_4(smem_row_ - block % kGroups * kGroupNumberBytes);
    auto const factors = Function::factors(s, arch::load_shared_4(smem_row_ + place_of_scale(0, 0)),
                                           arch::load_shared_4(smem_row_ + place_of_scale(0, 1)));
    uint32_t const codes = codes_of_warp(piece) + lane() * kLaneColumns;
    bool const stores_dh = rows_left_ > p_.none_of_dh, stores_dh8 = rows_left_ > p_.none_of_dh8,
               stores_a = rows_left_ > p_.none_of_a_scaled;
    // An element of h and that of a' of its row and column are i and (i + column) / 2 elements from the start.
    uint8_t* const a_bytes =
        reinterpret_cast<uint8_t*>(p_.gmem_a_scaled) + at_ +
        static_cast<uint32_t>(block * kGroupColumns + lane() % kRowLanes * kLaneColumns);
    uint32_t dg[kPairs], du[kPairs], largest_dg = 0, largest_du = 0;  // magnitudes, with any sign
    float ds = 0;
    uint4 second_a;
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) {
      uint4 const held_t =
          slab == 0 ? first_t : arch::load_shared_16(smem_t_ + HeldTile::kSlabBytes);
      uint32_t const t[kSlabPairs] = {held_t.x, held_t.y, held_t.z, held_t.w};
      uint2 const gates = arch::load_shared_8(codes + slab * kCodeSlabBytes);
      uint2 const ups = arch::load_shared_8(codes + (2 + slab) * kCodeSlabBytes);
      if (slab == 1) {
        __syncwarp();
        fetch();
      }
      uint32_t a[kSlabPairs];
      TESSERA_UNROLL
      for (int quad = 0; quad < 2; ++quad) {
        float4 const g = arch::unpack_e4m3(quad == 0 ? gates.x : gates.y);
        float4 const u = arch::unpack_e4m3(quad == 0 ? ups.x : ups.y);
        int const i = 2 * quad, j = slab * kSlabPairs + i;
        differentiate_pair({g.x, g.y}, {u.x, u.y}, arch::unpack_bf16(t[i]), factors, dg[j], du[j],
                           a[i], ds);
        differentiate_pair({g.z, g.w}, {u.z, u.w}, arch::unpack_bf16(t[i + 1]), factors, dg[j + 1],
                           du[j + 1], a[i + 1], ds);
        TESSERA_UNROLL
        for (int pair = j; pair < j + 2; ++pair) {
          largest_dg = pair == 0 ? dg[0] : arch::larger_magnitudes_bf16(largest_dg, dg[pair]);
          largest_du = pair == 0 ? du[0] : arch::larger_magnitudes_bf16(largest_du, du[pair]);
        }
      }
      if (slab == 0) {
        arch::store_streaming_16(a_bytes, {a[0], a[1], a[2], a[3]}, stores_a);
      } else {
        second_a = {a[0], a[1], a[2], a[3]};
      }
    }
    uint32_t largest = arch::larger_magnitudes_bf16(arch::low_halves(largest_dg, largest_du),
                                                    arch::high_halves(largest_dg, largest_du));
    ds *= 2 * factors.half_up;
    // The rows that wait for no scale leave while lanes exchange magnitudes and sums.
    static_assert(kRowLanes >> 3 == 1, "three steps");
    TESSERA_UNROLL
    for (int step = 0; step < 3; ++step) {
      int const lanes = kRowLanes / 2 >> step;
      uint32_t const other = __shfl_xor_sync(arch::kAllLanes, largest, lanes);
      float const other_ds = __shfl_xor_sync(arch::kAllLanes, ds, lanes);
      if (step < 2) {
        store_dh(at_ + step * p_.columns, step == 0 ? dg : du, stores_dh);
      } else {
        arch::store_streaming_16(a_bytes + kSlabColumns * sizeof(bf16), second_a, stores_a);
      }
      ds += other_ds;
      largest = arch::larger_magnitudes_bf16(largest, other);
    }
    largest &= 0x7fff7fffu;
    float const scales[2] = {block_scale(largest << 16), block_scale(largest & 0xffff0000u)};
    // In the places of the scales of h, and ds in one of its own.
    bool const is_first = lane() % kRowLanes == 0;
    arch::store_shared_4(smem_row_ - block % kGroups * kGroupNumberBytes + kPlaceOfDs, ds,
                         is_first);
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      arch::store_shared_4(smem_row_ + place_of_scale(0, half), scales[half], is_first);
    }
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int64_t const to = at_ + half * p_.columns;
      uint32_t const(&pairs)[kPairs] = half == 0 ? dg : du;
      float const r = arch::reciprocal(scales[half]);
      TESSERA_UNROLL
      for (int slab = 0; slab < 2; ++slab) {
        uint32_t const* const d = pairs + slab * kSlabPairs;
        arch::store_streaming_8(p_.gmem_dh8 + to + slab * kSlabColumns,
                                {codes_of(d[0], d[1], r), codes_of(d[2], d[3], r)}, stores_dh8);
      }
    }
    go_on(piece + 1 == HeldTile::kPieces);
  }

  __device__ __forceinline__ void store_dh(int64_t to, uint32_t const (&pairs)[kPairs],
                                           bool wanted) const {
    TESSERA_UNROLL
    for (int slab = 0; slab < 2; ++slab) {
      uint32_t const* const d = pairs + slab * kSlabPairs;
      arch::store_streaming_16(p_.gmem_dh + to + slab * kSlabColumns, {d[0], d[1], d[2], d[3]},
                               wanted);
    }
  }

  // Goes on to the next piece, behind the last one of a group to the next group's first.
  __device__ __forceinline__ void go_on(bool is_last) {
    constexpr int kBack = HeldTile::kPieces - 1, kRows = HeldTile::kPieceRows;
    int const rows = is_last ? -kBack * kRows : kRows;
    at_ += int64_t{rows} * (2 * p_.columns) + (is_last ? kGroupColumns : 0);
    rows_left_ -= rows;
    smem_t_ = HeldTile::next_piece(
        smem_t_,
        is_last ? 2 * HeldTile::kSlabBytes - kBack * HeldTile::kPieceBytes : HeldTile::kPieceBytes);
    smem_row_ += (is_last ? kGroupNumberBytes : 0) + rows * sizeof(float);
  }

  // Scales and ds of the warp's 16 rows, one column group: a lane has a row's of dg, or of du.
  __device__ __forceinline__ void store_numbers(WorkTile const& tile, int consumer, int group,
                                                uint32_t turn) const {
    int const own = lane(), half = own / kWarpRows;
    int const of_tile = consumer * kSubtileM + first_row_of_warp() + own % kWarpRows;
    uint32_t const numbers = numbers_of(of_tile, turn);
    int64_t const row = tile.row + of_tile, blocks = p_.columns / kGroupColumns;
    int const block = tile.n_tile * kGroups + group;
    bool const exists = row < tile.end;
    arch::store_4(p_.gmem_dh8_scales + (half * blocks + block) * p_.scale_pitch + row,
                  arch::load_shared_4(numbers + place_of_scale(group, half)),
                  exists && p_.gmem_dh8_scales != nullptr);
    arch::store_4(p_.gmem_partials + row * blocks + block,
                  arch::load_shared_4(numbers + kPlaceOfDs),
                  exists && half == 0 && p_.gmem_partials != nullptr);
  }

  // Two neighbouring columns: t and codes -> (dg, du), a'; ds without the scale of u.
  __device__ __forceinline__ static void differentiate_pair(
      float2 g, float2 u, float2 t, typename Function::Factors const& factors, uint32_t& dg,
      uint32_t& du, uint32_t& a, float& ds) {
    auto const low = Function::backward_of_codes(factors, g.x, u.x, t.x);
    auto const high = Function::backward_of_codes(factors, g.y, u.y, t.y);
    ds = fmaf(t.x, low.a, ds);
    ds = fmaf(t.y, high.a, ds);
    dg = arch::pack_bf16(low.dg, high.dg);
    du = arch::pack_bf16(low.du, high.du);
    a = arch::pack_bf16(factors.score_up * low.a, factors.score_up * high.a);
  }

  __device__ __forceinline__ static uint32_t codes_of(uint32_t first, uint32_t second, float r) {
    float2 const v0 = arch::unpack_bf16(first), v1 = arch::unpack_bf16(second);
    return arch::pack_e4m3(v0.x * r, v0.y * r, v1.x * r, v1.y * r);
  }

  Params const& p_;
  HeldTile held_;
  uint32_t smem_numbers_;
  WorkTile ahead_ = {};  // the tile that comes next, without rows behind the last one
  Fetched fetched_ = {};
  // These are of the piece at hand: a lane's place in h, as gate, in the first slab; the rows of the expert from its
  // row on; its t; numbers of its row, from where the group's scales have the places of the first group's.
  int64_t at_ = 0;
  int rows_left_ = 0;
  uint32_t smem_t_ = 0, smem_row_ = 0;
};

}  // namespace tessera::cuda::gemm
