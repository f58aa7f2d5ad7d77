// SPDX-License-Identifier: Apache-2.0
// activation_gradient epilogue: with t = accumulators (dO w_down), s the row's score and (g, u) = h
//   ds partial = <t, act(h)> over 128 columns,   dh = J_act(h)^T (s t),   a' = s act(h)
// from fp32 values, each stored value rounded once.
//
// Each warp works alone, on blocks of its 16 rows x 64 columns. Their h comes by TMA; dh overwrites it, as each
// lane reads and writes the same matrix rows; then TMA stores it. The blocks lie
//   in lent stages  (lent.cuh) all of a tile's, filled by the producer: {gate, up} in B's place, a' in A's
//   or in slabs     {gate, up} of buffer 0 | {gate, up} of buffer 1 | a'     (not gated: one instead of two)
//                   h of the first two blocks comes under the k loop, then block b:
//                   wait for h | first half, a' kept | stores of b - 1 were read: load b + 1 | second half | store
// Interleaved: h and dh are g0 u0 g1 u1 .., so the two slabs of a block are its first and its last 32 columns, and each
// lane reads and writes the 8 bytes of two of them.
#pragma once

#include "../arch/load_shared.cuh"
#include "../arch/store_shared.cuh"
#include "../gemm/scheduler.cuh"
#include "../gemm/slabs.cuh"
#include "../gemm/sm90/lent.cuh"
#include "activation_math.cuh"

namespace tessera::cuda::gemm {

struct ActivationGradientParams {
  // Interleaved: one half of twice the columns.
  CUtensorMap h;                // (column, half, row), 64 x 1 x 16, for lent stages x tile_m
  CUtensorMap dh;               // ragged (column, half, row, end), 64 x 1 x 16 x 1
  CUtensorMap a_scaled;         // the same with one half
  float* gmem_partials;         // (rows, groups), by row; null: not stored
  float const* gmem_scores;     // by slot
  int const* gmem_permutation;  // row -> slot
  Activation activation;
  int groups;         // of 128 columns
  int ragged_extent;  // of the row dimension of dh and a_scaled
  bool stores_a;
};

// One warp's 16 rows of a tile, and the arithmetic on them.
template <GemmConfig kGemm, ActivationKind kKind, bool kInterleaved>
class GradientRows {
 public:
  using Params = ActivationGradientParams;
  static constexpr int kHalves = ActivationFunction<kKind>::kGated ? 2 : 1;
  static_assert(kHalves == 2 || !kInterleaved);

 protected:
  static constexpr int kSubtileBlocks = kGemm.tile.n / kSlabColumns;
  static constexpr int kMatrices = kSlabColumns / 16;  // of a block, 16x16 values each

  __device__ __forceinline__ explicit GradientRows(Params const& p) : p_(p) {
    static_assert(kGemm.b_halves() == 1);
    warp_row_ = arch::warp_in_warpgroup() * kWarpRows;
  }

  // Asks for the scores of the tile's rows from first_row_.
  __device__ __forceinline__ void ask_for_scores(WorkTile const& tile) {
    int const lane = arch::lane_idx();
    TESSERA_UNROLL
    for (int i = 0; i < kScores; ++i) {
      int const r = first_row_ + (2 * i + lane / 16) * kSubtileM + lane % 16;
      score_[i] = r < tile.end ? p_.gmem_scores[p_.gmem_permutation[r]] : 0.0f;
    }
  }

  // Where slab `slab` of the block from `column` on lies in h and dh, as their maps count.
  __device__ __forceinline__ static int h_column(int column, int slab) {
    return kInterleaved ? 2 * column + slab * kSlabColumns : column;
  }
  __device__ __forceinline__ static int h_half(int slab) { return kInterleaved ? 0 : slab; }

  __device__ __forceinline__ int subtile_of(int row) const {
    return (row + warp_row_ - first_row_) / kSubtileM;
  }

  // Of row lane/4 + offset of the warp's 16.
  __device__ __forceinline__ float score(int subtile, int offset) const {
    float const mine = kScores == 1 || subtile < 2 ? score_[0] : score_[kScores - 1];
    return __shfl_sync(arch::kAllLanes, mine, subtile % 2 * 16 + arch::lane_idx() / 4 + offset);
  }

