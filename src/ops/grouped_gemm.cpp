// SPDX-License-Identifier: Apache-2.0
// grouped_gemm: varlen-M and varlen-K building blocks
#include "tessera/grouped_gemm.hpp"

#include "core/tensor_check.hpp"
#include "core/workspace.hpp"
#include "cpu/parallel/grouped_gemm.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace {

struct Sizes {
  std::int64_t rows = 0, experts = 0, gemm_m = 0, gemm_n = 0, gemm_k = 0;
};

Expected<Sizes> sizes_of(Context const& context, GroupedGemmArgs const& args) noexcept {
  if (args.kind != GroupedGemmKind::varlen_m && args.kind != GroupedGemmKind::varlen_k) {
    return Status::invalid("kind=%d: 0 varlen_m or 1 varlen_k", static_cast<int>(args.kind));
  }
  if (args.mode != GradientMode::write && args.mode != GradientMode::accumulate) {
    return Status::invalid("mode=%d: 0 write or 1 accumulate", static_cast<int>(args.mode));
  }
  bool const varlen_m = args.kind == GroupedGemmKind::varlen_m;
  if (!varlen_m && args.transpose_b) return Status::invalid("transpose_b: only with varlen_m");
  if (varlen_m && args.mode == GradientMode::accumulate) {
    return Status::invalid("mode=accumulate: only with varlen_k");
  }
  if (args.a.rank != 2 || args.b.rank != (varlen_m ? 3 : 2) || args.expert_offsets.rank != 1) {
    return Status::invalid("a, b, expert_offsets have ranks %d, %d, %d; 2, %d, 1 are needed",
                           args.a.rank, args.b.rank, args.expert_offsets.rank, varlen_m ? 3 : 2);
  }
  if (context.cuda() == nullptr && args.a.dtype == DType::fp16) {
    return Status::unsupported("dtype=%d: this version serves fp32 and bf16",
                               static_cast<int>(args.a.dtype));
  }
  if (args.expert_offsets.dtype != DType::int32 && args.expert_offsets.dtype != DType::int64) {
    return Status::invalid("expert_offsets: dtype %d; int32 or int64 are needed",
                           static_cast<int>(args.expert_offsets.dtype));
  }
  Sizes out;
  out.rows = args.a.shape[0];
  out.experts = args.expert_offsets.shape[0] - 1;
  out.gemm_m = varlen_m ? 0 : args.a.shape[1];
  out.gemm_k = varlen_m ? args.a.shape[1] : 0;
  out.gemm_n = !varlen_m ? args.b.shape[1] : args.transpose_b ? args.b.shape[2] : args.b.shape[1];
  constexpr std::int64_t kMaxSize = 0x7fffffff;
  for (std::int64_t const size : {out.rows, out.experts, out.gemm_m, out.gemm_n, out.gemm_k}) {
    if (size < 0 || size > kMaxSize) {
      return Status::invalid("a size is %lld: must be in [0, 2^31)", static_cast<long long>(size));
    }
  }
  if (out.experts < 1) return Status::invalid("expert_offsets: at least 2 values are needed");
  if (context.cuda() != nullptr) TESSERA_TRY(cuda::check_supported(args));
  return out;
}

struct Plan {
  core::Region<float> scratch;
  std::int64_t floats_per_thread = 0;
  std::size_t bytes = 0;
};

Plan plan_of(Context const& context, GroupedGemmArgs const& args, Sizes const& sizes) noexcept {
  core::WorkspacePlan plan;
  Plan out;
  if (context.cuda() != nullptr) {
    out.bytes = cuda::grouped_gemm_workspace_bytes(args);
    return out;
  }
  out.floats_per_thread = args.kind == GroupedGemmKind::varlen_k
                              ? cpu::grouped_gemm_varlen_k_scratch(sizes.gemm_n)
                              : cpu::grouped_gemm_varlen_m_scratch(sizes.gemm_n, sizes.gemm_k);
  out.floats_per_thread = (out.floats_per_thread + 15) / 16 * 16;  // threads share no cache line
  out.scratch = plan.add<float>(out.floats_per_thread * context.num_threads());
  out.bytes = plan.bytes();
  return out;
}

