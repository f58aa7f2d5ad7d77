// SPDX-License-Identifier: Apache-2.0
// What a persistent warp-specialised GEMM kernel is made of, as one value: tile, pipeline, cluster
// and policies. Kernels receive it inside a named type (`static constexpr GemmConfig gemm{..}`).
#pragma once

#include <cstdint>

namespace tessera::cuda::block {

// How rows of A reach shared memory: consecutive rows by TMA, or rows named by an index by cp.async.
enum class ALoader : uint8_t { kTma, kGather };

// Cooperative: the consumer warpgroups split each tile along m. Ping-pong: they own alternate tiles,
// one multiplies while the other runs its epilogue.
enum class Schedule : uint8_t { kCooperative, kPingPong };

// Which of its two dimensions is contiguous in an operand (rows x k).
enum class Major : uint8_t { kK, kRows };

// What the rows of a segment are: rows of A and D (varlen-M), or the k of both operands (varlen-K: one D
// per segment, A and B rows-major).
enum class Ragged : uint8_t { kM, kK };

struct TileShape {
  int m, n, k;
  bool operator==(TileShape const&) const = default;
};

constexpr int kSubtileM = 64;       // rows of one wgmma; a CTA skips 64-row parts past its segment
constexpr int kWarpRows = 16;       // a warp's share of them
constexpr int kGroupRows = 64;      // rows of B, of each half, in a row group
constexpr int kSlabColumns = 64;    // bf16 columns of a 128-byte swizzled row
constexpr int kGroupColumns = 128;  // tile_n comes in groups; a gated one is [64 gate | 64 up]
constexpr int kSharedMemoryBytes = 227 * 1024;

struct GemmConfig {
  TileShape tile{128, 256, 64};
  int stages = 4;
  int cluster_m = 1;  // CTAs along gemm_m that share each B tile by multicast
  // Two CTAs of a cluster, each with tiles of its own, fill stages of both: one is free once both have read theirs.
  bool paired = false;
  ALoader a_loader = ALoader::kTma;
  Schedule schedule = Schedule::kCooperative;
  int consumer_warpgroups = 2;
  Ragged ragged = Ragged::kM;
  Major b_major = Major::kK;
  // False: no code for layouts of B that take several loads. Gathering warps lose 2% by its presence.
  bool any_b_layout = true;
  // B may have fewer rows, or varlen-K columns, than a tile: row groups that do not exist are not asked for, as boxes
  // beyond the end of a matrix take as long as others.
  bool short_b = false;
  // The last tile has row groups of B that do not exist, and does not ask for them: zeros take longer than what is
  // there. acc then has products of what stages have kept in those columns, so an epilogue may store the others, but
  // add up none. As code of all GEMMs it costs those that gather 0.8%. docs/notebook/2026-11-26-last-tiles.md
  bool partial_last = false;
  // .. and multiplies half of its columns where there are no more, not what its stages have kept.
  bool halves_last = false;
  // One more k16 step adds an outer product of every segment (outer_product.cuh).
  bool adds_outer_product = false;
  // B has one stage less than A and comes a k_tile later (pipeline.cuh).
  bool b_behind = false;
  int b_halves = 1;     // 2: B has gate and up rows; every column group takes 64 of each
  int k_halves = 1;     // 2: k runs through two halves, each with a B of its own
  int store_slabs = 2;  // 64x64 staging buffers per consumer warpgroup
  int lent_stages = 0;  // stages that the ring lends to each tile's epilogue (lent_stages.cuh)
  bool defers = false;  // the epilogue works under the next tile's k loop (deferred_rows.cuh)
  int resident_k_tiles =
      0;  // at most so many k_tiles of B stay in shared memory for a run of tiles; 0: none
  int run_tiles = 0;  // tiles of a run, about; even
  int raster_n = 8;   // n_tiles walked before the next m block
  // False: a cluster's tiles lie a grid apart and there is no counter, for tiles that all take the same time.
  bool draws_tiles = true;
  // The first tile is drawn as well: a cluster that starts late leaves none undone.
  bool draws_first = false;
  // A warp that loads nothing draws and announces tiles, and it sleeps before a draw (tile_scheduler.cuh).
  bool schedules_apart = false;
  // handover.cuh: the kernel behind may start in this one's tail and read what it stores; this one in that of the
  // kernel ahead.
  bool hands_over = false;
  bool takes_over = false;

