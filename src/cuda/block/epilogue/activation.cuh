// SPDX-License-Identifier: Apache-2.0
// activation epilogue: h = accumulators (+ bias), a = act(h before rounding), each rounded once to bf16.
// Gated: a column group is [64 gate | 64 up], so g and u of one output lie in the same thread.
#pragma once

#include "../activation.cuh"
#include "../bias.cuh"
#include "../lent_stages.cuh"
#include "../slab_store.cuh"
#include "../tile_scheduler.cuh"

namespace tessera::cuda::block {

struct ActivationParams {
  CUtensorMap h;  // ragged (column, half, row, end), 64 x 1 x 64 x 1; lent stages: 64 x 1 x 16 x 1
  CUtensorMap a;  // the same with one half
  Bias bias[2];   // of the halves
  Activation activation;
  int columns;        // n
  int ragged_extent;  // of the row dimension of both
  bool stores_h, stores_a;
};

template <GemmConfig kGemm, ActivationKind kKind, bool kBias>
class ActivationEpilogue {
 public:
  using Params = ActivationParams;

  __device__ __forceinline__ ActivationEpilogue(SharedStorage<kGemm>& smem, Params const& p,
                                                int consumer)
      : p_(p), slabs_(smem, consumer) {}

  // 64 rows from `row`, per column group: two slabs of h, then a. A gated group gives one slab of a,
  // computed while TMA reads h; those of all groups are stored together.
  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row) {
    static_assert(kGemm.b_halves == kHalves && kGemm.store_slabs == 2);
    int const ragged_row = p_.ragged_extent + row - tile.end;
    uint32_t a[kGroups][kPairs];  // gated only
    TESSERA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      int const column = tile.n_tile * kColumns + g * (kColumns / kGroups);
      int const column_b = kGated ? column : column + kSlabColumns;  // of the second slab of h
      if (kBias && p_.bias[0].gmem != nullptr) {
        add_bias<0>(acc[g], p_.bias[0], tile.segment, column, p_.columns);
        add_bias<kSecond>(acc[g], p_.bias[kHalves - 1], tile.segment, column_b, p_.columns);
      }
      if (p_.stores_h) {
        slabs_.begin();
        slabs_.fill(0, [&](int j, int half) { return pack(acc[g], 4 * j + 2 * half); });
        slabs_.fill(1, [&](int j, int half) { return pack(acc[g], kSecond + 4 * j + 2 * half); });
        slabs_.publish();
        if (slabs_.issuer()) {
          slabs_.store(0, &p_.h, column, 0, ragged_row, tile.end);
          slabs_.store(1, &p_.h, column_b, kHalves - 1, ragged_row, tile.end);
          slabs_.commit();
        }
      }
      if constexpr (kGated) {
        TESSERA_UNROLL
        for (int i = 0; i < kPairs; ++i) a[g][i] = activate(acc[g], 2 * i);
      } else {
        store_a<2>(column, ragged_row, tile.end, [&](int slab, int j, int half) {
          return activate(acc[g], slab * kSecond + 4 * j + 2 * half);
        });
      }
    }
    if constexpr (kGated) {
      store_a<kGroups>(tile.n_tile * kColumns, ragged_row, tile.end,
                       [&](int slab, int j, int half) { return a[slab][2 * j + half]; });
    }
  }

  __device__ __forceinline__ void drain() const { slabs_.drain(); }

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr bool kGated = Function::kGated;
  static constexpr int kHalves = kGated ? 2 : 1;
  static constexpr int kGroups = kGemm.column_groups();
  static constexpr int kColumns = kGemm.tile.n / kHalves;  // of a, per tile
  static constexpr int kSecond = kGroupColumns / 4;        // register of the group's second slab
  static constexpr int kPairs = kGroupColumns / 8;         // per slab and thread

  __device__ __forceinline__ static uint32_t pack(float const (&acc)[kGroupColumns / 2], int i) {
    return arch::pack_bf16(acc[i], acc[i + 1]);
  }

  __device__ __forceinline__ uint32_t activate(float const (&acc)[kGroupColumns / 2], int i) const {
    constexpr int kUp = kGated ? kSecond : 0;
    return arch::pack_bf16(Function::forward(p_.activation, acc[i], acc[kUp + i]),
                           Function::forward(p_.activation, acc[i + 1], acc[kUp + i + 1]));
  }

  // Slabs of a from `column` on, of which pair(slab, j, half) are this thread's values.
  template <int kSlabs, typename Pair>
  __device__ __forceinline__ void store_a(int column, int ragged_row, int end, Pair pair) const {
    if (!p_.stores_a) return;
    slabs_.begin();
    TESSERA_UNROLL
    for (int s = 0; s < kSlabs; ++s) {
      slabs_.fill(s, [&](int j, int half) { return pair(s, j, half); });
    }
    slabs_.publish();
    if (slabs_.issuer()) {
      TESSERA_UNROLL
      for (int s = 0; s < kSlabs; ++s) {
        slabs_.store(s, &p_.a, column + s * kSlabColumns, 0, ragged_row, end);
      }
      slabs_.commit();
    }
  }

  Params const& p_;
  SlabStore<kGemm> slabs_;
};

