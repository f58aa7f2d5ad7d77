// SPDX-License-Identifier: Apache-2.0
// A tiles by index, copied by the 128 threads of the producer warpgroup with 16-byte cp.async into the swizzled layout
// that TMA would give. varlen-K, rows-major: k of the tile is columns [row, row + tile_m) of gmem_a[index[k]], or of
// gmem_a[k].
#pragma once

#include <cstdint>

#include "../../arch/cp_async.cuh"
#include "../params.hpp"
#include "../storage.cuh"
#include "../work_tile.hpp"
#include "gathered_stage.cuh"

namespace tessera::cuda::gemm {

// With c = tile_m/8 chunks in a token's share, thread t copies chunk t % c of tokens t/c + (128/c)i. A
// warp needs 16 tokens of a k_tile: its lanes load the indices of two k_tiles, two ahead, and hand them round.
template <GemmConfig kGemm>
class TokenGather {
 public:
  static_assert(kGemm.a.stored == kGemm.a.element, "copies bytes");
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
             lane / kWarpTokens % kTokensPerThread * kTokenStep + lane / kIndexLanes * kGemm.tile.k;
    smem_offset_ =
        chunk / 8 * (kGemm.tile.k * 128) + token * 128 + ((chunk % 8 ^ (token & 7)) << 4);
    chunk_ = chunk;
  }

  // Requests the indices of a tile's first k_tiles.
  __device__ __forceinline__ void begin(WorkTile const& tile) {
    bool const all_columns = tile.row + kGemm.tile.m <= row_chunks_ * 8;
    whole_k_tiles_ = all_columns ? (tile.end - tile.begin) / kGemm.tile.k : 0;
    int const column_chunk = tile.row / 8 + chunk_;
    exists_ = column_chunk < row_chunks_;
    // Through a shuffle, as an address then takes one multiply-add from here: the compiler would keep the
    // sum's parts in different kinds of registers, and add them up for every copy.
    gmem_ = reinterpret_cast<char const*>(__shfl_sync(
        arch::kAllLanes, reinterpret_cast<uint64_t>(gmem_a_ + int64_t{column_chunk} * 16),
        arch::lane_idx()));
    prefetch(tile, 0);
  }

  // Works out the sources of a k_tile, before its stage is free, and requests the indices of those kIndexTiles later.
  __device__ __forceinline__ void prepare(WorkTile const& tile, int k_tile) {
    if (k_tile % kIndexTiles == 0) {
      index_ = next_;
      prefetch(tile, k_tile + kIndexTiles);
    }
    uint32_t const mine = index_ < 0 ? kNothing : static_cast<uint32_t>(index_) * pitch_chunks_;
    TESSERA_UNROLL
    for (int i = 0; i < kTokensPerThread; ++i) {
      source_[i] = __shfl_sync(
          arch::kAllLanes, mine,
          k_tile % kIndexTiles * kIndexLanes + kWarpTokens * i + arch::lane_idx() / kChunks);
    }
  }

  // Copies the k_tile that was prepared; tokens past the segment and columns past the row become 0. Whole k_tiles have
  // no such test: between the stage's release and its loads every instruction counts.
  __device__ __forceinline__ void copy(SharedStorage<kGemm>& smem, int stage, int k_tile) const {
    if (k_tile < whole_k_tiles_) {
      copy_each(smem, stage, [](uint32_t) { return true; });
    } else {
      copy_each(smem, stage, [&](uint32_t source) { return exists_ && source != kNothing; });
    }
    arch::cp_async_arrive(GatheredStage<kGemm>::rows(smem, stage));
  }

 private:
  static constexpr int kChunks = kGemm.tile.m / 8;  // of a token's share
  static constexpr int kTokenStep = arch::kWarpgroupThreads / kChunks;
  static constexpr int kTokensPerThread = kGemm.tile.k / kTokenStep;
  static constexpr int kWarpTokens = arch::kWarpThreads / kChunks;
  static constexpr int kIndexLanes = kWarpTokens * kTokensPerThread;  // a k_tile's tokens of a warp
  static_assert(kTokenStep % 8 == 0 && kIndexLanes == 16);
  // k_tiles whose indices a warp loads at once. An index seems to arrive only after the rows that the SM requested
  // before it; two k_tiles ahead no warp waits for it. bench/results/archive/h200/2026-11-23-wgrad-index-ahead.json,
  // docs/notebook/2026-11-23-main-grad-pace.md
  static constexpr int kIndexTiles = 2;
  static constexpr uint32_t kNothing = 0xffffffff;  // nothing is read

  template <class Exists>
  __device__ __forceinline__ void copy_each(SharedStorage<kGemm>& smem, int stage,
                                            Exists exists) const {
    uint32_t const smem_a = arch::shared_address(smem.a[stage]) + smem_offset_;
    TESSERA_UNROLL
    for (int i = 0; i < kTokensPerThread; ++i) {
      arch::cp_async_16(smem_a + i * kTokenStep * 128, gmem_ + uint64_t{source_[i]} * 16,
                        exists(source_[i]) ? 16 : 0);
    }
  }

  // They are first read by the prepare() that needs them.
  __device__ __forceinline__ void prefetch(WorkTile const& tile, int k_tile) {
    int const row = tile.begin + k_tile * kGemm.tile.k + first_;
    next_ = row >= tile.end ? -1 : gmem_index_ != nullptr ? gmem_index_[row] : row;
  }

  char const* gmem_a_;
  char const* gmem_ = nullptr;  // this thread's chunk of token 0
  int const* gmem_index_;
  uint32_t pitch_chunks_;
  int row_chunks_;  // 16-byte chunks of a row that exist
  int first_;       // of the tokens whose index this lane loads
  int chunk_;
  uint32_t smem_offset_;
  bool exists_ = false;                // its chunk
  int whole_k_tiles_ = 0;              // of the tile: all of their tokens and columns exist
  int index_ = -1;                     // of k_tiles under way
  int next_ = -1;                      // of those after them
  uint32_t source_[kTokensPerThread];  // first chunk of the token
};

}  // namespace tessera::cuda::gemm
