// SPDX-License-Identifier: Apache-2.0
// From arguments to the parameters of the fused forward kernel, and to the instance of its activation.
#include "cuda/host/activation_kinds.hpp"
#include "cuda/host/gemm_params.hpp"
#include "cuda/host/tensor_map.hpp"
#include "expert_parallel/fused/forward_pass.cuh"

namespace tessera::expert_parallel {

template <ActivationKind kKind>
cudaError_t launch_forward_of(ForwardParams const& params, int sm_count, cudaStream_t stream);

namespace {

// [experts,rows,columns], contiguous.
cuda::WeightRows weight_rows(void const* gmem, std::int64_t expert_stride, std::int64_t rows,
                             std::int64_t columns) {
  cuda::WeightRows w;
  w.gmem = gmem;
  w.expert_stride = expert_stride;
  w.row_stride = columns;
  w.column_stride = 1;
  w.block = rows;
  return w;
}

// The GEMM of rows `a` and weights `w`, n rows of an expert in a half; `shared` are the maps by which a pair of CTAs
// loads half of a tile of either operand each.
template <gemm::GemmConfig kGemm, gemm::GemmConfig kShared>
cudaError_t make_gemm(gemm::GemmParams& p, SharedMaps& shared, cuda::MatrixRows const& a,
                      cuda::WeightRows const (&w)[2], int experts, std::int64_t n) {
  std::int64_t const k = a.pitch;
  cudaError_t error = cuda::host::gemm_params<kGemm>(
      p, {.a = a, .b = {w[0], w[1]}, .n = n, .k = k, .segments = experts});
  if (error == cudaSuccess) {
    error = cuda::host::make_matrix_map(shared.a, a.gmem, a.rows, k, k, gemm::kSubtileM);
  }
  if (error != cudaSuccess || p.b_in_boxes) return error;
  return cuda::host::make_tile_map(shared.b, w, kShared.b_halves(), experts, n, k, false,
                                   kShared.b_groups_per_cta());
}

cudaError_t make_params(ForwardArguments const& args, ForwardParams& p) {
  namespace host = cuda::host;
  ExchangeArguments const& x = args.exchange;
  std::int64_t const d = x.shape.hidden;
  std::int64_t const n = x.shape.intermediate;
  std::int64_t const rows = x.shape.pool_rows();
  int const experts = x.shape.local_experts();
  cudaError_t error = cudaSuccess;
  auto const then = [&error](cudaError_t next) {
    if (error == cudaSuccess) error = next;
  };
  std::int64_t const halves = x.shape.gated ? 2 : 1;
  auto const* const w_up = static_cast<gemm::bf16 const*>(args.gmem_w_up);
  cuda::WeightRows const up[2] = {weight_rows(w_up, halves * n * d, n, d),
                                  weight_rows(w_up + n * d, halves * n * d, n, d)};
  cuda::WeightRows const down[2] = {weight_rows(args.gmem_w_down, d * n, d, n), {}};
  cuda::MatrixRows const pool{x.gmem_pool, rows, d}, activated{args.gmem_a, rows, n};
  if (x.shape.gated) {
    then(make_gemm<kGated, kGatedShared>(p.up, p.shared_up, pool, up, experts, n));
  } else {
    then(make_gemm<kPlain, kPlainShared>(p.up, p.shared_up, pool, up, experts, n));
  }
  then(make_gemm<kPlain, kPlainShared>(p.down, p.shared_down, activated, down, experts, d));
  then(host::make_ragged_store_map(p.activation.a, args.gmem_a, rows, 1, n, rows, gemm::kWarpRows));
  if (args.gmem_b_down != nullptr) {
    auto const* const b_up = static_cast<gemm::bf16 const*>(args.gmem_b_up);
    for (std::int64_t half = 0; half < halves; ++half) {
      p.biases.up[half] = {b_up + half * n, halves * n, 1};
    }
    p.biases.down = {static_cast<gemm::bf16 const*>(args.gmem_b_down), d, 1};
  }
  p.activation.activation = args.activation;
  p.activation.ragged_extent = static_cast<int>(rows);
  return error;
}

}  // namespace

cudaError_t launch_forward(ForwardArguments const& args, int sm_count, cudaStream_t stream) {
  ExchangeShape const& s = args.exchange.shape;
  if (s.experts > kMaxExperts || s.ranks > kMaxRanks || (s.rows_cross_once() && !serves_once(s)) ||
      s.hidden % 8 != 0 || s.intermediate % 8 != 0 || s.max_top_k > kMaxChoices ||
      (args.gmem_b_up == nullptr) != (args.gmem_b_down == nullptr) ||
      (args.gmem_b_down != nullptr && !adds_biases(args.activation.kind)) ||
      s.block_rows != kPlain.tile.m || s.gated != args.activation.gated() ||
      sm_count < kCtasOfPair) {
    return cudaErrorInvalidValue;
  }
  ForwardParams params{.exchange = args.exchange,
                       .gmem_x = static_cast<char const*>(args.gmem_x),
                       .x_pitch_bytes = 2 * args.x_pitch,
                       .gmem_o = static_cast<gemm::bf16*>(args.gmem_o),
                       .lag = args.lag,
                       .saved = args.saved};
  cudaError_t const error = make_params(args, params);
  if (error != cudaSuccess) return error;
  return cuda::with_activation_kind(args.activation.kind, [&](auto kind) {
    return launch_forward_of<decltype(kind)::value>(params, sm_count, stream);
  });
}

}  // namespace tessera::expert_parallel
