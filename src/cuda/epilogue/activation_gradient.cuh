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

#include "../gemm/scheduler.cuh"
#include "../gemm/slabs.cuh"
#include "activation_gradient_pair.cuh"

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
template <class Core, ActivationKind kKind, bool kInterleaved>
class GradientRows {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  using Params = ActivationGradientParams;
  static constexpr int kHalves = ActivationFunction<kKind>::kGated ? 2 : 1;
  static_assert(kHalves == 2 || !kInterleaved);

 protected:
  static constexpr int kSubtileBlocks = kGemm.tile.n / kSlabColumns;
  static constexpr int kStrips = Accumulators::kStrips;  // of a block
  static constexpr int kStripPairs = Accumulators::kStripPairs;
  static constexpr int kRows = Accumulators::kRows;  // of this thread

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

  // Maps of h and dh count so where slab `slab` of the block from `column` on lies.
  __device__ __forceinline__ static int h_column(int column, int slab) {
    return kInterleaved ? 2 * column + slab * kSlabColumns : column;
  }
  __device__ __forceinline__ static int h_half(int slab) { return kInterleaved ? 0 : slab; }

  __device__ __forceinline__ int subtile_of(int row) const {
    return (row + warp_row_ - first_row_) / kSubtileM;
  }

  // Gives the scores of this thread's rows.
  __device__ __forceinline__ void scores(int subtile, float (&s)[kRows]) const {
    float const mine = kScores == 1 || subtile < 2 ? score_[0] : score_[kScores - 1];
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      s[i] = __shfl_sync(arch::kAllLanes, mine, Accumulators::warp_row(subtile % 2 * kWarpRows, i));
    }
  }

  // Strip m of a slab of the accumulators: its h in shared memory becomes dh.
  __device__ __forceinline__ void differentiate(Accumulators& acc, int slab, int m, bf16* gate,
                                                bf16* up, float const (&s)[kRows],
                                                uint32_t (&a)[kStripPairs],
                                                float (&ds)[kRows]) const {
    uint32_t g[kStripPairs], u[kStripPairs] = {};
    rows_.load(gate, m, g);
    if constexpr (kHalves == 2) rows_.load(up, m, u);
    acc.for_each_pair(slab, m, [&](int i, int row, float left, float right) {
      differentiate_pair<kKind>(p_.activation, left, right, s[row], g[i], u[i], a[i], ds[row]);
    });
    rows_.store(gate, m, g);
    if constexpr (kHalves == 2) rows_.store(up, m, u);
  }

  // Does the same where columns of gate and up are interleaved, in the block's two slabs.
  __device__ __forceinline__ void differentiate_interleaved(Accumulators& acc, int slab, int m,
                                                            bf16* first, bf16* second,
                                                            float const (&s)[kRows],
                                                            uint32_t (&a)[kStripPairs],
                                                            float (&ds)[kRows]) const {
    acc.for_each_pair(slab, m, [&](int i, int row, float left, float right) {
      uint2 const h = rows_.load_doubled(first, second, m, i);
      uint32_t g = arch::low_halves(h.x, h.y), u = arch::high_halves(h.x, h.y);
      differentiate_pair<kKind>(p_.activation, left, right, s[row], g, u, a[i], ds[row]);
      rows_.store_doubled(first, second, m, i, {arch::low_halves(g, u), arch::high_halves(g, u)});
    });
  }

  // The lanes that share a row hold the sums of its 128 columns.
  __device__ __forceinline__ void store_partials(float (&ds)[kRows], WorkTile const& tile, int row,
                                                 int g) const {
    if (p_.gmem_partials == nullptr) return;
    bool const speaks = Accumulators::speaks_for_row();
    int const group = tile.n_tile * kGemm.column_groups() + g;
    TESSERA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      ds[i] = Accumulators::sum_of_row(ds[i]);
      int const r = Accumulators::warp_row(row + warp_row_, i);
      if (speaks && r < tile.end && group < p_.groups) {
        p_.gmem_partials[int64_t{r} * p_.groups + group] = ds[i];
      }
      __syncwarp();
    }
  }

  Params const& p_;
  int warp_row_;   // first of the warp's 16 rows, among 64
  int first_row_;  // the warp's first row in the tile's first 64
  typename Core::SlabRows rows_;

 private:
  static constexpr int kScores = (kGemm.warpgroup_subtiles() + 1) / 2;

  float score_[kScores];  // lane l: of row l % 16 of the warp's in subtile l/16 (+ 2i)
};

// Works in slabs of its own.
template <class Core, ActivationKind kKind, bool kInterleaved = false>
class ActivationGradientEpilogue : GradientRows<Core, kKind, kInterleaved> {
  using Rows = GradientRows<Core, kKind, kInterleaved>;
  using Rows::first_row_;
  using Rows::kHalves;
  using Rows::kRows;
  using Rows::kStripPairs;
  using Rows::kStrips;
  using Rows::kSubtileBlocks;
  using Rows::p_;
  using Rows::rows_;
  using Rows::warp_row_;

 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = ActivationGradientParams;

  __device__ __forceinline__ ActivationGradientEpilogue(typename Core::Storage& smem,
                                                        Params const& p, int consumer)
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

