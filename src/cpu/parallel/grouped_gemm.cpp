// SPDX-License-Identifier: Apache-2.0
#include "cpu/parallel/grouped_gemm.hpp"

#include <algorithm>

#include "cpu/parallel/wgrad.hpp"

namespace tessera::cpu {
namespace {

/// The rows of the groups, for for_each_row_block.
template <class T>
struct Groups {
  VarlenM<T> const& args;
  [[nodiscard]] std::int64_t experts() const noexcept { return args.experts; }
  [[nodiscard]] std::int64_t first_row(std::int64_t expert) const noexcept {
    return args.offsets[expert];
  }
  [[nodiscard]] std::int64_t num_rows(std::int64_t expert) const noexcept {
    return args.offsets[expert + 1] - args.offsets[expert];
  }
  [[nodiscard]] std::int64_t multiply_adds() const noexcept {
    return (args.offsets[args.experts] + args.experts) * args.gemm_n * args.gemm_k;
  }
};

}  // namespace

std::int64_t grouped_gemm_varlen_m_scratch(std::int64_t gemm_n, std::int64_t gemm_k) noexcept {
  return gemm_scratch_floats(kRowBlock, gemm_n, gemm_k);
}

template <class T>
void grouped_gemm_varlen_m(VarlenM<T> const& args, Threads const& threads) noexcept {
  for_each_row_block(Groups<T>{args}, threads, [&](RowBlock const& block) {
    std::int64_t const e = block.expert;
    T const* const bias = args.bias == nullptr ? nullptr : args.bias + e * args.bias_expert_stride;
    gemm(block.rows, args.gemm_n, args.gemm_k, left_operand(args.a.matrix().from(block.row, 0)),
         right_operand(args.b.from_offset(e * args.b_expert_stride)),
         result(args.c.matrix().from(block.row, 0), bias), threads.scratch(block.slot),
         block.weights);
  });
  for (std::int64_t r = args.offsets[args.experts]; r < args.rows; ++r) {
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
