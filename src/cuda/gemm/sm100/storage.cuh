// SPDX-License-Identifier: Apache-2.0
// Shared memory and barriers of a GEMM whose accumulators lie in tensor memory. Roles, warp by warp:
//   0 to 3  epilogue  32 rows of the tile each: the lanes that the warp reaches
//   4       multiply  allocates tensor memory, multiplies, frees it
//   5       load      both operands by TMA; draws and announces the tiles
//   6, 7    idle
// Where rows of A are gathered, warps 4 to 7 gather them, load B and draw, and warp 8 multiplies; in a pair warp 9 of
// each CTA relays what its own has gathered.
// A tile of a pair of CTAs has twice the rows: each CTA holds the rows of A and D that it stores, and half of B; warp 4
// of CTA 0 multiplies for both, and barriers marked * are those of CTA 0.
// Two accumulators of tile_n columns are filled in turn, so that a tile is stored while the next one is multiplied.
// Barrier        arrivals that end a phase                                            awaited by
//   full[s]*       1, load, with the bytes of the stage, of both CTAs; gathering also    multiply
//                  128, those that gather, or in a pair 2, the relays
//   gathered[s]    128, those that gather, in a pair alone                               relay
//   empty[s]       1, commit, to both CTAs, of the multiplications that read the stage   load
//   acc_full[i]    1, commit, to both CTAs, behind the tile's last multiplication        epilogue
//   acc_empty[i]*  4 or 8, each epilogue warp when it has loaded its rows                multiply
//   work_full      1, load; in a pair with the bytes of the tile                         multiply, epilogue, load
//   work_empty*    6, gathering 9, pair 11, both 19: each warp that reads tiles          load
//   loads[w][b]    1, epilogue warp w, with the bytes that it asked for                  epilogue warp w
// GemmConfig::epilogue.slabs counts the slabs of each epilogue warp.
#pragma once

#include "../storage.cuh"
#include "scales.cuh"

namespace tessera::cuda::gemm {

constexpr int kAccumulators = 2;
constexpr int kEpilogueWarps = 4, kLoadWarp = 5;
constexpr int kTensorRows = 128;  // of a CTA's tile: one for each lane
constexpr int kWarpSlabRows = 32;

// One warpgroup consumes: on sm_90 there are two or three (valid()), whose registers hold the accumulators.
consteval bool in_tensor_memory(GemmConfig c) { return c.consumer_warpgroups == 1; }

consteval bool valid_in_tensor_memory(GemmConfig c) {
  if (!in_tensor_memory(c)) throw "consumer_warpgroups: 1, the warps of the epilogue";
  if (is_mxfp8(c)) valid_mxfp8(c);
  if (c.tile.m != kTensorRows) throw "tile.m: 128, the lanes of tensor memory";
  if (c.tile.n % 64 || c.tile.n > 256) throw "tile.n: row groups of 64, to 256: two accumulators";
  if (c.a.bytes(1, c.tile.k) != kStageRowBytes) throw "tile.k: 128 bytes of a row of A";
  if (c.b.bytes(1, c.tile.k) != kStageRowBytes) throw "tile.k: 128 bytes of a row of B";
  if (c.stages < 2) throw "stages: at least 2";
  if (c.a.major != (c.varlen_k() ? Major::kRows : Major::kK))
    throw "a.major: k, but rows with varlen-K, whose k are the rows of a segment";
  if (c.varlen_k() && (!c.gathers() || c.b.major != Major::kRows || c.b.halves != Halves::kOne))
    throw "ragged: varlen-K gathers tokens, with a rows-major B in one half";
  if (c.cluster_m() > 2 || c.paired()) throw "cluster: one CTA, or two along gemm_m";
  if (c.tile.n / kGroupRows % c.cluster_m() || (!is_mxfp8(c) && c.b_groups() % c.cluster_m()))
    throw "tile.n: a pair halves its row groups, which MXFP8 may do between gate and up";
  if (c.b_stages != BStages{}) throw "b: in the ring";
  if (c.k_halves() == 2 && c.gathers()) throw "b.halves: k runs through two halves of an A by TMA";
  if (c.tail != Tail::kWhole || c.epilogue.mode != EpilogueMode::kInline)
    throw "tail, epilogue: whole tiles, inline";
  if (c.epilogue.outer_product || c.schedules_apart())
    throw "epilogue, order: no outer product, and the warp that loads draws";
  return true;
}

// cp.async announces its bytes in its own CTA alone, so a pair that gathers needs relays.
consteval bool relays(GemmConfig c) { return c.gathers() && c.cluster_m() == 2; }
// Warps that read tiles; in CTA 1 of a pair nobody multiplies.
consteval int tile_readers(GemmConfig c) {
  return (kEpilogueWarps + (c.gathers() ? 4 : 1) + (relays(c) ? 1 : 0)) * c.cluster_m() + 1;
}
consteval int full_arrivals(GemmConfig c) { return relays(c) ? 3 : barrier_arrivals(c).full; }
consteval int multiply_warp(GemmConfig c) { return c.gathers() ? 8 : 4; }
constexpr int kRelayWarp = 9;
consteval int threads_in_tensor_memory(GemmConfig c) {
  return relays(c) ? 320 : c.gathers() ? 288 : 256;
}
// Rows of B in a CTA.
consteval int b_share(GemmConfig c) { return c.tile.n / c.cluster_m(); }

// The same members as on sm_90, for the scheduler and the loads (scheduler.cuh, produce/).
template <GemmConfig kGemm>
  requires(in_tensor_memory(kGemm))
struct SharedStorage<kGemm> : StageScales<kGemm> {
  using A = typename ElementType<kGemm.a.element>::Type;
  using B = typename ElementType<kGemm.b.element>::Type;
  alignas(1024) A a[kGemm.stages][kGemm.tile.m * kGemm.tile.k];    // (PIPE,TILE_M,TILE_K)
  alignas(1024) B b[kGemm.stages][b_share(kGemm) * kGemm.tile.k];  // (PIPE,TILE_N/CTAS,TILE_K)
  alignas(1024) bf16 slabs[kEpilogueWarps][kGemm.epilogue.slabs][kWarpSlabRows * kSlabColumns];
  arch::Mbarrier full[kGemm.stages];
  arch::Mbarrier empty[kGemm.stages];
  arch::Mbarrier gathered[kGemm.stages];
  arch::Mbarrier acc_full[kAccumulators];
  arch::Mbarrier acc_empty[kAccumulators];
  arch::Mbarrier loads[kEpilogueWarps][kLoadBuffers];
  arch::Mbarrier work_full[kWorkSlots];
  arch::Mbarrier work_empty[kWorkSlots];
  alignas(16) int4 work[kWorkSlots];
  int segment_offsets[kMaxSegments + 1];
  uint32_t tensor;  // address of the first accumulator; scales lie behind both (scales.cuh)
  // Named by code that a configuration without them does not run.
  arch::Mbarrier resident_full[1];
  arch::Mbarrier resident_empty[1];
  arch::Mbarrier draw;
};

}  // namespace tessera::cuda::gemm
