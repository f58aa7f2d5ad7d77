// SPDX-License-Identifier: Apache-2.0
// MXFP8 operands: e4m3 along k, with a scale e8m0 for every 32 elements of a row. A stage holds, beside both operands,
// an atom of scales of each: 128 rows x the four blocks of a k_tile, 512 bytes, as tcgen05.cp takes it
// (arch/sm100/tcgen05_cp.cuh). In tensor memory every stage has columns of its own for both, behind the accumulators,
// so that no copy waits for multiplications of the lap before.
#pragma once

#include <type_traits>

#include "../params.hpp"
#include "../storage.cuh"

namespace tessera::cuda::gemm {

constexpr int kMxBlock = 32;                               // elements along k that share a scale
constexpr int kScaleAtomRows = 128;                        // of an atom
constexpr int kScaleAtomBytes = 512;                       // 16 for rows m, m + 32, m + 64, m + 96
constexpr int kScaleAtomColumns = 4;                       // of tensor memory
constexpr int kStageScaleColumns = 2 * kScaleAtomColumns;  // A's, then B's

// One warpgroup consumes (storage.cuh), and A is e4m3: on sm_90 such operands have scales of another kind (scales.cuh).
consteval bool is_mxfp8(GemmConfig c) {
  return c.consumer_warpgroups == 1 && c.a.element == Element::kE4m3;
}

struct MxScaleParams {
  // (rows of gmem_a, k/32): a word of four for each row and k_tile.
  uint8_t const* gmem_a;
  // (segments, halves) matrices of b_matrix_bytes each: atoms (rows of B / 128, k_tiles).
  uint8_t const* gmem_b;
  int64_t b_matrix_bytes;
};

struct MxGemmParams : GemmParams {
  MxScaleParams scales;
};
// A GEMM in tensor memory is told its scales, or has none.
template <GemmConfig kGemm>
using TensorGemmParams = std::conditional_t<is_mxfp8(kGemm), MxGemmParams, GemmParams>;

// The part of a CTA's shared memory that holds scales.
template <GemmConfig kGemm>
struct StageScales {};
template <GemmConfig kGemm>
  requires(is_mxfp8(kGemm))
struct StageScales<kGemm> {
  alignas(1024) uint8_t a_scales[kGemm.stages][kScaleAtomBytes];  // of this CTA's rows
  uint8_t b_scales[kGemm.stages][kScaleAtomBytes];  // of the whole tile's, in a pair too
};

// Checks what MXFP8 asks of a configuration, besides valid_in_tensor_memory().
consteval bool valid_mxfp8(GemmConfig c) {
  if (c.b.element != Element::kE4m3 || c.a.stored != c.a.element || c.b.stored != c.b.element)
    throw "a, b: e4m3, as in memory";
  if (!c.gathers()) throw "a.loader: gather; rows that are not gathered have no index";
  if (c.b.major != Major::kK || c.varlen_k() || c.k_halves() == 2)
    throw "a, b: contiguous along k, which may be both halves";
  if (c.tile.k != 4 * kMxBlock) throw "tile.k: the four blocks of an atom";
  if (c.tile.n != kScaleAtomRows) throw "tile.n: the rows of an atom";
  return true;
}

}  // namespace tessera::cuda::gemm
