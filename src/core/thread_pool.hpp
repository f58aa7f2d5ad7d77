// SPDX-License-Identifier: Apache-2.0
// A fixed set of threads that run the indices of a loop; several callers may use it at once.
//
// An atomic ticket decides which thread runs an index, so it differs from run to run: results may not
// depend on it. What may depend on the thread is scratch memory, by `slot`: inside one call no two threads
// share a slot, and slots are < num_threads().
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace tessera::core {

class ThreadPool {
 public:
  /// Starts num_threads - 1 workers; the caller of run() is the remaining thread. Throws what
  /// std::thread throws.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(ThreadPool const&) = delete;
  ThreadPool& operator=(ThreadPool const&) = delete;

  [[nodiscard]] int num_threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  /// Multiply-adds of one loop below which the caller is done before others have woken.
  static constexpr std::int64_t kMinShared = 1 << 16;

  using Body = void (*)(void* argument, std::int64_t index, int slot);
  /// body(argument, i, slot) for every i in [0, count); returns when all are done. A loop of less than kMinShared
  /// `operations` in all stays on the calling thread.
  void run(std::int64_t count, Body body, void* argument,
           std::int64_t operations = kMinShared) noexcept;

  /// The same for a callable (index, slot).
  template <class Callable>
  void run(std::int64_t count, Callable&& callable, std::int64_t operations = kMinShared) noexcept {
    using Type = std::remove_reference_t<Callable>;
    run(
        count,
        [](void* argument, std::int64_t index, int slot) {
          (*static_cast<Type*>(argument))(index, slot);
        },
        const_cast<void*>(static_cast<void const*>(std::addressof(callable))), operations);
  }

 private:
  struct Job;
  void work();
  Job* find_open_job() noexcept;

  std::mutex mutex_;
  std::condition_variable job_added_;
  std::condition_variable job_left_;
  Job* jobs_ = nullptr;  // intrusive list of the callers' stack frames
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera::core
