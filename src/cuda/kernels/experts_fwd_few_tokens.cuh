// SPDX-License-Identifier: Apache-2.0
// experts_fwd_few_tokens: the experts of a forward pass in one launch that reads each chosen weight once:
//   h_r = rnd(x[gather_index[r]] w_up[e]^T + b_up[e]),  a_r = rnd(act(h_r)),  y_r = rnd(a_r w_down[e]^T + b_down[e]),
//   o_t = rnd(sum over slots j of token t, ascending, of s_j y[inverse_permutation[j]])
// Shapes   x (T,d) bf16, w_up (E,w*n,d) in the layouts of WeightRows with d contiguous, h (R,w*n) as [gate half | up
//          half], a (R,n), w_down (E,d,n) with n contiguous, y (R,d), o (T,d) bf16
// Work     2*R*(w+1)*n*d FLOP; bytes: 2*(w+1)*n*d for every 8 rows of an expert; memory bound
// Schedule warps draw jobs from a counter, in this order:
//            up         16 rows of w_up, gate and up of 8 columns of a or 16 columns, with a block of up to 8 rows of
//                       their expert; jobs of a block of rows side by side
//            down       16 columns of y, with a block of rows, in the same order
//            aggregate  16 columns of o of all tokens
//   ring     a warp copies its own weights by cp.async.bulk, a row each, `stages` stages of 16 x stage_k ahead, across
//            jobs: it meets no other warp, and the projections have no gap between them
//   multiply mma.sync, weights as the 16 rows, rows of x or a as the 8 columns, from L2 into registers a stage ahead.
//            Lane 4g + q takes elements 4q to 4q + 3 of 16 as the pairs 2q and 2q + 8 of k, for both operands. x and a
//            have the same code, little of it: a launch of 40 us has no time to fetch much that runs a few times
//   values   of a, and of y where there is an aggregate, say by themselves that they are there: they are stored
//            inverted, in rows that whoever makes the tables has cleared. 0 is the inverse of 0xffff, a NaN that no
//            rounding to bf16 gives. Their readers load past L1 until no value is 0, and invert them: no word, no
//            fence, and no release, which would wait for what the ring has on its way
// Barriers full[w][s]: the bytes of stage s of warp w, which frees it by going on. Nobody waits for values but those of
//          jobs with lower tickets, which warps that run have drawn and do in order: CTAs need not be resident together
// Numerics fp32 sums in steps of 16 of k, in order, which are those of wgmma: the bits of the GEMMs and of aggregate
//          (tests/cuda/few_tokens_test.cu); one rounding per stored value; bitwise repeatable: yes
// Requires rows of 16 bytes (layer/select.cpp), at most kFewTokensMostBlocks blocks of rows (layer/plan.cpp)
#pragma once

#include <cuda_bf16.h>

#include <cstddef>

#include "../arch/bulk_copy.cuh"
#include "../arch/dependent_launch.cuh"
#include "../arch/dynamic_shared.cuh"
#include "../arch/load_shared.cuh"
#include "../arch/mbarrier.cuh"
#include "../arch/mma.cuh"
#include "../arch/signal.cuh"
#include "../arch/warp.cuh"
#include "../epilogue/store_few_tokens.cuh"
#include "../host/experts_fwd.hpp"
#include "../host/launch.hpp"
#include "../tuning/few_tokens.hpp"
#include "../warp/sums.cuh"

namespace tessera::cuda {

namespace few_tokens {

constexpr int kHalfRows = 8;  // rows that follow each other in memory: gate and up, or all 16
constexpr int kStepK = 16;    // of an mma
constexpr int kTurns = 4;  // mma whose weights are loaded together, a line of 128 bytes of each row

template <class Config>
struct Storage {
  static constexpr FewTokensConfig kConfig = Config::config;
  // Jobs of stages on their way, and of the one that is multiplied.
  static constexpr int kQueue = kConfig.stages + 1;

