// SPDX-License-Identifier: Apache-2.0
// Persistent schedule over a ragged list of segments. Clusters draw work tiles from one
// global counter, so that at any time the tiles being computed are neighbours in the list: they share
// B in L2 whatever the segments' sizes. (With a fixed stride, unequal tiles let the CTAs drift apart:
// three times the DRAM traffic at 512 segments of about 640 rows.) Tiles that are all alike lie a stride apart
// after all, and no counter has to be 0: draws_tiles. Which CTA computes a tile does not change its bits.
//
// varlen-M: a segment of M rows has ceil(M / (cluster_m * tile_m)) blocks; a work tile is (block, n_tile).
// The last block's rows are divided among the CTAs of the cluster in units of 64, so that a cluster
// of two wastes at most 127 rows per segment, not 255.
// varlen-K: every segment has ceil(m_tiles / cluster_m) blocks of a tile for each CTA, and its rows are the reduction.
// Raster inside a segment: groups of raster_n n_tiles; in a group n runs fastest, m forwards in even
// groups and backwards in odd ones: neighbours in time share A rows and B columns in L2.
// Segments come in their order, or with varlen-K the long ones first (longest_first.cuh). Where rows of A are still on
// their way, blocks that wait for none of them come first, then the others (await_rows.cuh).
#pragma once

#include <algorithm>

#include "../arch/clock.cuh"
#include "../arch/cluster.cuh"
#include "../arch/warp.cuh"
#include "../warp/sums.cuh"
#include "await_rows.cuh"
#include "longest_first.cuh"
#include "params.hpp"
#include "storage.cuh"
#include "work_queue.cuh"

namespace tessera::cuda::gemm {

// Bounds the work tiles of `rows` rows from above, however they are divided among the segments.
template <GemmConfig kGemm>
int64_t most_tiles(GemmParams const& p, int64_t rows) {
  if constexpr (kGemm.varlen_k()) {
    return int64_t{p.segments} * ((p.m_tiles + kGemm.cluster_m() - 1) / kGemm.cluster_m()) *
           p.n_tiles;
  }
  constexpr int kBlockM = kGemm.block_m();
  return ((rows + kBlockM - 1) / kBlockM + std::min<int64_t>(rows, p.segments - 1)) * p.n_tiles;
}

// A warp that does nothing else sleeps this long before it draws. Warps of all SMs then wake together and draw at once,
// so consecutive tickets, which read the same weights and rows, go to SMs that are near each other: one read across the
// halves of L2 serves several (lesson 2).
constexpr uint32_t kDrawSleepNs = 2000;

// Draws tiles and announces them to every CTA of the cluster. One converged warp of CTA 0.
template <GemmConfig kGemm>
class TileScheduler {
 public:
  __device__ __forceinline__ TileScheduler(SharedStorage<kGemm>& smem, GemmParams const& p)
      : smem_(smem),
        gmem_counter_(p.gmem_tile_counter),
        segments_(p.segments),
        m_blocks_((p.m_tiles + kGemm.cluster_m() - 1) / kGemm.cluster_m()),
        n_tiles_(p.n_tiles),
        ready_(p) {}

  // The first tile is the cluster's number, and tickets count the tiles after those; or the first one is drawn, too.
  // Returns true if there is one.
  __device__ __forceinline__ bool announce_first(int k_tiles) {
    if constexpr (kGemm.order.longest_first) order_.begin(smem_, segments_);
    bool found = false;
    if constexpr (kGemm.draws_first()) {
      draw();
      found = announce_drawn();
    } else {
      found = announce(own_cluster());
    }
    if (found && !draws_late(k_tiles)) draw();
    return found;
  }

  // Called in every k_tile of a tile: draws the next one early enough to hide the counter's latency,
  // late enough to keep the choice open. Where tiles are, or may be, too short for both, the next but one
  // is drawn.
  __device__ __forceinline__ void step(int k_tile, int k_tiles) {
    if (draws_late(k_tiles) && k_tile == k_tiles - kDrawAhead) draw();
    if (k_tile == max(k_tiles - kAnnounceAhead, 0)) {
      bool const found = announce_drawn();
      if (found && !draws_late(k_tiles)) draw();
    }
  }

