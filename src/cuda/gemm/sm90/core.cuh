// SPDX-License-Identifier: Apache-2.0
// Epilogues use these parts of sm_90a. They are templates of a Core, so that they compile for any other that has these
// names: the tests have one whose accumulators lie in memory (tests/emulator/memory_core.cuh).
#pragma once

#include "../ring.cuh"
#include "../storage.cuh"
#include "accumulators.cuh"
#include "deferred.cuh"
#include "deferred_sums.cuh"
#include "held_tile.cuh"
#include "lent.cuh"
#include "slab_fill.cuh"

namespace tessera::cuda::gemm::sm90 {

template <GemmConfig kConfig>
struct Core {
  static constexpr GemmConfig kGemm = kConfig;

  using Storage = SharedStorage<kGemm>;
  using Ring = PipelineState<kGemm>;
  using Accumulators = gemm::Accumulators<kGemm>;
  using SlabRows = gemm::SlabRows;
  using SlabColumns = gemm::SlabColumns;
  using DeferredRows = gemm::DeferredRows<kGemm>;
  using DeferredColumns = gemm::DeferredTile<kGemm, HeldColumns<kGemm>>;
  template <Major kMajor>
  using DeferredSums = gemm::DeferredSums<kGemm, kMajor>;
  template <Major kMajor>
  using SumSlab = gemm::SumSlab<kGemm, kMajor>;
  using HeldTile = gemm::HeldTile<kGemm>;
  using Slabs = SlabStore<kGemm>;
  using LentStages = BorrowedStages<kGemm>;
  using Staging = gemm::Staging<kGemm>;
};

}  // namespace tessera::cuda::gemm::sm90
