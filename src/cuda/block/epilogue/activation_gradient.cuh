// SPDX-License-Identifier: Apache-2.0
// activation_gradient epilogue: with t = accumulators (dO w_down), s the row's score and (g, u) = h
//   ds partial = <t, act(h)> over 128 columns,   dh = J_act(h)^T (s t),   a' = s act(h)
// from fp32 values, each stored value rounded once.
//
// Each warp works alone, on blocks of its 16 rows x 64 columns. Their h comes by TMA, that of the first two
// blocks under the k loop; dh overwrites it, as each lane reads and writes the same matrix rows; then TMA
// stores it.
//   slabs of a warp  {gate, up} of buffer 0 | {gate, up} of buffer 1 | a'       (not gated: one instead of two)
//   block b          wait for h | first half, a' kept | stores of b - 1 were read: load b + 1 | second half | store
#pragma once

#include "../activation.cuh"
#include "../slab_store.cuh"
#include "../tile_scheduler.cuh"

namespace tessera::cuda::block {

constexpr int kGradientRows = 16;  // of a block: a warp's share of 64

struct ActivationGradientParams {
  CUtensorMap h;                // (column, half, row), 64 x 1 x 16
  CUtensorMap dh;               // ragged (column, half, row, end), 64 x 1 x 16 x 1
  CUtensorMap a_scaled;         // the same with one half
  float* gmem_partials;         // (rows, groups), by row; null: not stored
  float const* gmem_scores;     // by slot
  int const* gmem_permutation;  // row -> slot
  Activation activation;
  int groups;         // of 128 columns
  int ragged_extent;  // of the row dimension of dh and a_scaled
  bool stores_a;
};

template <GemmConfig kGemm, ActivationKind kKind>
class ActivationGradientEpilogue {
 public:
  using Params = ActivationGradientParams;

  __device__ __forceinline__ ActivationGradientEpilogue(SharedStorage<kGemm>& smem, Params const& p,
                                                        int consumer)
      : p_(p), slabs_(smem, consumer) {
    static_assert(kGemm.b_halves == 1 && kGemm.store_slabs == kLoadBuffers * kHalves + 1);
    int const warp = static_cast<int>(threadIdx.x) % arch::kWarpgroupThreads / arch::kWarpThreads;
    warp_row_ = warp * kGradientRows;
    loads_ = smem.loads[4 * consumer + warp];
  }

  // `subtiles` times 64 rows from `row` will be stored.
  __device__ __forceinline__ void begin(WorkTile const& tile, int row, int subtiles) {
    first_row_ = row + warp_row_;
    first_column_ = tile.n_tile * kGemm.tile.n;
    blocks_ = subtiles * kSubtileBlocks;
    int const lane = arch::lane_idx();
    if (lane == 0) {
      arch::tma_store_wait_read<0>();
      load(0);
      load(1);
    }
    TESSERA_UNROLL
    for (int i = 0; i < kScores; ++i) {
      int const r = first_row_ + (2 * i + lane / 16) * kSubtileM + lane % 16;
      score_[i] = r < tile.end ? p_.gmem_scores[p_.gmem_permutation[r]] : 0.0f;
    }
  }

  __device__ __forceinline__ void store(Accumulators<kGemm>& acc, WorkTile const& tile, int row) {
    int const subtile = (row + warp_row_ - first_row_) / kSubtileM;
    float const s[2] = {score(subtile, 0), score(subtile, 8)};
    TESSERA_UNROLL
    for (int g = 0; g < kGemm.column_groups(); ++g) {
      float ds[2] = {0.0f, 0.0f};
      TESSERA_UNROLL
      for (int part = 0; part < 2; ++part) {
        int const buffer = part;  // blocks alternate
        int const block = subtile * kSubtileBlocks + 2 * g + part;
        arch::mbarrier_wait(&loads_[buffer], phase_ >> buffer & 1);
        phase_ ^= 1u << buffer;
        differentiate(acc[g], part, buffer, block, s, ds);
        arch::fence_proxy_async_shared();
        __syncwarp();
        // A warp may lie past the segment altogether.
        if (arch::lane_idx() == 0 && row_of(block) < tile.end) {
          store_block(buffer, block, tile.end);
        }
      }
      store_partials(ds, tile, row, g);
    }
  }

  __device__ __forceinline__ void drain() const {
    if (arch::lane_idx() == 0) arch::tma_store_wait_read<0>();
  }

 private:
  using Function = ActivationFunction<kKind>;
  static constexpr int kHalves = Function::kGated ? 2 : 1;
  static constexpr int kSlabA = kLoadBuffers * kHalves;
  static constexpr int kSubtileBlocks = kGemm.tile.n / kSlabColumns;
  static constexpr int kScores = (kGemm.warpgroup_subtiles() + 1) / 2;

  __device__ __forceinline__ int column_of(int block) const {
    return first_column_ + block % kSubtileBlocks * kSlabColumns;
  }
  __device__ __forceinline__ int row_of(int block) const {
    return first_row_ + block / kSubtileBlocks * kSubtileM;
  }
  // This warp's rows of a slab.
  __device__ __forceinline__ bf16* slab(int idx) const {
    return slabs_.address(idx) + warp_row_ * kSlabColumns;
  }

