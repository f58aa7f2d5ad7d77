// SPDX-License-Identifier: Apache-2.0
// The instruction sets that gemm() can use: how each packs panels and multiplies a pair of them.
//
// A panel holds `width` rows (or columns) of an operand as [k words][width] 32-bit words. A word is one fp32, or
// two bf16 of neighbouring k where the machine multiplies pairs; a missing partner is 0.
#pragma once

#include <cstdint>

#include "core/bf16.hpp"
#include "tessera/tensor.hpp"

namespace tessera::cpu {

using Word = std::uint32_t;

/// Element (i, k) of an operand: data[at(i)*stride + k] where k is contiguous, else data[at(k)*stride + i];
/// at(j) = gather[j], or j without a gather.
struct PanelSource {
  void const* data = nullptr;
  DType dtype = DType::fp32;
  std::int64_t stride = 0;
  bool k_contiguous = true;
  std::int32_t const* gather = nullptr;
};

/// Says where a whole register tile goes; `add`: fp32 only.
struct TileResult {
  void* out = nullptr;
  std::int64_t out_stride = 0;
  DType dtype = DType::fp32;
  bool add = false;
};

/// An fp32 tile on its way to its destination.
struct TileStore {
  float const* tile = nullptr;  ///< [rows, columns], pitch of the register tile
  int rows = 0, columns = 0;
  float const* bias = nullptr;  ///< [columns] or null
  void* out = nullptr;
  std::int64_t out_stride = 0;
};

struct GemmKernels {
  char const* name;
  int rows, columns;  ///< of the register tile
  bool
      multiplies_bf16;  ///< words are pairs of bf16; else bf16 operands are widened while they are packed

  /// Panel elements [first, first+width) of an operand with `extent` of them; those beyond the extent are 0.
  /// Writes up to one vector beyond the panel.
  using Pack = void (*)(PanelSource const& source, std::int64_t first, std::int64_t extent,
                        std::int64_t k, Word* panel);
  Pack pack_rows, pack_columns;  ///< panels of `rows` and of `columns`

  /// c [r, columns] (+)= sum over the words; multiply[r - 1] for r rows of the panel a.
  using Multiply = void (*)(std::int64_t words, Word const* a, Word const* b, TileResult const& c);
  Multiply const* multiply;

  void (*store_fp32)(TileStore const& store);
  void (*store_bf16)(TileStore const& store);
};

// Null where the build or this machine lacks the instructions. AVX2 and AVX-512 sets multiply fp32.
GemmKernels const* portable_gemm_kernels() noexcept;
GemmKernels const* avx2_gemm_kernels() noexcept;
GemmKernels const* avx512_gemm_kernels() noexcept;
GemmKernels const* avx512_bf16_gemm_kernels() noexcept;
/// True if this machine multiplies pairs of bf16 faster than the same operands widened to fp32.
bool avx512_bf16_pays() noexcept;

/// The best set for panels of fp32, and for two bf16 operands.
GemmKernels const& gemm_kernels(bool both_bf16) noexcept;

}  // namespace tessera::cpu