  consteval int threads() const { return 128 * (1 + consumer_warpgroups); }
  consteval bool ping_pong() const { return schedule == Schedule::kPingPong; }
  consteval bool gathers() const { return a_loader == ALoader::kGather; }
  consteval bool varlen_k() const { return ragged == Ragged::kK; }
  consteval Major a_major() const { return varlen_k() ? Major::kRows : Major::kK; }
  consteval int warpgroup_m() const { return ping_pong() ? tile.m : tile.m / consumer_warpgroups; }
  consteval int warpgroup_subtiles() const { return warpgroup_m() / kSubtileM; }

  // One CTA per SM: 384 threads enter with 168 registers each (64512 in all), 512 with 128.
  consteval int producer_registers() const {
    return gathers() ? 56 : consumer_warpgroups == 2 ? 40 : 32;
  }
  consteval int consumer_registers() const {
    return consumer_warpgroups == 2 ? (gathers() ? 224 : 232) : (gathers() ? 152 : 160);
  }

  consteval int column_groups() const { return tile.n / kGroupColumns; }
  consteval bool keeps_b() const { return resident_k_tiles > 0; }
  consteval int b_buffers() const {
    return keeps_b() ? resident_k_tiles : b_behind ? stages - 1 : stages;
  }
  // CTAs whose consumers free a stage.
  consteval int sharing_ctas() const { return paired ? 2 : cluster_m; }
  // Rows of the unit that the scheduler draws: a block of a tile for each CTA of the cluster, or a run.
  consteval int block_m() const { return tile.m * (keeps_b() ? run_tiles : cluster_m); }
  // Runs come in pairs of tiles, one for each ping-pong warpgroup.
  consteval int pair_m() const { return 2 * tile.m; }
  // Warps that never wait for their warpgroup are at different places in the ring, so each answers for itself.
  consteval bool warps_release() const { return lent_stages > 0 || defers; }

  // B has row groups of 64 rows of each half; CTA c of the cluster loads the c-th share of them.
  consteval int b_groups() const { return tile.n / kGroupRows / b_halves; }
  // Stages of a tile besides those of its k_tiles.
  consteval int other_stages() const { return lent_stages + (adds_outer_product ? 1 : 0); }
  consteval int b_groups_per_cta() const { return b_groups() / cluster_m; }
  // Of a B with `rows` rows, in one half: row groups of its last tile.
  constexpr int last_b_groups(int64_t rows) const {
    return static_cast<int>(((rows - 1) % tile.n + kGroupRows) / kGroupRows);
  }
  constexpr bool last_is_partial(int64_t rows) const {
    return last_b_groups(rows) < tile.n / kGroupRows;
  }
  consteval uint32_t a_subtile_bytes() const { return kSubtileM * tile.k * 2; }
  consteval uint32_t a_tile_bytes() const { return tile.m * tile.k * 2; }
  consteval uint32_t b_tile_bytes() const { return tile.n * tile.k * 2; }

