// SPDX-License-Identifier: Apache-2.0
// forward: o_t = sum over choices of s * (act(x_t w_up[e]^T + b_up[e]) w_down[e]^T + b_down[e]), experts on all GPUs,
// one launch. Instances that add biases add those that are given (biases.hpp).
// Schedule persistent, one CTA per SM on every GPU, in pairs. All CTAs route and plan (route.cuh) while a warp of each
//          copies x into the window (copy_x.cuh), then by role:
//   WG0 warp 0     | TMA loads, half of what both CTAs of a pair read for both
//       warps 1, 2 | pull rows into the pool in the order of the tasks -> arrived; partial combine: add up results that
//                  | down tasks have left there, and push the sums [down_tiles] -> partial_done
//       warp 3     | draws tickets (schedule_tasks.cuh); marks a task [loadable] when [arrived] or [a_ready] has
//                  | counted what it needs; announces what the consumers have sent [sent] -> a_ready; down_tiles,
//                  | block_done
//   WG1, 2         | first pull prologue rows, or copy those that are this rank's own -> arrived
//                  | multiply; an up task stores a by TMA, which completes under the next task; a down task pushes its
//                  | rows to slots on their sources, under the next task -> sent; at last add up partial combines that
//                  | are left, and aggregate the slice's tokens [block_done, partial_done]
// Training an instance of its own saves h and tables of this rank's rows as well (saved_pass.cuh)
// Tasks    TaskCursor: up tasks, with down tasks behind by `lag` units, two at a time for the CTAs of a pair, which
//          read the same weights or the same rows: a third less of L2 (docs/notebook/2026-11-23-fused-pairs.md)
// Barriers pipeline, lent stages and work ring of gemm/, where a stage is free when both CTAs of the pair have read it;
//          the queue of sent tasks (sent_tasks.cuh); may_draw, loadable, tickets (schedule_tasks.cuh)
// Numerics fp32 accumulate, one rounding for a, y and o each; choices are added in their order: the bits
//          do not depend on P, nor on who computes a task
// Faults   a wait that fails lets every later wait pass: the kernel ends, o is void, the Fault says why. So does that
//          of the other ranks, which look at the end whether one has given up. A rank that gives up has signalled it to
//          all of them, behind a fence, before it sends what may be void
#pragma once

#include "cuda/arch/dynamic_shared.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "cuda/host/launch.hpp"
#include "expert_parallel/fused/last_task.cuh"
#include "expert_parallel/fused/load_task.cuh"
#include "expert_parallel/fused/partial_combine.cuh"
#include "expert_parallel/fused/pull_rows.cuh"
#include "expert_parallel/fused/push_rows.cuh"
#include "expert_parallel/fused/saved_pass.cuh"
#include "expert_parallel/fused/schedule_tasks.cuh"
#include "expert_parallel/fused/set_up.cuh"
#include "expert_parallel/fused/slot_sums.cuh"
#include "expert_parallel/fused/store_rows.cuh"

