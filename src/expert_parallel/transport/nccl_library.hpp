// SPDX-License-Identifier: Apache-2.0
// NCCL, loaded at run time: the calls that symmetric windows and messages need, declared here so that the build needs
// neither its headers nor its library. Everything used is plain C of a stable ABI, but for one thing:
// before 2.29 the address of a window on a peer stands in a struct on the device, whose head is declared
// below for 2.28 alone.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "tessera/status.hpp"

namespace tessera::expert_parallel {

struct NcclUniqueId {
  char bytes[128];
};
struct NcclTeam {
  int ranks, rank, stride;
};
using NcclComm = struct NcclCommTag*;
using NcclWindow = struct NcclWindowTag*;
using NcclResult = int;  // 0 is success

constexpr NcclResult kNcclSuccess = 0;
constexpr NcclResult kNcclInProgress = 7;  // of a communicator whose calls do not block
constexpr int kNcclBytes = 0;              // a type of elements: int8
// Maps every rank's memory on every rank, and no more: the flag for symmetric collectives would also
// create a multicast object where NVLS is on.
constexpr int kNcclWindowDefault = 0;
constexpr std::size_t kNcclWindowAlignment = 4096;

// The head of 2.28's ncclWindow_vidmem. Peer p's copy of the window begins at
// lsa_flat_base + p * (stride_4g << 32).
struct NcclWindowHead228 {
  void* host;
  std::uint64_t lsa_flat_base;
  std::int32_t lsa_rank, world_rank;
  std::uint32_t stride_4g, multicast_offset_4k;

  [[nodiscard]] std::uint64_t peer_address(int peer) const noexcept {
    return lsa_flat_base +
           (static_cast<std::uint64_t>(static_cast<unsigned>(peer) * stride_4g) << 32);
  }
};

// ncclConfig_t as it was in 2.17: NCCL takes from it what its `size` and `version` say that it has.
struct NcclConfig217 {
  static constexpr int kUnset = INT_MIN;

  std::size_t size = sizeof(NcclConfig217);
  unsigned magic = 0xcafebeef, version = 21700;
  int blocking = kUnset, cluster_size = kUnset, min_ctas = kUnset, max_ctas = kUnset;
  char const* network = nullptr;
};
static_assert(sizeof(NcclConfig217) == 40);

class NcclLibrary {
 public:
  /// Loads `path`, or libnccl.so.2 where it is null: the copy that the process has loaded already (such as
  /// torch's) before any other. The library stays loaded.
  /// environment: not found, a call missing, or a version that this build does not know.
  static Expected<NcclLibrary> load(char const* path = nullptr) noexcept;

  /// e.g. 22809 for 2.28.9.
  [[nodiscard]] int version() const noexcept { return version_; }
  /// ok, or the error text of NCCL: "ncclMemAlloc: unhandled cuda error".
  [[nodiscard]] Status check(NcclResult result, char const* call) const noexcept;
  /// Returns what NCCL says of a result.
  [[nodiscard]] char const* text(NcclResult result) const noexcept {
    return get_error_string_(result);
  }

  NcclResult (*get_unique_id)(NcclUniqueId*) = nullptr;
  NcclResult (*comm_init_rank)(NcclComm*, int ranks, NcclUniqueId, int rank) = nullptr;
  NcclResult (*comm_init_rank_config)(NcclComm*, int ranks, NcclUniqueId, int rank,
                                      NcclConfig217*) = nullptr;
  NcclResult (*comm_get_async_error)(NcclComm, NcclResult*) = nullptr;
  NcclResult (*group_start)() = nullptr;
  NcclResult (*group_end)() = nullptr;
  NcclResult (*send)(void const*, std::size_t count, int type, int peer, NcclComm,
                     void* stream) = nullptr;
  NcclResult (*receive)(void*, std::size_t count, int type, int peer, NcclComm,
                        void* stream) = nullptr;
  NcclResult (*comm_destroy)(NcclComm) = nullptr;
  NcclResult (*comm_abort)(NcclComm) = nullptr;
  NcclResult (*mem_alloc)(void**, std::size_t) = nullptr;
  NcclResult (*mem_free)(void*) = nullptr;
  NcclResult (*window_register)(NcclComm, void*, std::size_t, NcclWindow*, int flags) = nullptr;
  NcclResult (*window_deregister)(NcclComm, NcclWindow) = nullptr;
  /// The ranks that reach each other by loads and stores. Valid once a window was registered.
  NcclTeam (*team_lsa)(NcclComm) = nullptr;
  /// From 2.29 on; null before.
  NcclResult (*get_lsa_device_pointer)(NcclWindow, std::size_t offset, int peer,
                                       void** address) = nullptr;

 private:
  int version_ = 0;
  char const* (*get_error_string_)(NcclResult) = nullptr;
};

}  // namespace tessera::expert_parallel