  // Rows are whole lines of 128 bytes: copies to other places take longer.
  alignas(128) __nv_bfloat16 ring[kConfig.warps][kConfig.stages][kWeightRows][kConfig.stage_k];
  arch::Mbarrier full[kConfig.warps][kConfig.stages];
  int32_t tickets[kConfig.warps][kQueue];
  RowBlock blocks[kFewTokensMostBlocks];
};

// The numbers of jobs: of up and of down for a block of rows, and of aggregate.
struct JobCounts {
  bool gated;
  int32_t up, down, aggregate;
};

// The jobs of a launch with so many blocks of rows.
struct Jobs {
  int32_t blocks;
  JobCounts counts;
  __device__ __forceinline__ int32_t up() const { return blocks * counts.up; }
  // Those that multiply.
  __device__ __forceinline__ int32_t products() const { return up() + blocks * counts.down; }
  __device__ __forceinline__ int32_t all() const { return products() + counts.aggregate; }
};

// A job that multiplies.
struct Job {
  bool is_up;
  int32_t block, column;  // numbers of blocks
};

__device__ __forceinline__ Job job_of(Jobs const& jobs, int32_t ticket) {
  bool const is_up = ticket < jobs.up();
  int32_t const of_kind = is_up ? ticket : ticket - jobs.up();
  int32_t const columns = is_up ? jobs.counts.up : jobs.counts.down;
  int32_t const block = of_kind / columns;
  return {is_up, block, of_kind - block * columns};
}

// Lists the blocks of rows of all experts in shared memory and returns how many there are. By all threads of the CTA;
// a barrier comes before the list is read.
template <class Config>
__device__ __forceinline__ int32_t list_blocks(Storage<Config>& smem, int32_t const* gmem_offsets,
                                               int32_t experts) {
  constexpr int kThreads = Config::config.warps * arch::kWarpThreads;
  int32_t const share = (experts + kThreads - 1) / kThreads;
  int32_t const begin = min(static_cast<int32_t>(threadIdx.x) * share, experts);
  int32_t const end = min(begin + share, experts);
  auto const blocks_of = [&](int32_t e) {
    return (gmem_offsets[e + 1] - gmem_offsets[e] + kFewTokensRows - 1) / kFewTokensRows;
  };
  int own = 0;
  for (int32_t e = begin; e < end; ++e) own += blocks_of(e);
  auto const [before, all] = warp::sums_over_cta<Config::config.warps>(own);
  int at = before;
  for (int32_t e = begin; e < end; ++e) {
    int32_t const last = gmem_offsets[e + 1];
    for (int32_t first = gmem_offsets[e]; first < last; first += kFewTokensRows) {
      smem.blocks[at++] = {e, first, min(kFewTokensRows, last - first)};
    }
  }
  return all;
}

// Draws the tickets of a warp. The first ones are not drawn: those of an SM lie a grid apart.
template <class Config>
class Tickets {
 public:
  __device__ __forceinline__ Tickets(ExpertsFwdArguments const& p, Jobs const& jobs)
      : gmem_ticket_(p.gmem_ticket), last_(jobs.all() - 1) {}
  __device__ __forceinline__ static int32_t first() {
    return arch::warp_idx() * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x);
  }
  // Every warp with a job draws once in vain, so that the last number drawn is known: the counter is left at 0.
  __device__ __forceinline__ int32_t next() const {
    int32_t drawn = 0;
    if (arch::lane_idx() == 0) {
      drawn = static_cast<int32_t>(
          arch::count_relaxed_gpu(reinterpret_cast<uint32_t*>(gmem_ticket_), 1));
      if (drawn == last_) *gmem_ticket_ = 0;
    }
    drawn = __shfl_sync(arch::kAllLanes, drawn, 0);
    return static_cast<int32_t>(gridDim.x) * Config::config.warps + drawn;
  }

