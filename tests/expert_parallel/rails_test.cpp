// SPDX-License-Identifier: Apache-2.0
// Passes over several hosts, whose messages cross beside passes: under every schedule that seeds and, at the smallest
// size, enumeration can find, they end with what one message after the other would give. Then every rule broken in
// turn, and SMs that are not there for the rail, each of which must be noticed.
#include "tests/expert_parallel/rails.hpp"

#include <gtest/gtest.h>

#include <iterator>
#include <memory>
#include <string>

namespace tessera::expert_parallel::model {
namespace {

constexpr Temper kTempers[] = {Temper::even, Temper::starve, Temper::run_ahead,
                               Temper::late_writes};

// What went wrong in one run; empty if nothing.
std::string run(RailOptions const& options, std::uint64_t seed) {
  Rails rails(options);
  Machine& machine = rails.machine();
  run_random(machine, kTempers[seed % std::size(kTempers)], seed);
  if (machine.fault().empty() && !machine.finished()) {
    machine.fault("deadlock: " + machine.waiters());
  }
  return machine.fault();
}

Exploration explore_all(RailOptions const& options) {
  return explore([&] { return std::make_unique<Rails>(options); }, 1'000'000);
}

TEST(Rails, EndWithTheSumsOfAllHosts) {
  for (std::int32_t const hosts : {1, 2, 3, 4}) {
    for (std::int32_t const host_ranks : {1, 2, 3}) {
      for (bool const overlap : {false, true}) {
        for (std::uint64_t seed = 0; seed < 40; ++seed) {
          RailOptions options = {.hosts = hosts, .host_ranks = host_ranks, .overlap = overlap};
          if (!overlap) options.pass_sms = options.sms;  // the rail runs between passes
          ASSERT_EQ(run(options, seed), "") << hosts << " hosts of " << host_ranks << ", overlap "
                                            << overlap << ", seed " << seed;
        }
      }
    }
  }
}

TEST(Rails, EndInEveryOrderOfTakingSms) {
  for (RailOptions const& options :
       {RailOptions{.passes = 1}, RailOptions{.pass_sms = 8, .overlap = false},
        // Who has no rank beside it waits for nobody in a pass.
        RailOptions{.hosts = 3, .host_ranks = 1, .pass_sms = 8}}) {
    Exploration const all = explore_all(options);
    EXPECT_EQ(all.fault, "");
    EXPECT_TRUE(all.complete);
    EXPECT_GT(all.states, 30);
    RecordProperty("states", static_cast<int>(all.states));
  }
}

// A ring of GPUs, each of which waits for the next one: half of them in a pass, half on their rail.
TEST(Rails, WaitForEachOtherWhereAPassLeavesTooFewSms) {
  for (std::int32_t const hosts : {2, 3}) {
    for (RailOptions options : {RailOptions{.pass_sms = 8}, RailOptions{.rail_sms = 3}}) {
      options.hosts = hosts;
      options.passes = 1;
      Exploration const found = explore_all(options);
      EXPECT_NE(found.fault.find("deadlock"), std::string::npos) << found.fault;
      EXPECT_NE(found.fault.find("to take SMs"), std::string::npos) << found.fault;
      bool noticed = false;
      for (std::uint64_t seed = 0; seed < 200 && !noticed; ++seed) {
        noticed = run(options, seed).find("deadlock") == 0;
      }
      EXPECT_TRUE(noticed) << "no schedule of 200 closes the ring";
    }
  }
}

TEST(Rails, EveryBrokenRuleIsNoticed) {
  struct Broken {
    RailBreak rule;
    char const* notice;  // part of the fault: that it was noticed for the right reason
  };
  Broken const all[] = {
      {RailBreak::rows_not_awaited, "read"},     {RailBreak::sums_not_awaited, "read"},
      {RailBreak::sent_before_computed, "read"}, {RailBreak::one_place_for_all_rows, "write over"},
      {RailBreak::sums_before_rows, "deadlock"},
  };
  for (Broken const& broken : all) {
    std::string last = "nothing";
    bool noticed = false;
    for (std::uint64_t seed = 0; seed < 200 && !noticed; ++seed) {
      std::string const fault = run({.hosts = 3, .passes = 3, .broken = broken.rule}, seed);
      noticed = fault.find(broken.notice) != std::string::npos;
      if (!fault.empty()) last = fault;
    }
    EXPECT_TRUE(noticed) << static_cast<int>(broken.rule) << ": expected " << broken.notice
                         << ", noticed " << last;
  }
}

}  // namespace
}  // namespace tessera::expert_parallel::model
