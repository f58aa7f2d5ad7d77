// SPDX-License-Identifier: Apache-2.0
// Sizes from which Precision::automatic takes fp8 on a Hopper GPU. The gain of fp8 grows with P*n*d; the cost of
// quantising grows with T*d (x, dO, x^ and the router's part of dx) and, where calls quantise weights, with E*n*d.
// So the ratio to bf16 depends on K*n, on M_e = P/E and, through the k loops and epilogues of the GEMMs, on n and d.
//
// They are those of the smallest layer that gains: Qwen3-30B (32768 tokens, d 2048, n 768, E 128, K 8). A step took
// 0.98 of bf16's time (bench/results/archive/h200/2026-11-28-fp8-layer.json) with kernels two of which have become
// faster since; with their times (2026-11-28-e4m3-gradients-wide-lanes.json there) it is 0.92, and 0.85 where codes
// are handed in. What its kernels gain is 1.5 times what quantising costs; at Qwen3-235B, larger in n and d, 1.9
// times (the same file and 2026-11-28-forward-e4m3.json). 7B-n256 loses: 1.10 measured, 1.04 with the newer times.
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
