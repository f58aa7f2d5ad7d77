// SPDX-License-Identifier: Apache-2.0
// The configurations of up_projection_fwd that are measured against each other.
#pragma once

#include <vector>

#include "../../src/cuda/kernels/up_projection_fwd.cuh"

namespace tessera::bench {

using cuda::UpProjectionFwdArguments;
using cuda::gemm::Boxes;
using cuda::gemm::EpilogueMode;
using cuda::gemm::GemmConfig;
using cuda::gemm::Halves;
using cuda::gemm::Loader;

struct Variant {
  char const* name;
  GemmConfig gemm;
  cudaError_t (*launch)(UpProjectionFwdArguments const&, int sm_count, cudaStream_t);

  bool serves(int intermediate) const {
    return gemm.b.boxes == Boxes::kAny || intermediate % 64 == 0;
  }
};

// One named type per configuration: a kernel template cannot take the value itself.
#define TESSERA_VARIANT(type, ...)                                       \
  struct type {                                                          \
    static constexpr GemmConfig gemm{__VA_ARGS__};                       \
    static constexpr ActivationKind activation = ActivationKind::swiglu; \
    static constexpr bool interleaved = false;                           \
  }

TESSERA_VARIANT(Tma, .b = {.halves = Halves::kAlongRows},
                .epilogue = {.mode = EpilogueMode::kDeferred});
TESSERA_VARIANT(Gather, .a = {.loader = Loader::kGather},
                .b = {.halves = Halves::kAlongRows, .boxes = Boxes::kTile},
                .epilogue = {.mode = EpilogueMode::kDeferred});
TESSERA_VARIANT(GatherAny, .a = {.loader = Loader::kGather}, .b = {.halves = Halves::kAlongRows},
                .epilogue = {.mode = EpilogueMode::kDeferred});

template <class Config>
Variant variant(char const* name) {
  return {
      .name = name, .gemm = Config::gemm, .launch = &cuda::launch_up_projection_fwd_config<Config>};
}

inline std::vector<Variant> all_variants() {
  return {
      variant<Tma>("tma-128x256"),
      variant<Gather>("gather-128x256"),
      variant<GatherAny>("gather-128x256-any-layout"),
  };
}

}  // namespace tessera::bench
