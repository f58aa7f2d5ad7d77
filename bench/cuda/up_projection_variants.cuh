// SPDX-License-Identifier: Apache-2.0
// The configurations of up_projection_fwd that are measured against each other.
#pragma once

#include <vector>

#include "../../src/cuda/kernels/up_projection_fwd.cuh"

namespace tessera::bench {

using cuda::UpProjectionFwdArguments;
using cuda::block::ALoader;
using cuda::block::GemmConfig;
using cuda::block::Schedule;

struct Variant {
  char const* name;
  GemmConfig gemm;
  cudaError_t (*launch)(UpProjectionFwdArguments const&, int sm_count, cudaStream_t);

  bool serves(int intermediate) const { return gemm.any_b_layout || intermediate % 64 == 0; }
};

// One named type per configuration: a kernel template cannot take the value itself.
#define TESSERA_VARIANT(type, ...)                                       \
  struct type {                                                          \
    static constexpr GemmConfig gemm{__VA_ARGS__};                       \
    static constexpr ActivationKind activation = ActivationKind::swiglu; \
    static constexpr bool bias = false;                                  \
  }

// clang-format off
TESSERA_VARIANT(Tma128x256C1, .stages = 4, .b_halves = 2);
TESSERA_VARIANT(Tma192x128C1Pp, .tile = {192, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong, .b_halves = 2);
TESSERA_VARIANT(Gather128x256C1, .stages = 4, .a_loader = ALoader::kGather, .any_b_layout = false, .b_halves = 2);
TESSERA_VARIANT(Gather128x256C2, .stages = 4, .cluster_m = 2, .a_loader = ALoader::kGather, .any_b_layout = false, .b_halves = 2);
TESSERA_VARIANT(Gather128x256Lent, .stages = 4, .a_loader = ALoader::kGather, .any_b_layout = false, .b_halves = 2, .store_slabs = 1, .lent_stages = 2);
TESSERA_VARIANT(Tma128x256Lent, .stages = 4, .b_halves = 2, .store_slabs = 1, .lent_stages = 2);
TESSERA_VARIANT(Gather128x256C1Any, .stages = 4, .a_loader = ALoader::kGather, .b_halves = 2);
// clang-format on

template <class Config>
Variant variant(char const* name) {
  return {
      .name = name, .gemm = Config::gemm, .launch = &cuda::launch_up_projection_fwd_config<Config>};
}

inline std::vector<Variant> all_variants() {
  return {
      variant<Tma128x256C1>("tma-128x256-c1"),
      variant<Tma192x128C1Pp>("tma-192x128-c1-pingpong"),
      variant<Gather128x256C1>("gather-128x256-c1"),
      variant<Gather128x256C2>("gather-128x256-c2"),
      variant<Gather128x256Lent>("gather-128x256-lent"),
      variant<Tma128x256Lent>("tma-128x256-lent"),
      variant<Gather128x256C1Any>("gather-128x256-c1-any-layout"),
  };
}

}  // namespace tessera::bench
