// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.hpp"

#include <atomic>

namespace tessera::core {

struct ThreadPool::Job {
  std::int64_t count;
  Body body;
  void* argument;
  int max_slots;
  std::atomic<std::int64_t> next{0};
  int slots = 1;    // taken so far, slot 0 is the caller's; guarded by the pool's mutex
  int workers = 0;  // inside the job now; guarded by the pool's mutex
  Job* following = nullptr;

  void drain(int slot) noexcept {
    for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      body(argument, i, slot);
    }
  }
  [[nodiscard]] bool open() const noexcept {
    return slots < max_slots && next.load(std::memory_order_relaxed) < count;
  }
};

ThreadPool::ThreadPool(int num_threads) {
  workers_.reserve(static_cast<std::size_t>(num_threads - 1));
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    job_added_.notify_all();
    for (auto& worker : workers_) worker.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  job_added_.notify_all();
  for (auto& worker : workers_) worker.join();
}

ThreadPool::Job* ThreadPool::find_open_job() noexcept {
  for (Job* job = jobs_; job != nullptr; job = job->following) {
    if (job->open()) return job;
  }
  return nullptr;
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    Job* job = nullptr;
    job_added_.wait(lock, [&] { return stopping_ || (job = find_open_job()) != nullptr; });
    if (job == nullptr) return;
    int const slot = job->slots++;
    ++job->workers;
    lock.unlock();
    job->drain(slot);
    lock.lock();
    // The caller's writes of its next step must see this worker's: the mutex orders them.
    if (--job->workers == 0) job_left_.notify_all();
  }
}

void ThreadPool::run(std::int64_t count, Body body, void* argument,
                     std::int64_t operations) noexcept {
  Job job{.count = count, .body = body, .argument = argument, .max_slots = num_threads()};
  if (count <= 1 || operations < kMinShared || workers_.empty()) {
    job.drain(0);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    job.following = jobs_;
    jobs_ = &job;
  }
  if (count == 2) {
    job_added_.notify_one();
  } else {
    job_added_.notify_all();
  }
  job.drain(0);
  std::unique_lock lock(mutex_);
  Job** link = &jobs_;
  while (*link != &job) link = &(*link)->following;
  *link = job.following;
  job_left_.wait(lock, [&] { return job.workers == 0; });
}

}  // namespace tessera::core
