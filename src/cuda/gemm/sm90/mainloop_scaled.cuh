// SPDX-License-Identifier: Apache-2.0
// The mainloop of operands in e4m3 with scales. The tensor cores keep 13 fraction bits of an e4m3 accumulator, so the
// sum of a k_tile, 128 products, goes to registers of its own, is scaled and added to the accumulators in fp32. For the
// whole tile these do not fit: the column groups take turns.
//   a warpgroup: wait full[s] | 4 x m64n128k32 of group 0 -> partial | a piece of the last tile, scales | wait |
//                acc[0] += partial * scales | 4 x m64n128k32 of group 1 -> partial | wait | arrive empty[s] |
//                acc[1] += partial * scales
// It never has two groups of wgmmas in flight; those of the other warpgroup fill the tensor cores meanwhile. Sums are
// those of k_tiles in their order, each added by one FMA.
// Measured without an epilogue: docs/notebook/2026-11-27-fp8-mainloop.md
#pragma once

#include "../../arch/sm90/wgmma_e4m3.cuh"
#include "../scales.cuh"
#include "mainloop.cuh"

namespace tessera::cuda::gemm {

// Factors of a k_tile: scales of a thread's two rows, times those of gate and up, or of the two column groups.
struct ScaleFactors {
  float of[2][2];  // [gate, up][upper, lower row]
};

template <GemmConfig kGemm>
__device__ __forceinline__ ScaleFactors scale_factors(ScaledStorage<kGemm> const& smem, int stage,
                                                      int row) {
  float const upper = smem.a_scales[stage][row], lower = smem.a_scales[stage][row + 8];
  float2 const b = smem.b_scales[stage];
  return {{{upper * b.x, lower * b.x}, {upper * b.y, lower * b.y}}};
}

// acc += partial * scales. In halves registers come as 32 of 64 gate columns, then 32 of up; pairs of them by row.
template <GemmConfig kGemm>
__device__ __forceinline__ void promote(float (&acc)[kGroupColumns / 2],
                                        float const (&partial)[kGroupColumns / 2],
                                        ScaleFactors const& factors, int group) {
  TESSERA_UNROLL
  for (int i = 0; i < kGroupColumns / 2; ++i) {
    int const part = kGemm.b_halves() == 2 ? i / (kGroupColumns / 4) : group;
    acc[i] = fmaf(partial[i], factors.of[part][i / 2 % 2], acc[i]);
  }
}

// The products of a k_tile and of one column group of 64 rows, as one group of wgmmas.
__device__ __forceinline__ void issue_scaled(float (&partial)[kGroupColumns / 2], uint64_t a,
                                             uint64_t b) {
  arch::wgmma_fence();
  TESSERA_UNROLL
  for (int step = 0; step < kScaleBlock / 32; ++step) {
    arch::wgmma_e4m3_m64n128k32(partial, a + step * arch::kWgmmaDescriptorK16,
                                b + step * arch::kWgmmaDescriptorK16, step);
  }
  arch::wgmma_commit();
}

// All k_tiles of 64 rows from `row` of the tile. between(k_tile) runs once in each, under the products of the first
// column group or behind all.
template <GemmConfig kGemm, bool kUnderProducts, class Between>
__device__ __forceinline__ void multiply_scaled(ScaledStorage<kGemm>& smem,
                                                PipelineState<kGemm>& state,
                                                Accumulators<kGemm>& acc, int row, int k_tiles,
                                                Between between) {
  constexpr uint64_t kGroupStep = kGemm.b.bytes(kGroupColumns, kGemm.tile.k) / 16;
  int const own_row = row + arch::warp_in_warpgroup() * kWarpRows + arch::lane_idx() / 4;
  // Not by a flag of the first products: ptxas puts the selects between the wgmmas of a group.
  TESSERA_UNROLL
  for (int i = 0; i < kGroupColumns; ++i) Fragments::of(acc, i / 64)[i % 64] = 0;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    int const stage = state.stage;
    arch::mbarrier_wait(&smem.full[stage], state.phase);
    arch::fence_proxy_async_shared();  // cp.async wrote A through the generic proxy
    uint64_t const a = arch::wgmma_descriptor_k_major(&smem.a[stage][row * kGemm.tile.k]);
    uint64_t const b = arch::wgmma_descriptor_k_major(smem.b[stage]);
    ScaleFactors factors;
    TESSERA_UNROLL
    for (int group = 0; group < 2; ++group) {
      float partial[kGroupColumns / 2];
      issue_scaled(partial, a, b + group * kGroupStep);
      if (group == 0) {
        if constexpr (kUnderProducts) between(k_tile);
        factors = scale_factors<kGemm>(smem, stage, own_row);
      }
      arch::wgmma_wait<0>();
      if (group == 1) release_stage<kGemm>(smem, stage);
      promote<kGemm>(Fragments::of(acc, group), partial, factors, group);
    }
    state.advance();
    if constexpr (!kUnderProducts) between(k_tile);
  }
}

