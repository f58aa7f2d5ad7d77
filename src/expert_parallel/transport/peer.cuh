// SPDX-License-Identifier: Apache-2.0
// Kernels reach the windows of a group by two values, which are all that a transport has to provide: Peer is the window
// of any rank, OwnWindow that of this one, where words and rows of its peers arrive. Both hold an address. No other
// code of a kernel may index windows (tools/check_source.py).
//
//   load_if_local    A place to read from. Null means that the rank is reached by messages alone.
//   store_if_local   A place to write to, in the same way.
//   signal           Writes a word. Who sees it sees all that the caller has stored there and fenced at system scope
//                    before, and what other threads had stored whose counters the caller has acquired before the fence.
//   put              Copies bytes from a place in the own window, as networks copy from window to window. A later
//                    signal, of any thread that knows of the put, is seen after it. The place may be written again once
//                    the copy has arrived, which no kernel's end says, but the answer of the peer does.
//
// All ranks are of one host today, so no place is ever null (kAllAddressed) and kernels do not test for it. They name
// the other way that they would have to go, and do not compile once a place may be null and that way is not built. put
// is not built: a kernel of one host stores. The model of the protocol (tests/expert_parallel/peers.hpp) has all
// four for ranks of several hosts, and makes whole passes by put and signal.
#pragma once

#include <cstdint>

#include "cuda/arch/signal.cuh"
#include "expert_parallel/transport/windows.hpp"

namespace tessera::expert_parallel {

class Peer {
 public:
  // Rank: an integer, as the caller has it; a conversion would be instructions.
  template <class Rank>
  __device__ Peer(Windows const& windows, Rank rank) : window_(windows.windows_[rank]) {}

  template <OtherWay kWay>
  [[nodiscard]] __device__ char const* load_if_local(std::int64_t offset) const {
    static_assert(has_way(kWay));
    return window_ + offset;
  }
  template <OtherWay kWay>
  [[nodiscard]] __device__ char* store_if_local(std::int64_t offset) const {
    static_assert(has_way(kWay));
    return window_ + offset;
  }
  __device__ void signal(std::int64_t offset, std::uint32_t word) const {
    cuda::arch::store_relaxed_sys(reinterpret_cast<std::uint32_t*>(window_ + offset), word);
  }
  __device__ void signal(std::int64_t offset, std::uint64_t word) const {
    cuda::arch::store_relaxed_sys(reinterpret_cast<std::uint64_t*>(window_ + offset), word);
  }

 private:
  char* window_;
};

class OwnWindow {
 public:
  __device__ OwnWindow(Windows const& windows, std::int32_t rank)
      : window_(windows.windows_[rank]) {}

  [[nodiscard]] __device__ char* place(std::int64_t offset) const { return window_ + offset; }
  [[nodiscard]] __device__ std::uint32_t* word(std::int64_t offset) const {
    return reinterpret_cast<std::uint32_t*>(window_ + offset);
  }
  // Words that peers signal; who waits for them looks again and again, up to a limit (exchange/wait.cuh).
  [[nodiscard]] __device__ std::uint32_t acquire(std::int64_t offset) const {
    return cuda::arch::load_acquire_sys(word(offset));
  }
  [[nodiscard]] __device__ std::uint32_t look(std::int64_t offset) const {
    return cuda::arch::load_relaxed_sys(word(offset));
  }
  // A word of 8 bytes that is all there is to know.
  [[nodiscard]] __device__ std::uint64_t look_8(std::int64_t offset) const {
    return cuda::arch::load_relaxed_sys(reinterpret_cast<std::uint64_t const*>(window_ + offset));
  }

 private:
  char* window_;
};

}  // namespace tessera::expert_parallel
