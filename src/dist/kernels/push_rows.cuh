// SPDX-License-Identifier: Apache-2.0
// The epilogue of a down task: every warp sends the 16 rows of its accumulators to the slots of their pairs, 8
// rows of 256 columns at a time through shared memory, 512 bytes by one store of the warp. Bulk copies of rows were
// 4% slower (docs/notebook/2026-11-21-two-gpus.md).
#pragma once

#include "dist/kernels/forward_pass.cuh"

namespace tessera::dist {

// Of one warp. Warps share nothing but the memory of the slabs, which up tasks use too.
class Push {
 public:
  __device__ Push(Pass const& pass, int consumer) : pass_(pass), consumer_(consumer) {
    int const lane = arch::lane_idx();
    warp_ = arch::warp_idx() % 4;
    matrix_row_ = arch::shared_address(row(lane % 8)) + lane / 8 * 16;
  }

  // Where row `lane` of the warp's 16 goes, known before the tile is multiplied out.
  __device__ char* destination(block::WorkTile const& tile, int first) const {
    ExchangeArguments const& p = pass_.p.exchange;
    int const row_of_tile = first + 16 * warp_ + arch::lane_idx();
    if (arch::lane_idx() >= 16 || row_of_tile >= tile.rows) return nullptr;
    std::int64_t const pool_row = std::int64_t{tile.row} + row_of_tile;
    uint2 const origin =
        *reinterpret_cast<uint2 const*>(p.gmem_local + p.local.row_origin + 8 * pool_row);
    auto const top_k = static_cast<std::uint32_t>(p.shape.max_top_k);
    return p.windows[origin.y] +
           p.window.slot(origin.x / top_k, static_cast<std::int32_t>(origin.x % top_k));
  }

  __device__ void store(block::Accumulators<kPlain>& acc, block::WorkTile const& tile, char* to) {
    int const lane = arch::lane_idx();
    int const column = tile.n_tile * kTileColumns;
    int const columns = min(pass_.shape().hidden - column, kTileColumns);
    // The warpgroup's slabs, if its last task was up: their reader has told [complete].
    arch::named_barrier_sync(block::kBarrierSlabs + consumer_, arch::kWarpgroupThreads);
    TESSERA_UNROLL
    for (int lower = 0; lower < 2; ++lower) {
      __syncwarp();  // the upper 8 rows have been read
      TESSERA_UNROLL
      for (int j = 0; j < kTileColumns / 8; j += 4) {
        auto const pair = [&](int chunk) {
          float const* const value = &acc[chunk / 16][4 * (chunk % 16) + 2 * lower];
          return arch::pack_bf16(value[0], value[1]);
        };
        arch::stmatrix_x4(matrix_row_ + j * 16, pair(j), pair(j + 1), pair(j + 2), pair(j + 3));
      }
      __syncwarp();
      TESSERA_UNROLL
      for (int r = 0; r < 8; ++r) {
        auto* const row_to = reinterpret_cast<char*>(
            __shfl_sync(block::kAllLanes, reinterpret_cast<unsigned long long>(to), 8 * lower + r));
        uint4 const bits = *reinterpret_cast<uint4 const*>(row(r) + 16 * lane);
        if (row_to != nullptr && 8 * lane < columns) {
          *reinterpret_cast<uint4*>(row_to + 2 * column + 16 * lane) = bits;
        }
      }
    }
  }

 private:
  // Of the 8 rows in shared memory.
  __device__ unsigned char* row(int r) const {
    int const place = 8 * warp_ + r;
    auto* const slabs = reinterpret_cast<unsigned char*>(&pass_.smem.gemm.slabs[consumer_][0][0]);
    return place < kRowsInSlabs ? slabs + place * kPushPitch : pass_.smem.last_row[consumer_];
  }

  Pass const& pass_;
  int consumer_, warp_;
  std::uint32_t matrix_row_;
};

}  // namespace tessera::dist
