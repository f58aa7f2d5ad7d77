// SPDX-License-Identifier: Apache-2.0
// What an emulated grid consists of, for the sources of the emulator alone.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/emulator/emulator.hpp"
#include "tests/emulator/fiber.hpp"

namespace tessera::emulator {

constexpr int kWarp = 32, kWarpgroup = 128;

// Arrivals awaited in a phase, those still to come, bytes still to land, parity: in the 64 bits of an mbarrier.
struct Phase {
  std::uint32_t parity, expected, pending;
  std::int32_t bytes;
  static Phase of(Barrier word) {
    auto const raw = static_cast<std::uint32_t>(word >> 41 & 0x3fffff);
    return {static_cast<std::uint32_t>(word & 1), static_cast<std::uint32_t>(word >> 1 & 0xfffff),
            static_cast<std::uint32_t>(word >> 21 & 0xfffff),
            static_cast<std::int32_t>(raw << 10) >> 10};
  }
  [[nodiscard]] Barrier word() const {
    return std::uint64_t{parity} | std::uint64_t{expected} << 1 | std::uint64_t{pending} << 21 |
           (static_cast<std::uint64_t>(static_cast<std::uint32_t>(bytes)) & 0x3fffff) << 41;
  }
};

struct Cta;

// Groups of asynchronous work of one thread, the oldest first; the last one is open.
class Groups {
 public:
  void add() { ++open_; }
  std::uint64_t number() const { return begin_ + closed_.size(); }  // of the open group
  void commit() {
    closed_.push_back(open_);
    open_ = 0;
    forget();
  }
  void done(std::uint64_t group) {
    if (group < number()) {
      --closed_[static_cast<std::size_t>(group - begin_)];
      forget();
    } else {
      --open_;
    }
  }
  [[nodiscard]] bool all_but(int pending) const {
    std::size_t const most = static_cast<std::size_t>(pending);
    for (std::size_t i = 0; i + most < closed_.size(); ++i) {
      if (closed_[i] != 0) return false;
    }
    return true;
  }

 private:
  void forget() {
    while (!closed_.empty() && closed_.front() == 0) {
      closed_.pop_front();
      ++begin_;
    }
  }
  std::deque<int> closed_;
  std::uint64_t begin_ = 0;
  int open_ = 0;
};

struct Multiplication {
  float *first, *second;
  std::uint64_t number;
  bool adds;
};

struct Thread {
  Fiber fiber;
  char* stack = nullptr;
  Cta* cta = nullptr;
  unsigned index = 0;
  bool done = false;
  void const* wakes_by = nullptr;  // what has to change; null: it can run
  std::function<bool()> ready;
  char const* waits_for = "";
  Groups reads, writes, copies;
  std::size_t waits = 0;  // for mbarriers since the warp's lanes met
  std::uint64_t multiplications = 0;
  std::deque<std::vector<Multiplication>> groups;  // committed
  std::vector<Multiplication> open;
};

struct Warp {
  std::uint64_t values[2][kWarp] = {};
  Site site[2] = {};
  int arrived = 0;
  std::uint64_t generation = 0;
  // What lanes have seen to be over since they met last. A GPU runs them together where the program does not part them:
  // what one of them has seen, the others see as well, though the barrier may be two phases on when they look.
  std::vector<std::pair<Barrier const*, std::uint32_t>> seen;
};

// Operands as they are when the first thread of the warpgroup waits for them.
struct Operands {
  std::uint64_t a, b;
  bool a_rows_major, b_rows_major;
  bool a_in_registers = false;
  bool read = false;
  int left = kWarpgroup;  // threads that have not used them
  bool e4m3 = false;
  float rows[64][32];      // 16 of bf16
  float columns[32][256];  // as place_of() has them (beside.cpp)
  static constexpr int kBf16 = 16, kE4m3 = 32;
  [[nodiscard]] int k() const { return e4m3 ? kE4m3 : kBf16; }
};
struct Warpgroup {
  std::deque<std::unique_ptr<Operands>> operands;
  std::uint64_t begin = 0;
};

struct NamedBarrier {
  int arrived = 0;
  std::uint64_t generation = 0;
  int votes[2] = {};
};

struct Grid {
  unsigned ctas, threads;
  unsigned cluster;  // CTAs of one
  std::function<void()> body;
  std::uint64_t left;  // threads that have not ended
  std::size_t dynamic_bytes = 0;
  unsigned holding = 0;  // CTAs that have neither let the next grid start nor ended
  std::size_t variables_begin = kMaxShared;        // the last one's place in shared memory
  std::map<void const*, std::size_t> variables{};  // places, by key
};

struct Cta {
  Grid* grid;
  unsigned index;
  std::size_t cluster_begin;  // in World::ctas
  unsigned left = 0;          // threads that have not ended
  bool lazy = false;
  bool lets_next = false;  // grid start
  unsigned char* shared = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  NamedBarrier barriers[16];
  NamedBarrier cluster;  // of the first CTA of a cluster
  std::vector<Thread*> asleep;
};

// What a thread has set going. A store's write is complete at the grid's end; all else somebody has to wait for.
enum class Kind { load, copy, read, write, tensor };
struct Later {
  Thread* thread;
  Kind kind;
  std::function<void()> work;
};

struct World {
  std::vector<std::unique_ptr<Grid>> grids;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Thread*> able;  // may run
  std::size_t asleep = 0;     // others
  std::vector<Later> later;
  std::mt19937_64 random;
  Fiber main;
  Thread* running = nullptr;
  std::uint64_t turn = 0, last_change = 0;
  std::uint64_t next_may_start =
      0;  // the turn in which one behind the last grid might have started
  std::string fault;
};
extern World world;

// Keeps account of more than threads and barriers: what a thread may know from a barrier, who wrote shared memory.
// Called for the thread that runs, if one does. What is wrong it reports by fail().
class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void begins() = 0;  // a run, whose CTAs stand
  virtual void arrives(void const* barrier) = 0;
  virtual void completes(void const* barrier, unsigned parity) = 0;  // the last arrival has come
  virtual void waited(void const* barrier, unsigned parity) = 0;
  virtual void wrote(void const* at, std::size_t bytes) = 0;
  virtual void copied(void const* at, std::size_t bytes) = 0;
  virtual void fenced() = 0;
  virtual void reads_async(void const* at, std::size_t bytes) = 0;
  virtual void landed(void const* at, std::size_t bytes) = 0;
  virtual void ends(Cta& cta) = 0;  // its last thread does
};
extern Watcher* watcher;  // null: nobody

// Of the cluster of the thread that runs, a CTA that has not ended.
Cta& cta_of_cluster(unsigned rank);
// What lies in `cta` where `here` lies in the CTA of the thread that runs.
template <class T>
T* there(Cta& cta, T* here) {
  auto const at = reinterpret_cast<unsigned char*>(here) - world.running->cta->shared;
  if (at < 0 || at >= kMaxShared) fail("no address of shared memory");
  return reinterpret_cast<T*>(cta.shared + at);
}

void sleep_until(void const* wakes_by, std::function<bool()> ready, char const* what);
// Those of a CTA who sleep until something changes there, and what they wait for has come.
void wake(Cta& cta, void const* changed);
void arrive(Cta& cta, Barrier* barrier, std::uint32_t bytes);
void land(Cta& cta, Barrier* barrier, std::uint32_t bytes);

}  // namespace tessera::emulator
