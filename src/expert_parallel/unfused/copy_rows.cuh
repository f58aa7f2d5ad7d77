// SPDX-License-Identifier: Apache-2.0
// One lane moves rows from any GPU to any GPU by bulk copies through a ring in shared memory. Two warps per
// SM with 8 KB each in flight fill the link (lesson 15); a quarter more evens out
// the time until a chunk is there.
#pragma once

#include "cuda/arch/bulk_copy.cuh"
#include "cuda/arch/signal.cuh"
#include "cuda/arch/tma.cuh"

namespace tessera::expert_parallel {

namespace arch = cuda::arch;

constexpr int kChunkBytes = 2048;
constexpr int kChunks = 5;

struct CopyRing {
  alignas(128) char chunk[kChunks][kChunkBytes];
  arch::Mbarrier full[kChunks];
  char* destination[kChunks];
  std::uint32_t* counter[kChunks];  // null: the chunk does not end a row that is counted
  std::uint32_t bytes[kChunks];
};

struct RowCopy {
  char const* from;
  char* to;
  std::uint32_t* counter;  // of this GPU, or null: grows by 1 once the row has been written
};

// Called by one lane, once per kernel: the ring's barriers are fresh. next_row(i) for i in [0, rows), each
// once, ascending. On return all rows have been written.
template <class NextRow>
__device__ void copy_rows(CopyRing& ring, int rows, int row_bytes, NextRow next_row) {
  int const chunks_of_row = (row_bytes + kChunkBytes - 1) / kChunkBytes;
  int const chunks = rows * chunks_of_row;
  RowCopy row = {};
  int loaded_rows = 0, in_row = chunks_of_row;
  auto const load = [&](int q) {
    if (in_row == chunks_of_row) {
      row = next_row(loaded_rows++);
      in_row = 0;
    }
    int const slot = q % kChunks;
    int const at = in_row++ * kChunkBytes;
    std::uint32_t const bytes = static_cast<std::uint32_t>(min(row_bytes - at, kChunkBytes));
    ring.destination[slot] = row.to + at;
    ring.counter[slot] = in_row == chunks_of_row ? row.counter : nullptr;
    ring.bytes[slot] = bytes;
    arch::mbarrier_arrive_expect_tx(&ring.full[slot], bytes);
    arch::bulk_load(ring.chunk[slot], row.from + at, bytes, &ring.full[slot]);
  };
  auto const written = [&](int q) {
    int const slot = q % kChunks;
    if (ring.counter[slot] != nullptr) arch::add_release_gpu(ring.counter[slot], 1);
  };
  for (int q = 0; q < kChunks && q < chunks; ++q) load(q);
  for (int q = 0; q < chunks; ++q) {
    int const slot = q % kChunks;
    arch::mbarrier_wait(&ring.full[slot], (q / kChunks) & 1);
    arch::bulk_store(ring.destination[slot], ring.chunk[slot], ring.bytes[slot]);
    arch::tma_store_commit();
    if (q == 0) continue;
    arch::bulk_store_wait<1>();  // the chunk before is there
    written(q - 1);
    if (q - 1 + kChunks < chunks) load(q - 1 + kChunks);
  }
  arch::bulk_store_wait<0>();
  if (chunks > 0) written(chunks - 1);
}

}  // namespace tessera::expert_parallel
