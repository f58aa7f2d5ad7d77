// SPDX-License-Identifier: Apache-2.0
// A tiles by index, copied by the 128 threads of the producer warpgroup with 16-byte cp.async into the
// swizzled layouts that TMA would give.
//   RowGather    varlen-M, K-major: row i of the tile is gmem_a[index[row + i]], or gmem_a[row + i] without an index.
//   TokenGather  varlen-K, rows-major: k of the tile is columns [row, row + tile_m) of gmem_a[index[k]], or gmem_a[k].
#pragma once

#include <cstdint>

#include "../arch/cp_async.cuh"
#include "gemm_params.hpp"
#include "tile_scheduler.cuh"

namespace tessera::cuda::block {

// Thread t copies chunk t % 8 of rows t/8 + 16i: eight lanes cover one 128-byte line, and since
// (t/8 + 16i) & 7 does not depend on i, the swizzle is one XOR per thread for all rows.
template <GemmConfig kGemm>
class RowGather {
 public:
  __device__ __forceinline__ explicit RowGather(GemmParams const& p)
      : gmem_a_(static_cast<char const*>(p.gmem_a)),
        gmem_index_(p.gmem_index),
        pitch_chunks_(static_cast<uint32_t>(p.a_pitch_chunks)),
        row_bytes_(p.a_row_bytes) {
    uint32_t const thread = threadIdx.x % arch::kWarpgroupThreads;
    row_ = static_cast<int>(thread / kChunks);
    chunk_ = thread % kChunks;
    smem_offset_ = row_ * 128 + ((chunk_ ^ (row_ & 7)) << 4);
  }

  // Requests the source rows of a tile; the values are first touched by begin(). Rows past the
  // segment repeat its last one: they are computed and clipped at the store.
  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    TESSERA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      int const row = min(tile.row + row_ + i * kRowStep, tile.end - 1);
      ahead_[i] = gmem_index_ != nullptr ? gmem_index_[row] : row;
    }
  }

  __device__ __forceinline__ void begin() {
    TESSERA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      source_[i] = static_cast<uint32_t>(ahead_[i]) * pitch_chunks_ + chunk_;
    }
  }

  // One k_tile of the first `rows` rows, in units of 64; columns past the row's end become 0.
  __device__ __forceinline__ void copy(SharedStorage<kGemm>& smem, int stage, int k_tile,
                                       int rows) const {
    uint32_t const smem_a = arch::shared_address(smem.a[stage]) + smem_offset_;
    char const* const gmem = gmem_a_ + int64_t{k_tile} * 128;
    int const bytes = k_tile * 128 + static_cast<int>(chunk_) * 16 < row_bytes_ ? 16 : 0;
    TESSERA_UNROLL
    for (int m = 0; m < kGemm.tile.m / kSubtileM; ++m) {
      if (m * kSubtileM < rows) {
        TESSERA_UNROLL
        for (int j = 0; j < kSubtileM / kRowStep; ++j) {
          int const i = m * (kSubtileM / kRowStep) + j;
          arch::cp_async_16(smem_a + i * kRowStep * 128, gmem + uint64_t{source_[i]} * 16, bytes);
        }
      }
    }
    arch::cp_async_arrive(&smem.full[stage]);
  }

 private:
  static constexpr int kChunks = 8;  // 16-byte chunks of a 128-byte row
  static constexpr int kRowStep = arch::kWarpgroupThreads / kChunks;
  static constexpr int kRowsPerThread = kGemm.tile.m / kRowStep;

  char const* gmem_a_;
  int const* gmem_index_;
  uint32_t pitch_chunks_;  // row pitch in 16-byte units; T*pitch < 2^32 reaches 64 GB
  int row_bytes_;
  int row_;
  uint32_t chunk_;
  uint32_t smem_offset_;
  int ahead_[kRowsPerThread];
  uint32_t source_[kRowsPerThread];
};

// With c = tile_m/8 chunks in a token's share, thread t copies chunk t % c of tokens t/c + (128/c)i. A
// warp needs 16 tokens of a k_tile: lanes 0..15 load their indices, a k_tile ahead, and hand them round.
template <GemmConfig kGemm>
class TokenGather {
 public:
  __device__ __forceinline__ explicit TokenGather(GemmParams const& p)
      : gmem_a_(static_cast<char const*>(p.gmem_a)),
        gmem_index_(p.gmem_index),
        pitch_chunks_(static_cast<uint32_t>(p.a_pitch_chunks)),
        row_chunks_(p.a_row_bytes / 16) {
    int const thread = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    int const chunk = thread % kChunks;
    int const token = thread / kChunks;
    int const lane = arch::lane_idx();
    first_ = thread / arch::kWarpThreads * kWarpTokens + lane % kWarpTokens +
             lane / kWarpTokens % kTokensPerThread * kTokenStep;
    smem_offset_ =
        chunk / 8 * (kGemm.tile.k * 128) + token * 128 + ((chunk % 8 ^ (token & 7)) << 4);
    chunk_ = chunk;
  }

  // Requests the indices of a k_tile; they are first touched by the next copy().
  __device__ __forceinline__ void prefetch(WorkTile const& tile, int k_tile) {
    int const row = tile.begin + k_tile * kGemm.tile.k + first_;
    index_ = row >= tile.end ? -1 : gmem_index_ != nullptr ? gmem_index_[row] : row;
  }

  // The k_tile whose indices are `index`; tokens past the segment and columns past the row become 0.
  __device__ __forceinline__ void copy(SharedStorage<kGemm>& smem, int stage, int index,
                                       WorkTile const& tile) const {
    uint32_t const smem_a = arch::shared_address(smem.a[stage]) + smem_offset_;
    int const column_chunk = tile.row / 8 + chunk_;
    bool const exists = column_chunk < row_chunks_;
    TESSERA_UNROLL
    for (int i = 0; i < kTokensPerThread; ++i) {
      int const token = __shfl_sync(kAllLanes, index, kWarpTokens * i + arch::lane_idx() / kChunks);
      uint32_t const source = static_cast<uint32_t>(max(token, 0)) * pitch_chunks_ +
                              static_cast<uint32_t>(exists ? column_chunk : 0);
      arch::cp_async_16(smem_a + i * kTokenStep * 128, gmem_a_ + uint64_t{source} * 16,
                        exists && token >= 0 ? 16 : 0);
    }
    arch::cp_async_arrive(&smem.full[stage]);
  }

  __device__ __forceinline__ int index() const { return index_; }

 private:
  static constexpr int kChunks = kGemm.tile.m / 8;  // of a token's share
  static constexpr int kTokenStep = arch::kWarpgroupThreads / kChunks;
  static constexpr int kTokensPerThread = kGemm.tile.k / kTokenStep;
  static constexpr int kWarpTokens = arch::kWarpThreads / kChunks;
  static_assert(kTokenStep % 8 == 0 && kWarpTokens * kTokensPerThread == 16);

  char const* gmem_a_;
  int const* gmem_index_;
  uint32_t pitch_chunks_;
  int row_chunks_;  // 16-byte chunks of a row that exist
  int first_;       // of the tokens whose index this lane loads
  int chunk_;
  uint32_t smem_offset_;
  int index_ = -1;
};

}  // namespace tessera::cuda::block
