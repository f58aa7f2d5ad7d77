// SPDX-License-Identifier: Apache-2.0
// The order in which varlen-K takes its segments, whose rows are reductions. A segment of many times the mean rows
// would, as one of the last, keep a few CTAs busy while the others have nothing left. So those of more than twice the
// mean come first, in classes: of more than half of the longest one's rows, then of more than a quarter, and so on;
// within a class, and from twice the mean down, in their order. Where none is that long, nothing changes its place.
#pragma once

#include <climits>

#include "../arch/warp.cuh"
#include "storage.cuh"

namespace tessera::cuda::gemm {

// One converged warp walks through the order, 32 segments at a time.
template <GemmConfig kGemm>
class LongestFirst {
 public:
  // Stands before the first segment.
  __device__ __forceinline__ void begin(SharedStorage<kGemm> const& smem, int segments) {
    int longest = 0;
#pragma unroll 1
    for (int s = arch::lane_idx(); s < segments; s += arch::kWarpThreads) {
      longest = max(longest, smem.segment_offsets[s + 1] - smem.segment_offsets[s]);
    }
    TESSERA_UNROLL
    for (int step = arch::kWarpThreads / 2; step > 0; step /= 2) {
      longest = max(longest, __shfl_xor_sync(arch::kAllLanes, longest, step));
    }
    state_ = arch::lane_idx() == kMost ? longest : 0;
  }

  // Returns the segment that stands at `place`, or `segments` where there are no more. Places only grow.
  __device__ __forceinline__ int at(SharedStorage<kGemm> const& smem, int segments, int place) {
    int const lane = arch::lane_idx();
    int most = kept(kMost), first = kept(kFirst), before = kept(kBefore);
    int segment = segments;
#pragma unroll 1
    while (true) {
      if (first >= segments) {
        most = class_above(smem, segments, most);
        if (most < 0) break;
        first = 0;
      }
      int const more_than = class_above(smem, segments, most);
      int const s = first + lane;
      int const rows =
          s < segments ? smem.segment_offsets[s + 1] - smem.segment_offsets[s] : INT_MAX;
      bool const belongs = rows > more_than && rows <= most;
      unsigned const here = __ballot_sync(arch::kAllLanes, belongs);
      int const ahead = before + __popc(here & ((1u << lane) - 1));
      unsigned const found = __ballot_sync(arch::kAllLanes, belongs && ahead == place);
      if (found != 0) {
        segment = first + __ffs(static_cast<int>(found)) - 1;
        break;
      }
      before += __popc(here);
      first += arch::kWarpThreads;
    }
    state_ = lane == kMost ? most : lane == kFirst ? first : before;
    return segment;
  }

 private:
  // Each of three lanes keeps one of these for all, as registers are few where a warp gathers, too: rows of the longest
  // segment of the class; the first of 32 segments that are looked at; how many segments stand before these.
  enum Kept : int { kMost, kFirst, kBefore };

  __device__ __forceinline__ int kept(Kept lane) const {
    return __shfl_sync(arch::kAllLanes, state_, lane);
  }
  // Segments of the class of at most `most` rows have more than this returns.
  __device__ __forceinline__ static int class_above(SharedStorage<kGemm> const& smem, int segments,
                                                    int most) {
    auto const rows = static_cast<float>(smem.segment_offsets[segments]);
    bool const is_last = static_cast<float>(most) * static_cast<float>(segments) <= 2 * rows ||
                         most <= 2 * kGemm.tile.k;
    return is_last ? -1 : most / 2;
  }

  int state_ = 0;  // Kept
};

}  // namespace tessera::cuda::gemm