 private:
  int32_t* gmem_ticket_;
  int32_t last_;
};

// A warp loads the stages of its jobs, in order, into its ring.
template <class Config>
class WeightLoads {
  static constexpr FewTokensConfig kConfig = Config::config;
  using Smem = Storage<Config>;

 public:
  __device__ __forceinline__ WeightLoads(Smem& smem, ExpertsFwdArguments const& p, Jobs const& jobs,
                                         Tickets<Config> const& tickets)
      : smem_(smem),
        p_(p),
        jobs_(jobs),
        tickets_(tickets),
        warp_(arch::warp_idx()),
        ticket_(Tickets<Config>::first()) {}

  // Asks for the next stage, which is free. Behind the last job that multiplies there is none.
  __device__ __forceinline__ void next() {
    if (k_ == count_k_ && !is_over_) {
      if (arch::lane_idx() == 0) smem_.tickets[warp_][queue_end_] = ticket_;
      queue_end_ = queue_end_ + 1 == Smem::kQueue ? 0 : queue_end_ + 1;
      is_over_ = ticket_ >= jobs_.products();
      if (!is_over_) begin_job();
    }
    if (!is_over_) {
      copy_stage();
      k_ = min(k_ + kConfig.stage_k, count_k_);
      if (k_ == count_k_) ticket_ = tickets_.next();
    }
    stage_ = stage_ + 1 == kConfig.stages ? 0 : stage_ + 1;
  }

 private:
  // Rows of a half lie row_stride apart. The second half exists where its first row does, as widths are multiples of 8.
  __device__ __forceinline__ void begin_job() {
    Job const job = job_of(jobs_, ticket_);
    int32_t const expert = smem_.blocks[job.block].expert;
    bool const halves = job.is_up && jobs_.counts.gated;
    int64_t const column = int64_t{job.column} * (halves ? kHalfRows : kWeightRows);
    WeightRows const& first = job.is_up ? p_.up.w_up[0] : p_.down.w_down;
    WeightRows const& second = halves ? p_.up.w_up[1] : first;
    int64_t const other = halves ? column : column + kHalfRows;
    auto const place = [&](WeightRows const& w, int64_t row) {
      return static_cast<__nv_bfloat16 const*>(w.gmem) + w.row_offset(expert, row);
    };
    k_ = 0;
    count_k_ = static_cast<int32_t>(job.is_up ? p_.up.hidden : p_.down.intermediate);
    has_second_ = other < (job.is_up ? p_.up.intermediate : p_.down.hidden);
    gmem_half_[0] = place(first, column);
    gmem_half_[1] = has_second_ ? place(second, other) : gmem_half_[0];
    stride_[0] = first.row_stride;
    stride_[1] = second.row_stride;
  }

  __device__ __forceinline__ void copy_stage() const {
    int const count = min(kConfig.stage_k, count_k_ - k_);
    auto const bytes = static_cast<uint32_t>(count) * unsigned{sizeof(__nv_bfloat16)};
    arch::Mbarrier* const full = &smem_.full[warp_][stage_];
    if (arch::elect_one()) {
      arch::mbarrier_arrive_expect_tx(full, bytes * (has_second_ ? kWeightRows : kHalfRows));
      TESSERA_UNROLL
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !has_second_) break;
        __nv_bfloat16 const* gmem_row = gmem_half_[half] + k_;
        TESSERA_UNROLL
        for (int i = 0; i < kHalfRows; ++i) {
          arch::bulk_load(smem_.ring[warp_][stage_][half * kHalfRows + i], gmem_row, bytes, full);
          gmem_row += stride_[half];
        }
      }
    }
    __syncwarp();
  }

  Smem& smem_;
  ExpertsFwdArguments const& p_;
  Jobs const& jobs_;
  Tickets<Config> const& tickets_;
  int warp_;
  int32_t ticket_;
  bool is_over_ = false, has_second_ = false;
  int queue_end_ = 0, stage_ = 0;
  int32_t k_ = 0, count_k_ = 0;  // of the job
  __nv_bfloat16 const* gmem_half_[2] = {};
  int64_t stride_[2] = {};
};

