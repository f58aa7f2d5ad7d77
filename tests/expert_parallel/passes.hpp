// SPDX-License-Identifier: Apache-2.0
// The roles of the persistent kernel as programs of the model, pass after pass, on the plan, layout and
// words that the kernel uses. Each rule of the protocol can be broken on purpose.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "tests/expert_parallel/exchange.hpp"
#include "tests/expert_parallel/machine.hpp"
#include "tests/expert_parallel/peers.hpp"

namespace tessera::expert_parallel::model {

/// A rule that the roles do not keep.
enum class Break {
  nothing,
  // route and publish
  publish_without_waiting_for_slices,  // by the first CTA that has written, not the last
  publish_relaxed,
  publish_at_gpu_scope,
  written_relaxed,         // CTAs count their lists without releasing them
  prefix_without_waiting,  // histograms of other CTAs are read before all are there
  one_parity,              // of lists and counts
  plan_without_counts,
  lists_without_publish,
  lists_await_equal_epoch,  // a peer that is a pass ahead is never seen
  x_before_written,         // lists are said to be there when x is still on its way
  // pull
  arrived_before_written,      // counted when shared memory was read
  chunk_loaded_before_read,    // over one that its stores still read
  rows_awaited_with_pads,      // a block that is not full never has them
  draws_begin_with_the_first,  // though every warp has had one
  draws_not_cleared,
  prologue_rows_by_both,  // consumer and communication warps
  stored_rows_without_proxy_fence,
  arrived_relaxed,
  pull_without_proxy_fence,
  row_pulled_twice,
  every_row_brings,             // its token's row, not the first alone
  row_to_its_first_place_only,  // though the token has others here
  rows_in_rank_order,           // the owner sorts sources by rank, the source believes otherwise
  ring_without_waiting,  // a block's place is taken before the up tasks of the block there have ended
  ring_waits_for_one_up,  // of all that read the block
  unannounced_rows_while_waiting,  // rows that have been written are not counted before the next place is awaited
  // tasks
  up_without_arrived,
  up_without_proxy_fence,
  pad_written_without_proxy_fence,
  down_without_a_ready,
  a_before_written,
  down_before_up,  // down tasks have the lower tickets
  push_before_written,
  down_tiles_relaxed,  // down tasks are counted without releasing what they sent
  done_by_first_tile,
  done_to_first_source_only,
  done_relaxed,
  done_at_gpu_scope,
  completed_in_the_next_task_only,  // though that may wait for it
  announced_before_sent,            // by the warp that announces for the others
  announced_by_a_relaxed_word,      // to that warp
  // sums of the owner
  sums_before_pulls,
  sum_without_down_tiles,
  sum_awaits_its_last_block_only,
  sum_draws_begin_with_the_first,
  sum_draws_not_cleared,
  partial_done_relaxed,
  partial_done_at_gpu_scope,
  all_choices_in_the_sum,  // as the source believes: those of late experts too
  // sums by warps without tasks
  sum_without_claim,      // by whoever finds the token complete
  sum_without_acquire,    // seen to be complete, not awaited
  claim_before_complete,  // and left to nobody where it is not
  // aggregate, end, reuse
  aggregate_without_done,
  aggregate_awaits_first_choice_only,
  one_bank,
  bank_not_cleared,
  // ranks that are reached by messages
  one_staging_place,  // of all pushes of an actor
  x_sent_late,        // behind the word that says that the lists are there
};

struct Options {
  Break broken = Break::nothing;
  std::int32_t ctas = 2;                 ///< of each rank
  std::int32_t communication_warps = 1;  ///< of each CTA
  std::int32_t passes = 3;
  std::int32_t lag = 1;
  bool completes_later =
      true;  ///< what a task wrote is completed under the next one, as in the kernel
  std::int32_t ring_blocks = 0;     ///< that the pool has places for, direct; 0: for all
  std::int32_t rows_in_flight = 1;  ///< that a communication warp has begun and not counted yet
  bool rows_by_stores = false;      ///< it pulls them as the fused kernel does; else by bulk copies
  std::int32_t rows_of_draw = 0;    ///< that it takes at a time; 0: row i is warp i mod warps'
  std::int32_t prologue_rows =
      0;  ///< of which CTAs pull all, once, or their own, direct, by loads and stores
  bool announces = false;       ///< a warp of its own fences and counts for the others of its CTA
  bool sums_early = false;      ///< communication warps add up tokens that are complete, direct
  bool copies_x = false;        ///< into the window, by bulk copies of each CTA; else it lies there
  std::int32_t host_ranks = 0;  ///< ranks of a host, others are reached by messages; 0: one host
  QueueBreak queues = QueueBreak::nothing;
};

struct Entry;

/// A machine on which all ranks run `exchanges[pass]`, pass after pass.
class Passes : public World {
 public:
  Passes(std::vector<Exchange> exchanges, Options const& options);
  Machine& machine() override { return machine_; }
  /// Faults unless every routed row was pulled and returned once, in every pass.
  void check_rows();

