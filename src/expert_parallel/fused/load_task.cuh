// SPDX-License-Identifier: Apache-2.0
// The producer warp loads the operands of its CTA's tasks (gemm::produce_tiles).
#pragma once

#include "cuda/gemm/produce/tma.cuh"
#include "expert_parallel/fused/store_rows.cuh"

namespace tessera::expert_parallel {

// Loads up and down tasks, whose A the warp that schedules has waited for. Where both CTAs of the pair read an operand,
// each loads one half of it for both.
template <ActivationKind kKind>
class LoadTask {
 public:
  __device__ __forceinline__ explicit LoadTask(Pass const& pass)
      : smem_(pass.smem), p_(pass.p), draws_(arch::cluster_cta_rank() == 0) {}

  __device__ __forceinline__ void announce_first() {}
  // Returns when the task's A may be loaded.
  __device__ __forceinline__ int begin(gemm::WorkTile& tile) {
    down_ = (tile.segment & kDownTask) != 0;
    shares_rows_ = (tile.segment & kSharedRows) != 0;
    tile.segment &= kSharedRows - 1;
    int const k_tiles = down_ ? p_.down.k_tiles : p_.up.k_tiles;
    arch::mbarrier_wait(&smem_.schedule.loadable, phase_);
    phase_ ^= 1;
    arch::fence_proxy_async_global();
    return k_tiles;
  }
  __device__ __forceinline__ void before(gemm::WorkTile const&, int, int) {}
  // Chooses the lane that acquired.
  __device__ __forceinline__ static bool loads() { return arch::lane_idx() == 0; }
  __device__ __forceinline__ void fill(int stage, gemm::WorkTile const& tile, int k_tile,
                                       int k_tiles) {
    if (draws_ && k_tile == max(k_tiles - kDrawAhead, 0)) {
      arch::mbarrier_arrive(&smem_.schedule.may_draw);
    }
    if (down_) {
      load<kPlain, kPlainShared>(p_.down, p_.shared_down, stage, k_tile, tile);
    } else {
      load<kUp, kUpShared>(p_.up, p_.shared_up, stage, k_tile, tile);
    }
  }
  __device__ __forceinline__ void after(gemm::PipelineState<kPlain>& state,
                                        gemm::WorkTile const& tile) {
    int const lent = down_ ? 0 : lent_to_up(kKind);
    gemm::lend_stages<kPlain, StoreRows<kKind>>(smem_.gemm, p_.activation, state, tile, lent);
  }
  __device__ __forceinline__ void end() {}

 private:
  // k_tiles before a task's end at which its successor is drawn, no earlier than needed. Were tickets drawn early, one
  // of two consecutive ones could wait behind a long task, and the weights that both read would have left L2 meanwhile.
  static constexpr int kDrawAhead = 8;
  static constexpr gemm::GemmConfig kUp = up_gemm(kKind);
  static constexpr gemm::GemmConfig kUpShared = kUp.b_halves() == 2 ? kGatedShared : kPlainShared;

  template <gemm::GemmConfig kGemm, gemm::GemmConfig kShared>
  __device__ __forceinline__ void load(gemm::GemmParams const& p, SharedMaps const& shared,
                                       int stage, int k_tile, gemm::WorkTile const& tile) const {
    constexpr int kHalfOfA = gemm::kSubtileM * kGemm.tile.k;
    constexpr std::uint16_t kBoth = (1 << kCtasOfPair) - 1;
    arch::Mbarrier* const full = &smem_.gemm.full[stage];
    auto const cta = static_cast<int>(arch::cluster_cta_rank());
    int const k = k_tile * kGemm.tile.k;
    arch::mbarrier_arrive_expect_tx(full, kGemm.a_tile_bytes() + kGemm.b_tile_bytes());
    gemm::bf16* const a = smem_.gemm.a[stage];
    if (shares_rows_) {
      arch::tma_load_multicast(a + cta * kHalfOfA, &shared.a, full, kBoth, k,
                               tile.row + cta * gemm::kSubtileM);
    } else {
      arch::tma_load(a, &p.a, full, k, tile.row);
    }
    if (shares_rows_ || p.b_in_boxes) {
      gemm::load_b<kGemm>(smem_.gemm_of<kGemm>(), p, stage, k_tile, tile);
    } else {
      int const group = cta * kShared.b_groups_per_cta();
      gemm::bf16* const b =
          &smem_.gemm.b[stage][group * kShared.b_halves() * gemm::kGroupRows * kGemm.tile.k];
      gemm::load_b_box<kShared>(b, &shared.b, full, k, 0, 0,
                                tile.n_tile * kShared.b_groups() + group, tile.segment);
    }
  }

  ForwardStorage& smem_;
  ForwardParams const& p_;
  bool const draws_;
  std::uint32_t phase_ = 0;
  bool down_ = false, shares_rows_ = false;
};

}  // namespace tessera::expert_parallel