namespace tessera::expert_parallel {

// Adds biases, if there are any, to the results of a task in fp32. A column group of an up task has 64 gate columns,
// then their 64 up columns.
__device__ inline void add_biases(ForwardParams const& p, gemm::Accumulators<kPlain> (&acc)[1],
                                  gemm::WorkTile const& tile, bool down) {
  constexpr int kHalf = gemm::kGroupColumns / 2;
  ExpertBiases const& biases = p.biases;
  if (biases.down.gmem == nullptr) return;
  TESSERA_UNROLL
  for (int group = 0; group < kTileColumns / gemm::kGroupColumns; ++group) {
    if (down) {
      int const columns = p.exchange.shape.hidden;
      int const column = tile.n_tile * kTileColumns + group * gemm::kGroupColumns;
      gemm::add_bias(acc[0], 2 * group, biases.down, tile.segment, column, columns);
      gemm::add_bias(acc[0], 2 * group + 1, biases.down, tile.segment, column + kHalf, columns);
    } else {
      int const columns = p.exchange.shape.intermediate;
      int const column = (tile.n_tile * kTileColumns / gemm::kGroupColumns + group) * kHalf;
      gemm::add_bias(acc[0], 2 * group, biases.up[0], tile.segment, column, columns);
      gemm::add_bias(acc[0], 2 * group + 1, biases.up[1], tile.segment, column, columns);
    }
  }
}

template <ActivationKind kKind, Transfer kTransfer, bool kSaves>
__device__ void consume(Pass const& pass, int consumer) {
  constexpr bool kGated = gemm::ActivationFunction<kKind>::kGated;
  constexpr bool kBiased = expert_parallel::adds_biases(kKind);
  constexpr int kPairs = gemm::Accumulators<kPlain>::kPairs;  // of this thread in a slab
  using Pushed = Push<kTransfer == Transfer::partial_combine, kSaves && kGated>;
  ForwardStorage& smem = pass.smem;
  ForwardParams const& p = pass.p;
  int const row = consumer * gemm::kSubtileM;
  gemm::WorkQueue<kPlain> queue(smem.gemm);
  gemm::PipelineState<kPlain> state;
  gemm::Accumulators<kPlain> acc[1];
  StoreRows<kKind> up(pass, consumer);
  Pushed push(pass, consumer);
  LastTask<Pushed, kSaves> last(pass, push, consumer);
  BetweenTasks between(smem.gemm, up, last);
  gemm::WorkTile tile, ahead;
  bool more = queue.read(tile);
  while (more) {
    bool const down = (tile.segment & kDownTask) != 0;
    SentTask const task = {tile.segment & ~kSharedRows, tile.row / kPlain.tile.m};
    tile.segment &= kSharedRows - 1;
    int const k_tiles = down ? p.down.k_tiles : p.up.k_tiles;
    if (tile.rows > row) {
      up.begin(tile, tile.row + row, 1);
      push.begin(tile, tile.row + row, 1);
      int const stage = gemm::multiply<kPlain, 1>(
          smem.gemm, state, acc, tile, {row, k_tiles, gemm::last_steps_of<kPlain>(tile)}, between);
      last.finish();
      more = queue.read(ahead);  // under the last wgmmas
      push.aim(down ? push.destination(tile, row) : nullptr);
      arch::wgmma_wait<0>();
      gemm::release_stage<kPlain>(smem.gemm, stage);
      if constexpr (kBiased) {
        static_assert(kGated);
        push.drop();
        add_biases(p, acc, tile, down);
      }
      auto const rounded = [&](int i) { return acc[0].packed(i / kPairs, i % kPairs); };
      using Rounded = decltype(rounded);
      static_assert(
          gemm::keeps_contract<up_gemm(kKind).epilogue, StoreRows<kKind>, Rounded,
                               gemm::PipelineState<kPlain>, gemm::SharedStorage<kPlain>>());
      static_assert(
          gemm::keeps_contract<kDownEpilogue, Pushed, Rounded, gemm::PipelineState<kPlain>,
                               gemm::SharedStorage<kPlain>>());
      if (down) {
        push.keep(rounded, tile, tile.row + row);
      } else {
        if constexpr (kSaves) {
          constexpr int kColumns = kGated ? kTileColumns / 2 : kTileColumns;
          std::uint32_t h[4 * kPairs];  // in half of the registers
          TESSERA_UNROLL
          for (int i = 0; i < 4 * kPairs; ++i) h[i] = rounded(i);
          auto const of_h = [&](int i) { return h[i]; };
          push.hold(of_h, tile.n_tile * kColumns, pass.shape().intermediate,
                    place_of_h<kGated>(pass, tile, row));
          up.store(of_h, tile, tile.row + row, state);
        } else {
          up.store(rounded, tile, tile.row + row, state);
        }
      }
      last.begin(task, down);
      // With few tokens, where nearly all blocks are like this one, 1 to 2% is lost by storing later.
      if (down && tile.rows <= gemm::kSubtileM) last.finish();
    } else {
      last.finish();
      up.settle();
      int const lent = down ? 0 : lent_to_up(kKind);
      gemm::pass<kPlain>(smem.gemm, state, k_tiles + lent, consumer);
      more = queue.read(ahead);
      if (tile.rows > 0) last.announce(task);
    }
    tile = ahead;
  }
  last.finish();
  up.drain();
  push.drain();
  last.announce({0, kNoBlock});
}

template <ActivationKind kKind, Transfer kTransfer, bool kSaves>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward(__grid_constant__ ForwardParams const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kPartialCombine = kTransfer == Transfer::partial_combine;
  TESSERA_DYNAMIC_SHARED(smem_raw);
  auto& smem = *reinterpret_cast<ForwardStorage*>(smem_raw);
  Pass const pass{p, smem, *p.exchange.gmem_epoch};
  // Routing uses the stages, which are free until the roles begin.
  auto& head = *reinterpret_cast<HeadStorage*>(&smem.gemm.a);
  CopyX copy_x(p.exchange, p.gmem_x, p.x_pitch_bytes, head.copy_x, smem.x_landed);
  if (arch::warp_idx() == kBesideWarp<kForwardThreads>) copy_x.begin();
  if (threadIdx.x == kForwardThreads - 1) init_barriers(smem);
  if constexpr (kSaves) {
    if (blockIdx.x == 0) {
      send_row_limit(p.exchange, pass.epoch, static_cast<std::int32_t>(p.saved.capacity),
                     static_cast<int>(threadIdx.x));
    }
  }
  clear_next_bank<kForwardThreads>(p.exchange, pass.epoch);
  if (renews_words(pass.epoch)) {
    renew_words<kForwardThreads>(p.exchange, pass.epoch, p.exchange.window.ack);
  }
  auto const published = [&] { *p.exchange.gmem_epoch = pass.epoch + 1; };  // all CTAs have read it
  if (!route_and_plan<kSaves>(p.exchange, head.route, pass.epoch, copy_x, published)) {
    begin_together(smem, false);
    return;
  }
  copy_plan<kTransfer != Transfer::direct>(pass, head.route);
  bool begins = true;
  if constexpr (kSaves) {
    if (blockIdx.x == 0) begins = begin_saved(pass, head.route);
  }
  if (!begin_together(smem, begins)) return;
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    arch::release_registers<kProducerRegisters>();
    int const warp = arch::warp_idx();
    if (warp == 0) {
      LoadTask<kKind> load(pass);
      gemm::produce_tiles<kPlain>(smem.gemm, load);
    } else if (warp <= kCommunicationWarps) {
      if constexpr (kTransfer == Transfer::direct) {
        pull_rows(pass, warp - 1);
      } else {
        pull_tokens<kPartialCombine>(pass, warp - 1);
      }
      if constexpr (kSaves) write_saved_rows(pass, warp - 1);
      if constexpr (kPartialCombine) {
        PartialCombine<8>(pass, smem.sums[warp - 1])
            .run(static_cast<int>(blockIdx.x) * kCommunicationWarps + warp - 1);
      }
    } else {
      schedule(pass);
    }
  } else {
    arch::acquire_registers<kConsumerRegisters>();
    int const warp = arch::warp_idx() - 4;
    if constexpr (kTransfer == Transfer::direct) {
      copy_own_rows(pass, warp);
    } else {
      pull_prologue_tokens<kPartialCombine>(pass, warp);
    }
    consume<kKind, kTransfer, kSaves>(pass, warpgroup - 1);
    arch::named_barrier_sync(kStagesFree, kConsumers * arch::kWarpgroupThreads);
    if constexpr (kPartialCombine) {
      auto* const storage = reinterpret_cast<SumStorage*>(
          reinterpret_cast<unsigned char*>(&smem.gemm.a) + SlotSums<kTransfer>::kBytes);
      PartialCombine<16> sums(pass, storage[warp]);
      sums.run(sums.kAnyDraw);
    }
    SlotSums<kTransfer>(pass, warp).run();
    Waiter(p.exchange, pass.epoch).report_given_up();
  }
  __syncwarp();
  arch::cluster_sync();  // this CTA's barriers may get arrivals of the other one until here
#endif
}

