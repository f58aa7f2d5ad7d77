// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/transport/nccl_library.hpp"

#include <dlfcn.h>

namespace tessera::expert_parallel {
namespace {

constexpr char kSoName[] = "libnccl.so.2";
constexpr int kOldest = 22800;       // the first with windows that kernels can address
constexpr int kPointerCall = 22900;  // the first that returns their addresses to the host
constexpr int kUnknown = 30000;

template <class Function>
bool find(void* library, char const* name, Function& function) noexcept {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

Expected<NcclLibrary> NcclLibrary::load(char const* path) noexcept {
  void* library = path == nullptr ? dlopen(kSoName, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  if (library == nullptr) {
    library = dlopen(path == nullptr ? kSoName : path, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    return Status::error(StatusCode::environment,
                         "NCCL is loaded at run time: %s; install NCCL 2.28 or later, or bring "
                         "your own peer pointers",
                         dlerror());
  }
  NcclLibrary nccl;
  NcclResult (*get_version)(int*) = nullptr;
  char const* missing = nullptr;
  auto const need = [&](char const* name, auto& function) {
    if (!find(library, name, function) && missing == nullptr) missing = name;
  };
  need("ncclGetVersion", get_version);
  if (missing == nullptr && (get_version(&nccl.version_) != kNcclSuccess ||
                             nccl.version_ < kOldest || nccl.version_ >= kUnknown)) {
    return Status::error(StatusCode::environment,
                         "windows need NCCL 2.28 or a later 2.x: %s is version %d; install another",
                         path == nullptr ? kSoName : path, nccl.version_);
  }
  need("ncclGetErrorString", nccl.get_error_string_);
  need("ncclGetUniqueId", nccl.get_unique_id);
  need("ncclCommInitRank", nccl.comm_init_rank);
  need("ncclCommInitRankConfig", nccl.comm_init_rank_config);
  need("ncclCommGetAsyncError", nccl.comm_get_async_error);
  need("ncclGroupStart", nccl.group_start);
  need("ncclGroupEnd", nccl.group_end);
  need("ncclSend", nccl.send);
  need("ncclRecv", nccl.receive);
  need("ncclCommDestroy", nccl.comm_destroy);
  need("ncclCommAbort", nccl.comm_abort);
  need("ncclMemAlloc", nccl.mem_alloc);
  need("ncclMemFree", nccl.mem_free);
  need("ncclCommWindowRegister", nccl.window_register);
  need("ncclCommWindowDeregister", nccl.window_deregister);
  need("ncclTeamLsa", nccl.team_lsa);
  if (nccl.version_ >= kPointerCall) need("ncclGetLsaDevicePointer", nccl.get_lsa_device_pointer);
  if (missing != nullptr) {
    return Status::error(StatusCode::environment,
                         "NCCL %d has no %s; install an official build of NCCL 2.28 or later",
                         nccl.version_, missing);
  }
  return nccl;
}

Status NcclLibrary::check(NcclResult result, char const* call) const noexcept {
  if (result == kNcclSuccess) return {};
  return Status::error(StatusCode::device_error, "%s: %s; set NCCL_DEBUG=WARN to hear why", call,
                       get_error_string_(result));
}

}  // namespace tessera::expert_parallel