// Multiplies the stages that WeightLoads brings.
template <class Config>
class Multiplier {
  static constexpr FewTokensConfig kConfig = Config::config;
  static constexpr int kGroupK = kTurns * kStepK, kGroups = kConfig.stage_k / kGroupK;
  using Smem = Storage<Config>;
  using Rows = uint2[kTurns];  // of a group

 public:
  __device__ __forceinline__ Multiplier(Smem& smem, WeightLoads<Config>& loads)
      : smem_(smem), loads_(loads), warp_(arch::warp_idx()) {}

  // The ticket of the next job, which begins with the next stage.
  __device__ __forceinline__ int32_t next_ticket() {
    int32_t const ticket = smem_.tickets[warp_][queue_begin_];
    queue_begin_ = queue_begin_ + 1 == Smem::kQueue ? 0 : queue_begin_ + 1;
    return ticket;
  }

  // sums: of the 16 rows of weights with this lane's two of 8 rows. gmem_row: row g of x or, of_a, of a, inverted and
  // there at any time, lane 4g + q; null: none.
  __device__ __forceinline__ void multiply(bool of_a, __nv_bfloat16 const* gmem_row,
                                           int32_t count_k, float (&sums)[4]) {
    uint32_t const inverts = of_a ? ~0u : 0;
    Rows rows[kGroups];
    TESSERA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      load_rows<false>(gmem_row, i * kGroupK, count_k, inverts, rows[i]);
    }
    int const g = arch::lane_idx() / 4;
#pragma unroll 1
    for (int32_t first = 0; first < count_k; first += kConfig.stage_k) {
      auto const& stage = smem_.ring[warp_][stage_];
      uint32_t const smem_low = arch::shared_address(&stage[g][lane_k()]);
      uint32_t const smem_high = arch::shared_address(&stage[g + kHalfRows][lane_k()]);
      arch::mbarrier_wait(&smem_.full[warp_][stage_], phase_);
      // This stage is whole, and the next one is or there is none.
      int32_t const left = count_k - first;
      if (left == kConfig.stage_k || left >= 2 * kConfig.stage_k) {
        multiply_stage<true>(of_a, gmem_row, first, count_k, smem_low, smem_high, rows, sums);
      } else {
        multiply_stage<false>(of_a, gmem_row, first, count_k, smem_low, smem_high, rows, sums);
      }
      __syncwarp();
      loads_.next();
      if (++stage_ == kConfig.stages) {
        stage_ = 0;
        phase_ ^= 1;
      }
    }
  }

 private:
  __device__ __forceinline__ static int lane_k() { return arch::lane_idx() % 4 * 4; }

  // Multiplies a stage and loads the rows of the next one.
  template <bool kWhole>
  __device__ __forceinline__ static void multiply_stage(bool of_a, __nv_bfloat16 const* gmem_row,
                                                        int32_t first, int32_t count_k,
                                                        uint32_t smem_low, uint32_t smem_high,
                                                        Rows (&rows)[kGroups], float (&sums)[4]) {
    constexpr uint32_t kBytes = kGroupK * sizeof(__nv_bfloat16);
    uint32_t const inverts = of_a ? ~0u : 0;
    __nv_bfloat16 const* const gmem_next =
        !kWhole || first + kConfig.stage_k < count_k ? gmem_row : nullptr;
    TESSERA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      int32_t const k = first + i * kGroupK;
      if (!kWhole && k >= count_k) break;
      if (of_a) await_rows(gmem_row, k, count_k, rows[i]);
      multiply_group<kWhole>(smem_low + i * kBytes, smem_high + i * kBytes, rows[i], inverts,
                             count_k - k, sums);
      load_rows<kWhole>(gmem_next, k + kConfig.stage_k, count_k, inverts, rows[i]);
    }
  }

  // Past L1, as the rows may be of a. Where there is none a value is 0, once it is inverted. kWhole: where the lane has
  // a row, all values exist; else they stay as they are.
  template <bool kWhole>
  __device__ __forceinline__ static void load_rows(__nv_bfloat16 const* gmem_row, int32_t k,
                                                   int32_t count_k, uint32_t inverts, Rows& rows) {
    int32_t const own = k + lane_k();
    TESSERA_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      if (!kWhole) rows[i] = {inverts, inverts};
      if (gmem_row != nullptr && (kWhole || own + i * kStepK < count_k)) {
        rows[i] = arch::load_relaxed_8(gmem_row + own + i * kStepK);
      }
    }
  }

  // Loads rows of a again until all of a group's values are there. By a converged warp.
  __device__ __forceinline__ static void await_rows(__nv_bfloat16 const* gmem_row, int32_t k,
                                                    int32_t count_k, Rows& rows) {
    for (;;) {
      MissingValues missing;
      TESSERA_UNROLL
      for (int i = 0; i < kTurns; ++i) {
        missing.look_at(rows[i].x);
        missing.look_at(rows[i].y);
      }
      if (!__any_sync(arch::kAllLanes, missing.any())) return;
      load_rows<false>(gmem_row, k, count_k, ~0u, rows);
    }
  }

  // Loads 8 bytes of each of kTurns steps, from `smem_row`. Rows lie whole lines apart, so that four rows would meet in
  // a bank if their lanes loaded the same step: row g begins with step g % kTurns, and lanes put them in order.
  __device__ __forceinline__ static void load_turns(uint32_t smem_row, Rows& turns) {
    constexpr uint32_t kStepBytes = kStepK * sizeof(__nv_bfloat16);
    static_assert(kTurns == 4);
    unsigned const own = arch::lane_idx() / 4 % kTurns;
    uint2 v[kTurns];
    TESSERA_UNROLL
    for (unsigned i = 0; i < kTurns; ++i) {
      v[i] = arch::load_shared_8(smem_row + (i ^ own) * kStepBytes);
    }
    auto const pick = [](bool second, uint2 a, uint2 b) {
      return uint2{second ? b.x : a.x, second ? b.y : a.y};
    };
    bool const odd = own & 1, high = own & 2;
    uint2 const w[kTurns] = {pick(odd, v[0], v[1]), pick(odd, v[1], v[0]), pick(odd, v[2], v[3]),
                             pick(odd, v[3], v[2])};
    TESSERA_UNROLL
    for (int i = 0; i < kTurns; ++i) turns[i] = pick(high, w[i], w[i ^ 2]);
  }

  // `count` elements of k are left. Weights behind them, of which shared memory holds anything, are 0.
  template <bool kWhole>
  __device__ __forceinline__ static void multiply_group(uint32_t smem_low, uint32_t smem_high,
                                                        Rows const& rows, uint32_t inverts,
                                                        int32_t count, float (&sums)[4]) {
    Rows low, high;
    load_turns(smem_low, low);
    load_turns(smem_high, high);
    TESSERA_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      if (!kWhole && i * kStepK >= count) break;
      if (!kWhole && i * kStepK + lane_k() >= count) low[i] = high[i] = {};
      arch::mma_m16n8k16(sums, low[i].x, high[i].x, low[i].y, high[i].y, rows[i].x ^ inverts,
                         rows[i].y ^ inverts);
    }
  }

  Smem& smem_;
  WeightLoads<Config>& loads_;
  int warp_;
  int queue_begin_ = 0, stage_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace few_tokens

