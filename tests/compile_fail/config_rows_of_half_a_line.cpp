// SPDX-License-Identifier: Apache-2.0
// Operands whose rows of a stage have 64 bytes: tile.k of e4m3 is 128.
// error: <throw-expression>
#include "cuda/gemm/config.hpp"

using namespace tessera::cuda::gemm;

#ifdef TESSERA_COMPILES
constexpr GemmConfig kGemm{
    .tile = {128, 256, 128}, .a = {.element = Element::kE4m3}, .b = {.element = Element::kE4m3}};
#else
constexpr GemmConfig kGemm{
    .tile = {128, 256, 64}, .a = {.element = Element::kE4m3}, .b = {.element = Element::kE4m3}};
#endif
static_assert(valid(kGemm));
