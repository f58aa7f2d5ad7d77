// SPDX-License-Identifier: Apache-2.0
// The protocol of the ranks of one exchange: where things lie in a window, which word announces what, and when
// a wait is over. Kernel, model and host share this file.
//
//   site        signals -> waits                    word                    until          scope
//   ack         owner, rows returned -> source      ack[owner]              epoch          sys, unfused kernels
//   staged      source, rows in window -> owner     staged[source], second_ epoch          sys, unfused kernels
//   route_scan  CTAs -> CTAs                        slices counted          all slices     gpu
//   counted     source -> all ranks                 c[source][e], row_limit epoch          sys, each for itself
//   publish     source -> all ranks                 publish[source]         epoch          sys
//   arrived     those who pull rows -> up tasks    arrived[block]          its rows       gpu
//   a_ready     up tasks -> down tasks              a_ready[block]          up_tiles       gpu
//   down_tiles  down tasks -> the last, owner's sum down_tiles[block]       down_tiles     gpu
//   block_done  owner -> aggregate                  block_done[owner,block] epoch          sys
//   partial_done owner's sums -> aggregate          partial_done[owner,token] epoch        sys, partial combine
//   ended       CTAs -> the last of them            ended                   all CTAs       gpu, unfused kernels
//
// Transfer::once: a token's row crosses once to each owner, one of whose warps writes it to the places of all its
// pairs there when it comes to the first of them. So nobody waits for a copy.
//
// Transfer::partial_combine: the same, and where a token of another rank has several rows on an owner, their results
// stay there, each in its row of the pool, which its up tasks have read. Communication warps that have nothing left to
// pull go through the rows again: with the last of a token's, once the blocks of all of them are done, they add up the
// results in the order of the choices, round the sum to bf16, send it to the slot of the first of these choices, then
// say partial_done. A token's only row on an owner, those of the owner's own tokens and of its last experts go to their
// slots as they are.
//
// A count carries its epoch in the same word, so that nothing has to be fenced for it: plans are made while the lists
// are still on their way.
//
// A fence at system scope takes 2.6 us on an H100, with few tokens as with many. So none stands before a counter of
// this GPU: who counts releases at the scope of the GPU, and the last one, who has acquired all of it, fences once for
// what all have written to other GPUs, then stores its words (lesson 4).
//
// Epochs count passes from 1. Words that peers write hold epochs and are never cleared. A peer may be a
// pass ahead: waits ask for "at least", and counts and lists are double (by the epoch's parity). Those of pass N-2
// are overwritten in pass N without a wait: the source ended pass N-1, in which it awaited every peer's counts and
// lists, and a peer publishes those of N-1 when it has ended N-2. Counters of this GPU alone have two banks; a pass
// clears the bank of the next one. x, slots and pools are single: a rank ends its pass after every owner has pulled
// and returned its rows. With partial combine it may end before the last block_done words, which it did not need, have
// come.
#pragma once

#include <cstdint>

#include "expert_parallel/plan/plan.hpp"

