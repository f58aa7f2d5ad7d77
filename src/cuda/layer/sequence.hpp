// SPDX-License-Identifier: Apache-2.0
// The launches of one call, in order on the caller's stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <nvtx3/nvtx3.hpp>

#include "cuda/host/cleared_words.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/device.hpp"
#include "cuda/layer/plan.hpp"
#include "cuda/layer/routing_tables.hpp"
#include "cuda/layer/select.hpp"

namespace tessera::cuda {

struct NvtxDomain {
  static constexpr char const* name{"tessera"};
};

/// Launches one op after another on a stream, each in an NVTX range; stops at the first that fails.
class Sequence {
 public:
  Sequence(DeviceContext const& device, Stream stream) noexcept
      : device_(device), stream_(static_cast<cudaStream_t>(stream.native)) {}

  /// body(stream) -> cudaError_t
  template <class Body>
  void add(char const* op, Body&& body) noexcept {
    if (!status_.ok()) return;
    nvtx3::scoped_range_in<NvtxDomain> const range{op};
    cudaError_t const error = body(stream_);
    if (error != cudaSuccess) status_ = device_error(op, error);
  }
  /// The fast kernel of an op on `sms` SMs, or its plain twin.
  template <class Arguments>
  void select(char const* op, Arguments const& args, int sms) noexcept {
    add(op, [&](cudaStream_t stream) { return launch(args, device_.architecture(), sms, stream); });
  }
  /// On all SMs.
  template <class Arguments>
  void select(char const* op, Arguments const& args) noexcept {
    select(op, args, device_.sm_count());
  }

  [[nodiscard]] DeviceContext const& device() const noexcept { return device_; }
  [[nodiscard]] Status const& status() const noexcept { return status_; }

 private:
  DeviceContext const& device_;
  cudaStream_t stream_;
  Status status_;
};

/// Counters of the persistent kernels, for the kernel that makes the tables to clear.
inline ClearedWords tile_counters(std::int32_t* gmem_counters) noexcept {
  return {gmem_counters, kNumTileCounters};
}
/// Zeros in the rows of a contiguous [P,d] tensor of grouped rows that belong to no expert.
inline void add_zero_tail(MoeDesc const& desc, RoutingView const& tables, Tensor const& rows,
                          Sequence& sequence) noexcept {
  sequence.add("zero tail", [&](cudaStream_t stream) {
    return launch_zero_tail({.gmem_first = tables.expert_offsets + desc.shape.experts,
                             .gmem_rows = rows.data,
                             .rows = desc.shape.tokens,
                             .row_bytes = 2 * desc.shape.hidden},
                            stream);
  });
}
/// Clears them by a launch of its own, for calls whose tables exist already.
inline void clear_counters(std::int32_t* gmem_counters, Sequence& sequence) noexcept {
  sequence.add("tile counters", [&](cudaStream_t stream) {
    return cudaMemsetAsync(gmem_counters, 0, sizeof(std::int32_t) * kNumTileCounters, stream);
  });
}

}  // namespace tessera::cuda
