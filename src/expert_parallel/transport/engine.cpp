// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/transport/engine.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace tessera::expert_parallel {
namespace {

Status check_ranks(std::int32_t rank, std::int32_t ranks) noexcept {
  if (ranks < 1 || ranks > kMaxRanks) {
    return Status::invalid("ranks=%d: 1 to %d GPUs of one host", ranks, kMaxRanks);
  }
  if (rank < 0 || rank >= ranks) {
    return Status::invalid("rank=%d: 0 to ranks-1 = %d", rank, ranks - 1);
  }
  return {};
}

}  // namespace

Status check_multicast_is_off(char const* nccl_nvls_enable) noexcept {
  if (nccl_nvls_enable != nullptr && std::strcmp(nccl_nvls_enable, "0") == 0) return {};
  return Status::error(StatusCode::environment,
                       "NVLink multicast must be off: NCCL_NVLS_ENABLE is %s; set it to 0 before "
                       "the first NCCL call of the process",
                       nccl_nvls_enable == nullptr ? "not set" : nccl_nvls_enable);
}

Expected<NcclUniqueId> make_unique_id(EngineConfig const& config) noexcept {
  TESSERA_TRY(check_multicast_is_off(config.nccl_nvls_enable));
  auto nccl = NcclLibrary::load(config.nccl_path);
  if (!nccl.ok()) return nccl.status();
  NcclUniqueId id = {};
  TESSERA_TRY(nccl.value().check(nccl.value().get_unique_id(&id), "ncclGetUniqueId"));
  return id;
}

Expected<std::unique_ptr<Engine>> Engine::open(EngineConfig const& config,
                                               DeviceCalls const& calls) noexcept {
  TESSERA_TRY(check_ranks(config.rank, config.ranks));
  TESSERA_TRY(check_multicast_is_off(config.nccl_nvls_enable));
  auto nccl = NcclLibrary::load(config.nccl_path);
  if (!nccl.ok()) return nccl.status();
  DeviceScope const scope(calls, config.device, ContextChoice::primary);
  TESSERA_TRY(scope.status());
  std::unique_ptr<Engine> engine(new (std::nothrow) Engine(config, calls, nccl.value()));
  if (engine == nullptr) {
    return Status::error(StatusCode::out_of_memory, "no memory for an engine; end other processes");
  }
  engine->config_.nccl_path = engine->config_.nccl_nvls_enable = nullptr;  // the caller's strings
  NcclLibrary const& lib = engine->nccl_;
  TESSERA_TRY(lib.check(lib.comm_init_rank(&engine->comm_, config.ranks, config.id, config.rank),
                        "ncclCommInitRank"));
  return engine;
}

Engine::~Engine() {
  if (comm_ == nullptr) return;
  // A context that has failed has none left.
  static_cast<void>(wait_for_kernels(calls_, config_.device));
  DeviceScope const scope(calls_, config_.device, ContextChoice::primary);
  if (!scope.status().ok()) return;
  nccl_.comm_abort(comm_);
  for (void* const memory : memory_) {
    if (memory != nullptr) nccl_.mem_free(memory);
  }
}

Expected<Window> Engine::allocate(std::size_t bytes) noexcept {
  if (comm_ == nullptr) return Status::invalid("the engine is closed; open another");
  if (bytes == 0) return Status::invalid("bytes=0: a window holds at least a byte");
  auto const kept = std::find(memory_.begin(), memory_.end(), nullptr);
  if (kept == memory_.end()) {
    return Status::error(StatusCode::unsupported, "an engine has at most %d windows; release one",
                         kMaxWindows);
  }
  DeviceScope const scope(calls_, config_.device, ContextChoice::primary);
  TESSERA_TRY(scope.status());
  Window window;
  window.bytes = (bytes + kNcclWindowAlignment - 1) / kNcclWindowAlignment * kNcclWindowAlignment;
  void* memory = nullptr;
  TESSERA_TRY(nccl_.check(nccl_.mem_alloc(&memory, window.bytes), "ncclMemAlloc"));
  window.address[static_cast<std::size_t>(config_.rank)] = memory;
  // Registration ends with a barrier of all ranks, so clearing comes before it.
  Status status = calls_.clear(memory, window.bytes);
  if (status.ok()) {
    status = nccl_.check(
        nccl_.window_register(comm_, memory, window.bytes, &window.nccl, kNcclWindowDefault),
        "ncclCommWindowRegister");
  }
  if (status.ok()) status = find_addresses(window);
  if (status.ok()) {
    *kept = memory;
    return window;
  }
  if (window.nccl != nullptr) nccl_.window_deregister(comm_, window.nccl);
  nccl_.mem_free(memory);
  return status;
}

