// SPDX-License-Identifier: Apache-2.0
// What the GPU tests share: device memory of exactly the bytes asked for, poisoned, and checked calls.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace tessera::cuda_test {

constexpr unsigned char kPoison = 0xff;  // as bytes of bf16 and fp32: NaN; of int32: -1
constexpr int kSkipped = 77;             // exit status without a GPU

inline void require(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Device memory of exactly the bytes asked for, poisoned.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    require(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "cudaMalloc");
    poison();
  }
  template <class T>
  explicit DeviceBuffer(std::vector<T> const& host) : DeviceBuffer(host.size() * sizeof(T)) {
    require(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceBuffer(DeviceBuffer const&) = delete;
  DeviceBuffer& operator=(DeviceBuffer const&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }

  void poison() { require(cudaMemset(data_, kPoison, bytes_), "cudaMemset"); }
  size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::vector<unsigned char> bytes() const {
    std::vector<unsigned char> host(bytes_);
    require(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
  template <class T>
  std::vector<T> values() const {
    std::vector<T> host(bytes_ / sizeof(T));
    require(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// NaN equals NaN: their bits may differ.
inline bool same_bits(std::vector<float> const& a, std::vector<float> const& b) {
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return false;
  }
  return a.size() == b.size();
}

inline bool has_device() {
  int devices = 0;
  bool const found = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  if (!found) {
    std::printf("skipped: this machine has no GPU that CUDA sees; run on one with a Hopper GPU\n");
  }
  return found;
}

}  // namespace tessera::cuda_test