Status check(Context const& context, GroupedGemmArgs const& args, Sizes const& sizes,
             std::size_t workspace) noexcept {
  core::TensorCheck check{context.device()};
  DType const dtype = args.a.dtype == DType::bf16 ? DType::bf16 : DType::fp32;
  bool const on_cuda = context.cuda() != nullptr;
  check.input("a", args.a, dtype, {args.a.shape[0], args.a.shape[1]});
  if (on_cuda) check.contiguous("a", args.a);
  if (args.kind == GroupedGemmKind::varlen_k) {
    check.input("b", args.b, dtype, {sizes.rows, sizes.gemm_n});
    check.absent("bias", args.bias, "varlen_k has none");
    check.output("c", args.c, dtype, {sizes.experts, sizes.gemm_m, sizes.gemm_n});
  } else {
    if (args.transpose_b) {
      check.input("b", args.b, dtype, {sizes.experts, sizes.gemm_k, sizes.gemm_n});
    } else {
      check.input("b", args.b, dtype, {sizes.experts, sizes.gemm_n, sizes.gemm_k});
    }
    check.optional_input("bias", args.bias, dtype, {sizes.experts, sizes.gemm_n});
    check.output("c", args.c, dtype, {sizes.rows, sizes.gemm_n});
    if (on_cuda) check.contiguous("c", args.c);
  }
  check.input("expert_offsets", args.expert_offsets, args.expert_offsets.dtype,
              {sizes.experts + 1});
  check.buffer("workspace", args.workspace, workspace, 1, true);
  TESSERA_TRY(check.finish());
  if (on_cuda) return {};  // offsets are looked at there
  cpu::GroupOffsets const offsets{args.expert_offsets.data, args.expert_offsets.dtype};
  for (std::int64_t e = 0; e <= sizes.experts; ++e) {
    std::int64_t const least = e == 0 ? 0 : offsets[e - 1], most = e == 0 ? 0 : sizes.rows;
    if (offsets[e] < least || offsets[e] > most) {
      return Status::invalid(
          "expert_offsets[%lld]=%lld: they start at 0, never decrease and end at most at %lld rows",
          static_cast<long long>(e), static_cast<long long>(offsets[e]),
          static_cast<long long>(sizes.rows));
    }
  }
  return {};
}

std::int64_t stride_or(ConstTensor const& tensor, int axis, std::int64_t dense) noexcept {
  return tensor.shape[axis] > 1 ? tensor.stride[axis] : dense;
}

template <class T>
void run_varlen_m(GroupedGemmArgs const& args, Sizes const& s,
                  cpu::Threads const& threads) noexcept {
  cpu::VarlenM<T> out{.rows = s.rows,
                      .experts = s.experts,
                      .gemm_n = s.gemm_n,
                      .gemm_k = s.gemm_k,
                      .a = ops::rows_of<T>(args.a),
                      .b = {},
                      .b_expert_stride = stride_or(args.b, 0, s.gemm_n * s.gemm_k),
                      .bias = static_cast<T const*>(args.bias.data),
                      .bias_expert_stride = stride_or(args.bias, 0, s.gemm_n),
                      .c = ops::rows_of<T>(args.c),
                      .offsets = {args.expert_offsets.data, args.expert_offsets.dtype}};
  cpu::MatrixView<T const> const stored{static_cast<T const*>(args.b.data),
                                        stride_or(args.b, 1, args.b.shape[2]), 1};
  out.b = args.transpose_b ? stored : stored.transposed();
  cpu::grouped_gemm_varlen_m(out, threads);
}

template <class T>
void run_varlen_k(GroupedGemmArgs const& args, Sizes const& s,
                  cpu::Threads const& threads) noexcept {
  cpu::VarlenK<T> const out{.experts = s.experts,
                            .gemm_m = s.gemm_m,
                            .gemm_n = s.gemm_n,
                            .a = ops::rows_of<T>(args.a),
                            .b = ops::rows_of<T>(args.b),
                            .c = {static_cast<T*>(args.c.data), stride_or(args.c, 1, s.gemm_n), 1},
                            .c_expert_stride = stride_or(args.c, 0, s.gemm_m * s.gemm_n),
                            .offsets = {args.expert_offsets.data, args.expert_offsets.dtype},
                            .mode = args.mode};
  cpu::grouped_gemm_varlen_k(out, threads);
}

}  // namespace

Expected<std::size_t> grouped_gemm_workspace_bytes(Context const& context,
                                                   GroupedGemmArgs const& args) noexcept {
  auto const sizes = sizes_of(context, args);
  if (!sizes.ok()) return sizes.status();
  return plan_of(context, args, sizes.value()).bytes;
}

Status grouped_gemm(Context const& context, GroupedGemmArgs const& args, Stream stream) noexcept {
  auto const sizes = sizes_of(context, args);
  if (!sizes.ok()) return sizes.status();
  Plan const plan = plan_of(context, args, sizes.value());
  TESSERA_TRY(check(context, args, sizes.value(), plan.bytes));
  if (context.cuda() != nullptr) return cuda::grouped_gemm(*context.cuda(), args, stream);
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  cpu::Threads const threads{context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread};
  ops::with_storage(args.a.dtype, [&]<class T>(T) {
    args.kind == GroupedGemmKind::varlen_m ? run_varlen_m<T>(args, sizes.value(), threads)
                                           : run_varlen_k<T>(args, sizes.value(), threads);
  });
  return {};
}

}  // namespace tessera
