// SPDX-License-Identifier: Apache-2.0
// The bounds of choose_tokens. No CUDA header: which layers are served is decided in every build.
#pragma once

namespace tessera::cuda {

/// Experts that choose or round their tokens: choose_tokens_emit keeps a bit of each for 32 tokens, 128 KB of shared
/// memory.
constexpr int kMaxChoosingExperts = 32768;

}  // namespace tessera::cuda
