// SPDX-License-Identifier: Apache-2.0
// Kernels that bring rows to their owners have this in common: warps that pull them out of the windows of all ranks,
// and the tables of a pass.
//   pull     warps load rows by bulk copies, row i by warp i mod warps, and store each for all of its token's choices
//            here, a lane for each; or each token once, for GEMMs that gather rows
#pragma once

#include "cuda/arch/bulk_copy.cuh"
#include "cuda/arch/load_global.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "cuda/arch/tma.cuh"
#include "expert_parallel/exchange/exchange.hpp"
#include "expert_parallel/exchange/route.cuh"
#include "expert_parallel/unfused/copy_rows.cuh"

namespace tessera::expert_parallel {

// Chunks of rows on their way through shared memory; as of CopyRing, 10 KB a warp.
struct Ring {
  alignas(128) char chunk[kChunks][kChunkBytes];
  arch::Mbarrier full[kChunks];
};

// Copies `all` pieces of 16 bytes, kAtOnce of a thread's in flight. worker of workers: this thread. from(i) is the
// address of the i-th; to(i, value) stores it.
template <class From, class To>
__device__ void copy_pieces(std::int64_t all, std::int64_t worker, std::int64_t workers, From from,
                            To to) {
  constexpr int kAtOnce = 4;
  for (std::int64_t begin = worker; begin < all; begin += kAtOnce * workers) {
    uint4 values[kAtOnce];
    TESSERA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      std::int64_t const piece = begin + i * workers;
      values[i] = arch::load_streaming_16(from(min(piece, all - 1)), piece < all);
    }
    TESSERA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i * workers < all) to(begin + i * workers, values[i]);
    }
  }
}

// The address of a piece of the caller's rows, which have `pieces_of_row` each.
__device__ inline char const* piece_of(CallerRows const& rows, int pieces_of_row,
                                       std::int64_t piece) {
  std::uint32_t const number = static_cast<std::uint32_t>(piece);
  std::uint32_t const row = number / static_cast<std::uint32_t>(pieces_of_row);
  std::uint32_t const column = number - row * static_cast<std::uint32_t>(pieces_of_row);
  return rows.gmem + row * rows.pitch + std::int64_t{16} * column;
}

// True for one thread, of the last of `ctas` CTAs to come, once what these have stored may be read by bulk copies. All
// threads call it. Before it signals other GPUs, that thread fences.
__device__ inline bool all_have_copied(ExchangeArguments const& exchange, std::int64_t word,
                                       int ctas) {
  arch::fence_proxy_async_global();
  __syncthreads();
  if (threadIdx.x != 0) return false;
  std::uint32_t const before = arch::count_acq_rel_gpu(word_of(exchange.gmem_local, word), 1);
  return before + 1 == static_cast<std::uint32_t>(ctas);
}

// Says whose rows a warp pulls, and which of them: rows i with i mod `workers` = worker.
enum class Sources : std::uint8_t { all, own, peers };
struct Share {
  Sources sources;
  int worker, workers;
};

// A rank's own tokens need none of the link: where each comes once, warps of their own pull them meanwhile.
// ctas: those that pull, the first ones.
template <int kWarps>
__device__ Share share_of(DispatchArguments const& p, int warp, int ctas) {
  constexpr int kOwnWarps = kWarps / 4;
  int const cta = static_cast<int>(blockIdx.x);
  if (!p.gathered || p.exchange.shape.ranks == 1) {
    return {Sources::all, cta * kWarps + warp, ctas * kWarps};
  }
  if (warp < kOwnWarps) return {Sources::own, cta * kOwnWarps + warp, ctas * kOwnWarps};
  constexpr int kPeerWarps = kWarps - kOwnWarps;
  return {Sources::peers, cta * kPeerWarps + warp - kOwnWarps, ctas * kPeerWarps};
}

// Those rows that begin tokens' lists, among rows i of a warp, in ascending order. By a converged warp.
class FirstRows {
 public:
  __device__ FirstRows(DispatchArguments const& p, Share const& share, int rows)
      : gmem_origins_(p.tables.gmem_origins),
        rank_(static_cast<std::uint32_t>(p.exchange.rank)),
        sources_(share.sources),
        worker_(share.worker),
        workers_(share.workers),
        rows_(rows) {}

