// SPDX-License-Identifier: Apache-2.0
// The kernels of a layer that quantises, by precision: fp8 has those of sm_90a, with fp32 scales of blocks of 128,
// mxfp8 those of sm_100a, with e8m0 scales of 32. check_multiplies_codes() lets no call get to those of another GPU.
#pragma once

#include "cuda/host/low_precision.hpp"
#include "cuda/host/mxfp8.hpp"
#include "tessera/moe.hpp"

namespace tessera::cuda {

/// Where scales lie, fp32 or e8m0 as the precision has them.
class Scales {
 public:
  constexpr Scales() noexcept = default;
  constexpr explicit Scales(void* gmem) noexcept : gmem_(gmem) {}
  constexpr operator void*() const noexcept { return gmem_; }
  operator float*() const noexcept { return static_cast<float*>(gmem_); }

 private:
  void* gmem_ = nullptr;
};

/// Codes with their scales.
struct Codes {
  void* gmem_codes = nullptr;
  Scales gmem_scales;
};

/// The matrices of every expert of one projection, and where their codes go, those of the transpose too; a place that
/// is null is not written.
struct QuantisedMatrices {
  WeightRows w[2];
  std::int64_t rows, width;
  std::int32_t halves, experts;
  Codes to, to_transposed;
};

struct Fp8Kernels {
  static cudaError_t quantise_rows(MatrixRows const& x, std::int64_t width, bool pow2,
                                   Codes const& to, cudaStream_t stream) noexcept {
    return launch_quantise_rows({.gmem_x = x.gmem,
                                 .rows = x.rows,
                                 .width = width,
                                 .pitch = x.pitch,
                                 .pow2 = pow2,
                                 .gmem_codes = to.gmem_codes,
                                 .gmem_scales = to.gmem_scales},
                                stream);
  }
  static cudaError_t dequantise_rows(Codes const& codes, std::int64_t rows, std::int64_t width,
                                     void* gmem_values, cudaStream_t stream) noexcept {
    return launch_dequantise_rows({.gmem_codes = codes.gmem_codes,
                                   .gmem_scales = codes.gmem_scales,
                                   .row_step = width / kScaleBlock,
                                   .block_step = 1,
                                   .rows = rows,
                                   .width = width,
                                   .gmem_num_rows = nullptr,
                                   .gmem_values = gmem_values},
                                  stream);
  }
  static cudaError_t quantise_weights(QuantisedMatrices const& m, bool pow2,
                                      cudaStream_t stream) noexcept {
    return launch_quantise_weights({.w = {m.w[0], m.w[1]},
                                    .rows = m.rows,
                                    .width = m.width,
                                    .halves = m.halves,
                                    .experts = m.experts,
                                    .pow2 = pow2,
                                    .gmem_codes = m.to.gmem_codes,
                                    .gmem_codes_t = m.to_transposed.gmem_codes,
                                    .gmem_scales = m.to.gmem_scales,
                                    .gmem_scales_t = m.to_transposed.gmem_scales},
                                   stream);
  }
  static constexpr auto up_projection_fwd = launch_up_projection_fwd_e4m3;
  static constexpr auto down_projection_fwd = launch_down_projection_fwd_e4m3;
  static constexpr auto down_projection_dgrad = launch_down_projection_dgrad_e4m3;
  static constexpr auto up_projection_dgrad = launch_up_projection_dgrad_e4m3;
};

/// Their scales are powers of two in any case.
struct Mxfp8Kernels {
  static cudaError_t quantise_rows(MatrixRows const& x, std::int64_t width, bool /*pow2*/,
                                   Codes const& to, cudaStream_t stream) noexcept {
    return launch_quantise_rows_mxfp8({.gmem_x = x.gmem,
                                       .rows = x.rows,
                                       .width = width,
                                       .pitch = x.pitch,
                                       .gmem_codes = to.gmem_codes,
                                       .gmem_scales = to.gmem_scales},
                                      stream);
  }
  static cudaError_t dequantise_rows(Codes const& codes, std::int64_t rows, std::int64_t width,
                                     void* gmem_values, cudaStream_t stream) noexcept {
    return launch_dequantise_rows_mxfp8({.gmem_codes = codes.gmem_codes,
                                         .gmem_scales = codes.gmem_scales,
                                         .rows = rows,
                                         .width = width,
                                         .gmem_values = gmem_values},
                                        stream);
  }
  static cudaError_t quantise_weights(QuantisedMatrices const& m, bool /*pow2*/,
                                      cudaStream_t stream) noexcept {
    return launch_quantise_weights_mxfp8({.w = {m.w[0], m.w[1]},
                                          .rows = m.rows,
                                          .width = m.width,
                                          .halves = m.halves,
                                          .experts = m.experts,
                                          .gmem_codes = m.to.gmem_codes,
                                          .gmem_scales = m.to.gmem_scales,
                                          .gmem_codes_t = m.to_transposed.gmem_codes,
                                          .gmem_scales_t = m.to_transposed.gmem_scales},
                                         stream);
  }
  static constexpr auto up_projection_fwd = launch_up_projection_fwd_mxfp8;
  static constexpr auto down_projection_fwd = launch_down_projection_fwd_mxfp8;
  static constexpr auto down_projection_dgrad = launch_down_projection_dgrad_mxfp8;
  static constexpr auto up_projection_dgrad = launch_up_projection_dgrad_mxfp8;
};

/// body(kernels) for those of the desc's precision.
template <class Body>
auto with_kernels(MoeDesc const& desc, Body&& body) noexcept {
  return desc.precision == Precision::mxfp8 ? body(Mxfp8Kernels{}) : body(Fp8Kernels{});
}

}  // namespace tessera::cuda
