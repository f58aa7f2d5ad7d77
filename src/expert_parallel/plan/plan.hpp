// SPDX-License-Identifier: Apache-2.0
// Every rank derives this alike from the count matrix c[source][expert], so that nobody has to ask:
//   M_e = sum of c over sources. The rows of an expert: its owner's own first, then those of the ranks
//   after the owner, mod P, so that owners pull from different peers at any one time.
//   block: block_rows rows of one expert in the owner's pool, the last one padded
//   unit:  up to kUnitBlocks blocks of one expert; those of an expert that has more are divided evenly
//   tasks: up(U0), up(U1), .. with down(Uj) after up(Uj+lag), the rest at the end; inside a unit two tiles at a time,
//   block by block. So tasks that read the same weights begin one after the other, and L2 has what DRAM is asked for
//   once (lesson 11).
//   pairs: two tasks for two CTAs that load for each other what both read (docs/notebook/2026-11-23-fused-pairs.md).
// Integers only, for host and device. Cursors go forward: a walk over a pass costs one visit per expert.
#pragma once

#include <cstdint>

#include "core/simd.hpp"

namespace tessera::expert_parallel {

// A layer whose experts are spread has these bounds.
constexpr std::int32_t kMaxExperts = 512;
constexpr std::int32_t kMaxChoices = 32;  // of a token
constexpr int kUnitBlocks = 16;
constexpr int kTileColumns = 256;  // of a GEMM; a gated up projection makes half as many of a

/// Rows cross the link in one of three ways. direct: a row for every pair, and its result back. once: a token's row
/// once per owner, and the result of every pair back. partial combine: a token's row once per owner, and what the owner
/// made of it back: the one result, or the sum of several, weighted by the scores.
enum class Transfer : std::int32_t { direct, once, partial_combine };

/// Bounds of an exchange, equal on all ranks. Owner of expert e: rank e / local_experts(). A token may name an expert
/// more than once.
struct ExchangeShape {
  std::int32_t ranks = 1;
  std::int32_t max_tokens = 0;  ///< of a rank, in any pass
  std::int32_t hidden = 0, intermediate = 0;
  std::int32_t experts = 0;    ///< a multiple of ranks
  std::int32_t max_top_k = 0;  ///< most experts of one token
  std::int32_t block_rows = 128;
  Transfer transfer = Transfer::direct;
  bool gated = true;      ///< up has gate and up rows
  bool training = false;  ///< windows have places for a second x and for dscores

