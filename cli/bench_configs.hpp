// SPDX-License-Identifier: Apache-2.0
// Layers with a name: T, d, n, E, K, and what differs from swiglu in concat rows.
#pragma once

#include "tessera/shape.hpp"

namespace tessera::cli {

struct BenchConfig {
  char const* name;
  MoeShape shape;
  ActivationKind activation = ActivationKind::swiglu;
  bool bias = false;
  WeightLayout layout =
      {};  ///< as checkpoints of the model have it, unless --layout says otherwise
};

inline constexpr WeightLayout kGptOssLayout = {GateUpOrder::interleaved,
                                               WeightOrientation::transposed};

constexpr MoeShape bench_shape(std::int64_t tokens, std::int64_t hidden, std::int64_t intermediate,
                               std::int64_t experts, std::int64_t top_k) {
  return {.tokens = tokens,
          .hidden = hidden,
          .intermediate = intermediate,
          .experts = experts,
          .top_k = top_k};
}

inline constexpr BenchConfig kBenchConfigs[] = {
    {"cpu-small", bench_shape(2048, 256, 128, 32, 4)},
    {"cpu-mid", bench_shape(4096, 512, 256, 64, 8)},
    {"1.4B-n256", bench_shape(40960, 768, 256, 128, 8)},
    {"1.4B-n512", bench_shape(40960, 768, 512, 64, 4)},
    {"1.4B-n1024", bench_shape(40960, 768, 1024, 32, 2)},
    {"7B-n256", bench_shape(24576, 1536, 256, 128, 8)},
    {"7B-n512", bench_shape(24576, 1536, 512, 64, 4)},
    {"7B-n1024", bench_shape(24576, 1536, 1024, 32, 2)},
    {"30B-n256", bench_shape(32768, 4096, 256, 256, 16)},
    {"30B-n512", bench_shape(32768, 4096, 512, 128, 8)},
    {"30B-n1024", bench_shape(32768, 4096, 1024, 64, 4)},
    {"120B-n512", bench_shape(32768, 4096, 512, 256, 16)},
    {"120B-n1024", bench_shape(32768, 4096, 1024, 128, 8)},
    {"120B-n2048", bench_shape(32768, 4096, 2048, 64, 4)},
    {"TR-a", bench_shape(16384, 1536, 1024, 128, 2)},
    {"TR-b", bench_shape(16384, 4096, 1024, 256, 4)},
    {"Qwen3Next", bench_shape(32768, 2048, 512, 512, 10)},
    {"Qwen3-30B", bench_shape(32768, 2048, 768, 128, 8)},
    {"OLMoE", bench_shape(32768, 2048, 1024, 64, 8)},
    {"d2560-n1280", bench_shape(16384, 2560, 1280, 64, 4)},
    {"DSv3", bench_shape(32768, 7168, 2048, 256, 8)},
    {"gpt-oss-20b", bench_shape(32768, 2880, 2880, 32, 4), ActivationKind::clamped_swiglu, true,
     kGptOssLayout},
    {"decode-B1", bench_shape(1, 2048, 768, 128, 8)},
    {"decode-B8", bench_shape(8, 2048, 768, 128, 8)},
    {"decode-B32", bench_shape(32, 2048, 768, 128, 8)},
    {"decode-B128", bench_shape(128, 2048, 768, 128, 8)},
    {"decode-B512", bench_shape(512, 2048, 768, 128, 8)},
    {"FlashDMoE", bench_shape(8192, 2048, 2048, 32, 2), ActivationKind::gelu},
    {"FlashDMoE-swiglu", bench_shape(8192, 2048, 2048, 32, 2)},
};

}  // namespace tessera::cli
