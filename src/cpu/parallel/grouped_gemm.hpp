// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs on the CPU: one task per expert and block of rows (varlen-M) or of output rows (varlen-K).
#pragma once

#include <cstdint>

#include "cpu/parallel/layer.hpp"
#include "tessera/moe.hpp"

namespace tessera::cpu {

/// Offsets of checked groups: int32 or int64.
struct GroupOffsets {
  void const* data = nullptr;
  DType dtype = DType::int32;
  [[nodiscard]] std::int64_t operator[](std::int64_t i) const noexcept {
    return dtype == DType::int64 ? static_cast<std::int64_t const*>(data)[i]
                                 : static_cast<std::int32_t const*>(data)[i];
  }
};

/// c[r,:] = a[r,:] b[e] (+ bias[e]); rows of no expert become 0.
template <class T>
struct VarlenM {
  std::int64_t rows = 0, experts = 0, gemm_n = 0, gemm_k = 0;
  Rows<T const> a;
  MatrixView<T const> b;  ///< [gemm_k, gemm_n] of expert 0
  std::int64_t b_expert_stride = 0;
  T const* bias = nullptr;
  std::int64_t bias_expert_stride = 0;
  Rows<T> c;
  GroupOffsets offsets;
};
template <class T>
void grouped_gemm_varlen_m(VarlenM<T> const& args, Threads const& threads) noexcept;
std::int64_t grouped_gemm_varlen_m_scratch(std::int64_t gemm_n, std::int64_t gemm_k) noexcept;

/// c[e] (+)= a_e^T b_e.
template <class T>
struct VarlenK {
  std::int64_t experts = 0, gemm_m = 0, gemm_n = 0;
  Rows<T const> a, b;
  MatrixView<T> c;  ///< [gemm_m, gemm_n] of expert 0
  std::int64_t c_expert_stride = 0;
  GroupOffsets offsets;
  GradientMode mode = GradientMode::write;
};
template <class T>
void grouped_gemm_varlen_k(VarlenK<T> const& args, Threads const& threads) noexcept;
std::int64_t grouped_gemm_varlen_k_scratch(std::int64_t gemm_n) noexcept;

}  // namespace tessera::cpu
