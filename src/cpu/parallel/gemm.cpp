// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel/gemm.hpp"

#include <algorithm>
#include <cstdint>

namespace tessera::cpu {
namespace {

/// Rows of a that are packed at once: as many as stay in the second cache, within bounds.
constexpr std::int64_t kMinPackedRows = 112, kMaxPackedRows = 512, kPackedWords = 160 * 1024;
/// Words of b that are packed once for several blocks of a or products; more are packed again for each.
constexpr std::int64_t kKeptWords = 256 * 1024;

std::int64_t packed_rows(std::int64_t words) noexcept {
  return std::clamp(kPackedWords / std::max<std::int64_t>(words, 1), kMinPackedRows,
                    kMaxPackedRows);
}
constexpr int kLargestTile = 14 * 32;
constexpr int kLargestPanel = 32;
constexpr std::int64_t kLineFloats = 16;

std::int64_t whole_lines(std::int64_t floats) noexcept {
  return (floats + kLineFloats - 1) / kLineFloats * kLineFloats;
}

void widen_bias(GemmResult const& c, std::int64_t first, std::int64_t count, float* out) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = c.dtype == DType::bf16
                 ? core::to_fp32(static_cast<core::Bf16 const*>(c.bias)[first + i])
                 : static_cast<float const*>(c.bias)[first + i];
  }
}

/// One panel of b against all packed rows of a; c is row-major.
struct ColumnPanel {
  GemmKernels const& kernels;
  std::int64_t rows, words;
  Word const* a;
  Word const* b;
  GemmResult const& c;
  std::int64_t first_row, first_column, columns;

  void multiply() const noexcept {
    alignas(64) float tile[kLargestTile];
    alignas(64) float bias[kLargestPanel];
    if (c.bias != nullptr) widen_bias(c, first_column, columns, bias);
    bool const direct = columns == kernels.columns && c.bias == nullptr;
    std::int64_t const element = c.dtype == DType::bf16 ? 2 : 4;
    for (std::int64_t row = 0; row < rows; row += kernels.rows) {
      auto const tile_rows = static_cast<int>(std::min<std::int64_t>(kernels.rows, rows - row));
      auto* const out =
          static_cast<char*>(c.data) + ((first_row + row) * c.row_stride + first_column) * element;
      auto const multiply_rows = kernels.multiply[tile_rows - 1];
      Word const* const panel = a + row * words;
      if (direct) {
        multiply_rows(words, panel, b, {out, c.row_stride, c.dtype, c.add});
        continue;
      }
      multiply_rows(words, panel, b, {tile, kernels.columns});
      if (c.add) add_old(reinterpret_cast<float const*>(out), tile_rows, tile);
      TileStore const store{.tile = tile,
                            .rows = tile_rows,
                            .columns = static_cast<int>(columns),
                            .bias = c.bias != nullptr ? bias : nullptr,
                            .out = out,
                            .out_stride = c.row_stride};
      c.dtype == DType::bf16 ? kernels.store_bf16(store) : kernels.store_fp32(store);
    }
  }

  void add_old(float const* old, int tile_rows, float* tile) const noexcept {
    for (int r = 0; r < tile_rows; ++r) {
      for (std::int64_t i = 0; i < columns; ++i) {
        tile[r * kernels.columns + i] += old[r * c.row_stride + i];
      }
    }
  }
};

}  // namespace

GemmKernels const& gemm_kernels(bool both_bf16) noexcept {
  auto const either = [](GemmKernels const* first, GemmKernels const* second) {
    return first != nullptr ? first : second;
  };
  static GemmKernels const* const fp32 =
      either(avx512_gemm_kernels(), either(avx2_gemm_kernels(), portable_gemm_kernels()));
  static GemmKernels const* const bf16 = avx512_bf16_pays() ? avx512_bf16_gemm_kernels() : fp32;
  return both_bf16 ? *bf16 : *fp32;
}

std::int64_t gemm_scratch_floats(std::int64_t gemm_m, std::int64_t gemm_n,
                                 std::int64_t gemm_k) noexcept {
  // A product into columns swaps m and n. Narrow panels may be overrun by a vector.
  std::int64_t const longer = std::max(gemm_m, gemm_n) + kLargestPanel;
  std::int64_t const a_rows = std::min(kMaxPackedRows + kLargestPanel, longer);
  std::int64_t const b_words =
      std::max(kLargestPanel * gemm_k, std::min(kKeptWords, longer * gemm_k));
  return whole_lines(a_rows * gemm_k + kLineFloats) + whole_lines(b_words + kLineFloats);
}

void gemm(std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t gemm_k, PanelSource const& a,
          PanelSource const& b, GemmResult const& c, float* scratch, Panels b_panels) noexcept {
  bool const both_bf16 = a.dtype == DType::bf16 && b.dtype == DType::bf16;
  gemm_with(gemm_kernels(both_bf16), gemm_m, gemm_n, gemm_k, a, b, c, scratch, b_panels);
}

void gemm_with(GemmKernels const& kernels, std::int64_t gemm_m, std::int64_t gemm_n,
               std::int64_t gemm_k, PanelSource const& a, PanelSource const& b, GemmResult const& c,
               float* scratch, Panels b_panels) noexcept {
  if (c.col_stride != 1) {  // c^T = b^T a^T
    GemmResult const turned{c.data, c.dtype, c.col_stride, 1, nullptr, c.add};
    return gemm_with(kernels, gemm_n, gemm_m, gemm_k, b, a, turned, scratch, Panels::used_once);
  }
  std::int64_t const words = kernels.multiplies_bf16 ? (gemm_k + 1) / 2 : gemm_k;
  std::int64_t const block = packed_rows(words), panel_words = kernels.columns * words;
  std::int64_t const b_words = (gemm_n + kernels.columns - 1) / kernels.columns * panel_words;
  bool const keeps_b = (gemm_m > block || b_panels != Panels::used_once) && b_words <= kKeptWords;
  bool packed = keeps_b && b_panels == Panels::reused;
  auto* const b_first = reinterpret_cast<Word*>(scratch);
  Word* const a_panels = b_first + whole_lines((keeps_b ? b_words : panel_words) + kLineFloats);
  for (std::int64_t first = 0; first < gemm_m; first += block) {
    std::int64_t const rows = std::min(block, gemm_m - first);
    for (std::int64_t row = 0; row < rows; row += kernels.rows) {
      kernels.pack_rows(a, first + row, gemm_m, gemm_k, a_panels + row * words);
    }
    Word* b_panel = b_first;
    for (std::int64_t column = 0; column < gemm_n; column += kernels.columns) {
      if (!packed) kernels.pack_columns(b, column, gemm_n, gemm_k, b_panel);
      std::int64_t const columns = std::min<std::int64_t>(kernels.columns, gemm_n - column);
      ColumnPanel{kernels, rows, words, a_panels, b_panel, c, first, column, columns}.multiply();
      if (keeps_b) b_panel += panel_words;
    }
    packed = keeps_b;
  }
}

}  // namespace tessera::cpu
