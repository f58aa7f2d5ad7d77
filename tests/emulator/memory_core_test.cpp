// SPDX-License-Identifier: Apache-2.0
// Epilogues whose accumulators lie in memory: what they store follows from rows, columns and values alone.
#include <gtest/gtest.h>

#include <string>

#include "cuda/epilogue/activation.cuh"
#include "cuda/epilogue/chunk_sum.cuh"
#include "cuda/epilogue/store.cuh"
#include "cuda/epilogue/store_fp32.cuh"
#include "cuda/tuning/gemm_backward.hpp"
#include "tests/emulator/lent_sums.hpp"

namespace tessera::cuda {
namespace {

using emulator::bf16_of;
using emulator::Bits;
using emulator::first_wrong;
using emulator::kEnd;
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

}  // namespace
}  // namespace tessera::cuda
