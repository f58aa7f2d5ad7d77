// SPDX-License-Identifier: Apache-2.0
// One lane brings rows from any GPU to one or more places of the pool, by bulk copies through a ring in shared memory:
// a row is loaded once, however many places it goes to. The ring is that of copy_rows.cuh.
#pragma once

#include <cstddef>

#include "dist/kernels/copy_rows.cuh"
#include "dist/protocol.hpp"

namespace tessera::dist {

constexpr int kRowsHeld = kChunks + 1;  // those that chunks can belong to, and the next

// A row of the pool, and how many zero rows that follow it are counted with it.
struct PoolTarget {
  std::uint32_t packed;
  __device__ static PoolTarget of(std::int32_t row, std::int32_t pad) {
    return {static_cast<std::uint32_t>(row) | static_cast<std::uint32_t>(pad) << kPoolRowBits};
  }
  __device__ std::int32_t row() const {
    return static_cast<std::int32_t>(packed & ((1u << kPoolRowBits) - 1));
  }
  __device__ std::uint32_t pad() const { return packed >> kPoolRowBits; }
};

template <int kMostTargets>
struct SpreadRing {
  alignas(128) char chunk[kChunks][kChunkBytes];  // chunk and full lie as in a CopyRing
  arch::Mbarrier full[kChunks];
  PoolTarget target[kRowsHeld][kMostTargets];
  int targets[kRowsHeld];
};
static_assert(offsetof(SpreadRing<1>, full) == offsetof(CopyRing, full));

// Pool: to(row) is its address; written() orders what was written before what follows, arrived(target) tells of it.
template <int kMostTargets, class Pool>
class RowSpread {
 public:
  __device__ RowSpread(SpreadRing<kMostTargets>& ring, int row_bytes, Pool const& pool)
      : ring_(ring),
        pool_(pool),
        row_bytes_(row_bytes),
        chunks_of_row_((row_bytes + kChunkBytes - 1) / kChunkBytes) {}

  // Where the targets of the next row are put before load().
  __device__ PoolTarget* targets(int row) const { return ring_.target[row % kRowsHeld]; }

  // The next row, for `targets` places.
  __device__ void load(char const* from, int targets) {
    ring_.targets[loaded_rows_++ % kRowsHeld] = targets;
    for (int c = 0; c < chunks_of_row_; ++c) {
      if (loaded_ >= kChunks) make_room();
      int const slot = loaded_++ % kChunks;
      int const at = c * kChunkBytes;
      auto const bytes = static_cast<std::uint32_t>(min(row_bytes_ - at, kChunkBytes));
      arch::mbarrier_arrive_expect_tx(&ring_.full[slot], bytes);
      arch::bulk_load(ring_.chunk[slot], from + at, bytes, &ring_.full[slot]);
    }
  }
  // On return all rows have been written and told.
  __device__ void finish() {
    while (stored_.number < loaded_) store();
    arch::bulk_store_wait<0>();
    while (told_.number < stored_.number) tell();
  }

 private:
  struct Chunk {
    int number = 0, row = 0, in_row = 0;
    __device__ void advance(int chunks_of_row) {
      ++number;
      if (++in_row == chunks_of_row) {
        in_row = 0;
        ++row;
      }
    }
  };

  // For the next chunk: the oldest has been written.
  __device__ void make_room() {
    while (told_.number + kChunks <= loaded_) {
      if (stored_.number < loaded_) store();
      arch::bulk_store_wait<1>();
      while (told_.number + 1 < stored_.number) tell();
    }
  }
  __device__ void store() {
    int const slot = stored_.number % kChunks;
    int const at = stored_.in_row * kChunkBytes;
    auto const bytes = static_cast<std::uint32_t>(min(row_bytes_ - at, kChunkBytes));
    arch::mbarrier_wait(&ring_.full[slot], (stored_.number / kChunks) & 1);
    int const row = stored_.row % kRowsHeld;
    for (int i = 0; i < ring_.targets[row]; ++i) {
      arch::bulk_store(pool_.to(ring_.target[row][i].row()) + at, ring_.chunk[slot], bytes);
    }
    arch::tma_store_commit();
    stored_.advance(chunks_of_row_);
  }
  __device__ void tell() {
    if (told_.in_row + 1 == chunks_of_row_) {
      int const row = told_.row % kRowsHeld;
      pool_.written();
      for (int i = 0; i < ring_.targets[row]; ++i) pool_.arrived(ring_.target[row][i]);
    }
    told_.advance(chunks_of_row_);
  }

  SpreadRing<kMostTargets>& ring_;
  Pool const& pool_;
  int row_bytes_, chunks_of_row_;
  int loaded_ = 0, loaded_rows_ = 0;
  Chunk stored_, told_;
};

}  // namespace tessera::dist
