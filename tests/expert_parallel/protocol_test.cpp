// SPDX-License-Identifier: Apache-2.0
// The protocol of the persistent kernel under every schedule that seeds and, at the smallest size,
// enumeration can find: it ends, every row goes once, nothing is read or overwritten too early.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <string>

#include "tessera/expert_parallel.hpp"
#include "tests/expert_parallel/protocol_runs.hpp"

namespace tessera::expert_parallel::model {
namespace {

TEST(Protocol, EndsAndLosesNothing) {
  for (std::int32_t const ranks : {1, 2, 3, 4}) {
    for (std::int32_t const ctas : {1, 2, 3}) {
      for (std::int32_t const warps : {1, 2}) {
        Options options = {.ctas = ctas,
                           .communication_warps = warps,
                           .passes = 5,
                           .lag = ctas - 1,
                           .completes_later = warps == 1,
                           .rows_in_flight = 3 - warps,
                           .rows_of_draw = ctas - 1,
                           .prologue_rows = 4 * (warps - 1)};
        for (std::uint64_t seed = 0; seed < 60; ++seed) {
          std::string const where = std::to_string(ranks) + " ranks, " + std::to_string(ctas) +
                                    " CTAs, " + std::to_string(warps) + " warps, seed " +
                                    std::to_string(seed);
          options.rows_by_stores = seed % 2 != 0;
          options.copies_x = seed / 4 % 2 != 0;
          ASSERT_EQ(run(small(ranks), options, seed), "") << where;
          if (seed % 3 != 0) continue;
          ASSERT_EQ(run(small_once(ranks), options, seed), "") << where << ", once";
          ExchangeShape const combined =
              seed % 9 == 0 ? small_partial_combine(ranks) : late_partial_combine(ranks);
          ASSERT_EQ(run(combined, options, seed), "") << where << ", partial combine";
        }
      }
    }
  }
}

// Everything of a run that any number of ranks, CTAs and hosts may have, mixed by the seed.
Options mixed(std::uint64_t seed) {
  return {.lag = static_cast<std::int32_t>(seed % 3),
          .completes_later = seed % 5 != 0,
          .rows_in_flight = 1 + static_cast<std::int32_t>(seed % 3),
          .rows_by_stores = seed % 2 != 0,
          .rows_of_draw = static_cast<std::int32_t>(seed / 2 % 3),
          .prologue_rows = static_cast<std::int32_t>(seed % 4),
          .sums_early = seed % 6 == 0,
          .copies_x = seed / 4 % 2 != 0};
}

// Ranks may be as many as a host has GPUs, or a number that is no power of two.
TEST(Protocol, EndsWithManyRanks) {
  for (std::int32_t const ranks : {5, 6, kMaxRanks}) {
    for (std::uint64_t seed = 0; seed < 72; ++seed) {
      bool const by_messages = ranks % 2 == 0 && seed % 5 == 1;
      bool const one_cta = by_messages || seed % 2 == 0;  // as a machine has no room for all
      Options options = mixed(seed);
      options.ctas = one_cta ? 1 : 2;
      options.communication_warps = one_cta && !by_messages ? 2 : 1;
      options.passes = 3;
      options.announces = one_cta && !by_messages && seed % 4 == 0;
      options.host_ranks = by_messages ? ranks / 2 : 0;
      ExchangeShape const shapes[] = {small(ranks), small_once(ranks), late_partial_combine(ranks)};
      ASSERT_EQ(run(shapes[seed / 3 % 3], options, seed), "")
          << ranks << " ranks, hosts of " << options.host_ranks << ", seed " << seed;
    }
  }
}

TEST(Protocol, EndsWithARingAnAnnouncerAndEarlySums) {
  for (std::int32_t const ranks : {1, 2, 3}) {
    for (std::int32_t const ctas : {1, 2, 3}) {
      for (std::int32_t const places : {0, most_blocks(ranks), most_blocks(ranks) + 1}) {
        for (std::uint64_t seed = 0; seed < 60; ++seed) {
          Options options = with_helpers(ranks);
          options.ctas = ctas;
          options.communication_warps = 1 + static_cast<std::int32_t>(seed / 4 % 2);
          options.lag = static_cast<std::int32_t>(seed % 3);
          options.ring_blocks = places;
          options.announces = seed % 7 != 0;
          options.rows_in_flight = 1 + static_cast<std::int32_t>(seed % 5);
          options.rows_of_draw = static_cast<std::int32_t>(seed / 3 % 4);
          options.prologue_rows = static_cast<std::int32_t>(seed % 6);
          options.rows_by_stores = seed / 2 % 2 != 0;
          ExchangeShape const shape = places > 0          ? small(ranks)
                                      : seed / 5 % 2 == 0 ? small_once(ranks)
                                                          : late_partial_combine(ranks);
          ASSERT_EQ(run(shape, options, seed), "")
              << ranks << " ranks, " << ctas << " CTAs, " << places << " places, seed " << seed;
        }
      }
    }
  }
}

TEST(Protocol, EndsWithManyUnitsAndTiles) {
  ExchangeShape shape = small(2);
  shape.max_tokens = 24;
  shape.block_rows = 1;
  shape.intermediate = 300;
  shape.hidden = 700;
  for (Transfer const transfer : kTransfers) {
    shape.transfer = transfer;
    for (std::int32_t const lag : {0, 1, 3, 100}) {
      for (std::uint64_t seed = 0; seed < 30; ++seed) {
        Options const options = {.ctas = 3,
                                 .passes = 3,
                                 .lag = lag,
                                 .rows_of_draw = static_cast<std::int32_t>(seed % 3)};
        ASSERT_EQ(run(shape, options, seed), "") << seed;
      }
    }
  }
}

// Ranks of several hosts: words, lists, rows and results go through queues that are emptied at any time.
TEST(Protocol, EndsByMessages) {
  for (std::int32_t const ranks : {2, 3, 4}) {
    for (std::int32_t const host_ranks : {1, 2}) {
      if (host_ranks == ranks || (ranks == 4 && host_ranks == 1)) continue;
      for (std::int32_t const ctas : {1, 2}) {
        for (std::uint64_t seed = 0; seed < 28; ++seed) {
          Options options = mixed(seed);
          options.ctas = ctas;
          options.passes = 4;
          options.announces = seed % 7 == 0;
          options.host_ranks = host_ranks;
          ExchangeShape const shapes[] = {small(ranks), small_once(ranks),
                                          small_partial_combine(ranks),
                                          late_partial_combine(ranks)};
          for (ExchangeShape const& shape : shapes) {
            ASSERT_EQ(run(shape, options, seed), "")
                << ranks << " ranks, hosts of " << host_ranks << ", " << ctas << " CTAs, seed "
                << seed << ", transfer " << static_cast<int>(shape.transfer);
          }
        }
      }
    }
  }
}

// One actor counts, another looks at the counter and takes one of the outcomes for a fault.
class Looks : public World {
 public:
  explicit Looks(std::uint64_t fault_at) {
    Actor& looker = machine_.add(0, 0, "looker");
    Actor& counter = machine_.add(0, 1, "counter");
    machine_.start(looker, look(looker, fault_at));
    machine_.start(counter, count(counter));
  }
  Machine& machine() override { return machine_; }

