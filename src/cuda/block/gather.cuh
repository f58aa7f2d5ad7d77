// SPDX-License-Identifier: Apache-2.0
// A tile rows by index: row i of the tile is gmem_a[index[row + i]], fetched by the 128 threads of
// the producer warpgroup into the swizzled K-major layout of a box of consecutive rows.
//
// CpAsyncGather: 16 bytes per copy. Thread t copies chunk t % 8 of rows t/8 + 16i: eight lanes cover one 128-byte line, and since
// (t/8 + 16i) & 7 does not depend on i, the swizzle is one XOR per thread for all rows.
//
// TmaGather: a row per copy, as a TMA box of 64 x 1. The hardware swizzles by shared-memory address,
// so single rows land as they would in a larger box. Every lane issues the copies of its own rows.
#pragma once

#include <cstdint>

#include "../arch/cp_async.cuh"
#include "../arch/tma.cuh"
#include "gemm_params.hpp"
#include "tile_scheduler.cuh"

namespace tessera::cuda::block {

template <GemmConfig kGemm>
class CpAsyncGather {
 public:
  __device__ __forceinline__ explicit CpAsyncGather(GemmParams const& p)
      : gmem_a_(static_cast<char const*>(p.gmem_a)),
        gmem_index_(p.gmem_index),
        pitch_chunks_(static_cast<uint32_t>(p.a_pitch_chunks)) {
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

  // One k_tile of the first `rows` rows, in units of 64.
  __device__ __forceinline__ void copy(SharedStorage<kGemm>& smem_storage, int stage, int k_tile,
                                       int rows) const {
    uint32_t const smem = arch::shared_address(smem_storage.a[stage]) + smem_offset_;
    char const* const gmem = gmem_a_ + int64_t{k_tile} * 128;
    TESSERA_UNROLL
    for (int m = 0; m < kGemm.tile.m / kSubtileM; ++m) {
      if (m * kSubtileM < rows) {
        TESSERA_UNROLL
        for (int j = 0; j < kSubtileM / kRowStep; ++j) {
          int const i = m * (kSubtileM / kRowStep) + j;
          arch::cp_async_16(smem + i * kRowStep * 128, gmem + uint64_t{source_[i]} * 16);
        }
      }
    }
    arch::cp_async_arrive(&smem_storage.full[stage]);
  }

  // Bytes announced to full[] besides B's: these copies report by arrival.
  __device__ __forceinline__ static uint32_t expected_bytes(int) { return 0; }

 private:
  static constexpr int kChunks = 8;  // 16-byte chunks of a 128-byte row
  static constexpr int kRowStep = arch::kWarpgroupThreads / kChunks;
  static constexpr int kRowsPerThread = kGemm.tile.m / kRowStep;

  char const* gmem_a_;
  int const* gmem_index_;
  uint32_t pitch_chunks_;  // row pitch in 16-byte units; T*pitch < 2^32 reaches 64 GB
  int row_;
  uint32_t chunk_;
  uint32_t smem_offset_;
  int ahead_[kRowsPerThread];
  uint32_t source_[kRowsPerThread];
};

// Warp w takes rows 16w..16w+15 of every 64; copy q of its lanes is row q % 16 of part q / 16.
template <GemmConfig kGemm>
class TmaGather {
 public:
  __device__ __forceinline__ explicit TmaGather(GemmParams const& p)
      : map_(&p.a), gmem_index_(p.gmem_index) {}

  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    TESSERA_UNROLL
    for (int i = 0; i < kRowsPerLane; ++i) {
      ahead_[i] = gmem_index_[min(tile.row + tile_row(i), tile.end - 1)];
    }
  }

  __device__ __forceinline__ void begin() {
    TESSERA_UNROLL
    for (int i = 0; i < kRowsPerLane; ++i) source_[i] = ahead_[i];
  }

  __device__ __forceinline__ void copy(SharedStorage<kGemm>& smem, int stage, int k_tile,
                                       int rows) const {
    TESSERA_UNROLL
    for (int i = 0; i < kRowsPerLane; ++i) {
      int const row = tile_row(i);
      if (row < kGemm.tile.m && row / kSubtileM * kSubtileM < rows) {
        arch::tma_load(&smem.a[stage][row * kGemm.tile.k], map_, &smem.full[stage],
                       k_tile * kGemm.tile.k, source_[i]);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ static uint32_t expected_bytes(int rows) {
    return (rows + kSubtileM - 1) / kSubtileM * kGemm.a_subtile_bytes();
  }

 private:
  static constexpr int kRowsPerLane = (kGemm.tile.m + 127) / 128;

  __device__ __forceinline__ static int tile_row(int i) {
    int const copy = arch::lane_idx() + i * arch::kWarpThreads;
    int const warp = static_cast<int>(threadIdx.x) / arch::kWarpThreads % 4;
    return copy / 16 * kSubtileM + warp * 16 + copy % 16;
  }

  CUtensorMap const* map_;
  int const* gmem_index_;
  int ahead_[kRowsPerLane];
  int source_[kRowsPerLane];
};

}  // namespace tessera::cuda::block
