// SPDX-License-Identifier: Apache-2.0
// Configurations of the backward GEMMs, chosen by builds of the library against each other (bench/cuda/libraries.cu,
// lesson 13):
// bench/results/archive/h200/2026-11-22-{lent-stages,wide-tiles,deferred,resident}-layer.json,
// docs/notebook/2026-11-22-{lent-stages,deferred-epilogues}.md
#pragma once

#include "../gemm/config.hpp"
#include "gemm.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

// The epilogue moves five slabs for every two that are multiplied. Wide tiles gather half the bytes, and lent stages
// bring and take those slabs; where n does not fill them, ping-pong hides what it can.
enum class TileWidth : uint8_t { k128, k256 };

template <ActivationKind kKind, gemm::Major kMajor, gemm::Boxes kBoxes,
          TileWidth kWidth = TileWidth::k128, Columns kColumns = Columns::kHalves>
struct DownProjectionDgradConfig {
  static constexpr bool wide = kWidth == TileWidth::k256;
  static constexpr ActivationKind activation = kKind;
  static constexpr bool interleaved = kColumns == Columns::kInterleaved;
  static constexpr bool gated = Activation{.kind = kKind}.gated();
  static constexpr gemm::GemmConfig gemm{
      .tile = {128, wide ? 256 : 128, 64},
      .stages = 4,
      .schedule = wide ? gemm::Schedule::kCooperative : gemm::Schedule::kPingPong,
      .a = {.loader = gemm::Loader::kGather},
      .b = {.major = kMajor, .boxes = kBoxes},
      .epilogue = {.mode = wide ? gemm::EpilogueMode::kLent : gemm::EpilogueMode::kInline,
                   .slabs = wide    ? 1
                            : gated ? 5
                                    : 3,
                   .lent_stages = wide ? 4 : 0},
      .order = {.ready_first = true},
      .chain = gemm::Chain::kHandsOver};
};

constexpr bool down_projection_dgrad_is_wide(int64_t intermediate) { return intermediate > 128; }

// The rows of dx start from zero, or from what the router adds to them.
enum class RouterPart : uint8_t { kNone, kAdded };

template <gemm::Major kMajor, RouterPart kRouterPart, gemm::Tail kTail = gemm::Tail::kWhole>
struct UpProjectionDgradConfig {
  static constexpr bool router_part = kRouterPart == RouterPart::kAdded;
  static constexpr gemm::GemmConfig gemm{
      .b = {.major = kMajor, .halves = gemm::Halves::kAlongK},
      .tail = kTail,
      .epilogue = {.mode = gemm::EpilogueMode::kDeferred, .outer_product = router_part}};
};

// A weight gradient is stored in one of these forms. bf16 that is added to is a kernel of its own; fp32 is added to by
// a switch of the call.
enum class Gradient : uint8_t { kBf16, kAddedToBf16, kFp32 };

// Stores are left to the next tile's k loop, but for bf16 gradients that are added to: what they are added to
// comes by lent stages. fp32 keeps half of a tile in slabs, for a stage of B.
// bench/results/archive/h200/2026-11-21-projection-wgrad.json, 2026-11-23-main-grad-b-behind.json
// Multicast: two CTAs whose tiles are neighbours along d share each B, which takes a third of the bytes off L2. Both
// have the same rows to add up, so neither waits for the other.
// bench/results/archive/h200/2026-11-22-wgrad-pairs-layer.json
template <gemm::Major kMajor, Gradient kGradient, gemm::Boxes kBoxes,
          gemm::Sharing kSharing = gemm::Sharing::kNone>
struct ProjectionWgradConfig {
  static constexpr bool any_layout = kBoxes == gemm::Boxes::kAny;
  static constexpr bool adds = kGradient == Gradient::kAddedToBf16;
  static constexpr bool pairs = kSharing == gemm::Sharing::kMulticast;
  static_assert(!adds || !any_layout);
  static_assert(!pairs || (!any_layout && !adds));
  static constexpr gemm::Major d_major = kMajor;
  static constexpr bool fp32 = kGradient == Gradient::kFp32;
  static constexpr bool defers = !any_layout && !adds;
  static constexpr gemm::GemmConfig gemm{
      .ragged = gemm::Ragged::kK,
      .a = {.loader = gemm::Loader::kGather, .major = gemm::Major::kRows},
      .b = {.major = gemm::Major::kRows, .boxes = kBoxes},
      .cluster = {.ctas = pairs ? 2 : 1, .sharing = kSharing},
      .b_stages = {.storage = fp32 && defers ? gemm::BStorage::kBehind : gemm::BStorage::kRing},
      .epilogue = {.mode = adds     ? gemm::EpilogueMode::kLent
                           : defers ? gemm::EpilogueMode::kDeferred
                                    : gemm::EpilogueMode::kInline,
                   .slabs = fp32 && defers ? 4 : 2,
                   .lent_stages = adds ? 2 : 0},
      .order = {.longest_first = defers},
      .chain = any_layout ? gemm::Chain::kNone : gemm::Chain::kTakesOver};
};

// True where no CTA of a pair is left without a tile.
constexpr bool projection_wgrad_in_pairs(int64_t hidden, int sm_count) {
  constexpr int kTileM = gemm::GemmConfig{}.tile.m;
  return (hidden + kTileM - 1) / kTileM % 2 == 0 && sm_count >= 2;
}

// Memory bound, with short k loops. bench/results/archive/h200/2026-11-22-router.json
struct RouterDgradConfig {
  static constexpr gemm::GemmConfig gemm{.tile = {192, 128, 64},
                                         .stages = 4,
                                         .schedule = gemm::Schedule::kPingPong,
                                         .b = {.major = gemm::Major::kRows}};
};
// This one has the tokens that are listed; its rows are gathered, and stored one by one.
struct RouterDgradListedConfig {
  static constexpr gemm::GemmConfig gemm{.a = {.loader = gemm::Loader::kGather},
                                         .b = {.major = gemm::Major::kRows},
                                         .epilogue = {.mode = gemm::EpilogueMode::kDeferred}};
};
// kTileExperts: router_wgrad_tile_experts(). bench/results/archive/h200/2026-11-22-router-tiles.json
// kGathers: x by a list of the tokens that are not padding.
template <int kTileExperts, bool kGathers = false>
struct RouterWgradConfig {
  static constexpr gemm::GemmConfig gemm{
      .tile = {128, kTileExperts, 64},
      .stages = kTileExperts == 256 ? 4 : 6,
      .ragged = gemm::Ragged::kK,
      .a = {.loader = kGathers ? gemm::Loader::kGather : gemm::Loader::kTma,
            .major = gemm::Major::kRows},
      .b = {.major = gemm::Major::kRows},
      .tail = gemm::Tail::kShort,
      .order = {.draw = gemm::Draw::kCounterFromFirst}};
};

}  // namespace tessera::cuda