namespace tessera::expert_parallel {

enum class Site : std::int32_t {
  none,
  ack,
  route_scan,
  counted,
  publish,
  arrived,
  a_ready,
  down_tiles,
  block_done,
  partial_done,
  ended,
  staged,
  rows  ///< nobody waits there: there are more of them than the rank's row limit
};
inline char const* site_name(Site site) {
  constexpr char const* kNames[] = {
      "none",       "ack",        "route_scan",   "counted", "publish", "arrived", "a_ready",
      "down_tiles", "block_done", "partial_done", "ended",   "staged",  "rows"};
  return kNames[static_cast<int>(site)];
}

/// A source writes this to an owner of a row and of the token's other rows there. 16 bytes: one store sends it.
struct alignas(16) RouteEntry {
  std::uint32_t pair = 0;     ///< token * max_top_k + choice, on its source
  std::uint32_t choices = 0;  ///< once, partial combine: a bit for each choice of the token here
  std::uint8_t place = 0;     ///< once, partial combine: the row's number among the rows of these
  std::uint8_t ends_sum = 0;  ///< partial combine: 1 if it is the last of several that are added up
  float score = 0;            ///< unfused kernels
};
static_assert(sizeof(RouteEntry) == 16);

/// Where the owner finds the row of a pair: the expert among its own, the index among those of the source.
struct PairPlace {
  static constexpr std::int32_t kIndexBits = 22;  // of a word; the rest is for the expert
  std::int32_t expert, index;
  [[nodiscard]] TESSERA_INLINE constexpr std::uint32_t word() const {
    return static_cast<std::uint32_t>(expert) << kIndexBits | static_cast<std::uint32_t>(index);
  }
  [[nodiscard]] TESSERA_INLINE static constexpr PairPlace of(std::uint32_t word) {
    return {static_cast<std::int32_t>(word >> kIndexBits),
            static_cast<std::int32_t>(word & ((1u << kIndexBits) - 1))};
  }
};

/// A source writes this to an owner of each of a token's pairs, where rows cross once.
struct alignas(8) PlacedPair {
  std::uint32_t place;  ///< PairPlace
  float score;          ///< partial combine
};

/// Bounds of once and partial combine, where a word holds a place.
TESSERA_INLINE constexpr bool serves_once(ExchangeShape const& s) {
  return std::int64_t{s.max_tokens} * s.max_top_k <= 1 << PairPlace::kIndexBits &&
         s.local_experts() <= 1 << (32 - PairPlace::kIndexBits) && s.max_top_k <= kMaxChoices;
}

TESSERA_INLINE constexpr std::int32_t parity(std::uint32_t epoch) {
  return static_cast<std::int32_t>(epoch & 1u);
}
/// True if a word that holds an epoch is at `epoch` or later. It holds across the wrap of 32 bits, for words that are
/// less than 2^31 passes old.
TESSERA_INLINE constexpr bool reached(std::uint32_t word, std::uint32_t epoch) {
  return static_cast<std::int32_t>(word - epoch) >= 0;
}
/// True if this pass begins by setting to the previous epoch those words of this rank that some passes do not write, so
/// that none becomes 2^31 passes old: those of blocks, and in the fused kernel those that only unfused kernels write.
TESSERA_INLINE constexpr bool renews_words(std::uint32_t epoch) {
  return epoch % (std::uint32_t{1} << 30) == 0;
}

/// An element of the count matrix on its way: the rows, and the pass that counted them. One store of 8 bytes.
struct CountWord {
  std::int32_t rows;
  std::uint32_t epoch;
  [[nodiscard]] TESSERA_INLINE constexpr std::uint64_t word() const {
    return std::uint64_t{epoch} << 32 | static_cast<std::uint32_t>(rows);
  }
  [[nodiscard]] TESSERA_INLINE static constexpr CountWord of(std::uint64_t word) {
    return {static_cast<std::int32_t>(word), static_cast<std::uint32_t>(word >> 32)};
  }
};

/// The word signalled to the host: this rank's rows, whether those of every rank are within its row limit, and the
/// ticket of the pass.
struct RoutedWord {
  static constexpr std::uint32_t kOverflows = std::uint32_t{1} << 31;
  std::int32_t rows;
  bool all_fit;
  std::uint32_t ticket;
  [[nodiscard]] TESSERA_INLINE constexpr std::uint64_t word() const {
    return std::uint64_t{ticket} << 32 | (all_fit ? 0 : kOverflows) |
           static_cast<std::uint32_t>(rows);
  }
  [[nodiscard]] TESSERA_INLINE static constexpr RoutedWord of(std::uint64_t word) {
    auto const low = static_cast<std::uint32_t>(word);
    return {static_cast<std::int32_t>(low & ~kOverflows), (low & kOverflows) == 0,
            static_cast<std::uint32_t>(word >> 32)};
  }
};

constexpr std::int64_t kWordStride = 128;  // bytes: a line for every word that peers write

/// Byte offsets in every rank's window. Equal on all ranks.
struct WindowLayout {
  std::int64_t publish, abort;              ///< [P] words, a line each; abort: a rank + 1, or 0
  std::int64_t ack, staged, second_staged;  ///< [P] words, a line each
  std::int64_t block_done;                  ///< [P,max_blocks] u32
  std::int64_t partial_done;                ///< [P,max_tokens] u32, partial combine
  std::int64_t counts;                      ///< [2,P,E] CountWord
  std::int64_t row_limits;  ///< [2,P] CountWord: rows that a rank has memory for, training
  std::int64_t lists;       ///< [2,P,max_tokens*max_top_k] RouteEntry
  std::int64_t places;      ///< [2,P,max_tokens*max_top_k] PlacedPair, once and partial combine
  std::int64_t x;           ///< [max_tokens,d] bf16
  std::int64_t slots;       ///< [max_tokens,max_top_k,d] bf16
  std::int64_t second_x;    ///< [max_tokens,d] bf16, training
  std::int64_t dscores;     ///< [max_tokens,max_top_k] fp32, training
  std::int64_t bytes;

