// SPDX-License-Identifier: Apache-2.0
// Windows: memory of every rank that the kernels of every rank can address. A kernel gets the addresses
// and nothing of the engine. They come from NCCL, or from the caller (adopt_window).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "expert_parallel/transport/device_calls.hpp"
#include "expert_parallel/transport/nccl_library.hpp"
#include "tessera/expert_parallel.hpp"
#include "tessera/status.hpp"

namespace tessera::expert_parallel {

struct Window {
  std::array<void*, kMaxRanks> address = {};  ///< [rank]: its memory, as this rank's GPU sees it
  std::size_t bytes = 0;
  NcclWindow nccl = nullptr;  ///< null where the caller brought the memory
};

struct EngineConfig {
  std::int32_t rank = 0, ranks = 1;
  std::int32_t device = 0;
  NcclUniqueId id = {};  ///< of make_unique_id() on one rank; the caller carries it to all
  char const* nccl_path = nullptr;  ///< null: libnccl.so.2, a copy that is loaded already first
  /// NCCL_NVLS_ENABLE in the environment of this process. Must be "0", and must have been before the
  /// first NCCL call of the process: no multicast object may ever be created.
  char const* nccl_nvls_enable = nullptr;
};

/// environment: NVLink multicast is not switched off. nccl_nvls_enable: as in EngineConfig.
Status check_multicast_is_off(char const* nccl_nvls_enable) noexcept;

/// An identity for the group of ranks. Call it on one of them.
Expected<NcclUniqueId> make_unique_id(EngineConfig const& config) noexcept;

/// One rank of a group that shares windows, as a thread or a process of its own. All calls but the
/// destructor are collective: every rank makes the same ones in the same order.
class Engine {
 public:
  /// environment: NCCL missing, too old, multicast not switched off, no such device.
  static Expected<std::unique_ptr<Engine>> open(EngineConfig const& config,
                                                DeviceCalls const& calls = device_calls()) noexcept;
  Engine(Engine const&) = delete;
  Engine& operator=(Engine const&) = delete;
  /// Frees what is still there, memory of windows too, after all work of this rank's GPU, without waiting for the
  /// others.
  ~Engine();

  /// A window of `bytes` zeros. No rank returns before all windows are zero.
  /// environment: the ranks do not all reach each other by loads and stores. Nothing is left then. unsupported: it has
  /// kMaxWindows already.
  Expected<Window> allocate(std::size_t bytes) noexcept;
  /// Frees it, after all work of this rank's GPU. Kernels of peers that still write to it keep the memory alive by
  /// their mappings, but a rank should not launch any more once another releases.
  Status release(Window const& window) noexcept;
  /// Leaves the group; its windows must have been released.
  Status close() noexcept;

  static constexpr int kMaxWindows = 8;

 private:
  Engine(EngineConfig const& config, DeviceCalls const& calls, NcclLibrary const& nccl) noexcept
      : config_(config), calls_(calls), nccl_(nccl) {}
  Status find_addresses(Window& window) const noexcept;

  EngineConfig config_;
  DeviceCalls calls_;
  NcclLibrary nccl_;
  NcclComm comm_ = nullptr;
  std::array<void*, kMaxWindows> memory_ = {};  // of windows that have not been released
};

/// A window of memory that the caller brings, from CUDA IPC, torch symmetric memory or NVSHMEM: the
/// address of every rank's part as the current device sees it. The caller has zeroed it, and frees it.
Expected<Window> adopt_window(std::span<void* const> addresses, std::size_t bytes,
                              DeviceCalls const& calls = device_calls()) noexcept;

}  // namespace tessera::expert_parallel
