// SPDX-License-Identifier: Apache-2.0
// CUDA contexts of the caller: what was current stays current, work is done there, with the same bits, and devices that
// nobody chose get no context. A process of its own: whatever runs in it makes the contexts of its devices.
#include <optional>
#include <thread>

#include "cuda/host/driver.hpp"
#include "layer.cuh"

namespace tessera::cuda_test {
namespace {

void require_driver(CUresult result, char const* what) {
  require(static_cast<cudaError_t>(result), what);  // the same numbers
}

#define DRIVER(name, version) cuda::host::driver_function<PFN_##name##_v##version>(#name, version)

CUcontext current() {
  CUcontext context = nullptr;
  require_driver(DRIVER(cuCtxGetCurrent, 4000)(&context), "current context");
  return context;
}

void set_current(CUcontext context) {
  require_driver(DRIVER(cuCtxSetCurrent, 4000)(context), "current context");
}

bool has_primary_context(int device) {
  unsigned flags = 0;
  int active = 0;
  require_driver(DRIVER(cuDevicePrimaryCtxGetState, 7000)(device, &flags, &active), "context");
  return active != 0;
}

// Of cuCtxCreate, on top of what is current.
class OwnContext {
 public:
  explicit OwnContext(int device) {
    require_driver(DRIVER(cuCtxCreate, 3020)(&native_, 0, device), "cuCtxCreate");
  }
  ~OwnContext() { require_driver(DRIVER(cuCtxDestroy, 4000)(native_), "cuCtxDestroy"); }
  OwnContext(OwnContext const&) = delete;
  OwnContext& operator=(OwnContext const&) = delete;

  CUcontext native() const { return native_; }

 private:
  CUcontext native_ = nullptr;
};

// On an eighth of the SMs, rounded up to what the device can part with.
class GreenContext {
 public:
  explicit GreenContext(int device) {
    CUdevResource all{}, part{};
    CUdevResourceDesc desc = nullptr;
    unsigned parts = 1;
    require_driver(DRIVER(cuDeviceGetDevResource, 12040)(device, &all, CU_DEV_RESOURCE_TYPE_SM),
                   "SMs of the device");
    require_driver(DRIVER(cuDevSmResourceSplitByCount, 12040)(&part, &parts, &all, nullptr, 0,
                                                              all.sm.smCount / 8),
                   "SMs of a part");
    require_driver(DRIVER(cuDevResourceGenerateDesc, 12040)(&desc, &part, 1), "SMs of a part");
    require_driver(
        DRIVER(cuGreenCtxCreate, 12040)(&green_, desc, device, CU_GREEN_CTX_DEFAULT_STREAM),
        "green context");
    require_driver(DRIVER(cuCtxFromGreenCtx, 12040)(&native_, green_), "green context");
  }
  ~GreenContext() { require_driver(DRIVER(cuGreenCtxDestroy, 12040)(green_), "green context"); }
  GreenContext(GreenContext const&) = delete;
  GreenContext& operator=(GreenContext const&) = delete;

  // False before CUDA 12.4.
  static bool known() { return DRIVER(cuGreenCtxCreate, 12040) != nullptr; }
  CUcontext native() const { return native_; }

