// SPDX-License-Identifier: Apache-2.0
// The C calls of NCCL by their own names. FAKE_NCCL_WITHOUT_WINDOWS leaves one out, as old builds do.
#include "tests/expert_parallel/fake_nccl.hpp"

#include <cstdlib>
#include <cstring>

#include "expert_parallel/transport/nccl_library.hpp"
#include "tests/expert_parallel/fake_messages.hpp"

#define FAKE_CALL extern "C" __attribute__((visibility("default")))

using namespace tessera::expert_parallel;

namespace {

FakeNccl state;

int result(char const* call) { return std::strcmp(state.failing, call) == 0 ? 1 : 0; }

// Of a call that is made in the communicator's context.
int result_there(char const* call) {
  state.called_elsewhere |= state.current != nullptr && *state.current != state.wanted;
  return result(call);
}

void take_memory() { state.taken_from_kernel |= state.busy != nullptr && *state.busy; }

}  // namespace

FAKE_CALL FakeNccl* tessera::expert_parallel::fake_nccl() { return &state; }

FAKE_CALL int ncclGetVersion(int* version) {
  *version = state.version;
  return 0;
}
FAKE_CALL char const* ncclGetErrorString(int) { return "unhandled fake error"; }
FAKE_CALL int ncclGetUniqueId(NcclUniqueId* id) {
  std::memset(id, 7, sizeof *id);
  static std::atomic<int> ids = 0;
  int const number = ++ids;
  std::memcpy(id, &number, sizeof number);
  return result("ncclGetUniqueId");
}
FAKE_CALL int ncclCommInitRank(NcclComm* comm, int, NcclUniqueId id, int rank) {
  if (id.bytes[127] != 7) return 2;
  if (int const failed = result_there("ncclCommInitRank")) return failed;
  state.rank = rank;
  ++state.communicators;
  *comm = reinterpret_cast<NcclComm>(&state);
  return 0;
}
FAKE_CALL int ncclCommDestroy(NcclComm comm) {
  if (leave_messages(comm, false)) return kNcclInProgress;
  --state.communicators;
  return result_there("ncclCommDestroy");
}
FAKE_CALL int ncclCommAbort(NcclComm comm) {  // takes what is registered with it
  if (leave_messages(comm, true)) return 0;
  --state.communicators;
  state.windows = 0;
  return result_there("ncclCommAbort");
}
FAKE_CALL int ncclMemAlloc(void** memory, std::size_t bytes) {
  if (int const failed = result_there("ncclMemAlloc")) return failed;
  ++state.buffers;
  *memory = std::aligned_alloc(4096, bytes);
  std::memset(*memory, 0xff, bytes);
  return 0;
}
FAKE_CALL int ncclMemFree(void* memory) {
  take_memory();
  --state.buffers;
  std::free(memory);
  return result_there("ncclMemFree");
}
FAKE_CALL int ncclCommWindowDeregister(NcclComm, NcclWindow) {
  take_memory();
  --state.windows;
  return result_there("ncclCommWindowDeregister");
}
FAKE_CALL NcclTeam ncclTeamLsa(NcclComm) { return {state.lsa_ranks, state.rank, 1}; }

#if !defined(FAKE_NCCL_WITHOUT_WINDOWS)
FAKE_CALL int ncclCommWindowRegister(NcclComm, void*, std::size_t, NcclWindow* window, int flags) {
  if (int const failed = result_there("ncclCommWindowRegister")) return failed;
  ++state.windows;
  state.window_flags = flags;
  static NcclWindowHead228 window_head;
  window_head = {nullptr, kFakeFlatBase, state.rank, state.rank, kFakeStride4g, 0};
  *window = reinterpret_cast<NcclWindow>(&window_head);
  if (state.no_symmetric_windows) *window = reinterpret_cast<NcclWindow>(&state);
  return 0;
}
FAKE_CALL int ncclGetLsaDevicePointer(NcclWindow window, std::size_t offset, int peer,
                                      void** address) {
  if (int const failed = result("ncclGetLsaDevicePointer")) return failed;
  auto const* const head = reinterpret_cast<NcclWindowHead228 const*>(window);
  *address = reinterpret_cast<void*>(head->peer_address(peer) + offset);
  return 0;
}
#endif
