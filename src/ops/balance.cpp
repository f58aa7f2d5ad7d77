// SPDX-License-Identifier: Apache-2.0
// router_loss and update_selection_bias
#include "tessera/balance.hpp"

#include <algorithm>
#include <cmath>

#include "core/desc_check.hpp"
#include "core/fp32_math.hpp"
#include "core/load_counts.hpp"
#include "core/tensor_check.hpp"
#include "core/workspace.hpp"
#include "cpu/parallel/router_loss.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/tensors.hpp"
#include "ops/weights.hpp"

namespace tessera {
namespace {

using Int = long long;  // for %lld

struct LossPlan {
  core::Region<float> cost;                ///< [E]
  core::Region<float> partial_losses;      ///< [3, blocks]
  core::Region<std::int32_t> order;        ///< [T], real tokens first
  core::Region<float> sequence_cost;       ///< [B,E]
  core::Region<std::int32_t> counts;       ///< [E] of one sequence
  core::Region<std::int32_t> sequence_of;  ///< [T]
  core::Region<float> scratch;
  std::int64_t floats_per_thread = 0;
  std::size_t bytes = 0;
};

LossPlan plan_loss(Context const& context, MoeDesc const& desc, std::int64_t sequences) noexcept {
  core::WorkspacePlan plan;
  LossPlan out;
  out.cost = plan.add<float>(desc.shape.experts);
  out.partial_losses = plan.add<float>(3 * cpu::router_loss_blocks(desc.shape.tokens));
  out.order = plan.add<std::int32_t>(desc.shape.tokens);
  if (sequences > 0) {
    out.sequence_cost = plan.add<float>(sequences * desc.shape.experts);
    out.counts = plan.add<std::int32_t>(desc.shape.experts);
    out.sequence_of = plan.add<std::int32_t>(desc.shape.tokens);
  }
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

void visit_counts(ConstTensor const& counts, std::int64_t experts,
                  core::TensorVisitor& visitor) noexcept {
  bool const known =
      counts.dtype == DType::int32 || counts.dtype == DType::int64 || counts.dtype == DType::fp32;
  if (counts.present() && !known) {
    visitor.fail(
        Status::invalid("topk_counts: dtype %d; int32, int64 or fp32 is needed: convert it",
                        static_cast<int>(counts.dtype)));
  }
  visitor.input("topk_counts", counts, known ? counts.dtype : DType::int64, {experts});
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

/// B of a call; -1: the offsets have no such shape.
std::int64_t sequences_of(RouterLossArgs const& args) noexcept {
  if (args.sequence_balance == 0.0f) return 0;
  ConstTensor const& offsets = args.sequence_offsets;
  return offsets.rank == 1 && offsets.shape[0] >= 1 ? offsets.shape[0] - 1 : -1;
}

bool is_index(ConstTensor const& tensor) noexcept {
  return tensor.dtype == DType::int32 || tensor.dtype == DType::int64;
}

void visit_sequences(MoeDesc const& desc, RouterLossArgs const& args,
                     core::TensorVisitor& visitor) noexcept {
  visitor.optional_output("sequence_loss", args.sequence_loss, DType::fp32, {1});
  if (args.sequence_balance == 0.0f) {
    constexpr char const* kReason = "sequence_balance is 0";
    visitor.absent("topk_ids", args.topk_ids, kReason);
    visitor.absent("sequence_offsets", args.sequence_offsets, kReason);
    return;
  }
  ConstTensor const& ids = args.topk_ids;
  if (ids.rank != 2 || ids.shape[1] < 1 || !is_index(ids)) {
    visitor.fail(Status::invalid(
        "topk_ids: rank %d, dtype %d; [T,K] of int32 or int64 is needed, the experts of each token",
        ids.rank, static_cast<int>(ids.dtype)));
    return;
  }
  visitor.input("topk_ids", ids, ids.dtype, {desc.shape.tokens, ids.shape[1]});
  std::int64_t const sequences = sequences_of(args);
  if (sequences < 0 || !is_index(args.sequence_offsets)) {
    visitor.fail(
        Status::invalid("sequence_offsets: rank %d, dtype %d; [B+1] of int32 or int64 is needed",
                        args.sequence_offsets.rank, static_cast<int>(args.sequence_offsets.dtype)));
    return;
  }
  visitor.input("sequence_offsets", args.sequence_offsets, args.sequence_offsets.dtype,
                {sequences + 1});
}

std::int64_t integer_at(ConstTensor const& tensor, std::int64_t i) noexcept {
  return tensor.dtype == DType::int64 ? static_cast<std::int64_t const*>(tensor.data)[i]
                                      : static_cast<std::int32_t const*>(tensor.data)[i];
}

/// Checks the values of a call on the CPU.
Status check_sequence_values(MoeDesc const& desc, RouterLossArgs const& args) noexcept {
  std::int64_t const sequences = sequences_of(args), tokens = desc.shape.tokens;
  std::int64_t previous = 0;
  for (std::int64_t b = 0; b <= sequences && sequences > 0; ++b) {
    std::int64_t const value = integer_at(args.sequence_offsets, b);
    if (value < previous || (b == 0 && value != 0) || value > tokens ||
        (b == sequences && value != tokens)) {
      return Status::invalid(
          "sequence_offsets[%lld]=%lld: they start at 0, never decrease and end at tokens=%lld",
          static_cast<Int>(b), static_cast<Int>(value), static_cast<Int>(tokens));
    }
    previous = value;
  }
  if (args.sequence_balance != 0.0f && sequences == 0 && tokens > 0) {
    return Status::invalid("sequence_offsets: no sequence, tokens=%lld; every token is part of one",
                           static_cast<Int>(tokens));
  }
  return {};
}

bool is_real(RouterLossArgs const& args, std::int64_t token) noexcept {
  auto const* const mask = static_cast<std::uint8_t const*>(args.token_mask.data);
  return mask == nullptr || mask[token] != 0;
}

/// C_be and the sequence of every token.
void plan_sequences(MoeDesc const& desc, RouterLossArgs const& args, LossPlan const& plan,
                    std::byte* base) noexcept {
  std::int64_t const experts = desc.shape.experts, sequences = sequences_of(args),
                     top_k = args.topk_ids.shape[1];
  std::int64_t const pitch = desc.shape.tokens > 1 ? args.topk_ids.stride[0] : top_k;
  std::int32_t* const counts = plan.counts.in(base);
  auto const for_each = [&](std::int64_t b, auto&& visit) {
    std::int64_t const end = integer_at(args.sequence_offsets, b + 1);
    for (std::int64_t t = integer_at(args.sequence_offsets, b); t < end; ++t) visit(t);
  };
  std::int64_t used = 0;
  for (std::int64_t b = 0; b < sequences; ++b) {
    bool any = false;
    for_each(b, [&](std::int64_t t) { any = any || is_real(args, t); });
    used += any ? 1 : 0;
  }
  for (std::int64_t b = 0; b < sequences; ++b) {
    std::fill_n(counts, experts, 0);
    std::int64_t sum = 0, tokens = 0;
    for_each(b, [&](std::int64_t t) {
      plan.sequence_of.in(base)[t] = static_cast<std::int32_t>(b);
      if (!is_real(args, t)) return;
      ++tokens;
      for (std::int64_t k = 0; k < top_k; ++k) {
        std::int64_t const id = integer_at(args.topk_ids, t * pitch + k);
        if (id < 0 || id >= experts) continue;
        ++counts[id];
        ++sum;
      }
    });
    for (std::int64_t e = 0; e < experts; ++e) {
      plan.sequence_cost.in(base)[b * experts + e] =
          core::sequence_cost(args.sequence_balance, experts, counts[e], sum, tokens, used);
    }
  }
}

}  // namespace

void ops::visit_tensors(MoeDesc const& desc, RouterLossArgs const& args, std::size_t workspace,
                        core::TensorVisitor& visitor) noexcept {
  MoeShape const& s = desc.shape;
  visitor.input("logits", args.logits, DType::fp32, {s.tokens, s.experts});
  if (args.balance != 0.0f || args.topk_counts.present()) {
    visit_counts(args.topk_counts, s.experts, visitor);
  }
  visit_sequences(desc, args, visitor);
  visitor.optional_input("token_mask", args.token_mask, DType::uint8, {s.tokens});
  visitor.optional_output("losses", args.losses, DType::fp32, {2});
  visitor.optional_output("dlogits", args.dlogits, DType::fp32, {s.tokens, s.experts});
  visitor.buffer("workspace", args.workspace, workspace, 1, true);
}

namespace {

Status check_loss(Context const& context, MoeDesc const& desc, RouterLossArgs const& args,
                  std::size_t workspace) noexcept {
  for (float const value : {args.balance, args.z, args.d_loss, args.sequence_balance}) {
    if (!std::isfinite(value)) {
      return Status::invalid("balance=%g, z=%g, d_loss=%g, sequence_balance=%g: must be finite",
                             static_cast<double>(args.balance), static_cast<double>(args.z),
                             static_cast<double>(args.d_loss),
                             static_cast<double>(args.sequence_balance));
    }
  }
  if (args.scope_tokens < 0) {
    return Status::invalid("scope_tokens=%lld: 0 for the tokens of logits, or their number in all",
                           static_cast<Int>(args.scope_tokens));
  }
  return ops::check_tensors(context.device(), desc, args, workspace);
}

Status run_loss(Context const& context, MoeDesc const& desc, RouterLossArgs const& args,
                LossPlan const& plan) noexcept {
  core::LoadCounts const counts = counts_of(args.topk_counts);
  auto const sum = sum_counts(counts);
  if (!sum.ok()) return sum.status();
  TESSERA_TRY(check_sequence_values(desc, args));
  MoeShape const& s = desc.shape;
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  std::int32_t* const order = plan.order.in(base);
  std::int64_t real = 0;
  for (bool const wanted : {true, false}) {
    std::int64_t place = wanted ? 0 : real;
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      if (is_real(args, t) == wanted) order[place++] = static_cast<std::int32_t>(t);
    }
    if (wanted) real = place;
  }
  bool const with_sequences = sequences_of(args) > 0;
  if (with_sequences) plan_sequences(desc, args, plan, base);
  std::int64_t const scope = args.scope_tokens != 0 ? args.scope_tokens : real;
  float* const cost = plan.cost.in(base);
  for (std::int64_t e = 0; e < s.experts; ++e) {
    cost[e] = core::balance_cost(args.balance, counts, e, sum.value(), scope);
  }
  float* const partial = plan.partial_losses.in(base);
  cpu::router_loss(
      desc,
      {.logits = ops::rows_of(args.logits),
       .cost = cost,
       .order = order,
       .real = real,
       .sequence_cost = with_sequences ? plan.sequence_cost.in(base) : nullptr,
       .sequence_of = with_sequences ? plan.sequence_of.in(base) : nullptr,
       .z = core::z_share(args.z, scope),
       .d_loss = args.d_loss,
       .partial_losses = partial,
       .dlogits = args.dlogits.present() ? ops::rows_of(args.dlogits) : cpu::MutableRows{}},
      {context.thread_pool(), plan.scratch.in(base), plan.floats_per_thread});
  std::int64_t const blocks = cpu::router_loss_blocks(s.tokens);
  if (args.sequence_loss.present()) {
    *static_cast<float*>(args.sequence_loss.data) = core::warp_sum(partial + 2 * blocks, blocks);
  }
  if (!args.losses.present()) return {};
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

Expected<std::size_t> router_loss_workspace_bytes(Context const& context, MoeDesc const& desc,
                                                  std::int64_t sequences) noexcept {
  TESSERA_TRY(check_loss_desc(desc));
  if (sequences < 0 || sequences > core::kMaxIndex ||
      sequences * desc.shape.experts > core::kMaxIndex) {
    return Status::invalid("sequences=%lld, experts=%lld: sequences*experts must be in [0, 2^31)",
                           static_cast<Int>(sequences), static_cast<Int>(desc.shape.experts));
  }
  return context.cuda() != nullptr ? cuda::router_loss_workspace_bytes(desc, sequences)
                                   : plan_loss(context, desc, sequences).bytes;
}

Status router_loss(Context const& context, MoeDesc const& desc, RouterLossArgs const& args,
                   Stream stream) noexcept {
  std::int64_t const sequences = std::max<std::int64_t>(0, sequences_of(args));
  auto const workspace = router_loss_workspace_bytes(context, desc, sequences);
  if (!workspace.ok()) return workspace.status();
  TESSERA_TRY(check_loss(context, desc, args, workspace.value()));
  if (context.cuda() != nullptr) return cuda::router_loss(*context.cuda(), desc, args, stream);
  LossPlan const plan = plan_loss(context, desc, sequences);
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
  ConstTensor const& f = args.topk_counts;
  if (f.rank == 1 && f.shape[0] != experts) {
    return Status::invalid(
        "selection_bias: shape [%lld], topk_counts: shape [%lld]; both have one number for each "
        "expert: take the layer's own",
        static_cast<Int>(experts), static_cast<Int>(f.shape[0]));
  }
  core::TensorCheck check{context.device()};
  check.output("selection_bias", args.selection_bias, DType::fp32, {experts});
  visit_counts(args.topk_counts, experts, check);
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
