// SPDX-License-Identifier: Apache-2.0
// Explains what a call would launch, asked with the arguments of a call whose tensors are contiguous and aligned.
#include <string>

#include "core/gradient_dtype.hpp"
#include "core/router_math.hpp"
#include "cuda/host/split_fp32.hpp"
#include "cuda/layer/arguments.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/plan.hpp"
#include "cuda/layer/select.hpp"
#include "tessera/names.hpp"
#include "tessera/work.hpp"

namespace tessera::cuda {
namespace {

constexpr char kPlain[] = "one thread per output, fp32 sums in order";
constexpr char kFew[] =
    "few tokens: both projections and the sums in one launch, weights through rings of warps";
constexpr char kAggregate[] = "a warp per token and slice of columns, slots in order";

/// M_e of balanced routing.
std::int64_t mean_rows(MoeDesc const& desc) noexcept {
  return (desc.num_slots() + desc.shape.experts - 1) / desc.shape.experts;
}

/// The GPU that is asked: its architecture, and what is said of it behind every reason.
struct Asked {
  Architecture architecture;
  int sm_count;
  std::string on;
};

/// Says how a GEMM of sm_100a would run.
std::string sm100_text(Asked const& asked, char const* gemm, bool by_pairs, char const* fused) {
  return std::string("sm_100a: persistent ") + gemm + ", sums in tensor memory, by " +
         (by_pairs ? "pairs of CTAs" : "one CTA") + fused + "; " + kUnproven + asked.on;
}

/// Says how a GEMM of the experts would run.
template <class Arguments>
std::string gemm_text(Asked const& asked, Arguments const& args, char const* fused) {
  if (asked.architecture == Architecture::sm_90) {
    return std::string("persistent warp-specialised GEMM") + fused + asked.on;
  }
  return sm100_text(asked, "GEMM", takes_pairs(args, asked.sm_count), fused);
}

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

constexpr char kFusedDown[] = "; gather, activation, ds and codes of dh fused";
constexpr char kFusedUp[] = "; gather, activation and codes of h and a fused";

/// Ops on codes, each of which has one kernel.
class QuantisedOps {
 public:
  QuantisedOps(MoeDesc const& desc, Asked const& asked) noexcept : desc_(desc), asked_(asked) {}

  /// A kernel that is bound by its bytes; `what`: what it does, with a semicolon behind it, or nothing.
  [[nodiscard]] OpExplanation copy(work::OpWork const& work, std::string const& what = "") const {
    std::string const reason = what + "bound by its bytes";
    return explained(work, is_mxfp8() ? reason + "; " + kUnproven : reason);
  }
  [[nodiscard]] OpExplanation gemm(work::OpWork const& work, char const* fused = "") const {
    bool const by_pairs = takes_pairs_sm100(
        desc_.num_slots(), static_cast<std::int32_t>(desc_.shape.experts), asked_.sm_count);
    return explained(
        work, is_mxfp8() ? sm100_text(asked_, "GEMM of e4m3 with scales of 32", by_pairs, fused)
                         : std::string(
                               "persistent warp-specialised GEMM of e4m3, sums in fp32 every 128") +
                               fused + asked_.on);
  }

 private:
  [[nodiscard]] bool is_mxfp8() const { return desc_.precision == Precision::mxfp8; }
  [[nodiscard]] OpExplanation explained(work::OpWork const& work, std::string reason) const {
    std::string const precision = name_of(kPrecisionNames, desc_.precision);
    OpExplanation out = explanation(work, {}, {});
    out.candidates[0] = {"cuda/" + precision, true, std::move(reason)};
    out.candidates[1] = {"cuda/fast", false, "precision " + precision + ": operands are quantised"};
    return out;
  }

