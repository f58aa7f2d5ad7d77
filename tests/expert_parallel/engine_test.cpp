// SPDX-License-Identifier: Apache-2.0
// The engine on a fake NCCL and a fake device, and windows of one process on fake devices: what they hand to kernels,
// what they refuse and why, and that nothing is left behind.
#include "expert_parallel/transport/engine.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "expert_parallel/transport/process_windows.hpp"
#include "tests/expert_parallel/fake_nccl.hpp"

namespace tessera::expert_parallel {
namespace {

// Contexts by their addresses: the primary one of each device, and one of the caller's on device 1.
int primary[4], own;

struct FakeDevice {
  void* current = nullptr;
  void const* host_handle = nullptr;                // not device memory
  bool busy = false;                                // with a kernel
  Status synchronized = {};                         // what waiting for it returns
  int allocations_left = 100;                       // after these there is no memory
  bool reaches = true;                              // others
  std::map<void*, void*> memory = {};               // its context
  std::vector<std::pair<void*, int>> reached = {};  // context, device
  std::vector<void*> waited_in = {};                // contexts
};
FakeDevice device;

DeviceCalls fake_calls() {
  return {[](std::int32_t index, ContextChoice choice) noexcept -> Expected<void*> {
            if (index < 0 || index >= 4) {
              return Status::error(StatusCode::environment, "device cuda:%d: none", index);
            }
            void* const before = device.current;
            bool const kept =
                choice == ContextChoice::any_of_device && index == 1 && before == &own;
            if (!kept) device.current = &primary[index];
            return before;
          },
          [](void* context) noexcept { device.current = context; },
          [](void* memory, std::size_t bytes) noexcept {
            std::memset(memory, 0, bytes);
            return Status();
          },
          []() noexcept {
            device.busy = false;
            device.waited_in.push_back(device.current);
            return device.synchronized;
          },
          [](void* host, void const* memory, std::size_t bytes) noexcept {
            std::memcpy(host, memory, bytes);
            return Status();
          },
          [](void const* pointer) noexcept {
            return pointer != nullptr && pointer != device.host_handle;
          },
          [](std::size_t bytes) noexcept -> Expected<void*> {
            if (device.allocations_left == 0)
              return Status::error(StatusCode::out_of_memory, "no memory");
            --device.allocations_left;
            void* const memory = std::malloc(bytes);
            std::memset(memory, 0xff, bytes);
            device.memory[memory] = device.current;
            return memory;
          },
          [](void* memory) noexcept {
            EXPECT_EQ(device.memory[memory], device.current);
            device.memory.erase(memory);
            std::free(memory);
          },
          [](std::int32_t, std::int32_t peer) noexcept {
            if (!device.reaches) return Status::error(StatusCode::environment, "no peer access");
            device.reached.emplace_back(device.current, peer);
            return Status();
          }};
}

void expect_refusal(Status const& status, StatusCode code, std::string const& part) {
  EXPECT_EQ(status.code(), code) << status.text();
  EXPECT_NE(std::string(status.text()).find(part), std::string::npos) << status.text();
}

class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    void* const library = dlopen(FAKE_NCCL_PATH, RTLD_NOW);
    ASSERT_NE(library, nullptr) << dlerror();
    fake = reinterpret_cast<FakeNccl* (*)()>(dlsym(library, "fake_nccl"))();
    *fake = {};
    device = {.current = &primary[3], .host_handle = fake};
    fake->current = &device.current;
    fake->wanted = &primary[1];
  }
  void TearDown() override {
    EXPECT_EQ(fake->communicators, 0);
    EXPECT_EQ(fake->windows, 0);
    EXPECT_EQ(fake->buffers, 0);
    EXPECT_FALSE(fake->called_elsewhere) << "NCCL works in the primary context";
    EXPECT_EQ(device.current, before) << "the thread's context is as before";
  }
  [[nodiscard]] static EngineConfig config(std::int32_t rank = 1) {
    EngineConfig c{.rank = rank,
                   .ranks = 2,
                   .device = 1,
                   .nccl_path = FAKE_NCCL_PATH,
                   .nccl_nvls_enable = "0"};
    auto id = make_unique_id(c);
    EXPECT_TRUE(id.ok()) << id.status().text();
    if (id.ok()) c.id = id.value();
    return c;
  }
  // Status of opening an engine, or of its first window.
  [[nodiscard]] static Status try_window(EngineConfig const& c) {
    auto engine = Engine::open(c, calls);
    if (!engine.ok()) return engine.status();
    auto window = engine.value()->allocate(100);
    if (!window.ok()) return window.status();
    return engine.value()->release(window.value());
  }

