// SPDX-License-Identifier: Apache-2.0
// Messages of NCCL between threads of one process. As in NCCL nothing that was begun ends before both ends have come,
// on the stream, and a communicator that does not block answers for itself in ncclCommGetAsyncError.
#include "tests/expert_parallel/fake_messages.hpp"

#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/expert_parallel/fake_nccl.hpp"

#define FAKE_CALL extern "C" __attribute__((visibility("default")))

using namespace tessera::expert_parallel;

namespace {

constexpr int kRemoteError = 6;

FakeMessages state;

std::mutex mutex;  // of all that follows
std::condition_variable changed;

struct Group {
  int ranks = 0;
  std::set<int> joined, gone;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> sent;  // from, to
};
struct Comm {
  std::shared_ptr<Group> group;
  int rank = 0;
  bool is_aborted = false;
};
std::map<std::string, std::shared_ptr<Group>> groups;
std::map<NcclComm, std::shared_ptr<Comm>> comms;

struct Call {
  std::shared_ptr<Comm> comm;
  void* memory;
  std::size_t bytes;
  int peer;
  bool sends;
  FakeQueue* stream;
};
thread_local std::vector<Call> calls;

int add(NcclComm comm, void* memory, std::size_t bytes, int type, int peer, void* stream,
        bool sends) {
  std::lock_guard const lock(mutex);
  auto const found = comms.find(comm);
  if (found == comms.end() || type != kNcclBytes) return 4;
  calls.push_back({found->second, memory, bytes, peer, sends, static_cast<FakeQueue*>(stream)});
  return 0;
}

void run(std::vector<Call> const& group) {
  std::unique_lock lock(mutex);
  for (Call const& call : group) {
    if (!call.sends || call.comm->is_aborted) continue;
    auto const* const begin = static_cast<char const*>(call.memory);
    call.comm->group->sent[{call.comm->rank, call.peer}].emplace_back(begin, begin + call.bytes);
  }
  changed.notify_all();
  for (Call const& call : group) {
    if (call.sends) continue;
    auto& box = call.comm->group->sent[{call.peer, call.comm->rank}];
    changed.wait(lock, [&] { return call.comm->is_aborted || !box.empty(); });
    if (call.comm->is_aborted) return;
    if (box.front().size() != call.bytes) ++state.wrong;
    std::memcpy(call.memory, box.front().data(), std::min(box.front().size(), call.bytes));
    box.pop_front();
  }
}

}  // namespace

FAKE_CALL FakeMessages* tessera::expert_parallel::fake_messages() { return &state; }

bool tessera::expert_parallel::leave_messages(NcclComm comm, bool aborts) {
  std::lock_guard const lock(mutex);
  auto const found = comms.find(comm);
  if (found == comms.end()) return false;
  found->second->is_aborted = aborts;
  if (aborts) found->second->group->gone.insert(found->second->rank);
  comms.erase(found);
  --state.communicators;
  if (aborts) ++state.aborted;
  changed.notify_all();
  return true;
}

FAKE_CALL int ncclCommInitRankConfig(NcclComm* comm, int ranks, NcclUniqueId id, int rank,
                                     NcclConfig217* config) {
  if (config->size != 40 || config->magic != 0xcafebeef || config->blocking != 0) ++state.wrong;
  std::lock_guard const lock(mutex);
  auto& group = groups[std::string(id.bytes, sizeof id.bytes)];
  if (group == nullptr) group = std::make_shared<Group>();
  group->ranks = ranks;
  group->joined.insert(rank);
  auto made = std::make_shared<Comm>();
  made->group = group;
  made->rank = rank;
  *comm = reinterpret_cast<NcclComm>(made.get());
  comms[*comm] = made;
  ++state.communicators;
  return kNcclInProgress;
}
FAKE_CALL int ncclCommGetAsyncError(NcclComm comm, int* result) {
  std::lock_guard const lock(mutex);
  auto const found = comms.find(comm);
  if (found == comms.end()) return 4;
  Group const& group = *found->second->group;
  *result = static_cast<int>(group.joined.size()) < group.ranks ? kNcclInProgress : 0;
  if (state.tells && !group.gone.empty()) *result = kRemoteError;
  return 0;
}
FAKE_CALL int ncclGroupStart() {
  calls.clear();
  return 0;
}
FAKE_CALL int ncclGroupEnd() {
  if (state.failing_group > 0 && --state.failing_group == 0) return 5;
  if (!calls.empty()) {
    calls.front().stream->enqueue([group = std::exchange(calls, {})] { run(group); });
  }
  return kNcclInProgress;
}
FAKE_CALL int ncclSend(void const* from, std::size_t count, int type, int peer, NcclComm comm,
                       void* stream) {
  return add(comm, const_cast<void*>(from), count, type, peer, stream, true);
}
FAKE_CALL int ncclRecv(void* into, std::size_t count, int type, int peer, NcclComm comm,
                       void* stream) {
  return add(comm, into, count, type, peer, stream, false);
}
