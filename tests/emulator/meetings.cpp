// SPDX-License-Identifier: Apache-2.0
// Where threads of a CTA wait for each other: mbarriers, named barriers, warps.
#include <cuda_runtime.h>

#include <algorithm>

#include "tests/emulator/state.hpp"

namespace tessera::emulator {
namespace {

void change(Cta& cta, Barrier* barrier, Phase phase) {
  bool const over = phase.pending == 0 && phase.bytes == 0;
  if (over && watcher != nullptr) watcher->completes(barrier, phase.parity);
  if (over) {
    phase.parity ^= 1;
    phase.pending = phase.expected;
  }
  *barrier = phase.word();
  changed();
  if (over) wake(cta, barrier);
}

}  // namespace

void arrive(Cta& cta, Barrier* barrier, std::uint32_t bytes) {
  Phase phase = Phase::of(*barrier);
  if (phase.expected == 0) fail("an arrival at no barrier");
  if (phase.pending == 0) fail("more arrivals than a barrier awaits");
  if (watcher != nullptr && world.running != nullptr) watcher->arrives(barrier);
  phase.bytes += static_cast<std::int32_t>(bytes);
  --phase.pending;
  change(cta, barrier, phase);
}

void land(Cta& cta, Barrier* barrier, std::uint32_t bytes) {
  Phase phase = Phase::of(*barrier);
  phase.bytes -= static_cast<std::int32_t>(bytes);
  change(cta, barrier, phase);
}

void init(Barrier* barrier, std::uint32_t arrivals) {
  *barrier = Phase{0, arrivals, arrivals, 0}.word();
  changed();
}
void arrive(Barrier* barrier, std::uint32_t bytes) { arrive(*world.running->cta, barrier, bytes); }
void arrive_in(unsigned rank, Barrier* barrier) {
  Cta& cta = cta_of_cluster(rank);
  arrive(cta, there(cta, barrier), 0);
}
bool is_over(Barrier const* barrier, std::uint32_t parity) {
  bool const over = Phase::of(*barrier).parity != parity;
  if (over && watcher != nullptr) watcher->waited(barrier, parity);
  return over;
}
void wait(Barrier* barrier, std::uint32_t parity) {
  Thread& t = *world.running;
  Warp& warp = t.cta->warps[t.index / kWarp];
  std::size_t const number = t.waits;
  auto const seen = [&warp, number, barrier, parity] {
    return number < warp.seen.size() &&
           warp.seen[number] == std::pair{static_cast<Barrier const*>(barrier), parity};
  };
  sleep_until(
      barrier, [=] { return seen() || Phase::of(*barrier).parity != parity; }, "an mbarrier");
  if (watcher != nullptr) watcher->waited(barrier, parity);
  if (number == warp.seen.size()) {
    warp.seen.emplace_back(barrier, parity);
    wake(*t.cta, barrier);
  }
  ++t.waits;
}

std::uint64_t const* exchange(std::uint64_t value, Site const& site) {
  Thread& t = *world.running;
  Warp& warp = t.cta->warps[t.index / kWarp];
  std::uint64_t const generation = warp.generation;
  auto const buffer = generation % 2;
  if (warp.arrived == 0) {
    warp.site[buffer] = site;
  } else if (warp.site[buffer].line != site.line) {
    fail("lanes of a warp meet in different places: " + warp.site[buffer].text() + " and " +
         site.text());
  }
  warp.values[buffer][t.index % kWarp] = value;
  std::size_t const lanes =
      std::min<std::size_t>(kWarp, t.cta->threads.size() - t.index / kWarp * kWarp);
  if (static_cast<std::size_t>(++warp.arrived) == lanes) {
    warp.arrived = 0;
    ++warp.generation;
    warp.seen.clear();
    for (std::size_t i = 0; i < lanes; ++i) {
      t.cta->threads[t.index / kWarp * kWarp + i]->waits = 0;
    }
    wake(*t.cta, &warp);
  } else {
    sleep_until(&warp, [&warp, generation] { return warp.generation != generation; }, site.file);
  }
  // A lane writes here again after the next exchange, when all lanes have read what they got from this one.
  return warp.values[buffer];
}

void named_barrier(int id, int threads, bool waits) {
  NamedBarrier& barrier = world.running->cta->barriers[id];
  std::uint64_t const generation = barrier.generation;
  unsigned const parity = generation % 2;
  if (watcher != nullptr) watcher->arrives(&barrier);
  if (++barrier.arrived == threads) {
    if (watcher != nullptr) watcher->completes(&barrier, parity);
    barrier.arrived = 0;
    ++barrier.generation;
    changed();
    wake(*world.running->cta, &barrier);
  } else if (waits) {
    sleep_until(
        &barrier, [&barrier, generation] { return barrier.generation != generation; },
        "a named barrier");
  }
  if (watcher != nullptr && waits) watcher->waited(&barrier, parity);
}

void cluster_barrier() {
  Cta& own = *world.running->cta;
  unsigned const ctas = own.grid->cluster;
  NamedBarrier& barrier = world.ctas[own.cluster_begin]->cluster;
  std::uint64_t const generation = barrier.generation;
  unsigned const parity = generation % 2;
  if (watcher != nullptr) watcher->arrives(&barrier);
  if (++barrier.arrived == static_cast<int>(ctas * own.grid->threads)) {
    if (watcher != nullptr) watcher->completes(&barrier, parity);
    barrier.arrived = 0;
    ++barrier.generation;
    changed();
    for (unsigned i = 0; i < ctas; ++i) wake(*world.ctas[own.cluster_begin + i], &barrier);
  } else {
    sleep_until(
        &barrier, [&barrier, generation] { return barrier.generation != generation; },
        "its cluster");
  }
  if (watcher != nullptr) watcher->waited(&barrier, parity);
}

int block_votes(bool value) {
  NamedBarrier& barrier = world.running->cta->barriers[0];
  auto const buffer = barrier.generation % 2;
  if (barrier.arrived == 0) barrier.votes[buffer] = 0;
  barrier.votes[buffer] += value ? 1 : 0;
  named_barrier(0, static_cast<int>(blockDim.x), true);
  return barrier.votes[buffer];
}

}  // namespace tessera::emulator
