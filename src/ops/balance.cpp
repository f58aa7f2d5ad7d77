// SPDX-License-Identifier: Apache-2.0
// router_loss and update_selection_bias
#include "tessera/balance.hpp"

#include <cmath>

#include "core/desc_check.hpp"
#include "core/fp32_math.hpp"
#include "core/load_counts.hpp"
#include "core/tensor_check.hpp"
#include "core/workspace.hpp"
#include "cpu/parallel/router_loss.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace {

using Int = long long;  // for %lld

struct LossPlan {
  core::Region<float> cost;            ///< [E]
  core::Region<float> partial_losses;  ///< [2, blocks]
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

Status check_loss_desc(MoeDesc const& desc) noexcept {
  TESSERA_TRY(core::check_desc(desc));
  if (desc.router.kind == RouterKind::given) {
    return Status::invalid("router=given: it has no logits; set desc.router.kind");
  }
  return {};
}

void check_counts(ConstTensor const& counts, std::int64_t experts,
                  core::TensorCheck& check) noexcept {
  bool const known =
      counts.dtype == DType::int32 || counts.dtype == DType::int64 || counts.dtype == DType::fp32;
  if (counts.present() && !known) {
    check.fail(Status::invalid("topk_counts: dtype %d; int32, int64 or fp32 is needed: convert it",
                               static_cast<int>(counts.dtype)));
  }
  check.input("topk_counts", counts, known ? counts.dtype : DType::int64, {experts});
}

core::LoadCounts counts_of(ConstTensor const& counts) noexcept {
  return {counts.data, counts.dtype, counts.present() ? counts.shape[0] : 0};
}

/// All of them checked.
Expected<core::LoadSum> sum_counts(core::LoadCounts const& counts) noexcept {
  std::int64_t const bad = counts.first_bad();
  if (bad < counts.experts && counts.is_real()) {
    return Status::invalid(
        "topk_counts[%lld]=%g: counts are finite and not negative; pass the tokens of each expert, "
        "or their mean or share",
        static_cast<Int>(bad), counts.real_at(bad));
  }
  if (bad < counts.experts) {
    return Status::invalid(
        "topk_counts[%lld]=%lld: counts are not negative and add up to at most 2^62; pass the "
        "tokens of each expert",
        static_cast<Int>(bad), static_cast<Int>(counts.at(bad)));
  }
  core::LoadSum sum;
  if (counts.is_real()) {
    double parts[core::LoadCounts::kLanes];
    for (std::int64_t lane = 0; lane < core::LoadCounts::kLanes; ++lane) {
      parts[lane] = counts.lane_sum(lane);
    }
    for (std::int64_t half = core::LoadCounts::kLanes / 2; half > 0; half /= 2) {
      for (std::int64_t lane = 0; lane < half; ++lane) parts[lane] += parts[lane + half];
    }
    sum.real = parts[0];
    return sum;
  }
  for (std::int64_t e = 0; e < counts.experts; ++e) sum.integer += counts.at(e);
  sum.real = static_cast<double>(sum.integer);
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
    check_counts(args.topk_counts, s.experts, check);
  }
  check.optional_output("losses", args.losses, DType::fp32, {2});
  check.optional_output("dlogits", args.dlogits, DType::fp32, {s.tokens, s.experts});
  check.buffer("workspace", args.workspace, workspace, 1, true);
  return check.finish();
}

Status run_loss(Context const& context, MoeDesc const& desc, RouterLossArgs const& args,
                LossPlan const& plan) noexcept {
  core::LoadCounts const counts = counts_of(args.topk_counts);
  auto const sum = sum_counts(counts);
  if (!sum.ok()) return sum.status();
  MoeShape const& s = desc.shape;
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  std::int64_t const scope = args.scope_tokens != 0 ? args.scope_tokens : s.tokens;
  float* const cost = plan.cost.in(base);
  for (std::int64_t e = 0; e < s.experts; ++e) {
    cost[e] = core::balance_cost(args.balance, counts, e, sum.value(), scope);
  }
  float* const partial = plan.partial_losses.in(base);
  cpu::router_loss(
      desc,
      {.logits = ops::rows_of(args.logits),
       .cost = cost,
       .z = static_cast<float>(static_cast<double>(args.z) / static_cast<double>(scope)),
       .d_loss = args.d_loss,
       .partial_losses = partial,
       .dlogits = args.dlogits.present() ? ops::rows_of(args.dlogits) : cpu::MutableRows{}},
      {context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread});
  if (!args.losses.present()) return {};
  std::int64_t const blocks = cpu::router_loss_blocks(s.tokens);
  auto* const losses = static_cast<float*>(args.losses.data);
  losses[0] = core::warp_sum(partial, blocks);
  losses[1] = core::warp_sum(partial + blocks, blocks);
  return {};
}

void run_update(core::LoadCounts const& counts, core::LoadSum const& sum,
                SelectionBiasArgs const& args) noexcept {
  std::int64_t signs = 0;
  for (std::int64_t e = 0; e < counts.experts; ++e) signs += core::sign_below_mean(counts, e, sum);
  float const mean = args.subtract_mean ? core::mean_sign(signs, counts.experts) : 0.0f;
  auto* const bias = static_cast<float*>(args.selection_bias.data);
  for (std::int64_t e = 0; e < counts.experts; ++e) {
    bias[e] += args.rate * (static_cast<float>(core::sign_below_mean(counts, e, sum)) - mean);
  }
}

}  // namespace

Expected<std::size_t> router_loss_workspace_bytes(Context const& context,
                                                  MoeDesc const& desc) noexcept {
  TESSERA_TRY(check_loss_desc(desc));
  return context.cuda() != nullptr ? cuda::router_loss_workspace_bytes(desc)
                                   : plan_loss(context, desc).bytes;
}

Status router_loss(Context const& context, MoeDesc const& desc, RouterLossArgs const& args,
                   Stream stream) noexcept {
  TESSERA_TRY(check_loss_desc(desc));
  if (context.cuda() != nullptr) {
    TESSERA_TRY(check_loss(context, desc, args, cuda::router_loss_workspace_bytes(desc)));
    return cuda::router_loss(*context.cuda(), desc, args, stream);
  }
  LossPlan const plan = plan_loss(context, desc);
  TESSERA_TRY(check_loss(context, desc, args, plan.bytes));
  return run_loss(context, desc, args, plan);
}

Status update_selection_bias(Context const& context, SelectionBiasArgs const& args,
                             Stream stream) noexcept {
  if (!std::isfinite(args.rate)) {
    return Status::invalid("rate=%g: must be finite", static_cast<double>(args.rate));
  }
  if (args.selection_bias.rank != 1) {
    return Status::invalid("selection_bias: rank %d, 1 is needed", args.selection_bias.rank);
  }
  std::int64_t const experts = args.selection_bias.shape[0];
  core::TensorCheck check{context.device()};
  check.output("selection_bias", args.selection_bias, DType::fp32, {experts});
  check_counts(args.topk_counts, experts, check);
  TESSERA_TRY(check.finish());
  if (context.cuda() != nullptr) {
    return cuda::update_selection_bias(*context.cuda(), args, stream);
  }
  core::LoadCounts const counts = counts_of(args.topk_counts);
  auto const sum = sum_counts(counts);
  if (!sum.ok()) return sum.status();
  if (sum.value().real != 0) run_update(counts, sum.value(), args);
  return {};
}

}  // namespace tessera
