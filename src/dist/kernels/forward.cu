// SPDX-License-Identifier: Apache-2.0
// forward: o_t = sum over choices of s * (act(x_t w_up[e]^T) w_down[e]^T), experts on all GPUs, one launch.
// Schedule persistent, one CTA per SM on every GPU. All CTAs route and plan (route.cuh), then by role:
//   WG0 warp 0     | draws tickets; TMA loads of a task once [arrived] or [a_ready] says that A is there
//       warps 1, 2 | pull rows into the pool in the order of the tasks -> arrived
//   WG1, 2         | multiply; up: a by TMA -> a_ready; down: rows to slots on their sources by bulk
//                  | copies, completed under the next task -> down_tiles, block_done
//                  | last: aggregate the slice's tokens [block_done]
// Tasks    TaskCursor: ups, with downs behind by `lag` units
// Barriers pipeline and work ring of block/; counters of this GPU are counted by both consumer warpgroups
// Numerics fp32 accumulate, one rounding for a, y and o each; choices are added in their order: the bits
//          do not depend on P, nor on who computes a task
// Faults   a wait that fails lets every later wait pass: the kernel ends, o is void, the Fault says why
#include "cuda/arch/load_global.cuh"
#include "cuda/arch/proxy_fence.cuh"
#include "cuda/block/epilogue/activation.cuh"
#include "cuda/block/gemm.cuh"
#include "cuda/host/tensor_map.hpp"
#include "cuda/host/weight_maps.hpp"
#include "dist/kernels/copy_rows.cuh"
#include "dist/kernels/forward.hpp"
#include "dist/kernels/route.cuh"

namespace tessera::dist {
namespace {

namespace block = cuda::block;

constexpr block::GemmConfig kUp{.stages = 3, .b_halves = 2};
constexpr block::GemmConfig kDown{.stages = 3, .b_halves = 1};
constexpr int kThreads = 384;
constexpr int kCommunicationWarps = 2;
constexpr int kConsumers = 2;
constexpr int kProducerRegisters = 72;
constexpr int kConsumerRegisters = 216;
constexpr int kDownTask = 1 << 15;  // in WorkTile::segment
constexpr int kMostChoices = 32;
static_assert(kUp.tile.n == 2 * kUpTileColumns && kDown.tile.n == kDownTileColumns);
static_assert(kMostExperts <= kDownTask);

// Rows of y on their way, in the memory of the slabs: 64 rows of 128 columns per warpgroup. The pitch
// spreads a matrix of stmatrix over all banks; it leaves 60 rows in the slabs, 4 have a place of their own.
constexpr int kPushColumns = 128;
constexpr int kPushPitch = 2 * kPushColumns + 16;
constexpr int kRowsInSlabs = 60;
static_assert(kRowsInSlabs * kPushPitch <= 2 * block::kSubtileM * block::kSlabColumns * 2);

struct Shared {
  block::SharedStorage<kUp> gemm;
  alignas(128) unsigned char more_rows[kConsumers][4 * kPushPitch];
  CopyRing ring[kCommunicationWarps];
  // Of this rank's experts, as the cursors read them.
  std::int32_t counts[kMostExperts];  // [source][local expert]
  std::int32_t list_begin[kMostExperts];
  ExpertPlan plan[kMostExperts];  // local experts
  int failed;
};
static_assert(sizeof(Shared) <= block::kSharedMemoryBytes);
static_assert(sizeof(RouteStorage<kThreads>) <=
              sizeof(block::SharedStorage<kUp>::a) + sizeof(block::SharedStorage<kUp>::b));

struct Params {
  ExchangeArguments exchange;
  block::GemmParams up, down;  // maps and k_tiles; A of up is the pool, of down a
  block::ActivationParams activation;
  float const* gmem_scores;
  block::bf16* gmem_o;
  int lag;
};

// The pass as one CTA knows it.
struct Pass {
  Params const& p;
  Shared& smem;
  std::uint32_t epoch;