// In lent stages, one for every 64 columns of a: h in B's place, a in A's. Each warp works alone.
template <GemmConfig kGemm, ActivationKind kKind, bool kBias>
class ActivationInStages {
 public:
  using Params = ActivationParams;

  __device__ __forceinline__ ActivationInStages(SharedStorage<kGemm>& smem, Params const& p,
                                                int consumer)
      : p_(p), stages_(smem, consumer) {
    static_assert(kGemm.b_halves == kHalves && kGemm.lent_stages == kColumns / kSlabColumns);
    warp_row_ = arch::warp_in_warpgroup() * kWarpRows;
  }

  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row,
                                        PipelineState<kGemm.stages>& state) {
    int const ragged_row = p_.ragged_extent + row + warp_row_ - tile.end;
    bool const exists = ragged_row < p_.ragged_extent;  // else the warp lies past the segment
    TESSERA_UNROLL
    for (int g = 0; g < kGemm.column_groups(); ++g) {
      TESSERA_UNROLL
      for (int part = 0; part < 2 / kHalves; ++part) {
        int const column = tile.n_tile * kColumns + (g * (2 / kHalves) + part) * kSlabColumns;
        if (part == 0) {
          store_block<0>(acc[g], tile, column, ragged_row, exists, state);
        } else {
          store_block<kSecond>(acc[g], tile, column, ragged_row, exists, state);
        }
      }
    }
  }

  __device__ __forceinline__ void settle() { stages_.settle(); }
  __device__ __forceinline__ void drain() const { stages_.drain(); }

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr int kHalves = Function::kGated ? 2 : 1;
  static constexpr int kColumns = kGemm.tile.n / kHalves;  // of a, per tile
  static constexpr int kSecond = kGroupColumns / 4;        // register of a group's second slab
  static constexpr int kUp = kHalves == 2 ? kSecond : 0;

  // 64 columns of a, whose h (gated: g) begins at register kFirst.
  template <int kFirst>
  __device__ __forceinline__ void store_block(float (&acc)[kGroupColumns / 2], WorkTile const& tile,
                                              int column, int ragged_row, bool exists,
                                              PipelineState<kGemm.stages>& state) {
    if (kBias && p_.bias[0].gmem != nullptr) {
      add_bias<kFirst>(acc, p_.bias[0], tile.segment, column, p_.columns);
      if (kHalves == 2) add_bias<kUp>(acc, p_.bias[1], tile.segment, column, p_.columns);
    }
    int const stage = stages_.take(state);
    if (p_.stores_h) {
      TESSERA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        rows_.fill(stages_.slab_b(stage, half), [&](int j, int lower) {
          int const i = kFirst + half * kUp + 4 * j + 2 * lower;
          return arch::pack_bf16(acc[i], acc[i + 1]);
        });
      }
    }
    if (p_.stores_a) {
      rows_.fill(stages_.slab_a(stage), [&](int j, int lower) {
        int const i = kFirst + 4 * j + 2 * lower;
        return arch::pack_bf16(Function::forward(p_.activation, acc[i], acc[kUp + i]),
                               Function::forward(p_.activation, acc[i + 1], acc[kUp + i + 1]));
      });
    }
    stages_.publish(stage, [&] {
      if (!exists) return;
      uint64_t const policy = arch::l2_evict_first();
      TESSERA_UNROLL
      for (int half = 0; p_.stores_h && half < kHalves; ++half) {
        arch::tma_store(&p_.h, stages_.rows(stages_.slab_b(stage, half)), column, half, ragged_row,
                        tile.end, policy);
      }
      if (p_.stores_a) {
        arch::tma_store(&p_.a, stages_.rows(stages_.slab_a(stage)), column, 0, ragged_row, tile.end,
                        policy);
      }
    });
  }

  Params const& p_;
  BorrowedStages<kGemm> stages_;
  SlabRows rows_;
  int warp_row_;
};

}  // namespace tessera::cuda::block
