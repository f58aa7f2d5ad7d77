// SPDX-License-Identifier: Apache-2.0
// Tensor maps (TMA descriptors) in boxes of 128-byte rows (64 columns of bf16) with the 128-byte swizzle.
//
// Ragged store map: rows of segment [begin, end) of a matrix, clipped at `end` by the hardware
// although `end` is known on the device only. Two dimensions share the row pitch s: `row`, of extent
// X, and `end`. The base is lowered by X*s, so that the coordinates (X + r - end, end) address
//     (base - X*s) + (X + r - end)*s + end*s = base + r*s,
// and a box leaves the extent X exactly where r reaches `end`: TMA drops those rows.
//
// Ragged load map: the same, zero-filled from `end` on. A load may read at the base it is given, so this
// stays in place; a third dimension of stride 2^34 - s and coordinate X = 2^30 takes X*s back modulo 2^64:
//     base + X*(2^34 - s) + (X + r - end)*s + end*s = base + r*s.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "driver.hpp"
#include "kept_tensor_maps.hpp"
#include "per_context.hpp"
#include "projection.hpp"

namespace tessera::cuda::host {

// Extents in elements, innermost first; strides in bytes of dimensions 1..rank-1.
struct TensorMapShape {
  int rank;
  uint64_t extent[5];
  uint64_t stride_bytes[4];
  uint32_t box[5];
  bool is_fp32 = false;
  bool is_bytes = false;  // elements of one byte, e4m3
};

inline cudaError_t encode_tensor_map(CUtensorMap& map, void const* gmem,
                                     TensorMapShape const& shape) {
  static auto* const encode =
      driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint32_t const element_strides[5] = {1, 1, 1, 1, 1};
  CUresult const result =
      encode(&map,
             shape.is_fp32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
             : shape.is_bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             shape.rank, const_cast<void*>(gmem), shape.extent, shape.stride_bytes, shape.box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A call makes the maps of the call before: weights stay, and allocators give the same addresses again.
inline cudaError_t make_tensor_map(CUtensorMap& map, void const* gmem,
                                   TensorMapShape const& shape) {
  static KeptTensorMaps kept;
  std::array<uint64_t, KeptTensorMaps::kKeyWords> const key = {
      reinterpret_cast<uintptr_t>(gmem),
      current_context_id(),
      uint64_t(shape.rank) | uint64_t{shape.is_fp32} << 8 | uint64_t{shape.is_bytes} << 9 |
          uint64_t{shape.box[4]} << 32,
      shape.box[0] | uint64_t{shape.box[1]} << 32,
      shape.box[2] | uint64_t{shape.box[3]} << 32,
      shape.extent[0],
      shape.extent[1],
      shape.extent[2],
      shape.extent[3],
      shape.extent[4],
      shape.stride_bytes[0],
      shape.stride_bytes[1],
      shape.stride_bytes[2],
      shape.stride_bytes[3]};
  return kept.find_or_make(map, key,
                           [&](CUtensorMap& made) { return encode_tensor_map(made, gmem, shape); });
}

// (rows, columns), rows `pitch` elements apart, as (column, row). No rows: a map that is valid and never
// used.
inline cudaError_t make_matrix_map(CUtensorMap& map, void const* gmem, int64_t rows,
                                   int64_t columns, int64_t pitch, int box_rows) {
  return make_tensor_map(map, gmem,
                         {.rank = 2,
                          .extent = {uint64_t(columns), uint64_t(std::max<int64_t>(rows, 1))},
                          .stride_bytes = {uint64_t(pitch) * 2},
                          .box = {64, uint32_t(box_rows)}});
}

// The bytes of an element: maps that take it have boxes of 128 bytes of either.
enum class MapElement : uint8_t { kE4m3 = 1, kBf16 = 2 };

// (rows, halves * columns) as (column, half, row), in boxes of one half.
inline cudaError_t make_halves_map(CUtensorMap& map, void const* gmem, int64_t rows, int64_t halves,
                                   int64_t columns, int box_rows,
                                   MapElement element = MapElement::kBf16) {
  auto const bytes = uint64_t(element);
  return make_tensor_map(
      map, gmem,
      {.rank = 3,
       .extent = {uint64_t(columns), uint64_t(halves), uint64_t(std::max<int64_t>(rows, 1))},
       .stride_bytes = {uint64_t(columns) * bytes, uint64_t(halves * columns) * bytes},
       .box = {uint32_t(128 / bytes), 1, uint32_t(box_rows)},
       .is_bytes = element == MapElement::kE4m3});
}

// One matrix (rows x columns) per segment of a weight tensor (host/projection.hpp) or of its gradient, in boxes
// of 64 rows x `box_columns` columns (fp32: 32 of the contiguous dimension, and K-major 32 rows), zero outside.
//   K-major    (column, row % block, row / block, segment); no box may cross a block, so blocks have a
//              power of two of rows up to 64, or a multiple of 64, or there is only one
//   rows-major (row, column, 0, segment)
inline cudaError_t make_weight_map(CUtensorMap& map, WeightRows const& w, int64_t segments,
                                   int64_t rows, int64_t columns, bool rows_major,
                                   bool is_fp32 = false, uint32_t box_columns = 64) {
  auto const bytes = [=](int64_t elements) { return uint64_t(elements) * (is_fp32 ? 4 : 2); };
  uint32_t const inner = is_fp32 ? 32 : 64;
  if (rows_major) {
    return make_tensor_map(
        map, w.gmem,
        {.rank = 4,
         .extent = {uint64_t(rows), uint64_t(columns), 1, uint64_t(segments)},
         .stride_bytes = {bytes(w.column_stride), bytes(w.column_stride), bytes(w.expert_stride)},
         .box = {inner, box_columns, 1, 1},
         .is_fp32 = is_fp32});
  }
  bool const one_block = w.block >= rows;
  uint32_t const group = is_fp32 ? 32 : 64;
  uint32_t const box_rows = one_block ? group : uint32_t(std::min<int64_t>(w.block, group));
  return make_tensor_map(
      map, w.gmem,
      {.rank = 4,
       .extent = {uint64_t(columns), uint64_t(one_block ? rows : w.block),
                  uint64_t(one_block ? 1 : rows / w.block), uint64_t(segments)},
       .stride_bytes = {bytes(w.row_stride), bytes(one_block ? w.row_stride : w.block_stride),
                        bytes(w.expert_stride)},
       .box = {std::min(inner, box_columns), box_rows, group / box_rows, 1},
       .is_fp32 = is_fp32});
}

// GemmParams::b_groups: of the B of `rows` rows those of a CTA's share of a tile; with short_b, no more than there are
// in all; with partial_last, those of the last tile. kGemm: a gemm::GemmConfig.
template <auto kGemm>
int existing_b_groups(int64_t rows) {
  if (kGemm.partial_last()) return kGemm.last_b_groups(rows);
  constexpr int kGroups = kGemm.b_groups_per_cta();
  return kGemm.short_b() ? int(std::min<int64_t>(kGroups, (rows + 63) / 64)) : kGroups;
}

// The usual layouts at once: row groups of 64 rows of each half, `groups` of them to a box.
//   K-major    (column, row % 64, half, row / 64, segment)
//   rows-major (row % 64, column, half, row / 64, segment)
// Needs whole groups, one block, and a second half of the same strides that lies behind the first.
inline bool has_tile_map(WeightRows const (&w)[2], int halves, int64_t rows) {
  auto const base = [&](int half) { return reinterpret_cast<uintptr_t>(w[half].gmem); };
  return rows % 64 == 0 && w[0].block >= rows &&
         (halves == 1 ||
          (w[1].expert_stride == w[0].expert_stride && w[1].row_stride == w[0].row_stride &&
           w[1].column_stride == w[0].column_stride && base(1) > base(0) &&
           (base(1) - base(0)) % 16 == 0 && base(1) - base(0) < (uint64_t{1} << 40)));
}

inline cudaError_t make_tile_map(CUtensorMap& map, WeightRows const (&w)[2], int halves,
                                 int64_t segments, int64_t rows, int64_t columns, bool rows_major,
                                 int groups) {
  auto const bytes = [](int64_t elements) { return uint64_t(elements) * 2; };
  uint64_t const half_bytes =
      halves == 1 ? bytes(w[0].expert_stride)
                  : reinterpret_cast<uintptr_t>(w[1].gmem) - reinterpret_cast<uintptr_t>(w[0].gmem);
  uint64_t const step = bytes(rows_major ? w[0].column_stride : w[0].row_stride);
  uint64_t const group_bytes = 64 * bytes(rows_major ? 1 : w[0].row_stride);
  TensorMapShape shape{
      .rank = 5,
      .extent = {uint64_t(columns), 64, uint64_t(halves), uint64_t(rows) / 64, uint64_t(segments)},
      .stride_bytes = {step, half_bytes, group_bytes, bytes(w[0].expert_stride)},
      .box = {64, 64, uint32_t(halves), uint32_t(groups), 1}};
  if (rows_major) std::swap(shape.extent[0], shape.extent[1]);
  return make_tensor_map(map, w[0].gmem, shape);
}

// The same of e4m3, K-major and contiguous: (segments, halves, rows, columns), in boxes of 128 columns of `box_halves`
// and `groups`.
inline cudaError_t make_e4m3_tile_map(CUtensorMap& map, void const* gmem, int64_t segments,
                                      int64_t halves, int64_t rows, int64_t columns, int box_halves,
                                      int groups) {
  return make_tensor_map(
      map, gmem,
      {.rank = 5,
       .extent = {uint64_t(columns), 64, uint64_t(halves), uint64_t(rows) / 64, uint64_t(segments)},
       .stride_bytes = {uint64_t(columns), uint64_t(rows * columns), uint64_t(64 * columns),
                        uint64_t(halves * rows * columns)},
       .box = {128, 64, uint32_t(box_halves), uint32_t(groups), 1},
       .is_bytes = true});
}

// Ragged store map of a (rows, halves * columns) matrix, as (column, half, row, end), `row` of extent
// ragged_extent >= the longest segment. pitch: elements from row to row; 0: no gaps.
inline cudaError_t make_ragged_store_map(CUtensorMap& map, void* gmem, int64_t rows, int64_t halves,
                                         int64_t columns, int64_t ragged_extent, int box_rows,
                                         int64_t pitch = 0,
                                         MapElement element = MapElement::kBf16) {
  auto const bytes = uint64_t(element);
  uint64_t const pitch_bytes = uint64_t(pitch == 0 ? halves * columns : pitch) * bytes;
  auto const base = reinterpret_cast<uintptr_t>(gmem) - uint64_t(ragged_extent) * pitch_bytes;
  return make_tensor_map(
      map, reinterpret_cast<void*>(base),
      {.rank = 4,
       .extent = {uint64_t(columns), uint64_t(halves), uint64_t(ragged_extent), uint64_t(rows) + 1},
       .stride_bytes = {uint64_t(columns) * bytes, pitch_bytes, pitch_bytes},
       .box = {uint32_t(128 / bytes), 1, uint32_t(box_rows), 1},
       .is_bytes = element == MapElement::kE4m3});
}

constexpr int kRaggedLoadExtent = 1 << 30;  // X of ragged load maps

// Ragged load map of a (rows, halves * columns) matrix, as (column, half, row, end, kRaggedLoadExtent).
inline cudaError_t make_ragged_load_map(CUtensorMap& map, void const* gmem, int64_t rows,
                                        int64_t halves, int64_t columns, int box_rows) {
  constexpr auto kExtent = uint64_t{kRaggedLoadExtent};
  uint64_t const pitch = uint64_t(halves * columns) * 2;
  return make_tensor_map(
      map, gmem,
      {.rank = 5,
       .extent = {uint64_t(columns), uint64_t(halves), kExtent, uint64_t(rows) + 1, kExtent + 1},
       .stride_bytes = {uint64_t(columns) * 2, pitch, pitch, (uint64_t{1} << 34) - pitch},
       .box = {64, 1, uint32_t(box_rows), 1, 1}});
}

// The same of a (rows, columns) matrix, columns a multiple of 64, as (column % 64, row, column / 64, end,
// kRaggedLoadExtent): boxes of 64 rows and `groups` times 64 columns, one group after the other.
inline cudaError_t make_ragged_tile_load_map(CUtensorMap& map, void const* gmem, int64_t rows,
                                             int64_t columns, int groups) {
  constexpr auto kExtent = uint64_t{kRaggedLoadExtent};
  uint64_t const pitch = uint64_t(columns) * 2;
  return make_tensor_map(
      map, gmem,
      {.rank = 5,
       .extent = {64, kExtent, uint64_t(columns) / 64, uint64_t(rows) + 1, kExtent + 1},
       .stride_bytes = {pitch, 128, pitch, (uint64_t{1} << 34) - pitch},
       .box = {64, 64, uint32_t(groups), 1, 1}});
}

}  // namespace tessera::cuda::host