  // Columns 16m.. of a block, 64*part.. of the group whose accumulators these are: h in shared memory becomes dh.
  __device__ __forceinline__ void differentiate(float const (&acc)[kGroupColumns / 2], int part,
                                                int m, uint32_t smem_gate, uint32_t smem_up,
                                                float const (&s)[2], uint32_t (&a)[4],
                                                float (&ds)[2]) const {
    uint32_t g[4], u[4] = {};
    arch::ldmatrix_x4(smem_gate, g[0], g[1], g[2], g[3]);
    if constexpr (kHalves == 2) arch::ldmatrix_x4(smem_up, u[0], u[1], u[2], u[3]);
    TESSERA_UNROLL
    for (int q = 0; q < 4; ++q) {
      differentiate_pair(&acc[pair_of(part, m, q)], s[q % 2], g[q], u[q], a[q], ds[q % 2]);
    }
    arch::stmatrix_x4(smem_gate, g[0], g[1], g[2], g[3]);
    if constexpr (kHalves == 2) arch::stmatrix_x4(smem_up, u[0], u[1], u[2], u[3]);
  }

  // The same where the columns of gate and up are interleaved; the block's slabs.
  __device__ __forceinline__ void differentiate_interleaved(float const (&acc)[kGroupColumns / 2],
                                                            int part, int m, bf16* first,
                                                            bf16* second, float const (&s)[2],
                                                            uint32_t (&a)[4],
                                                            float (&ds)[2]) const {
    int const lane = arch::lane_idx(), row = lane / 4;
    uint32_t const smem = arch::shared_address(m < kMatrices / 2 ? first : second) +
                          (warp_row_ + row) * 128 + lane % 2 * 8;
    TESSERA_UNROLL
    for (int q = 0; q < 4; ++q) {
      int const chunk = m % 2 * 4 + q / 2 * 2 + lane % 4 / 2;
      uint32_t const smem_pairs = smem + q % 2 * (8 * 128) + ((chunk ^ row) << 4);
      uint2 pairs = arch::load_shared_8(smem_pairs);
      uint32_t g = arch::low_halves(pairs.x, pairs.y), u = arch::high_halves(pairs.x, pairs.y);
      differentiate_pair(&acc[pair_of(part, m, q)], s[q % 2], g, u, a[q], ds[q % 2]);
      pairs = {arch::low_halves(g, u), arch::high_halves(g, u)};
      arch::store_shared_8(smem_pairs, pairs);
    }
  }

  // The four lanes of a row hold the sums of its 128 columns.
  __device__ __forceinline__ void store_partials(float (&ds)[2], WorkTile const& tile, int row,
                                                 int g) const {
    if (p_.gmem_partials == nullptr) return;
    int const lane = arch::lane_idx();
    int const group = tile.n_tile * kGemm.column_groups() + g;
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      ds[half] += __shfl_xor_sync(arch::kAllLanes, ds[half], 1);
      ds[half] += __shfl_xor_sync(arch::kAllLanes, ds[half], 2);
      int const r = row + warp_row_ + lane / 4 + 8 * half;
      if (lane % 4 == 0 && r < tile.end && group < p_.groups) {
        p_.gmem_partials[int64_t{r} * p_.groups + group] = ds[half];
      }
      __syncwarp();
    }
  }

  Params const& p_;
  int warp_row_;   // first of the warp's 16 rows, among 64
  int first_row_;  // .. in the tile's first 64

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr int kScores = (kGemm.warpgroup_subtiles() + 1) / 2;

  // Among a group's accumulators: columns 64*part + 16m + 8*(q/2).. of the upper rows, or with odd q of the lower.
  __device__ __forceinline__ static constexpr int pair_of(int part, int m, int q) {
    return part * (kGroupColumns / 4) + 4 * (2 * m + q / 2) + 2 * (q % 2);
  }

  // Two neighbouring columns: t, (g, u) -> (dg, du), a'.
  __device__ __forceinline__ void differentiate_pair(float const* t, float s, uint32_t& g,
                                                     uint32_t& u, uint32_t& a, float& ds) const {
    float2 const gate = arch::unpack_bf16(g);
    float2 const up = arch::unpack_bf16(u);
    auto const low = Function::backward(p_.activation, gate.x, up.x, s * t[0]);
    auto const high = Function::backward(p_.activation, gate.y, up.y, s * t[1]);
    ds = fmaf(t[0], low.a, ds);
    ds = fmaf(t[1], high.a, ds);
    g = arch::pack_bf16(low.dg, high.dg);
    u = arch::pack_bf16(low.du, high.du);
    a = arch::pack_bf16(s * low.a, s * high.a);
  }

  float score_[kScores];  // lane l: of row l % 16 of the warp's in subtile l/16 (+ 2i)
};

// In slabs of its own.
template <GemmConfig kGemm, ActivationKind kKind, bool kInterleaved = false>
class ActivationGradientEpilogue : GradientRows<kGemm, kKind, kInterleaved> {
  using Rows = GradientRows<kGemm, kKind, kInterleaved>;
  using Rows::first_row_;
  using Rows::kHalves;
  using Rows::kMatrices;
  using Rows::kSubtileBlocks;
  using Rows::p_;
  using Rows::warp_row_;

 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = ActivationGradientParams;

