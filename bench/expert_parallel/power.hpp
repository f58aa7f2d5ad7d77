// SPDX-License-Identifier: Apache-2.0
// What a GPU takes while it runs, by the driver's management library: watts, and how busy DRAM and links are.
#pragma once

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>

namespace tessera::bench {

// The library's interface as far as it is needed here; its header is not required to be installed. One call at a time:
// two threads that sample two GPUs at once get nonsense, or a fault.
class Nvml {
 public:
  using Device = void*;
  using Sample = void*;
  // Metrics between two samples.
  enum Metric : unsigned { kTensorPercent = 5, kDramPercent = 10, kLinkReceived = 60, kLinkSent };

  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW)) {
    if (library_ == nullptr) return;
    load("nvmlDeviceGetHandleByPciBusId_v2", handle_);
    load("nvmlDeviceGetTotalEnergyConsumption", energy_);
    load("nvmlGpmSampleAlloc", allocate_);
    load("nvmlGpmSampleFree", free_);
    load("nvmlGpmSampleGet", sample_);
    load("nvmlGpmMetricsGet", metrics_);
    int (*init)() = nullptr;
    load("nvmlInit_v2", init);
    ready_ = init != nullptr && handle_ != nullptr && energy_ != nullptr && init() == 0;
  }

  // Null: not known.
  [[nodiscard]] Device device(char const* pci_bus_id) const {
    std::lock_guard const alone(mutex_);
    Device device = nullptr;
    return ready_ && handle_(pci_bus_id, &device) == 0 ? device : nullptr;
  }
  // Since the driver was loaded. 0: not known.
  [[nodiscard]] unsigned long long millijoules(Device device) const {
    std::lock_guard const alone(mutex_);
    unsigned long long value = 0;
    return device != nullptr && energy_(device, &value) == 0 ? value : 0;
  }
  // Null: not known.
  [[nodiscard]] Sample sample(Device device) const {
    std::lock_guard const alone(mutex_);
    Sample sample = nullptr;
    if (device == nullptr || allocate_ == nullptr || sample_ == nullptr || metrics_ == nullptr ||
        allocate_(&sample) != 0) {
      return nullptr;
    }
    if (sample_(device, sample) == 0) return sample;
    free_(sample);
    return nullptr;
  }
  void release(Sample sample) const {
    std::lock_guard const alone(mutex_);
    if (sample != nullptr) free_(sample);
  }
  // Of the time between two samples; what is not known stays negative.
  template <std::size_t kCount>
  [[nodiscard]] std::array<double, kCount> between(Sample begin, Sample end,
                                                   std::array<Metric, kCount> const& wanted) const {
    std::lock_guard const alone(mutex_);
    std::array<double, kCount> values;
    values.fill(-1);
    if (begin == nullptr || end == nullptr) return values;
    auto const request = std::make_unique<Request>();
    request->version = 1;
    request->count = kCount;
    request->begin = begin;
    request->end = end;
    for (std::size_t i = 0; i < kCount; ++i) request->metric[i].id = wanted[i];
    if (metrics_(request.get()) != 0) return values;
    for (std::size_t i = 0; i < kCount; ++i) {
      if (request->metric[i].result == 0) values[i] = request->metric[i].value;
    }
    return values;
  }

 private:
  struct Request {
    unsigned version, count;
    Sample begin, end;
    struct {
      unsigned id;
      int result;
      double value;
      char *short_name, *long_name, *unit;
    } metric[512];  // as many as any version has
  };

  template <typename Function>
  void load(char const* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
  }

  mutable std::mutex mutex_;
  void* library_;
  bool ready_ = false;
  int (*handle_)(char const*, Device*) = nullptr;
  int (*energy_)(Device, unsigned long long*) = nullptr;
  int (*allocate_)(Sample*) = nullptr;
  int (*free_)(Sample) = nullptr;
  int (*sample_)(Device, Sample) = nullptr;
  int (*metrics_)(Request*) = nullptr;
};

// What a GPU took between start() and stop(), at least a second apart. The driver's counter of energy grows in steps;
// power is taken from the first to the last of them.
class PowerMeter {
 public:
  struct Reading {
    double watts = 0;  // 0: not known
    // Negative: not known. Percent of the most; MB/s of all links.
    double tensor = -1, dram = -1, received = -1, sent = -1;
  };

  PowerMeter(Nvml const& nvml, char const* pci_bus_id)
      : nvml_(nvml), device_(nvml.device(pci_bus_id)) {}

  void start() {
    first_ = last_ = {};
    ends_ = false;
    sample_ = nvml_.sample(device_);
    watcher_ = std::thread([this] { watch(); });
  }
  Reading stop() {
    ends_ = true;
    watcher_.join();
    Nvml::Sample const end = nvml_.sample(device_);
    std::array<Nvml::Metric, 4> const wanted = {Nvml::kTensorPercent, Nvml::kDramPercent,
                                                Nvml::kLinkReceived, Nvml::kLinkSent};
    auto const values = nvml_.between(sample_, end, wanted);
    nvml_.release(sample_);
    nvml_.release(end);
    double const seconds = std::chrono::duration<double>(last_.at - first_.at).count();
    double const joules = 1e-3 * double(last_.millijoules - first_.millijoules);
    return {seconds > 0 ? joules / seconds : 0, values[0], values[1], values[2], values[3]};
  }

 private:
  struct Step {
    std::chrono::steady_clock::time_point at;
    unsigned long long millijoules = 0;
  };

  void watch() {
    unsigned long long seen = nvml_.millijoules(device_);
    while (!ends_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      unsigned long long const now = nvml_.millijoules(device_);
      if (now == seen) continue;
      seen = now;
      last_ = {std::chrono::steady_clock::now(), now};
      if (first_.millijoules == 0) first_ = last_;
    }
  }

  Nvml const& nvml_;
  Nvml::Device device_;
  Nvml::Sample sample_ = nullptr;
  std::thread watcher_;
  std::atomic<bool> ends_ = false;
  Step first_, last_;
};

}  // namespace tessera::bench