  bool operator==(GemmConfig const&) const = default;
};

static_assert(GemmConfig{}.last_b_groups(2880) == 1 && GemmConfig{}.last_b_groups(2888) == 2);
static_assert(!GemmConfig{}.last_is_partial(248) && GemmConfig{}.last_is_partial(192));

// Arrivals that end one phase of each barrier; the roles below are the only ones that arrive.
struct BarrierArrivals {
  int full;   // expect_tx by the thread that issues B, and every gathering thread
  int empty;  // each warpgroup that reads the stage, in every CTA that shares it; or each warp
  int resident_empty;  // each ping-pong warpgroup, in its last tile of a run
  int work_full;       // the announcing warp; in a cluster, expect_tx by each CTA's producer warp 0
  int work_empty;      // each warp that reads work tiles, in every CTA of the cluster
};

consteval BarrierArrivals barrier_arrivals(GemmConfig c) {
  return {.full = 1 + (c.gathers() ? 128 : 0),
          .empty = (c.ping_pong() ? 1 : c.consumer_warpgroups) * (c.warps_release() ? 4 : 1) *
                   c.sharing_ctas(),
          .resident_empty = 2,
          .work_full = 1,
          .work_empty = (4 * c.consumer_warpgroups + (c.gathers() ? 4 : 1)) * c.cluster_m};
}

// Named barriers of the CTA; 0 is __syncthreads. Per-warpgroup ones take base + consumer index.
enum NamedBarrier : int { kBarrierSlabs = 1, kBarrierMmaTurn = 4 };

consteval bool valid(GemmConfig c) {
  if (c.tile.k != 64) throw "tile.k: one 128-byte swizzled row, 64 bf16";
  if (c.consumer_warpgroups < 2 || c.consumer_warpgroups > 3) throw "consumer_warpgroups: 2 or 3";
  if (c.ping_pong() && c.consumer_warpgroups != 2) throw "ping-pong alternates two warpgroups";
  if (c.ping_pong() ? c.tile.m % kSubtileM : c.tile.m != kSubtileM * c.consumer_warpgroups)
    throw "tile.m: cooperative 64 rows per consumer warpgroup, ping-pong a multiple of 64";
  if (c.tile.n != 128 && c.tile.n != 256) throw "tile.n: one or two groups of 128 columns";
  if (c.warpgroup_subtiles() * c.tile.n > (c.consumer_warpgroups == 2 ? 384 : 256))
    throw "accumulators do not fit the registers of a warpgroup";
  if (c.cluster_m != 1 && c.cluster_m != 2 && c.cluster_m != 4) throw "cluster_m: 1, 2 or 4";
  if (c.b_halves != 1 && c.b_halves != 2) throw "b_halves: 1 or 2";
  if (c.k_halves != 1 && c.k_halves != 2) throw "k_halves: 1 or 2";
  if (c.b_halves * c.k_halves > 2) throw "halves of B: along its rows or along k";
  if (c.b_groups() % c.cluster_m) throw "cluster_m: divides the row groups of B";
  if (c.varlen_k() && (c.b_major != Major::kRows || c.b_halves * c.k_halves > 1))
    throw "varlen-K: B is rows-major and in one half";
  if (c.varlen_k() && c.tile.m > 128) throw "varlen-K: at most 16 chunks of a token";
  if (c.gathers() && c.tile.m > 192) throw "gather: at most 12 rows per producer thread";
  if (c.keeps_b() && (!c.ping_pong() || c.gathers() || c.cluster_m > 1))
    throw "resident_k_tiles: ping-pong, TMA, no cluster";
  if (c.keeps_b() && (c.run_tiles < 2 || c.run_tiles % 2))
    throw "run_tiles: even, one for each warpgroup";
  if (c.short_b && (c.b_halves * c.k_halves > 1 || c.cluster_m > 1 || c.keeps_b()))
    throw "short_b: one half, no cluster, no resident_k_tiles";
  if (c.partial_last && (c.varlen_k() || c.gathers() || c.b_halves > 1 || c.cluster_m > 1 ||
                         c.paired || c.keeps_b() || c.short_b))
    throw "partial_last: varlen-M, TMA, one half along B's rows, no cluster, no resident_k_tiles";
  if (c.halves_last && (!c.partial_last || !c.defers || c.column_groups() != 2))
    throw "halves_last: partial_last, deferred, two column groups";
  if (c.b_behind && (!c.varlen_k() || !c.gathers() || !c.defers))
    throw "b_behind: varlen-K, gather, deferred";
  if (c.draws_first && !c.draws_tiles) throw "draws_first: where tiles are drawn";
  if (c.schedules_apart && (c.gathers() || c.cluster_m > 1 || c.keeps_b() || !c.draws_tiles))
    throw "schedules_apart: TMA, no cluster, no resident_k_tiles, where tiles are drawn";
  if (c.stages < 2) throw "stages: at least 2";
  if (c.lent_stages > 0 && (c.ping_pong() || c.cluster_m > 1))
    throw "lent_stages: cooperative, no cluster";
  if (c.paired && c.cluster_m > 1) throw "paired: tiles of its own for each CTA";
  if (c.defers && (c.ping_pong() || c.lent_stages > 0)) throw "defers: cooperative, no lent stages";
  if (c.adds_outer_product && (!c.defers || c.gathers() || c.tile.n != 256))
    throw "adds_outer_product: deferred, TMA, tile.n of 256";
  if (c.lent_stages > c.stages)
    throw "lent_stages: an epilogue gives the last one back in the next tile";
  return true;
}

}  // namespace tessera::cuda::block