  explicit TESSERA_INLINE constexpr WindowLayout(ExchangeShape const& s)
      : ranks_(s.ranks), experts_(s.experts), row_bytes_(std::int64_t{2} * s.hidden) {
    max_blocks_ = s.max_blocks();
    max_tokens_ = s.max_tokens;
    max_top_k_ = s.max_top_k;
    pairs_ = std::int64_t{s.max_tokens} * s.max_top_k;
    std::int64_t end = 0;
    auto const take = [&end](std::int64_t region_bytes) {
      std::int64_t const at = end;
      end = (end + region_bytes + 4095) / 4096 * 4096;
      return at;
    };
    publish = take(ranks_ * kWordStride);
    abort = take(ranks_ * kWordStride);
    ack = take(ranks_ * kWordStride);
    staged = take(ranks_ * kWordStride);
    second_staged = take(ranks_ * kWordStride);
    block_done = take(4 * ranks_ * max_blocks_);
    partial_done = take(s.transfer == Transfer::partial_combine ? 4 * ranks_ * max_tokens_ : 0);
    counts = take(std::int64_t{8} * 2 * ranks_ * experts_);
    row_limits = take(std::int64_t{8} * 2 * ranks_);
    lists = take(static_cast<std::int64_t>(sizeof(RouteEntry)) * 2 * ranks_ * pairs_);
    places = take(s.rows_cross_once()
                      ? static_cast<std::int64_t>(sizeof(PlacedPair)) * 2 * ranks_ * pairs_
                      : 0);
    x = take(row_bytes_ * s.max_tokens);
    slots = take(row_bytes_ * max_tokens_ * max_top_k_);
    second_x = take(s.training ? row_bytes_ * s.max_tokens : 0);
    dscores = take(s.training ? 4 * pairs_ : 0);
    bytes = end;
  }

  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t publish_word(std::int32_t source) const {
    return publish + kWordStride * source;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t ack_word(std::int32_t owner) const {
    return ack + kWordStride * owner;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t staged_word(std::int32_t source) const {
    return staged + kWordStride * source;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t second_staged_word(
      std::int32_t source) const {
    return second_staged + kWordStride * source;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t abort_word(std::int32_t rank) const {
    return abort + kWordStride * rank;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t block_done_word(std::int32_t owner,
                                                                      std::int64_t block) const {
    return block_done + 4 * (owner * max_blocks_ + block);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t partial_done_word(std::int32_t owner,
                                                                        std::int64_t token) const {
    return partial_done + 4 * (owner * max_tokens_ + token);
  }
  /// CountWord; those of a source follow each other.
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t count_word(std::int32_t parity,
                                                                 std::int32_t source,
                                                                 std::int32_t expert) const {
    return counts + 8 * ((std::int64_t{parity} * ranks_ + source) * experts_ + expert);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t row_limit_word(std::int32_t parity,
                                                                     std::int32_t rank) const {
    return row_limits + 8 * (std::int64_t{parity} * ranks_ + rank);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t list_entry(std::int32_t parity,
                                                                 std::int32_t source,
                                                                 std::int64_t entry) const {
    return lists + static_cast<std::int64_t>(sizeof(RouteEntry)) *
                       ((std::int64_t{parity} * ranks_ + source) * pairs_ + entry);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t placed_pair(std::int32_t parity,
                                                                  std::int32_t source,
                                                                  std::int64_t pair) const {
    return places + static_cast<std::int64_t>(sizeof(PlacedPair)) *
                        ((std::int64_t{parity} * ranks_ + source) * pairs_ + pair);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t x_row(std::int64_t token) const {
    return x + row_bytes_ * token;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t second_x_row(std::int64_t token) const {
    return second_x + row_bytes_ * token;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t dscore(std::int64_t pair) const {
    return dscores + 4 * pair;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t slot(std::int64_t token,
                                                           std::int32_t choice) const {
    return slots + row_bytes_ * (token * max_top_k_ + choice);
  }

 private:
  std::int64_t ranks_, experts_, row_bytes_;
  std::int64_t max_blocks_ = 0, max_tokens_ = 0, max_top_k_ = 0, pairs_ = 0;
};

/// Byte offsets of the memory that a GPU alone uses, besides pools: counters in two banks, each of which the previous
/// pass leaves at zero, and what its CTAs count for each other when they route.
struct LocalLayout {
  std::int64_t bank_bytes;
  std::int64_t histograms;  ///< [slices,E] i32, a slice every histogram_bytes, a multiple of 16
  std::int64_t histogram_bytes;
  std::int64_t
      pair_index;  ///< [max_tokens*max_top_k] i32: a pair's index among its expert's of this rank
  std::int64_t row_origin;  ///< [pool_rows] {source, pair}
  std::int64_t bytes;

  TESSERA_INLINE constexpr LocalLayout(ExchangeShape const& s, std::int32_t slices)
      : experts_(s.experts), max_blocks_(s.max_blocks()) {
    bank_bytes = kCounters * kWordStride + 12 * max_blocks_;
    bank_bytes = (bank_bytes + 127) / 128 * 128;
    histograms = 2 * bank_bytes;
    histogram_bytes = (experts_ + 3) / 4 * 16;
    pair_index = histograms + slices * histogram_bytes;
    row_origin = pair_index + std::int64_t{4} * s.max_tokens * s.max_top_k;
    row_origin = (row_origin + 7) / 8 * 8;
    bytes = row_origin + 8 * s.pool_rows();
  }

  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t bank(std::uint32_t epoch) const {
    return bank_bytes * parity(epoch);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t slices_counted(std::uint32_t epoch) const {
    return bank(epoch);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t slices_written(std::uint32_t epoch) const {
    return bank(epoch) + kWordStride;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t ended(std::uint32_t epoch) const {
    return bank(epoch) + 2 * kWordStride;
  }
  /// Tickets drawn beyond each pair's first: which CTA computes a task does not change its bits.
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t tickets(std::uint32_t epoch) const {
    return bank(epoch) + 3 * kWordStride;
  }
  /// Draws of rows beyond each communication warp's first: which warp pulls a row does not change it.
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t row_draws(std::uint32_t epoch) const {
    return bank(epoch) + 4 * kWordStride;
  }
  /// Draws of rows by the warps that make partial combines.
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t sum_draws(std::uint32_t epoch) const {
    return bank(epoch) + 5 * kWordStride;
  }
  /// Counts the CTAs of dispatch that have copied their part of the caller's rows into the window.
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t copied(std::uint32_t epoch) const {
    return bank(epoch) + 6 * kWordStride;
  }
  /// The same of second_x, by dispatch_beside.
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t second_copied(std::uint32_t epoch) const {
    return bank(epoch) + 7 * kWordStride;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t arrived(std::uint32_t epoch,
                                                              std::int64_t block) const {
    return bank(epoch) + kCounters * kWordStride + 4 * block;
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t a_ready(std::uint32_t epoch,
                                                              std::int64_t block) const {
    return arrived(epoch, max_blocks_ + block);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t down_tiles(std::uint32_t epoch,
                                                                 std::int64_t block) const {
    return arrived(epoch, 2 * max_blocks_ + block);
  }
  [[nodiscard]] TESSERA_INLINE constexpr std::int64_t histogram(std::int32_t slice) const {
    return histograms + slice * histogram_bytes;
  }

 private:
  static constexpr std::int64_t kCounters = 8;
  std::int64_t experts_, max_blocks_;
};

}  // namespace tessera::expert_parallel