  static inline DeviceCalls const calls = fake_calls();
  FakeNccl* fake = nullptr;
  void* before = &primary[3];  // what was current
};

TEST_F(EngineTest, GivesAddressesOfAllRanks) {
  // 2.28 has them in a struct on the device, 2.29 returns them from a call.
  for (int const version : {22803, 22809, 22902, 23004}) {
    fake->version = version;
    fake->lsa_ranks = 2;
    auto engine = Engine::open(config(), calls);
    ASSERT_TRUE(engine.ok()) << engine.status().text();
    auto window = engine.value()->allocate(5000);
    ASSERT_TRUE(window.ok()) << window.status().text();
    Window const& w = window.value();
    EXPECT_EQ(w.bytes, 8192u);
    EXPECT_EQ(reinterpret_cast<std::uint64_t>(w.address[0]), kFakeFlatBase);
    EXPECT_EQ(static_cast<char const*>(w.address[1])[8191], 0) << "its own part, cleared";
    EXPECT_EQ(fake->window_flags, 0) << "no flag that wants multicast";
    EXPECT_TRUE(engine.value()->release(w).ok());
    EXPECT_TRUE(engine.value()->close().ok());
    EXPECT_TRUE(engine.value()->close().ok()) << "closed already";
    expect_refusal(engine.value()->allocate(1).status(), StatusCode::invalid_argument, "closed");
  }
}

TEST_F(EngineTest, PeersFollowEachOtherByTheStride) {
  fake->lsa_ranks = 4;
  EngineConfig c = config(0);
  c.ranks = 4;
  auto engine = Engine::open(c, calls);
  ASSERT_TRUE(engine.ok());
  auto window = engine.value()->allocate(1);
  ASSERT_TRUE(window.ok()) << window.status().text();
  for (std::size_t peer = 1; peer < 4; ++peer) {
    EXPECT_EQ(reinterpret_cast<std::uint64_t>(window.value().address[peer]),
              kFakeFlatBase + (std::uint64_t{peer} * kFakeStride4g << 32));
  }
  EXPECT_TRUE(engine.value()->release(window.value()).ok());
}

// As after a fault: nobody waits for the others, TearDown finds nothing left.
TEST_F(EngineTest, LeavesNoMemoryBehind) {
  auto engine = Engine::open(config(), calls);
  ASSERT_TRUE(engine.ok());
  auto released = engine.value()->allocate(100);
  ASSERT_TRUE(released.ok());
  for (int i = 1; i < Engine::kMaxWindows; ++i) ASSERT_TRUE(engine.value()->allocate(100).ok());
  expect_refusal(engine.value()->allocate(100).status(), StatusCode::unsupported, "at most 8");
  EXPECT_TRUE(engine.value()->release(released.value()).ok());
}

TEST_F(EngineTest, ReleasesNothingUnderAKernel) {
  auto engine = Engine::open(config(), calls);
  ASSERT_TRUE(engine.ok());
  auto window = engine.value()->allocate(100);
  ASSERT_TRUE(window.ok());
  fake->busy = &device.busy;
  device.busy = true;
  device.synchronized = Status::error(StatusCode::device_error, "a kernel failed");
  expect_refusal(engine.value()->release(window.value()), StatusCode::device_error, "a kernel");
  EXPECT_EQ(fake->windows, 1) << "left to the destructor";
  device.busy = true;
  device.synchronized = {};
  EXPECT_TRUE(engine.value()->release(window.value()).ok());
  EXPECT_EQ(fake->windows, 0);
  EXPECT_FALSE(fake->taken_from_kernel);
}

// Whoever leaves by a return or an exception may have a pass on the GPU.
TEST_F(EngineTest, IsNotDestroyedUnderAKernel) {
  fake->busy = &device.busy;
  for (Status const& waited : {Status(), Status::error(StatusCode::device_error, "it failed")}) {
    auto engine = Engine::open(config(), calls);
    ASSERT_TRUE(engine.ok());
    ASSERT_TRUE(engine.value()->allocate(100).ok());
    device.synchronized = waited;
    device.busy = true;
    device.waited_in.clear();
    before = device.current = &own;
    engine.value().reset();
    EXPECT_FALSE(fake->taken_from_kernel);
    EXPECT_EQ(device.waited_in, (std::vector<void*>{&own, &primary[1]}));
    EXPECT_EQ(fake->buffers, 0);
  }
}