 private:
  // Who computes what in a pass, as one CTA knows it.
  struct Known {
    std::vector<std::int32_t> counts;
    std::vector<ExpertPlan> plan;
    std::vector<std::int32_t> list_begin;
  };

  Program cta(Actor& self, std::int32_t index);
  Program communication_warp(Actor& self, std::int32_t number);
  Program stage_x(Actor& self, std::uint32_t epoch);
  Program copy_x(Actor& self, std::int32_t index, std::uint32_t epoch);
  Program route(Actor& self, std::int32_t index, std::uint32_t epoch);
  Program write_lists(Actor& self, std::int32_t index, std::uint32_t epoch,
                      std::vector<std::int32_t>& next, std::vector<std::int32_t> const& totals);
  void join_choices(std::uint32_t epoch, std::int32_t rank, Entry& entry) const;
  // A word of a rank's window, and what is stored there: by address, or staged in the own window, then put.
  Program signal(Actor& self, Address word, std::uint64_t value, Order order);
  Program push(Actor& self, Address to, std::uint64_t value, Proxy proxy = Proxy::generic);
  Program send_x(Actor& self, std::int32_t index, std::uint32_t epoch);
  [[nodiscard]] Address x_of(Actor const& self, std::int32_t source, std::int64_t token) const;
  Program send_counts(Actor& self, std::int32_t index, std::uint32_t epoch,
                      std::vector<std::int32_t> const& totals);
  Program publish_lists(Actor& self, std::uint32_t epoch);
  Program make_plan(Actor& self, std::uint32_t epoch, Known& known);
  Program wait_lists(Actor& self, std::uint32_t epoch, std::int32_t source);
  [[nodiscard]] std::int32_t prologue_rows(std::int32_t rank, Known const& known) const;
  Program pull_prologue_rows(Actor& self, std::int32_t index, std::uint32_t epoch,
                             Known const& known);
  Program copy_own_rows(Actor& self, std::int32_t index, std::uint32_t epoch, Known const& known);
  struct Placed {
    std::int32_t block, position, pad;
  };
  // A pair of a token, as its source has said to the owner.
  struct Term {
    std::int64_t pair;
    PairPlace place;
  };
  Program read_terms(Actor& self, std::uint32_t epoch, std::int32_t source, Entry const& entry,
                     std::vector<Term>& terms);
  [[nodiscard]] bool is_added(Term const& term) const {
    return term.place.expert < shape_.partial_experts();
  }
  [[nodiscard]] std::vector<Term> added_terms(std::int32_t rank, std::int32_t source,
                                              std::vector<Term> const& terms) const;
  [[nodiscard]] std::int64_t pool_row(Actor const& self, std::int32_t source, Term const& term,
                                      Known const& known) const;
  Program place_row(Actor& self, std::uint32_t epoch, std::int32_t source, Term const& term,
                    bool stays, Known const& known, Placed& placed);
  Program draw(Actor& self, std::int64_t draws, bool with_the_first, std::int32_t& number);
  Program pull_all(Actor& self, std::int32_t number, std::uint32_t epoch, Known const& known);
  // What a communication warp has on its way: rows that have been written, or will be, by their counters; and how
  // many have been loaded into its ring in shared memory.
  struct Spread {
    std::vector<Address> unannounced;
    std::int64_t loaded = 0;
  };
  Program announce(Actor& self, Spread& spread);
  Program await_place(Actor& self, std::uint32_t epoch, std::int32_t block, Spread& spread);
  Program pull(Actor& self, std::uint32_t epoch, PoolRow const& row, Known const& known,
               Spread& spread);
  [[nodiscard]] Proxy pulls_by() const {
    return options_.rows_by_stores ? Proxy::generic : Proxy::async;
  }
  Program load(Actor& self, std::uint64_t x, Spread& spread);
  Program store(Actor& self, std::uint64_t x, Placed const& to, Spread const& spread);
  Program pull(Actor& self, std::uint32_t epoch, std::int32_t source, Entry const& entry,
               Known const& known, Spread& spread);
  Program write_pads(Actor& self, std::int32_t block, std::int32_t position, std::int32_t pad);
  // Sums that an owner has written; their words on the sources.
  using Unsignalled = std::vector<Address>;
  static constexpr std::int32_t kAnyDraw = -1;
  Program send_sums(Actor& self, std::int32_t first_draw, std::uint32_t epoch, Known const& known);
  Program await_blocks(Actor& self, std::uint32_t epoch, std::vector<std::int64_t> const& rows,
                       Unsignalled& unsignalled);
  Program send_sum(Actor& self, std::uint32_t epoch, std::int32_t source,
                   std::vector<Term> const& terms, std::vector<std::int64_t> const& rows);
  Program signal_sums(Actor& self, std::uint32_t epoch, Unsignalled& unsignalled);
  // A task whose results have been sent, but not announced.
  struct Sent {
    bool pending = false;
    Task task = {};
    std::set<std::int32_t> sources;
  };
  Program run(Actor& self, std::uint32_t epoch, Task const& task, Known const& known, Sent& sent);
  Program up(Actor& self, Task const& task);
  Program down(Actor& self, std::uint32_t epoch, Task const& task, Known const& known, Sent& sent);
  Program complete(Actor& self, std::uint32_t epoch, Sent& sent);
  Program announce_sent(Actor& self, std::uint32_t epoch, Sent const& sent);
  Program announcer(Actor& self);
  Program announce(Actor& self, std::uint32_t epoch, Sent const& sent);
  Program finish_block(Actor& self, std::uint32_t epoch, std::int32_t block,
                       std::set<std::int32_t> const& sources);
  Program sum_complete(Actor& self, std::int32_t cta, std::uint32_t epoch, Known const& known);
  Program look_at_token(Actor& self, std::int32_t token, std::uint32_t epoch, Known const& known,
                        bool& complete);
  Program aggregate_all(Actor& self, std::int32_t cta, std::uint32_t epoch, Known const& known);
  Program aggregate(Actor& self, std::int32_t token, std::uint32_t epoch, Known const& known,
                    bool waits = true);
  // What a choice adds to its token's sum on the source: its own result, that of several choices in its slot, or
  // nothing, as it is one of several.
  struct Result {
    std::vector<std::int32_t> choices;
    Address done = {};
    Site site = Site::none;
  };
  Program find_result(Actor& self, std::int32_t token, std::int32_t choice, std::uint32_t epoch,
                      Known const& known, Result& result);
  Program end(Actor& self, std::uint32_t epoch);

