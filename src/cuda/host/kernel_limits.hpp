// SPDX-License-Identifier: Apache-2.0
// The most that kernels can serve. No CUDA header: which layers are served is decided in every build.
#pragma once

namespace tessera::cuda {

/// Experts that choose or round their tokens: choose_tokens_emit keeps a bit of each for 32 tokens, 128 KB of shared
/// memory.
constexpr int kMaxChoosingExperts = 32768;

/// Experts of the fast GEMMs: their offsets lie in shared memory (gemm::kMaxSegments).
constexpr int kMaxGemmSegments = 640;

/// Tile of operands in MXFP8, whose d and n are multiples of it.
constexpr int kMxTile = 128;

}  // namespace tessera::cuda
