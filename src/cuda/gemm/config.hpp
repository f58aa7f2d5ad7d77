// SPDX-License-Identifier: Apache-2.0
// GemmConfig states a persistent warp-specialised GEMM kernel as one value: tile, pipeline, cluster
// and policies. Kernels receive it inside a named type (`static constexpr GemmConfig gemm{..}`).
#pragma once

#include <cstdint>

namespace tessera::cuda::gemm {

// An operand's rows reach shared memory in one of two ways: consecutive rows by TMA, or rows named by an index by
// cp.async.
enum class Loader : uint8_t { kTma, kGather };

// Cooperative: the consumer warpgroups split each tile along m. Ping-pong: they own alternate tiles,
// one multiplies while the other runs its epilogue.
enum class Schedule : uint8_t { kCooperative, kPingPong };

// An operand (rows x k) is contiguous along k, or along its rows.
enum class Major : uint8_t { kK, kRows };

// The rows of a segment are rows of A and D (varlen-M), or they are the k of both operands (varlen-K: one D
// per segment, A and B rows-major).
enum class Ragged : uint8_t { kM, kK };

// B of a gated layer has two halves, gate and up. Along rows: every column group takes 64 rows of each half. Along
// k: k runs through two halves, each with a B of its own.
enum class Halves : uint8_t { kOne, kAlongRows, kAlongK };

// TMA loads the tile of an operand by boxes. Tile: one box holds it. Any: there is also code for layouts that take
// several boxes; that code alone costs gathering warps 2%.
enum class Boxes : uint8_t { kAny, kTile };

enum class Element : uint8_t { kBf16, kE4m3 };
consteval int bytes_of(Element element) { return element == Element::kBf16 ? 2 : 1; }

// Says what memory and stages hold of A or B.
struct Operand {
  Element element = Element::kBf16;  // in stages, where the tensor cores read it
  Element stored = element;          // in memory; threads that load may decode it
  Loader loader = Loader::kTma;
  Major major = Major::kK;
  Halves halves = Halves::kOne;
  Boxes boxes = Boxes::kAny;

  // In stages.
  consteval int bytes(int rows, int k) const { return rows * k * bytes_of(element); }
  bool operator==(Operand const&) const = default;
};

// The CTAs of a cluster share what they load. Multicast: they lie along gemm_m, each loads a part of every B tile for
// all of them. Paired: two CTAs work on different tiles and load half of a shared operand each; a stage is free when
// both have read it.
enum class Sharing : uint8_t { kNone, kMulticast, kPaired };
struct Cluster {
  int ctas = 1;
  Sharing sharing = Sharing::kNone;
  bool operator==(Cluster const&) const = default;
};

// B lies in one of three places of shared memory.
//   ring      in the stages, beside A
//   behind    B has one stage less than A and comes a k_tile later (ring.cuh)
//   resident  at most `k_tiles` k_tiles of B stay for a run of about `run_tiles` tiles, an even number
// B may be a sum of several terms: those of a k_tile lie one behind the other along k, and meet the same A.
enum class BStorage : uint8_t { kRing, kBehind, kResident };
struct BStages {
  BStorage storage = BStorage::kRing;
  int k_tiles = 0;
  int run_tiles = 0;
  int terms = 1;
  bool operator==(BStages const&) const = default;
};

// Says what happens where B's rows do not fill the tiles. Boxes beyond the end of a matrix take as long as others, so
// row groups that do not exist are not loaded.
//   whole    the tiles are full, or zeros are loaded
//   short    B may have fewer rows, or varlen-K columns, than a tile
//   partial  the last tile has row groups that do not exist. In their columns the accumulators hold products of old
//            data in the stages: an epilogue may store the other columns, but sum no row. If all GEMMs had this code,
//            those that gather would lose 0.8%. docs/notebook/2026-11-26-last-tiles.md
//   halved   as partial, and the last tile multiplies half of its columns where there are no more
enum class Tail : uint8_t { kWhole, kShort, kPartial, kHalved };

// The epilogue works at one of four times. Inline: right behind the k loop. Deferred: under the next tile's k loop,
// from rows that it holds (deferred.cuh). Lent: right behind the k loop, through stages of the ring (lent.cuh).
// Apart: as deferred, by a warpgroup of its own, which reads what consumers hold (sm90/roles_scaled.cuh).
enum class EpilogueMode : uint8_t { kInline, kDeferred, kLent, kApart };
struct EpilogueConfig {
  EpilogueMode mode = EpilogueMode::kInline;
  int slabs = 2;        // 64x64 staging buffers per consumer warpgroup
  int lent_stages = 0;  // stages that the ring lends to each tile's epilogue
  int row_numbers = 0;  // 4 bytes of each row, in two turns, of an epilogue apart that reads
  bool outer_product =
      false;  // one more k16 step adds an outer product of every segment (outer_product.cuh)
  bool operator==(EpilogueConfig const&) const = default;
};

// Says who takes the next tile, and when (scheduler.cuh).
//   counter             a cluster's first tile is its own; it draws the others from a counter
//   stride              tiles of a cluster lie a grid apart and there is no counter, for tiles that all take as long
//   counter from first  the first tile is drawn as well: a cluster that starts late leaves none undone
//   own warp            like counter, but a warp that loads nothing draws and announces, and sleeps before each draw
enum class Draw : uint8_t { kCounter, kStride, kCounterFromFirst, kOwnWarp };
struct Order {
  Draw draw = Draw::kCounter;
  int raster_n = 8;            // n_tiles walked before the next m block
  bool longest_first = false;  // varlen-K: long segments before the others
  bool ready_first =
      false;  // varlen-M: blocks whose rows of A are there before the others (await_rows.cuh)
  bool operator==(Order const&) const = default;
};

// Hands over: the next kernel may start in this one's tail and read what it stores. Takes over: this one may start in
// the tail of the previous kernel (handover.cuh).
enum class Chain : uint8_t { kNone, kHandsOver, kTakesOver };

struct TileShape {
  int m, n, k;
  bool operator==(TileShape const&) const = default;
};

constexpr int kSubtileM = 64;        // rows of one wgmma; a CTA skips 64-row parts past its segment
constexpr int kWarpRows = 16;        // of these 64, those of one warp
constexpr int kGroupRows = 64;       // rows of B, of each half, in a row group
constexpr int kStageRowBytes = 128;  // of an operand, along k or along its rows, swizzled
constexpr int kSlabColumns = 64;     // bf16 columns of a 128-byte swizzled row
constexpr int kGroupColumns = 128;   // tile_n comes in groups; a gated one is [64 gate | 64 up]
constexpr int kSharedMemoryBytes = 227 * 1024;

struct GemmConfig {
  TileShape tile{128, 256, 64};
  int stages = 4;
  int consumer_warpgroups = 2;
  Schedule schedule = Schedule::kCooperative;
  Ragged ragged = Ragged::kM;
  Operand a{}, b{};
  Cluster cluster{};
  BStages b_stages{};
  Tail tail = Tail::kWhole;
  EpilogueConfig epilogue{};
  Order order{};
  Chain chain = Chain::kNone;

