// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel/grouped_gemm.hpp"

#include <algorithm>

#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {

void grouped_gemm_varlen_m(VarlenM const& args, core::ThreadPool& pool) noexcept {
  GroupOffsets const& offsets = args.offsets;
  auto const num_blocks = [&](std::int64_t e) {
    return (offsets[e + 1] - offsets[e] + kRowBlock - 1) / kRowBlock;
  };
  std::int64_t blocks = 0;
  for (std::int64_t e = 0; e < args.experts; ++e) blocks += num_blocks(e);
  pool.run(blocks, [&](std::int64_t block, int) {
    std::int64_t e = 0;
    for (; block >= num_blocks(e); ++e) block -= num_blocks(e);
    std::int64_t const row = offsets[e] + block * kRowBlock;
    std::int64_t const rows = std::min(kRowBlock, offsets[e + 1] - row);
    ConstMatrix const b{args.b.data + e * args.b_expert_stride, args.b.row_stride,
                        args.b.col_stride};
    gemm(rows, args.gemm_n, args.gemm_k, {args.a[row], args.a.pitch, 1}, b, 0.0f,
         {args.c[row], args.c.pitch, 1});
    if (args.bias == nullptr) return;
    float const* const bias = args.bias + e * args.bias_expert_stride;
    for (std::int64_t r = row; r < row + rows; ++r) {
      for (std::int64_t i = 0; i < args.gemm_n; ++i) args.c[r][i] += bias[i];
    }
  });
  for (std::int64_t r = offsets[args.experts]; r < args.rows; ++r) {
    std::fill_n(args.c[r], args.gemm_n, 0.0f);
  }
}

std::int64_t grouped_gemm_varlen_k_scratch(std::int64_t gemm_n, GradientMode mode) noexcept {
  return mode == GradientMode::accumulate ? kColumnBlock * gemm_n : 0;
}

void grouped_gemm_varlen_k(VarlenK const& args, Threads const& threads) noexcept {
  std::int64_t const blocks = (args.gemm_m + kColumnBlock - 1) / kColumnBlock;
  threads.pool.run(args.experts * blocks, [&](std::int64_t task, int slot) {
    std::int64_t const e = task / blocks, first = task % blocks * kColumnBlock;
    std::int64_t const count = std::min(kColumnBlock, args.gemm_m - first);
    Matrix const c{args.c.data + e * args.c_expert_stride, args.c.row_stride, 1};
    float* const scratch = args.mode == GradientMode::accumulate ? threads.scratch(slot) : nullptr;
    WgradSum sum(count, args.gemm_n, c.from(first, 0), args.mode, scratch);
    for (std::int64_t row = args.offsets[e]; row < args.offsets[e + 1]; row += kRowBlock) {
      std::int64_t const rows = std::min(kRowBlock, args.offsets[e + 1] - row);
      ConstMatrix const a{args.a[row] + first, args.a.pitch, 1};
      sum.add(rows, a.transposed(), {args.b[row], args.b.pitch, 1});
    }
    sum.finish();
  });
}

}  // namespace tessera::cpu
