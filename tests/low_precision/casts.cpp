// SPDX-License-Identifier: Apache-2.0
// Writes what torch_casts_test.py compares: the e4m3 codes of all 65536 bf16 values, the fp32 values of all 256 e4m3
// codes and of all 256 e8m0 bytes, the e8m0 bytes (rceil) of all 65536 bf16 values as amax.
#include <cstdio>
#include <vector>

#include "core/fp8.hpp"

int main() {
  using namespace tessera::core;
  std::vector<E4m3> codes;
  std::vector<float> values, scales;
  std::vector<E8m0> bytes;
  for (int bits = 0; bits < 0x10000; ++bits) {
    float const value = to_fp32(Bf16{static_cast<std::uint16_t>(bits)});
    codes.push_back(round_to<E4m3>(value));
    bytes.push_back(e8m0_scale(fp32_bits(value) & 0x7fffffffu, false));
  }
  for (int bits = 0; bits < 256; ++bits) {
    values.push_back(to_fp32(E4m3{static_cast<std::uint8_t>(bits)}));
    scales.push_back(to_fp32(E8m0{static_cast<std::uint8_t>(bits)}));
  }
  std::size_t written = std::fwrite(codes.data(), 1, codes.size(), stdout);
  written += std::fwrite(values.data(), sizeof(float), values.size(), stdout);
  written += std::fwrite(scales.data(), sizeof(float), scales.size(), stdout);
  written += std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  return written == 2 * 0x10000 + 2 * 256 && std::fflush(stdout) == 0 ? 0 : 1;
}
