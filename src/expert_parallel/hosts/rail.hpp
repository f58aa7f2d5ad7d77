// SPDX-License-Identifier: Apache-2.0
// Messages between the hosts, along a rail: the ranks that have one index within their hosts. They go by NCCL on the
// caller's stream. A thread watches the stream's waits: it ends those that take too long, and those that NCCL gives up.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "expert_parallel/hosts/stream_calls.hpp"
#include "expert_parallel/transport/device_calls.hpp"
#include "expert_parallel/transport/nccl_library.hpp"
#include "tessera/hosts.hpp"
#include "tessera/status.hpp"

namespace tessera::expert_parallel::hosts {

struct RailConfig {
  HostPlace place = {};
  std::int32_t device = 0;
  double time_limit = 30;  // seconds
  NcclUniqueId id = {};
  char const* nccl_path = nullptr;         // as in EngineConfig
  char const* nccl_nvls_enable = nullptr;  // as in EngineConfig
};

/// Holds what goes to the counterpart on one host, and what comes from that on another. Nothing that is empty is sent.
struct Message {
  void const* out = nullptr;
  std::size_t out_bytes = 0;
  std::int32_t to = 0;
  void* into = nullptr;
  std::size_t into_bytes = 0;
  std::int32_t of = 0;
};

class Rail {
 public:
  /// Collective. Errors: as HostRail::open().
  static Expected<std::unique_ptr<Rail>> open(RailConfig const& config,
                                              DeviceCalls const& device = device_calls(),
                                              StreamCalls const& calls = stream_calls()) noexcept;
  Rail(Rail const&) = delete;
  Rail& operator=(Rail const&) = delete;
  ~Rail();

  [[nodiscard]] HostPlace const& place() const noexcept { return config_.place; }
  [[nodiscard]] std::span<std::int64_t const> sent() const noexcept {
    return {sent_.data(), static_cast<std::size_t>(config_.place.hosts)};
  }
  /// A pass begins, of which `what` is said: forward or backward.
  Status begin(char const* what) noexcept;
  /// Enqueues messages that go at the same time. what: for the text of an error. Names the host that the first one
  /// comes from where it cannot be enqueued within the limit.
  Status exchange(char const* what, std::span<Message const> messages, Stream stream) noexcept;
  /// Copies numbers of the GPU to the host, which waits for them.
  Status read(void* host, void const* device_memory, std::size_t bytes, Stream stream) noexcept;
  /// Returns what has failed first.
  [[nodiscard]] Status fault() const noexcept;
  /// Collective, after all work of the GPU.
  Status close() noexcept;

 private:
  struct Moment {
    std::uint64_t number = 0;  // of the pass
    char const* what = "joining";
  };
  // A stream's wait: for what, for whom; events ahead of it and behind it.
  struct Wait {
    char const* what;
    std::int32_t host;
    Moment moment;
    void *ahead, *behind;
  };

  Rail(RailConfig const& config, DeviceCalls const& device, StreamCalls const& calls,
       NcclLibrary const& nccl) noexcept
      : config_(config), device_(device), calls_(calls), nccl_(nccl) {}
  Status enqueue(char const* what, std::span<Message const> messages, Stream stream) noexcept;
  Status await_communicator(char const* what, std::int32_t host) noexcept;
  Status fail(char const* what, std::int32_t host, char const* why, Moment const& moment) noexcept;
  void abort() noexcept;
  Expected<void*> take_event();
  void watch() noexcept;
  bool look(double& waited_from) noexcept;
  bool ask_communicator(Wait const& wait, char const* why) noexcept;
  void end_watch() noexcept;

  RailConfig config_;
  DeviceCalls device_;
  StreamCalls calls_;
  NcclLibrary nccl_;
  Moment moment_;
  std::array<std::int64_t, kMaxHosts> sent_ = {};
  void* numbers_ = nullptr;  // host memory
  std::size_t number_bytes_ = 0;

  std::mutex mutable communicator_mutex_;  // of calls of NCCL
  NcclComm communicator_ = nullptr;

  std::mutex mutable mutex_;  // of what follows
  std::condition_variable changed_;
  std::deque<Wait> waits_;
  std::vector<void*> events_;  // that are free, with place for all that were made
  std::size_t made_ = 0;
  Status fault_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace tessera::expert_parallel::hosts