// Passes run in the caller's context, where there is one of the device.
TEST_F(EngineTest, WaitsForKernelsOfTheCallersContextToo) {
  for (void* const context : {static_cast<void*>(&own), static_cast<void*>(nullptr)}) {
    before = device.current = context;
    auto engine = Engine::open(config(), calls);
    ASSERT_TRUE(engine.ok());
    auto window = engine.value()->allocate(100);
    ASSERT_TRUE(window.ok());
    EXPECT_EQ(device.current, context);
    device.waited_in.clear();
    EXPECT_TRUE(engine.value()->release(window.value()).ok());
    EXPECT_EQ(device.waited_in.front(), context == nullptr ? &primary[1] : context);
    EXPECT_EQ(device.waited_in.back(), &primary[1]);
    EXPECT_TRUE(engine.value()->close().ok());
    EXPECT_EQ(device.current, context);
  }
}

TEST_F(EngineTest, RefusesUnlessMulticastIsOff) {
  for (char const* value : {static_cast<char const*>(nullptr), "", "1", "2", "00"}) {
    EngineConfig c = config();
    c.nccl_nvls_enable = value;
    expect_refusal(try_window(c), StatusCode::environment, "set it to 0");
    expect_refusal(make_unique_id(c).status(), StatusCode::environment, "set it to 0");
  }
}

TEST_F(EngineTest, RefusesWhatIsMissing) {
  EngineConfig const good = config();
  EngineConfig c = good;
  c.nccl_path = "/nowhere/libnccl.so.2";
  expect_refusal(try_window(c), StatusCode::environment, "install NCCL 2.28");
  c.nccl_path = FAKE_NCCL_WITHOUT_WINDOWS_PATH;
  expect_refusal(try_window(c), StatusCode::environment, "has no ncclCommWindowRegister");
  for (int const version : {0, 2708, 22706, 30000}) {
    fake->version = version;
    expect_refusal(try_window(good), StatusCode::environment, std::to_string(version));
  }
  fake->version = 22809;
  c = good;
  c.device = 4;
  expect_refusal(try_window(c), StatusCode::environment, "cuda:4");
  fake->lsa_ranks = 1;
  expect_refusal(try_window(good), StatusCode::environment, "only 1 of 2 ranks");
  fake->lsa_ranks = 2;
  fake->no_symmetric_windows = true;
  expect_refusal(try_window(good), StatusCode::environment, "check peer access");
}

TEST_F(EngineTest, RefusesAWindowStructThatItDoesNotKnow) {
  auto engine = Engine::open(config(), calls);
  ASSERT_TRUE(engine.ok());
  fake->rank = 0;  // what the struct says is not this rank
  expect_refusal(engine.value()->allocate(1).status(), StatusCode::environment, "2.29");
}

TEST_F(EngineTest, ReportsCallsThatFail) {
  for (char const* call : {"ncclCommInitRank", "ncclMemAlloc", "ncclCommWindowRegister"}) {
    fake->failing = call;
    expect_refusal(try_window(config()), StatusCode::device_error, call);
  }
  fake->failing = "ncclGetLsaDevicePointer";
  fake->version = 22902;
  expect_refusal(try_window(config()), StatusCode::device_error, "ncclGetLsaDevicePointer");
  fake->failing = "ncclGetUniqueId";
  expect_refusal(make_unique_id({.nccl_path = FAKE_NCCL_PATH, .nccl_nvls_enable = "0"}).status(),
                 StatusCode::device_error, "ncclGetUniqueId: unhandled fake error");
}

TEST_F(EngineTest, RefusesBadRanks) {
  for (auto const& [rank, ranks] : {std::pair{0, 0}, {0, 9}, {2, 2}, {-1, 2}}) {
    EngineConfig c = config();
    c.rank = rank;
    c.ranks = ranks;
    expect_refusal(try_window(c), StatusCode::invalid_argument, "rank");
  }
}

