// SPDX-License-Identifier: Apache-2.0
// up_projection_fwd with what the persistent kernel takes from it: a stage of shared memory for a ring,
// two of the producer's idle warps for communication, and loads that wait for rows to arrive.
//   WG0 warp 0      TMA loads of A and B; kDispatch: each block of rows after its counter
//       warps 1, 2  kSpin: poll a word; kPull, kDispatch: pull rows into the pool, count them by block
//   WG1, 2          multiply and store, as in up_projection_fwd
#pragma once

#include "../../src/cuda/arch/clock.cuh"
#include "../../src/cuda/arch/signal.cuh"
#include "../../src/cuda/kernels/up_projection_fwd.cuh"
#include "../../src/expert_parallel/unfused/copy_rows.cuh"

namespace tessera::bench {

namespace arch = cuda::arch;
namespace gemm = cuda::gemm;

enum class Beside { kNothing, kSpin, kPull, kDispatch, kPullAlone };

constexpr int kCommunicationWarps = 2;
constexpr uint64_t kLimitNs = 5'000'000'000;

// Rows of the pool, in the order of the plan: of every expert its owner's own first, then the peer's.
struct Rows {
  char const* x[2];  // by source
  int tokens, row_bytes, rows, rows_of_expert, rank, gpus;

  __host__ __device__ char const* source(int row) const {
    int const index = row % rows_of_expert;
    int const from = gpus == 2 && index >= rows_of_expert / 2 ? 1 - rank : rank;
    uint32_t const token = (uint32_t(row) * 0x9e3779b1u >> 7) % uint32_t(tokens);
    return x[from] + int64_t{token} * row_bytes;
  }
};

struct BudgetParams {
  cuda::UpProjectionFwdParams up;
  Rows rows;
  char* gmem_pool;
  uint32_t* gmem_arrived;  // [rows / 128]; grows by 128 in every launch that pulls
  uint32_t arrived_before;
};

template <class Config, bool kRing>
struct BudgetStorage {
  gemm::SharedStorage<Config::gemm> gemm;
  expert_parallel::CopyRing ring[kCommunicationWarps];
};
template <class Config>
struct BudgetStorage<Config, false> {
  gemm::SharedStorage<Config::gemm> gemm;  // four stages leave no space at all
};
consteval bool has_ring(Beside beside) {
  return beside != Beside::kNothing && beside != Beside::kSpin;
}

// One lane walks its rows: peer or own x -> ring -> pool, each counted when it has been written.
__device__ void pull_rows(BudgetParams const& p, expert_parallel::CopyRing& ring, int worker,
                          int workers) {
  int const rows = (p.rows.rows - worker + workers - 1) / workers;
  expert_parallel::copy_rows(ring, rows, p.rows.row_bytes, [&](int i) {
    int const row = worker + i * workers;
    return expert_parallel::RowCopy{p.rows.source(row),
                                    p.gmem_pool + int64_t{row} * p.rows.row_bytes,
                                    &p.gmem_arrived[row / 128]};
  });
}

// Loads tiles as gemm::produce_tiles does, each after its rows have arrived.
template <gemm::GemmConfig kGemm>
__device__ void produce_arrived(gemm::SharedStorage<kGemm>& smem, BudgetParams const& budget) {
  gemm::GemmParams const& p = budget.up.gemm;
  gemm::TileScheduler<kGemm> scheduler(smem, p);
  gemm::WorkQueue<kGemm, true> queue(smem);
  gemm::PipelineState<kGemm> state;
  gemm::WorkTile tile;
  scheduler.announce_first(p.k_tiles);
  while (queue.read(tile)) {
    if (arch::lane_idx() == 0) {
      uint32_t const* const arrived = &budget.gmem_arrived[tile.row / 128];
      uint64_t const begin = arch::nanoseconds();
      while (arch::load_acquire_gpu(arrived) - budget.arrived_before < 128) {
        if (arch::nanoseconds() - begin > kLimitNs) __trap();
      }
      arch::fence_proxy_async_global();
    }
    __syncwarp();
    for (int k_tile = 0; k_tile < p.k_tiles; ++k_tile) {
      scheduler.step(k_tile, p.k_tiles);
      gemm::wait_empty<kGemm>(smem, state);
      if (arch::lane_idx() == 0) {  // the lane that acquired
        arch::Mbarrier* const full = &smem.full[state.stage];
        arch::mbarrier_arrive_expect_tx(full, kGemm.a_tile_bytes() + kGemm.b_tile_bytes());
        arch::tma_load(smem.a[state.stage], &p.a, full, k_tile * kGemm.tile.k, tile.row);
        gemm::load_b<kGemm>(smem, p, state.stage, k_tile, tile);
      }
      __syncwarp();
      state.advance();
    }
  }
}

template <class Config, Beside kBeside>
__global__ void __launch_bounds__(Config::gemm.threads(), 1)
    up_projection_beside(__grid_constant__ BudgetParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr gemm::GemmConfig kGemm = Config::gemm;
  using Epilogue = gemm::ActivationEpilogue<gemm::sm90::Core<kGemm>, Config::activation>;
  using Storage = BudgetStorage<Config, has_ring(kBeside)>;
  static_assert(sizeof(Storage) <= gemm::kSharedMemoryBytes);
  auto& smem = *reinterpret_cast<Storage*>(&gemm::shared_storage<kGemm>());
  // Whether the producer has loaded its last tile: where the offset of a 640th expert would be.
  auto* const done = static_cast<int volatile*>(&smem.gemm.segment_offsets[gemm::kMaxSegments]);
  if (threadIdx.x == 0) {
    *done = 0;
    if constexpr (has_ring(kBeside)) {
      for (expert_parallel::CopyRing& ring : smem.ring) {
        for (arch::Mbarrier& full : ring.full) arch::mbarrier_init(&full, 1);
      }
    }
  }
  gemm::set_up<kGemm>(smem.gemm, p.up.gemm);
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    arch::release_registers<kGemm.producer_registers()>();
    int const warp = arch::warp_idx();
    if (warp == 0) {
      if constexpr (kBeside == Beside::kDispatch) {
        produce_arrived<kGemm>(smem.gemm, p);
      } else if constexpr (kBeside != Beside::kPullAlone) {
        gemm::produce_by_tma<kGemm, Epilogue>(smem.gemm, p.up.gemm, p.up.epilogue);
      }
      if (arch::lane_idx() == 0) *done = 1;
    } else if (warp <= kCommunicationWarps && arch::lane_idx() == 0) {
      if constexpr (has_ring(kBeside)) {
        pull_rows(p, smem.ring[warp - 1], int(blockIdx.x) * kCommunicationWarps + warp - 1,
                  int(gridDim.x) * kCommunicationWarps);
      } else if constexpr (kBeside == Beside::kSpin) {
        uint32_t const* const word = &p.gmem_arrived[int(blockIdx.x)];
        while (*done == 0 && arch::load_acquire_gpu(word) != ~0u) {
        }
      }
    }
  } else if constexpr (kBeside != Beside::kPullAlone) {
    gemm::consume<kGemm, Epilogue>(smem.gemm, p.up.gemm, p.up.epilogue, warpgroup - 1);
  }
#endif
}

}  // namespace tessera::bench
