// SPDX-License-Identifier: Apache-2.0
// chunk_sum epilogue (varlen-K): the segments are chunks of one reduction, D = [D +] sum of their tiles, in order; of
// columns that are terms of one, the first's before the second's.
// A warp stores its 16 rows of a tile in quads (gemm/sm90/accumulators.cuh) and counts that part under the next tile's
// k loop, or at its end. Once its CTA has no tile left it waits until all parts of all tiles have been counted, and
// adds up its share of D. Whoever counts has started: CTAs draw their first tile, too (draws_first), so that none is
// left to a CTA that is not resident while others wait.
#pragma once

#include <cuda_bf16.h>

#include "../arch/load_global.cuh"
#include "../arch/named_barrier.cuh"
#include "../arch/signal.cuh"
#include "../arch/warp.cuh"
#include "../gemm/scheduler.cuh"
#include "../gemm/storage.cuh"

namespace tessera::cuda::gemm {

struct ChunkSumParams {
  float4* gmem_parts;      // (segments, m_tiles, warps of a tile, columns / 8, 32 lanes)
  uint32_t* gmem_arrived;  // one word, 0 before and after every launch
  void* gmem_d;            // (columns / terms, rows) fp32 or bf16
  int64_t d_pitch;         // elements from one column's rows to the next one's
  bool is_fp32, accumulates;
  int rows, columns;  // columns / terms: a multiple of 8
  int terms;          // columns c, c + columns / terms, .. are added up, in order
  int segments, m_tiles, n_tiles;
};

template <class Core>
class ChunkSumEpilogue {
 public:
  static constexpr GemmConfig kGemm = Core::kGemm;
  using Accumulators = typename Core::Accumulators;
  static constexpr EpilogueMode kMode = EpilogueMode::kInline;
  using Params = ChunkSumParams;

  __device__ __forceinline__ ChunkSumEpilogue(typename Core::Storage&, Params const& p,
                                              int consumer)
      : p_(p),
        consumer_(consumer),
        warp_(consumer * (kSubtileM / kWarpRows) + arch::warp_in_warpgroup()) {
    static_assert(kGemm.varlen_k() && !kGemm.ping_pong() && kGemm.draws_first());
  }

  __device__ __forceinline__ void begin(WorkTile const&, int, int) {}

  __device__ __forceinline__ void store(Accumulators& acc, WorkTile const& tile, int) {
    int const first = tile.n_tile * kTileBlocks, left = blocks() - first;
    float4* const gmem = part(tile.segment, tile.row / kGemm.tile.m * kTileWarps + warp_, first);
    TESSERA_UNROLL
    for (int block = 0; block < kTileBlocks; ++block) {
      if (block < left) gmem[block * arch::kWarpThreads] = acc.quad(block);
    }
    is_counted_ = false;
  }

  // The part stored last is there.
  __device__ __forceinline__ void settle() {
    if (is_counted_) return;
    is_counted_ = true;
    __syncwarp();
    if (arch::lane_idx() == 0) arch::add_release_gpu(p_.gmem_arrived, 1);
  }

  __device__ __forceinline__ void drain() {
    settle();
    uint32_t const parts = p_.segments * p_.m_tiles * p_.n_tiles * kTileWarps;
    bool const waits = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads == 0;
    if (waits) {
      while (arch::load_acquire_gpu(p_.gmem_arrived) < parts) {
      }
    }
    arch::named_barrier_sync(kBarrierSlabs + consumer_, arch::kWarpgroupThreads);
    // The last to leave makes the word 0.
    uint32_t const leaving = gridDim.x * kGemm.consumer_warpgroups;
    if (waits && arch::count_acq_rel_gpu(p_.gmem_arrived, 1) == parts + leaving - 1) {
      *p_.gmem_arrived = 0;
    }
    if (p_.is_fp32) {
      add_up<float>();
    } else {
      add_up<bf16>();
    }
  }

 private:
  static constexpr int kTileWarps = kGemm.tile.m / kWarpRows;
  static constexpr int kBlockColumns = Accumulators::kQuadColumns;
  static constexpr int kTileBlocks = kGemm.tile.n / kBlockColumns;
  static constexpr int kAhead = 12;  // loads of a lane on their way

  __device__ __forceinline__ int blocks() const { return p_.columns / kBlockColumns; }
  // This lane's values of 16 rows, the `strip`-th, in a block of columns.
  __device__ __forceinline__ float4* part(int segment, int strip, int block) const {
    int64_t const strips = int64_t{p_.m_tiles} * kTileWarps;
    return p_.gmem_parts + ((segment * strips + strip) * blocks() + block) * arch::kWarpThreads +
           arch::lane_idx();
  }

  // Warps take parts of D in turns.
  template <class T>
  __device__ __forceinline__ void add_up() const {
    int const own_blocks = blocks() / p_.terms;
    int const all = p_.m_tiles * kTileWarps * own_blocks;
    int64_t const stride = int64_t{p_.m_tiles} * kTileWarps * blocks() * arch::kWarpThreads;
    int const warps = static_cast<int>(gridDim.x) * kTileWarps;
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x) * kTileWarps + warp_; i < all; i += warps) {
      int const strip = i / own_blocks, block = i - strip * own_blocks;
      float sum[4] = {};
#pragma unroll 1
      for (int term = 0; term < p_.terms; ++term) {
        add_chunks(part(0, strip, block + term * own_blocks), stride, sum);
      }
      TESSERA_UNROLL
      for (int j = 0; j < 4; ++j) {
        put<T>(strip * kWarpRows + Accumulators::quad_row(j),
               block * kBlockColumns + Accumulators::quad_column(j), sum[j]);
      }
    }
  }

  __device__ __forceinline__ void add_chunks(float4 const* gmem, int64_t stride,
                                             float (&sum)[4]) const {
#pragma unroll 1
    for (int chunk = 0; chunk < p_.segments; chunk += kAhead) {
      uint4 values[kAhead];
      TESSERA_UNROLL
      for (int j = 0; j < kAhead; ++j) {  // 0 where there is none: sums are never -0
        values[j] = arch::load_streaming_16(gmem, chunk + j < p_.segments);
        gmem += stride;
      }
      TESSERA_UNROLL
      for (int j = 0; j < kAhead; ++j) {
        sum[0] += __uint_as_float(values[j].x);
        sum[1] += __uint_as_float(values[j].y);
        sum[2] += __uint_as_float(values[j].z);
        sum[3] += __uint_as_float(values[j].w);
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void put(int row, int column, float value) const {
    if (row >= p_.rows) return;
    T& d = static_cast<T*>(p_.gmem_d)[column * p_.d_pitch + row];
    d = static_cast<T>(p_.accumulates ? value + static_cast<float>(d) : value);
  }

  Params const& p_;
  int consumer_;
  int warp_;  // among those of a tile
  bool is_counted_ = true;
};

}  // namespace tessera::cuda::gemm