// The pieces of the tile that an epilogue holds, spread over the k loop of the next one; the two warpgroups in turns.
template <class Epilogue>
class ScaledPieces {
 public:
  __device__ __forceinline__ ScaledPieces(Epilogue& epilogue, int consumer)
      : epilogue_(epilogue), consumer_(consumer) {}

  __device__ __forceinline__ void add() { next_ = 0; }
  __device__ __forceinline__ void begin(int k_tiles) {
    every_ = max(k_tiles / Epilogue::kPieces, 1);
    at_once_ = k_tiles >= Epilogue::kPieces ? 1 : k_tiles >= Epilogue::kPieces / 2 ? 2 : 4;
    last_ = k_tiles - 1;
    due_ = next_ == Epilogue::kPieces ? INT_MAX : min(consumer_ * max(every_ / 2, 1), last_);
  }
  // In the last k_tile all that are left: the accumulators are held next.
  __device__ __forceinline__ void between(int k_tile) {
    if (k_tile != due_) return;
    due_ = min(due_ + every_, last_);
    work_until(k_tile == last_ ? Epilogue::kPieces : min(next_ + at_once_, Epilogue::kPieces));
    if (next_ == Epilogue::kPieces) due_ = INT_MAX;
  }
  __device__ __forceinline__ void finish() { work_until(Epilogue::kPieces); }

 private:
  __device__ __forceinline__ void work_until(int end) {
#pragma unroll 1
    while (next_ < end) epilogue_.work(next_++);
  }

  Epilogue& epilogue_;
  int consumer_;
  int next_ = Epilogue::kPieces;
  int due_, every_, at_once_, last_;
};

// Each warpgroup owns 64 rows of every tile, and holds a tile while it multiplies the next.
template <GemmConfig kGemm, class Epilogue>
__device__ __forceinline__ void consume_scaled(ScaledStorage<kGemm>& smem, GemmParams const& p,
                                               typename Epilogue::Params const& epilogue_params,
                                               int consumer) {
  arch::acquire_registers<kGemm.consumer_registers()>();
  Epilogue epilogue(smem, epilogue_params, consumer);
  int const row = consumer * kSubtileM;
  WorkQueue<kGemm> queue(smem);
  PipelineState<kGemm> state;
  Accumulators<kGemm> acc;
  WorkTile tile;
  WorkTile ahead;
  ScaledPieces<Epilogue> pieces(epilogue, consumer);
  bool more = queue.read(tile);
  while (more) {
    if (tile.rows <= row) {  // what is held waits for the next tile
      pass<kGemm>(smem, state, p.k_tiles, consumer);
      more = queue.read(tile);
      continue;
    }
    pieces.begin(p.k_tiles);
    multiply_scaled<kGemm, Epilogue::kPiecesUnderProducts>(
        smem, state, acc, row, p.k_tiles, [&](int k_tile) { pieces.between(k_tile); });
    more = queue.read(ahead);
    epilogue.keep(acc, tile, tile.row + row);
    pieces.add();
    tile = ahead;
  }
  pieces.finish();
}

}  // namespace tessera::cuda::gemm
