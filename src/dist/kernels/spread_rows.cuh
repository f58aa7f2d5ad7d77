// SPDX-License-Identifier: Apache-2.0
// One warp brings rows from any GPU to one or more places of the pool, by bulk copies through a ring in shared memory:
// a row is loaded once, however many places it goes to. A chunk of a row is, one after the other,
//   loaded   its bulk load into the ring is under way
//   stored   it is there, and its stores to all places of the row are under way
//   freed    they have read it: the next chunk may be loaded where it lies
//   told     they are written: a row whose last chunk this is counts as arrived, one fence for all rows told together
// The warp waits for a chunk that is not there only after it has freed and told what it can.
#pragma once

#include <cstddef>

#include "cuda/arch/warp.cuh"
#include "dist/kernels/copy_rows.cuh"

namespace tessera::dist {

constexpr int kPlacesHeld = 128;  // of the rows that are not told yet
constexpr int kRowsHeld = 32;

struct SpreadRing {
  alignas(128) char chunk[kChunks][kChunkBytes];  // chunk and full lie as in a CopyRing
  arch::Mbarrier full[kChunks];
  std::int32_t place[kPlacesHeld];  // rows of the pool
  std::uint8_t places[kRowsHeld];   // of each row
};

static_assert(offsetof(SpreadRing, full) == offsetof(CopyRing, full));

// Pool: to(row) is its address; written() orders what was written before what follows, arrived(row) tells of it.
template <class Pool>
class RowSpread {
 public:
  __device__ RowSpread(SpreadRing& ring, int row_bytes, Pool const& pool)
      : ring_(ring),
        pool_(pool),
        lane_(arch::lane_idx()),
        row_bytes_(row_bytes),
        chunks_of_row_((row_bytes + kChunkBytes - 1) / kChunkBytes) {}

  // All lanes: the next row goes to the `row` of each of `lanes`.
  __device__ void bring(char const* from, unsigned lanes, std::int32_t row) {
    int const places = __popc(lanes);
    if (lane_ == 0) hold(places);
    __syncwarp();
    if ((lanes >> lane_ & 1) != 0) {
      int const before = __popc(lanes & ((1u << lane_) - 1));
      ring_.place[(places_ + before) % kPlacesHeld] = row;
    }
    if (lane_ == 0) ring_.places[rows_ % kRowsHeld] = static_cast<std::uint8_t>(places);
    __syncwarp();
    places_ += places;
    ++rows_;
    if (lane_ == 0) load(from);
  }
  // On return all rows have been written and told.
  __device__ void finish() {
    if (lane_ != 0) return;
    while (stored_.number < loaded_) await_and_store();
    tell<0>();
  }

 private:
  static constexpr unsigned kMostUntold = 8,
                            kUnderWay = 4;  // chunks: told but for the latest when there are more

  struct Chunk {
    unsigned number = 0, row = 0, in_row = 0, place = 0;  // the first place of the row
  };
  __device__ void advance(Chunk& chunk) const {
    ++chunk.number;
    if (++chunk.in_row < chunks_of_row_) return;
    chunk.in_row = 0;
    chunk.place += ring_.places[chunk.row++ % kRowsHeld];
  }

  // Until the list has room for another row's places.
  __device__ void hold(int places) {
    while (places_ + places - told_.place > kPlacesHeld || rows_ - told_.row == kRowsHeld) {
      if (told_.number == stored_.number) await_and_store();
      tell<0>();
    }
  }
  __device__ void load(char const* from) {
    _Pragma("unroll 1") for (int at = 0; at < row_bytes_; at += kChunkBytes) {
      if (loaded_ - freed_ == kChunks) make_room();
      unsigned const slot = loaded_++ % kChunks;
      auto const bytes = static_cast<std::uint32_t>(min(row_bytes_ - at, kChunkBytes));
      arch::mbarrier_arrive_expect_tx(&ring_.full[slot], bytes);
      arch::bulk_load(ring_.chunk[slot], from + at, bytes, &ring_.full[slot]);
    }
  }
  // The ring is full. While one chunk is read, the next one is stored, if it is there.
  __device__ void make_room() {
    if (stored_.number == freed_) await_and_store();
    if (stored_.number < loaded_ && is_there()) {
      store();
      arch::tma_store_wait_read<1>();
      freed_ = stored_.number - 1;
    } else {
      arch::tma_store_wait_read<0>();
      freed_ = stored_.number;
    }
    if (stored_.number - told_.number > kMostUntold) tell<kUnderWay>();
  }
  __device__ bool is_there() const {
    return arch::mbarrier_test_wait(&ring_.full[stored_.number % kChunks],
                                    stored_.number / kChunks & 1);
  }
  __device__ void await_and_store() {
    if (!is_there()) tell<0>();
    arch::mbarrier_wait(&ring_.full[stored_.number % kChunks], stored_.number / kChunks & 1);
    store();
  }
  __device__ void store() {
    int const at = static_cast<int>(stored_.in_row) * kChunkBytes;
    auto const bytes = static_cast<std::uint32_t>(min(row_bytes_ - at, kChunkBytes));
    int const places = ring_.places[stored_.row % kRowsHeld];
    _Pragma("unroll 1") for (int i = 0; i < places; ++i) {
      arch::bulk_store(pool_.to(ring_.place[(stored_.place + i) % kPlacesHeld]) + at,
                       ring_.chunk[stored_.number % kChunks], bytes);
    }
    arch::tma_store_commit();
    advance(stored_);
  }
  // All stored chunks but the latest kPending.
  template <unsigned kPending>
  __device__ void tell() {
    if (stored_.number - told_.number <= kPending) return;
    arch::bulk_store_wait<kPending>();
    bool ordered = false;
    while (stored_.number - told_.number > kPending) {
      if (told_.in_row + 1 == chunks_of_row_) {
        if (!ordered) pool_.written();
        ordered = true;
        int const places = ring_.places[told_.row % kRowsHeld];
        _Pragma("unroll 1") for (int i = 0; i < places; ++i) {
          pool_.arrived(ring_.place[(told_.place + i) % kPlacesHeld]);
        }
      }
      advance(told_);
    }
  }

  SpreadRing& ring_;
  Pool const& pool_;
  int lane_, row_bytes_;
  unsigned chunks_of_row_;
  unsigned rows_ = 0, places_ = 0;   // brought
  unsigned loaded_ = 0, freed_ = 0;  // chunks, of lane 0, as is what follows
  Chunk stored_, told_;
};

}  // namespace tessera::dist
