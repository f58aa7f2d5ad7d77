// SPDX-License-Identifier: Apache-2.0
// dispatch: the rows that this rank's experts have to multiply, from the windows of all ranks.
//   staged   one thread says to all ranks that this rank's rows lie in its window
//   tables   all threads copy them, note which pairs have rows, and clear the next pass's counters; then every CTA
//            awaits what all ranks say
//   pull     warps load rows by bulk copies, row i by warp i mod warps, and store each for all of its token's choices
//            here, a lane for each; the rows of second_x behind those of x, or by a launch of their own
// Barriers __syncthreads only: one thread polls, the CTA follows. Waits have a limit (wait.cuh)
// Memory   x and second_x were written before this kernel; bulk copies read them after a proxy fence behind staged
// Requires hidden % 8 == 0. CTA 0 waits for nobody before it speaks, so CTAs need not all be resident
#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/proxy_fence.cuh"
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

// word: staged_word, or second_staged_word, of this rank.
__device__ void say_staged(ExchangeArguments const& p, std::int64_t word, std::uint32_t epoch) {
  arch::fence_acq_rel_sys();
  for (int r = 0; r < p.shape.ranks; ++r) {
    peer_of(p, r).signal(word, epoch);
  }
}

// Those rows that begin tokens' lists, among rows i of a warp, in ascending order. By a converged warp.
class FirstRows {
 public:
  __device__ FirstRows(RowOrigin const* gmem_origins, int worker, int workers, int rows)
      : gmem_origins_(gmem_origins), worker_(worker), workers_(workers), rows_(rows) {}

  // To the next one; false: there is none.
  __device__ bool advance() {
    while (left_ == 0) {
      begin_ = worker_ + read_ * workers_;
      if (begin_ >= rows_) return false;
      read_ += arch::kWarpThreads;
      std::int64_t const row = begin_ + std::int64_t{arch::lane_idx()} * workers_;
      own_ = row < rows_ ? __ldg(reinterpret_cast<uint4 const*>(gmem_origins_ + row))
                         : make_uint4(0, 0, 0, 0);  // RowOrigin
      left_ = __ballot_sync(arch::kAllLanes, own_.w != 0);
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
  __device__ Pull(DispatchArguments const& p, Ring& ring, int worker, int workers, int rows)
      : p_(p),
        ring_(ring),
        worker_(worker),
        workers_(workers),
        rows_(rows),
        row_bytes_(2 * p.exchange.shape.hidden),
        chunks_of_row_((row_bytes_ + kChunkBytes - 1) / kChunkBytes) {}

  __device__ void all(bool is_second, char* gmem_rows) {
    FirstRows loads(p_.tables.gmem_origins, worker_, workers_, rows_);
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
      std::int64_t const row = stores.row_of_lane();
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
  __device__ void load_chunk(char const* from, int chunk) {
    int const slot = loaded_ % kChunks;
    arch::mbarrier_arrive_expect_tx(&ring_.full[slot], bytes_of(chunk));
    arch::bulk_load(ring_.chunk[slot], from + chunk * kChunkBytes, bytes_of(chunk),
                    &ring_.full[slot]);
  }

  DispatchArguments const& p_;
  Ring& ring_;
  int worker_, workers_, rows_, row_bytes_, chunks_of_row_;
  int loaded_ = 0, stored_ = 0;
};

// Writes what takes no bulk copies. thread of threads: those of the whole grid.
__device__ void write_tables(DispatchArguments const& p, std::int64_t thread, std::int64_t threads,
                             int rows) {
  ExchangeArguments const& exchange = p.exchange;
  std::int64_t const pairs = std::int64_t{exchange.tokens} * exchange.shape.max_top_k;
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
  if (blockIdx.x == 0 && thread == 0) {
    say_staged(exchange,
               begins ? exchange.window.staged_word(exchange.rank)
                      : exchange.window.second_staged_word(exchange.rank),
               epoch);
  }
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
  int const worker = static_cast<int>(blockIdx.x) * kWarps + warp;
  int const workers = static_cast<int>(gridDim.x) * kWarps;
  if (begins) {
    write_tables(p, std::int64_t{blockIdx.x} * kThreads + thread,
                 std::int64_t{gridDim.x} * kThreads, rows);
  }
  Waiter const waiter(exchange, epoch);
  bool reached = true;
  if (thread < exchange.shape.ranks) {
    reached =
        begins ? waiter.for_epoch(exchange.window.staged_word(thread), epoch, Site::staged, thread)
               : waiter.for_second_rows(thread);
  }
  if (!all_reached(reached)) return;
  if (begins && all_rows > rows && !p.may_overflow && blockIdx.x == 0 && thread == 0) {
    waiter.give_up(Site::rows, static_cast<std::uint32_t>(p.capacity),
                   static_cast<std::uint32_t>(all_rows));
  }
  __syncwarp();
  arch::fence_proxy_async_global();
  Pull pull(p, smem.ring[warp], worker, workers, rows);
  if (begins) pull.all(false, p.gmem_rows);
  if (p.gmem_second_rows != nullptr) pull.all(true, p.gmem_second_rows);
  arch::bulk_store_wait<0>();
}

}  // namespace

cudaError_t launch_dispatch(DispatchArguments const& args, int sm_count, cudaStream_t stream,
                            cudaEvent_t begun) {
  if (args.exchange.shape.hidden % 8 != 0) return cudaErrorInvalidValue;
  cudaError_t const error = cudaFuncSetAttribute(
      dispatch, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  return launch_on(sm_count, kThreads, sizeof(Shared), stream, begun, dispatch, args);
}

}  // namespace tessera::expert_parallel