  // To the next one; false: there is none.
  __device__ bool advance() {
    while (left_ == 0) {
      begin_ = worker_ + read_ * workers_;
      if (begin_ >= rows_) return false;
      read_ += arch::kWarpThreads;
      std::int64_t const row = begin_ + std::int64_t{arch::lane_idx()} * workers_;
      own_ = row < rows_ ? __ldg(reinterpret_cast<uint4 const*>(gmem_origins_ + row))
                         : make_uint4(0, 0, 0, 0);  // RowOrigin
      bool const wanted =
          sources_ == Sources::all || (own_.y == rank_) == (sources_ == Sources::own);
      left_ = __ballot_sync(arch::kAllLanes, own_.w != 0 && wanted);
    }
    int const lane = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    row_ = begin_ + std::int64_t{lane} * workers_;
    pair_ = __shfl_sync(arch::kAllLanes, own_.x, lane);
    source_ = __shfl_sync(arch::kAllLanes, own_.y, lane);
    next_ = static_cast<std::int32_t>(__shfl_sync(arch::kAllLanes, own_.z, lane));
    return true;
  }
  [[nodiscard]] __device__ std::uint32_t pair() const { return pair_; }
  [[nodiscard]] __device__ std::uint32_t source() const { return source_; }
  // The row of this lane in the list: lane i has the i-th, -1 where there is none.
  [[nodiscard]] __device__ std::int64_t row_of_lane() const {
    std::int64_t mine = arch::lane_idx() == 0 ? row_ : -1;
    std::int32_t row = next_;
    for (int i = 1; row >= 0 && i < kMaxChoices; ++i) {
      if (arch::lane_idx() == i) mine = row;
      row = row < rows_ ? __ldg(&gmem_origins_[row].next) : -1;
    }
    return mine < rows_ ? mine : -1;
  }

 private:
  RowOrigin const* gmem_origins_;
  std::uint32_t rank_;
  Sources sources_;
  std::int64_t worker_, workers_, rows_;
  std::int64_t begin_ = 0, read_ = 0, row_ = 0;
  uint4 own_ = {};
  unsigned left_ = 0;
  std::uint32_t pair_ = 0, source_ = 0;
  std::int32_t next_ = -1;
};

// Pulls all rows of a warp, of x or of second_x at a time.
class Pull {
 public:
  __device__ Pull(DispatchArguments const& p, Ring& ring, int rows)
      : p_(p),
        ring_(ring),
        rows_(rows),
        row_bytes_(2 * p.exchange.shape.hidden),
        chunks_of_row_((row_bytes_ + kChunkBytes - 1) / kChunkBytes) {}

  __device__ void all(Share const& share, bool is_second, char* gmem_rows) {
    FirstRows loads(p_, share, rows_);
    FirstRows stores = loads;
    int in_row = chunks_of_row_;
    char const* from = nullptr;
    auto const load = [&] {
      if (in_row == chunks_of_row_) {
        if (!loads.advance()) return;
        from = row_in_window(loads, is_second);
        in_row = 0;
      }
      if (arch::lane_idx() == 0) load_chunk(from, in_row);
      ++in_row;
      ++loaded_;
    };
    for (int i = 0; i < kChunks; ++i) load();
    bool is_chunk_before = false;
    while (stores.advance()) {
      std::int64_t const row = place_of_lane(stores);
      char* const to = gmem_rows + row * row_bytes_;
      for (int c = 0; c < chunks_of_row_; ++c) {
        int const slot = stored_ % kChunks;
        arch::mbarrier_wait(&ring_.full[slot], stored_ / kChunks & 1);
        if (row >= 0) {
          arch::bulk_store(to + c * kChunkBytes, ring_.chunk[slot], bytes_of(c));
        }
        arch::tma_store_commit();
        ++stored_;
        if (is_chunk_before) {  // its place is free once all lanes' stores have read it
          arch::tma_store_wait_read<1>();
          __syncwarp();
          load();
        }
        is_chunk_before = true;
      }
    }
    arch::tma_store_wait_read<0>();
    __syncwarp();
  }

