// SPDX-License-Identifier: Apache-2.0
// As much of CUDA's header as emulated kernels and their launchers need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <vector_types.h>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)  // set_compiled_cluster() says it again
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH_FEAT_SM90_ALL
#define __CUDA_ARCH_FEAT_SM100_ALL

// Grids of a stream run one after the other; those of none, side by side.
struct CUstream_st {
  std::uint64_t launched = 0, ended = 0;  // threads
};
using cudaStream_t = CUstream_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorCudartUnloading = 4,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorDevicesUnavailable = 46,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorECCUncorrectable = 214,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchTimeout = 702,
  cudaErrorContextIsDestroyed = 709,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureMerge = 902,
  cudaErrorStreamCaptureUnmatched = 903,
  cudaErrorStreamCaptureUnjoined = 904,
  cudaErrorStreamCaptureIsolation = 905,
  cudaErrorStreamCaptureImplicit = 906,
  cudaErrorCapturedEvent = 907,
  cudaErrorStreamCaptureWrongThread = 908
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointNotFound };
constexpr unsigned long long cudaEnableDefault = 0;

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** entry, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
cudaError_t cudaGetLastError();
#ifdef TESSERA_PLAYED_CUDA  // sm100/layer_cuda.cpp has it: in its place among the launches
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream);
#else  // at once: in front of all launches
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
#endif

// Devices and pinned memory, for what opens a context.
struct cudaDeviceProp {
  char name[256];
  int major, minor, multiProcessorCount;
};
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
cudaError_t cudaFreeHost(void* memory);

char const* cudaGetErrorString(cudaError_t error);

// For what lays a call out on a stream.
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, void const* from,
                              std::size_t from_pitch, std::size_t row_bytes, std::size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream);

// Attributes but that of clusters say what launches here do in any case: all CTAs are resident, grids run side by side,
// until one waits for those ahead.
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeLaunchCompletionEvent
};
using cudaEvent_t = void*;
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
    int cooperative;
    int programmaticStreamSerializationAllowed;
    struct {
      cudaEvent_t event;
      int flags;
    } launchCompletionEvent;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute const* attrs;
  unsigned numAttrs;
};
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*, cudaLaunchConfig_t const*) {
  *clusters = 1;
  return cudaSuccess;
}
