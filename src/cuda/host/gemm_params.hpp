// SPDX-License-Identifier: Apache-2.0
// From a GEMM as its launcher states it to the parameters of its kernel. Units of the kernel (boxes, tiles, chunks of
// 16 bytes) are counted here alone.
#pragma once

#include "../gemm/config.hpp"
#include "../gemm/params.hpp"
#include "core/awaited_rows.hpp"
#include "tensor_map.hpp"
#include "weight_maps.hpp"

namespace tessera::cuda::host {

// In elements. What is not said of a kind of GEMM it does not read.
struct GemmProblem {
  // varlen-M: (rows,k), or (rows,k_halves*k) without pitch. varlen-K: (tokens,m).
  MatrixRows a;
  int32_t const* gmem_index = nullptr;  // gathered: row -> row of A; null: the row itself
  // varlen-M: B, n rows of k each, in a tile's halves or in those of k. With terms rows of all terms.
  WeightRows b[2] = {};
  // varlen-K: B (rows,right_halves*n)
  void const* gmem_right = nullptr;
  int64_t right_rows = 0;
  int right_halves = 1;
  int64_t m = 0;     // varlen-K: rows of each D
  int64_t n = 0;     // columns of D in a half of B
  int64_t k = 0;     // varlen-M, in a half of k
  int k_halves = 1;  // kAlongK: that exist
  // Segments are those of gmem_offsets, or of segment_rows rows each, total_rows in all.
  int32_t const* gmem_offsets = nullptr;
  int64_t segment_rows = 0, total_rows = 0;
  int segments = 1;
  int32_t* gmem_tile_counter = nullptr;
  uint32_t* gmem_handover = nullptr;
  core::AwaitedRows awaited = {};  // ready_first
};

constexpr int parts_of(int64_t count, int64_t part) { return int((count + part - 1) / part); }

template <gemm::GemmConfig kGemm>
cudaError_t a_params(gemm::GemmParams& out, GemmProblem const& args) {
  int64_t const columns = kGemm.varlen_k() ? args.m : args.k;
  if constexpr (kGemm.gathers()) {
    constexpr int kBytes = gemm::bytes_of(kGemm.a.stored);
    out.gmem_a = args.a.gmem;
    out.gmem_index = args.gmem_index;
    out.a_pitch_chunks = int(args.a.pitch * kBytes / 16);
    out.a_row_bytes = int(columns * kBytes);
    return cudaSuccess;
  } else {
    static_assert(kGemm.a.stored == gemm::Element::kBf16, "tensor_map.hpp makes maps of bf16");
    if constexpr (kGemm.k_halves() == 2) {
      return make_halves_map(out.a, args.a.gmem, args.a.rows, args.k_halves, columns, kGemm.tile.m);
    }
    return make_matrix_map(out.a, args.a.gmem, args.a.rows, columns, args.a.pitch,
                           kGemm.varlen_k() ? kGemm.tile.k : kGemm.tile.m);
  }
}

template <gemm::GemmConfig kGemm>
cudaError_t right_params(gemm::GemmParams& out, GemmProblem const& args) {
  out.m_tiles = parts_of(args.m, kGemm.tile.m);
  out.ragged_extent = kRaggedLoadExtent;
  out.b_groups = existing_b_groups<kGemm>(args.n);
  out.b_half_groups = parts_of(args.n, gemm::kGroupRows);
  out.n_tiles = parts_of(args.right_halves * out.b_half_groups, kGemm.tile.n / gemm::kGroupRows);
  // Whole column groups: both halves are one matrix.
  out.b_in_boxes = args.n % gemm::kGroupRows != 0;
  if (!out.b_in_boxes) {
    return make_ragged_tile_load_map(out.b[0], args.gmem_right, args.right_rows,
                                     args.right_halves * args.n, out.b_groups);
  }
  if (!kGemm.any_b_layout()) return cudaErrorInvalidValue;
  return make_ragged_load_map(out.b_half[0], args.gmem_right, args.right_rows, args.right_halves,
                              args.n, kGemm.tile.k);
}

template <gemm::GemmConfig kGemm>
cudaError_t b_params(gemm::GemmParams& out, GemmProblem const& args) {
  int const k_tiles = parts_of(args.k, kGemm.tile.k);
  out.k_half_tiles = kGemm.k_halves() == 2 ? k_tiles : 0;
  out.k_tiles = kGemm.k_halves() == 2 ? args.k_halves * k_tiles : k_tiles;
  out.n_tiles = parts_of(args.n * kGemm.b_halves(), kGemm.tile.n);
  if constexpr (kGemm.k_halves() == 2) {
    return make_k_half_maps<kGemm>(out, args.b, args.k_halves, args.segments, args.n, args.k);
  }
  if constexpr (kGemm.b.stored == gemm::Element::kE4m3) {  // whole tiles of contiguous rows
    // A CTA loads so many of a tile's row groups, counted in either half.
    constexpr int kGroups = kGemm.tile.n / gemm::kGroupRows / kGemm.cluster_m();
    constexpr int kHalves = kGroups < kGemm.b_halves() ? kGroups : kGemm.b_halves();
    return make_e4m3_tile_map(out.b[0], args.b[0].gmem, args.segments, kGemm.b_halves(), args.n,
                              args.k, kHalves, kGroups / kHalves);
  }
  int64_t const columns =
      kGemm.b_terms() == 1 ? args.k : int64_t{kGemm.b_terms()} * k_tiles * kGemm.tile.k;
  return make_weight_maps<kGemm>(out, args.b, args.segments, args.n, columns);
}

// All parameters but those of an outer product.
template <gemm::GemmConfig kGemm>
cudaError_t gemm_params(gemm::GemmParams& out, GemmProblem const& args) {
  static_assert(kGemm.b.stored == gemm::Element::kBf16 ||
                    (kGemm.b.stored == gemm::Element::kE4m3 && kGemm.b.major == gemm::Major::kK &&
                     !kGemm.varlen_k() && kGemm.k_halves() == 1),
                "tensor_map.hpp makes maps of bf16, and of tiles of e4m3");
  out = {};
  out.gmem_offsets = args.gmem_offsets;
  out.segment_rows = int(args.segment_rows);
  out.total_rows = int(args.total_rows);
  out.segments = args.segments;
  out.gmem_tile_counter = args.gmem_tile_counter;
  if (kGemm.hands_over() || kGemm.takes_over()) {
    out.gmem_handover = args.gmem_handover;
    out.handover_segments = experts_handed_over(args.segments);
  }
  if constexpr (kGemm.order.ready_first) {
    // A handover counts on segments that only grow.
    if (args.awaited.gmem_arrivals != nullptr && args.gmem_handover != nullptr) {
      return cudaErrorInvalidValue;
    }
    out.gmem_ready_blocks = args.awaited.gmem_ready_blocks;
    out.gmem_arrivals = args.awaited.gmem_arrivals;
    out.arrivals = args.awaited.arrivals;
  }
  cudaError_t const error = a_params<kGemm>(out, args);
  if (error != cudaSuccess) return error;
  if constexpr (kGemm.varlen_k()) {
    return right_params<kGemm>(out, args);
  } else {
    return b_params<kGemm>(out, args);
  }
}

}  // namespace tessera::cuda::host