  consteval int threads() const {
    return 128 * (1 + consumer_warpgroups + (stores_apart() ? 1 : 0));
  }
  consteval bool ping_pong() const { return schedule == Schedule::kPingPong; }
  consteval bool gathers() const { return a.loader == Loader::kGather; }
  consteval bool varlen_k() const { return ragged == Ragged::kK; }
  consteval int warpgroup_m() const { return ping_pong() ? tile.m : tile.m / consumer_warpgroups; }
  consteval int warpgroup_subtiles() const { return warpgroup_m() / kSubtileM; }

  // One CTA per SM: 384 threads enter with 168 registers each (64512 in all), 512 with 128.
  consteval int producer_registers() const {
    return stores_apart() ? 48 : gathers() ? 56 : consumer_warpgroups == 2 ? 40 : 32;
  }
  // Apart: of 464, what consumers leave. An epilogue that reads has most to do.
  consteval int epilogue_registers() const { return epilogue.row_numbers != 0 ? 64 : 48; }
  consteval int consumer_registers() const {
    return stores_apart()             ? (epilogue.row_numbers != 0 ? 200 : 208)
           : consumer_warpgroups == 2 ? (gathers() ? 224 : 232)
                                      : (gathers() ? 152 : 160);
  }

  consteval bool paired() const { return cluster.sharing == Sharing::kPaired; }
  // CTAs along gemm_m that share each B tile by multicast.
  consteval int cluster_m() const { return paired() ? 1 : cluster.ctas; }

  consteval int b_halves() const { return b.halves == Halves::kAlongRows ? 2 : 1; }
  consteval int k_halves() const { return b.halves == Halves::kAlongK ? 2 : 1; }
  consteval bool any_b_layout() const { return b.boxes == Boxes::kAny; }
  consteval bool keeps_b() const { return b_stages.storage == BStorage::kResident; }
  consteval bool b_behind() const { return b_stages.storage == BStorage::kBehind; }
  consteval int b_terms() const { return b_stages.terms; }
  consteval int resident_k_tiles() const { return keeps_b() ? b_stages.k_tiles : 0; }
  consteval int b_buffers() const {
    return keeps_b() ? resident_k_tiles() : b_behind() ? stages - 1 : stages;
  }

  consteval bool short_b() const { return tail == Tail::kShort; }
  consteval bool partial_last() const { return tail == Tail::kPartial || tail == Tail::kHalved; }
  consteval bool halves_last() const { return tail == Tail::kHalved; }