 private:
  [[nodiscard]] __device__ std::uint32_t bytes_of(int chunk) const {
    return static_cast<std::uint32_t>(min(row_bytes_ - chunk * kChunkBytes, kChunkBytes));
  }
  [[nodiscard]] __device__ char const* row_in_window(FirstRows const& rows, bool is_second) const {
    ExchangeArguments const& exchange = p_.exchange;
    std::int64_t const token = exchange.token_of(rows.pair());
    std::int64_t const row =
        is_second ? exchange.window.second_x_row(token) : exchange.window.x_row(token);
    return peer_of(exchange, rows.source()).load_if_local<OtherWay::kSent>(row);
  }
  // Returns the row that this lane stores the token to, -1 where there is none.
  [[nodiscard]] __device__ std::int64_t place_of_lane(FirstRows const& rows) const {
    if (!p_.gathered) return rows.row_of_lane();
    return arch::lane_idx() == 0 ? p_.exchange.gathered_row(rows.source(), rows.pair()) : -1;
  }
  __device__ void load_chunk(char const* from, int chunk) {
    int const slot = loaded_ % kChunks;
    arch::mbarrier_arrive_expect_tx(&ring_.full[slot], bytes_of(chunk));
    arch::bulk_load(ring_.chunk[slot], from + chunk * kChunkBytes, bytes_of(chunk),
                    &ring_.full[slot]);
  }

  DispatchArguments const& p_;
  Ring& ring_;
  int rows_, row_bytes_, chunks_of_row_;
  int loaded_ = 0, stored_ = 0;
};

// The tables of a layer of these rows, for its backward pass. thread of threads: those of the whole grid.
__device__ inline void write_routing(DispatchArguments const& p, std::int64_t thread,
                                     std::int64_t threads, int rows) {
  RoutingView const& routing = p.routing;
  if (routing.expert_offsets == nullptr) return;
  for (std::int64_t i = thread; i <= p.exchange.local_experts; i += threads) {
    routing.expert_offsets[i] = min(p.tables.gmem_expert_offsets[i], rows);
  }
  for (std::int64_t i = thread; i < p.capacity; i += threads) {
    bool const exists = i < rows;
    auto const row = static_cast<std::int32_t>(i);
    std::int32_t place = row;
    if (exists && p.gathered) {
      RowOrigin const& from = p.tables.gmem_origins[i];
      place = p.exchange.gathered_row(static_cast<std::uint32_t>(from.source),
                                      static_cast<std::uint32_t>(from.pair));
    }
    routing.sort_permutation[i] = exists ? row : -1;
    routing.gather_index[i] = exists ? place : 0;
    routing.inverse_permutation[i] = exists ? row : -1;
    routing.scores[i] = exists ? p.tables.gmem_scores[i] : 0.0f;
  }
}

// Writes what takes no bulk copies. thread of threads: those of the whole grid.
__device__ inline void write_tables(DispatchArguments const& p, std::int64_t thread,
                                    std::int64_t threads, int rows) {
  ExchangeArguments const& exchange = p.exchange;
  std::int64_t const pairs = std::int64_t{exchange.tokens} * exchange.shape.max_top_k;
  if (thread < p.zeroed.count) p.zeroed.gmem[thread] = 0;
  for (std::int64_t i = thread; i < pairs; i += threads) {
    bool const routed = is_expert(exchange, exchange.gmem_topk_ids[i]);
    p.gmem_slot_of_pair[i] = routed ? static_cast<std::int32_t>(i) : -1;
  }
  if (p.saved.gmem_expert_offsets == nullptr) return;
  for (std::int64_t i = thread; i <= exchange.local_experts; i += threads) {
    p.saved.gmem_expert_offsets[i] = min(p.tables.gmem_expert_offsets[i], rows);
  }
  for (std::int64_t i = thread; i < rows; i += threads) {
    p.saved.gmem_origins[i] = p.tables.gmem_origins[i];
    p.saved.gmem_scores[i] = p.tables.gmem_scores[i];
  }
}

// All that the first kernel of a pass does besides rows, by all threads of its grid: counters of the next pass, words
// that are due, tables.
template <int kThreads>
__device__ void begin_pass(DispatchArguments const& p, std::uint32_t epoch, int rows) {
  ExchangeArguments const& exchange = p.exchange;
  clear_next_bank<kThreads>(exchange, epoch);
  if (renews_words(epoch)) renew_words<kThreads>(exchange, epoch, exchange.window.block_done);
  std::int64_t const thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  std::int64_t const threads = std::int64_t{gridDim.x} * kThreads;
  write_tables(p, thread, threads, rows);
  write_routing(p, thread, threads, rows);
}

}  // namespace tessera::expert_parallel