  __device__ __forceinline__ void store(Accumulators& acc, WorkTile const& tile, int row) {
    int const subtile = this->subtile_of(row);
    float s[kRows];
    this->scores(subtile, s);
    TESSERA_UNROLL
    for (int g = 0; g < kGemm.column_groups(); ++g) {
      float ds[kRows] = {};
      TESSERA_UNROLL
      for (int part = 0; part < 2; ++part) {
        int const buffer = part;  // blocks alternate
        int const block = subtile * kSubtileBlocks + 2 * g + part;
        arch::mbarrier_wait(&loads_[buffer], phase_ >> buffer & 1);
        phase_ ^= 1u << buffer;
        differentiate_block(acc, 2 * g + part, buffer, block, s, ds);
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

  // One lane calls it, as store_block().
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

  // Turns the h of one block, a slab of the accumulators, into dh.
  __device__ __forceinline__ void differentiate_block(Accumulators& acc, int slab, int buffer,
                                                      int block, float const (&s)[kRows],
                                                      float (&ds)[kRows]) const {
    uint32_t a[2][kStripPairs];
    TESSERA_UNROLL
    for (int m = 0; m < kStrips; ++m) {
      if constexpr (kInterleaved) {
        this->differentiate_interleaved(acc, slab, m, slabs_.address(buffer * kHalves),
                                        slabs_.address(buffer * kHalves + 1), s, a[m % 2], ds);
      } else {
        this->differentiate(acc, slab, m, slabs_.address(buffer * kHalves),
                            slabs_.address(buffer * kHalves + 1), s, a[m % 2], ds);
      }
      if (m == kStrips / 2 - 1) {
        if (arch::lane_idx() == 0) {
          arch::tma_store_wait_read<0>();
          if (block > 0 && block + 1 < blocks_) load(block + 1);
        }
        __syncwarp();
      }
      if (m % 2 == 1) {
        TESSERA_UNROLL
        for (int i = 0; i < 2; ++i) rows_.store(slabs_.address(kSlabA), m - 1 + i, a[i]);
      }
    }
  }

  typename Core::Slabs slabs_;
  arch::Mbarrier* loads_;
  uint32_t phase_ = 0;  // bit b: parity of the next load into buffer b
  int first_column_;
  int blocks_;
};

// Works in lent stages, one for every 64 columns.
template <class Core, ActivationKind kKind, bool kInterleaved = false>
class ActivationGradientInStages : GradientRows<Core, kKind, kInterleaved> {
  using Rows = GradientRows<Core, kKind, kInterleaved>;
  using Rows::first_row_;
  using Rows::kHalves;
  using Rows::kRows;
  using Rows::kStripPairs;
  using Rows::kStrips;
  using Rows::kSubtileBlocks;
  using Rows::p_;
  using Rows::rows_;
  using Rows::warp_row_;

 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kLent;
  using Params = ActivationGradientParams;

  __device__ __forceinline__ ActivationGradientInStages(typename Core::Storage& smem,
                                                        Params const& p, int consumer)
      : Rows(p), stages_(smem, consumer) {
    static_assert(kGemm.epilogue.lent_stages == kSubtileBlocks);
  }

  // One thread of the producer calls it: it loads h of the i-th 64 columns.
  __device__ __forceinline__ static void lend(typename Core::Storage& smem, Params const& p,
                                              int stage, WorkTile const& tile, int i) {
    arch::Mbarrier* const full = &smem.full[stage];
    arch::mbarrier_arrive_expect_tx(full, kHalves * kGemm.tile.m * kSlabColumns * sizeof(bf16));
    TESSERA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      int const column = tile.n_tile * kGemm.tile.n + i * kSlabColumns;
      arch::tma_load(Core::LentStages::tile_slab_b(smem, stage, half), &p.h, full,
                     Rows::h_column(column, half), Rows::h_half(half), tile.row);
    }
  }

  __device__ __forceinline__ void begin(WorkTile const& tile, int row, int) {
    first_row_ = row + warp_row_;
    this->ask_for_scores(tile);
  }

  __device__ __forceinline__ void store(Accumulators& acc, WorkTile const& tile, int row,
                                        typename Core::Ring& state) {
    float s[kRows];
    this->scores(0, s);
    int const ragged_row = p_.ragged_extent + row + warp_row_ - tile.end;
    bool const exists = ragged_row < p_.ragged_extent;  // else the warp lies past the segment
    TESSERA_UNROLL
    for (int g = 0; g < kGemm.column_groups(); ++g) {
      float ds[kRows] = {};
      TESSERA_UNROLL
      for (int part = 0; part < 2; ++part) {
        int const stage = stages_.take(state);
        bf16* const gate = stages_.slab_b(stage, 0);
        bf16* const up = stages_.slab_b(stage, kHalves - 1);
        bf16* const a_scaled = stages_.slab_a(stage);
        TESSERA_UNROLL
        for (int m = 0; m < kStrips; ++m) {
          uint32_t a[kStripPairs];
          if constexpr (kInterleaved) {
            this->differentiate_interleaved(acc, 2 * g + part, m, gate, up, s, a, ds);
          } else {
            this->differentiate(acc, 2 * g + part, m, gate, up, s, a, ds);
          }
          rows_.store(a_scaled, m, a);
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
  typename Core::LentStages stages_;
};

}  // namespace tessera::cuda::gemm
