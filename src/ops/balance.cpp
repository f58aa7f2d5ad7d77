// SPDX-License-Identifier: Apache-2.0
// router_loss and update_selection_bias
#include "tessera/balance.hpp"

#include <cmath>

#include "core/desc_check.hpp"
#include "core/tensor_check.hpp"
#include "core/workspace.hpp"
#include "cpu/parallel/router_loss.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace {

using Int = long long;  // for %lld

struct LossPlan {
  core::Region<float> cost;            ///< [E]
  core::Region<float> partial_losses;  ///< [blocks, 2]
  core::Region<float> scratch;
  std::int64_t floats_per_thread = 0;
  std::size_t bytes = 0;
};

LossPlan plan_loss(Context const& context, MoeDesc const& desc) noexcept {
  core::WorkspacePlan plan;
  LossPlan out;
  out.cost = plan.add<float>(desc.shape.experts);
  out.partial_losses = plan.add<float>(2 * cpu::router_loss_blocks(desc.shape.tokens));
  out.floats_per_thread = cpu::router_loss_scratch(desc);
  out.scratch = plan.add<float>(out.floats_per_thread * context.num_threads());
  out.bytes = plan.bytes();
  return out;
}

Status check_context(Context const& context, char const* name) noexcept {
  if (context.device().kind == DeviceKind::cpu) return {};
  return Status::unsupported("%s: this version runs it on the CPU only", name);
}

Status check_loss_desc(Context const& context, MoeDesc const& desc) noexcept {
  TESSERA_TRY(check_context(context, "router_loss"));
  TESSERA_TRY(core::check_desc(desc));
  if (desc.router.kind == RouterKind::given) {
    return Status::invalid("router=given: it has no logits; set desc.router.kind");
  }
  return {};
}

std::int64_t count_at(ConstTensor const& counts, std::int64_t e) noexcept {
  return counts.dtype == DType::int64 ? static_cast<std::int64_t const*>(counts.data)[e]
                                      : static_cast<std::int32_t const*>(counts.data)[e];
}

/// int32 where the tensor is that, else int64.
DType counts_dtype(ConstTensor const& counts) noexcept {
  return counts.dtype == DType::int32 ? DType::int32 : DType::int64;
}

/// The sum of counts below 2^62, all of them checked.
Expected<std::int64_t> sum_counts(ConstTensor const& counts) noexcept {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  std::int64_t sum = 0;
  for (std::int64_t e = 0; e < counts.shape[0]; ++e) {
    std::int64_t const count = count_at(counts, e);
    if (count < 0 || count > kMost - sum) {
      return Status::invalid(
          "topk_counts[%lld]=%lld: counts are not negative and add up to less than 2^62",
          static_cast<Int>(e), static_cast<Int>(count));
    }
    sum += count;
  }
  return sum;
}

Status check_loss(Context const& context, MoeDesc const& desc, RouterLossArgs const& args,
                  std::size_t workspace) noexcept {
  for (float const value : {args.balance, args.z, args.d_loss}) {
    if (!std::isfinite(value)) {
      return Status::invalid("balance=%g, z=%g, d_loss=%g: must be finite",
                             static_cast<double>(args.balance), static_cast<double>(args.z),
                             static_cast<double>(args.d_loss));
    }
  }
  if (args.scope_tokens < 0) {
    return Status::invalid("scope_tokens=%lld: 0 for the tokens of logits, or their number in all",
                           static_cast<Int>(args.scope_tokens));
  }
  MoeShape const& s = desc.shape;
  core::TensorCheck check{context.device()};
  check.input("logits", args.logits, DType::fp32, {s.tokens, s.experts});
  if (args.balance != 0.0f || args.topk_counts.present()) {
    check.input("topk_counts", args.topk_counts, counts_dtype(args.topk_counts), {s.experts});
  }
  check.optional_output("losses", args.losses, DType::fp32, {2});
  check.optional_output("dlogits", args.dlogits, DType::fp32, {s.tokens, s.experts});
  check.buffer("workspace", args.workspace, workspace, 1, true);
  return check.finish();
}

}  // namespace

