// SPDX-License-Identifier: Apache-2.0
// Runs the hooks of an epilogue alone, without a GEMM: 64 rows of sums lie in memory, and are lent to it.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "cuda/epilogue/store.cuh"
#include "cuda/gemm/epilogue/contract.hpp"
#include "cuda/gemm/slabs.cuh"
#include "cuda/tuning/gemm.hpp"
#include "tests/emulator/emulator.hpp"
#include "tests/emulator/memory.hpp"
#include "tests/emulator/memory_core.cuh"

namespace tessera::emulator {

namespace gemm = cuda::gemm;

// bf16 as kernels see it.
inline gemm::bf16* bf16_of(Bits* bits) { return reinterpret_cast<gemm::bf16*>(bits); }

constexpr Bits kUnwritten = 0xffff;
// The second 64 rows of a tile of segment 1, the third tile along n; rows from kEnd on are of another segment.
constexpr int kRow = 192, kEnd = kRow + 45, kTile = 2;
constexpr gemm::WorkTile kWork = {.segment = 1,
                                  .n_tile = kTile,
                                  .row = 128,
                                  .rows = kEnd - 128,
                                  .begin = 100,
                                  .end = kEnd,
                                  .awaits_rows = false,
                                  .in_run = 0,
                                  .run_left = 0,
                                  .run_phase = 0};

// 64 rows of sums, and what an epilogue makes of them.
template <gemm::GemmConfig kGemm>
class Lent {
 public:
  using Core = MemoryCore<kGemm>;

  Lent() : sums_(gemm::kSubtileM * kGemm.tile.n), held_(1) {
    std::mt19937_64 rng(7);
    std::uniform_real_distribution<float> draw(-4.0f, 4.0f);
    for (std::size_t i = 0; i < sums_.size(); ++i) sums_[static_cast<std::int64_t>(i)] = draw(rng);
    was_.assign(sums_.get(), sums_.get() + sums_.size());
  }

  // Before the epilogue: of row `row` of all, column `column` of the tile.
  [[nodiscard]] float sum(int row, int column) const {
    return was_[static_cast<std::size_t>((row - kRow) * kGemm.tile.n + column)];
  }

  template <class Epilogue>
  std::string run(typename Epilogue::Params const& params) {
    using Accumulators = typename Core::Accumulators;
    static_assert(gemm::keeps_contract<kGemm.epilogue, Epilogue, Accumulators, typename Core::Ring,
                                       typename Core::Storage>());
    launch(1, 1, arch::kWarpgroupThreads, 0, [&] {
      Epilogue epilogue(*held_.get(), params, 0);
      Accumulators acc(sums_.get());
      epilogue.begin(kWork, kRow, 1);
      if constexpr (Epilogue::kMode == gemm::EpilogueMode::kDeferred) {
        epilogue.keep(acc, kWork, kRow);
        for (int piece = 0; piece < gemm::kDeferredPieces; ++piece) epilogue.work(piece);
      } else {
        epilogue.store(acc, kWork, kRow);
        epilogue.settle();
      }
      epilogue.drain();
    });
    return emulator::run({.seed = 3, .burst = 8});
  }

 private:
  Memory<float> sums_;
  Memory<typename Core::Storage> held_;
  std::vector<float> was_;
};

// Calls wrong(row, column) for all elements of rows of so many columns: true if what lies there is none of `columns`
// from `first` on of the rows that exist and was written, or is not what it should be.
template <class Wrong>
std::string first_wrong(int columns, int first, Wrong wrong) {
  for (int r = 0; r < kEnd + 32; ++r) {
    for (int c = 0; c < columns; ++c) {
      if (wrong(r, c, r >= kRow && r < kEnd && c >= first)) {
        return "row " + std::to_string(r) + " column " + std::to_string(c);
      }
    }
  }
  return "";
}

// y of StoreDeferred, or of an epilogue around it that multiplies by `scale` first.
template <template <class> class Epilogue, class Params>
std::string stored(Params p, gemm::StoreParams& store, float scale) {
  constexpr gemm::GemmConfig kGemm = cuda::DownProjectionFwdWide<gemm::Major::kK>::gemm;
  constexpr int kFirst = kTile * kGemm.tile.n, kColumns = kFirst + 136;
  Lent<kGemm> lent;
  Memory<Bits> y((kEnd + 32) * kColumns), bias(2 * kColumns);
  fill(bias.get(), 2 * kColumns, 5, 1.0f);
  store.gmem_d = bf16_of(y.get());
  store.bias = {bf16_of(bias.get()), kColumns, 1};
  store.columns = kColumns;
  if constexpr (requires { p.store; }) {
    p.store = store;
  } else {
    p = store;
  }
  std::string const fault = lent.template run<Epilogue<MemoryCore<kGemm>>>(p);
  if (!fault.empty()) return fault;
  return first_wrong(kColumns, kFirst, [&](int r, int c, bool exists) {
    Bits const wanted =
        exists ? round(lent.sum(r, c - kFirst) * scale + widen(bias[kColumns + c])) : kUnwritten;
    return y[r * kColumns + c] != wanted;
  });
}

}  // namespace tessera::emulator