  __device__ ExchangeShape const& shape() const { return p.exchange.shape; }
  // Indexed by the expert's number over all ranks, though only this rank's are there.
  __device__ ExpertPlan const* plan() const {
    return smem.plan - p.exchange.rank * shape().local_experts();
  }
  __device__ CountMatrix counts() const {
    return {smem.counts - p.exchange.rank * shape().local_experts(), shape().local_experts()};
  }
  __device__ std::uint32_t* local_word(std::int64_t offset) const {
    return word_of(p.exchange.gmem_local, offset);
  }
  __device__ bool failed() const { return *static_cast<int volatile*>(&smem.failed) != 0; }
  __device__ void wait_count(std::int64_t offset, std::uint32_t count, Site site) const {
    if (failed()) return;
    if (!Waiter(p.exchange, epoch).for_count(offset, count, site)) smem.failed = 1;
  }
  __device__ void wait_epoch(std::int64_t offset, Site site, int peer) const {
    if (failed()) return;
    if (!Waiter(p.exchange, epoch).for_epoch(offset, epoch, site, peer)) smem.failed = 1;
  }
};

// Draws tickets and announces tasks to the readers of the work ring. One converged warp.
class Tasks {
 public:
  __device__ explicit Tasks(Pass const& pass)
      : pass_(pass),
        cursor_(pass.shape(), pass.plan(), pass.p.exchange.rank, lag(pass)),
        tickets_(cursor_.tickets()) {}

  __device__ void announce_first() {
    ticket_ = blockIdx.x;
    announce();
  }
  __device__ void draw() {
    if (arch::lane_idx() == 0) {
      drawn_ = atomicAdd(pass_.local_word(pass_.p.exchange.local.tickets(pass_.epoch)), 1u);
    }
  }
  __device__ void announce_drawn() {
    ticket_ = std::int64_t{gridDim.x} + __shfl_sync(block::kAllLanes, drawn_, 0);
    announce();
  }