  __device__ __forceinline__ ActivationGradientEpilogue(SharedStorage<kGemm>& smem, Params const& p,
                                                        int consumer)
      : Rows(p), slabs_(smem, consumer) {
    static_assert(kGemm.epilogue.slabs == kLoadBuffers * kHalves + 1);
    loads_ = smem.loads[4 * consumer + arch::warp_in_warpgroup()];
  }

  // `subtiles` times 64 rows from `row` will be stored.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row, int subtiles) {
    first_row_ = row + warp_row_;
    first_column_ = tile.n_tile * kGemm.tile.n;
    blocks_ = subtiles * kSubtileBlocks;
    if (arch::lane_idx() == 0) {
      arch::tma_store_wait_read<0>();
      load(0);
      load(1);
    }
    __syncwarp();
    this->ask_for_scores(tile);
  }

  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row) {
    int const subtile = this->subtile_of(row);
    float const s[2] = {this->score(subtile, 0), this->score(subtile, 8)};
    TESSERA_UNROLL
    for (int g = 0; g < kGemm.column_groups(); ++g) {
      float ds[2] = {0.0f, 0.0f};
      TESSERA_UNROLL
      for (int part = 0; part < 2; ++part) {
        int const buffer = part;  // blocks alternate
        int const block = subtile * kSubtileBlocks + 2 * g + part;
        arch::mbarrier_wait(&loads_[buffer], phase_ >> buffer & 1);
        phase_ ^= 1u << buffer;
        differentiate_block(acc[g], part, buffer, block, s, ds);
        arch::fence_proxy_async_shared();
        __syncwarp();
        // A warp may lie past the segment altogether.
        if (arch::lane_idx() == 0 && row_of(block) < tile.end) {
          store_block(buffer, block, tile.end);
        }
        __syncwarp();
      }
      this->store_partials(ds, tile, row, g);
    }
  }

  __device__ __forceinline__ void settle() {}
  __device__ __forceinline__ void drain() const {
    if (arch::lane_idx() == 0) arch::tma_store_wait_read<0>();
  }

 private:
  static constexpr int kSlabA = kLoadBuffers * kHalves;

  __device__ __forceinline__ int column_of(int block) const {
    return first_column_ + block % kSubtileBlocks * kSlabColumns;
  }
  __device__ __forceinline__ int row_of(int block) const {
    return first_row_ + block / kSubtileBlocks * kSubtileM;
  }
  // This warp's rows of a slab.
  __device__ __forceinline__ bf16* slab(int idx) const {
    return slabs_.address(idx) + warp_row_ * kSlabColumns;
  }

  // By one lane, as store_block().
  __device__ __forceinline__ void load(int block) const {
    int const buffer = block % kLoadBuffers;
    arch::Mbarrier* const full = &loads_[buffer];
    arch::mbarrier_arrive_expect_tx(full, kHalves * kWarpRows * kSlabColumns * sizeof(bf16));
    TESSERA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      arch::tma_load(slab(buffer * kHalves + half), &p_.h, full,
                     Rows::h_column(column_of(block), half), Rows::h_half(half), row_of(block));
    }
  }

  __device__ __forceinline__ void store_block(int buffer, int block, int end) const {
    int const column = column_of(block);
    int const ragged_row = p_.ragged_extent + row_of(block) - end;
    uint64_t const policy = arch::l2_evict_first();
    TESSERA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      arch::tma_store(&p_.dh, slab(buffer * kHalves + half), Rows::h_column(column, half),
                      Rows::h_half(half), ragged_row, end, policy);
    }
    if (p_.stores_a) {
      arch::tma_store(&p_.a_scaled, slab(kSlabA), column, 0, ragged_row, end, policy);
    }
    arch::tma_store_commit();
  }

  // One block: columns 64*part.. of the group whose accumulators these are.
  __device__ __forceinline__ void differentiate_block(float const (&acc)[kGroupColumns / 2],
                                                      int part, int buffer, int block,
                                                      float const (&s)[2], float (&ds)[2]) const {
    uint32_t a[2][4];
    TESSERA_UNROLL
    for (int m = 0; m < kMatrices; ++m) {
      if constexpr (kInterleaved) {
        this->differentiate_interleaved(acc, part, m, slabs_.address(buffer * kHalves),
                                        slabs_.address(buffer * kHalves + 1), s, a[m % 2], ds);
      } else {
        this->differentiate(acc, part, m, rows_.matrix_row(slabs_.address(buffer * kHalves), 2 * m),
                            rows_.matrix_row(slabs_.address(buffer * kHalves + 1), 2 * m), s,
                            a[m % 2], ds);
      }
      if (m == kMatrices / 2 - 1) {
        if (arch::lane_idx() == 0) {
          arch::tma_store_wait_read<0>();
          if (block > 0 && block + 1 < blocks_) load(block + 1);
        }
        __syncwarp();
      }
      if (m % 2 == 1) {
        TESSERA_UNROLL
        for (int i = 0; i < 2; ++i) {
          arch::stmatrix_x4(rows_.matrix_row(slabs_.address(kSlabA), 2 * (m - 1 + i)), a[i][0],
                            a[i][1], a[i][2], a[i][3]);
        }
      }
    }
  }

  SlabStore<kGemm> slabs_;
  SlabRows rows_;
  arch::Mbarrier* loads_;
  uint32_t phase_ = 0;  // bit b: parity of the next load into buffer b
  int first_column_;
  int blocks_;
};

