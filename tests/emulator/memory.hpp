// SPDX-License-Identifier: Apache-2.0
// Memory of an emulated GPU, and bf16 in it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "cuda/arch/approx_math.cuh"

namespace tessera::emulator {

using Bits = std::uint16_t;  // bf16

inline float widen(Bits bits) { return cuda::arch::unpack_bf16(bits).x; }
inline Bits round(float value) { return static_cast<Bits>(cuda::arch::round_to_bf16(value)); }

// Aligned, and NaNs before it is written.
template <class T>
class Memory {
 public:
  explicit Memory(std::int64_t count, int fill = 0xff)
      : count_(static_cast<std::size_t>(count)),
        data_(static_cast<T*>(
            std::aligned_alloc(128, (count_ * sizeof(T) + 127) / 128 * 128 + 128))) {
    std::memset(static_cast<void*>(data_.get()), fill, count_ * sizeof(T));
  }
  T* get() const { return data_.get(); }
  T& operator[](std::int64_t i) const { return data_.get()[i]; }
  std::size_t size() const { return count_; }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::size_t count_;
  std::unique_ptr<T, Free> data_;
};

inline void fill(Bits* values, std::int64_t count, std::uint64_t seed, float scale) {
  std::mt19937_64 rng(seed);
  std::uniform_real_distribution<float> draw(-scale, scale);
  for (std::int64_t i = 0; i < count; ++i) values[i] = round(draw(rng));
}

// Rows of k, fp32 sums in the order of k, as the emulated tensor cores add.
inline float dot(Bits const* x, Bits const* w, int count, std::int64_t w_step = 1) {
  float sum = 0;
  for (int k = 0; k < count; ++k) sum += widen(x[k]) * widen(w[k * w_step]);
  return sum;
}

}  // namespace tessera::emulator
