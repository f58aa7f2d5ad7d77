// SPDX-License-Identifier: Apache-2.0
// Epilogues whose accumulators lie in memory: what they store follows from rows, columns and values alone.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cuda/epilogue/activation.cuh"
#include "cuda/epilogue/activation_gradient.cuh"
#include "cuda/epilogue/chunk_sum.cuh"
#include "cuda/epilogue/store.cuh"
#include "cuda/epilogue/store_fp32.cuh"
#include "cuda/gemm/sm90/lent.cuh"
#include "cuda/host/tensor_map.hpp"
#include "cuda/tuning/gemm_backward.hpp"
#include "tests/emulator/lent_sums.hpp"

namespace tessera::cuda {
namespace {

using emulator::bf16_of;
using emulator::Bits;
using emulator::first_wrong;
using emulator::kEnd;
using emulator::kRow;
using emulator::kTile;
using emulator::kUnwritten;
using emulator::Lent;
using emulator::Memory;
using emulator::round;
using emulator::stored;
using emulator::widen;

constexpr ActivationKind kKind = ActivationKind::swiglu;

TEST(LentAccumulators, AreStoredInFp32) {
  constexpr gemm::GemmConfig kGemm = RouterLogitsWide::gemm;
  constexpr int kFirst = kTile * kGemm.tile.n;
  for (int const columns : {kFirst + kGemm.tile.n / 2 + 6, kFirst + 35}) {
    Lent<kGemm> lent;
    Memory<float> out((kEnd + 32) * columns, 0);
    Memory<Bits> bias(columns);
    emulator::fill(bias.get(), columns, 5, 1.0f);
    gemm::StoreFp32Params const p = {.gmem = out.get(),
                                     .gmem_bias = bias.get(),
                                     .columns = columns,
                                     .in_pairs = columns % 2 == 0};
    ASSERT_EQ(lent.run<gemm::StoreFp32Epilogue<emulator::MemoryCore<kGemm>>>(p), "");
    EXPECT_EQ(first_wrong(columns, kFirst,
                          [&](int r, int c, bool exists) {
                            float const y =
                                exists ? lent.sum(r, c - kFirst) + widen(bias[c]) : 0.0f;
                            return out[r * columns + c] != y;
                          }),
              "");
  }
}

TEST(LentAccumulators, AreHeldAndStored) {
  gemm::StoreParams store = {};
  EXPECT_EQ(stored<gemm::StoreDeferred>(store, store, 1.0f), "");
}

template <bool kInterleaved>
std::string activated() {
  constexpr gemm::GemmConfig kGemm = UpProjectionFwdConfig < kKind, gemm::Loader::kTma,
                             kInterleaved ? gemm::Major::kRows : gemm::Major::kK, gemm::Boxes::kAny,
                             kInterleaved ? Columns::kInterleaved : Columns::kHalves > ::gemm;
  constexpr int kFirst = kTile * kGemm.tile.n / 2, n = kFirst + 88;
  Lent<kGemm> lent;
  Memory<Bits> h((kEnd + 32) * 2 * n), a((kEnd + 32) * n), bias(2 * 2 * n);
  emulator::fill(bias.get(), 4 * n, 5, 1.0f);
  gemm::ActivationParams p = {.gmem_h = bf16_of(h.get()),
                              .gmem_a = bf16_of(a.get()),
                              .bias = {},
                              .activation = {.kind = kKind},
                              .columns = n};
  for (int half = 0; half < 2; ++half) {
    p.bias[half] = kInterleaved ? gemm::Bias{bf16_of(bias.get() + half), 2 * n, 2}
                                : gemm::Bias{bf16_of(bias.get() + half * n), 2 * n, 1};
  }
  std::string const fault =
      lent.template run<gemm::ActivationEpilogue<emulator::MemoryCore<kGemm>, kKind, kInterleaved>>(
          p);
  if (!fault.empty()) return fault;
  return first_wrong(n, kFirst, [&](int r, int c, bool exists) {
    float halves[2];
    for (int half = 0; half < 2; ++half) {
      // Of the tile; and of h, whose columns of gate and up are halves, or in turns.
      int const i = c - kFirst;
      int const column = kInterleaved ? 2 * i + half : i / 64 * 128 + half * 64 + i % 64;
      int const of_h = kInterleaved ? 2 * c + half : half * n + c;
      Bits const stored_h = h[r * 2 * n + of_h];
      if (!exists) {
        if (stored_h != kUnwritten) return true;
        continue;
      }
      Bits const wanted = round(lent.sum(r, column) + widen(bias[2 * n + of_h]));
      if (stored_h != wanted) return true;
      halves[half] = widen(wanted);
    }
    if (!exists) return a[r * n + c] != kUnwritten;
    return a[r * n + c] !=
           round(gemm::ActivationFunction<kKind>::forward(p.activation, halves[0], halves[1]));
  });
}

TEST(LentAccumulators, AreActivated) { EXPECT_EQ(activated<false>(), ""); }
TEST(LentAccumulators, AreActivatedWhereGateAndUpComeInTurns) { EXPECT_EQ(activated<true>(), ""); }

// Two chunks of a tile, by both consumer warpgroups of one CTA: they store quads, and add them up when all are there.
TEST(LentAccumulators, OfChunksAreAddedUp) {
  constexpr gemm::GemmConfig kGemm = RouterWgradConfig<128, false>::gemm;
  using Core = emulator::MemoryCore<kGemm>;
  constexpr int kChunks = 2, kRows = kGemm.tile.m - 3, kColumns = kGemm.tile.n - 16;
  constexpr int kSums = kGemm.tile.m * kGemm.tile.n;
  Memory<float> sums(kChunks * kSums), d(kColumns * kRows);
  Memory<float4> parts(kChunks * kSums / 4);
  Memory<std::uint32_t> arrived(1, 0);
  Memory<typename Core::Storage> storage(1);
  for (int i = 0; i < kChunks * kSums; ++i) sums[i] = static_cast<float>(i % 8191) * 0.37f;
  gemm::ChunkSumParams const p = {.gmem_parts = parts.get(),
                                  .gmem_arrived = arrived.get(),
                                  .gmem_d = d.get(),
                                  .d_pitch = kRows,
                                  .is_fp32 = true,
                                  .accumulates = false,
                                  .rows = kRows,
                                  .columns = kColumns,
                                  .terms = 1,
                                  .segments = kChunks,
                                  .m_tiles = 1,
                                  .n_tiles = 1};
  emulator::launch(1, 1, kGemm.consumer_warpgroups * arch::kWarpgroupThreads, 0, [&] {
    int const consumer = static_cast<int>(threadIdx.x) / arch::kWarpgroupThreads;
    int const row = consumer * gemm::kSubtileM;
    gemm::ChunkSumEpilogue<Core> epilogue(*storage.get(), p, consumer);
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      gemm::WorkTile tile = {};
      tile.segment = chunk;
      typename Core::Accumulators acc(sums.get() + chunk * kSums + row * kGemm.tile.n);
      epilogue.begin(tile, row, 1);
      epilogue.settle();
      epilogue.store(acc, tile, row);
    }
    epilogue.drain();
  });
  ASSERT_EQ(emulator::run({.seed = 3, .burst = 8}), "");
  EXPECT_EQ(arrived[0], 0u);
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      float const* const first = &sums[r * kGemm.tile.n + c];
      ASSERT_EQ(d[c * kRows + r], first[0] + first[kSums]) << "row " << r << " column " << c;
    }
  }
}

