// SPDX-License-Identifier: Apache-2.0
// A B that memory holds in another element than stages: B always comes by TMA, which copies bytes.
// error: <throw-expression>
#include "cuda/gemm/config.hpp"

using namespace tessera::cuda::gemm;

#ifdef TESSERA_COMPILES
constexpr GemmConfig kGemm{.b = {.element = Element::kBf16}};
#else
constexpr GemmConfig kGemm{.b = {.stored = Element::kE4m3}};
#endif
static_assert(valid(kGemm));
