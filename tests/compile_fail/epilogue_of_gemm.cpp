// SPDX-License-Identifier: Apache-2.0
// A GEMM asks for the contract itself: its consumers get an epilogue whose settle() is misspelt.
// error: epilogue contract: modes inline and lent call `void settle()`
#include "cuda/gemm/sm90/roles.cuh"

namespace gemm = tessera::cuda::gemm;

constexpr gemm::GemmConfig kGemm{};

struct Epilogue {
  static constexpr gemm::EpilogueMode kMode = gemm::EpilogueMode::kInline;
  struct Params {};

  Epilogue(gemm::SharedStorage<kGemm>&, Params const&, int) {}
  void begin(gemm::WorkTile const&, int, int) {}
  void store(gemm::Accumulators<kGemm>&, gemm::WorkTile const&, int) {}
#if defined(TESSERA_COMPILES)
  void settle() {}
#else
  void setle() {}
#endif
  void drain() {}
};

template void gemm::run_gemm<kGemm, Epilogue>(gemm::GemmParams const&, Epilogue::Params const&,
                                              gemm::ReadsAtOnce);
