// SPDX-License-Identifier: Apache-2.0
// The epilogue of an up task: h rounded to bf16, as the layer's is, a = act(h), rounded, staged in lent stages, 64
// columns of the warp's 16 rows by one store of TMA.
#pragma once

#include "cuda/gemm/sm90/lent.cuh"
#include "cuda/gemm/sm90/warp_rows.cuh"
#include "expert_parallel/fused/forward_pass.cuh"

namespace tessera::expert_parallel {

// Each warp has its own.
template <ActivationKind kKind>
class StoreRows {
 public:
  static constexpr gemm::EpilogueMode kMode = gemm::EpilogueMode::kLent;
  using Params = StoreRowsParams;

  __device__ StoreRows(Pass const& pass, int consumer)
      : p_(pass.p.activation), stages_(pass.smem.gemm, consumer) {}

  // This epilogue reads nothing, so a lent stage is left as it is.
  __device__ static void lend(gemm::SharedStorage<kPlain>& smem, Params const&, int stage,
                              gemm::WorkTile const&, int) {
    arch::mbarrier_arrive(&smem.full[stage]);
  }

  __device__ void begin(gemm::WorkTile const&, int, int) {}

  // 64 rows from `row`, of which the warp has 16.
  template <class Rounded>
  __device__ void store(Rounded rounded, gemm::WorkTile const& tile, int row,
                        gemm::PipelineState<kPlain>& state) {
    constexpr int kLent = lent_to_up(kKind);
    int const ragged_row =
        p_.ragged_extent + row + arch::warp_in_warpgroup() * gemm::kWarpRows - tile.end;
    TESSERA_UNROLL
    for (int lent = 0; lent < kLent; ++lent) {
      int const column = (tile.n_tile * kLent + lent) * kSlabs * gemm::kSlabColumns;
      int const stage = stages_.take(state);
      TESSERA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        // Gated: a column group has 64 gate columns, then their 64 up columns. Else it has two slabs.
        int const first = kGated ? slab * 2 * kPairs : (lent * 2 + slab) * kPairs;
        std::uint32_t const rows = arch::shared_address(stages_.rows(stages_.slab_b(stage, slab)));
        gemm::fill_warp_rows(rows + matrix_row_, [&](int i) {
          float2 const g = arch::unpack_bf16(rounded(first + i));
          float2 const u = kGated ? arch::unpack_bf16(rounded(first + i + kPairs)) : g;
          return arch::pack_bf16(Function::forward(p_.activation, g.x, u.x),
                                 Function::forward(p_.activation, g.y, u.y));
        });
      }
      stages_.publish(stage, [&] {
        if (ragged_row >= p_.ragged_extent) return;  // past the block's rows
        TESSERA_UNROLL
        for (int slab = 0; slab < kSlabs; ++slab) {
          arch::tma_store(&p_.a, stages_.rows(stages_.slab_b(stage, slab)),
                          column + slab * gemm::kSlabColumns, 0, ragged_row, tile.end,
                          arch::l2_evict_first());
        }
      });
    }
  }

  __device__ void settle() { stages_.settle(); }
  // LastTask has waited for the stores of the last task.
  __device__ void drain() const {}

 private:
  using Function = gemm::ActivationFunction<kKind>;
  static constexpr bool kGated = Function::kGated;
  static constexpr int kSlabs = 2;  // of a lent stage
  static constexpr int kPairs = gemm::Accumulators<kPlain>::kPairs;

  Params const& p_;
  gemm::BorrowedStages<kPlain> stages_;
  std::uint32_t matrix_row_ = gemm::warp_matrix_row();
};

}  // namespace tessera::expert_parallel
