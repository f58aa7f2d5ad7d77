// SPDX-License-Identifier: Apache-2.0
// Kernels of this library on a CPU: their own sources, compiled for the host. Every thread of a grid is a fiber, all of
// them run on one thread of the host, and a seed decides who runs next and when an asynchronous copy lands. So what a
// kernel's roles exchange through barriers, queues and words is what runs on a GPU, in schedules that a GPU
// would rarely take, and a schedule that fails can be had again.
//
//   arch.cuh  the functions of src/cuda/arch/
//   include/  as much of the CUDA headers as the kernels need
//
// Emulated: mbarriers with their arrivals and bytes; TMA loads, stores and additions of tiles with the 128-byte
// swizzle, and cp.async, all of which land late; wgmma of 128 or 256 columns, in bf16 or e4m3, whose operands in shared
// memory are read when somebody waits for it; named barriers, votes and shuffles of whole warps; clusters, with loads,
// stores and arrivals in a peer's shared memory; kernels that start early.
// Checked: no barrier gets more arrivals than it awaits, lanes of a warp meet in the same place, warps of a warpgroup
// multiply the same operands, nobody arrives in a CTA that has ended, somebody can always go on. Shared memory begins
// as NaNs.
// Not emulated: that the memory of a GPU is weaker than that of one thread, proxies, registers, time. Order and fences
// are what the model of the protocol judges (tests/expert_parallel/protocol_test.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace tessera::emulator {

constexpr std::ptrdiff_t kMaxShared = 227 * 1024;  // bytes of a CTA

// How a run is scheduled.
struct Schedule {
  std::uint64_t seed = 0;
  int burst = 1;    // turns that a thread has before the next one is drawn, on average
  int copies = 4;   // of so many turns one goes to an asynchronous copy, where there are any
  double lazy = 0;  // share of CTAs that have an eighth of the others' turns
};

// In the order of their seeds: turn by turn; long turns; copies that are late; few turns, copies that are early,
// and CTAs that fall behind.
inline constexpr Schedule kSchedules[] = {{.seed = 1},
                                          {.seed = 2, .burst = 64},
                                          {.seed = 3, .copies = 256},
                                          {.seed = 4, .burst = 8, .copies = 2, .lazy = 0.5}};

// Sets the CTAs of a cluster of the kernel, which is compiled for them (__cluster_dims__).
void set_compiled_cluster(void const* kernel, unsigned ctas);
unsigned compiled_cluster(void const* kernel);  // 1 where none was set

// Enqueues a grid whose CTAs all run at once. body() is one thread's. `cluster`: CTAs of one, a divisor of `ctas`.
void launch(unsigned ctas, unsigned cluster, unsigned threads, std::size_t shared_bytes,
            std::function<void()> body);
void wait_for_previous_grids();  // that were launched before that of the thread which runs
void let_next_grid_start();      // of the CTA of the thread which runs
// turns() of the last run when every CTA of its last grid had let another one start, or had ended.
std::uint64_t turns_before_next_grid();

// Runs all grids that were launched, side by side. What went wrong, and who waited where; empty: they have ended.
std::string run(Schedule const& schedule);

// Of the thread that runs: for arch/ and include/.
unsigned char* shared_memory();
// The CTA's variable of this key, which all CTAs of a grid have at the same place, behind what the launch asked for.
void* static_shared(void const* key, std::size_t bytes);
void yield();           // others may run
void changed();         // a word that others may wait for
std::uint64_t turns();  // that all threads had
[[noreturn]] void fail(std::string const& what);

using Barrier = std::uint64_t;
void init(Barrier* barrier, std::uint32_t arrivals);
void arrive(Barrier* barrier, std::uint32_t bytes);  // more to land before the phase ends
bool is_over(Barrier const* barrier, std::uint32_t parity);
void wait(Barrier* barrier, std::uint32_t parity);

// Generic and async accesses to shared memory, for who watches (state.hpp). They do nothing themselves.
void wrote_shared(void const* at, std::size_t bytes);        // by st, stmatrix
void copied_shared(void const* at, std::size_t bytes);       // by cp.async, now
void fenced_shared();                                        // by the thread that runs
void reads_shared_async(void const* at, std::size_t bytes);  // by a TMA store or a multiplication
void landed_shared(void const* at, std::size_t bytes);       // by a TMA load

// Clusters. Addresses are those of the caller's CTA; what is done is done at the same place in CTA `rank`.
unsigned cluster_rank();
void cluster_barrier();
void arrive_in(unsigned rank, Barrier* barrier);
unsigned char* shared_memory_of(unsigned rank);

// Where the lanes of a warp meet. Line 0: anywhere.
struct Site {
  char const* file = "";
  int line = 0;
  [[nodiscard]] std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};
// The values of all lanes; valid until the lane's next exchange.
std::uint64_t const* exchange(std::uint64_t value, Site const& site);
void named_barrier(int id, int threads, bool waits);
int block_votes(bool value);  // a barrier of the CTA: for how many of its threads it is true

// Copies, as a function that does them, later. `barrier` then gets the bytes.
void load_later(Barrier* barrier, std::uint32_t bytes, std::function<void()> copy);
void load_later_in(unsigned rank, Barrier* barrier, std::uint32_t bytes,
                   std::function<void()> copy);
// read() before a wait for reading is over, then write() before one for writing is. Counted in groups of the thread.
void store_later(std::function<void()> read, std::function<void()> write);
void commit_stores();
void wait_stores(int pending, bool reading_only);
void copy_later(std::function<void()> copy);  // cp.async
void arrive_behind_copies(Barrier* barrier);
void commit_copies();
void wait_copies(int pending);

// D of 64 rows x 256 columns, this thread's registers in groups of 128 columns; `second` null: of 128. Operands are
// rows of k, or rows-major.
void multiply_later(float* first, float* second, std::uint64_t a, std::uint64_t b,
                    bool a_rows_major, bool b_rows_major, bool adds);
// The same in e4m3, 32 of k at a time; both operands are rows of k. Sums are those of e4m3_sum.hpp.
void multiply_e4m3_later(float* first, float* second, std::uint64_t a, std::uint64_t b, bool adds);
// The same with this thread's part of A in registers, and B rows-major; adds.
void multiply_later(float* first, float* second, std::uint32_t const (&a)[4], std::uint64_t b);
void commit_multiplications();
void wait_multiplications(int pending);

}  // namespace tessera::emulator
