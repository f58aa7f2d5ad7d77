// SPDX-License-Identifier: Apache-2.0
// Configurations of the experts' kernel for few tokens. Weights on their way hide the latency of memory: 4.8 TB/s times
// about 1 us over 132 SMs are 36 KiB of an SM, and its rings hold 192 KiB.
// Measured: bench/results/archive/h200/2026-11-30-few-tokens-{rings,values}.json
#pragma once

#include <cstdint>

namespace tessera::cuda {

struct FewTokensConfig {
  int warps;    // of a CTA, one CTA per SM; each has a ring of its own
  int stages;   // of a ring
  int stage_k;  // of 16 rows of weights in a stage

  constexpr int threads() const { return 32 * warps; }
};

consteval bool valid(FewTokensConfig c) {
  if (c.warps < 1 || c.warps > 32) throw "warps: 1 to 32 per CTA";
  if (c.stages < 2) throw "stages: one is multiplied while another comes";
  if (c.stage_k != 64 && c.stage_k != 128 && c.stage_k != 256)
    throw "stage_k: 1, 2 or 4 lines of 128 bytes";
  return true;
}

struct ExpertsFwdFewTokens {
  static constexpr FewTokensConfig config{.warps = 12, .stages = 2, .stage_k = 256};
};
// Few jobs that are short: all of them begin at once, and fewer warps leave each more of what memory brings.
struct ExpertsFwdOneOrTwo {
  static constexpr FewTokensConfig config{.warps = 8, .stages = 2, .stage_k = 256};
  static constexpr int64_t kMostBlocks = 16;     // of rows, two tokens of eight experts
  static constexpr int64_t kLongestRows = 2048;  // of weights, of a launch's first jobs
};

}  // namespace tessera::cuda