Status Engine::find_addresses(Window& window) const noexcept {
  // Without peer access or cuMem NCCL hands out no window, or one that is a handle on the host.
  if (window.nccl == nullptr || !calls_.is_device_memory(window.nccl)) {
    return Status::error(
        StatusCode::environment,
        "GPUs of a group address each other's memory: NCCL %d gave no such window; "
        "check peer access between all of them, and that NCCL_CUMEM_ENABLE and "
        "NCCL_WIN_ENABLE are not 0",
        nccl_.version());
  }
  if (NcclTeam const team = nccl_.team_lsa(comm_); team.ranks != config_.ranks) {
    return Status::error(StatusCode::environment,
                         "GPUs of a group address each other's memory: only %d of %d ranks do; "
                         "take ranks of one host",
                         team.ranks, config_.ranks);
  }
  bool const has_call = nccl_.get_lsa_device_pointer != nullptr;
  NcclWindowHead228 head = {};
  if (!has_call) {
    TESSERA_TRY(calls_.read(&head, window.nccl, sizeof head));
    if (head.lsa_rank != config_.rank || head.world_rank != config_.rank) {
      return Status::error(StatusCode::environment,
                           "NCCL %d keeps its windows otherwise than known (rank %d reads as %d); "
                           "use NCCL 2.29 or later",
                           nccl_.version(), config_.rank, head.world_rank);
    }
  }
  for (std::int32_t peer = 0; peer < config_.ranks; ++peer) {
    void*& address = window.address[static_cast<std::size_t>(peer)];
    if (peer == config_.rank) continue;
    if (has_call) {
      TESSERA_TRY(nccl_.check(nccl_.get_lsa_device_pointer(window.nccl, 0, peer, &address),
                              "ncclGetLsaDevicePointer"));
    } else {
      address = reinterpret_cast<void*>(head.peer_address(peer));
    }
  }
  return {};
}

Status Engine::release(Window const& window) noexcept {
  if (comm_ == nullptr || window.nccl == nullptr) {
    return Status::invalid("a window is released by the open engine that made it");
  }
  // Neither deregistering nor freeing does.
  TESSERA_TRY(wait_for_kernels(calls_, config_.device));
  DeviceScope const scope(calls_, config_.device, ContextChoice::primary);
  TESSERA_TRY(scope.status());
  TESSERA_TRY(nccl_.check(nccl_.window_deregister(comm_, window.nccl), "ncclCommWindowDeregister"));
  void* const memory = window.address[static_cast<std::size_t>(config_.rank)];
  std::replace(memory_.begin(), memory_.end(), memory, static_cast<void*>(nullptr));
  return nccl_.check(nccl_.mem_free(memory), "ncclMemFree");
}

Status Engine::close() noexcept {
  if (comm_ == nullptr) return {};
  DeviceScope const scope(calls_, config_.device, ContextChoice::primary);
  TESSERA_TRY(scope.status());
  return nccl_.check(nccl_.comm_destroy(std::exchange(comm_, nullptr)), "ncclCommDestroy");
}

Expected<Window> adopt_window(std::span<void* const> addresses, std::size_t bytes,
                              DeviceCalls const& calls) noexcept {
  auto const ranks = static_cast<std::int32_t>(addresses.size());
  TESSERA_TRY(check_ranks(0, ranks));
  Window window;
  window.bytes = bytes;
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    void* const address = addresses[static_cast<std::size_t>(rank)];
    if (reinterpret_cast<std::uintptr_t>(address) % 128 != 0) {
      return Status::invalid("addresses[%d]=%p: a window begins at a multiple of 128", rank,
                             address);
    }
    if (!calls.is_device_memory(address)) {
      return Status::invalid("addresses[%d]=%p: no GPU memory that this process has mapped", rank,
                             address);
    }
    window.address[static_cast<std::size_t>(rank)] = address;
  }
  return window;
}

}  // namespace tessera::expert_parallel
