// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs as building blocks: rows vary per expert (varlen-M) or the reduction does (varlen-K).
#pragma once

#include "tessera/context.hpp"
#include "tessera/export.hpp"
#include "tessera/moe.hpp"
#include "tessera/status.hpp"
#include "tessera/tensor.hpp"

namespace tessera {

enum class GroupedGemmKind : std::int32_t {
  varlen_m = 0,  ///< c[r,:] = a[r,:] . b[e]^T  (+ bias[e]); b [E,gemm_n,gemm_k], or transposed
  varlen_k = 1,  ///< c[e] = a_e^T . b_e over the rows of expert e; c [E,gemm_m,gemm_n]
};

struct GroupedGemmArgs {
  GroupedGemmKind kind = GroupedGemmKind::varlen_m;
  bool transpose_b = false;  ///< varlen_m: b is [E,gemm_k,gemm_n]
  ConstTensor a = {};        ///< [rows,gemm_k], or [rows,gemm_m] for varlen_k
  ConstTensor b = {};
  ConstTensor bias = {};            ///< varlen_m, optional [E,gemm_n]
  ConstTensor expert_offsets = {};  ///< [E+1] int32 or int64
  Tensor c = {};
  GradientMode mode = GradientMode::write;  ///< varlen_k
  Buffer workspace = {};
};

/// Errors: unsupported in this version (the fused layer is served; these blocks are not yet).
TESSERA_EXPORT Status grouped_gemm(Context const& context, GroupedGemmArgs const& args,
                                   Stream stream = {}) noexcept;

}  // namespace tessera
