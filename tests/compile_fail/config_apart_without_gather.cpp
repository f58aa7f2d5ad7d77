// SPDX-License-Identifier: Apache-2.0
// An epilogue that has a warpgroup of its own, where TMA loads A: registers are divided for threads that gather.
// error: <throw-expression>
#include "cuda/gemm/config.hpp"

using namespace tessera::cuda::gemm;

constexpr EpilogueConfig kApart{.mode = EpilogueMode::kApart, .slabs = 4};
#ifdef TESSERA_COMPILES
constexpr GemmConfig kGemm{.a = {.loader = Loader::kGather}, .epilogue = kApart};
#else
constexpr GemmConfig kGemm{.epilogue = kApart};
#endif
static_assert(valid(kGemm));