 private:
  __device__ static int lag(Pass const& pass) {
    if (pass.p.lag >= 0) return pass.p.lag;
    return default_lag(owner_totals(pass.shape(), pass.plan(), pass.p.exchange.rank).units);
  }
  __device__ void announce() {
    int4 message{0, block::kNoTile, 0, 0};
    if (ticket_ < tickets_) {
      Task const task = cursor_.at(ticket_);
      ExchangeShape const& shape = pass_.shape();
      ExpertPlan const& expert = pass_.plan()[task.expert];
      int const row = task.block * shape.block_rows;
      int const left = expert.rows - (task.block - expert.first_block) * shape.block_rows;
      int const kind = task.kind == TaskKind::down ? kDownTask : 0;
      int const local = task.expert - pass_.p.exchange.rank * shape.local_experts();
      message = {local | kind | task.tile << 16, row, row + min(left, shape.block_rows), 0};
    }
    arch::mbarrier_wait(&pass_.smem.gemm.work_empty[slot_], phase_ ^ 1);
    if (arch::lane_idx() == 0) {
      pass_.smem.gemm.work[slot_] = message;
      arch::mbarrier_arrive(&pass_.smem.gemm.work_full[slot_]);
    }
    __syncwarp();
    if (++slot_ == block::kWorkSlots) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

  Pass const& pass_;
  TaskCursor cursor_;
  std::int64_t tickets_;
  std::int64_t ticket_ = 0;
  std::uint32_t drawn_ = 0;  // of lane 0
  int slot_ = 0;
  std::uint32_t phase_ = 0;
};

__device__ void produce(Pass const& pass) {
  constexpr int kAnnounceAhead = 4;  // k_tiles
  Shared& smem = pass.smem;
  Params const& p = pass.p;
  LocalLayout const& local = p.exchange.local;
  block::WorkQueue<kUp, true> queue(smem.gemm);
  block::PipelineState<kUp.stages> state;
  block::WorkTile tile;
  Tasks tasks(pass);
  tasks.announce_first();
  while (queue.read(tile)) {
    bool const down = (tile.segment & kDownTask) != 0;
    tile.segment &= kDownTask - 1;
    int const k_tiles = down ? p.down.k_tiles : p.up.k_tiles;
    tasks.draw();
    if (arch::lane_idx() == 0) {
      int const block = tile.row / pass.shape().block_rows;
      if (down) {
        pass.wait_count(local.a_ready(pass.epoch, block),
                        static_cast<std::uint32_t>(kConsumers * pass.shape().up_tiles()),
                        Site::a_ready);
      } else {
        pass.wait_count(local.arrived(pass.epoch, block),
                        static_cast<std::uint32_t>(pass.shape().block_rows), Site::arrived);
      }
      arch::fence_proxy_async_global();
    }
    __syncwarp();
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      if (k_tile == max(k_tiles - kAnnounceAhead, 0)) tasks.announce_drawn();
      block::wait_empty<kUp>(smem.gemm, state);
      if (arch::lane_idx() == 0) {  // the lane that acquired
        arch::Mbarrier* const full = &smem.gemm.full[state.stage];
        arch::mbarrier_arrive_expect_tx(full, kUp.a_tile_bytes() + kUp.b_tile_bytes());
        block::GemmParams const& gemm = down ? p.down : p.up;
        arch::tma_load(smem.gemm.a[state.stage], &gemm.a, full, k_tile * kUp.tile.k, tile.row);
        if (down) {
          // The stages of both GEMMs are alike.
          auto& stages = reinterpret_cast<block::SharedStorage<kDown>&>(smem.gemm);
          block::load_b<kDown>(stages, p.down, state.stage, k_tile, tile);
        } else {
          block::load_b<kUp>(smem.gemm, p.up, state.stage, k_tile, tile);
        }
      }
      __syncwarp();
      state.advance();
    }
  }
}

__device__ void communicate(Pass const& pass, int warp) {
  ExchangeArguments const& p = pass.p.exchange;
  int const worker = static_cast<int>(blockIdx.x) * kCommunicationWarps + warp;
  int const workers = static_cast<int>(gridDim.x) * kCommunicationWarps;
  int const rows = owner_totals(p.shape, pass.plan(), p.rank).rows;
  int const mine = (rows - worker + workers - 1) / workers;
  if (mine <= 0) return;
  int const row_bytes = 2 * p.shape.hidden;
  RowCursor cursor(p.shape, pass.counts(), pass.plan(), pass.smem.list_begin, p.rank);
  PoolRow ahead = {};
  std::uint32_t ahead_pair = 0;
  auto const look_ahead = [&](int i) {  // entries are read a row before they are needed
    ahead = cursor.at(worker + i * workers);
    std::int64_t const at = p.window.list_entry(parity(pass.epoch), ahead.source, ahead.entry);
    ahead_pair = __ldcg(word_of(p.windows[p.rank], at));  // RouteEntry::pair
  };
  look_ahead(0);
  arch::fence_proxy_async_global();
  copy_rows(pass.smem.ring[warp], mine, row_bytes, [&](int i) {
    PoolRow const row = ahead;
    std::uint32_t const pair = ahead_pair;
    if (i + 1 < mine) look_ahead(i + 1);
    std::int64_t const pool_row = std::int64_t{row.block} * p.shape.block_rows + row.position;
    *reinterpret_cast<uint2*>(p.gmem_local + p.local.row_origin + 8 * pool_row) =
        make_uint2(pair, static_cast<std::uint32_t>(row.source));
    std::int64_t const token = pair / static_cast<std::uint32_t>(p.shape.max_top_k);
    // Pads stay what they are: a row of a GEMM depends on its own row alone, and no slot gets one.
    return RowCopy{p.windows[row.source] + p.window.x_row(token),
                   p.gmem_pool + pool_row * row_bytes,
                   pass.local_word(p.local.arrived(pass.epoch, row.block)),
                   static_cast<std::uint32_t>(1 + row.pad)};
  });
}

// The epilogue of down: 64 rows of this warpgroup to their slots.
class Push {
 public:
  __device__ Push(Pass const& pass, int consumer) : pass_(pass), consumer_(consumer) {
    thread_ = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads;
    int const lane = thread_ % arch::kWarpThreads;
    // stmatrix: lane/8 names the matrix; bit 0: lower 8 rows, bit 1: right 8 columns.
    matrix_row_ = arch::shared_address(
                      row(thread_ / arch::kWarpThreads * 16 + (lane / 8 & 1) * 8 + lane % 8)) +
                  lane / 16 * 16;
  }

