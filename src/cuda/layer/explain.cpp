// SPDX-License-Identifier: Apache-2.0
// What a forward call would launch, asked with the arguments of a call whose tensors are contiguous and aligned.
#include <string>

#include "cuda/layer/arguments.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/select.hpp"
#include "tessera/work.hpp"

namespace tessera::cuda {
namespace {

constexpr char kPlain[] = "one thread per output, fp32 sums in order";

OpExplanation explanation(work::OpWork const& work, Refusal const& refusal, std::string fast) {
  OpExplanation out;
  out.op = work.op;
  out.flops = work.flops;
  out.bytes = work.bytes();
  out.candidates.push_back(
      {"cuda/fast", !refusal.refused(), refusal.refused() ? refusal.text : std::move(fast)});
  out.candidates.push_back({"cuda/plain", refusal.refused(),
                            refusal.refused() ? kPlain : "the fast kernel serves this call"});
  out.candidates.push_back({"cpu/parallel", false, "the context is on a CUDA device"});
  return out;
}

void set_gemm(OpExplanation& op, std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t gemm_k) {
  op.gemm_m = gemm_m;
  op.gemm_n = gemm_n;
  op.gemm_k = gemm_k;
}

/// Tensors of a call at nowhere().
MoeForwardArgs args_at_nowhere(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  MoeForwardArgs args;
  args.x = args.o = tensor(nowhere(), DType::bf16, {s.tokens, s.hidden});
  args.w_router = tensor(nowhere(), DType::bf16, {s.experts, s.hidden});
  args.weights = weights_without_memory(desc);
  if (desc.save == SavePolicy::h) {
    args.h = tensor(nowhere(), DType::bf16, {desc.num_slots(), desc.up_width() * s.intermediate});
  }
  return args;
}

/// Selection is part of the router's work; where one of its two kernels is refused, both reasons matter.
Refusal refuse_router(MoeDesc const& desc, MoeForwardArgs const& args) {
  MoeShape const& s = desc.shape;
  RouterLogitsArguments logits{};
  logits.x = matrix_rows(args.x);
  logits.w_router = matrix_rows(args.w_router);
  logits.gmem_logits = static_cast<float*>(nowhere());
  logits.hidden = s.hidden;
  logits.experts = static_cast<std::int32_t>(s.experts);
  Refusal const of_logits = refuse(logits);
  if (of_logits.refused() || desc.router.replay) return of_logits;
  RouteArguments route{};
  route.experts = static_cast<std::int32_t>(s.experts);
  route.top_k = static_cast<std::int32_t>(s.top_k);
  return refuse(route);
}

}  // namespace

std::vector<OpExplanation> explain(DeviceContext const& device, MoeDesc const& desc, Pass pass) {
  MoeShape const& s = desc.shape;
  MoeForwardArgs const args = args_at_nowhere(desc);
  std::string const on = "; " + std::to_string(device.sm_count()) + " SMs";
  std::vector<OpExplanation> ops;
  if (desc.router.kind != RouterKind::given) {
    ops.push_back(
        explanation(work::route(desc), refuse_router(desc, args),
                    (desc.router.replay ? "logits by a GEMM, a thread per token scores its ids"
                                        : "logits by a GEMM, a warp per token selects") +
                        on));
    set_gemm(ops.back(), s.tokens, s.experts, s.hidden);
  }
  if (pass == Pass::route) return ops;

  auto const rows = static_cast<double>(desc.num_slots());
  std::int64_t const mean = (desc.num_slots() + s.experts - 1) / s.experts;
  RoutingView const tables{};
  ExpertArguments const experts =
      expert_arguments(desc, args, {tables, nowhere(), nowhere(), static_cast<int*>(nowhere())});
  ops.push_back(explanation(work::up_projection_fwd(desc, rows), refuse(experts.up),
                            "persistent warp-specialised GEMM, gather and activation fused" + on));
  set_gemm(ops.back(), mean, desc.up_width() * s.intermediate, s.hidden);
  ops.push_back(explanation(work::down_projection_fwd(desc, rows), refuse(experts.down),
                            "persistent warp-specialised GEMM" + on));
  set_gemm(ops.back(), mean, s.hidden, s.intermediate);
  ops.push_back(explanation(work::aggregate(desc, rows), refuse(experts.aggregate),
                            "a warp per token and slice of columns, slots in order" + on));
  return ops;
}

}  // namespace tessera::cuda
