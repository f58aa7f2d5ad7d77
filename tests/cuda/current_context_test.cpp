// SPDX-License-Identifier: Apache-2.0
// Whose context is current during a call and after it, on a driver of eight devices that this file plays. Compiled with
// the CUDA headers of the emulator; there is no cudaSetDevice to call.
#include "cuda/host/current_context.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/host/per_context.hpp"
#include "cuda/layer/device.hpp"

struct CUctx_st {
  CUdevice device = 0;
  unsigned long long id = 0;
};

namespace tessera::cuda {
namespace {

constexpr int kDevices = 8;
constexpr CUresult kNotInitialized = 3, kInvalidDevice = 101, kNoContext = 201;

struct Driver {
  std::mutex mutex;  // of what threads share
  bool started = false;
  CUctx_st primary[kDevices] = {};
  int retained[kDevices] = {};
  std::string failing;                           // a function
  CUresult failure = cudaErrorMemoryAllocation;  // of it: what the allocator would give
  std::string missing;                           // another
  bool is_missing_by_error = false;
};
Driver driver;
thread_local std::vector<CUcontext> stack;  // the last is current
thread_local int times_set = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool is_capturing = false;  // the thread, in the mode
thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUcontext current() { return stack.empty() ? nullptr : stack.back(); }

// The result of a function that fails when the test says so.
CUresult result(char const* function) {
  if (!driver.started) return kNotInitialized;
  return driver.failing == function ? driver.failure : CUDA_SUCCESS;
}

CUresult init(unsigned) {
  std::scoped_lock const lock(driver.mutex);
  driver.started = true;
  return CUDA_SUCCESS;
}
CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < kDevices ? result("cuDeviceGet") : kInvalidDevice;
}
CUresult retain(CUcontext* context, CUdevice device) {
  *context = &driver.primary[device];
  if (CUresult const failed = result("cuDevicePrimaryCtxRetain")) return failed;
  if (is_capturing && mode != CU_STREAM_CAPTURE_MODE_RELAXED)
    return cudaErrorStreamCaptureUnsupported;
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // others come meanwhile
  std::scoped_lock const lock(driver.mutex);
  ++driver.retained[device];
  driver.primary[device].device = device;
  return CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  *context = current();
  return result("cuCtxGetCurrent");
}
CUresult set_current(CUcontext context) {
  if (CUresult const failed = result("cuCtxSetCurrent")) return failed;
  ++times_set;
  if (!stack.empty()) stack.pop_back();
  if (context != nullptr) stack.push_back(context);
  return CUDA_SUCCESS;
}
CUresult get_device(CUdevice* device) {
  if (current() == nullptr) return kNoContext;
  *device = current()->device;
  return result("cuCtxGetDevice");
}
CUresult get_id(CUcontext context, unsigned long long* id) {
  if (context == nullptr) context = current();
  if (context == nullptr) return kNoContext;
  *id = context->id;
  return result("cuCtxGetId");
}

CUresult exchange_mode(CUstreamCaptureMode* other) {
  std::swap(mode, *other);
  return CUDA_SUCCESS;
}

void* function(char const* name) {
  static std::map<std::string, void*> const functions{
      {"cuInit", reinterpret_cast<void*>(init)},
      {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(retain)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(get_current)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(set_current)},
      {"cuCtxGetDevice", reinterpret_cast<void*>(get_device)},
      {"cuCtxGetId", reinterpret_cast<void*>(get_id)},
      {"cuThreadExchangeStreamCaptureMode", reinterpret_cast<void*>(exchange_mode)}};
  auto const found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

class CurrentContextTest : public testing::Test {
 protected:
  void SetUp() override {
    stack.clear();
    driver.failing = driver.missing = "";
    driver.is_missing_by_error = false;
    driver.failure = cudaErrorMemoryAllocation;
    last_error = cudaSuccess;
    is_capturing = false;
    mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  }
  [[nodiscard]] static CUcontext primary(int device) { return &driver.primary[device]; }

  CUctx_st own{.device = 1}, other{.device = 1};  // of a caller
};
using host::ContextChoice;
using host::CurrentContext;

TEST_F(CurrentContextTest, KeepsTheCallersContextOfTheDevice) {
  stack = {&other, &own};
  int const retained = driver.retained[1];
  {
    CurrentContext const scope(1, ContextChoice::any_of_device);
    EXPECT_EQ(scope.error(), cudaSuccess);
    EXPECT_EQ(current(), &own);
  }
  EXPECT_EQ(stack, (std::vector<CUcontext>{&other, &own}));
  EXPECT_EQ(driver.retained[1], retained) << "nobody needed the primary context";
}

TEST_F(CurrentContextTest, SetsNothingWhereNothingChanges) {
  stack = {&other, &own};
  times_set = 0;
  {
    CurrentContext const scope(1, ContextChoice::any_of_device);
  }
  EXPECT_EQ(times_set, 0);
  {
    CurrentContext const scope(1, ContextChoice::any_of_device);
    stack.back() = &other;  // by the body of the scope
  }
  EXPECT_EQ(times_set, 1);
  EXPECT_EQ(current(), &own);
}

TEST_F(CurrentContextTest, PutsThePrimaryContextInItsPlaceWhereAsked) {
  stack = {&other, &own};
  {
    CurrentContext const scope(1, ContextChoice::primary);
    EXPECT_EQ(scope.error(), cudaSuccess);
    EXPECT_EQ(current(), primary(1));
  }
  EXPECT_EQ(stack, (std::vector<CUcontext>{&other, &own}));
}

TEST_F(CurrentContextTest, ReplacesThatOfAnotherDevice) {
  for (ContextChoice const choice : {ContextChoice::any_of_device, ContextChoice::primary}) {
    stack = {&other, &own};
    {
      CurrentContext const scope(2, choice);
      EXPECT_EQ(scope.error(), cudaSuccess);
      EXPECT_EQ(current(), primary(2));
      {
        CurrentContext const within(3, choice);
        EXPECT_EQ(current(), primary(3));
      }
      EXPECT_EQ(current(), primary(2));
    }
    EXPECT_EQ(stack, (std::vector<CUcontext>{&other, &own}));
  }
}

TEST_F(CurrentContextTest, LeavesAThreadWithoutOneWithoutOne) {
  for (ContextChoice const choice : {ContextChoice::any_of_device, ContextChoice::primary}) {
    std::thread([&] {
      {
        CurrentContext const scope(4, choice);
        EXPECT_EQ(scope.error(), cudaSuccess);
        EXPECT_EQ(current(), primary(4));
      }
      EXPECT_TRUE(stack.empty());
    }).join();
  }
  EXPECT_EQ(driver.retained[0], 0) << "device 0 has nothing to do with it";
}

TEST_F(CurrentContextTest, RetainsAPrimaryContextOnce) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) {
        CurrentContext const scope(5, ContextChoice::primary);
        EXPECT_EQ(current(), primary(5));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver.retained[5], 1);
}

