// SPDX-License-Identifier: Apache-2.0
// A tile rows by index: row i of the tile is gmem_a[index[row + i]], copied by the 128 threads of
// the producer warpgroup with 16-byte cp.async into the swizzled K-major layout that TMA would give.
//
// Thread t copies chunk t % 8 of rows t/8 + 16i: eight lanes cover one 128-byte line, and since
// (t/8 + 16i) & 7 does not depend on i, the swizzle is one XOR per thread for all rows.
#pragma once

#include <cstdint>

#include "../arch/cp_async.cuh"
#include "gemm_params.hpp"
#include "tile_scheduler.cuh"

namespace tessera::cuda::block {

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
      ahead_[i] = gmem_index_[min(tile.row + row_ + i * kRowStep, tile.end - 1)];
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

}  // namespace tessera::cuda::block
