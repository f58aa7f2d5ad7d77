// SPDX-License-Identifier: Apache-2.0
// Runs of the protocol's model on small shapes, by a seed.
#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "expert_parallel/plan/choose_transfer.hpp"
#include "tests/expert_parallel/passes.hpp"

namespace tessera::expert_parallel::model {

inline constexpr Temper kTempers[] = {Temper::even, Temper::starve, Temper::run_ahead,
                                      Temper::late_writes};

inline std::vector<Exchange> draw(ExchangeShape const& shape, std::int32_t passes,
                                  std::uint64_t seed) {
  std::vector<Exchange> all;
  for (std::int32_t p = 0; p < passes; ++p) {
    std::uint64_t const s = seed * 7 + static_cast<std::uint64_t>(p);
    all.push_back(draw_exchange(shape, kPatterns[s % std::size(kPatterns)], s));
  }
  return all;
}

enum class Judges { all, values_alone };

// Returns what went wrong in one run, or nothing.
inline std::string run(ExchangeShape const& shape, Options const& options, std::uint64_t seed,
                       Judges judges = Judges::all) {
  Passes passes(draw(shape, options.passes, seed), options);
  Machine& machine = passes.machine();
  if (judges == Judges::values_alone) machine.ignore_order();
  run_random(machine, kTempers[seed % std::size(kTempers)], seed);
  if (machine.fault().empty() && !machine.finished()) {
    machine.fault("deadlock: " + machine.waiters());
  }
  if (machine.fault().empty()) passes.check_rows();
  return machine.fault();
}

// Two tiles of up and of down, blocks of two rows, several units.
inline ExchangeShape small(std::int32_t ranks) {
  return {.ranks = ranks,
          .max_tokens = 5,
          .hidden = 512,
          .intermediate = 256,
          .experts = 2 * ranks,
          .max_top_k = 2,
          .block_rows = 2};
}

// The same with up to three rows of a token on an owner.
inline ExchangeShape small_once(std::int32_t ranks) {
  ExchangeShape shape = small(ranks);
  shape.experts = 3 * ranks;
  shape.max_top_k = std::min(4, shape.experts);
  shape.transfer = Transfer::once;
  return shape;
}
// All of them are added up.
inline ExchangeShape small_partial_combine(std::int32_t ranks) {
  ExchangeShape shape = small_once(ranks);
  shape.transfer = Transfer::partial_combine;
  return shape;
}
// The last of an owner's four experts is not.
inline ExchangeShape late_partial_combine(std::int32_t ranks) {
  ExchangeShape shape = small_partial_combine(ranks);
  shape.experts = 4 * ranks;
  return shape;
}

// The most blocks that an expert of small() has: a pool of fewer has no places for a unit.
inline std::int32_t most_blocks(std::int32_t ranks) {
  ExchangeShape const shape = small(ranks);
  return blocks_of(shape, shape.ranks * shape.max_tokens);
}

// Two CTAs with a pool of few blocks, pulls that are announced late, a warp that announces what the others have sent,
// sums by whoever is idle.
inline Options with_helpers(std::int32_t ranks) {
  return {.passes = 4,
          .ring_blocks = most_blocks(ranks),
          .rows_in_flight = 3,
          .rows_of_draw = 2,
          .announces = true,
          .sums_early = true};
}

}  // namespace tessera::expert_parallel::model