  [[nodiscard]] Exchange const& exchange(std::uint32_t epoch) const {
    return exchanges_[epoch - 1];
  }
  [[nodiscard]] bool once() const { return shape_.rows_cross_once(); }
  [[nodiscard]] bool combines_partially() const {
    return shape_.transfer == Transfer::partial_combine;
  }
  [[nodiscard]] bool breaks(Break b) const { return options_.broken == b; }
  [[nodiscard]] std::int32_t parity_of(std::uint32_t epoch) const {
    return breaks(Break::one_parity) ? 0 : parity(epoch);
  }
  [[nodiscard]] std::uint32_t bank_of(std::uint32_t epoch) const {
    return breaks(Break::one_bank) ? 0 : epoch;
  }
  static Address window(std::int32_t rank, std::int64_t offset) {
    return {rank, Space::window, offset};
  }
  static Address local(Actor const& self, std::int64_t offset) {
    return {self.rank, Space::local, offset};
  }
  // partial combine: a row is as many cells as there are tiles of its result, which takes its place.
  [[nodiscard]] std::int32_t parts() const {
    return combines_partially() ? shape_.down_tiles() : 1;
  }
  [[nodiscard]] Address pool(Actor const& self, std::int32_t block, std::int32_t position,
                             std::int32_t part) const {
    std::int32_t const place = options_.ring_blocks > 0 ? block % options_.ring_blocks : block;
    std::int64_t const row = std::int64_t{place} * shape_.block_rows + position;
    return {self.rank, Space::x_pool, row * parts() + part};
  }
  // Of a CTA and its announcing warp: how many tasks were sent, and announced, in this pass.
  enum class Queue : std::int64_t { sent = 1, announced = 2 };
  static Address queue_word(Actor const& self, std::uint32_t epoch, Queue queue) {
    return {self.rank, Space::shared,
            std::int64_t{epoch} << 32 | static_cast<std::int64_t>(queue) << 24 | self.cta};
  }
  std::vector<Sent>& queue_of(Actor const& self) {
    return queues_[static_cast<std::size_t>(self.rank * options_.ctas + self.cta)];
  }
  // A token of the CTA belongs to the first who claims it: 0.
  static Operation claim(Actor const& self, std::uint32_t epoch, std::int32_t token) {
    return {.kind = Kind::count_relaxed,
            .address = {self.rank, Space::shared, std::int64_t{epoch} << 32 | token},
            .value = 1};
  }
  // The place of a warp's latest row in its ring.
  static Address ring_place(Actor const& self, Spread const& spread) {
    constexpr std::int64_t kPlaces = 2;
    return {self.rank, Space::shared,
            std::int64_t{1} << 52 | std::int64_t{self.id} << 8 | spread.loaded % kPlaces};
  }
  // Rows of a block that are none of its pads.
  [[nodiscard]] std::int32_t rows_of_block(ExpertPlan const& expert, std::int32_t block) const {
    return std::min(expert.rows - (block - expert.first_block) * shape_.block_rows,
                    shape_.block_rows);
  }
  [[nodiscard]] Address done_word(Actor const& self, std::int32_t expert, std::uint64_t index,
                                  Known const& known) const;
  [[nodiscard]] Address a(Actor const& self, std::int32_t block, std::int32_t position,
                          std::int32_t tile) const {
    return {self.rank, Space::a,
            (std::int64_t{block} * shape_.block_rows + position) * shape_.up_tiles() + tile};
  }
  // A row's source, by the counts.
  [[nodiscard]] std::int32_t source_of(std::int32_t expert, std::int32_t row,
                                       Known const& known) const;
  [[nodiscard]] Address slot(std::int32_t rank, std::int64_t token, std::int32_t which,
                             std::int32_t tile) const {
    return window(rank, window_.slot(token, which) + 2 * kTileColumns * tile);
  }
  // A token's choices on one owner, in the order of their rows.
  [[nodiscard]] std::vector<std::int32_t> group(std::uint32_t epoch, std::int32_t rank,
                                                std::int32_t token, std::int32_t owner) const;
  // .. of the experts whose results the owner adds up, in their own order. None if the token is the owner's own, or has
  // one of them alone.
  [[nodiscard]] std::vector<std::int32_t> added(std::uint32_t epoch, std::int32_t rank,
                                                std::int32_t token, std::int32_t owner) const;
  // The slots that a token's choices on an owner are sent to.
  [[nodiscard]] std::size_t slots_of(std::uint32_t epoch, std::int32_t rank, std::int32_t token,
                                     std::int32_t owner) const;
  void note(std::set<std::tuple<std::uint32_t, std::int32_t, std::int64_t, std::int32_t>>& seen,
            std::uint32_t epoch, std::int32_t source, std::int64_t pair, std::int32_t tile,
            char const* what);

  std::vector<Exchange> exchanges_;
  Options options_;
  ExchangeShape shape_;
  WindowLayout window_;
  LocalLayout local_;
  Machine machine_;
  Peers peers_;
  std::vector<std::vector<Sent>> queues_;  // [rank][CTA]: what the words above count
  std::set<std::tuple<std::uint32_t, std::int32_t, std::int64_t, std::int32_t>> pulled_, pushed_,
      aggregated_;
};

}  // namespace tessera::expert_parallel::model