TEST_F(EngineTest, AdoptsWindowsOfTheCaller) {
  alignas(128) static char memory[2][256];
  void* const addresses[] = {memory[0], memory[1]};
  auto window = adopt_window(addresses, 256, calls);
  ASSERT_TRUE(window.ok()) << window.status().text();
  EXPECT_EQ(window.value().address[1], memory[1]);
  EXPECT_EQ(window.value().nccl, nullptr);
  void* const crooked[] = {memory[0], memory[1] + 8};
  expect_refusal(adopt_window(crooked, 256, calls).status(), StatusCode::invalid_argument,
                 "addresses[1]");
  void* const missing[] = {memory[0], nullptr};
  expect_refusal(adopt_window(missing, 256, calls).status(), StatusCode::invalid_argument,
                 "addresses[1]");
  expect_refusal(adopt_window({}, 256, calls).status(), StatusCode::invalid_argument, "ranks=0");
}

TEST(Engine, SaysThatABuildOrMachineHasNoGpus) {
  auto const engine = Engine::open(
      {.rank = 0, .ranks = 2, .device = 99, .nccl_path = FAKE_NCCL_PATH, .nccl_nvls_enable = "0"});
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.status().code(), StatusCode::environment) << engine.status().text();
}

class ProcessWindowsTest : public testing::Test {
 protected:
  void SetUp() override { device = {.current = &primary[3]}; }
  void TearDown() override {
    EXPECT_TRUE(device.memory.empty()) << "memory is left behind";
    EXPECT_EQ(device.current, &primary[3]) << "the thread's context is as before";
  }
  static inline DeviceCalls const calls = fake_calls();
};

TEST_F(ProcessWindowsTest, AreZerosOfEveryGpuThatAllOthersReach) {
  ProcessWindows windows(calls);
  std::int32_t const devices[] = {2, 0, 1};
  Status const status = windows.open(devices, 1000);
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(windows.window().bytes, 1000u);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    void* const memory = windows.window().address[rank];
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(device.memory[memory], &primary[devices[rank]]);
    auto const* const bytes = static_cast<unsigned char const*>(memory);
    EXPECT_EQ(std::count(bytes, bytes + 1000, 0), 1000);
  }
  EXPECT_EQ(windows.window().address[3], nullptr);
  std::vector<std::pair<void*, int>> const all = {{&primary[2], 0}, {&primary[2], 1},
                                                  {&primary[0], 2}, {&primary[0], 1},
                                                  {&primary[1], 2}, {&primary[1], 0}};
  EXPECT_EQ(device.reached, all);
}

TEST_F(ProcessWindowsTest, AreFreedBehindTheWorkOfAllTheirGpus) {
  device.current = &own;  // of device 1, where the caller's streams are
  {
    ProcessWindows windows(calls);
    ASSERT_TRUE(windows.open(std::vector<std::int32_t>{0, 1}, 8).ok());
    EXPECT_TRUE(windows.wait(1).ok());
    EXPECT_EQ(device.waited_in, (std::vector<void*>{&own, &primary[1]}));
    device.waited_in.clear();
    device.synchronized = Status::error(StatusCode::device_error, "a kernel has failed");
    EXPECT_EQ(windows.wait(0).code(), StatusCode::device_error);
    device.waited_in.clear();
    EXPECT_EQ(device.memory.size(), 2u);
  }
  EXPECT_EQ(device.waited_in, (std::vector<void*>{&primary[0], &primary[0], &own, &primary[1]}));
  EXPECT_EQ(device.current, &own);
  device.current = &primary[3];
}

TEST_F(ProcessWindowsTest, RefusalsLeaveNothingBehind) {
  auto const refused = [](std::vector<std::int32_t> const& devices, std::size_t bytes,
                          StatusCode code, std::string const& text) {
    ProcessWindows windows(calls);
    expect_refusal(windows.open(devices, bytes), code, text);
  };
  refused({}, 8, StatusCode::invalid_argument, "ranks=0: 1 to 8");
  refused({0, 1, 2, 3, 4, 5, 6, 7, 8}, 8, StatusCode::invalid_argument, "ranks=9: 1 to 8");
  refused({0, 1}, 0, StatusCode::invalid_argument, "bytes=0");
  refused({2, 1, 2}, 8, StatusCode::invalid_argument, "ranks 0 and 2 are both on cuda:2");
  refused({0, 7}, 8, StatusCode::environment, "device cuda:7");
  device.allocations_left = 1;
  refused({0, 1}, 8, StatusCode::out_of_memory, "no memory");
  device.reaches = false;
  refused({0, 1}, 8, StatusCode::environment, "no peer access");
}

}  // namespace
}  // namespace tessera::expert_parallel
