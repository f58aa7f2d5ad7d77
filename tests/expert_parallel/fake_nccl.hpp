// SPDX-License-Identifier: Apache-2.0
// A libnccl that needs no GPU: one rank of a group whose other ranks are said to be there.
#pragma once

#include <cstdint>

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

}  // namespace tessera::expert_parallel
