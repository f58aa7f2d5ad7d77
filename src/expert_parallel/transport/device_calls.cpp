// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/transport/device_calls.hpp"

#include <cuda_runtime.h>

#include <atomic>

#include "cuda/host/current_context.hpp"
#include "cuda/host/error_text.hpp"

namespace tessera::expert_parallel {
namespace {

using cuda::host::check;

Expected<void*> use(std::int32_t device, ContextChoice choice) noexcept {
  static std::atomic<int> known = 0;  // no process sees fewer later
  int devices = known.load(std::memory_order_relaxed);
  if (device < 0 || device >= devices) {
    cudaError_t const error = cudaGetDeviceCount(&devices);
    if (error != cudaErrorNoDevice) TESSERA_TRY(check(error, "cudaGetDeviceCount"));
    known.store(devices, std::memory_order_relaxed);
  }
  if (device < 0 || device >= devices) {
    return Status::error(StatusCode::environment,
                         "device cuda:%d: this process sees %d; count from 0", device, devices);
  }
  CUcontext before = nullptr;
  TESSERA_TRY(check(cuda::host::make_current(device, choice, before), "current context"));
  return static_cast<void*>(before);
}

void restore(void* context) noexcept { cuda::host::restore(static_cast<CUcontext>(context)); }

Status synchronize() noexcept { return check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

Status clear(void* device_memory, std::size_t bytes) noexcept {
  TESSERA_TRY(check(cudaMemset(device_memory, 0, bytes), "cudaMemset"));
  return synchronize();
}

Status read(void* host, void const* device_memory, std::size_t bytes) noexcept {
  return check(cudaMemcpy(host, device_memory, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

bool is_device_memory(void const* pointer) noexcept {
  cudaPointerAttributes attributes = {};
  bool const known = cudaPointerGetAttributes(&attributes, pointer) == cudaSuccess;
  cudaGetLastError();
  return known && attributes.type == cudaMemoryTypeDevice;
}

Expected<void*> allocate(std::size_t bytes) noexcept {
  void* memory = nullptr;
  cudaError_t const error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return Status::error(StatusCode::out_of_memory,
                         "a window of %zu bytes: the GPU has no memory for it; free memory "
                         "there, or make max_tokens smaller",
                         bytes);
  }
  TESSERA_TRY(check(error, "cudaMalloc"));
  return memory;
}

void free(void* device_memory) noexcept { static_cast<void>(cudaFree(device_memory)); }

Status reach(std::int32_t device, std::int32_t peer) noexcept {
  int can = 0;
  TESSERA_TRY(check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer"));
  if (can == 0) {
    return Status::error(StatusCode::environment,
                         "GPUs of a group address each other's memory: cuda:%d has no peer access "
                         "to cuda:%d; name GPUs that have (nvidia-smi topo -p2p r)",
                         device, peer);
  }
  cudaError_t const error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return {};
  }
  return check(error, "cudaDeviceEnablePeerAccess");
}

}  // namespace

DeviceCalls const& device_calls() noexcept {
  static constexpr DeviceCalls kCalls = {
      use, restore, clear, synchronize, read, is_device_memory, allocate, free, reach};
  return kCalls;
}

}  // namespace tessera::expert_parallel
