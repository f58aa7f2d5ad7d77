// SPDX-License-Identifier: Apache-2.0
// The configurations of up_projection_fwd that are measured against each other.
#pragma once

#include <vector>

#include "../../src/cuda/kernels/up_projection_fwd.cuh"

namespace tessera::bench {

using cuda::UpProjectionArguments;
using cuda::UpProjectionParams;
using cuda::block::ALoader;
using cuda::block::GemmConfig;
using cuda::block::Schedule;
using cuda::block::Sigmoid;

struct Variant {
  char const* name;
  GemmConfig gemm;
  Sigmoid sigmoid;
  cudaError_t (*make_params)(UpProjectionParams&, UpProjectionArguments const&);
  cudaError_t (*resident)(int& clusters);
  cudaError_t (*launch)(UpProjectionParams const&, int clusters, cudaStream_t);
};

// One named type per configuration: a kernel template cannot take the value itself.
#define TESSERA_VARIANT(type, sigmoid_value, ...)              \
  struct type {                                                \
    static constexpr GemmConfig gemm{__VA_ARGS__};             \
    static constexpr Sigmoid sigmoid = Sigmoid::sigmoid_value; \
  }

// clang-format off
TESSERA_VARIANT(Tma128x256C1, kTanh, .stages = 4, .b_halves = 2);
TESSERA_VARIANT(Tma128x256C2, kTanh, .stages = 4, .cluster_m = 2, .b_halves = 2);
TESSERA_VARIANT(Tma128x128C1Pp, kTanh, .tile = {128, 128, 64}, .stages = 6, .schedule = Schedule::kPingPong, .b_halves = 2);
TESSERA_VARIANT(Tma128x128C2Pp, kTanh, .tile = {128, 128, 64}, .stages = 6, .cluster_m = 2, .schedule = Schedule::kPingPong, .b_halves = 2);
TESSERA_VARIANT(Tma192x128C1Pp, kTanh, .tile = {192, 128, 64}, .stages = 4, .schedule = Schedule::kPingPong, .b_halves = 2);
TESSERA_VARIANT(Gather128x256C1, kTanh, .stages = 4, .a_loader = ALoader::kGather, .b_halves = 2);
TESSERA_VARIANT(Gather128x256C2, kTanh, .stages = 4, .cluster_m = 2, .a_loader = ALoader::kGather, .b_halves = 2);
TESSERA_VARIANT(Tma192x128C2Pp, kTanh, .tile = {192, 128, 64}, .stages = 4, .cluster_m = 2, .schedule = Schedule::kPingPong, .b_halves = 2);
TESSERA_VARIANT(Tma128x256C1Exp, kExp, .stages = 4, .b_halves = 2);
TESSERA_VARIANT(Gather128x256C1Exp, kExp, .stages = 4, .a_loader = ALoader::kGather, .b_halves = 2);
TESSERA_VARIANT(Gather128x128C2Pp, kTanh, .tile = {128, 128, 64}, .stages = 6, .cluster_m = 2, .a_loader = ALoader::kGather, .schedule = Schedule::kPingPong, .b_halves = 2);
// clang-format on

template <class Config>
Variant variant(char const* name) {
  return {.name = name,
          .gemm = Config::gemm,
          .sigmoid = Config::sigmoid,
          .make_params = &cuda::make_up_projection_params<Config>,
          .resident =
              [](int& clusters) {
                return cuda::host::resident_clusters(cuda::up_projection_fwd<Config>,
                                                     cuda::persistent_shape<Config>(), clusters);
              },
          .launch = &cuda::launch_up_projection_fwd<Config>};
}

inline std::vector<Variant> all_variants() {
  return {
      variant<Tma128x256C1>("tma-128x256-c1"),
      variant<Tma128x256C2>("tma-128x256-c2"),
      variant<Tma128x128C1Pp>("tma-128x128-c1-pingpong"),
      variant<Tma128x128C2Pp>("tma-128x128-c2-pingpong"),
      variant<Tma192x128C1Pp>("tma-192x128-c1-pingpong"),
      variant<Gather128x256C1>("gather-128x256-c1"),
      variant<Gather128x256C2>("gather-128x256-c2"),
      variant<Tma192x128C2Pp>("tma-192x128-c2-pingpong"),
      variant<Tma128x256C1Exp>("tma-128x256-c1-exp"),
      variant<Gather128x256C1Exp>("gather-128x256-c1-exp"),
      variant<Gather128x128C2Pp>("gather-128x128-c2-pingpong"),
  };
}

}  // namespace tessera::bench
