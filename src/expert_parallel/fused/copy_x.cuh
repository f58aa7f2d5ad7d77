// SPDX-License-Identifier: Apache-2.0
// copy_x copies rows of the caller's x into this rank's window, where all ranks read them. Each CTA has its slice of
// the tokens, and one of its warps copies it while the others route: from the caller's memory through the stages of the
// ring, which are free until the roles begin, to the window.
// Schedule  a chunk per lane and batch. Two batches land while the CTA routes; then one lands while the other is stored
// Barriers  landed[batch % 2], once per batch; store groups of each lane
// Ends      all is written before the CTA is counted (route.cuh), so who has awaited a rank's list may read its x
#pragma once

#include "cuda/arch/bulk_copy.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/warp.cuh"
#include "expert_parallel/exchange/peers.cuh"

namespace tessera::expert_parallel {

namespace arch = cuda::arch;

struct CopyXStorage {
  static constexpr int kChunkBytes = 2048;

  alignas(128) char batch[2][arch::kWarpThreads][kChunkBytes];
};
using CopyXBarriers = arch::Mbarrier[2];

class CopyX {
 public:
  // gmem_x null: the rows lie in the window.
  __device__ CopyX(ExchangeArguments const& p, char const* gmem_x, std::int64_t pitch_bytes,
                   CopyXStorage& smem, CopyXBarriers& landed)
      : smem_(smem),
        landed_(landed),
        from_(gmem_x),
        to_(own_window(p).place(p.window.x_row(0))),
        pitch_bytes_(pitch_bytes),
        slice_(token_slice(p.tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x))),
        row_bytes_(2 * p.shape.hidden),
        chunks_of_row_((row_bytes_ + CopyXStorage::kChunkBytes - 1) / CopyXStorage::kChunkBytes),
        chunks_((slice_.end - slice_.begin) * chunks_of_row_) {}

  // One converged warp calls the following functions.
  __device__ void begin() {
    if (from_ == nullptr) return;
    if (arch::lane_idx() == 0) {
      for (arch::Mbarrier& landed : landed_) arch::mbarrier_init(&landed, arch::kWarpThreads);
      arch::fence_proxy_async_shared();
    }
    __syncwarp();
    load(0);
    load(1);
  }
  __device__ void finish() {
    if (from_ == nullptr) return;
    for (int batch = 0; batch * arch::kWarpThreads < chunks_; ++batch) {
      arch::mbarrier_wait(&landed_[batch % 2], batch / 2 & 1);
      Chunk const chunk = of_lane(batch);
      if (chunk.bytes > 0) arch::bulk_store(chunk.to, chunk.smem, chunk.bytes);
      arch::tma_store_commit();
      if (batch == 0) continue;
      arch::tma_store_wait_read<1>();  // the previous batch's chunk of this lane has left its place
      load(batch + 1);
    }
    arch::bulk_store_wait<0>();
    __syncwarp();
  }

 private:
  struct Chunk {
    char const* from = nullptr;
    char* to = nullptr;
    char* smem = nullptr;
    std::uint32_t bytes = 0;
  };
  __device__ Chunk of_lane(int batch) {
    int const i = batch * arch::kWarpThreads + arch::lane_idx();
    if (i >= chunks_) return {};
    int const row = i / chunks_of_row_;
    int const at = (i - row * chunks_of_row_) * CopyXStorage::kChunkBytes;
    std::int64_t const token = slice_.begin + row;
    return {from_ + token * pitch_bytes_ + at, to_ + token * row_bytes_ + at,
            smem_.batch[batch % 2][arch::lane_idx()],
            static_cast<std::uint32_t>(min(row_bytes_ - at, CopyXStorage::kChunkBytes))};
  }
  // Loads nothing of a batch behind the last one.
  __device__ void load(int batch) {
    arch::Mbarrier* const landed = &landed_[batch % 2];
    Chunk const chunk = of_lane(batch);
    arch::mbarrier_arrive_expect_tx(landed, chunk.bytes);
    if (chunk.bytes > 0) arch::bulk_load(chunk.smem, chunk.from, chunk.bytes, landed);
  }

  CopyXStorage& smem_;
  CopyXBarriers& landed_;
  char const* from_;
  char* to_;
  std::int64_t pitch_bytes_;
  TokenSlice slice_;
  int row_bytes_, chunks_of_row_, chunks_;
};

}  // namespace tessera::expert_parallel
