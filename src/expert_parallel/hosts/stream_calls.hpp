// SPDX-License-Identifier: Apache-2.0
// A table of what passes over hosts do on a stream besides passes of one host and messages: builds without CUDA have
// one that refuses, tests one of their own. All but the last four calls are made in a context of the stream's device.
#pragma once

#include <cstddef>

#include "expert_parallel/hosts/rows.hpp"
#include "tessera/context.hpp"
#include "tessera/status.hpp"

namespace tessera::expert_parallel::hosts {

struct StreamCalls {
  Status (*choose)(ChooseTokens const&, Stream) noexcept = nullptr;
  Status (*pack)(PackRows const&, Stream) noexcept = nullptr;
  Status (*sum)(SumPartials const&, Stream) noexcept = nullptr;
  /// To host_memory(), on the stream.
  Status (*read)(void* host, void const* device_memory, std::size_t bytes,
                 Stream) noexcept = nullptr;
  /// From any memory of the host, which the caller may change on return.
  Status (*write)(void* device_memory, void const* host, std::size_t bytes,
                  Stream) noexcept = nullptr;
  Expected<bool> (*captures)(Stream) noexcept = nullptr;  ///< True if it is captured into a graph
  Expected<void*> (*make_event)() noexcept = nullptr;
  Status (*record)(void* event, Stream) noexcept = nullptr;
  Expected<void*> (*host_memory)(std::size_t bytes) noexcept = nullptr;

  Expected<bool> (*passed)(void* event) noexcept = nullptr;  ///< True if the stream has come to it
  void (*free_event)(void* event) noexcept = nullptr;
  void (*free_host_memory)(void* host) noexcept = nullptr;
  /// Lets the calling thread ask for events while another one captures a graph.
  void (*stand_beside_captures)() noexcept = nullptr;
};

/// Those of this build.
StreamCalls const& stream_calls() noexcept;

}  // namespace tessera::expert_parallel::hosts
