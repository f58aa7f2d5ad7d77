// SPDX-License-Identifier: Apache-2.0
// A tiles by index, copied by the 128 threads of the producer warpgroup with 16-byte cp.async into the swizzled layout
// that TMA would give. varlen-M, K-major: row i of the tile is gmem_a[index[row + i]], or gmem_a[row + i] without an
// index.
// It copies bytes. Where memory holds A in another element than stages do (Operand::stored), a specialisation decodes,
// as that of tests/emulator/e4m3_rows.cuh.
#pragma once

#include <cstdint>

#include "../../arch/cp_async.cuh"
#include "../../arch/warp.cuh"
#include "../params.hpp"
#include "../storage.cuh"
#include "../work_tile.hpp"
#include "gathered_stage.cuh"

namespace tessera::cuda::gemm {

// Thread t copies chunk t % 8 of rows t/8 + 16i: eight lanes cover one 128-byte line, and since
// (t/8 + 16i) & 7 does not depend on i, the swizzle is one XOR per thread for all rows.
template <GemmConfig kGemm>
class RowGather {
 public:
  static_assert(kGemm.a.stored == kGemm.a.element, "copies bytes");
  __device__ __forceinline__ explicit RowGather(GemmParams const& p)
      : gmem_index_(p.gmem_index),
        gmem_a_(static_cast<char const*>(p.gmem_a)),
        pitch_chunks_(static_cast<uint32_t>(p.a_pitch_chunks)) {
    int const thread = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    int const chunk = thread % kChunks;
    row_ = thread / kChunks;
    gmem_chunk_ = static_cast<char const*>(p.gmem_a) + chunk * 16;
    row_left_ = p.a_row_bytes - chunk * 16;
    smem_offset_ = row_ * 128 + ((chunk ^ (row_ & 7)) << 4);
  }

  // Requests the source rows of a tile; the values are first read by begin(). Rows past the
  // segment repeat its last one: they are computed and clipped at the store.
  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    TESSERA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      int const row = min(tile.row + row_ + i * kRowStep, tile.end - 1);
      ahead_[i] = gmem_index_ != nullptr ? gmem_index_[row] : row;
    }
  }

  __device__ __forceinline__ void begin() {
    if constexpr (kWholeRows) {  // registers are few
      gmem_ = gmem_a_ + arch::forgotten(threadIdx.x) % kChunks * 16;
    } else {
      left_ = row_left_;
      gmem_ = gmem_chunk_;
    }
    TESSERA_UNROLL
    for (int i = 0; i < kRowsPerThread; ++i) {
      source_[i] = static_cast<uint32_t>(ahead_[i]) * pitch_chunks_;
    }
  }

  // The next k_tile of the first `rows` rows, in units of 64; columns past the row's end become 0.
  __device__ __forceinline__ void copy(SharedStorage<kGemm>& smem, int stage, int rows) {
    uint32_t const smem_a = arch::shared_address(smem.a[stage]) + smem_offset_;
    int const bytes = kWholeRows || left_ > 0 ? 16 : 0;
    TESSERA_UNROLL
    for (int m = 0; m < kGemm.tile.m / kSubtileM; ++m) {
      if (m * kSubtileM < rows) {
        TESSERA_UNROLL
        for (int j = 0; j < kSubtileM / kRowStep; ++j) {
          int const i = m * (kSubtileM / kRowStep) + j;
          arch::cp_async_16(smem_a + i * kRowStep * 128, gmem_ + uint64_t{source_[i]} * 16, bytes);
        }
      }
    }
    arch::cp_async_arrive(GatheredStage<kGemm>::rows(smem, stage));
    if constexpr (!kWholeRows) left_ -= 128;
    gmem_ += 128;
  }

 private:
  static constexpr bool kWholeRows = kGemm.a.element == Element::kE4m3;  // rows end with a k_tile
  static constexpr int kChunks = 8;  // 16-byte chunks of a 128-byte row
  static constexpr int kRowStep = arch::kWarpgroupThreads / kChunks;
  static constexpr int kRowsPerThread = kGemm.tile.m / kRowStep;

  int const* gmem_index_;
  char const* gmem_a_;
  char const* gmem_chunk_;  // this thread's, of row 0
  char const* gmem_;  // its chunk in the next k_tile: an address takes one multiply-add from here
  uint32_t pitch_chunks_;  // row pitch in 16-byte units; T*pitch < 2^32 reaches 64 GB
  int row_;
  int row_left_;  // bytes of a row from this thread's first chunk on
  int left_;      // bytes of a row from its next chunk on
  uint32_t smem_offset_;
  int ahead_[kRowsPerThread];
  uint32_t source_[kRowsPerThread];  // first chunk of the row
};

}  // namespace tessera::cuda::gemm
