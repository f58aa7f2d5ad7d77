// SPDX-License-Identifier: Apache-2.0
// Sizes from which Precision::automatic takes fp8 on a Hopper GPU. The gain of fp8 grows with P*n*d; the cost of
// quantising grows with T*d (x, dO, x^ and the router's part of dx) and, where calls quantise weights, with E*n*d.
// So the ratio to bf16 depends on K*n, on M_e = P/E and, through the k loops and epilogues of the GEMMs, on n and d: a
// layer gains that is, in all four, at least as large as one that was seen to gain.
//
// Measured in docs/notebook/2026-11-28-fp8-layer.md (ten layers), in turns with bf16 in one process. Not among them, as
// they gain less than 1% or lose: 1.4B-n256, and where calls quantise 7B-n256, 7B-n512 and Qwen3Next.
#pragma once

#include <cstdint>

namespace tessera::cuda {

struct Fp8Sizes {
  std::int64_t hidden, intermediate;
  std::int64_t columns_per_token;  ///< of a: K*n
  std::int64_t rows_per_expert;    ///< on average
};

/// The smallest layers that gain: 7B-n1024, 30B-n256, Qwen3-30B.
inline constexpr Fp8Sizes kFp8Sizes[] = {
    {.hidden = 1536, .intermediate = 1024, .columns_per_token = 2 * 1024, .rows_per_expert = 1536},
    {.hidden = 4096, .intermediate = 256, .columns_per_token = 16 * 256, .rows_per_expert = 2048},
    {.hidden = 2048, .intermediate = 768, .columns_per_token = 8 * 768, .rows_per_expert = 2048}};
/// Where codes of weights are handed in: 7B-n256, Qwen3Next.
inline constexpr Fp8Sizes kFp8SizesWithCodes[] = {
    {.hidden = 1536, .intermediate = 256, .columns_per_token = 8 * 256, .rows_per_expert = 1536},
    {.hidden = 2048, .intermediate = 512, .columns_per_token = 10 * 512, .rows_per_expert = 640}};

}  // namespace tessera::cuda
