// SPDX-License-Identifier: Apache-2.0
// Configurations of the GEMMs of sm_100a that read MXFP8: as many stages as fit, by arithmetic, as nothing has been
// measured. A tile has 128 columns, so that two accumulators leave columns of tensor memory for scales.
#pragma once

#include "../gemm/config.hpp"
#include "tessera/shape.hpp"

namespace tessera::cuda {

// One CTA has tiles of 128 x 128, 33 KB a stage; a pair has tiles of 256 x 128, 25 KB a stage in each CTA.
constexpr gemm::GemmConfig mxfp8_gemm(int ctas, int stages, int slabs,
                                      gemm::Halves halves = gemm::Halves::kOne) {
  return {.tile = {128, 128, 128},
          .stages = stages,
          .consumer_warpgroups = 1,
          .a = {.element = gemm::Element::kE4m3, .loader = gemm::Loader::kGather},
          .b = {.element = gemm::Element::kE4m3, .halves = halves, .boxes = gemm::Boxes::kTile},
          .cluster = {ctas, ctas == 2 ? gemm::Sharing::kMulticast : gemm::Sharing::kNone},
          .epilogue = {.slabs = slabs}};
}

// Stores codes without a slab.
template <ActivationKind kKind, int kCtas>
struct UpProjectionFwdMxfp8Config {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm =
      mxfp8_gemm(kCtas, kCtas == 2 ? 8 : 6, 1, gemm::Halves::kAlongRows);
};

template <int kCtas>
struct DownProjectionFwdMxfp8Config {
  static constexpr gemm::GemmConfig gemm = mxfp8_gemm(kCtas, kCtas == 2 ? 7 : 5, 2);
};

template <int kCtas>
struct UpProjectionDgradMxfp8Config {
  static constexpr gemm::GemmConfig gemm = mxfp8_gemm(kCtas, kCtas == 2 ? 7 : 5, 2);
};

// Slabs of codes, of gate and up, and of 64 columns of dg, du and a'.
template <ActivationKind kKind, int kCtas>
struct DownProjectionDgradMxfp8Config {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm = mxfp8_gemm(kCtas, kCtas == 2 ? 5 : 4, 5);
};

}  // namespace tessera::cuda