Expected<std::size_t> router_loss_workspace_bytes(Context const& context,
                                                  MoeDesc const& desc) noexcept {
  TESSERA_TRY(check_loss_desc(context, desc));
  return plan_loss(context, desc).bytes;
}

Status router_loss(Context const& context, MoeDesc const& desc, RouterLossArgs const& args,
                   Stream) noexcept {
  TESSERA_TRY(check_loss_desc(context, desc));
  LossPlan const plan = plan_loss(context, desc);
  TESSERA_TRY(check_loss(context, desc, args, plan.bytes));
  std::int64_t total = 0;
  if (args.topk_counts.present()) {
    auto const sum = sum_counts(args.topk_counts);
    if (!sum.ok()) return sum.status();
    total = sum.value();
  }

  MoeShape const& s = desc.shape;
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  auto const scope = static_cast<double>(args.scope_tokens != 0 ? args.scope_tokens : s.tokens);
  float* const cost = plan.cost.in(base);
  for (std::int64_t e = 0; e < s.experts; ++e) {
    double const share = total == 0 || args.balance == 0.0f
                             ? 0
                             : static_cast<double>(count_at(args.topk_counts, e)) /
                                   (static_cast<double>(total) * scope);
    cost[e] = static_cast<float>(static_cast<double>(args.balance) *
                                 static_cast<double>(s.experts) * share);
  }
  float* const partial = plan.partial_losses.in(base);
  cpu::router_loss(
      desc,
      {.logits = ops::rows_of(args.logits),
       .cost = cost,
       .z = static_cast<float>(static_cast<double>(args.z) / scope),
       .d_loss = args.d_loss,
       .partial_losses = partial,
       .dlogits = args.dlogits.present() ? ops::rows_of(args.dlogits) : cpu::MutableRows{}},
      {context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread});
  if (!args.losses.present()) return {};
  auto* const losses = static_cast<float*>(args.losses.data);
  losses[0] = losses[1] = 0.0f;
  for (std::int64_t block = 0; block < cpu::router_loss_blocks(s.tokens); ++block) {
    losses[0] += partial[2 * block];
    losses[1] += partial[2 * block + 1];
  }
  return {};
}

Status update_selection_bias(Context const& context, SelectionBiasArgs const& args) noexcept {
  TESSERA_TRY(check_context(context, "update_selection_bias"));
  if (!std::isfinite(args.rate)) {
    return Status::invalid("rate=%g: must be finite", static_cast<double>(args.rate));
  }
  if (args.selection_bias.rank != 1) {
    return Status::invalid("selection_bias: rank %d, 1 is needed", args.selection_bias.rank);
  }
  std::int64_t const experts = args.selection_bias.shape[0];
  core::TensorCheck check{context.device()};
  check.output("selection_bias", args.selection_bias, DType::fp32, {experts});
  check.input("topk_counts", args.topk_counts, counts_dtype(args.topk_counts), {experts});
  TESSERA_TRY(check.finish());
  auto const sum = sum_counts(args.topk_counts);
  if (!sum.ok()) return sum.status();
  if (sum.value() == 0) return {};

  // sign(mean - f_e) = sign(sum - E f_e), exact in 128 bits.
  __extension__ using Wide = __int128;
  auto const sign_of = [&](std::int64_t e) {
    Wide const below = Wide{sum.value()} - Wide{experts} * count_at(args.topk_counts, e);
    return below > 0 ? 1 : below < 0 ? -1 : 0;
  };
  std::int64_t signs = 0;
  for (std::int64_t e = 0; e < experts; ++e) signs += sign_of(e);
  float const mean =
      args.subtract_mean
          ? static_cast<float>(static_cast<double>(signs) / static_cast<double>(experts))
          : 0.0f;
  auto* const bias = static_cast<float*>(args.selection_bias.data);
  for (std::int64_t e = 0; e < experts; ++e) {
    bias[e] += args.rate * (static_cast<float>(sign_of(e)) - mean);
  }
  return {};
}

}  // namespace tessera