TEST_F(CurrentContextTest, ChangesNothingWhereItFails) {
  stack = {&other, &own};
  for (int const device : {-1, kDevices}) {
    CurrentContext const scope(device, ContextChoice::any_of_device);
    EXPECT_EQ(scope.error(), cudaErrorInvalidDevice);
  }
  EXPECT_EQ(current(), &own);
  for (char const* const failing :
       {"cuDeviceGet", "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"}) {
    driver.failing = failing;
    {
      CurrentContext const scope(6, ContextChoice::primary);
      EXPECT_EQ(scope.error(), cudaErrorMemoryAllocation) << failing;
      EXPECT_EQ(current(), &own);
      driver.failing = "";
      stack.back() = &other;  // what is done meanwhile is not undone
    }
    EXPECT_EQ(current(), &other) << failing;
    stack.back() = &own;
  }
  CurrentContext const scope(6, ContextChoice::primary);
  EXPECT_EQ(scope.error(), cudaSuccess) << "an error is not remembered";
  EXPECT_EQ(driver.retained[6], 1) << "nor what comes with one";
}

// As one that was destroyed.
TEST_F(CurrentContextTest, ReplacesAContextThatSaysNothing) {
  stack = {&own};
  driver.failing = "cuCtxGetDevice";
  CurrentContext const scope(1, ContextChoice::any_of_device);
  EXPECT_EQ(scope.error(), cudaSuccess);
  EXPECT_EQ(current(), primary(1));
}

TEST_F(CurrentContextTest, NeedsAllFunctionsOfTheDriver) {
  EXPECT_EQ(host::ContextCalls().error, cudaSuccess);
  for (bool const by_error : {false, true}) {
    driver.is_missing_by_error = by_error;
    for (char const* const missing : {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain",
                                      "cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxGetDevice"}) {
      driver.missing = missing;
      EXPECT_EQ(host::ContextCalls().error, cudaErrorNotSupported) << missing;
    }
  }
}

TEST_F(CurrentContextTest, GuardForgetsAnErrorThatWasNotRead) {
  last_error = cudaErrorInvalidValue;
  DeviceGuard const guard(1, ContextChoice::any_of_device);
  EXPECT_TRUE(guard.status().ok()) << guard.status().text();
  EXPECT_EQ(last_error, cudaSuccess);
  DeviceGuard const none(kDevices, ContextChoice::any_of_device);
  EXPECT_EQ(none.status().code(), StatusCode::device_error);
  EXPECT_EQ(std::string(none.status().text()),
            "current context: CUDA error 101, error 101; name a GPU that the process sees (tessera "
            "info lists "
            "them; CUDA_VISIBLE_DEVICES hides some)");
}

