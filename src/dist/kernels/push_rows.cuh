// SPDX-License-Identifier: Apache-2.0
// The epilogue of a down task: every warp sends the 16 rows of its accumulators to the slots of their pairs, 8
// rows of 256 columns at a time through a lent stage, 512 bytes by one store of the warp. Bulk copies of rows were
// 4% slower (docs/notebook/2026-11-21-two-gpus.md).
#pragma once

#include "dist/kernels/forward_pass.cuh"

namespace tessera::dist {

// Of one warp. Warps share nothing but the stage, which every warp gives back by itself.
class Push {
 public:
  __device__ Push(Pass const& pass, block::BorrowedStages<kPlain>& stages, int consumer)
      : pass_(pass), stages_(stages) {
    int const lane = arch::lane_idx();
    warp_ = arch::warp_idx() % 4;
    place_ = (4 * consumer + warp_) * 8 * kRowBytes;
    matrix_row_ = place_ + lane % 8 * kRowBytes;
    matrix_chunk_ = lane / 8 ^ lane % 8;
  }

  // Where row `lane` of the warp's 16 goes, known before the tile is multiplied out.
  __device__ char* destination(block::WorkTile const& tile, int first) const {
    ExchangeArguments const& p = pass_.p.exchange;
    int const row_of_tile = first + 16 * warp_ + arch::lane_idx();
    if (arch::lane_idx() >= 16 || row_of_tile >= tile.rows) return nullptr;
    std::int64_t const pool_row = std::int64_t{tile.row} + row_of_tile;
    uint2 const origin = *row_origin(p, pool_row);
    auto const top_k = static_cast<std::uint32_t>(p.shape.max_top_k);
    return p.windows[origin.y] +
           p.window.slot(origin.x / top_k, static_cast<std::int32_t>(origin.x % top_k));
  }

  __device__ void store(block::Accumulators<kPlain>& acc, block::WorkTile const& tile, char* to,
                        block::PipelineState<kPlain>& state) {
    int const lane = arch::lane_idx();
    int const column = tile.n_tile * kTileColumns;
    int const columns = min(pass_.shape().hidden - column, kTileColumns);
    int const stage = stages_.take(state);
    auto* const rows = reinterpret_cast<unsigned char*>(pass_.smem.gemm.b[stage]);
    std::uint32_t const matrix_row = arch::shared_address(rows) + matrix_row_;
    TESSERA_UNROLL
    for (int lower = 0; lower < 2; ++lower) {
      __syncwarp();  // the upper 8 rows have been read
      TESSERA_UNROLL
      for (int j = 0; j < kTileColumns / 8; j += 4) {
        auto const pair = [&](int chunk) {
          float const* const value = &acc[chunk / 16][4 * (chunk % 16) + 2 * lower];
          return arch::pack_bf16(value[0], value[1]);
        };
        arch::stmatrix_x4(matrix_row + ((j ^ matrix_chunk_) << 4), pair(j), pair(j + 1),
                          pair(j + 2), pair(j + 3));
      }
      __syncwarp();
      TESSERA_UNROLL
      for (int r = 0; r < 8; ++r) {
        auto* const row_to = reinterpret_cast<char*>(
            __shfl_sync(arch::kAllLanes, reinterpret_cast<unsigned long long>(to), 8 * lower + r));
        uint4 const bits =
            *reinterpret_cast<uint4 const*>(rows + place_ + r * kRowBytes + ((lane ^ r) << 4));
        if (row_to != nullptr && 8 * lane < columns) {
          *reinterpret_cast<uint4*>(row_to + 2 * column + 16 * lane) = bits;
        }
      }
    }
    arch::fence_proxy_async_shared();  // TMA writes there next
    __syncwarp();
    block::release_stage<kPlain>(pass_.smem.gemm, stage);
  }

 private:
  static constexpr int kRowBytes = 2 * kTileColumns;
  static_assert(kConsumerWarps * 8 * kRowBytes <= kPlain.b_tile_bytes());

  Pass const& pass_;
  block::BorrowedStages<kPlain>& stages_;
  int warp_, place_;
  // Chunk c, of 16 bytes, of row r of the 8 lies in place c ^ r, so that a matrix of stmatrix is spread over all banks.
  std::uint32_t matrix_row_;
  int matrix_chunk_;
};

}  // namespace tessera::dist