template <ActivationKind kKind, Transfer kTransfer, bool kSaves = false>
cudaError_t launch_forward_kernel(ForwardParams const& params, int sm_count, cudaStream_t stream) {
  constexpr auto* kKernel = forward<kKind, kTransfer, kSaves>;
  cudaError_t const error =
      cuda::host::allow_shared_memory<kKernel>(static_cast<int>(sizeof(ForwardStorage)));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCtasOfPair, 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(sm_count / kCtasOfPair * kCtasOfPair));
  config.blockDim = dim3(kForwardThreads);
  config.dynamicSmemBytes = sizeof(ForwardStorage);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

// Each case has a kernel of its own: code that a pass does not run would cost it time (lesson 5).
template <ActivationKind kKind>
cudaError_t launch_forward_of(ForwardParams const& params, int sm_count, cudaStream_t stream) {
  bool const saves = params.saved.tables.gmem_expert_offsets != nullptr;
  switch (params.exchange.shape.transfer) {
    case Transfer::direct:
      return saves ? launch_forward_kernel<kKind, Transfer::direct, true>(params, sm_count, stream)
                   : launch_forward_kernel<kKind, Transfer::direct>(params, sm_count, stream);
    case Transfer::once:
      return saves ? launch_forward_kernel<kKind, Transfer::once, true>(params, sm_count, stream)
                   : launch_forward_kernel<kKind, Transfer::once>(params, sm_count, stream);
    case Transfer::partial_combine:
      return saves ? cudaErrorInvalidValue
                   : launch_forward_kernel<kKind, Transfer::partial_combine>(params, sm_count,
                                                                             stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace tessera::expert_parallel
