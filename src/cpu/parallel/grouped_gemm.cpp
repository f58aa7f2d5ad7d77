// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel/grouped_gemm.hpp"

#include <algorithm>

#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {

std::int64_t grouped_gemm_varlen_m_scratch(std::int64_t gemm_n, std::int64_t gemm_k) noexcept {
  return gemm_scratch_floats(kRowBlock, gemm_n, gemm_k);
}

template <class T>
void grouped_gemm_varlen_m(VarlenM<T> const& args, Threads const& threads) noexcept {
  GroupOffsets const& offsets = args.offsets;
  auto const num_blocks = [&](std::int64_t e) {
    return (offsets[e + 1] - offsets[e] + kRowBlock - 1) / kRowBlock;
  };
  std::int64_t blocks = 0;
  for (std::int64_t e = 0; e < args.experts; ++e) blocks += num_blocks(e);
  auto const run_block = [&](std::int64_t block, int slot) {
    std::int64_t e = 0;
    for (; block >= num_blocks(e); ++e) block -= num_blocks(e);
    std::int64_t const row = offsets[e] + block * kRowBlock;
    std::int64_t const rows = std::min(kRowBlock, offsets[e + 1] - row);
    T const* const bias = args.bias == nullptr ? nullptr : args.bias + e * args.bias_expert_stride;
    gemm(rows, args.gemm_n, args.gemm_k, left_operand(args.a.matrix().from(row, 0)),
         right_operand(args.b.from_offset(e * args.b_expert_stride)),
         result(args.c.matrix().from(row, 0), bias), threads.scratch(slot));
  };
  threads.pool.run(blocks, run_block,
                   (offsets[args.experts] + args.experts) * args.gemm_n * args.gemm_k);
  for (std::int64_t r = offsets[args.experts]; r < args.rows; ++r) {
    std::fill_n(args.c[r], args.gemm_n, round_to<T>(0.0f));
  }
}

std::int64_t grouped_gemm_varlen_k_scratch(std::int64_t gemm_n) noexcept {
  return wgrad_sum_floats(kColumnBlock, gemm_n);
}

template <class T>
void grouped_gemm_varlen_k(VarlenK<T> const& args, Threads const& threads) noexcept {
  std::int64_t const blocks = (args.gemm_m + kColumnBlock - 1) / kColumnBlock;
  auto const run_task = [&](std::int64_t task, int slot) {
    std::int64_t const e = task / blocks, first = task % blocks * kColumnBlock;
    std::int64_t const count = std::min(kColumnBlock, args.gemm_m - first);
    std::int64_t const begin = args.offsets[e], end = args.offsets[e + 1];
    MatrixView<T> const c = args.c.from_offset(e * args.c_expert_stride).from(first, 0);
    WgradSum<T> sum(count, args.gemm_n, end - begin, c, args.mode, threads.scratch(slot));
    for (std::int64_t row = begin; row < end; row += kReductionBlock) {
      sum.add(std::min(kReductionBlock, end - row),
              left_operand(args.a.matrix().from(row, first).transposed()),
              right_operand(args.b.matrix().from(row, 0)));
    }
    sum.finish();
  };
  threads.pool.run(args.experts * blocks, run_task,
                   (args.offsets[args.experts] + args.experts) * args.gemm_m * args.gemm_n);
}

template void grouped_gemm_varlen_m(VarlenM<float> const&, Threads const&) noexcept;
template void grouped_gemm_varlen_m(VarlenM<Bf16> const&, Threads const&) noexcept;
template void grouped_gemm_varlen_k(VarlenK<float> const&, Threads const&) noexcept;
template void grouped_gemm_varlen_k(VarlenK<Bf16> const&, Threads const&) noexcept;

}  // namespace tessera::cpu