 private:
  static constexpr Address kWord = {0, Space::local, 0};
  Program look(Actor& self, std::uint64_t fault_at) {
    std::uint64_t const seen = co_await self.look(kWord, 1);
    if (seen == fault_at) machine_.fault("seen");
  }
  static Program count(Actor& self) { co_await self.count(kWord, 1); }

  Machine machine_{1};
};

TEST(Exploration, FindsBothOutcomesOfALook) {
  for (std::uint64_t const outcome : {0u, 1u}) {
    Exploration const all = explore([&] { return std::make_unique<Looks>(outcome); }, 100);
    EXPECT_EQ(all.fault, "seen") << outcome;
  }
}

TEST(Protocol, EndsInEveryOrderAtTheSmallestSize) {
  struct Small {
    std::int32_t top_k;
    std::vector<std::vector<std::int32_t>> ids;  // [rank][token * top_k + choice]
    std::int32_t ctas, passes;
    std::int32_t ring_blocks = 0;
    bool sums_early = false, announces = false;
    Transfer transfer = Transfer::direct;
    std::int32_t rows_of_draw = 0;
    std::int32_t experts = 0;     // of all ranks; 0: two for every choice
    std::int32_t host_ranks = 0;  // 1: by messages
  };
  Small const cases[] = {
      {1, {{0, 1}, {1, 0}}, 1, 1},  // each sends a row to the other one and keeps one
      {1, {{0, 0}, {0, 0}}, 1, 1},  // all to one expert
      {1, {{1}, {0}}, 1, 2},        // two passes: a rank may be one ahead
      {1, {{1, 1}, {}}, 1, 3},      // a rank without tokens, three passes
      {1, {{0}, {0}}, 2, 1},
      {2, {{3, 2}, {}}, 1, 2, 0, false, false, Transfer::once},     // a row for two places
      {2, {{3, 2}, {}}, 2, 1, 0, false, false, Transfer::once, 1},  // drawn by two warps
      {2, {{3, 2}, {}}, 1, 2, 0, false, false, Transfer::partial_combine},
      {2,
       {{3, 2}, {}},
       2,
       1,
       0,
       false,
       false,
       Transfer::partial_combine,
       1},  // added up by whoever draws
      {2, {{3, 2}, {0, 1}}, 1, 1, 0, false, false, Transfer::partial_combine},  // on both ranks
      {2, {{0, 2}, {}}, 1, 2, 0, false, false, Transfer::partial_combine},      // nowhere
      {2, {{3, 3}, {}}, 1, 2, 0, false, false, Transfer::partial_combine},      // of one expert
      {3, {{4, 7, 6}, {}}, 1, 1, 0, false, false, Transfer::partial_combine, 1, 8},  // two of three
      {1, {{0, 0, 0}, {}}, 1, 1, 1},  // two blocks in turn in one place
      {1, {{0, 0}, {0}}, 1, 1, 1, true},
      {1, {{1}, {0}}, 1, 2, 0, true},
      {1, {{1, 0}, {0}}, 1, 1, 1, false, true},
      {.top_k = 1, .ids = {{1}, {0}}, .ctas = 1, .passes = 2, .host_ranks = 1},
      {.top_k = 1, .ids = {{1}, {}}, .ctas = 2, .passes = 1, .host_ranks = 1},
  };
  for (Small const& small_case : cases) {
    ExchangeShape const shape = {
        .ranks = 2,
        .max_tokens = 3,
        .hidden = 256,
        .intermediate = 128,
        .experts = small_case.experts > 0 ? small_case.experts : 2 * small_case.top_k,
        .max_top_k = small_case.top_k,
        .block_rows = 2,
        .transfer = small_case.transfer};
    std::vector<Exchange> const exchanges(static_cast<std::size_t>(small_case.passes),
                                          Exchange{shape, small_case.ids});
    for (bool const by_stores : {false, true}) {
      auto const make = [&] {
        return std::make_unique<Passes>(exchanges, Options{.ctas = small_case.ctas,
                                                           .passes = small_case.passes,
                                                           .ring_blocks = small_case.ring_blocks,
                                                           .rows_in_flight = 2,
                                                           .rows_by_stores = by_stores,
                                                           .rows_of_draw = small_case.rows_of_draw,
                                                           .sums_early = small_case.sums_early,
                                                           .copies_x = by_stores,
                                                           .host_ranks = small_case.host_ranks});
      };
      Exploration const all = explore(make, 1'000'000);
      EXPECT_EQ(all.fault, "");
      EXPECT_TRUE(all.complete);
      EXPECT_GT(all.states, 30);
    }
  }
}

TEST(Protocol, ADeadRankLeavesWaitersNotWrongRows) {
  // It stops anywhere. Every other rank finishes its passes, or waits at a site that a time limit will name; nobody
  // reads what was never sent. A warp that waits for others of its CTA (none) has no limit of its own: theirs ends its
  // wait.
  auto const is_of_peer = [](Site site) {
    return site == Site::counted || site == Site::publish || site == Site::block_done ||
           site == Site::partial_done;
  };
  std::set<Site> sites;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Options options = {.passes = 4};
    if (seed % 4 == 0) options = with_helpers(3);
    options.host_ranks = static_cast<std::int32_t>(seed / 7 % 3);
    ExchangeShape const of_rows_once[] = {small_once(3), small_partial_combine(3),
                                          late_partial_combine(3)};
    ExchangeShape const shape = seed % 2 == 0 ? small(3) : of_rows_once[seed / 8 % 3];
    if (shape.rows_cross_once()) {
      options.rows_in_flight = 2;
      options.rows_by_stores = seed / 24 % 2 != 0;
      options.rows_of_draw = static_cast<std::int32_t>(seed / 48 % 3);
      options.prologue_rows = 3;
      options.copies_x = options.rows_by_stores;
    }
    Passes passes(draw(shape, options.passes, seed), options);
    Machine& machine = passes.machine();
    std::mt19937_64 rng(seed);
    std::int64_t const dies_at = static_cast<std::int64_t>(rng() % 2500);
    run_random(machine, kTempers[seed / 2 % std::size(kTempers)], seed, dies_at);
    if (machine.finished()) continue;
    auto const dead = static_cast<std::int32_t>(seed % 3);
    machine.kill(dead);
    run_random(machine, Temper::even, seed + 1);
    ASSERT_EQ(machine.fault(), "") << seed;
    for (std::int32_t rank = 0; rank < shape.ranks; ++rank) {
      if (rank == dead) continue;
      std::vector<Site> const waits = machine.waiting_sites(rank);
      ASSERT_TRUE(machine.finished(rank) || std::any_of(waits.begin(), waits.end(), is_of_peer))
          << "rank " << rank << " reports nothing, seed " << seed << ": " << machine.waiters();
      sites.insert(waits.begin(), waits.end());
    }
  }
  // Only words that peers write can fail to come, and rows whose lists do not come: what a rank has begun with all that
  // it needs, it ends.
  for (Site const site : sites) {
    bool const of_rows = site == Site::arrived || site == Site::a_ready;
    EXPECT_TRUE(is_of_peer(site) || of_rows || site == Site::none) << site_name(site);
  }
  EXPECT_TRUE(sites.count(Site::counted) && sites.count(Site::publish) &&
              sites.count(Site::block_done) && sites.count(Site::partial_done));
}

}  // namespace
}  // namespace tessera::expert_parallel::model
