// SPDX-License-Identifier: Apache-2.0
// A Core (gemm/sm90/core.cuh) without tensor cores: the accumulators are a matrix in the host's memory, 64 rows one
// behind the other, and rows are held in another. Two lanes share a row, and have two of its columns in turns: another
// arrangement than that of any fragment, so that an epilogue which relies on one gives wrong results.
#pragma once

#include "cuda/arch/approx_math.cuh"
#include "cuda/arch/load_shared.cuh"
#include "cuda/arch/warp.cuh"
#include "cuda/gemm/config.hpp"

namespace tessera::emulator {

namespace arch = cuda::arch;

template <cuda::gemm::GemmConfig kConfig>
struct MemoryCore {
  static constexpr cuda::gemm::GemmConfig kGemm = kConfig;
  static constexpr int kSubtileM = cuda::gemm::kSubtileM, kWarpRows = cuda::gemm::kWarpRows;
  static constexpr int kSlabColumns = cuda::gemm::kSlabColumns;

  struct Storage {
    alignas(16) std::uint16_t held[kSubtileM][kGemm.tile.n];  // bf16
  };
  struct Ring {};

  class Accumulators {
   public:
    static constexpr int kSlabs = kGemm.tile.n / kSlabColumns;
    static constexpr int kRows = 1;
    static constexpr int kStrips = kSlabColumns / 16, kStripPairs = 4;
    static constexpr int kPairs = kStrips * kStripPairs;
    static constexpr int kColumnStep = 4, kColumnPairStep = 2;
    static constexpr int kQuadColumns = 8;

    explicit Accumulators(float* sums) : sums_(sums) {}

    static int warp_row(int first, int) { return first + arch::lane_idx() / 2; }
    static int row(int first, int i) {
      return warp_row(first + arch::warp_in_warpgroup() * kWarpRows, i);
    }
    static float sum_of_row(float value) {
      return value + __shfl_xor_sync(arch::kAllLanes, value, 1);
    }
    static bool speaks_for_row() { return arch::lane_idx() % 2 == 0; }
    static int column(int first) { return first + arch::lane_idx() % 2 * 2; }
    static int column_pair(int first) { return first + arch::lane_idx() % 2; }

    template <class F>
    void for_each_columns(int slab, int first, F f) {
      visit(slab, 1, column(first), kColumnStep, f);
    }
    template <class F>
    void for_each_column_pair(int slab, int slabs, int first, F f) {
      visit(slab, slabs, column_pair(first), kColumnPairStep, f);
    }
    template <class F>
    void for_each(int row, int column, F f) {
      for (int slab = 0; slab < kSlabs; ++slab) {
        for_each_columns(slab, column + slab * kSlabColumns, [&](int c, auto rows) {
          rows(row, [&](int r, float& left, float& right) {
            f(r, c, left);
            f(r, c + 1, right);
          });
        });
      }
    }
    template <class F>
    void for_each_pair(int slab, int strip, F f) {
      for (int i = 0; i < kStripPairs; ++i) {
        float* const pair = at(slab, strip * kStripPairs + i);
        f(i, 0, pair[0], pair[1]);
      }
    }
    std::uint32_t packed(int slab, int i) const {
      float const* const pair = at(slab, i);
      return arch::pack_bf16(pair[0], pair[1]);
    }

    float4 quad(int i) const {
      constexpr int kQuads = kSlabColumns / kQuadColumns;
      float const* const left = at(i / kQuads, i % kQuads * 2);
      float const* const right = at(i / kQuads, i % kQuads * 2 + 1);
      return {left[0], left[1], right[0], right[1]};
    }
    static int quad_row(int) { return warp_row(0, 0); }
    static int quad_column(int j) { return column(0) + j / 2 * kColumnStep + j % 2; }

   private:
    template <class F>
    void visit(int slab, int slabs, int first, int step, F f) {
      for (int i = 0; i < slabs * kPairs; ++i) {
        float* const pair = at(slab + i / kPairs, i % kPairs);
        f(first + step * i, [&](int first_row, auto g) { g(row(first_row, 0), pair[0], pair[1]); });
      }
    }
    float* at(int slab, int i) const {
      return sums_ + row(0, 0) * kGemm.tile.n + column(slab * kSlabColumns) + kColumnStep * i;
    }

    float* sums_;
  };

  // A lane's pairs of a slab, whose rows are 128 bytes, swizzled.
  struct SlabRows {
    template <class Slab>
    static void load(Slab const* slab, int strip, std::uint32_t (&pairs)[4]) {
      for (int i = 0; i < 4; ++i) std::memcpy(&pairs[i], at(slab, column(strip, i)), 4);
    }
    template <class Slab>
    static void store(Slab* slab, int strip, std::uint32_t const (&pairs)[4]) {
      for (int i = 0; i < 4; ++i) std::memcpy(at(slab, column(strip, i)), &pairs[i], 4);
    }
    template <class Slab>
    static uint2 load_doubled(Slab* first, Slab* second, int strip, int i) {
      uint2 values;
      std::memcpy(&values, doubled(first, second, strip, i), sizeof(values));
      return values;
    }
    template <class Slab>
    static void store_doubled(Slab* first, Slab* second, int strip, int i, uint2 values) {
      std::memcpy(doubled(first, second, strip, i), &values, sizeof(values));
    }

   private:
    static int column(int strip, int i) {
      return Accumulators::column(strip * 16) + i * Accumulators::kColumnStep;
    }
    template <class Slab>
    static char* at(Slab* slab, int column) {
      int const row = Accumulators::row(0, 0);
      auto* const bytes = const_cast<char*>(reinterpret_cast<char const*>(slab));
      return bytes + row * 128 + ((column / 8 ^ row % 8) << 4) + column % 8 * 2;
    }
    template <class Slab>
    static char* doubled(Slab* first, Slab* second, int strip, int i) {
      int const c = 2 * column(strip, i);
      return at(c < kSlabColumns ? first : second, c % kSlabColumns);
    }
  };

  // Rows as they are held for a deferred epilogue, whose pieces are as those of gemm/sm90/deferred.cuh.
  class DeferredRows {
   public:
    struct Piece {
      std::uint16_t const* at;
      int row, group, column;

      uint4 load(int slab) const {
        uint4 values;
        std::memcpy(&values, at + slab * kSlabColumns, sizeof(values));
        return values;
      }
    };

    DeferredRows(Storage& storage, int) : storage_(storage) {}

    template <int kGroup>
    void keep(Accumulators const& acc) {
      for (int slab = 2 * kGroup; slab < 2 * kGroup + 2; ++slab) {
        for (int i = 0; i < Accumulators::kPairs; ++i) {
          std::uint32_t const pair = acc.packed(slab, i);
          int const column =
              Accumulators::column(slab * kSlabColumns) + Accumulators::kColumnStep * i;
          std::memcpy(&storage_.held[Accumulators::row(0, 0)][column], &pair, sizeof(pair));
        }
      }
      __syncwarp();
    }
    Piece take(int piece) const {
      int const row = piece % 4 * 4 + arch::lane_idx() / 8, column = arch::lane_idx() % 8 * 8;
      auto const& held = storage_.held[arch::warp_in_warpgroup() * kWarpRows + row];
      return {&held[piece / 4 * cuda::gemm::kGroupColumns + column], row, piece / 4, column};
    }

   private:
    Storage& storage_;
  };
};

}  // namespace tessera::emulator
