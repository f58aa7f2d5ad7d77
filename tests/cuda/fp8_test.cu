// SPDX-License-Identifier: Apache-2.0
// Codes and scales of core/fp8.hpp on a GPU: the bytes of the CPU for every bf16 value, under every kind of scale, and
// those of the GPU's own conversion where it converts.
// Exit 0 passed, 1 failed, 77 skipped (no GPU).
#include <cuda_fp8.h>

#include <cstdio>
#include <vector>

#include "core/fp8.hpp"
#include "device_buffer.cuh"

namespace tessera::cuda_test {
namespace {

using core::Bf16;
using core::E4m3;

constexpr int kValues = 1 << 16;

/// What follows from one bf16 value, as itself and as an amax.
struct Answer {
  std::uint8_t code, converted;               // of the value; by the GPU's instruction
  std::uint8_t rceil, floor;                  // of the amax
  std::uint32_t scale, inverse, pow2, value;  // fp32_scale, pow2_scale; the code's value
  std::uint8_t quantised;                     // the amax itself by its fp32 scale
};

__host__ __device__ Answer answer_for(int bits) {
  float const value = core::to_fp32(Bf16{static_cast<std::uint16_t>(bits)});
  std::uint32_t const largest = core::fp32_bits(value) & 0x7fffffffu;
  Answer out{};
  E4m3 const code = core::round_to<E4m3>(value);
  out.code = out.converted = code.bits;
#if defined(__CUDA_ARCH__)
  out.converted = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
#endif
  out.rceil = core::e8m0_scale(largest, false).bits;
  out.floor = core::e8m0_scale(largest, true).bits;
  core::BlockScale const scale = core::fp32_scale(largest);
  out.scale = core::fp32_bits(scale.scale);
  out.inverse = core::fp32_bits(scale.inverse);
  out.pow2 = core::fp32_bits(core::pow2_scale(largest).scale);
  out.value = core::fp32_bits(core::to_fp32(code));
  out.quantised = core::quantise(core::fp32_of_bits(largest), scale).bits;
  return out;
}

__global__ void answer(Answer* gmem_answers) {
  int const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < kValues) gmem_answers[i] = answer_for(i);
}

bool equal(Answer const& a, Answer const& b) {
  return a.code == b.code && a.converted == b.converted && a.rceil == b.rceil &&
         a.floor == b.floor && a.scale == b.scale && a.inverse == b.inverse && a.pow2 == b.pow2 &&
         a.value == b.value && a.quantised == b.quantised;
}

int run() {
  DeviceBuffer const answers(kValues * sizeof(Answer));
  answer<<<kValues / 256, 256>>>(answers.as<Answer>());
  require(cudaGetLastError(), "launch");
  auto const have = answers.values<Answer>();
  int wrong = 0;
  for (int i = 0; i < kValues; ++i) {
    if (equal(have[i], answer_for(i)) || ++wrong > 5) continue;
    std::printf("bf16 0x%04x: code 0x%02x, by the instruction 0x%02x, on the CPU 0x%02x\n", i,
                have[i].code, have[i].converted, answer_for(i).code);
  }
  std::printf("%d of %d values differ: %s\n", wrong, kValues, wrong == 0 ? "passed" : "FAILED");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda_test

int main() {
  using namespace tessera::cuda_test;
  return has_device() ? run() : kSkipped;
}
