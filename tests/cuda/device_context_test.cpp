// SPDX-License-Identifier: Apache-2.0
// How a GPU is opened, and what is said where it cannot be, on a CUDA that this file plays: in a stream capture
// it refuses what CUDA refuses there, unless the thread stands outside of it.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <utility>

#include "cuda/host/driver.hpp"
#include "cuda/layer/backend.hpp"

struct CUctx_st {};

namespace tessera::cuda {
namespace {

struct Cuda {
  bool is_capturing = false, is_invalidated = false;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  int driver_version = 13000, major = 9;
  cudaError_t count_error = cudaSuccess, allocation_error = cudaSuccess;
  int pinned = 0;
};
Cuda cuda;
CUctx_st context_of_device;
CUcontext current = nullptr;

// Of a call that is unsafe in a capture.
cudaError_t unsafe() {
  if (!cuda.is_capturing || cuda.mode == CU_STREAM_CAPTURE_MODE_RELAXED) return cudaSuccess;
  cuda.is_invalidated = true;
  return cudaErrorStreamCaptureUnsupported;
}

CUresult init(unsigned) { return CUDA_SUCCESS; }
CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult retain(CUcontext* context, CUdevice) {
  *context = &context_of_device;
  return unsafe();
}
CUresult get_current(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
CUresult set_current(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult get_device(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}
CUresult exchange_mode(CUstreamCaptureMode* mode) {
  std::swap(cuda.mode, *mode);
  return CUDA_SUCCESS;
}

class DeviceContextTest : public testing::Test {
 protected:
  void SetUp() override { cuda = {}; }
  static std::string refusal(int index = 0) {
    auto const context = DeviceContext::open(index);
    EXPECT_FALSE(context.ok());
    EXPECT_EQ(context.status().code(), StatusCode::environment);
    return context.status().text();
  }
};

TEST_F(DeviceContextTest, OpensWithinACapture) {
  cuda.is_capturing = true;
  {
    auto const context = DeviceContext::open(0);
    ASSERT_TRUE(context.ok()) << context.status().text();
    EXPECT_EQ(context.value()->sm_count(), 132);
    EXPECT_EQ(cuda.mode, CU_STREAM_CAPTURE_MODE_GLOBAL) << "as it was";
    EXPECT_EQ(cuda.pinned, 1);
  }
  EXPECT_EQ(cuda.pinned, 0);
  EXPECT_FALSE(cuda.is_invalidated) << "closing it as well leaves the capture alone";
  EXPECT_EQ(cuda.mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

TEST_F(DeviceContextTest, SaysWhatToDo) {
  EXPECT_EQ(refusal(1), "device cuda:1: this machine has 1; count from 0, or use device cpu");
  cuda.count_error = cudaErrorInitializationError;
  EXPECT_EQ(refusal(),
            "device cuda:0: error 3; CUDA does not work in a process forked from one that had used "
            "it: start processes "
            "by spawn or forkserver, as multiprocessing.set_start_method does, not by fork; or use "
            "device cpu");
  cuda.count_error = cudaErrorNoDevice;
  EXPECT_EQ(refusal(), "device cuda:0: error 100; use device cpu");
  cuda.count_error = cudaErrorInsufficientDriver;
  EXPECT_EQ(refusal(),
            "device cuda:0: error 35; the NVIDIA driver lacks something that this build needs: "
            "update it; or "
            "use device cpu");
  cuda.driver_version = 0;
  EXPECT_EQ(refusal(), "device cuda:0: this machine has no NVIDIA driver; use device cpu");
  cuda.count_error = cudaSuccess;
  cuda.driver_version = 13000;
  cuda.allocation_error = cudaErrorStreamCaptureUnsupported;
  EXPECT_EQ(refusal(),
            "device cuda:0: error 900; a graph is being captured: run the layer once before the "
            "capture, on "
            "the same stream, and capture again; or use device cpu");
}

// What `tessera info` says of the build and of a GPU whose kernels are unproven, and of one that runs.
TEST_F(DeviceContextTest, TellsWhatItHasKernelsFor) {
  constexpr char kBuild[] =
      "bf16, kernels for sm_90a and for sm_100a (compiled and emulated, never run on hardware); ";
  BackendInfo info = backend_info();
  EXPECT_TRUE(info.available);
  EXPECT_EQ(info.detail, std::string(kBuild) + "cuda:0 played, 132 SMs");
  cuda.major = 10;
  info = backend_info();
  EXPECT_FALSE(info.available);
  EXPECT_TRUE(info.detail.starts_with(
      kBuild + std::string("device cuda:0: played has compute capability 10.0")))
      << info.detail;
  EXPECT_NE(refusal().find("--unproven-kernels"), std::string::npos);
  auto const context = DeviceContext::open(0, Unproven::taken);
  ASSERT_TRUE(context.ok()) << context.status().text();
  EXPECT_EQ(context.value()->architecture(), Architecture::sm_100);
}

}  // namespace
}  // namespace tessera::cuda

using tessera::cuda::cuda;

cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  namespace fake = tessera::cuda;
  std::pair<char const*, void*> const functions[] = {
      {"cuInit", reinterpret_cast<void*>(fake::init)},
      {"cuDeviceGet", reinterpret_cast<void*>(fake::device_get)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(fake::retain)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(fake::get_current)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(fake::set_current)},
      {"cuCtxGetDevice", reinterpret_cast<void*>(fake::get_device)},
      {"cuThreadExchangeStreamCaptureMode", reinterpret_cast<void*>(fake::exchange_mode)}};
  *found = cudaDriverEntryPointNotFound;
  for (auto const& [known, function] : functions) {
    if (std::string(known) != name) continue;
    *entry = function;
    *found = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t error) {
  static std::string text;
  text = "error " + std::to_string(error);
  return text.c_str();
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = cuda.driver_version;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cuda.count_error;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "played");
  properties->major = cuda.major;
  properties->multiProcessorCount = 132;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  if (cudaError_t const error = tessera::cuda::unsafe(); error != cudaSuccess) return error;
  if (cuda.allocation_error != cudaSuccess) return cuda.allocation_error;
  ++cuda.pinned;
  *memory = ::operator new(bytes);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  --cuda.pinned;
  ::operator delete(memory);
  return tessera::cuda::unsafe();
}
