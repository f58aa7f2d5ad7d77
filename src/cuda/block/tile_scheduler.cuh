// SPDX-License-Identifier: Apache-2.0
// Persistent static schedule over a ragged list of segments (varlen-M): cluster c computes work
// tiles c, c + clusters, c + 2*clusters, ... Every role walks the same list by itself, so no tile is
// ever communicated, and the result does not depend on timing.
//
// A segment of M rows has ceil(M / (cluster_m * tile_m)) blocks; a work tile is (block, n_tile).
// The last block's rows are divided among the CTAs of the cluster in units of 64, so that a cluster
// of two wastes at most 127 rows per segment, not 255.
// Raster inside a segment: groups of raster_n n_tiles; in a group n runs fastest, m forwards in even
// groups and backwards in odd ones: neighbours in time share A rows and B columns in L2.
#pragma once

#include <climits>

#include "../arch/warp.cuh"
#include "gemm_config.hpp"

namespace tessera::cuda::block {

struct WorkTile {
  int segment;
  int n_tile;
  int row;   // first row of this CTA, counted over all segments
  int rows;  // how many of its tile_m rows exist; 0: the CTA only helps to load B
  int end;   // first row past the segment
};

template <GemmConfig kGemm>
class TileScheduler {
 public:
  __device__ __forceinline__ TileScheduler(int const* smem_offsets, int segments, int n_tiles)
      : offsets_(smem_offsets),
        segments_(segments),
        n_tiles_(n_tiles),
        cta_(kGemm.cluster_m == 1 ? 0 : static_cast<int>(blockIdx.x) % kGemm.cluster_m),
        next_(static_cast<int>(blockIdx.x) / kGemm.cluster_m) {}

  // Passes over one work tile without computing it.
  __device__ __forceinline__ void skip() { next_ += static_cast<int>(gridDim.x) / kGemm.cluster_m; }

  // The next work tile, or false. Called by converged warps: 32 segments are examined at a time,
  // starting from the last tile's, with a prefix sum of their block counts across the lanes.
  __device__ __forceinline__ bool next(WorkTile& tile) {
    int const wanted = next_ / n_tiles_;  // block index over all segments
    int const lane = arch::lane_idx();
    while (segment_ < segments_) {
      int const s = min(segment_ + lane, segments_ - 1);
      int const begin = offsets_[s];
      int const end = offsets_[s + 1];
      int const blocks = segment_ + lane < segments_ ? (end - begin + kBlockM - 1) / kBlockM : 0;
      int sum = blocks;
      TESSERA_UNROLL
      for (int d = 1; d < arch::kWarpThreads; d *= 2) {
        int const below = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) sum += below;
      }
      unsigned const reached = __ballot_sync(kAllLanes, blocks_before_ + sum > wanted);
      if (reached) {
        int const found = __ffs(static_cast<int>(reached)) - 1;
        int const found_blocks = __shfl_sync(kAllLanes, blocks, found);
        segment_ += found;
        blocks_before_ += __shfl_sync(kAllLanes, sum, found) - found_blocks;
        place(tile, found_blocks, __shfl_sync(kAllLanes, begin, found),
              __shfl_sync(kAllLanes, end, found));
        skip();
        return true;
      }
      blocks_before_ += __shfl_sync(kAllLanes, sum, arch::kWarpThreads - 1);
      segment_ += arch::kWarpThreads;
    }
    return false;
  }

 private:
  static constexpr int kBlockM = kGemm.tile.m * kGemm.cluster_m;
  static constexpr unsigned kAllLanes = 0xffffffffu;

  __device__ __forceinline__ void place(WorkTile& tile, int blocks, int begin, int end) const {
    int const local = next_ - blocks_before_ * n_tiles_;
    int const group = local / (blocks * kGemm.raster_n);
    int const in_group = local - group * blocks * kGemm.raster_n;
    int const width = min(kGemm.raster_n, n_tiles_ - group * kGemm.raster_n);
    int const m = in_group / width;
    int const block = (group & 1) ? blocks - 1 - m : m;
    tile.segment = segment_;
    tile.n_tile = group * kGemm.raster_n + in_group - m * width;
    int const block_row = begin + block * kBlockM;
    int const left = min(end - block_row, kBlockM);
    int share = kGemm.tile.m;
    if constexpr (kGemm.cluster_m > 1) {
      constexpr int kUnit = kGemm.cluster_m * kSubtileM;
      share = min(share, (left + kUnit - 1) / kUnit * kSubtileM);
    }
    tile.row = block_row + cta_ * share;
    tile.rows = max(0, min(share, left - cta_ * share));
    tile.end = end;
  }

  int const* offsets_;
  int segments_;
  int n_tiles_;
  int cta_;
  int next_;
  int segment_ = 0;
  int blocks_before_ = 0;  // blocks of the segments before segment_
};

}  // namespace tessera::cuda::block
