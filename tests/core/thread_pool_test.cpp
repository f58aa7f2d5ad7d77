// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace tessera::core {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (int const threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (std::int64_t const count : {0, 1, 2, 3, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      pool.run(count, [&](std::int64_t i, int) { ++runs[static_cast<std::size_t>(i)]; });
      for (auto const& run : runs) ASSERT_EQ(run.load(), 1);
    }
  }
}

TEST(ThreadPool, LeavesLittleWorkToTheCaller) {
  ThreadPool pool(4);
  auto const caller = std::this_thread::get_id();
  std::vector<int> runs(1000, 0);
  pool.run(
      1000,
      [&](std::int64_t i, int slot) {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        EXPECT_EQ(slot, 0);
        ++runs[static_cast<std::size_t>(i)];
      },
      ThreadPool::kMinShared - 1);
  EXPECT_EQ(runs, std::vector<int>(1000, 1));
}

TEST(ThreadPool, GivesEachThreadItsOwnSlot) {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<bool> shared{false};
  pool.run(2000, [&](std::int64_t, int slot) {
    if (slot < 0 || slot >= 4 || inside[static_cast<std::size_t>(slot)].fetch_add(1) != 0) {
      shared = true;
    }
    inside[static_cast<std::size_t>(slot)].fetch_sub(1);
  });
  EXPECT_FALSE(shared);
}

// Plain writes of one loop must be visible to the next, whichever threads ran them.
TEST(ThreadPool, OrdersOneLoopBeforeTheNext) {
  ThreadPool pool(3);
  std::vector<int> values(257, 0);
  for (int round = 1; round <= 200; ++round) {
    pool.run(257, [&](std::int64_t i, int) { ++values[static_cast<std::size_t>(256 - i)]; });
    pool.run(257,
             [&](std::int64_t i, int) { ASSERT_EQ(values[static_cast<std::size_t>(i)], round); });
  }
}

TEST(ThreadPool, ServesSeveralCallersAtOnce) {
  ThreadPool pool(3);
  std::vector<std::int64_t> sums(4, 0);
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < sums.size(); ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 100; ++round) {
        std::atomic<std::int64_t> sum{0};
        pool.run(50, [&](std::int64_t i, int) { sum += i; });
        sums[caller] += sum;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  for (auto const sum : sums) EXPECT_EQ(sum, 100 * 49 * 50 / 2);
}

TEST(ThreadPool, AllowsALoopInsideALoop) {
  ThreadPool pool(3);
  std::atomic<int> runs{0};
  pool.run(8, [&](std::int64_t, int) { pool.run(8, [&](std::int64_t, int) { ++runs; }); });
  EXPECT_EQ(runs, 64);
}

}  // namespace
}  // namespace tessera::core