template <class Config>
__global__ void __launch_bounds__(Config::config.threads(), 1)
    experts_fwd_few_tokens(__grid_constant__ ExpertsFwdArguments const p,
                           few_tokens::JobCounts const counts) {
  using namespace few_tokens;
  using Smem = Storage<Config>;
  static_assert(valid(Config::config));
  TESSERA_DYNAMIC_SHARED(shared);
  Smem& smem = *reinterpret_cast<Smem*>(shared);
  int const warp = arch::warp_idx();
  if (arch::lane_idx() < Config::config.stages) {
    arch::mbarrier_init(&smem.full[warp][arch::lane_idx()], 1);
  }
  arch::mbarrier_fence_init();
  arch::wait_for_previous_kernel();
  Jobs const jobs{list_blocks<Config>(smem, p.down.gmem_expert_offsets, p.down.experts), counts};
  __syncthreads();
  int const g = arch::lane_idx() / 4;

  Tickets<Config> const tickets(p, jobs);
  WeightLoads<Config> loads(smem, p, jobs, tickets);
#pragma unroll 1
  for (int i = 0; i < Config::config.stages; ++i) loads.next();
  __syncwarp();
  Multiplier<Config> multiplier(smem, loads);
  int32_t ticket = multiplier.next_ticket();
  for (; ticket < jobs.products(); ticket = multiplier.next_ticket()) {
    Job const job = job_of(jobs, ticket);
    RowBlock const block = smem.blocks[job.block];
    int64_t const row = block.first + g;
    __nv_bfloat16 const* gmem_row = nullptr;
    if (g < block.count) {
      gmem_row = job.is_up
                     ? static_cast<__nv_bfloat16 const*>(p.up.x.gmem) +
                           (p.up.gmem_gather_index != nullptr ? p.up.gmem_gather_index[row] : row) *
                               p.up.x.pitch
                     : static_cast<__nv_bfloat16 const*>(p.down.gmem_a) + row * p.down.intermediate;
    }
    float sums[4] = {};
    multiplier.multiply(!job.is_up, gmem_row,
                        static_cast<int32_t>(job.is_up ? p.up.hidden : p.down.intermediate), sums);
    if (job.is_up) {
      store_up(p.up, block, job.column, counts.gated, sums);
    } else {
      store_down(p.down, block, job.column, sums, p.has_aggregate);
    }
  }
  for (; ticket < jobs.all(); ticket = tickets.next()) {
    aggregate_columns(p.aggregate, ticket - jobs.products());
  }
}

