// SPDX-License-Identifier: Apache-2.0
// Configurations of the GEMMs that read e4m3. Three stages of 48 KB, and the whole tile in slabs, for the
// warpgroup that stores. docs/notebook/2026-11-27-fp8-up-projection.md
#pragma once

#include "gemm_backward.hpp"

namespace tessera::cuda {

template <ActivationKind kKind, gemm::Element kOut>
struct UpProjectionFwdE4m3Config {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::Element out = kOut;
  static constexpr gemm::GemmConfig gemm{
      .tile = {128, 256, 128},
      .stages = 3,
      .a = {.element = gemm::Element::kE4m3, .loader = gemm::Loader::kGather},
      .b = {.element = gemm::Element::kE4m3,
            .halves = gemm::Halves::kAlongRows,
            .boxes = gemm::Boxes::kTile},
      .epilogue = {.mode = gemm::EpilogueMode::kApart, .slabs = 4},
      .order = {.raster_n = kForwardRaster}};
};

// Their B is one matrix; row_numbers is what the epilogue asks for.
constexpr gemm::GemmConfig one_half_e4m3(int row_numbers) {
  return {.tile = {128, 256, 128},
          .stages = 3,
          .a = {.element = gemm::Element::kE4m3, .loader = gemm::Loader::kGather},
          .b = {.element = gemm::Element::kE4m3, .boxes = gemm::Boxes::kTile},
          .epilogue = {.mode = gemm::EpilogueMode::kApart, .slabs = 4, .row_numbers = row_numbers},
          .order = {.raster_n = kForwardRaster}};
}

struct DownProjectionFwdE4m3Config {
  static constexpr gemm::GemmConfig gemm = one_half_e4m3(0);
};

struct UpProjectionDgradE4m3Config {
  static constexpr gemm::GemmConfig gemm = one_half_e4m3(0);
};

// Numbers of a row: its score, four scales of its codes of h, a sum; eight more are the place of codes.
template <ActivationKind kKind>
struct DownProjectionDgradE4m3Config {
  static constexpr ActivationKind activation = kKind;
  static constexpr gemm::GemmConfig gemm = one_half_e4m3(14);
};

}  // namespace tessera::cuda
