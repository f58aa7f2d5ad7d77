// SPDX-License-Identifier: Apache-2.0
// Configurations of the forward GEMMs, chosen by builds of the library against each other (bench/cuda/libraries.cu):
// bench/results/archive/h200/2026-11-22-{lent-stages,deferred,resident}-layer.json,
// docs/notebook/2026-11-22-deferred-epilogues.md
#pragma once

#include <cstdint>

#include "../gemm/config.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

// Rows of all blocks of an expert meet a tile of its weights one after the other, while L2 has it: weights that are too
// many for L2 are read once. bench/results/archive/h200/2026-11-23-rasters-forward.json
constexpr int kForwardRaster = 1;

// The columns of gate and up lie in a gated layer's weights one half behind the other, or in turn.
enum class Columns : uint8_t { kHalves, kInterleaved };

// Gathered rows: 16-byte copies cost the same per row whatever the tile, so it is as wide as possible.
// Interleaved columns: B is loaded as it lies.
template <ActivationKind kKind, gemm::Loader kRows, gemm::Major kMajor, gemm::Boxes kBoxes,
          Columns kColumns = Columns::kHalves>
struct UpProjectionFwdConfig {
  static constexpr bool interleaved = kColumns == Columns::kInterleaved;
  static_assert(!interleaved || kMajor == gemm::Major::kRows);
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm{
      .a = {.loader = kRows},
      .b = {.major = kMajor,
            .halves = Activation{.kind = kKind}.gated() && !interleaved ? gemm::Halves::kAlongRows
                                                                        : gemm::Halves::kOne,
            .boxes = kBoxes},
      .epilogue = {.mode = gemm::EpilogueMode::kDeferred},
      .order = {.raster_n = kForwardRaster},
      .chain = gemm::Chain::kHandsOver};
};

// Up to n = 256 an expert's B for 256 columns stays in shared memory for a run of tiles; else epilogues are deferred.
constexpr int64_t kDownProjectionResidentUpTo = 256;  // n

template <gemm::Major kMajor>
struct DownProjectionFwdResident {
  static constexpr gemm::GemmConfig gemm{.tile = {64, 256, 64},
                                         .stages = 8,
                                         .schedule = gemm::Schedule::kPingPong,
                                         .b = {.major = kMajor},
                                         .b_stages = {.storage = gemm::BStorage::kResident,
                                                      .k_tiles = kDownProjectionResidentUpTo / 64,
                                                      .run_tiles = 12},
                                         .chain = gemm::Chain::kTakesOver};
};
template <gemm::Major kMajor, gemm::Tail kTail = gemm::Tail::kWhole>
struct DownProjectionFwdWide {
  static constexpr gemm::GemmConfig gemm{
      .b = {.major = kMajor},
      .tail = kTail,
      .epilogue = {.mode = gemm::EpilogueMode::kDeferred},
      .order = {.draw = gemm::Draw::kOwnWarp, .raster_n = kForwardRaster},
      .chain = gemm::Chain::kTakesOver};
};

// Its tiles are alike. Up to 128 experts: 128 rows; more: the widest.
// bench/results/archive/h200/2026-11-22-router-short.json
struct RouterLogitsNarrow {
  static constexpr int kMaxExperts = 128;
  static constexpr bool lets_next = false;
  static constexpr gemm::GemmConfig gemm{.tile = {128, 128, 64},
                                         .stages = 6,
                                         .schedule = gemm::Schedule::kPingPong,
                                         .tail = gemm::Tail::kShort,
                                         .order = {.draw = gemm::Draw::kStride}};
};
// 64 to 128 experts, 64 rows where they leave the busiest SM fewer of them: at T = 24576 three waves instead of two of
// 128 rows. bench/results/archive/h200/2026-11-22-router-tiles.json
struct RouterLogitsLow {
  static constexpr int kMinExperts = 64;
  static constexpr bool lets_next = false;
  static constexpr gemm::GemmConfig gemm{.tile = {64, 128, 64},
                                         .stages = 8,
                                         .schedule = gemm::Schedule::kPingPong,
                                         .tail = gemm::Tail::kShort,
                                         .epilogue = {.slabs = 1},
                                         .order = {.draw = gemm::Draw::kStride}};
};
constexpr bool router_logits_is_low(int64_t tokens, int64_t experts, int64_t sm_count) {
  auto const busiest = [=](int64_t rows) {
    int64_t const tiles = (tokens + rows - 1) / rows;
    return (tiles + sm_count - 1) / sm_count * rows;
  };
  return experts >= RouterLogitsLow::kMinExperts &&
         busiest(RouterLogitsLow::gemm.tile.m) < busiest(RouterLogitsNarrow::gemm.tile.m);
}
static_assert(router_logits_is_low(24576, 128, 132) && !router_logits_is_low(32768, 128, 132));

struct RouterLogitsWide {
  static constexpr bool lets_next = true;
  static constexpr gemm::GemmConfig gemm{.stages = 4, .order = {.draw = gemm::Draw::kStride}};
};

// This serves an fp32 w_router. A stage of 64 KB is 3.1 MFLOP, which L2 does not keep up with where every SM reads its
// own B: two CTAs share it, but for few experts. docs/notebook/2026-11-27-fp32-router.md
struct RouterLogitsTermsFew {
  static constexpr int kMaxExperts = 64;
  static constexpr bool lets_next = false;
  static constexpr gemm::GemmConfig gemm{.tile = {128, 128, 64},
                                         .stages = 3,
                                         .schedule = gemm::Schedule::kPingPong,
                                         .b_stages = {.terms = 3},
                                         .tail = gemm::Tail::kShort,
                                         .epilogue = {.slabs = 1},
                                         .order = {.draw = gemm::Draw::kStride}};
};
struct RouterLogitsTerms {
  static constexpr bool lets_next = false;
  static constexpr gemm::GemmConfig gemm{
      .tile = {128, 128, 64},
      .stages = 3,
      .schedule = gemm::Schedule::kPingPong,
      .cluster = {.ctas = 2, .sharing = gemm::Sharing::kMulticast},
      .b_stages = {.terms = 3},
      .epilogue = {.slabs = 1},
      .order = {.draw = gemm::Draw::kStride}};
};

}  // namespace tessera::cuda