// In lent stages, one for every 64 columns.
template <GemmConfig kGemm, ActivationKind kKind, bool kInterleaved = false>
class ActivationGradientInStages : GradientRows<kGemm, kKind, kInterleaved> {
  using Rows = GradientRows<kGemm, kKind, kInterleaved>;
  using Rows::first_row_;
  using Rows::kHalves;
  using Rows::kMatrices;
  using Rows::kSubtileBlocks;
  using Rows::p_;
  using Rows::warp_row_;

 public:
  static constexpr EpilogueMode kMode = EpilogueMode::kLent;
  using Params = ActivationGradientParams;

  __device__ __forceinline__ ActivationGradientInStages(SharedStorage<kGemm>& smem, Params const& p,
                                                        int consumer)
      : Rows(p), stages_(smem, consumer) {
    static_assert(kGemm.epilogue.lent_stages == kSubtileBlocks);
  }

  // By one thread of the producer: h of the i-th 64 columns.
  __device__ __forceinline__ static void lend(SharedStorage<kGemm>& smem, Params const& p,
                                              int stage, WorkTile const& tile, int i) {
    arch::Mbarrier* const full = &smem.full[stage];
    arch::mbarrier_arrive_expect_tx(full, kHalves * kGemm.tile.m * kSlabColumns * sizeof(bf16));
    TESSERA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      int const column = tile.n_tile * kGemm.tile.n + i * kSlabColumns;
      arch::tma_load(lent_slab_b<kGemm>(smem, stage, half), &p.h, full,
                     Rows::h_column(column, half), Rows::h_half(half), tile.row);
    }
  }

  __device__ __forceinline__ void begin(WorkTile const& tile, int row, int) {
    first_row_ = row + warp_row_;
    this->ask_for_scores(tile);
  }

  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row,
                                        PipelineState<kGemm>& state) {
    float const s[2] = {this->score(0, 0), this->score(0, 8)};
    int const ragged_row = p_.ragged_extent + row + warp_row_ - tile.end;
    bool const exists = ragged_row < p_.ragged_extent;  // else the warp lies past the segment
    TESSERA_UNROLL
    for (int g = 0; g < kGemm.column_groups(); ++g) {
      float ds[2] = {0.0f, 0.0f};
      TESSERA_UNROLL
      for (int part = 0; part < 2; ++part) {
        int const stage = stages_.take(state);
        bf16* const gate = stages_.slab_b(stage, 0);
        bf16* const up = stages_.slab_b(stage, kHalves - 1);
        bf16* const a_scaled = stages_.slab_a(stage);
        TESSERA_UNROLL
        for (int m = 0; m < kMatrices; ++m) {
          uint32_t a[4];
          if constexpr (kInterleaved) {
            this->differentiate_interleaved(acc[g], part, m, gate, up, s, a, ds);
          } else {
            this->differentiate(acc[g], part, m, rows_.matrix_row(gate, 2 * m),
                                rows_.matrix_row(up, 2 * m), s, a, ds);
          }
          arch::stmatrix_x4(rows_.matrix_row(a_scaled, 2 * m), a[0], a[1], a[2], a[3]);
        }
        stages_.publish(stage, [&] {
          if (!exists) return;
          int const column = tile.n_tile * kGemm.tile.n + (2 * g + part) * kSlabColumns;
          uint64_t const policy = arch::l2_evict_first();
          TESSERA_UNROLL
          for (int half = 0; half < kHalves; ++half) {
            arch::tma_store(&p_.dh, stages_.rows(half == 0 ? gate : up),
                            Rows::h_column(column, half), Rows::h_half(half), ragged_row, tile.end,
                            policy);
          }
          if (p_.stores_a) {
            arch::tma_store(&p_.a_scaled, stages_.rows(a_scaled), column, 0, ragged_row, tile.end,
                            policy);
          }
        });
      }
      this->store_partials(ds, tile, row, g);
    }
  }

  __device__ __forceinline__ void settle() { stages_.settle(); }
  __device__ __forceinline__ void drain() const { stages_.drain(); }

 private:
  BorrowedStages<kGemm> stages_;
  SlabRows rows_;
};

}  // namespace tessera::cuda::gemm