  // By one lane, as store_block().
  __device__ __forceinline__ void load(int block) const {
    int const buffer = block % kLoadBuffers;
    arch::Mbarrier* const full = &loads_[buffer];
    arch::mbarrier_arrive_expect_tx(full, kHalves * kGradientRows * kSlabColumns * sizeof(bf16));
    TESSERA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      arch::tma_load(slab(buffer * kHalves + half), &p_.h, full, column_of(block), half,
                     row_of(block));
    }
  }

  __device__ __forceinline__ void store_block(int buffer, int block, int end) const {
    int const column = column_of(block);
    int const ragged_row = p_.ragged_extent + row_of(block) - end;
    uint64_t const policy = arch::l2_evict_first();
    TESSERA_UNROLL
    for (int half = 0; half < kHalves; ++half) {
      arch::tma_store(&p_.dh, slab(buffer * kHalves + half), column, half, ragged_row, end, policy);
    }
    if (p_.stores_a) {
      arch::tma_store(&p_.a_scaled, slab(kSlabA), column, 0, ragged_row, end, policy);
    }
    arch::tma_store_commit();
  }

  // Of row lane/4 + offset of the warp's 16.
  __device__ __forceinline__ float score(int subtile, int offset) const {
    float const mine = kScores == 1 || subtile < 2 ? score_[0] : score_[kScores - 1];
    return __shfl_sync(kAllLanes, mine, subtile % 2 * 16 + arch::lane_idx() / 4 + offset);
  }

  // One block: columns 64*part.. of the group whose accumulators these are.
  __device__ __forceinline__ void differentiate(float const (&acc)[kGroupColumns / 2], int part,
                                                int buffer, int block, float const (&s)[2],
                                                float (&ds)[2]) const {
    constexpr int kMatrices = kSlabColumns / 16;  // 16x16 values each
    uint32_t a[2][4];
    TESSERA_UNROLL
    for (int m = 0; m < kMatrices; ++m) {
      int const j = 2 * m;
      uint32_t const smem_gate = slabs_.matrix_row(buffer * kHalves, j);
      uint32_t const smem_up = slabs_.matrix_row(buffer * kHalves + 1, j);
      uint32_t g[4], u[4] = {};
      arch::ldmatrix_x4(smem_gate, g[0], g[1], g[2], g[3]);
      if constexpr (kHalves == 2) arch::ldmatrix_x4(smem_up, u[0], u[1], u[2], u[3]);
      TESSERA_UNROLL
      for (int q = 0; q < 4; ++q) {
        int const first = part * (kGroupColumns / 4) + 4 * (j + q / 2) + 2 * (q % 2);
        differentiate_pair(&acc[first], s[q % 2], g[q], u[q], a[m % 2][q], ds[q % 2]);
      }
      arch::stmatrix_x4(smem_gate, g[0], g[1], g[2], g[3]);
      if constexpr (kHalves == 2) arch::stmatrix_x4(smem_up, u[0], u[1], u[2], u[3]);
      if (m == kMatrices / 2 - 1) {
        if (arch::lane_idx() == 0) {
          arch::tma_store_wait_read<0>();
          if (block > 0 && block + 1 < blocks_) load(block + 1);
        }
        __syncwarp();
      }
      if (m % 2 == 1) {
        TESSERA_UNROLL
        for (int i = 0; i < 2; ++i) {
          arch::stmatrix_x4(slabs_.matrix_row(kSlabA, j - 2 + 2 * i), a[i][0], a[i][1], a[i][2],
                            a[i][3]);
        }
      }
    }
  }

  // Two neighbouring columns: t, (g, u) -> (dg, du), a'.
  __device__ __forceinline__ void differentiate_pair(float const* t, float s, uint32_t& g,
                                                     uint32_t& u, uint32_t& a, float& ds) const {
    float2 const gate = arch::unpack_bf16(g);
    float2 const up = arch::unpack_bf16(u);
    auto const low = Function::backward(p_.activation, gate.x, up.x, s * t[0]);
    auto const high = Function::backward(p_.activation, gate.y, up.y, s * t[1]);
    ds = fmaf(t[0], low.a, ds);
    ds = fmaf(t[1], high.a, ds);
    g = arch::pack_bf16(low.dg, high.dg);
    u = arch::pack_bf16(low.du, high.du);
    a = arch::pack_bf16(s * low.a, s * high.a);
  }

  // The four lanes of a row hold the sums of its 128 columns.
  __device__ __forceinline__ void store_partials(float (&ds)[2], WorkTile const& tile, int row,
                                                 int g) const {
    if (p_.gmem_partials == nullptr) return;
    int const lane = arch::lane_idx();
    int const group = tile.n_tile * kGemm.column_groups() + g;
    TESSERA_UNROLL
    for (int half = 0; half < 2; ++half) {
      ds[half] += __shfl_xor_sync(kAllLanes, ds[half], 1);
      ds[half] += __shfl_xor_sync(kAllLanes, ds[half], 2);
      int const r = row + warp_row_ + lane / 4 + 8 * half;
      if (lane % 4 == 0 && r < tile.end && group < p_.groups) {
        p_.gmem_partials[int64_t{r} * p_.groups + group] = ds[half];
      }
    }
  }

  Params const& p_;
  SlabStore<kGemm> slabs_;
  arch::Mbarrier* loads_;
  uint32_t phase_ = 0;  // bit b: parity of the next load into buffer b
  int warp_row_;        // first of the warp's 16 rows, among 64
  int first_row_, first_column_;
  int blocks_;
  float score_[kScores];  // lane l: of row l % 16 of the warp's in subtile l/16 (+ 2i)
};

}  // namespace tessera::cuda::block