 private:
  CUgreenCtx green_ = nullptr;
  CUcontext native_ = nullptr;
};

// GEMMs, the router and metadata; the second has tiles for every SM.
std::vector<MoeDesc> descs() {
  std::vector<MoeDesc> all(2, small_desc(RouterKind::topk_softmax));
  all[1].shape = {.tokens = 1500, .hidden = 384, .intermediate = 192, .experts = 24, .top_k = 3};
  return all;
}

// Bytes of all results, of layers whose memory is in the current context; on the default stream and on another.
Bytes results(Context const& context) {
  CUcontext const before = current();
  cudaStream_t stream;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  Bytes all;
  for (MoeDesc const& desc : descs()) {
    for (cudaStream_t const on : {cudaStream_t{nullptr}, stream}) {
      Layer const layer(context, desc);
      require(cudaDeviceSynchronize(), "device");  // poisoned
      EXPECT_OK(layer.step(on));
      EXPECT(current() == before);
      synchronize(on);
      Bytes const own = layer.everything();
      all.insert(all.end(), own.begin(), own.end());
    }
  }
  cudaStreamDestroy(stream);
  EXPECT(current() == before);
  return all;
}

void chooses_one_device(Context const& context, int device, int devices) {
  auto const expect_others_untouched = [&](int line) {
    for (int other = 0; other < devices; ++other) {
      expect(has_primary_context(other) == (other == device), "contexts of its device alone", line);
    }
  };
  EXPECT(current() == nullptr);
  expect_others_untouched(__LINE__);
  require(cudaSetDevice(device), "device");  // of this thread, and of no other
  Layer const layer(context, small_desc(RouterKind::topk_softmax));
  EXPECT_OK(layer.forward(nullptr));
  EXPECT_OK(layer.backward(nullptr));
  require(cudaDeviceSynchronize(), "device");
  Bytes const expected = layer.everything();
  layer.poison(nullptr);
  require(cudaDeviceSynchronize(), "device");
  std::thread([&] {
    EXPECT_OK(layer.forward(nullptr));
    EXPECT_OK(layer.backward(nullptr));
    EXPECT(current() == nullptr);
  }).join();
  require(cudaDeviceSynchronize(), "device");
  EXPECT(layer.everything() == expected);
  expect_others_untouched(__LINE__);
}

// The second context may have the address of the first: what was known of that is not taken for its own.
void works_in_contexts_of_the_caller(Context const& context, int device, Bytes const& expected) {
  for (int i = 0; i < 2; ++i) {
    OwnContext const own(device);
    EXPECT(results(context) == expected);
    EXPECT(current() == own.native());
  }
}

void outlives_the_context_that_it_was_made_in(int device, Bytes const& expected) {
  std::optional<Context> made;
  {
    OwnContext const own(device);
    auto context = Context::create({{DeviceKind::cuda, device}});
    EXPECT_OK(context.status());
    EXPECT(current() == own.native());
    if (!context.ok()) return;
    made.emplace(std::move(context).value());
    EXPECT(results(*made) == expected);
  }
  EXPECT(results(*made) == expected);
  EXPECT_OK(check_device_values(*made));
}

void works_in_a_green_context(Context const& context, int device, Bytes const& expected) {
  if (!GreenContext::known()) {
    std::printf("no green contexts with this driver\n");
    return;
  }
  CUcontext const before = current();
  GreenContext const green(device);
  set_current(green.native());
  EXPECT(results(context) == expected);
  set_current(before);
}

int run() {
  if (!has_device()) return kSkipped;
  int devices = 0;
  require(cudaGetDeviceCount(&devices), "devices");
  int const device = devices - 1;  // where there are several, not the one that a thread begins with
  auto const made = Context::create({{DeviceKind::cuda, device}});
  if (!made.ok()) {
    bool const lacks = made.status().code() == StatusCode::environment;
    std::printf("%s%s\n", lacks ? "skipped: " : "",
                made.status().text());  // the text has the remedy
    return lacks ? kSkipped : 1;
  }
  Context const& context = made.value();
  int before = 0;
  auto const report = [&](char const* name) {
    std::printf("%-14s %s\n", name, failures == before ? "ok" : "FAILED");
    before = failures;
  };
  chooses_one_device(context, device, devices);
  if (devices == 1) std::printf("one device: none to leave alone\n");
  report("one device");
  Bytes const expected = results(context);
  report("primary");
  works_in_contexts_of_the_caller(context, device, expected);
  report("own contexts");
  outlives_the_context_that_it_was_made_in(device, expected);
  report("made in one");
  works_in_a_green_context(context, device, expected);
  report("green context");
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() { return tessera::cuda_test::run(); }
