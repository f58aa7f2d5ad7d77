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
  varlen_m = 0,  ///< c[r,:] = a[r,:] . b[e]^T (+ bias[e]); b [E,gemm_n,gemm_k], or transposed
  varlen_k = 1,  ///< c[e] = a_e^T . b_e over the rows of expert e; c [E,gemm_m,gemm_n]
};

/// Sizes come from the tensors; rows [expert_offsets[e], expert_offsets[e+1]) belong to expert e, rows from
/// the last offset on to none: their c is 0 with varlen_m, they are not read with varlen_k.
struct GroupedGemmArgs {
  GroupedGemmKind kind = GroupedGemmKind::varlen_m;
  bool transpose_b = false;                 ///< varlen_m: b is [E,gemm_k,gemm_n]
  ConstTensor a = {};                       ///< [rows,gemm_k]; varlen_k: [rows,gemm_m]
  ConstTensor b = {};                       ///< [E,gemm_n,gemm_k]; varlen_k: [rows,gemm_n]
  ConstTensor bias = {};                    ///< varlen_m, optional [E,gemm_n]
  ConstTensor expert_offsets = {};          ///< [E+1] int32 or int64
  Tensor c = {};                            ///< [rows,gemm_n]; varlen_k: [E,gemm_m,gemm_n]
  GradientMode mode = GradientMode::write;  ///< varlen_k; empty experts: zeros, or c as it was
  Buffer workspace = {};                    ///< grouped_gemm_workspace_bytes()
};

/// Bytes of workspace: packed operands, and sums in fp32, per thread; on cuda the checked offsets.
TESSERA_EXPORT Expected<std::size_t> grouped_gemm_workspace_bytes(
    Context const& context, GroupedGemmArgs const& args) noexcept;

/// Runs a grouped GEMM of fp32 or bf16 tensors, all of one type, with sums in fp32. Deterministic as moe_forward is.
/// On cuda: bf16 only; a, and c of varlen_m, are contiguous; check_device_values() reports bad offsets.
/// Errors: invalid_argument for tensors that do not fit together or offsets that decrease or leave the rows;
/// unsupported for other types.
TESSERA_EXPORT Status grouped_gemm(Context const& context, GroupedGemmArgs const& args,
                                   Stream stream = {}) noexcept;

}  // namespace tessera
