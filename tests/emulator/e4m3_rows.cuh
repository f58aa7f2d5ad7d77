// SPDX-License-Identifier: Apache-2.0
// An A that memory holds in e4m3 and stages in bf16, as an example of an operand that is decoded on load: threads that
// gather read eight elements and write sixteen bytes, where those of gemm/produce/gather_rows.cuh copy sixteen bytes.
#pragma once

#include "core/fp8.hpp"
#include "cuda/gemm/produce/gather_rows.cuh"

namespace tessera::core {

// For plain twins.
__device__ inline float widen(E4m3 code) { return to_fp32(code); }

}  // namespace tessera::core

namespace tessera::cuda::gemm {

template <GemmConfig kGemm>
  requires(kGemm.a.stored == Element::kE4m3 && kGemm.a.element == Element::kBf16)
class RowGather<kGemm> {
 public:
  __device__ __forceinline__ explicit RowGather(GemmParams const& p) : p_(p) {
    int const thread = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    chunk_ = thread % kChunks;
    row_ = thread / kChunks;
  }

  __device__ __forceinline__ void prefetch(WorkTile const& tile) {
    for (int i = 0; i < kRowsPerThread; ++i) {
      int const row = min(tile.row + row_ + i * kRowStep, tile.end - 1);
      ahead_[i] = p_.gmem_index != nullptr ? p_.gmem_index[row] : row;
    }
  }

  __device__ __forceinline__ void begin() {
    column_ = chunk_ * kElements;
    for (int i = 0; i < kRowsPerThread; ++i) source_[i] = ahead_[i];
  }

  __device__ __forceinline__ void copy(SharedStorage<kGemm>& smem, int stage, int rows) {
    for (int i = 0; i < kRowsPerThread && i * kRowStep < rows; ++i) {
      int const row = row_ + i * kRowStep;
      auto const* const gmem = static_cast<core::E4m3 const*>(p_.gmem_a) +
                               int64_t{source_[i]} * p_.a_pitch_chunks * 16 + column_;
      uint32_t packed[kElements / 2] = {};
      for (int c = 0; c < kElements && column_ + c < p_.a_row_bytes; c += 2) {
        packed[c / 2] = arch::pack_bf16(core::to_fp32(gmem[c]), core::to_fp32(gmem[c + 1]));
      }
      uint32_t const smem_chunk =
          arch::shared_address(smem.a[stage]) + row * kStageRowBytes + ((chunk_ ^ (row & 7)) << 4);
      arch::store_shared_8(smem_chunk, {packed[0], packed[1]});
      arch::store_shared_8(smem_chunk + 8, {packed[2], packed[3]});
    }
    arch::mbarrier_arrive(&smem.full[stage]);
    column_ += kGemm.tile.k;
  }

 private:
  static constexpr int kChunks = kStageRowBytes / 16;
  static constexpr int kElements = kGemm.tile.k / kChunks;  // of a chunk
  static constexpr int kRowStep = arch::kWarpgroupThreads / kChunks;
  static constexpr int kRowsPerThread = kGemm.tile.m / kRowStep;

  GemmParams const& p_;
  int chunk_, row_;
  int column_ = 0;  // this thread's next
  int ahead_[kRowsPerThread];
  int source_[kRowsPerThread];
};

}  // namespace tessera::cuda::gemm