  MoeDesc const& desc_;
  Asked const& asked_;
};

void set_gemm(OpExplanation& op, std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t gemm_k) {
  op.gemm_m = gemm_m;
  op.gemm_n = gemm_n;
  op.gemm_k = gemm_k;
}

/// Tensors of a call at nowhere().
MoeForwardArgs forward_at_nowhere(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  MoeForwardArgs args;
  args.x = args.o = tensor(nowhere(), DType::bf16, {s.tokens, s.hidden});
  args.w_router = tensor(nowhere(), desc.router_storage(), {s.experts, s.hidden});
  args.weights = weights_without_memory(desc);
  if (desc.save == SavePolicy::h) {
    args.h = tensor(nowhere(), DType::bf16, {desc.num_slots(), desc.up_width() * s.intermediate});
  }
  return args;
}

MoeBackwardArgs backward_at_nowhere(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  MoeBackwardArgs args;
  args.d_o = args.x = args.dx = tensor(nowhere(), DType::bf16, {s.tokens, s.hidden});
  args.h = tensor(nowhere(), DType::bf16, {desc.num_slots(), desc.up_width() * s.intermediate});
  args.weights = weights_without_memory(desc);
  args.gradients = gradients_without_memory(desc);
  return args;
}

/// Those of a call that come first; the others differ in number alone, and only in the last chunk.
Columns first_columns(MoeDesc const& desc) { return {0, column_chunk(desc)}; }

/// Selection is part of the router's work; where one of its two kernels is refused, both reasons matter.
Refusal refuse_router(MoeDesc const& desc, MoeForwardArgs const& args, Architecture architecture) {
  MoeShape const& s = desc.shape;
  RouterLogitsArguments logits{};
  logits.x = matrix_rows(args.x);
  logits.w_router = matrix_rows(args.w_router);
  logits.gmem_logits = static_cast<float*>(nowhere());
  logits.hidden = s.hidden;
  logits.experts = static_cast<std::int32_t>(s.experts);
  logits.is_fp32 = core::has_fp32_router(desc);
  Refusal const of_logits =
      prefers_few_tokens(logits) ? refuse(logits) : refuse(logits, architecture);
  if (of_logits.refused() || desc.router.replay || desc.experts_choose()) return of_logits;
  RouteArguments route{};
  route.experts = static_cast<std::int32_t>(s.experts);
  route.top_k = static_cast<std::int32_t>(s.top_k);
  return refuse(route);
}

std::string how_routed(MoeDesc const& desc) {
  bool const fp32 = core::has_fp32_router(desc);
  std::string const logits = desc.shape.tokens <= kGemvTokens
                                 ? "few tokens: logits by a warp per expert, "
                             : fp32 ? "logits by a GEMM of x and fp32 weights as three bf16, "
                                    : "logits by a GEMM, ";
  if (desc.router.replay) return logits + "a thread per token scores its ids";
  if (desc.experts_choose()) return logits + "a CTA per expert chooses its tokens";
  std::string const select = logits + "lanes of a warp select";
  return desc.rounds_tokens() ? select + ", a CTA per expert rounds its tokens" : select;
}

std::vector<OpExplanation> explain_forward(MoeDesc const& desc, Pass pass, Asked const& asked) {
  MoeShape const& s = desc.shape;
  std::string const& on = asked.on;
  MoeForwardArgs const args = forward_at_nowhere(desc);
  std::vector<OpExplanation> ops;
  if (desc.router.kind != RouterKind::given) {
    ops.push_back(explanation(work::route(desc), refuse_router(desc, args, asked.architecture),
                              how_routed(desc) + on));
    set_gemm(ops.back(), s.tokens, s.experts, s.hidden);
  }
  if (pass == Pass::route) return ops;

  auto const rows = static_cast<double>(desc.num_slots());
  ExpertArguments const experts =
      expert_arguments(desc, args, {{}, nowhere(), nowhere(), static_cast<int*>(nowhere())});
  QuantisedOps const quantised(desc, asked);
  bool const in_place = rows_lie_in(desc, args.o);
  bool const few =
      has_few_tokens(desc) && prefers_few_tokens(experts_fwd_arguments(
                                  experts, in_place, static_cast<std::int32_t*>(nowhere())));
  if (desc.quantises()) {
    ops.push_back(quantised.copy(work::quantise_rows(desc)));
    if (!desc.weight_codes) ops.push_back(quantised.copy(work::quantise_weights(desc, true)));
    ops.push_back(quantised.gemm(work::up_projection_fwd(desc, rows), kFusedUp));
  } else {
    ops.push_back(
        explanation(work::up_projection_fwd(desc, rows),
                    few ? Refusal{} : refuse(experts.up, asked.architecture),
                    few ? kFew : gemm_text(asked, experts.up, ", gather and activation fused")));
  }
  set_gemm(ops.back(), mean_rows(desc), desc.up_width() * s.intermediate, s.hidden);
  if (desc.quantises()) {
    ops.push_back(quantised.gemm(work::down_projection_fwd(desc, rows)));
  } else {
    ops.push_back(explanation(
        work::down_projection_fwd(desc, rows),
        few ? Refusal{} : refuse(columns_of(experts.down, first_columns(desc)), asked.architecture),
        few ? kFew : gemm_text(asked, experts.down, "")));
  }
  set_gemm(ops.back(), mean_rows(desc), s.hidden, s.intermediate);
  std::string const when = in_place ? ", for rows that have scores; others lie in their place" : "";
  ops.push_back(explanation(work::aggregate(desc, rows),
                            refuse(columns_of(experts.aggregate, first_columns(desc))),
                            (few ? kFew : kAggregate) + when + on));
  return ops;
}

/// Refuses calls that the fast router_dlogits does not serve.
Refusal refuse_dlogits(MoeDesc const& desc, RouterGradientArguments const& args) {
  if (desc.router.replay) return {"replayed ids may repeat within a token"};
  if (splits_rounded(desc)) {
    RoundedGradientArguments rounded{};
    rounded.dscores = args.dscores;
    rounded.rounded.dlogits = args.dlogits;
    return refuse(rounded);
  }
  return refuse(args);
}

/// The router's GEMMs of backward, and what makes their operand.
struct RouterBackward {
  RouterGradientArguments dlogits{};
  RouterDgradArguments dgrad{};
  RouterWgradArguments wgrad{};
};

RouterBackward router_backward_at_nowhere(MoeDesc const& desc) {
  MoeShape const& s = desc.shape;
  RouterBackward out;
  out.dlogits.dlogits.experts = out.dgrad.experts = out.wgrad.experts =
      static_cast<std::int32_t>(s.experts);
  if (core::has_fp32_router(desc)) {
    out.dgrad.terms = kDgradTerms;
    out.wgrad.terms = kWgradTerms;
  }
  out.dlogits.dlogits.top_k = static_cast<std::int32_t>(s.top_k);
  if (desc.experts_vary()) {
    out.dlogits.dlogits.gmem_token_offsets = static_cast<std::int32_t const*>(nowhere());
  }
  if (desc.bias) {
    out.dlogits.dscores.d_o = {nowhere(), s.tokens, s.hidden};
    out.dlogits.dscores.b_down = weight_views(desc, weights_without_memory(desc)).b_down;
    out.dlogits.dscores.hidden = s.hidden;
  }
  out.dgrad.w_router = {nowhere(), s.experts, s.hidden};
  out.dgrad.gmem_dx = nowhere();
  out.dgrad.dx_pitch = out.dgrad.hidden = out.wgrad.hidden = s.hidden;
  out.dgrad.tokens = s.tokens;
  out.wgrad.x = {nowhere(), s.tokens, s.hidden};
  return out;
}

std::vector<OpExplanation> explain_backward(MoeDesc const& desc, Pass pass, Asked const& asked) {
  MoeShape const& s = desc.shape;
  std::string const& on = asked.on;
  Architecture const architecture = asked.architecture;
  auto const rows = static_cast<double>(desc.num_slots());
  std::int64_t const mean = mean_rows(desc), width = desc.up_width() * s.intermediate;
  std::string const gemm = "persistent warp-specialised GEMM";
  std::string const terms = core::has_fp32_router(desc) ? ", fp32 values as two bf16" : "";
  MoeBackwardArgs const args = backward_at_nowhere(desc);
  BackwardArguments const experts = backward_arguments(
      desc, args,
      {{}, nullptr, nowhere(), nowhere(), nullptr, nowhere(), static_cast<int*>(nowhere())});
  std::vector<OpExplanation> ops;
  auto const add = [&](work::OpWork const& work, Refusal const& refusal, std::string const& fast,
                       std::int64_t gemm_m, std::int64_t gemm_n, std::int64_t gemm_k) {
    ops.push_back(explanation(work, refusal, fast));
    set_gemm(ops.back(), gemm_m, gemm_n, gemm_k);
  };
  bool const routed = desc.router.kind != RouterKind::given;
  RouterBackward const router = router_backward_at_nowhere(desc);
  bool const codes = desc.quantises();
  QuantisedOps const quantised(desc, asked);
  if (codes) {
    bool const h = pass != Pass::backward_weights;
    if (h && desc.save == SavePolicy::x) {
      if (!desc.weight_codes) ops.push_back(quantised.copy(work::quantise_weights(desc, false)));
      ops.push_back(quantised.gemm(work::up_projection_fwd(desc, rows), kFusedUp));
      set_gemm(ops.back(), mean, width, s.hidden);
    }
    if (h) {
      ops.push_back(quantised.copy(work::quantise_rows(desc), "d_o; "));
      if (!desc.weight_codes) ops.push_back(quantised.copy(work::quantise_weights(desc, true)));
    }
    if (pass != Pass::backward_input) {
      ops.push_back(quantised.copy(work::dequantise_rows(desc),
                                   "x8 to bf16, which gradients of weights multiply; "));
    }
  }
  if (pass != Pass::backward_weights) {
    if (codes) {
      ops.push_back(quantised.gemm(work::down_projection_dgrad(desc, rows), kFusedDown));
      set_gemm(ops.back(), mean, s.intermediate, s.hidden);
    } else {
      add(work::down_projection_dgrad(desc, rows), refuse(experts.down_dgrad, architecture),
          gemm_text(asked, experts.down_dgrad, ", gather, activation and ds fused"), mean,
          s.intermediate, s.hidden);
    }
    if (routed) {
      add(work::router_dlogits(desc, rows), refuse_dlogits(desc, router.dlogits),
          "a lane per slot, from the partial sums of ds" + on, 0, 0, 0);
      bool const in_rows = !core::has_softmax_over_all(desc.router.kind) && !codes;
      std::string const else_for =
          desc.rounds_tokens() ? "for tokens with a dropped or added expert, and " : "";
      add(work::router_dgrad(desc), refuse(router.dgrad, architecture),
          (in_rows ? "a term of each dx row; " + else_for + "with dlogits of other losses a " + gemm
                   : gemm) +
              terms + on,
          s.tokens, s.hidden, s.experts);
    }
    if (codes) {
      ops.push_back(quantised.gemm(work::up_projection_dgrad(desc, rows)));
      set_gemm(ops.back(), mean, s.hidden, width);
    } else {
      add(work::up_projection_dgrad(desc, rows),
          refuse(columns_of(experts.up_dgrad, first_columns(desc)), architecture),
          gemm_text(asked, experts.up_dgrad, ""), mean, s.hidden, width);
    }
    if (!rows_lie_in(desc, args.dx)) {
      add(work::aggregate(desc, rows, false),
          refuse(columns_of(experts.aggregate, first_columns(desc))), kAggregate + on, 0, 0, 0);
    }
  }
  if (pass != Pass::backward_input) {
    add(work::down_projection_wgrad(desc, rows), refuse(experts.down_wgrad, architecture),
        gemm_text(asked, experts.down_wgrad, ", gather fused"), s.hidden, s.intermediate, mean);
    add(work::up_projection_wgrad(desc, rows), refuse(experts.up_wgrad, architecture),
        gemm_text(asked, experts.up_wgrad, ", gather fused"), width, s.hidden, mean);
    if (routed) {
      add(work::router_wgrad(desc), refuse(router.wgrad, architecture),
          gemm + " over chunks of tokens" + terms + on, s.experts, s.hidden, s.tokens);
    }
  }
  return ops;
}

}  // namespace

std::vector<OpExplanation> explain(DeviceContext const& device, MoeDesc const& desc, Pass pass) {
  Asked const asked{device.architecture(), device.sm_count(),
                    "; " + std::to_string(device.sm_count()) + " SMs"};
  bool const forward = pass == Pass::forward || pass == Pass::route;
  return forward ? explain_forward(desc, pass, asked) : explain_backward(desc, pass, asked);
}

}  // namespace tessera::cuda