  [[nodiscard]] TESSERA_INLINE constexpr std::int32_t local_experts() const {
    return experts / ranks;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int32_t owner(std::int32_t expert) const {
    return expert / local_experts();
  }
  /// partial combine: the first ones of a rank's experts, whose results are added up there. Sums with the last ones
  /// would all come at the end of a pass, when the link has the least time
  /// (docs/notebook/2026-11-26-sums-on-owners.md).
  [[nodiscard]] TESSERA_INLINE constexpr std::int32_t partial_experts() const {
    return transfer == Transfer::partial_combine ? local_experts() - local_experts() / 4 : 0;
  }
  /// A row for every owner; else for every pair.
  [[nodiscard]] TESSERA_INLINE constexpr bool rows_cross_once() const {
    return transfer != Transfer::direct;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t max_rows() const {  // of an owner
    return std::int64_t{ranks} * max_tokens * max_top_k;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t pool_rows() const {  // with pads
    return max_rows() + std::int64_t{local_experts()} * (block_rows - 1);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t max_blocks() const {
    return pool_rows() / block_rows;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int32_t up_tiles() const {
    std::int32_t const columns = gated ? kTileColumns / 2 : kTileColumns;
    return (intermediate + columns - 1) / columns;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int32_t down_tiles() const {
    return (hidden + kTileColumns - 1) / kTileColumns;
  }
};

/// Tokens [begin, end) of a rank that one of `slices` CTAs routes. tokens * slices < 2^32.
struct TokenSlice {
  std::int32_t begin, end;
};
TESSERA_INLINE constexpr TokenSlice token_slice(std::int32_t tokens, std::int32_t slice,
                                                std::int32_t slices) {
  auto const at = [=](std::int32_t i) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(tokens) *
                                     static_cast<std::uint32_t>(i) /
                                     static_cast<std::uint32_t>(slices));
  };
  return {at(slice), at(slice + 1)};
}

/// Rows of an expert on its owner; first_* count what the owner's earlier experts have.
struct alignas(16) ExpertPlan {  // one load
  std::int32_t rows, first_row, first_block, first_unit;
  bool operator==(ExpertPlan const&) const = default;
};

/// c[source][expert] as it stands in the window.
struct CountMatrix {
  std::int32_t const* counts = nullptr;
  std::int32_t experts = 0;
  [[nodiscard]] TESSERA_INLINE std::int32_t at(std::int32_t source, std::int32_t expert) const {
    return counts[std::int64_t{source} * experts + expert];
  }
};

/// The source whose rows stand behind those of `source` in every expert; an owner's own come first.
TESSERA_INLINE constexpr std::int32_t source_after(ExchangeShape const& shape,
                                                   std::int32_t source) {
  return source + 1 < shape.ranks ? source + 1 : 0;
}

/// Counts the rows of `expert` on `owner` that stand before those of `source`.
TESSERA_INLINE std::int32_t rows_ahead(ExchangeShape const& shape, CountMatrix counts,
                                       std::int32_t expert, std::int32_t owner,
                                       std::int32_t source) {
  std::int32_t rows = 0;
  for (std::int32_t s = owner; s != source; s = source_after(shape, s)) {
    rows += counts.at(s, expert);
  }
  return rows;
}

TESSERA_INLINE constexpr std::int32_t blocks_of(ExchangeShape const& shape, std::int32_t rows) {
  return (rows + shape.block_rows - 1) / shape.block_rows;
}
TESSERA_INLINE constexpr std::int32_t units_of(std::int32_t blocks) {
  return (blocks + kUnitBlocks - 1) / kUnitBlocks;
}

TESSERA_INLINE std::int32_t rows_of(ExchangeShape const& shape, CountMatrix counts,
                                    std::int32_t expert) {
  std::int32_t rows = 0;
  for (std::int32_t s = 0; s < shape.ranks; ++s) rows += counts.at(s, expert);
  return rows;
}

/// Writes plan[E]: every rank makes the plan of all owners, to know where its own rows go. Kernels share the work among
/// warps (route.cuh).
TESSERA_INLINE void make_plan(ExchangeShape const& shape, CountMatrix counts, ExpertPlan* plan) {
  ExpertPlan next = {};
  for (std::int32_t e = 0; e < shape.experts; ++e) {
    if (e % shape.local_experts() == 0) next = {};
    next.rows = rows_of(shape, counts, e);
    plan[e] = next;
    std::int32_t const blocks = blocks_of(shape, next.rows);
    next.first_row += next.rows;
    next.first_block += blocks;
    next.first_unit += units_of(blocks);
  }
}

/// Counts what an owner has in all.
struct OwnerTotals {
  std::int32_t rows, blocks, units;
};
TESSERA_INLINE OwnerTotals owner_totals(ExchangeShape const& shape, ExpertPlan const* plan,
                                        std::int32_t owner) {
  ExpertPlan const& last = plan[(owner + 1) * shape.local_experts() - 1];
  std::int32_t const blocks = blocks_of(shape, last.rows);
  return {last.first_row + last.rows, last.first_block + blocks,
          last.first_unit + units_of(blocks)};
}

/// list_begin[source * local_experts + local expert]: where an expert's entries begin in the list that
/// `source` writes into the window of `owner`. An entry's place there is this plus its index.
TESSERA_INLINE void make_list_begins(ExchangeShape const& shape, CountMatrix counts,
                                     std::int32_t owner, std::int32_t* list_begin) {
  for (std::int32_t i = 0; i < shape.experts; ++i) {
    std::int32_t const source = i / shape.local_experts();
    std::int32_t const local = i % shape.local_experts();
    std::int32_t sum = 0;
    for (std::int32_t l = 0; l < local; ++l) {
      sum += counts.at(source, owner * shape.local_experts() + l);
    }
    list_begin[i] = sum;
  }
}

/// The row of the owner's pool, pads counted, of the index-th row that `source` sends to `expert`.
TESSERA_INLINE std::int64_t pool_row_of_pair(ExchangeShape const& shape, CountMatrix counts,
                                             ExpertPlan const* plan, std::int32_t expert,
                                             std::int32_t source, std::int32_t index) {
  return std::int64_t{plan[expert].first_block} * shape.block_rows +
         rows_ahead(shape, counts, expert, shape.owner(expert), source) + index;
}
TESSERA_INLINE std::int32_t block_of_pair(ExchangeShape const& shape, CountMatrix counts,
                                          ExpertPlan const* plan, std::int32_t expert,
                                          std::int32_t source, std::int32_t index) {
  return static_cast<std::int32_t>(pool_row_of_pair(shape, counts, plan, expert, source, index) /
                                   shape.block_rows);
}

/// Names the place that a row of the pool comes from.
struct PoolRow {
  std::int32_t expert;
  std::int32_t row;       ///< of the owner's pool, pads counted
  std::int32_t block;     ///< of the owner
  std::int32_t position;  ///< in the block
  std::int32_t source;
  std::int32_t entry;  ///< in the source's list
  std::int32_t pad;    ///< zero rows that follow it in its block: not 0 for the last row only
  bool operator==(PoolRow const&) const = default;
};

/// An owner's rows in the order in which they are pulled; `at` takes ascending numbers.
class RowCursor {
 public:
  TESSERA_INLINE RowCursor(ExchangeShape const& shape, CountMatrix counts, ExpertPlan const* plan,
                           std::int32_t const* list_begin, std::int32_t owner)
      : shape_(shape),
        counts_(counts),
        plan_(plan),
        list_begin_(list_begin),
        owner_(owner),
        local_experts_(shape.local_experts()),
        expert_(owner * local_experts_) {}

  TESSERA_INLINE PoolRow at(std::int32_t number) {
    while (number >= plan_[expert_].first_row + plan_[expert_].rows) ++expert_;
    ExpertPlan const& e = plan_[expert_];
    std::int32_t const row = number - e.first_row;
    std::int32_t index = row;
    std::int32_t source = owner_;
    while (index >= counts_.at(source, expert_)) {
      index -= counts_.at(source, expert_);
      source = source_after(shape_, source);
    }
    std::int32_t const position = row % shape_.block_rows;
    std::int32_t const local = expert_ - owner_ * local_experts_;
    return {expert_,
            e.first_block * shape_.block_rows + row,
            e.first_block + row / shape_.block_rows,
            position,
            source,
            list_begin_[source * local_experts_ + local] + index,
            row + 1 == e.rows ? shape_.block_rows - 1 - position : 0};
  }

 private:
  ExchangeShape shape_;
  CountMatrix counts_;
  ExpertPlan const* plan_;
  std::int32_t const* list_begin_;
  std::int32_t owner_, local_experts_, expert_;
};

/// Returns the lag: how many units the down tasks stay behind the up tasks. If it is too small, down tasks wait for up
/// tasks and pushes compete with pulls for the link; if it is too large, the last down tasks have no GEMM that hides
/// their pushes. 0.45 of all units, from 8 to 16 with two GPUs, to 32 with more: 16 are the best of 4, 16 and up to 64,
/// or within 1% of it. Where rows cross once (their pulls end early), and with one GPU: the units of 200 up tasks, one
/// and a half for every CTA, but at least four, or eight (docs/notebook/2026-11-22-four-gpus.md,
/// 2026-11-23-fused-producer.md, 2026-11-23-fused-pairs.md, 2026-11-24-two-gpus-again.md).
TESSERA_INLINE constexpr std::int32_t default_lag(ExchangeShape const& shape,
                                                  OwnerTotals const& totals) {
  constexpr std::int32_t kMin = 8;
  constexpr std::int64_t kMinUpTasks = 200;
  std::int32_t const units = totals.units;
  if (shape.rows_cross_once() || shape.ranks == 1) {
    std::int32_t const least = shape.rows_cross_once() ? 4 : kMin;
    std::int64_t const up_tasks = std::int64_t{totals.blocks} * shape.up_tiles();
    if (up_tasks == 0) return least;
    auto const lag = static_cast<std::int32_t>((kMinUpTasks * units + up_tasks - 1) / up_tasks);
    return lag < least ? least : lag;
  }
  std::int32_t const most = shape.ranks > 2 ? 32 : 16;
  std::int32_t const lag = static_cast<std::int32_t>(std::int64_t{units} * 9 / 20);
  return lag < kMin ? kMin : lag > most ? most : lag;
}

enum class TaskKind : std::int32_t { up, down };
struct Task {
  TaskKind kind;
  std::int32_t expert, block, tile;
  bool operator==(Task const&) const = default;
};

/// Walks an owner's units one after the other, with divisions only for experts of several units, as a warp passes many
/// units between two of its tasks.
class UnitCursor {
 public:
  TESSERA_INLINE UnitCursor(ExchangeShape const& shape, ExpertPlan const* plan, std::int32_t owner)
      : plan_(plan), expert_(owner * shape.local_experts()) {}

  [[nodiscard]] TESSERA_INLINE std::int32_t expert() const { return expert_; }
  [[nodiscard]] TESSERA_INLINE std::int32_t first_block() const { return first_block_; }
  [[nodiscard]] TESSERA_INLINE std::int32_t blocks() const { return blocks_; }
  /// Counts rows of the expert, those of later units too.
  [[nodiscard]] TESSERA_INLINE std::int32_t rows_from_last_block(std::int32_t block_rows) const {
    ExpertPlan const& expert = plan_[expert_];
    return expert.rows - (first_block_ + blocks_ - 1 - expert.first_block) * block_rows;
  }

  /// Goes to the next unit, which must exist; the first call goes to the first one. The owner's last expert ends with
  /// the owner's blocks.
  TESSERA_INLINE void advance(std::int32_t last_expert, std::int32_t owner_blocks) {
    auto const end = [&] {
      return expert_ < last_expert ? plan_[expert_ + 1].first_block : owner_blocks;
    };
    first_block_ += blocks_;
    while (end() <= first_block_) ++expert_;
    std::int32_t const left = end() - first_block_;
    std::int32_t const units = units_of(left);
    blocks_ = units == 1 ? left : (left + units - 1) / units;
  }

 private:
  ExpertPlan const* plan_;
  std::int32_t expert_;
  std::int32_t first_block_ = 0, blocks_ = 0;
};

/// A task and a second one that reads the same rows, of the next tile, or the same weights, of the next block.
struct TaskPair {
  Task first;
  bool shares_rows;
  bool has_second;

  [[nodiscard]] TESSERA_INLINE Task second() const {
    return {first.kind, first.expert, first.block + (shares_rows ? 0 : 1),
            first.tile + (shares_rows ? 1 : 0)};
  }
  bool operator==(TaskPair const&) const = default;
};

/// Pairs of tasks by ticket; `find` takes ascending tickets.
class TaskCursor {
 public:
  TESSERA_INLINE TaskCursor(ExchangeShape const& shape, ExpertPlan const* plan, std::int32_t owner,
                            std::int32_t lag)
      : totals_(owner_totals(shape, plan, owner)),
        last_expert_((owner + 1) * shape.local_experts() - 1),
        lag_(lag < totals_.units ? lag : totals_.units),
        up_tiles_(shape.up_tiles()),
        down_tiles_(shape.down_tiles()),
        block_rows_(shape.block_rows),
        up_(shape, plan, owner),
        down_(shape, plan, owner) {}

  /// False: there are no more.
  TESSERA_INLINE bool find(std::int64_t ticket, TaskPair& pair) {
    while (ticket >= end_ && step_ < totals_.units + lag_) advance();
    if (ticket >= end_) return false;
    UnitCursor const& unit = kind_ == TaskKind::up ? up_ : down_;
    std::int32_t const tiles = kind_ == TaskKind::up ? up_tiles_ : down_tiles_;
    pair = pair_of(unit, tiles, static_cast<std::uint32_t>(ticket - begin_));
    return true;
  }

 private:
  TESSERA_INLINE static std::int32_t pairs_of(std::int32_t blocks, std::int32_t tiles) {
    return tiles / 2 * blocks + tiles % 2 * ((blocks + 1) / 2);
  }
  // For two tiles: pairs of blocks in the first tile forwards, then in the second backwards; a block that is left over
  // is paired with itself, one tile each. A last block of half a tile takes half the time, so it is the one left over.
  // A last tile without a second one has pairs of blocks alone.
  TESSERA_INLINE TaskPair pair_of(UnitCursor const& unit, std::int32_t tiles,
                                  std::uint32_t place) const {
    auto const blocks = static_cast<std::uint32_t>(unit.blocks());
    auto const tile = static_cast<std::int32_t>(place / blocks) * 2;
    auto const turn = static_cast<std::int32_t>(place % blocks);
    bool const is_lone = tile + 1 == tiles;
    std::int32_t const rows = unit.rows_from_last_block(block_rows_);
    std::int32_t const pairs = (unit.blocks() - (rows <= block_rows_ / 2 ? 1 : 0)) / 2;
    bool const shares_rows = !is_lone && turn >= 2 * pairs;
    bool const goes_back = !is_lone && !shares_rows && turn >= pairs;
    std::int32_t const block = shares_rows ? turn : 2 * (goes_back ? 2 * pairs - 1 - turn : turn);
    return {{kind_, unit.expert(), unit.first_block() + block, tile + (goes_back ? 1 : 0)},
            shares_rows,
            shares_rows || block + 1 < unit.blocks()};
  }

  // To the next unit's up or down tasks: step i is up(Ui), then down(Ui-lag), where there are such units.
  TESSERA_INLINE void advance() {
    begin_ = end_;
    if (kind_ == TaskKind::down) {
      ++step_;
      kind_ = TaskKind::up;
      if (step_ < totals_.units) {
        up_.advance(last_expert_, totals_.blocks);
        end_ += pairs_of(up_.blocks(), up_tiles_);
      }
    } else {
      kind_ = TaskKind::down;
      if (step_ >= lag_) {
        down_.advance(last_expert_, totals_.blocks);
        end_ += pairs_of(down_.blocks(), down_tiles_);
      }
    }
  }

  OwnerTotals totals_;
  std::int32_t last_expert_, lag_, up_tiles_, down_tiles_, block_rows_;
  UnitCursor up_, down_;
  std::int32_t step_ = -1;
  TaskKind kind_ = TaskKind::down;
  std::int64_t begin_ = 0, end_ = 0;
};

}  // namespace tessera::expert_parallel
