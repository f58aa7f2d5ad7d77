// SPDX-License-Identifier: Apache-2.0
// dispatch: the rows that this rank's experts have to multiply, from the windows of all ranks.
//   staged   one thread says to all ranks that this rank's rows lie in its window. Rows that the caller has elsewhere
//            all threads copy there before; the last CTA that has done so says it
//   tables   all threads copy them, note which pairs have rows, and clear the next pass's counters; then every CTA
//            awaits what all ranks say
//   pull     warps load rows by bulk copies, row i by warp i mod warps, and store each for all of its token's choices
//            here, a lane for each; the rows of second_x behind those of x, or by a launch of their own
//   gathered a token is stored once, for GEMMs that gather rows: two warps of a CTA pull those of this rank, at the
//            speed of its memory, while the others pull those of the peers, at that of the link
// Barriers __syncthreads only: one thread polls, the CTA follows. Waits have a limit (wait.cuh)
// Memory   x and second_x were written before this kernel, or by its threads, whose CTAs count [copied]; bulk copies
//          read them after a proxy fence behind staged
// Requires hidden % 8 == 0. Nobody waits before this rank has spoken, but where rows are copied CTAs that wait keep
//          their SMs: all others have to get one, so there are no more CTAs than SMs
#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/load_global.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "cuda/host/launch.hpp"
#include "expert_parallel/exchange/exchange.hpp"
#include "expert_parallel/exchange/route.cuh"
#include "expert_parallel/unfused/copy_rows.cuh"
#include "expert_parallel/unfused/launch_on.hpp"

namespace tessera::expert_parallel {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / arch::kWarpThreads;

// Chunks of rows on their way through shared memory; as of CopyRing, 10 KB a warp.
struct Ring {
  alignas(128) char chunk[kChunks][kChunkBytes];
  arch::Mbarrier full[kChunks];
};
struct Shared {
  Ring ring[kWarps];
};

// Says to all ranks that those of this rank lie in its window which this launch brings.
__device__ void say_staged(DispatchArguments const& p, std::uint32_t epoch) {
  ExchangeArguments const& exchange = p.exchange;
  arch::fence_acq_rel_sys();
  for (int r = 0; r < exchange.shape.ranks; ++r) {
    Peer const peer = peer_of(exchange, r);
    if (p.gmem_rows != nullptr) peer.signal(exchange.window.staged_word(exchange.rank), epoch);
    if (p.gmem_second_rows != nullptr) {
      peer.signal(exchange.window.second_staged_word(exchange.rank), epoch);
    }
  }
}

// Copies the caller's rows to their places in this rank's window, 16 bytes a lane at a time, kAtOnce of them in flight.
// Warps with the same number in all CTAs come before the next ones, so that few rows are copied by all SMs, too.
__device__ void copy_to_window(DispatchArguments const& p) {
  constexpr int kAtOnce = 4;
  ExchangeArguments const& exchange = p.exchange;
  int const pieces_of_row = exchange.shape.hidden / 8;
  int const pieces = exchange.tokens * pieces_of_row;  // of kMostCopiedBytes
  int const first_pieces = p.x.gmem != nullptr ? pieces : 0;
  int const all = first_pieces + (p.second_x.gmem != nullptr ? pieces : 0);
  int const ctas = static_cast<int>(gridDim.x), threads = ctas * kThreads;
  int const worker = (arch::warp_idx() * ctas + static_cast<int>(blockIdx.x)) * arch::kWarpThreads +
                     arch::lane_idx();
  for (int begin = worker; begin < all; begin += kAtOnce * threads) {
    uint4 values[kAtOnce];
    char* to[kAtOnce];
    TESSERA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      int const number = begin + i * threads;
      bool const is_second = number >= first_pieces;
      int const piece = is_second ? number - first_pieces : number;
      int const row = piece / pieces_of_row, column = piece - row * pieces_of_row;
      CallerRows const& rows = is_second ? p.second_x : p.x;
      values[i] = arch::load_streaming_16(rows.gmem + row * rows.pitch + std::int64_t{16} * column,
                                          number < all);
      to[i] = own_window(exchange).place(is_second ? exchange.window.second_x_row(0)
                                                   : exchange.window.x_row(0)) +
              std::int64_t{16} * piece;
    }
    TESSERA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i * threads < all) *reinterpret_cast<uint4*>(to[i]) = values[i];
    }
  }
}

// Has the rows of this rank's tokens in its window, and says so to all ranks. Called by all threads.
__device__ void stage(DispatchArguments const& p, std::uint32_t epoch) {
  ExchangeArguments const& exchange = p.exchange;
  bool speaks = blockIdx.x == 0;
  if (p.x.gmem != nullptr || p.second_x.gmem != nullptr) {
    copy_to_window(p);
    arch::fence_proxy_async_global();
    __syncthreads();
    if (threadIdx.x == 0) {
      std::uint32_t* const copied = word_of(exchange.gmem_local, exchange.local.copied(epoch));
      speaks = arch::count_acq_rel_gpu(copied, 1) + 1 == gridDim.x;
    }
  }
  if (speaks && threadIdx.x == 0) say_staged(p, epoch);
}