// Stages are lent as to a GEMM; sums, and pairs of slabs, are those of memory.
template <gemm::GemmConfig kConfig>
struct LendingCore : emulator::MemoryCore<kConfig> {
  using Storage = gemm::SharedStorage<kConfig>;
  using Ring = gemm::PipelineState<kConfig>;
  using LentStages = gemm::BorrowedStages<kConfig>;
};

template <bool kInterleaved>
void differentiate() {
  constexpr gemm::GemmConfig kGemm = DownProjectionDgradConfig < kKind, gemm::Major::kK,
                             gemm::Boxes::kAny, TileWidth::k256,
                             kInterleaved ? Columns::kInterleaved : Columns::kHalves > ::gemm;
  using Core = LendingCore<kGemm>;
  using Epilogue = gemm::ActivationGradientInStages<Core, kKind, kInterleaved>;
  static_assert(gemm::keeps_contract<kGemm.epilogue, Epilogue, typename Core::Accumulators,
                                     typename Core::Ring, typename Core::Storage>());
  constexpr int kRows = kEnd + 20, n = 200, kGroups = 2;
  constexpr int kHalves = kInterleaved ? 1 : 2, kHColumns = 2 * n / kHalves;
  Memory<float> sums(gemm::kSubtileM * kGemm.tile.n), scores(kRows), partials(kRows * kGroups);
  Memory<std::int32_t> permutation(kRows);
  Memory<Bits> h(kRows * 2 * n), dh(kRows * 2 * n), a(kRows * n);
  emulator::fill(h.get(), kRows * 2 * n, 3, 2.0f);
  for (int i = 0; i < gemm::kSubtileM * kGemm.tile.n; ++i) {
    sums[i] = static_cast<float>(i % 1021 - 510) * 0.01f;
  }
  for (int r = 0; r < kRows; ++r) {
    permutation[r] = (7 * r + 3) % kRows;
    scores[r] = 0.125f + 0.01f * static_cast<float>(r);
  }
  gemm::ActivationGradientParams p = {};
  ASSERT_EQ(host::make_halves_map(p.h, h.get(), kRows, kHalves, kHColumns, kGemm.tile.m),
            cudaSuccess);
  ASSERT_EQ(host::make_ragged_store_map(p.dh, dh.get(), kRows, kHalves, kHColumns, kRows,
                                        gemm::kWarpRows),
            cudaSuccess);
  ASSERT_EQ(host::make_ragged_store_map(p.a_scaled, a.get(), kRows, 1, n, kRows, gemm::kWarpRows),
            cudaSuccess);
  p.gmem_partials = partials.get();
  p.gmem_scores = scores.get();
  p.gmem_permutation = permutation.get();
  p.activation = {.kind = kKind};
  p.groups = kGroups;
  p.ragged_extent = kRows;
  p.stores_a = true;
  gemm::WorkTile tile = emulator::kWork;
  tile.n_tile = 0;
  emulator::launch(1, 1, arch::kWarpgroupThreads, sizeof(typename Core::Storage), [&] {
    auto& smem = gemm::shared_storage<kGemm>();
    if (threadIdx.x == 0) {
      for (int s = 0; s < kGemm.stages; ++s) {
        arch::mbarrier_init(&smem.full[s], 1);
        arch::mbarrier_init(&smem.empty[s], 4);
      }
    }
    arch::named_barrier_sync(1, arch::kWarpgroupThreads);
    Epilogue epilogue(smem, p, 1);
    epilogue.begin(tile, kRow, 1);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kGemm.epilogue.lent_stages; ++i) Epilogue::lend(smem, p, i, tile, i);
    }
    __syncwarp();
    typename Core::Ring ring;
    typename Core::Accumulators acc(sums.get());
    epilogue.store(acc, tile, kRow, ring);
    epilogue.settle();
    epilogue.drain();
  });
  ASSERT_EQ(emulator::run({.seed = 3, .burst = 8}), "");
  for (int r = kRow; r < kEnd; ++r) {
    float const s = scores[permutation[r]];
    double ds[kGroups] = {}, size[kGroups] = {};
    for (int c = 0; c < n; ++c) {
      int const gate = r * 2 * n + (kInterleaved ? 2 * c : c), up = gate + (kInterleaved ? 1 : n);
      float const t = sums[(r - kRow) * kGemm.tile.n + c];
      auto const wanted = gemm::ActivationFunction<kKind>::backward(p.activation, widen(h[gate]),
                                                                    widen(h[up]), s * t);
      ASSERT_EQ(dh[gate], round(wanted.dg)) << "row " << r << " column " << c;
      ASSERT_EQ(dh[up], round(wanted.du)) << "row " << r << " column " << c;
      ASSERT_EQ(a[r * n + c], round(s * wanted.a)) << "row " << r << " column " << c;
      ds[c / 128] += double{t} * wanted.a;
      size[c / 128] += std::abs(double{t} * wanted.a);
    }
    for (int g = 0; g < kGroups; ++g) {
      ASSERT_NEAR(partials[r * kGroups + g], ds[g], 1e-5 * size[g]) << "row " << r;
    }
  }
  EXPECT_EQ(dh[(kRow - 1) * 2 * n], kUnwritten);
  EXPECT_EQ(dh[kEnd * 2 * n], kUnwritten);
  EXPECT_EQ(a[kEnd * n], kUnwritten);
}

TEST(LentAccumulators, AreDifferentiated) { differentiate<false>(); }
TEST(LentAccumulators, AreDifferentiatedWhereGateAndUpComeInTurns) { differentiate<true>(); }

}  // namespace
}  // namespace tessera::cuda
