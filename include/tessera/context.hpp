// SPDX-License-Identifier: Apache-2.0
// A Context: the device, its threads, and nothing that changes from call to call.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/export.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera {

namespace core {
class ThreadPool;
}
namespace cuda {
class DeviceContext;
}

/// A CUDA stream (cudaStream_t) as an opaque handle; ignored on the CPU.
struct Stream {
  void* native = nullptr;
};

struct ContextOptions {
  Device device = {};
  /// CPU threads, the caller included; 0: as many as the process may use, on cuda 1.
  std::int32_t num_threads = 0;
  /// Takes a GPU of compute capability 10.0 (B200), whose kernels are compiled and emulated, never run on hardware.
  /// Without it such a GPU is refused. `tessera verify --device cuda --unproven-kernels` compares them with fp64.
  bool unproven_kernels = false;
};

/// Owns what the calls of one device share: CPU threads; on cuda the word where kernels note bad values. Immutable and
/// thread-safe: several threads may run layers of different shape on one Context at the same time, on cuda each on
/// a stream of its own. Results never depend on num_threads.
/// On cuda a call runs in the CUDA context that is current if it is one of the device, green or not, and otherwise in
/// the primary one. On return the context that was current before is current again; no other device gets one.
class TESSERA_EXPORT Context {
 public:
  /// Starts the threads; on cuda loads the driver. Errors: invalid_argument (num_threads < 0 or > 1024),
  /// environment (no such device, one that the kernels are not built for, or one whose kernels are
  /// unproven), out_of_memory.
  static Expected<Context> create(ContextOptions const& options = {}) noexcept;

  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  ~Context();

  [[nodiscard]] Device device() const noexcept;
  [[nodiscard]] std::int32_t num_threads() const noexcept;

  /// Runs body(argument, i) for every i in [0, count) on the context's threads and returns when all
  /// are done, so that code around a layer can share its threads. `body` must not throw.
  void parallel_for(std::int64_t count, void (*body)(void*, std::int64_t),
                    void* argument) const noexcept;
  /// The same for a callable, e.g. `context.parallel_for(rows, [&](std::int64_t row) { ... })`.
  template <class Body>
  void parallel_for(std::int64_t count, Body&& body) const noexcept {
    parallel_for(
        count,
        [](void* argument, std::int64_t i) {
          (*static_cast<std::remove_reference_t<Body>*>(argument))(i);
        },
        const_cast<void*>(static_cast<void const*>(std::addressof(body))));
  }

  /// For the library's own use.
  [[nodiscard]] core::ThreadPool& thread_pool() const noexcept { return *pool_; }
  /// For the library's own use: null on the CPU.
  [[nodiscard]] cuda::DeviceContext const* cuda() const noexcept { return cuda_.get(); }

 private:
  Context() noexcept;
  Device device_ = {};
  std::unique_ptr<core::ThreadPool> pool_;
  std::unique_ptr<cuda::DeviceContext> cuda_;
};

/// Values that only the device can read (expert_offsets, token_offsets, topk_counts) are checked there: kernels stay
/// inside their buffers whatever they find and note one bad value. This reports it, as invalid_argument, and forgets
/// it. It does not wait: synchronise the stream of a call first to hear of that call. Always ok on the CPU, where
/// calls check such values themselves.
TESSERA_EXPORT Status check_device_values(Context const& context) noexcept;

}  // namespace tessera