  // Where the thread's row goes, known before the tile is multiplied out.
  __device__ char* destination(block::WorkTile const& tile, int first) const {
    ExchangeArguments const& p = pass_.p.exchange;
    if (thread_ >= block::kSubtileM || first + thread_ >= tile.rows) return nullptr;
    std::int64_t const pool_row = std::int64_t{tile.row} + first + thread_;
    uint2 const origin =
        *reinterpret_cast<uint2 const*>(p.gmem_local + p.local.row_origin + 8 * pool_row);
    auto const top_k = static_cast<std::uint32_t>(p.shape.max_top_k);
    return p.windows[origin.y] +
           p.window.slot(origin.x / top_k, static_cast<std::int32_t>(origin.x % top_k));
  }

  __device__ void store(block::Accumulators<kUp>& acc, block::WorkTile const& tile, char* to) {
    int const barrier = block::kBarrierSlabs + consumer_;
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      arch::tma_store_wait_read<0>();  // of what this thread sent before
      arch::named_barrier_sync(barrier, arch::kWarpgroupThreads);
      TESSERA_UNROLL
      for (int j = 0; j < kPushColumns / 8; j += 2) {
        auto const pair = [&](int column, int rows) {
          float const* const value = &acc[half][4 * column + 2 * rows];
          return arch::pack_bf16(value[0], value[1]);
        };
        arch::stmatrix_x4(matrix_row_ + j * 16, pair(j, 0), pair(j, 1), pair(j + 1, 0),
                          pair(j + 1, 1));
      }
      arch::fence_proxy_async_shared();
      arch::named_barrier_sync(barrier, arch::kWarpgroupThreads);
      int const column = tile.n_tile * kDownTileColumns + half * kPushColumns;
      int const columns = min(pass_.shape().hidden - column, kPushColumns);
      if (to != nullptr && columns > 0) {
        arch::bulk_store(to + 2 * column, row(thread_), static_cast<std::uint32_t>(2 * columns));
        arch::tma_store_commit();
      }
    }
    begin(tile);
  }

  // The warpgroup's part of a task has been sent; finish() tells when it is there.
  __device__ void begin(block::WorkTile const& tile) {
    pending_ = true;
    expert_ = tile.segment;
    block_ = tile.row / pass_.shape().block_rows;
  }

  __device__ void finish() {
    if (!pending_) return;
    pending_ = false;
    arch::bulk_store_wait<0>();
    arch::fence_acq_rel_sys();
    arch::named_barrier_sync(block::kBarrierSlabs + consumer_, arch::kWarpgroupThreads);
    if (thread_ != 0) return;
    ExchangeArguments const& p = pass_.p.exchange;
    std::uint32_t const before =
        arch::count_acq_rel_gpu(pass_.local_word(p.local.down_tiles(pass_.epoch, block_)), 1);
    if (before + 1 != static_cast<std::uint32_t>(kConsumers * p.shape.down_tiles())) return;
    // Rows of a block come from sources in turn: those whose range meets the block's.
    int const expert = p.rank * p.shape.local_experts() + expert_;
    int const first = (block_ - pass_.plan()[expert].first_block) * p.shape.block_rows;
    int row = 0;
    for (int turn = 0; turn < p.shape.ranks; ++turn) {
      int const source = source_at(p.shape, p.rank, turn);
      int const end = row + pass_.counts().at(source, expert);
      if (end > row && row < first + p.shape.block_rows && end > first) {
        arch::store_release_sys(
            word_of(p.windows[source], p.window.block_done_word(p.rank, block_)), pass_.epoch);
      }
      row = end;
    }
  }

