// SPDX-License-Identifier: Apache-2.0
// Configurations of the backward GEMMs, chosen by builds of the library against each other (bench/cuda/libraries.cu):
// alone, back to back, a GEMM holds the power limit, and other configurations win than in a layer.
// bench/results/h200/2026-11-22-{lent-stages,wide-tiles,deferred,resident}-layer.json,
// docs/notebook/2026-11-22-{lent-stages,deferred-epilogues}.md
#pragma once

#include "../block/gemm_config.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

// The epilogue moves five slabs for every two that are multiplied. Wide tiles gather half the bytes, and lent stages
// bring and take those slabs; where n does not fill them, ping-pong hides what it can.
template <ActivationKind kKind, block::Major kMajor, bool kAnyLayout, bool kWide = false,
          bool kInterleaved = false>
struct DownProjectionDgradConfig {
  static constexpr ActivationKind activation = kKind;
  static constexpr bool interleaved = kInterleaved;
  static constexpr bool gated = Activation{.kind = kKind}.gated();
  static constexpr block::GemmConfig gemm{
      .tile = {128, kWide ? 256 : 128, 64},
      .stages = 4,
      .a_loader = block::ALoader::kGather,
      .schedule = kWide ? block::Schedule::kCooperative : block::Schedule::kPingPong,
      .b_major = kMajor,
      .any_b_layout = kAnyLayout,
      .store_slabs = kWide   ? 1
                     : gated ? 5
                             : 3,
      .lent_stages = kWide ? 4 : 0,
      .hands_over = true};
};

constexpr bool down_projection_dgrad_is_wide(int64_t intermediate) { return intermediate > 128; }

template <block::Major kMajor, bool kRouterPart, bool kPartialLast = false>
struct UpProjectionDgradConfig {
  static constexpr bool router_part = kRouterPart;
  static constexpr block::GemmConfig gemm{.b_major = kMajor,
                                          .partial_last = kPartialLast,
                                          .adds_outer_product = kRouterPart,
                                          .k_halves = 2,
                                          .defers = true};
};

// Stores are left to the next tile's k loop, but for bf16 gradients that are added to (kAdds): what they are added to
// comes by lent stages. fp32 keeps half of a tile in slabs, for a stage of B.
// bench/results/h200/2026-11-21-projection-wgrad.json, 2026-11-23-main-grad-b-behind.json
// kPairs: two CTAs whose tiles are neighbours along d share each B, which takes a third of the bytes off L2. Both have
// the same rows to add up, so neither waits for the other. bench/results/h200/2026-11-22-wgrad-pairs-layer.json
template <block::Major kMajor, bool kFp32, bool kAnyLayout, bool kAdds, bool kPairs = false>
struct ProjectionWgradConfig {
  static_assert(!kAdds || (!kFp32 && !kAnyLayout));
  static_assert(!kPairs || (!kAnyLayout && !kAdds));
  static constexpr block::Major d_major = kMajor;
  static constexpr bool fp32 = kFp32;
  static constexpr bool defers = !kAnyLayout && !kAdds;
  static constexpr block::GemmConfig gemm{.cluster_m = kPairs ? 2 : 1,
                                          .a_loader = block::ALoader::kGather,
                                          .ragged = block::Ragged::kK,
                                          .b_major = block::Major::kRows,
                                          .any_b_layout = kAnyLayout,
                                          .b_behind = kFp32 && defers,
                                          .store_slabs = kFp32 && defers ? 4 : 2,
                                          .lent_stages = kAdds ? 2 : 0,
                                          .defers = defers,
                                          .takes_over = !kAnyLayout};
};

// Where no CTA of a pair is left without a tile.
constexpr bool projection_wgrad_in_pairs(int64_t hidden, int sm_count) {
  constexpr int kTileM = block::GemmConfig{}.tile.m;
  return (hidden + kTileM - 1) / kTileM % 2 == 0 && sm_count >= 2;
}

// Memory bound, with short k loops. bench/results/h200/2026-11-22-router.json
struct RouterDgradConfig {
  static constexpr block::GemmConfig gemm{.tile = {192, 128, 64},
                                          .stages = 4,
                                          .schedule = block::Schedule::kPingPong,
                                          .b_major = block::Major::kRows};
};
// kTileExperts: router_wgrad_tile_experts(). bench/results/h200/2026-11-22-router-tiles.json
template <int kTileExperts>
struct RouterWgradConfig {
  static constexpr block::GemmConfig gemm{.tile = {128, kTileExperts, 64},
                                          .stages = kTileExperts == 256 ? 4 : 6,
                                          .ragged = block::Ragged::kK,
                                          .b_major = block::Major::kRows,
                                          .short_b = true,
                                          .draws_first = true};
};

}  // namespace tessera::cuda
