// SPDX-License-Identifier: Apache-2.0
// The roles of the fused forward kernel share its configuration, shared memory, parameters, and the pass as one CTA
// knows it.
#pragma once

#include "cuda/epilogue/activation_math.cuh"
#include "cuda/epilogue/bias.cuh"
#include "cuda/gemm/sm90/roles.cuh"
#include "expert_parallel/exchange/route.cuh"
#include "expert_parallel/fused/copy_x.cuh"
#include "expert_parallel/fused/forward.hpp"
#include "expert_parallel/plan/biases.hpp"

namespace tessera::expert_parallel {

namespace gemm = cuda::gemm;

// kPlain is for down tasks, and for up tasks without a gate; kGated for up tasks with one. Stages of both are alike.
// An up task stages its results in stages that the ring lends it, a down task a quarter at a time in a slab.
constexpr gemm::GemmConfig kPlain{
    .cluster = {.ctas = 2, .sharing = gemm::Sharing::kPaired},
    .epilogue = {.mode = gemm::EpilogueMode::kLent, .slabs = 1, .lent_stages = 1}};
constexpr gemm::GemmConfig kGated{.b = {.halves = gemm::Halves::kAlongRows},
                                  .cluster = kPlain.cluster,
                                  .epilogue = kPlain.epilogue};
// These describe the loads where each CTA of a pair loads half of a B for both.
constexpr gemm::GemmConfig kPlainShared{
    .cluster = {.ctas = 2, .sharing = gemm::Sharing::kMulticast}};
constexpr gemm::GemmConfig kGatedShared{.b = kGated.b, .cluster = kPlainShared.cluster};
// A down task stores through the slab, under the k loop of the next task.
constexpr gemm::EpilogueConfig kDownEpilogue{.mode = gemm::EpilogueMode::kDeferred, .slabs = 1};
constexpr int kCtasOfPair = 2;
static_assert(kPlain.tile.n == kTileColumns && kGated.tile == kPlain.tile);
static_assert(sizeof(gemm::SharedStorage<kPlain>) == sizeof(gemm::SharedStorage<kGated>));
constexpr int kForwardThreads = 384;
constexpr int kCommunicationWarps = 2;
constexpr int kConsumers = 2;
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kProducerRegisters = 72;
constexpr int kConsumerRegisters = 216;
// Bits of WorkTile::segment.
constexpr int kDownTask = 1 << 15;
constexpr int kSharedRows = 1 << 14;  // the pair's tasks read the same rows, else the same weights
// At this named barrier of the consumer warps none of them reads a stage any more.
constexpr int kStagesFree = 8;
static_assert(kMaxChoices <= arch::kWarpThreads);
static_assert(kMaxExperts <= kSharedRows);

consteval gemm::GemmConfig up_gemm(ActivationKind kind) {
  return Activation{.kind = kind}.gated() ? kGated : kPlain;
}

// Counts the stages that an up task borrows: B's place in one holds 128 columns of a for all rows.
consteval int lent_to_up(ActivationKind kind) { return Activation{.kind = kind}.gated() ? 1 : 2; }

// The queue holds tasks whose results the consumer warps have sent, until a warp has announced them.
constexpr int kSentSlots = 4;
struct SentTask {
  int kind_and_expert;  // kDownTask, local expert
  int block;            // kNoBlock: there are no more
};
constexpr int kNoBlock = -1;
struct SentQueue {
  arch::Mbarrier full[kSentSlots];   // all consumer warps
  arch::Mbarrier empty[kSentSlots];  // the announcing warp
  SentTask task[kSentSlots];
};

// Barriers between the warp that schedules tasks and the one that loads them; each completes a phase for each task.
struct ScheduleBarriers {
  arch::Mbarrier may_draw;  // the next task may be drawn; CTA 0 waits for it
  arch::Mbarrier loadable;  // the announced task's A has arrived
};

// CTA 0 of a pair sends CTA 1 the tickets that it draws. CTA 0 is at most one task ahead, as it cannot load without the
// other.
constexpr int kTicketSlots = 4;
struct DrawnTickets {
  alignas(16) int4 drawn[kTicketSlots];
  arch::Mbarrier full[kTicketSlots];  // its bytes
};

// A warp that makes partial combines has this storage (partial_combine.cuh).
struct SumStorage {
  static constexpr int kRowsOfDraw = 2;
  static constexpr int kMaxUnsignalled = 4;  // tokens whose signals share one fence
  struct Token {
    std::uint32_t choices;  // on this rank
    int token, source;
  };
  struct Term {
    std::int32_t row;  // of the pool
    float score;
  };

  alignas(16) uint4 entries[2][kRowsOfDraw];       // RouteEntry of each row of a draw
  alignas(16) PlacedPair placed[kMaxChoices + 2];  // of all choices of the next token, by 16 bytes
  alignas(16) Token now, ahead;                    // the token at hand and the next one
  int source[2][kRowsOfDraw];                      // of each row of a draw
  Token unsignalled[kMaxUnsignalled];              // whose sums have been stored
  Term terms[kMaxChoices];                         // of the token at hand
};

struct ForwardStorage {
  gemm::SharedStorage<kPlain> gemm;
  SentQueue sent;
  ScheduleBarriers schedule;
  DrawnTickets tickets;
  CopyXBarriers x_landed;
  SumStorage sums[kCommunicationWarps];
  char* push_to[kConsumerWarps][gemm::kWarpRows];  // push_rows.cuh
  // The cursors read these of this rank's experts.
  std::int32_t list_begin[kMaxExperts];
  ExpertPlan plan[kMaxExperts];  // local experts; of several ranks, half of it at most
  // [source][local expert], where rows cross once: the first of their rows in this rank's pool.
  std::int32_t pool_begin[kMaxExperts];
  int failed;
  alignas(16) int planned;  // this CTA knows its plan; the other one of the pair reads it