 private:
  __device__ unsigned char* row(int r) const {
    auto* const slabs = reinterpret_cast<unsigned char*>(&pass_.smem.gemm.slabs[consumer_][0][0]);
    return r < kRowsInSlabs ? slabs + r * kPushPitch
                            : pass_.smem.more_rows[consumer_] + (r - kRowsInSlabs) * kPushPitch;
  }

  Pass const& pass_;
  int consumer_, thread_;
  std::uint32_t matrix_row_;
  bool pending_ = false;
  int expert_ = 0, block_ = 0;
};

// Tokens of the CTA's slice, a warp each: lane j awaits choice j.
__device__ void aggregate(Pass const& pass, int warp) {
  ExchangeArguments const& p = pass.p.exchange;
  int const lane = arch::lane_idx();
  int const top_k = p.shape.max_top_k;
  TokenSlice const slice =
      token_slice(p.tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  for (int token = slice.begin + warp; token < slice.end; token += 4 * kConsumers) {
    int const pair = token * top_k + lane;
    bool const routed = lane < top_k && is_expert(p, p.gmem_topk_ids[pair]);
    float score = 0;
    if (routed) {
      int const owner = p.shape.owner(p.gmem_topk_ids[pair]);
      pass.wait_epoch(p.window.block_done_word(owner, *pair_word(p, pair)), Site::block_done,
                      owner);
      score = pass.p.gmem_scores[pair];
    }
    unsigned const choices = __ballot_sync(block::kAllLanes, routed);
    char const* const slots = p.windows[p.rank] + p.window.slot(token, 0);
    std::int64_t const pitch = 2 * std::int64_t{p.shape.hidden};
    for (int first = 0; first < p.shape.hidden; first += 8 * arch::kWarpThreads) {
      int const column = first + 8 * lane;
      bool const inside = column < p.shape.hidden;
      float sum[8] = {};
      for (unsigned left = choices; left != 0; left &= left - 1) {
        int const choice = __ffs(static_cast<int>(left)) - 1;
        float const s = __shfl_sync(block::kAllLanes, score, choice);
        if (!inside) continue;
        uint4 const bits = arch::load_streaming_16(slots + choice * pitch + 2 * column, true);
        std::uint32_t const pairs[4] = {bits.x, bits.y, bits.z, bits.w};
        TESSERA_UNROLL
        for (int i = 0; i < 4; ++i) {
          float2 const value = arch::unpack_bf16(pairs[i]);
          sum[2 * i] = fmaf(s, value.x, sum[2 * i]);
          sum[2 * i + 1] = fmaf(s, value.y, sum[2 * i + 1]);
        }
      }
      if (!inside) continue;
      uint4 const rounded = {arch::pack_bf16(sum[0], sum[1]), arch::pack_bf16(sum[2], sum[3]),
                             arch::pack_bf16(sum[4], sum[5]), arch::pack_bf16(sum[6], sum[7])};
      *reinterpret_cast<uint4*>(pass.p.gmem_o + std::int64_t{token} * p.shape.hidden + column) =
          rounded;
    }
  }
}

__device__ void consume(Pass const& pass, int consumer) {
  Shared& smem = pass.smem;
  Params const& p = pass.p;
  int const row = consumer * block::kSubtileM;
  bool const issuer = threadIdx.x % arch::kWarpgroupThreads == 0;
  block::WorkQueue<kUp> queue(smem.gemm);
  block::PipelineState<kUp.stages> state;
  block::Accumulators<kUp> acc[1];
  block::ActivationEpilogue<kUp, ActivationKind::swiglu, false> up(smem.gemm, p.activation,
                                                                   consumer);
  Push push(pass, consumer);
  block::WorkTile tile, ahead;
  bool more = queue.read(tile);
  while (more) {
    bool const down = (tile.segment & kDownTask) != 0;
    tile.segment &= kDownTask - 1;
    bool const has_rows = tile.rows > row;
    int const k_tiles = down ? p.down.k_tiles : p.up.k_tiles;
    char* to = nullptr;
    if (has_rows) {
      int const last = block::multiply<kUp, 1>(smem.gemm, state, acc, row, k_tiles);
      more = queue.read(ahead);  // under the last wgmmas
      if (down) to = push.destination(tile, row);
      arch::wgmma_wait<0>();
      block::release_stage<kUp>(smem.gemm, last);
    } else {
      block::pass<kUp>(smem.gemm, state, k_tiles);
      more = queue.read(ahead);
    }
    push.finish();  // of an earlier task
    if (down) {
      if (has_rows) {
        push.store(acc[0], tile, to);
      } else {
        push.begin(tile);
      }
    } else {
      if (has_rows) up.store(acc[0], tile, tile.row + row);
      if (issuer) {
        arch::bulk_store_wait<0>();  // a is there, not merely read from shared memory
        arch::add_release_gpu(pass.local_word(p.exchange.local.a_ready(
                                  pass.epoch, tile.row / pass.shape().block_rows)),
                              1);
      }
    }
    tile = ahead;
  }
  push.finish();
  up.drain();
}

// Blocks of the slice's pairs, from counts and plan of all ranks; then what the roles keep of them.
__device__ void keep_plan(Pass const& pass, RouteStorage<kThreads> const& route) {
  ExchangeArguments const& p = pass.p.exchange;
  int const thread = static_cast<int>(threadIdx.x);
  CountMatrix const counts{route.counts, p.shape.experts};
  TokenSlice const slice =
      token_slice(p.tokens, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  for (int pair = slice.begin * p.shape.max_top_k + thread; pair < slice.end * p.shape.max_top_k;
       pair += kThreads) {
    int const id = p.gmem_topk_ids[pair];
    if (!is_expert(p, id)) continue;
    auto const index = static_cast<std::int32_t>(*pair_word(p, pair));
    *pair_word(p, pair) =
        static_cast<std::uint32_t>(block_of_pair(p.shape, counts, route.plan, id, p.rank, index));
  }
  int const local = p.shape.local_experts();
  for (int i = thread; i < p.shape.experts; i += kThreads) {
    pass.smem.counts[i] = counts.at(i / local, p.rank * local + i % local);
    pass.smem.list_begin[i] = route.list_begin[i];
    if (i < local) pass.smem.plan[i] = route.plan[p.rank * local + i];
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1) forward(__grid_constant__ Params const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem_raw[];
  auto& smem = *reinterpret_cast<Shared*>(smem_raw);
  Pass const pass{p, smem, *p.exchange.gmem_epoch};
  // The stages are free until the roles begin.
  auto& routing = *reinterpret_cast<RouteStorage<kThreads>*>(&smem.gemm.a);
  clear_next_bank<kThreads>(p.exchange, pass.epoch);
  if (!route(p.exchange, routing, pass.epoch) || !make_plan(p.exchange, routing, pass.epoch))
    return;
  keep_plan(pass, routing);
  if (threadIdx.x == 0) {
    smem.failed = 0;
    for (CopyRing& ring : smem.ring) {
      for (arch::Mbarrier& full : ring.full) arch::mbarrier_init(&full, 1);
    }
    block::init_pipeline<kUp>(smem.gemm);
  }
  arch::fence_proxy_async_shared();  // routing wrote where TMA will
  __syncthreads();
  int const warpgroup = arch::warpgroup_idx();
  if (warpgroup == 0) {
    arch::release_registers<kProducerRegisters>();
    int const warp = arch::warp_idx();
    if (warp == 0) {
      produce(pass);
    } else if (warp <= kCommunicationWarps && arch::lane_idx() == 0) {
      communicate(pass, warp - 1);
    }
  } else {
    arch::acquire_registers<kConsumerRegisters>();
    consume(pass, warpgroup - 1);
    aggregate(pass, static_cast<int>(threadIdx.x) / 32 - 4);
  }
  __syncwarp();
  __syncthreads();
  if (threadIdx.x != 0) return;
  LocalLayout const& local = p.exchange.local;
  if (arch::count_acq_rel_gpu(pass.local_word(local.ended(pass.epoch)), 1) + 1 != gridDim.x) return;
  for (int r = 0; r < pass.shape().ranks; ++r) {
    arch::store_release_sys(
        word_of(p.exchange.windows[r], p.exchange.window.ack_word(p.exchange.rank)), pass.epoch);
  }
  *p.exchange.gmem_epoch = pass.epoch + 1;
#endif
}

Params make_params(ForwardArguments const& args, cudaError_t& error) {
  namespace host = cuda::host;
  ExchangeArguments const& x = args.exchange;
  std::int64_t const d = x.shape.hidden;
  std::int64_t const n = x.shape.intermediate;
  std::int64_t const rows = x.shape.pool_rows();
  int const experts = x.shape.local_experts();
  error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  Params p{x, {}, {}, {}, args.gmem_scores, static_cast<block::bf16*>(args.gmem_o), args.lag};
  then(host::make_matrix_map(p.up.a, x.gmem_pool, rows, d, d, kUp.tile.m));
  then(host::make_matrix_map(p.down.a, args.gmem_a, rows, n, n, kDown.tile.m));
  auto const weight = [](void const* gmem, std::int64_t expert, std::int64_t row,
                         std::int64_t block_of_rows) {
    cuda::WeightRows w;
    w.gmem = gmem;
    w.expert_stride = expert;
    w.row_stride = row;
    w.column_stride = 1;
    w.block = block_of_rows;
    return w;
  };
  auto const* const w_up = static_cast<block::bf16 const*>(args.gmem_w_up);
  cuda::WeightRows const up[2] = {weight(w_up, 2 * n * d, d, n),
                                  weight(w_up + n * d, 2 * n * d, d, n)};
  cuda::WeightRows const down[2] = {weight(args.gmem_w_down, d * n, n, d), {}};
  then(host::make_weight_maps<kUp>(p.up, up, experts, n, d));
  then(host::make_weight_maps<kDown>(p.down, down, experts, d, n));
  then(
      host::make_ragged_store_map(p.activation.a, args.gmem_a, rows, 1, n, rows, block::kSubtileM));
  p.activation.stores_a = true;
  p.activation.columns = static_cast<int>(n);
  p.activation.ragged_extent = static_cast<int>(rows);
  p.up.k_tiles = static_cast<int>((d + kUp.tile.k - 1) / kUp.tile.k);
  p.down.k_tiles = static_cast<int>((n + kDown.tile.k - 1) / kDown.tile.k);
  return p;
}

}  // namespace

cudaError_t launch_forward(ForwardArguments const& args, int sm_count, cudaStream_t stream) {
  ExchangeShape const& s = args.exchange.shape;
  if (s.experts > kMostExperts || s.ranks > kMaxRanks || s.transfer != Transfer::direct ||
      s.hidden % 8 != 0 || s.intermediate % 8 != 0 || s.max_top_k > kMostChoices ||
      s.block_rows != kUp.tile.m) {
    return cudaErrorInvalidValue;
  }
  cudaError_t error = cudaSuccess;
  Params params = make_params(args, error);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(forward, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  void* arguments[] = {&params};
  return cudaLaunchCooperativeKernel(reinterpret_cast<void const*>(forward),
                                     dim3(static_cast<unsigned>(sm_count)), dim3(kThreads),
                                     arguments, sizeof(Shared), stream);
}

}  // namespace tessera::dist