  consteval bool defers() const { return epilogue.mode == EpilogueMode::kDeferred; }
  consteval bool stores_apart() const { return epilogue.mode == EpilogueMode::kApart; }
  consteval bool lends() const { return epilogue.mode == EpilogueMode::kLent; }
  // Warps that never wait for their warpgroup are at different places in the ring, so each frees stages by itself.
  consteval bool warps_release() const { return epilogue.mode != EpilogueMode::kInline; }

  consteval bool draws_tiles() const { return order.draw != Draw::kStride; }
  consteval bool draws_first() const { return order.draw == Draw::kCounterFromFirst; }
  consteval bool schedules_apart() const { return order.draw == Draw::kOwnWarp; }
  consteval bool hands_over() const { return chain == Chain::kHandsOver; }
  consteval bool takes_over() const { return chain == Chain::kTakesOver; }

  consteval int column_groups() const { return tile.n / kGroupColumns; }
  // Rows of the unit that the scheduler draws: a tile for each CTA of the cluster, or a run of tiles.
  consteval int block_m() const { return tile.m * (keeps_b() ? b_stages.run_tiles : cluster_m()); }
  // Runs come in pairs of tiles, one for each ping-pong warpgroup.
  consteval int pair_m() const { return 2 * tile.m; }

  // Row groups of B in a tile, each of 64 rows of each half; CTA c of the cluster loads the c-th share of them.
  consteval int b_groups() const { return tile.n / kGroupRows / b_halves(); }
  // Stages of a tile besides those of its k_tiles.
  consteval int other_stages() const {
    return epilogue.lent_stages + (epilogue.outer_product ? 1 : 0);
  }
  consteval int b_groups_per_cta() const { return b_groups() / cluster_m(); }
  // Counts the row groups of the last tile of a B with `rows` rows, in one half.
  constexpr int last_b_groups(int64_t rows) const {
    return static_cast<int>(((rows - 1) % tile.n + kGroupRows) / kGroupRows);
  }
  constexpr bool last_is_partial(int64_t rows) const {
    return last_b_groups(rows) < tile.n / kGroupRows;
  }
  consteval uint32_t a_subtile_bytes() const { return uint32_t(a.bytes(kSubtileM, tile.k)); }
  consteval uint32_t a_tile_bytes() const { return uint32_t(a.bytes(tile.m, tile.k)); }
  consteval uint32_t b_term_bytes() const { return uint32_t(b.bytes(tile.n, tile.k)); }
  consteval uint32_t b_tile_bytes() const { return b_terms() * b_term_bytes(); }

  bool operator==(GemmConfig const&) const = default;
};

static_assert(GemmConfig{}.last_b_groups(2880) == 1 && GemmConfig{}.last_b_groups(2888) == 2);
static_assert(!GemmConfig{}.last_is_partial(248) && GemmConfig{}.last_is_partial(192));

// The number of arrivals that end a phase of each barrier, and the roles that arrive; no other role does.
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
                   c.cluster.ctas,
          .resident_empty = 2,
          .work_full = 1,
          .work_empty =
              (4 * c.consumer_warpgroups + (c.gathers() ? 4 : 1) + (c.stores_apart() ? 4 : 0)) *
              c.cluster_m()};
}

// Named barriers of the CTA; 0 is __syncthreads. Each is the first of one for each consumer warpgroup.
enum NamedBarrier : int { kBarrierSlabs = 1, kBarrierMmaTurn = 4 };

