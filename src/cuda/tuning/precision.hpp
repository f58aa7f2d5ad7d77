// SPDX-License-Identifier: Apache-2.0
// Sizes from which Precision::automatic takes fp8 on a Hopper GPU. The gain of fp8 grows with P*n*d; the cost of
// quantising grows with T*d (x, dO, x^ and the router's part of dx) and, where calls quantise weights, with E*n*d.
// So the ratio to bf16 depends on K*n, on M_e = P/E and, through the k loops and epilogues of the GEMMs, on n and d.
//
// They are those of the smallest layer that was seen to gain: Qwen3-30B (32768 tokens, d 2048, n 768, E 128, K 8). A
// step takes 0.923 of bf16's time, at Qwen3-235B, larger in n and d, 0.864, and 7B-n256 loses, 1.032
// (bench/results/archive/h200/2026-11-28-fp8-layer-in-turns.json). Where codes are handed in, Qwen3-30B would take
// 0.856, by the time of the kernels that make them.
#pragma once

#include <cstdint>

namespace tessera::cuda {

struct Fp8Sizes {
  std::int64_t hidden = 2048, intermediate = 768;
  std::int64_t columns_per_token = 8 * 768;  ///< of a: K*n
  std::int64_t rows_per_expert = 2048;       ///< on average, where calls quantise the weights
  /// The same where codes are handed in. No cost is left that fewer rows share but codes made once in a step: 4 bytes
  /// an element, where calls move 6, which at half the rows is 0.09 of that step.
  std::int64_t rows_per_expert_with_codes = 1024;
};
inline constexpr Fp8Sizes kFp8Sizes{};

}  // namespace tessera::cuda