TEST_F(CurrentContextTest, AnErrorThatIsReportedIsNotLeftToTheCaller) {
  last_error = cudaErrorInvalidValue;
  EXPECT_EQ(device_error("gemm", cudaErrorInvalidValue).code(), StatusCode::device_error);
  EXPECT_EQ(last_error, cudaSuccess);
}

// A capture would be given up by what a first call asks the driver for.
TEST_F(CurrentContextTest, AFirstCallMayStandInACapture) {
  is_capturing = true;
  CUcontext context = nullptr;
  EXPECT_EQ(driver.retained[7], 0);
  EXPECT_EQ(host::primary_context(7, context), cudaSuccess);
  EXPECT_EQ(context, primary(7));
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL) << "as it was";
  {
    host::OutsideCapture const outside;
    EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
    {
      host::OutsideCapture const within;
      EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
    }
    EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
  }
  EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

TEST_F(CurrentContextTest, AForkedChildIsToldSo) {
  driver.failing = "cuCtxGetCurrent";
  driver.failure = cudaErrorInitializationError;
  DeviceGuard const guard(1, ContextChoice::any_of_device);
  EXPECT_EQ(std::string(guard.status().text()),
            "current context: CUDA error 3, error 3; CUDA does not work in a process forked from "
            "one that had used "
            "it: start processes by spawn or forkserver, as multiprocessing.set_start_method does, "
            "not by fork");
}

// The remedy fits behind the longest call and words of CUDA.
TEST_F(CurrentContextTest, EveryErrorHasARemedy) {
  for (int error = 1; error < 1000; ++error) {
    std::string const text =
        host::device_error("down_projection_dgrad", static_cast<cudaError_t>(error)).text();
    std::string const begin = "down_projection_dgrad: CUDA error " + std::to_string(error) +
                              ", error " + std::to_string(error) + "; ";
    ASSERT_EQ(text.substr(0, begin.size()), begin);
    EXPECT_GT(text.size(), begin.size() + 20) << text;
    EXPECT_LT(text.size(), Status::kTextBytes - 80U) << text;
  }
  std::pair<cudaError_t, char const*> const parts[] = {
      {cudaErrorMemoryAllocation, "free memory"},
      {cudaErrorStreamCaptureUnsupported, "run the layer once before the capture"},
      {cudaErrorStreamCaptureInvalidated, "run the layer once before the capture"},
      {cudaErrorIllegalAddress, "start it again"},
      {cudaErrorInvalidResourceHandle, "pass a stream of the GPU that holds the tensors"},
      {cudaErrorNoKernelImageForDevice, "TESSERA_CUDA_ARCHS"},
      {static_cast<cudaError_t>(999), "CUDA's documentation"}};
  for (auto const& [error, part] : parts) {
    EXPECT_NE(std::string(host::device_error("op", error).text()).find(part), std::string::npos)
        << error;
  }
}

TEST_F(CurrentContextTest, EachContextHasWhatIsKnownOfIt) {
  driver.started = true;  // by whoever made the contexts
  host::PerContext known;
  EXPECT_EQ(host::current_context_id(), host::kUnknownContext) << "none is current";
  known.set(host::kUnknownContext, 9);
  EXPECT_EQ(known.get(host::kUnknownContext), 0) << "asked again each time";
  known.set((1ull << 48) + 3, 9);
  EXPECT_EQ(known.get(3), 0) << "ids that long are not remembered";
  own.id = 0;
  other.id = 3;
  CUctx_st late{.device = 1, .id = 3 + 64};  // has the slot of `other`
  for (auto const& [context, value] : {std::pair{&own, 66}, {&other, 1}}) {
    stack = {context};
    EXPECT_EQ(known.get(host::current_context_id()), 0);
    known.set(host::current_context_id(), value);
  }
  EXPECT_EQ(known.get(0), 66);
  EXPECT_EQ(known.get(3), 1);
  stack = {&late};
  EXPECT_EQ(known.get(host::current_context_id()), 0);
  known.set(host::current_context_id(), 65535);
  EXPECT_EQ(known.get(3 + 64), 65535);
  EXPECT_EQ(known.get(3), 0) << "forgotten";
  driver.failing = "cuCtxGetId";
  EXPECT_EQ(host::current_context_id(), host::kUnknownContext);
}

}  // namespace
}  // namespace tessera::cuda

cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *entry = tessera::cuda::function(name);
  tessera::cuda::Driver const& driver = tessera::cuda::driver;
  bool const missing = driver.missing == name;
  *found = missing && !driver.is_missing_by_error ? cudaDriverEntryPointNotFound
                                                  : cudaDriverEntryPointSuccess;
  return missing && driver.is_missing_by_error ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(tessera::cuda::last_error, cudaSuccess); }
char const* cudaGetErrorString(cudaError_t error) {
  thread_local std::string text;
  text = "error " + std::to_string(error);
  return text.c_str();
}
