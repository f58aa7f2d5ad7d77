// SPDX-License-Identifier: Apache-2.0
// The examples need this besides the library: errors as exceptions, memory of a GPU, random bf16, a place to meet.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <barrier>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <tessera/status.hpp>
#include <utility>
#include <vector>

namespace examples {

inline void require(tessera::Status const& status) {
  if (!status.ok()) throw std::runtime_error(status.text());
}
inline void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
template <class T>
T value_of(tessera::Expected<T> expected) {
  require(expected.status());
  return std::move(expected).value();
}

/// Memory of the current GPU.
using Memory = std::shared_ptr<void>;
inline Memory allocate(std::size_t bytes) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, bytes));
  return {memory, cudaFree};
}
template <class T>
Memory upload(std::vector<T> const& values) {
  Memory memory = allocate(sizeof(T) * values.size());
  require(cudaMemcpy(memory.get(), values.data(), sizeof(T) * values.size(), cudaMemcpyDefault));
  return memory;
}
template <class T>
void download(std::vector<T>& values, Memory const& memory) {
  require(cudaMemcpy(values.data(), memory.get(), sizeof(T) * values.size(), cudaMemcpyDefault));
}

using Bf16 = std::uint16_t;  ///< the upper half of a float
inline float value(Bf16 bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

/// Spread over [-scale, scale].
inline std::vector<Bf16> uniform(std::int64_t count, int seed, float scale) {
  std::mt19937 random(static_cast<std::uint32_t>(seed));
  std::vector<Bf16> values(static_cast<std::size_t>(count));
  for (Bf16& value : values) {
    float const x = scale * 0x1p-31f * static_cast<float>(static_cast<std::int32_t>(random()));
    value = static_cast<Bf16>(std::bit_cast<std::uint32_t>(x) >> 16);
  }
  return values;
}

inline float value(float x) { return x; }

/// True if, row by row, the norm of the error is at most 2^-7 of the norm of what is wanted, which is not 0 everywhere.
template <class T>
bool is_near(std::vector<T> const& got, std::vector<T> const& wanted, std::size_t columns) {
  bool any = false;
  for (std::size_t row = 0; row < wanted.size(); row += columns) {
    double error = 0, norm = 0;
    for (std::size_t i = row; i < row + columns; ++i) {
      double const x = value(wanted[i]), difference = value(got[i]) - x;
      error += difference * difference;
      norm += x * x;
    }
    if (!(error <= 0x1p-14 * norm)) return false;  // nor is NaN near
    any = any || norm > 0;
  }
  return any;
}

/// Threads meet here. One that fails leaves, and the others hear of it when they meet next.
class Meeting {
 public:
  explicit Meeting(int threads) : barrier_(threads) {}
  void meet() {
    barrier_.arrive_and_wait();
    if (has_failed_) throw std::runtime_error("another rank has failed");
  }
  void leave() {
    has_failed_ = true;
    barrier_.arrive_and_drop();
  }
  [[nodiscard]] bool has_failed() const { return has_failed_; }

 private:
  std::barrier<> barrier_;
  std::atomic<bool> has_failed_ = false;
};

}  // namespace examples
