// SPDX-License-Identifier: Apache-2.0
// A libnccl that needs no GPU: one rank of a group whose other ranks are said to be there, for windows; and ranks that
// are threads of this process, for messages.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace tessera::expert_parallel {

struct FakeNccl {
  int version = 22809;
  int lsa_ranks = 2;
  bool no_symmetric_windows = false;  // as without peer access: a window that is no device struct
  char const* failing = "";           // the call that fails
  bool const* busy = nullptr;         // whether a kernel runs that uses the windows
  void* const* current = nullptr;     // the context that is current
  void const* wanted = nullptr;       // and that is to be, in all calls of a communicator
  // What it saw and holds.
  int communicators = 0, windows = 0, buffers = 0;
  int window_flags = -1;
  int rank = -1;
  bool taken_from_kernel = false;
  bool called_elsewhere = false;  // in another context
};

constexpr std::uint64_t kFakeFlatBase = 0x7f0000000000;  // where rank 0's window appears
constexpr unsigned kFakeStride4g = 35;

extern "C" FakeNccl* fake_nccl();

// A communicator for messages does what a stream of NCCL does, on one of these.
class FakeQueue {
 public:
  virtual void enqueue(std::function<void()> work) = 0;

 protected:
  ~FakeQueue() = default;
};

// Of communicators for messages, made by ncclCommInitRankConfig.
struct FakeMessages {
  std::atomic<int> communicators = 0;  // that there are
  std::atomic<int> aborted = 0;        // that there have been
  std::atomic<bool> tells =
      false;                   // whether the others hear of one that was aborted, as over a socket
  std::atomic<int> wrong = 0;  // messages of another length than awaited, configurations that block
  std::atomic<int> failing_group = 0;  // the ncclGroupEnd, from 1 on, which fails
};
extern "C" FakeMessages* fake_messages();

}  // namespace tessera::expert_parallel
