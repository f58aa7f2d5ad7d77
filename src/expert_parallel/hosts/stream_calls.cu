// SPDX-License-Identifier: Apache-2.0
#include "expert_parallel/hosts/stream_calls.hpp"

#include <cuda_runtime.h>

#include "cuda/host/error_text.hpp"
#include "cuda/host/outside_capture.hpp"
#include "expert_parallel/hosts/rows.cuh"

namespace tessera::expert_parallel::hosts {
namespace {

using cuda::host::check;

cudaStream_t native(Stream stream) noexcept { return static_cast<cudaStream_t>(stream.native); }
cudaEvent_t native(void* event) noexcept { return static_cast<cudaEvent_t>(event); }

Status choose(ChooseTokens const& args, Stream stream) noexcept {
  return check(launch_choose(args, native(stream)), "choose_tokens");
}
Status pack(PackRows const& args, Stream stream) noexcept {
  return check(launch_pack(args, native(stream)), "pack_rows");
}
Status sum(SumPartials const& args, Stream stream) noexcept {
  return check(launch_sum(args, native(stream)), "sum_partials");
}

Status read(void* host, void const* device_memory, std::size_t bytes, Stream stream) noexcept {
  return check(cudaMemcpyAsync(host, device_memory, bytes, cudaMemcpyDeviceToHost, native(stream)),
               "cudaMemcpyAsync");
}

Status write(void* device_memory, void const* host, std::size_t bytes, Stream stream) noexcept {
  return check(cudaMemcpyAsync(device_memory, host, bytes, cudaMemcpyHostToDevice, native(stream)),
               "cudaMemcpyAsync");
}

Expected<bool> captures(Stream stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  TESSERA_TRY(check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing"));
  return status != cudaStreamCaptureStatusNone;
}

Expected<void*> make_event() noexcept {
  cudaEvent_t event = nullptr;
  TESSERA_TRY(check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
  return static_cast<void*>(event);
}
Status record(void* event, Stream stream) noexcept {
  return check(cudaEventRecord(native(event), native(stream)), "cudaEventRecord");
}
Expected<bool> passed(void* event) noexcept {
  cudaError_t const error = cudaEventQuery(native(event));
  if (error == cudaSuccess) return true;
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  return check(error, "cudaEventQuery");
}
void free_event(void* event) noexcept { static_cast<void>(cudaEventDestroy(native(event))); }

Expected<void*> host_memory(std::size_t bytes) noexcept {
  cuda::host::OutsideCapture const outside;
  void* memory = nullptr;
  TESSERA_TRY(check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc"));
  return memory;
}
void free_host_memory(void* host) noexcept { static_cast<void>(cudaFreeHost(host)); }

void stand_beside_captures() noexcept {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
}

}  // namespace

StreamCalls const& stream_calls() noexcept {
  static constexpr StreamCalls kCalls = {choose,
                                         pack,
                                         sum,
                                         read,
                                         write,
                                         captures,
                                         make_event,
                                         record,
                                         host_memory,
                                         passed,
                                         free_event,
                                         free_host_memory,
                                         stand_beside_captures};
  return kCalls;
}

}  // namespace tessera::expert_parallel::hosts
