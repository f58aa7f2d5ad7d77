// SPDX-License-Identifier: Apache-2.0
// An A that memory holds in another element than stages, loaded by TMA, which copies bytes.
// error: <throw-expression>
#include "cuda/gemm/config.hpp"

using namespace tessera::cuda::gemm;

#ifdef TESSERA_COMPILES
constexpr GemmConfig kGemm{.a = {.stored = Element::kE4m3, .loader = Loader::kGather}};
#else
constexpr GemmConfig kGemm{.a = {.stored = Element::kE4m3, .loader = Loader::kTma}};
#endif
static_assert(valid(kGemm));