consteval bool valid(GemmConfig c) {
  if (c.a.bytes(1, c.tile.k) != kStageRowBytes || c.b.bytes(1, c.tile.k) != kStageRowBytes)
    throw "tile.k: one 128-byte swizzled row of either operand, 64 bf16";
  if (c.stages < 2) throw "stages: at least 2";
  if (c.consumer_warpgroups < 2 || c.consumer_warpgroups > 3) throw "consumer_warpgroups: 2 or 3";
  if (c.ping_pong() && c.consumer_warpgroups != 2)
    throw "schedule: ping-pong alternates two warpgroups";
  if (c.ping_pong() ? c.tile.m % kSubtileM : c.tile.m != kSubtileM * c.consumer_warpgroups)
    throw "tile.m: cooperative 64 rows per consumer warpgroup, ping-pong a multiple of 64";
  if (c.tile.n != 128 && c.tile.n != 256) throw "tile.n: one or two groups of 128 columns";
  if (c.warpgroup_subtiles() * c.tile.n > (c.consumer_warpgroups == 2 ? 384 : 256))
    throw "tile: accumulators do not fit the registers of a warpgroup";

  if (c.a.major != (c.varlen_k() ? Major::kRows : Major::kK))
    throw "a.major: k, but rows with varlen-K, whose k are the rows of a segment";
  if (c.a.halves != Halves::kOne || c.a.boxes != Boxes::kAny)
    throw "a: its halves are those of B, and its layouts take no code of their own";
  if (c.gathers() && c.tile.m > 192) throw "a.loader: a producer thread gathers at most 12 rows";
  if (c.a.stored != c.a.element && !c.gathers())
    throw "a.stored: as in stages, or gathered by threads that decode; TMA copies bytes";
  if (c.b.stored != c.b.element) throw "b.stored: as in stages; TMA copies bytes";
  if (c.b.loader != Loader::kTma) throw "b.loader: TMA; only rows of A are gathered";
  if (c.varlen_k() && (c.b.major != Major::kRows || c.b.halves != Halves::kOne))
    throw "b: with varlen-K rows-major and in one half";
  if (c.varlen_k() && c.tile.m > 128) throw "tile.m: with varlen-K at most 16 chunks of a token";

  if ((c.cluster.ctas == 1) != (c.cluster.sharing == Sharing::kNone))
    throw "cluster.sharing: what several CTAs share; one CTA shares nothing";
  if (c.cluster.ctas != 1 && c.cluster.ctas != 2 && (c.cluster.ctas != 4 || c.paired()))
    throw "cluster.ctas: 1, 2 or 4, and 2 where they are paired";
  if (c.b_groups() % c.cluster_m()) throw "cluster.ctas: divides the row groups of B";

  if (c.keeps_b() && (!c.ping_pong() || c.gathers() || c.cluster_m() > 1))
    throw "b_stages: resident with ping-pong, TMA, no multicast";
  if (c.keeps_b() ? c.b_stages.k_tiles < 1 || c.b_stages.run_tiles < 2 || c.b_stages.run_tiles % 2
                  : c.b_stages.k_tiles != 0 || c.b_stages.run_tiles != 0)
    throw "b_stages: k_tiles and an even number of run_tiles where B is resident, else none";
  if (c.b_terms() != 1 &&
      (c.varlen_k() || c.gathers() || c.b_stages.storage != BStorage::kRing || c.partial_last() ||
       c.b.halves != Halves::kOne || c.b.major != Major::kK || c.lends()))
    throw "b_stages: terms with varlen-M, TMA, K-major B in one half, in the ring, which lends "
          "none";
  if (c.b_behind() && (!c.varlen_k() || !c.gathers() || !c.defers()))
    throw "b_stages: behind with varlen-K, gather, deferred epilogues";

  if (c.short_b() && (c.b.halves != Halves::kOne || c.cluster_m() > 1 || c.keeps_b()))
    throw "tail: short with one half, no multicast, no resident B";
  if (c.partial_last() &&
      (c.varlen_k() || c.gathers() || c.b_halves() > 1 || c.cluster.ctas > 1 || c.keeps_b()))
    throw "tail: partial with varlen-M, TMA, one half along B's rows, no cluster, no resident B";
  if (c.halves_last() && (!c.defers() || c.column_groups() != 2))
    throw "tail: halved with deferred epilogues and two column groups";

  if (c.lends() != (c.epilogue.lent_stages > 0) || c.epilogue.lent_stages > c.stages)
    throw "epilogue.lent_stages: some of the ring's in mode lent, none in others";
  if (c.lends() && (c.ping_pong() || c.cluster_m() > 1))
    throw "epilogue.mode: lent with cooperative warpgroups, no multicast";
  if (c.defers() && c.ping_pong()) throw "epilogue.mode: deferred with cooperative warpgroups";
  if (c.stores_apart() &&
      (c.ping_pong() || c.consumer_warpgroups != 2 || c.cluster_m() > 1 || !c.gathers()))
    throw "epilogue.mode: apart with two cooperative warpgroups, gather, no multicast";
  if (c.epilogue.row_numbers != 0 && !c.stores_apart())
    throw "epilogue.row_numbers: in mode apart; others ask for what they read in their own way";
  if (c.epilogue.outer_product && (!c.defers() || c.gathers() || c.tile.n != 256))
    throw "epilogue.outer_product: deferred, TMA, tile.n of 256";

  if (c.order.longest_first && !c.varlen_k()) throw "order.longest_first: with varlen-K";
  if (c.order.ready_first && (c.varlen_k() || !c.gathers() || c.keeps_b() || c.cluster.ctas > 1))
    throw "order.ready_first: with varlen-M, gathered rows, no resident B, no cluster";
  if (c.schedules_apart() && (c.gathers() || c.cluster_m() > 1 || c.keeps_b()))
    throw "order.draw: a warp of its own with TMA, no multicast, no resident B";
  return true;
}

}  // namespace tessera::cuda::gemm
