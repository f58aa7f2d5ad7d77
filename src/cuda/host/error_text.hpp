// SPDX-License-Identifier: Apache-2.0
// The text of a CUDA call that failed: the call, the number and the words that CUDA has for it, and a remedy.
#pragma once

#include <cuda_runtime_api.h>

#include "tessera/status.hpp"

namespace tessera::cuda::host {

/// Null: none that is better than the words.
inline char const* remedy(cudaError_t error) noexcept {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "free memory of the GPU, or make the call smaller";
    case cudaErrorInitializationError:
      return "CUDA does not work in a process forked from one that had used it: start processes by "
             "spawn or forkserver, as multiprocessing.set_start_method does, not by fork";
    case cudaErrorCudartUnloading:
      return "the process is ending: make the call before static objects are destroyed";
    case cudaErrorInsufficientDriver:
    case cudaErrorNotSupported:
      return "the NVIDIA driver lacks something that this build needs: update it";
    case cudaErrorDevicesUnavailable:
      return "another process has the GPU for itself: end it, or name another GPU";
    case cudaErrorInvalidDevice:
      return "name a GPU that the process sees (tessera info lists them; CUDA_VISIBLE_DEVICES "
             "hides "
             "some)";
    case cudaErrorNoKernelImageForDevice:
      return "this build has no kernels for this GPU: tessera info names those that it has kernels "
             "for (CMake: TESSERA_CUDA_ARCHS)";
    case cudaErrorInvalidResourceHandle:
    case cudaErrorDeviceUninitialized:
    case cudaErrorContextIsDestroyed:
      return "the stream or the CUDA context was destroyed or is another GPU's: pass a stream of "
             "the "
             "GPU that holds the tensors";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorCapturedEvent:
    case cudaErrorStreamCaptureWrongThread:
      return "a graph is being captured: run the layer once before the capture, on the same "
             "stream, "
             "and capture again";
    case cudaErrorLaunchOutOfResources:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidValue:
      return "a launch was refused: the caller's context may limit SMs or shared memory; otherwise "
             "report the shape of the call";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
      return "a kernel that ran before, of this library or another, failed, and CUDA serves this "
             "process no more: start it again; compute-sanitizer names the kernel";
    case cudaErrorECCUncorrectable:
      return "the GPU's memory is broken: start again on another GPU";
    default:
      return nullptr;
  }
}

/// A device_error; leaves nothing behind for the caller's own calls.
inline Status device_error(char const* what, cudaError_t error) noexcept {
  cudaGetLastError();
  char const* const known = remedy(error);
  return Status::error(StatusCode::device_error, "%s: CUDA error %d, %s; %s", what,
                       static_cast<int>(error), cudaGetErrorString(error),
                       known != nullptr ? known
                                        : "look the number up in CUDA's documentation of "
                                          "cudaError_t, and start the process again if it stays");
}

/// Returns the Status of a call of CUDA's, whose name stands in the text.
inline Status check(cudaError_t error, char const* call) noexcept {
  return error == cudaSuccess ? Status() : device_error(call, error);
}

}  // namespace tessera::cuda::host