  // [expert], with several ranks: this rank's rows begin at this row of the owner's pool.
  __device__ std::int32_t* pool_rows() {
    return reinterpret_cast<std::int32_t*>(plan + kMaxExperts / 2);
  }

  // [source][local expert], in the memory where the kernels of one GPU have the offsets of segments.
  __device__ std::int32_t* counts() { return gemm.segment_offsets; }
  template <gemm::GemmConfig kGemm>
  __device__ gemm::SharedStorage<kGemm>& gemm_of() {
    return reinterpret_cast<gemm::SharedStorage<kGemm>&>(gemm);
  }
};
static_assert(sizeof(ForwardStorage) <= gemm::kSharedMemoryBytes);
static_assert(kMaxExperts <= gemm::kMaxSegments);

// Lies in the memory of the stages until the roles begin.
struct HeadStorage {
  CopyXStorage copy_x;
  RouteStorage<kForwardThreads> route;
};
static_assert(sizeof(HeadStorage) <=
              sizeof(gemm::SharedStorage<kPlain>::a) + sizeof(gemm::SharedStorage<kPlain>::b));

// The epilogue of an up task reads these (store_rows.cuh).
struct StoreRowsParams {
  CUtensorMap a;  // ragged (column, half, row, end), 64 x 1 x 16 x 1
  Activation activation;
  int ragged_extent;  // of its row dimension
};

// A CTA loads halves for both of its pair by these maps.
struct SharedMaps {
  CUtensorMap a;  // 64 rows
  CUtensorMap b;  // half a tile, unless b_in_boxes
};

// Null stands for no biases. up: of gate columns, of up columns.
struct ExpertBiases {
  gemm::Bias up[2], down;
};

struct ForwardParams {
  ExchangeArguments exchange;
  gemm::GemmParams up = {}, down = {};  // maps and k_tiles; A of up is the pool, of down a
  SharedMaps shared_up = {}, shared_down = {};
  StoreRowsParams activation = {};
  char const* gmem_x;  // null: the rows lie in the window
  std::int64_t x_pitch_bytes;
  gemm::bf16* gmem_o;
  int lag;
  SavedPass saved;
  ExpertBiases biases = {};
};

// The pass as one CTA knows it.
struct Pass {
  ForwardParams const& p;
  ForwardStorage& smem;
  std::uint32_t epoch;

  __device__ ExchangeShape const& shape() const { return p.exchange.shape; }
  // Indexed by the expert's number over all ranks, though only this rank's are there.
  __device__ ExpertPlan const* plan() const {
    return smem.plan - p.exchange.rank * p.exchange.local_experts;
  }
  __device__ CountMatrix counts() const {
    return {smem.counts() - p.exchange.rank * p.exchange.local_experts, p.exchange.local_experts};
  }
  // Returns the owner's block of the index-th row that this rank sends to the expert.
  __device__ std::int32_t block_of(std::int32_t expert, std::int32_t index) const {
    std::int32_t const first =
        shape().ranks > 1 ? smem.pool_rows()[expert] : plan()[expert].first_block * kPlain.tile.m;
    return (first + index) / kPlain.tile.m;
  }
  __device__ std::uint32_t* local_word(std::int64_t offset) const {
    return word_of(p.exchange.gmem_local, offset);
  }
  // Other warps of the CTA look at it without a barrier between.
  __device__ bool failed() const { return *static_cast<int volatile*>(&smem.failed) != 0; }
  __device__ void fail() const { *static_cast<int volatile*>(&smem.failed) = 1; }
  // A converged warp waits, and calls meanwhile() between two looks.
  template <class Meanwhile>
  __device__ void wait_count(std::int64_t offset, std::uint32_t count, Site site,
                             Meanwhile meanwhile) const {
    if (__any_sync(arch::kAllLanes, failed())) return;
    if (!Waiter(p.exchange, epoch).for_count(offset, count, site, meanwhile)) fail();
    __syncwarp();
  }
  __device__ void wait_epoch(std::int64_t offset, Site site, int peer) const {
    if (failed()) return;
    if (!Waiter(p.exchange, epoch).for_epoch(offset, epoch, site, peer)) fail();
  }
  // A converged warp waits for entries and places that all ranks, or this one, write into this rank's window.
  __device__ void wait_lists() const { wait_lists(arch::lane_idx() < shape().ranks); }
  __device__ void wait_own_list() const { wait_lists(arch::lane_idx() == p.exchange.rank); }

 private:
  __device__ void wait_lists(bool waits) const {
    if (__any_sync(arch::kAllLanes, failed())) return;
    if (!Waiter(p.exchange, epoch).for_lists(waits)) fail();
    __syncwarp();
  }
};

}  // namespace tessera::expert_parallel
