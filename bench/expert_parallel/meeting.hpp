// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a program meet, threads and processes alike: memory that outlives forks.
#pragma once

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <new>
#include <thread>

#include "../../src/expert_parallel/transport/nccl_library.hpp"

namespace tessera::bench {

struct Meeting {
  std::atomic<int> arrived, generation, failed;
  expert_parallel::NcclUniqueId nccl_id;

  // All ranks. Ends the process if another one has failed.
  void barrier(int ranks) {
    int const before = generation.load();
    if (arrived.fetch_add(1) == ranks - 1) {
      arrived = 0;
      generation.fetch_add(1);
      return;
    }
    while (generation.load() == before) {
      if (failed.load() != 0) _exit(1);
      std::this_thread::yield();
    }
  }
};

// A T, derived from Meeting, that forked processes share; null if there is no memory.
template <typename T>
T* make_shared_memory() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : new (memory) T{};
}

inline void die_with_parent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

}  // namespace tessera::bench
