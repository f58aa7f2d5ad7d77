// SPDX-License-Identifier: Apache-2.0
// The mainloop asks for its policy's hooks: later() is misspelt.
// error: no matching function for call to 'multiply<
#include "cuda/gemm/sm90/mainloop.cuh"

namespace gemm = tessera::cuda::gemm;

constexpr gemm::GemmConfig kGemm{};

struct Between {
  void before(int, gemm::PipelineState<kGemm> const&) {}
  void first() {}
#if defined(TESSERA_COMPILES)
  void later() {}
#else
  void latter() {}
#endif
  void each(int) {}
};

int multiply(gemm::SharedStorage<kGemm>& smem, gemm::PipelineState<kGemm>& ring,
             gemm::Accumulators<kGemm> (&acc)[1], gemm::WorkTile const& tile, Between& between) {
  return gemm::multiply<kGemm, 1>(smem, ring, acc, tile, {0, 4, 4}, between);
}
