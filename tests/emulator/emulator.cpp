// SPDX-License-Identifier: Apache-2.0
#include "tests/emulator/emulator.hpp"

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <vector>

#include "tests/emulator/state.hpp"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tessera::emulator {

World world;
Watcher* watcher = nullptr;

namespace {

constexpr std::size_t kStackBytes = 64 * 1024;
// Stacks lie in large pages, where the system has such: a turn in a page of its own would cost a walk through the page
// tables, which takes longer than most turns. Beyond kLargeBytes only what is used has memory.
constexpr std::size_t kLargePage = 2 << 20, kLargeBytes = 256 << 20;
constexpr std::size_t kMark = 64;  // bytes at the end of a stack that stay 0
// Stacks begin at different lines of the caches, which have few places for lines that lie a power of two apart.
constexpr std::size_t kLinesApart = 5 * 64, kPlaces = 61;
// Turns in which nothing changes; of many threads each has its turn more rarely.
constexpr std::uint64_t kStuck = 2'000'000, kStuckOfThread = 500;

std::map<void const*, unsigned> compiled_clusters;

std::uint64_t below(std::uint64_t n) { return world.random() % n; }

// More threads than these sleep while they wait for other grids, so that those who work have turns.
constexpr std::size_t kManyThreads = 4096;

void wake_waiters_for_grids() {
  for (auto const& cta : world.ctas) wake(*cta, &world.grids);
}

void start() {
  Thread& t = *world.running;
  try {
    t.cta->grid->body();
    if (watcher != nullptr && t.cta->left == 1) watcher->ends(*t.cta);
  } catch (std::exception const& e) {
    if (world.fault.empty()) world.fault = e.what();
  }
  t.done = true;
  if (t.cta->left == 1) let_next_grid_start();
  --t.cta->left;
  if (--t.cta->grid->left == 0) wake_waiters_for_grids();
  changed();
  Fiber::change(t.fiber, world.main);
}

void set_indices(Thread const& t) {
  threadIdx = dim3(t.index);
  blockIdx = dim3(t.cta->index);
  blockDim = dim3(t.cta->grid->threads);
  gridDim = dim3(t.cta->grid->ctas);
}

std::string who(Thread const& t) {
  std::size_t grid = 0;
  while (world.grids[grid].get() != t.cta->grid) ++grid;
  return "grid " + std::to_string(grid) + " CTA " + std::to_string(t.cta->index) + " warp " +
         std::to_string(t.index / kWarp);
}

// By warp, with the lanes that wait for the same.
std::string waiters() {
  std::map<std::string, int> lanes;
  auto const list = [&](Thread const& t, std::string const& what) { ++lanes[who(t) + what]; };
  for (auto const& cta : world.ctas) {
    for (Thread const* t : cta->asleep) list(*t, std::string(" waits for ") + t->waits_for);
  }
  for (Thread const* t : world.able) list(*t, " could run");
  std::string text;
  for (auto const& [what, count] : lanes) {
    text += "\n  " + what + ", " + std::to_string(count) + " lanes";
  }
  return text;
}

// Stacks of threads of earlier runs, and new ones.
std::vector<char*> spare_stacks;

void make_stacks() {
  static std::size_t made = 0;
  void* const memory = mmap(nullptr, 2 * kLargePage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for stacks");
  auto const begin = reinterpret_cast<std::uintptr_t>(memory);
  char* const page = static_cast<char*>(memory) + (kLargePage - begin % kLargePage) % kLargePage;
  made += kLargePage;
  madvise(page, kLargePage, made <= kLargeBytes ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  for (std::size_t at = kLargePage; at != 0; at -= kStackBytes) {
    spare_stacks.push_back(page + (at - kStackBytes));
  }
}

char* take_stack() {
  if (spare_stacks.empty()) make_stacks();
  char* const stack = spare_stacks.back();
  spare_stacks.pop_back();
  return stack;
}

void give_back(char* stack) {
  if (std::any_of(stack, stack + kMark, [](char c) { return c != 0; })) {
    std::fputs("a thread has used more than its stack\n", stderr);  // and what lies below it
    std::abort();
  }
  spare_stacks.push_back(stack);
}

std::unique_ptr<Thread> make_thread(Cta* cta, unsigned index) {
  auto t = std::make_unique<Thread>();
  t->cta = cta;
  t->index = index;
  t->stack = take_stack();
  std::size_t const place = reinterpret_cast<std::uintptr_t>(t->stack) / kStackBytes % kPlaces;
  t->fiber.prepare(t->stack, kStackBytes - place * kLinesApart, start);
  return t;
}

std::unique_ptr<Cta> make_cta(Grid* grid, unsigned index) {
  auto cta = std::make_unique<Cta>();
  cta->grid = grid;
  cta->index = index;
  cta->left = grid->threads;
  cta->shared = static_cast<unsigned char*>(std::aligned_alloc(1024, kMaxShared));
  if (cta->shared == nullptr) throw std::runtime_error("no memory for a CTA");
  std::memset(cta->shared, 0xff, kMaxShared);  // bf16 NaNs
  cta->warps = std::vector<Warp>((grid->threads + kWarp - 1) / kWarp);
  cta->warpgroups = std::vector<Warpgroup>((grid->threads + kWarpgroup - 1) / kWarpgroup);
  for (unsigned i = 0; i < grid->threads; ++i) cta->threads.push_back(make_thread(cta.get(), i));
  return cta;
}

void build() {
  for (auto const& grid : world.grids) {
    for (unsigned c = 0; c < grid->ctas; ++c) {
      world.ctas.push_back(make_cta(grid.get(), c));
      world.ctas.back()->cluster_begin = world.ctas.size() - 1 - c % grid->cluster;
      for (auto const& t : world.ctas.back()->threads) world.able.push_back(t.get());
    }
  }
}

void clear() {
  for (auto const& cta : world.ctas) {
    for (auto const& t : cta->threads) give_back(t->stack);
    std::free(cta->shared);
  }
  world.ctas.clear();
  world.grids.clear();
  world.able.clear();
  world.asleep = 0;
  world.later.clear();
}

void do_one_later() {
  std::size_t const i = below(world.later.size());
  Later const one = std::move(world.later[i]);
  world.later[i] = std::move(world.later.back());
  world.later.pop_back();
  one.work();
  if (one.kind == Kind::write) wake_waiters_for_grids();
  changed();
}

void give_turn(std::size_t i) {
  Thread& t = *world.able[i];
  world.running = &t;
  set_indices(t);
  Fiber::change(world.main, t.fiber);
  world.running = nullptr;
  ++world.turn;
  if (!t.done && t.wakes_by == nullptr) return;
  if (!t.done) {
    t.cta->asleep.push_back(&t);
    ++world.asleep;
  }
  world.able[i] = world.able.back();
  world.able.pop_back();
}

}  // namespace

void sleep_until(void const* wakes_by, std::function<bool()> ready, char const* what) {
  if (ready()) return;
  Thread& t = *world.running;
  t.wakes_by = wakes_by;
  t.ready = std::move(ready);
  t.waits_for = what;
  Fiber::change(t.fiber, world.main);
}

// Those of a CTA who sleep until something changes there, and what they wait for has come.
void wake(Cta& cta, void const* changed) {
  for (std::size_t i = 0; i < cta.asleep.size();) {
    Thread* const t = cta.asleep[i];
    if (t->wakes_by != changed || !t->ready()) {
      ++i;
      continue;
    }
    t->wakes_by = nullptr;
    world.able.push_back(t);
    --world.asleep;
    cta.asleep[i] = cta.asleep.back();
    cta.asleep.pop_back();
  }
}

void launch(unsigned ctas, unsigned cluster, unsigned threads, std::size_t shared_bytes,
            std::function<void()> body) {
  if (shared_bytes > std::size_t{kMaxShared})
    throw std::runtime_error("more shared memory than there is");
  if (cluster == 0 || ctas % cluster != 0) throw std::runtime_error("a cluster that is not whole");
  world.grids.push_back(std::make_unique<Grid>(Grid{
      ctas, threads, cluster, std::move(body), std::uint64_t{ctas} * threads, shared_bytes, ctas}));
}

void set_compiled_cluster(void const* kernel, unsigned ctas) { compiled_clusters[kernel] = ctas; }
unsigned compiled_cluster(void const* kernel) {
  auto const found = compiled_clusters.find(kernel);
  return found == compiled_clusters.end() ? 1 : found->second;
}

void* static_shared(void const* key, std::size_t bytes) {
  constexpr std::size_t kAlignment = 16;
  Cta const& cta = *world.running->cta;
  Grid& grid = *cta.grid;
  if (!grid.variables.contains(key)) {
    if (grid.dynamic_bytes + bytes + kAlignment > grid.variables_begin) {
      fail("more shared memory than there is");
    }
    grid.variables_begin = (grid.variables_begin - bytes) / kAlignment * kAlignment;
    grid.variables[key] = grid.variables_begin;
  }
  return cta.shared + grid.variables[key];
}

unsigned cluster_rank() {
  Cta const& cta = *world.running->cta;
  return cta.index % cta.grid->cluster;
}

Cta& cta_of_cluster(unsigned rank) {
  Cta const& own = *world.running->cta;
  if (rank >= own.grid->cluster) fail("no CTA of the cluster");
  Cta& cta = *world.ctas[own.cluster_begin + rank];
  if (cta.left == 0) fail("a CTA of the cluster has ended");
  return cta;
}

void wait_for_previous_grids() {
  for (auto const& grid : world.grids) {
    if (grid.get() == world.running->cta->grid) return;
    auto const ended = [&] {
      return grid->left == 0 &&
             std::none_of(world.later.begin(), world.later.end(),
                          [&](Later const& one) { return one.thread->cta->grid == grid.get(); });
    };
    if (world.able.size() + world.asleep > kManyThreads) {
      sleep_until(&world.grids, ended, "an earlier grid");
    }
    while (!ended()) {
      // Of many turns that are spent here most do not count as such in which nothing changes.
      if (world.turn % 16 != 0 && world.last_change < world.turn) ++world.last_change;
      yield();
    }
  }
}

void let_next_grid_start() {
  Cta& cta = *world.running->cta;
  if (cta.lets_next) return;
  cta.lets_next = true;
  if (--cta.grid->holding == 0 && cta.grid == world.grids.back().get()) {
    world.next_may_start = world.turn;
  }
}

std::uint64_t turns_before_next_grid() { return world.next_may_start; }

std::string run(Schedule const& schedule) {
  world.random.seed(schedule.seed);
  world.turn = world.last_change = 0;
  world.fault.clear();
  build();
  if (watcher != nullptr) watcher->begins();
  for (auto const& cta : world.ctas) {
    cta->lazy = static_cast<double>(below(1000)) < 1000 * schedule.lazy;
  }
  std::uint64_t const stuck = kStuck + kStuckOfThread * world.able.size();
  while (world.fault.empty() && (!world.able.empty() || world.asleep != 0)) {
    bool const copies =
        !world.later.empty() &&
        (world.able.empty() || below(static_cast<std::uint64_t>(schedule.copies)) == 0);
    if (copies) {
      try {
        do_one_later();
      } catch (std::exception const& e) {
        world.fault = e.what();
      }
      continue;
    }
    if (world.able.empty()) {
      world.fault = "nobody can go on" + waiters();
      break;
    }
    if (world.turn - world.last_change > stuck) {
      world.fault = "nothing changes any more" + waiters();
      break;
    }
    std::size_t const i = below(world.able.size());
    if (world.able[i]->cta->lazy && below(8) != 0) continue;
    Thread const* const t = world.able[i];
    for (int more = 0; more == 0 || below(static_cast<std::uint64_t>(schedule.burst)) != 0;
         ++more) {
      if (i >= world.able.size() || world.able[i] != t) break;
      give_turn(i);
    }
  }
  while (world.fault.empty() && !world.later.empty()) {
    Kind const kind = world.later.back().kind;
    if (kind == Kind::tensor) {
      world.fault = "a multiplication or commit that nobody awaited";
      break;
    }
    if (kind != Kind::write) world.fault = "a copy that nobody awaited";
    do_one_later();
  }
  std::string const fault = world.fault;
  clear();
  return fault;
}

void wrote_shared(void const* at, std::size_t bytes) {
  if (watcher != nullptr) watcher->wrote(at, bytes);
}
void copied_shared(void const* at, std::size_t bytes) {
  if (watcher != nullptr) watcher->copied(at, bytes);
}
void fenced_shared() {
  if (watcher != nullptr) watcher->fenced();
}
void reads_shared_async(void const* at, std::size_t bytes) {
  if (watcher != nullptr) watcher->reads_async(at, bytes);
}
void landed_shared(void const* at, std::size_t bytes) {
  if (watcher != nullptr) watcher->landed(at, bytes);
}
unsigned char* shared_memory() { return world.running->cta->shared; }
unsigned char* shared_memory_of(unsigned rank) { return cta_of_cluster(rank).shared; }
std::uint64_t turns() { return world.turn; }
void changed() { world.last_change = world.turn; }
void yield() {
  Thread& t = *world.running;
  Fiber::change(t.fiber, world.main);
}
void fail(std::string const& what) {
  throw std::runtime_error((world.running != nullptr ? who(*world.running) + ": " : "") + what);
}

}  // namespace tessera::emulator