// Awaits what this launch brings of a rank, which may bring both by one launch or each by its own.
__device__ bool await_staged(DispatchArguments const& p, Waiter const& waiter, std::uint32_t epoch,
                             int source) {
  WindowLayout const& window = p.exchange.window;
  if (p.gmem_rows != nullptr &&
      !waiter.for_epoch(window.staged_word(source), epoch, Site::staged, source)) {
    return false;
  }
  return p.gmem_second_rows == nullptr || waiter.for_second_rows(source);
}

// Says whose rows a warp pulls, and which of them: rows i with i mod `workers` = worker.
enum class Sources : std::uint8_t { all, own, peers };
struct Share {
  Sources sources;
  int worker, workers;
};

// Where each token comes once, this rank's need none of the link, so warps of their own pull them meanwhile.
__device__ Share share_of(DispatchArguments const& p, int warp) {
  constexpr int kOwnWarps = 2;
  int const cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
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

// Pulls all rows of a warp, first those of x, then those of second_x.
class Pull {
 public:
  __device__ Pull(DispatchArguments const& p, Ring& ring, Share const& share, int rows)
      : p_(p),
        ring_(ring),
        share_(share),
        rows_(rows),
        row_bytes_(2 * p.exchange.shape.hidden),
        chunks_of_row_((row_bytes_ + kChunkBytes - 1) / kChunkBytes) {}

  __device__ void all(bool is_second, char* gmem_rows) {
    FirstRows loads(p_, share_, rows_);
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
  Share share_;
  int rows_, row_bytes_, chunks_of_row_;
  int loaded_ = 0, stored_ = 0;
};

// The tables of a layer of these rows, for its backward pass. thread of threads: those of the whole grid.
__device__ void write_routing(DispatchArguments const& p, std::int64_t thread, std::int64_t threads,
                              int rows) {
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
__device__ void write_tables(DispatchArguments const& p, std::int64_t thread, std::int64_t threads,
                             int rows) {
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

__global__ void __launch_bounds__(kThreads, 1)
    dispatch(__grid_constant__ DispatchArguments const p) {
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<Shared*>(smem_raw);
  ExchangeArguments const& exchange = p.exchange;
  std::uint32_t const epoch = *exchange.gmem_epoch;
  int const thread = static_cast<int>(threadIdx.x);
  int const warp = thread / arch::kWarpThreads;
  int const lane = thread % arch::kWarpThreads;
  bool const begins = p.gmem_rows != nullptr;  // else the rest of a pass that has begun
  stage(p, epoch);
  if (lane == 0) {
    for (arch::Mbarrier& full : smem.ring[warp].full) arch::mbarrier_init(&full, 1);
    arch::mbarrier_fence_init();
  }
  if (begins) {
    clear_next_bank<kThreads>(exchange, epoch);
    if (renews_words(epoch)) renew_words<kThreads>(exchange, epoch, exchange.window.block_done);
  }
  int const all_rows = p.tables.gmem_expert_offsets[exchange.local_experts];
  int const rows = static_cast<int>(min(std::int64_t{all_rows}, p.capacity));
  if (begins) {
    std::int64_t const first = std::int64_t{blockIdx.x} * kThreads + thread;
    std::int64_t const threads = std::int64_t{gridDim.x} * kThreads;
    write_tables(p, first, threads, rows);
    write_routing(p, first, threads, rows);
  }
  Waiter const waiter(exchange, epoch);
  bool reached = true;
  if (thread < exchange.shape.ranks) {
    reached = await_staged(p, waiter, epoch, thread);
  }
  if (!all_reached(reached)) return;
  if (begins && all_rows > rows && !p.may_overflow && blockIdx.x == 0 && thread == 0) {
    waiter.give_up(Site::rows, static_cast<std::uint32_t>(p.capacity),
                   static_cast<std::uint32_t>(all_rows));
  }
  __syncwarp();
  arch::fence_proxy_async_global();
  Pull pull(p, smem.ring[warp], share_of(p, warp), rows);
  if (begins) pull.all(false, p.gmem_rows);
  if (p.gmem_second_rows != nullptr) pull.all(true, p.gmem_second_rows);
  arch::bulk_store_wait<0>();
}

}  // namespace

cudaError_t launch_dispatch(DispatchArguments const& args, int sm_count, cudaStream_t stream,
                            cudaEvent_t begun) {
  if (args.exchange.shape.hidden % 8 != 0) return cudaErrorInvalidValue;
  bool const copies = args.x.gmem != nullptr || args.second_x.gmem != nullptr;
  if ((copies || args.zeroed.count > 0) && args.gmem_rows == nullptr) return cudaErrorInvalidValue;
  cudaError_t const error =
      cuda::host::allow_shared_memory<dispatch>(static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  return launch_on(sm_count, kThreads, sizeof(Shared), stream, begun, dispatch, args);
}

}  // namespace tessera::expert_parallel