  // schedules_apart: all of it, by a warp that does nothing else.
  __device__ __forceinline__ void run(int k_tiles) {
    bool found = announce_first(k_tiles);
    for (uint32_t phase = 0; found; phase ^= 1) {
      arch::mbarrier_wait(&smem_.draw, phase);
      if (draws_late(k_tiles)) {
        arch::sleep_ns(kDrawSleepNs);
        draw();
      }
      found = announce_drawn();
      if (found && !draws_late(k_tiles)) draw();
    }
  }
  // True for the loads' k_tile of a tile at which run() goes on.
  __device__ __forceinline__ static bool draws_at(int k_tile, int k_tiles) {
    return k_tile == max(k_tiles - kDrawAhead, 0);
  }

 private:
  static constexpr int kDrawAhead = 8;  // k_tiles before the end of the current tile
  static constexpr int kAnnounceAhead = 4;
  static constexpr int kBlockM = kGemm.block_m();
  static constexpr int kPairM = kGemm.pair_m();

  // Runs of a segment are of nearly equal length, in pairs of tiles.
  __device__ __forceinline__ static int blocks_of(int rows) {
    if constexpr (kGemm.keeps_b()) {
      return rows > 0 ? max(1, (rows + kBlockM / 2) / kBlockM) : 0;
    } else {
      return (rows + kBlockM - 1) / kBlockM;
    }
  }

  __device__ __forceinline__ static bool draws_late(int k_tiles) {
    return !kGemm.varlen_k() && k_tiles >= kDrawAhead;
  }

  __device__ __forceinline__ static int clusters() {
    return static_cast<int>(gridDim.x) / kGemm.cluster_m();
  }
  __device__ __forceinline__ static int own_cluster() {
    return static_cast<int>(blockIdx.x) / kGemm.cluster_m();
  }

  __device__ __forceinline__ void draw() {
    if constexpr (!kGemm.draws_tiles()) {
      ticket_ += clusters();
    } else if (arch::lane_idx() == 0) {
      ticket_ = atomicAdd(gmem_counter_, 1);
    }
  }

  __device__ __forceinline__ bool announce_drawn() {
    int const ticket = kGemm.draws_tiles() ? __shfl_sync(arch::kAllLanes, ticket_, 0) : ticket_;
    int const first = kGemm.draws_first() ? 0 : kGemm.draws_tiles() ? clusters() : own_cluster();
    bool const found = announce(first + ticket);
    // Each cluster (that had a first tile) fails once, so the last index drawn is total + clusters - 1. It leaves the
    // counter as the next launch expects it.
    if (kGemm.draws_tiles() && !found &&
        first + ticket == blocks_before_ * n_tiles_ + clusters() - 1 && arch::lane_idx() == 0) {
      *gmem_counter_ = 0;
    }
    return found;
  }

  __device__ __forceinline__ bool announce(int index) {
    int4 message{0, kNoTile, 0, 0};
    bool const found = find(index, message);
    arch::mbarrier_wait(&smem_.work_empty[slot_], phase_ ^ 1);
    if constexpr (kGemm.cluster_m() == 1) {
      if (arch::lane_idx() == 0) {
        smem_.work[slot_] = message;
        arch::mbarrier_arrive(&smem_.work_full[slot_]);
      }
    } else if (arch::lane_idx() < kGemm.cluster_m()) {
      arch::st_async(&smem_.work[slot_], &smem_.work_full[slot_], arch::lane_idx(), message);
    }
    __syncwarp();
    if (++slot_ == kWorkSlots) {
      slot_ = 0;
      phase_ ^= 1;
    }
    return found;
  }

