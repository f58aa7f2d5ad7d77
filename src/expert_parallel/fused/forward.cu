// SPDX-License-Identifier: Apache-2.0
// From arguments to the parameters of the fused forward kernel, and to the instance of its activation.
#include "cuda/host/activation_kinds.hpp"
#include "cuda/host/tensor_map.hpp"
#include "cuda/host/weight_maps.hpp"
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

// Of whole tiles of B, and of the halves that a pair of CTAs shares.
template <gemm::GemmConfig kGemm, gemm::GemmConfig kShared>
cudaError_t make_b_maps(gemm::GemmParams& p, SharedMaps& shared, cuda::WeightRows const (&w)[2],
                        int experts, std::int64_t rows, std::int64_t columns) {
  cudaError_t const error = cuda::host::make_weight_maps<kGemm>(p, w, experts, rows, columns);
  if (error != cudaSuccess || p.b_in_boxes) return error;
  return cuda::host::make_tile_map(shared.b, w, kShared.b_halves(), experts, rows, columns, false,
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
  then(host::make_matrix_map(p.up.a, x.gmem_pool, rows, d, d, kPlain.tile.m));
  then(host::make_matrix_map(p.down.a, args.gmem_a, rows, n, n, kPlain.tile.m));
  then(host::make_matrix_map(p.shared_up.a, x.gmem_pool, rows, d, d, gemm::kSubtileM));
  then(host::make_matrix_map(p.shared_down.a, args.gmem_a, rows, n, n, gemm::kSubtileM));
  std::int64_t const halves = x.shape.gated ? 2 : 1;
  auto const* const w_up = static_cast<gemm::bf16 const*>(args.gmem_w_up);
  cuda::WeightRows const up[2] = {weight_rows(w_up, halves * n * d, n, d),
                                  weight_rows(w_up + n * d, halves * n * d, n, d)};
  cuda::WeightRows const down[2] = {weight_rows(args.gmem_w_down, d * n, d, n), {}};
  if (x.shape.gated) {
    then(make_b_maps<kGated, kGatedShared>(p.up, p.shared_up, up, experts, n, d));
  } else {
    then(make_b_maps<kPlain, kPlainShared>(p.up, p.shared_up, up, experts, n, d));
  }
  then(make_b_maps<kPlain, kPlainShared>(p.down, p.shared_down, down, experts, d, n));
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
  p.up.k_tiles = static_cast<int>((d + kPlain.tile.k - 1) / kPlain.tile.k);
  p.down.k_tiles = static_cast<int>((n + kPlain.tile.k - 1) / kPlain.tile.k);
  return error;
}

}  // namespace

cudaError_t launch_forward(ForwardArguments const& args, int sm_count, cudaStream_t stream) {
  ExchangeShape const& s = args.exchange.shape;
  if (s.experts > kMostExperts || s.ranks > kMaxRanks || (s.rows_cross_once() && !serves_once(s)) ||
      s.hidden % 8 != 0 || s.intermediate % 8 != 0 || s.max_top_k > kMostChoices ||
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
                       .kept = args.kept};
  cudaError_t const error = make_params(args, params);
  if (error != cudaSuccess) return error;
  return cuda::with_activation_kind(args.activation.kind, [&](auto kind) {
    return launch_forward_of<decltype(kind)::value>(params, sm_count, stream);
  });
}

}  // namespace tessera::expert_parallel
