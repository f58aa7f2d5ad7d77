// SPDX-License-Identifier: Apache-2.0
// Backends of this build, and what a call would run.
#include <string>

#include "cpu/parallel/layer.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/support.hpp"
#include "tessera/backend.hpp"
#include "tessera/names.hpp"
#include "tessera/work.hpp"

namespace tessera {
namespace {

char const* instruction_set() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return "AVX-512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "AVX2+FMA";
  return "SSE2 (no FMA: elementwise loops are slow on this machine)";
#else
  return "portable code";
#endif
}

/// The GEMM kernels that serve a storage type on this machine.
std::string gemm_text(DType dtype) {
  cpu::GemmKernels const& kernels = cpu::gemm_kernels(dtype == DType::bf16);
  std::string text = kernels.name;
  if (dtype == DType::bf16 && !kernels.multiplies_bf16) {
    text += cpu::avx512_bf16_gemm_kernels() == nullptr
                ? ", operands widened to fp32 (this machine has no AVX-512 BF16)"
                : ", operands widened to fp32 (faster on this machine than AVX-512 BF16)";
  }
  return text;
}

OpExplanation explanation(work::OpWork const& work, std::int64_t gemm_m, std::int64_t gemm_n,
                          std::int64_t gemm_k, std::string tiles) {
  OpExplanation out;
  out.op = work.op;
  out.gemm_m = gemm_m;
  out.gemm_n = gemm_n;
  out.gemm_k = gemm_k;
  out.flops = work.flops;
  out.bytes = work.bytes();
  out.candidates.push_back({"cuda", false, "the context is on the CPU"});
  out.candidates.push_back({"cpu/parallel", true, std::move(tiles)});
  return out;
}

/// Says who chooses, and where rounding moves so much that the model would feel it.
std::string choice(MoeDesc const& desc) {
  if (desc.router.replay) return "scores of given ids";
  if (desc.experts_choose()) {
    return "every expert takes " + std::to_string(desc.expert_capacity()) + " tokens";
  }
  if (!desc.rounds_tokens()) return "selection";
  std::string text = "selection, rows per expert rounded to " + std::to_string(desc.router.tile);
  MoeShape const& s = desc.shape;
  if (s.tokens * s.top_k < 2 * desc.router.tile * s.experts) {
    text += " (under two tiles per expert on average: a large part is dropped or added)";
  }
  return text;
}

std::vector<OpExplanation> explain_ops(Context const& context, MoeDesc const& desc, Pass pass) {
  MoeShape const& s = desc.shape;
  auto const rows = static_cast<double>(desc.num_slots());
  std::int64_t const mean = (desc.num_slots() + s.experts - 1) / s.experts;
  std::int64_t const width = desc.up_width() * s.intermediate, d = s.hidden, n = s.intermediate;
  std::string const on =
      ", " + std::to_string(context.num_threads()) + " threads, " + instruction_set();
  std::string const gemm = std::string(", ") + gemm_text(desc.dtype) + on;
  std::string const router_gemm =
      desc.router_storage() == desc.dtype
          ? gemm
          : std::string(", fp32 router: ") + gemm_text(DType::fp32) + on;
  std::string const row_tasks =
      "blocks of up to " + std::to_string(cpu::kRowBlock) + " rows of an expert" + gemm;
  std::string const column_tasks = "one task per expert and up to " +
                                   std::to_string(cpu::kWideColumnBlock) + " columns of hidden" +
                                   gemm;
  std::string const token_tasks =
      std::to_string(cpu::kAggregateTokens) + " tokens per task, slots in order" + on;
  std::vector<OpExplanation> ops;
  auto const add = [&](work::OpWork const& work, std::int64_t gemm_m, std::int64_t gemm_n,
                       std::int64_t gemm_k, std::string const& tiles) {
    ops.push_back(explanation(work, gemm_m, gemm_n, gemm_k, tiles));
  };
  // Products of quantised operands; gradients of weights are those of bf16.
  auto const add_product = [&](work::OpWork const& work, std::int64_t gemm_m, std::int64_t gemm_n,
                               std::int64_t gemm_k, std::string const& tiles) {
    add(work, gemm_m, gemm_n, gemm_k, tiles);
    if (!desc.quantises()) return;
    auto& candidates = ops.back().candidates;
    candidates.back() = {"cpu/parallel", false,
                         std::string("precision ") + name_of(kPrecisionNames, desc.precision) +
                             ": operands are quantised"};
    candidates.push_back(
        {"cpu/low_precision", true,
         "one expert after another, codes widened to fp32, " + gemm_text(DType::fp32) + on});
  };
  bool const forward = pass == Pass::forward || pass == Pass::route;
  bool const routed = desc.router.kind != RouterKind::given;
  bool const input_gradient = pass == Pass::backward || pass == Pass::backward_input;
  if (routed && forward) {
    add(work::route(desc), s.tokens, s.experts, d,
        std::to_string(cpu::kRouterTokens) + " tokens per task, then " + choice(desc) +
            router_gemm);
  }
  if (pass == Pass::forward) {
    add_product(work::up_projection_fwd(desc, rows), mean, width, d,
                row_tasks + "; gather, bias, activation");
    add_product(work::down_projection_fwd(desc, rows), mean, d, n, row_tasks);
    add(work::aggregate(desc, rows), 0, 0, 0, token_tasks);
  }
  if (input_gradient && desc.save == SavePolicy::x) {
    add_product(work::up_projection_fwd(desc, rows), mean, width, d,
                row_tasks + "; gather, bias: h again");
  }
  if (input_gradient) {
    add_product(work::down_projection_dgrad(desc, rows), mean, n, d,
                row_tasks + "; gather, activation, ds");
    if (routed) {
      std::string const tasks = std::to_string(cpu::kRouterTokens) + " tokens per task";
      add(work::router_dlogits(desc, rows), 0, 0, 0, tasks + on);
      add(work::router_dgrad(desc), s.tokens, d, s.experts, tasks + router_gemm);
    }
    add_product(work::up_projection_dgrad(desc, rows), mean, d, width, row_tasks);
    add(work::aggregate(desc, rows, false), 0, 0, 0, token_tasks);
  }
  if (pass == Pass::backward || pass == Pass::backward_weights) {
    add(work::down_projection_wgrad(desc, rows), d, n, mean, column_tasks);
    add(work::up_projection_wgrad(desc, rows), width, d, mean, column_tasks);
    if (routed) {
      add(work::router_wgrad(desc), s.experts, d, s.tokens,
          "one task per " + std::to_string(cpu::kColumnBlock) + " columns of hidden" + gemm);
    }
  }
  return ops;
}

/// The candidate that multiplies codes on a device.
char const* codes_candidate(Context const& context) {
  if (context.cuda() == nullptr) return "cpu/low_precision";
  bool const has_fp8 =
      cuda::check_multiplies_codes(context.cuda()->architecture(), Precision::fp8).ok();
  return has_fp8 ? "cuda/fp8" : "cuda/mxfp8";
}

/// Says what Precision::automatic took, and why, at each product that fp8 quantises.
void add_automatic(Context const& context, MoeDesc const& given, std::vector<OpExplanation>& ops) {
  Status const gains = ops::check_gains_by_fp8(context, given);
  for (OpExplanation& op : ops) {
    std::string const& name = op.op;
    bool const product = name.ends_with("projection_fwd") || name.ends_with("projection_dgrad");
    if (!product) continue;
    if (gains.ok()) {
      op.candidates.front().reason += "; precision auto takes fp8: a step is expected to be faster";
      continue;
    }
    op.candidates.push_back({codes_candidate(context), false,
                             std::string("precision auto takes native: ") + gains.text()});
  }
}

Status out_of_memory() noexcept {
  return Status::error(StatusCode::out_of_memory, "no memory for the explanation");
}

}  // namespace

Expected<std::vector<BackendInfo>> backends() noexcept {
  try {
    std::vector<BackendInfo> all(2);
    all[0] = {"cpu", true, true,
              std::string("fp32: ") + gemm_text(DType::fp32) + "; bf16: " + gemm_text(DType::bf16)};
    all[1] = cuda::backend_info();
    return all;
  } catch (...) {
    return out_of_memory();
  }
}

Expected<std::vector<OpExplanation>> explain(Context const& context, MoeDesc const& given,
                                             Pass pass) noexcept {
  auto const bytes = workspace_bytes(context, given, pass);  // every rule for the description
  if (!bytes.ok()) return bytes.status();
  MoeDesc const desc = ops::resolved(context, given);
  try {
    bool const on_gpu = context.cuda() != nullptr;
    auto ops =
        on_gpu ? cuda::explain(*context.cuda(), desc, pass) : explain_ops(context, desc, pass);
    if (given.precision == Precision::automatic) add_automatic(context, given, ops);
    return ops;
  } catch (...) {
    return out_of_memory();
  }
}

}  // namespace tessera