  // Indices only grow: 32 segments are examined at a time, from the last tile's on, with a prefix
  // sum of their block counts across the lanes.
  __device__ __forceinline__ bool find(int index, int4& message) {
    int const wanted = index / n_tiles_;  // block number over all segments
    if constexpr (kGemm.varlen_k()) {
      int const place_in_order = min(wanted / m_blocks_, segments_);
      blocks_before_ = place_in_order * m_blocks_;
      if (place_in_order == segments_) return false;
      segment_ = place_in_order;
      if constexpr (kGemm.order.longest_first) segment_ = order_.at(smem_, segments_, segment_);
      message = place(index - blocks_before_ * n_tiles_, m_blocks_, 0,
                      smem_.segment_offsets[segment_ + 1]);
      message.w = smem_.segment_offsets[segment_];
      return true;
    }
    int const lane = arch::lane_idx();
    while (true) {
      if (segment_ >= segments_) {
        if constexpr (kGemm.order.ready_first) {
          if (ready_.next_turn()) {
            segment_ = 0;
            continue;
          }
        }
        return false;
      }
      int s = min(segment_ + lane, segments_ - 1);
      if constexpr (kGemm.order.ready_first) s = ready_.at(s, segments_);
      int const begin = smem_.segment_offsets[s];
      int const end = smem_.segment_offsets[s + 1];
      int blocks = segment_ + lane < segments_ ? blocks_of(end - begin) : 0;
      if constexpr (kGemm.order.ready_first) blocks = ready_.of_turn(s, blocks);
      int const sum = warp::inclusive_sum(blocks);
      unsigned const reached = __ballot_sync(arch::kAllLanes, blocks_before_ + sum > wanted);
      if (reached) {
        int const found = __ffs(static_cast<int>(reached)) - 1;
        int const found_blocks = __shfl_sync(arch::kAllLanes, blocks, found);
        segment_ += found;
        blocks_before_ += __shfl_sync(arch::kAllLanes, sum, found) - found_blocks;
        int const found_begin = __shfl_sync(arch::kAllLanes, begin, found);
        int const found_end = __shfl_sync(arch::kAllLanes, end, found);
        message = place(index - blocks_before_ * n_tiles_, found_blocks, found_begin, found_end);
        return true;
      }
      blocks_before_ += __shfl_sync(arch::kAllLanes, sum, arch::kWarpThreads - 1);
      segment_ += arch::kWarpThreads;
    }
  }

  // Tile `local` of the segment found.
  __device__ __forceinline__ int4 place(int local, int blocks, int begin, int end) const {
    int const group = local / (blocks * kGemm.order.raster_n);
    int const in_group = local - group * blocks * kGemm.order.raster_n;
    int const width = min(kGemm.order.raster_n, n_tiles_ - group * kGemm.order.raster_n);
    int const m = in_group / width;
    int const block = (group & 1) ? blocks - 1 - m : m;
    int const n_tile = group * kGemm.order.raster_n + in_group - m * width;
    if constexpr (kGemm.keeps_b()) {
      int const pairs = (end - begin + kPairM - 1) / kPairM;
      auto const of_run = [=](int run) {  // 2^24 rows have 2^31 as a product
        return begin + static_cast<int>(int64_t{run} * pairs / blocks) * kPairM;
      };
      int const first = of_run(block);
      int const last = min(end, of_run(block + 1));
      return {segment_ | n_tile << 16, first, end, last - first};
    }
    if constexpr (kGemm.order.ready_first) {
      int const segment = ready_.at(segment_, segments_);
      return {segment | n_tile << 16, begin + (ready_.before(segment) + block) * kBlockM, end,
              ready_.awaits() ? 1 : 0};
    }
    return {segment_ | n_tile << 16, begin + block * kBlockM, end, 0};
  }

  SharedStorage<kGemm>& smem_;
  int* gmem_counter_;
  int segments_;
  int m_blocks_;  // varlen-K
  int n_tiles_;
  int segment_ = 0;
  int blocks_before_ = 0;  // blocks of the segments before segment_
  int ticket_ = 0;         // of lane 0; without a counter tiles since the first
  int slot_ = 0;
  uint32_t phase_ = 0;
  LongestFirst<kGemm> order_;
  ReadyBlocks ready_;  // ready_first
};

}  // namespace tessera::cuda::gemm