template <class Config>
cudaError_t launch_experts_fwd_few_tokens_config(ExpertsFwdArguments const& args, int sm_count,
                                                 cudaStream_t stream) {
  constexpr int kSmemBytes = int(sizeof(few_tokens::Storage<Config>));
  static_assert(kSmemBytes <= 227 * 1024);
  static_assert(few_tokens::kWeightRows == kFewTokensColumns, "a job of down");
  static_assert(few_tokens::kHalfRows == kFewTokensWeightRows, "copied from one row to the next");
  if (args.down.rows == 0) return cudaErrorInvalidValue;  // nobody has cleared the counter
  cudaError_t const error = host::allow_shared_memory<&experts_fwd_few_tokens<Config>>(kSmemBytes);
  if (error != cudaSuccess) return error;
  auto const jobs_of = [](int64_t columns, int64_t of_job) {
    return int32_t((columns + of_job - 1) / of_job);
  };
  bool const gated = args.up.activation.gated();
  int32_t const down = jobs_of(args.down.hidden, kFewTokensColumns);
  few_tokens::JobCounts const counts{
      .gated = gated,
      .up = jobs_of(args.up.intermediate, few_tokens::up_job_columns(gated)),
      .down = down,
      .aggregate = args.has_aggregate ? down : 0};
  return host::launch_early(experts_fwd_few_tokens<Config>, true, unsigned(sm_count),
                            Config::config.threads(), kSmemBytes, stream, args, counts);
}

}  // namespace tessera::cuda
