// SPDX-License-Identifier: Apache-2.0
// The epilogue of a down task works under the k loop of the next one: every warp pushes the 16 rows of its accumulators
// to the slots of their pairs, or leaves them in the pool for a partial combine (partial_combine.cuh). In training it
// stores h of an up task in the same way (saved_pass.cuh). Values are rounded to bf16 at once and held until then, the
// first 64 columns in shared memory, the others in 48 registers of a thread, which take their place by quarters:
//   at once           | round; quarter 0 to shared memory
//   behind a k_tile   | [next quarter to shared memory] 8 rows of a quarter to their place, 128 bytes by eight lanes
// All of it at once is 6% of a pass's cycles, in which tensor cores wait (docs/notebook/2026-11-25-deferred-rows.md).
#pragma once

#include "cuda/arch/store_global.cuh"
#include "cuda/gemm/sm90/accumulators.cuh"
#include "cuda/gemm/sm90/warp_rows.cuh"
#include "expert_parallel/fused/forward_pass.cuh"
#include "expert_parallel/fused/warp_rows.cuh"

namespace tessera::expert_parallel {

// Each warp has a Push of its own; warps share nothing. kPartialCombine: Transfer::partial_combine. kGatedH: h of gated
// up tasks is saved as well, whose quarters belong to the gate half and the up half in turns. LastTask calls work() and
// announces when all is done, so that drain() has nothing to wait for.
template <bool kPartialCombine, bool kGatedH>
class Push {
 public:
  static constexpr gemm::EpilogueMode kMode = gemm::EpilogueMode::kDeferred;

  __device__ Push(Pass const& pass, int consumer) : pass_(pass) {
    int const lane = arch::lane_idx(), warp = arch::warp_in_warpgroup();
    std::uint32_t const rows = arch::shared_address(pass.smem.gemm.slabs[consumer][0]) +
                               warp * (gemm::kWarpRows * kWarpRowBytes);
    matrix_row_ = rows + gemm::warp_matrix_row();
    chunk_ = rows + chunk_of_lane();
    to_ = pass.smem.push_to[4 * consumer + warp] + lane / kLanesOfRow;
  }

  __device__ void begin(gemm::WorkTile const&, int, int) {}

  // Returns where row `lane` of the warp's 16 goes, which is known before the tile is multiplied out.
  __device__ char* destination(gemm::WorkTile const& tile, int first) const {
    ExchangeArguments const& p = pass_.p.exchange;
    int const row_of_tile = first + gemm::kWarpRows * arch::warp_in_warpgroup() + arch::lane_idx();
    if (arch::lane_idx() >= gemm::kWarpRows || row_of_tile >= tile.rows) return nullptr;
    std::int64_t const pool_row = std::int64_t{tile.row} + row_of_tile;
    uint2 const origin = *row_origin(p, pool_row);
    if (kPartialCombine && origin.y == kStays) return p.gmem_pool + pool_row * (2 * p.shape.hidden);
    int const token = p.token_of(origin.x);
    std::int64_t const slot =
        p.window.slot(token, static_cast<std::int32_t>(origin.x) - token * p.shape.max_top_k);
    return peer_of(p, origin.y).store_if_local<OtherWay::kStaged>(slot);
  }

  // Sets where the rows go that keep() gets next.
  __device__ void aim(char* to) { next_to_ = to; }

  // Holds y of a down task. All pieces of what was held before are done.
  template <class Rounded>
  __device__ void keep(Rounded rounded, gemm::WorkTile const& tile, int /*row*/) {
    hold(rounded, tile.n_tile * kTileColumns, pass_.shape().hidden, next_to_);
  }
  // Holds y, or h of an up task. Row `lane` goes to `to`, a row of `columns` columns of which the tile's begin at
  // `first_column`.
  template <class Rounded>
  __device__ void hold(Rounded rounded, int first_column, int columns, char* to) {
    columns_ = columns - first_column;
    if (arch::lane_idx() < gemm::kWarpRows) {
      auto** const of_warp = to_ - arch::lane_idx() / kLanesOfRow;
      of_warp[arch::lane_idx()] = to == nullptr ? nullptr : to + 2 * first_column;
    }
    TESSERA_UNROLL
    for (int i = 0; i < 3 * kPacked; ++i) held_[i] = rounded(kPacked + i);
    fill([&](int i) { return rounded(i); });
    next_ = 0;
  }

  // Call it when all pieces are done: the compiler may then reuse the registers that held them.
  __device__ void drop() {
    TESSERA_UNROLL
    for (std::uint32_t& pair : held_) pair = 0;
  }

  // Says that there are pieces to do, of which next() is the first.
  __device__ bool pending() const { return next_ < kPieces; }
  __device__ int next() const { return next_; }

  __device__ void work(int piece) { work_of(piece, false); }
  // Does a piece, which may be of h of an up task.
  __device__ void work_of(int piece, bool is_h) {
    int const quarter = piece / kPiecesOfQuarter;
    if (piece % kPiecesOfQuarter == 0) {
      TESSERA_UNROLL
      for (int held = 0; held < 3; ++held) {  // registers need an index that the compiler knows
        if (quarter == held + 1) fill([&](int i) { return held_[held * kPacked + i]; });
      }
    }
    std::uint32_t const lane = arch::forgotten(arch::lane_idx());
    bool const is_gated = kGatedH && is_h;
    int const column = (is_gated ? quarter / 2 : quarter) * kQuarterColumns +
                       static_cast<int>(lane % kLanesOfRow * 8);
    int const place = is_gated && quarter % 2 != 0 ? column + pass_.shape().intermediate : column;
    std::uint32_t const chunk = arch::forgotten(chunk_);
    TESSERA_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const fours = piece % kPiecesOfQuarter * 2 + i;
      uint4 const bits = load_warp_rows(chunk, fours);
      char* const to = to_[4 * fours];
      if (to == nullptr || column >= columns_) continue;
      if (is_gated) {
        arch::store_streaming_16(to + 2 * place, bits);
      } else {
        *reinterpret_cast<uint4*>(to + 2 * place) = bits;
      }
    }
    next_ = piece + 1;
  }

  __device__ void drain() const {}

 private:
  static constexpr int kQuarterColumns = gemm::kSlabColumns;
  static constexpr int kPacked = gemm::Accumulators<kPlain>::kPairs;  // registers of a quarter
  static constexpr int kPiecesOfQuarter = 2;
  static constexpr int kPieces = 4 * kPiecesOfQuarter;
  static_assert(4 * kQuarterColumns == kTileColumns && 2 * kQuarterColumns == kWarpRowBytes);

  template <class Packed>
  __device__ void fill(Packed packed) const {
    __syncwarp();  // the quarter before has been read
    gemm::fill_warp_rows(matrix_row_, packed);
    __syncwarp();
  }

  Pass const& pass_;
  // In shared memory, of this lane: for fill_warp_rows, for load_warp_rows, and where its rows go, four apart, from the
  // tile's first column on; null: there is no such row.
  std::uint32_t matrix_row_, chunk_;
  char** to_;
  std::uint32_t held_[3 * kPacked];
  int columns_ = 0;  // of a row, or of its halves, from the tile's first one on
  int next_ = kPieces;
  char* next_to_ = nullptr;
};

}  // namespace tessera::expert_parallel
