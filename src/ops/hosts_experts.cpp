// SPDX-License-Identifier: Apache-2.0
// HostsExperts: checks everything, then hands over to src/expert_parallel/hosts; the inner pass of each step is one of
// ExpertParallel.
#include <algorithm>
#include <bit>
#include <iterator>
#include <new>
#include <utility>

#include "core/tensor_check.hpp"
#include "core/workspace.hpp"
#include "expert_parallel/hosts/rail.hpp"
#include "expert_parallel/hosts/rotation.hpp"
#include "ops/hosts_checks.hpp"
#include "ops/support.hpp"
#include "tessera/hosts.hpp"
#include "tessera/moe.hpp"

namespace tessera {
namespace {

namespace hosts = expert_parallel::hosts;
using ops::experts_of_rank, ops::rows_of_step, ops::up_rows;

hosts::RotationShape rotation_shape(HostsDesc const& d) noexcept {
  return {.hosts = d.place.hosts,
          .max_tokens = d.within.max_tokens,
          .hidden = d.within.hidden,
          .top_k = static_cast<std::int32_t>(d.within.top_k),
          .experts = static_cast<std::int32_t>(d.within.experts),
          .counted = d.exchange == HostExchange::counted};
}

// This rank's experts on the rows of one step.
MoeDesc layer_of(HostsDesc const& d, bool bias) noexcept {
  MoeDesc layer;
  layer.shape.tokens = rows_of_step(d);
  layer.shape.hidden = d.within.hidden;
  layer.shape.intermediate = d.within.intermediate;
  layer.shape.experts = experts_of_rank(d);
  layer.shape.top_k = 1;
  layer.dtype = DType::bf16;
  layer.activation = d.within.activation;
  layer.bias = bias;
  layer.grouping = RowGrouping::offsets;
  return layer;
}

// Places what the inner pass of one step saves.
struct StepRegions {
  core::Region<std::int32_t> expert_offsets, row_origins;
  core::Region<float> row_scores;
  core::Region<std::byte> h;

  StepRegions(core::WorkspacePlan& plan, HostsDesc const& d) noexcept
      : expert_offsets(plan.add<std::int32_t>(experts_of_rank(d) + 1)),
        row_origins(plan.add<std::int32_t>(4 * rows_of_step(d))),
        row_scores(plan.add<float>(rows_of_step(d))),
        h(plan.add<std::byte>(2 * rows_of_step(d) * up_rows(d))) {}
};

// Saved memory has the steps, then what the rotation saves.
struct AllSaved {
  core::WorkspacePlan step_plan;
  StepRegions step;
  hosts::SavedRegions rotation;

  explicit AllSaved(HostsDesc const& d) noexcept
      : step(step_plan, d), rotation(rotation_shape(d), true) {}
  [[nodiscard]] std::byte* of_step(std::byte* base, std::int32_t i) const noexcept {
    return core::WorkspacePlan::align(base + static_cast<std::size_t>(i) * step_plan.bytes());
  }
  [[nodiscard]] std::size_t steps_bytes(HostsDesc const& d) const noexcept {
    return static_cast<std::size_t>(d.place.hosts) * step_plan.bytes();
  }
};

// The regions of the workspace; the last ones are there with training alone.
struct AllRegions {
  core::WorkspacePlan plan;
  core::Region<std::byte> rotation, unsaved;
  core::Region<std::byte> x_rows, d_o_rows, dx_rows, routing, layer;
  core::Region<float> row_dscores;
  std::size_t routing_bytes = 0, layer_bytes = 0;

  static Expected<AllRegions> make(Context const& context, HostsDesc const& d) noexcept {
    AllRegions r;
    auto const add = [&](std::size_t bytes) {
      return r.plan.add<std::byte>(static_cast<std::int64_t>(bytes));
    };
    hosts::RotationShape const shape = rotation_shape(d);
    r.rotation = add(hosts::RotationRegions(shape).plan.bytes());
    r.unsaved = add(hosts::SavedRegions(shape, false).plan.bytes());
    if (!d.within.training) return r;
    for (bool const bias : {false, true}) {
      MoeDesc const layer = layer_of(d, bias);
      auto const routing = tessera::routing_bytes(layer);
      if (!routing.ok()) return routing.status();
      auto const bytes = tessera::workspace_bytes(context, layer, Pass::backward);
      if (!bytes.ok()) return bytes.status();
      r.routing_bytes = std::max(r.routing_bytes, routing.value());
      r.layer_bytes = std::max(r.layer_bytes, bytes.value());
    }
    auto const row_bytes = static_cast<std::size_t>(2 * rows_of_step(d) * d.within.hidden);
    r.x_rows = add(row_bytes);
    r.d_o_rows = add(row_bytes);
    r.dx_rows = add(row_bytes);
    r.routing = add(r.routing_bytes);
    r.layer = add(r.layer_bytes);
    r.row_dscores = r.plan.add<float>(rows_of_step(d));
    return r;
  }
};

}  // namespace

// The inner passes of a step are ExpertParallel's.
struct HostsExperts::Parts final : hosts::InnerPass {
  Context const& context;
  HostsDesc desc;
  ExpertParallel experts;
  HostRail rail;
  AllRegions regions;
  std::byte* base;
  hosts::Rotation rotation;

  Parts(Context const& context_, HostsDesc const& desc_, ExpertParallel experts_, HostRail rail_,
        AllRegions const& regions_, void* workspace) noexcept
      : context(context_),
        desc(desc_),
        experts(std::move(experts_)),
        rail(std::move(rail_)),
        regions(regions_),
        base(core::WorkspacePlan::align(workspace)),
        rotation(rotation_shape(desc_), *rail.rail_, regions_.rotation.in(base)) {}

  // The rotation has none once its rail is closed.
  [[nodiscard]] Status check_rail() const noexcept {
    if (rail.rail_ != nullptr) return {};
    return Status::invalid("the rail is closed; make the objects of all ranks anew");
  }

  // These are of the call that is under way.
  HostsForwardArgs const* forward_args = nullptr;
  HostsBackwardArgs const* backward_args = nullptr;
  std::byte* saved = nullptr;

  [[nodiscard]] Tensor of(void* data, DType dtype,
                          std::initializer_list<std::int64_t> shape) const noexcept {
    return tensor(data, dtype, shape, context.device());
  }
  [[nodiscard]] ConstTensor of(void const* data, DType dtype,
                               std::initializer_list<std::int64_t> shape) const noexcept {
    return tensor(data, dtype, shape, context.device());
  }
  [[nodiscard]] DispatchTables tables(std::int32_t step) const noexcept {
    AllSaved const all(desc);
    std::byte* const memory = all.of_step(saved, step);
    std::int64_t const rows = rows_of_step(desc);
    return {of(all.step.expert_offsets.in(memory), DType::int32, {experts_of_rank(desc) + 1}),
            of(all.step.row_origins.in(memory), DType::int32, {rows, 4}),
            of(all.step.row_scores.in(memory), DType::fp32, {rows})};
  }
  [[nodiscard]] Tensor h(std::int32_t step) const noexcept {
    AllSaved const all(desc);
    return of(all.step.h.in(all.of_step(saved, step)), DType::bf16,
              {rows_of_step(desc), up_rows(desc)});
  }

  Status forward(hosts::InnerForward const& p, Stream stream) noexcept override {
    std::int64_t const d = desc.within.hidden, top_k = desc.within.top_k;
    ExpertParallelArgs args = {
        .x = of(p.gmem_x, DType::bf16, {p.tokens, d}),
        .topk_ids = of(p.gmem_topk_ids, DType::int32, {p.tokens, top_k}),
        .topk_weights = of(p.gmem_topk_weights, DType::fp32, {p.tokens, top_k}),
        .w_up = forward_args->w_up,
        .w_down = forward_args->w_down,
        .o = of(p.gmem_o, DType::bf16, {p.tokens, d}),
        .b_up = forward_args->b_up,
        .b_down = forward_args->b_down};
    if (saved != nullptr) {
      args.saved = tables(p.step);
      args.h = h(p.step);
    }
    return experts.forward(args, stream);
  }

  Status backward(hosts::InnerBackward const& p, Stream stream) noexcept override {
    std::int64_t const d = desc.within.hidden, top_k = desc.within.top_k, rows = rows_of_step(desc);
    DispatchTables const made = tables(p.step);
    Tensor const x_rows = of(regions.x_rows.in(base), DType::bf16, {rows, d});
    Tensor const d_o_rows = of(regions.d_o_rows.in(base), DType::bf16, {rows, d});
    Tensor const dx_rows = of(regions.dx_rows.in(base), DType::bf16, {rows, d});
    Tensor const row_dscores = of(regions.row_dscores.in(base), DType::fp32, {rows});
    TESSERA_TRY(experts.dispatch({.x = of(p.gmem_d_o, DType::bf16, {p.tokens, d}),
                                  .second_x = of(p.gmem_x, DType::bf16, {p.tokens, d}),
                                  .topk_ids = of(p.gmem_topk_ids, DType::int32, {p.tokens, top_k}),
                                  .tables = made,
                                  .rows = d_o_rows,
                                  .second_rows = x_rows},
                                 stream));
    HostsBackwardArgs const& call = *backward_args;
    MoeDesc const layer = layer_of(desc, call.b_up.present());
    Buffer const routing = {regions.routing.in(base), regions.routing_bytes};
    TESSERA_TRY(routing_of_tables(context, layer, made, routing, stream));
    MoeBackwardArgs args = {.d_o = d_o_rows,
                            .x = x_rows,
                            .h = h(p.step),
                            .routing = routing,
                            .dx = dx_rows,
                            .dscores = row_dscores,
                            .workspace = {regions.layer.in(base), regions.layer_bytes}};
    args.weights = {
        .w_up = call.w_up, .w_down = call.w_down, .b_up = call.b_up, .b_down = call.b_down};
    args.gradients = {.dw_up = call.dw_up,
                      .dw_down = call.dw_down,
                      .db_up = call.db_up,
                      .db_down = call.db_down,
                      .mode = GradientMode::accumulate};
    TESSERA_TRY(moe_backward(context, layer, args, stream));
    return experts.combine({.rows = dx_rows,
                            .tables = made,
                            .row_dscores = row_dscores,
                            .dscores = of(p.gmem_dscores, DType::fp32, {p.tokens, top_k}),
                            .o = of(p.gmem_dx, DType::bf16, {p.tokens, d})},
                           stream);
  }
};

HostsExperts::HostsExperts(std::unique_ptr<Parts> parts) noexcept : parts_(std::move(parts)) {}
HostsExperts::HostsExperts(HostsExperts&&) noexcept = default;
HostsExperts& HostsExperts::operator=(HostsExperts&&) noexcept = default;
HostsExperts::~HostsExperts() = default;

Expected<std::size_t> HostsExperts::workspace_bytes(Context const& context,
                                                    HostsDesc const& desc) noexcept {
  TESSERA_TRY(ops::check_hosts(desc));
  TESSERA_TRY(ops::check_on_gpu(context));
  auto const regions = AllRegions::make(context, desc);
  if (!regions.ok()) return regions.status();
  return regions.value().plan.bytes();
}

Expected<std::size_t> HostsExperts::saved_bytes(HostsDesc const& desc) noexcept {
  TESSERA_TRY(ops::check_hosts(desc));
  AllSaved const all(desc);
  return all.steps_bytes(desc) + all.rotation.plan.bytes() + core::WorkspacePlan::kAlignment;
}

Expected<HostsExperts> HostsExperts::create(Context const& context, HostsDesc const& desc,
                                            ExpertParallel experts, HostRail rail,
                                            Buffer workspace) noexcept {
  TESSERA_TRY(ops::check_hosts(desc));
  TESSERA_TRY(ops::check_on_gpu(context));
  if (rail.rail_ == nullptr || !(rail.rail_->place() == desc.place)) {
    return Status::invalid("rail: not one of desc.place; open it with the same place");
  }
  auto const regions = AllRegions::make(context, desc);
  if (!regions.ok()) return regions.status();
  core::TensorCheck check{context.device()};
  check.buffer("workspace", workspace, regions.value().plan.bytes(), 1, true);
  TESSERA_TRY(check.finish());
  std::unique_ptr<Parts> parts(new (std::nothrow) Parts(
      context, desc, std::move(experts), std::move(rail), regions.value(), workspace.data));
  if (parts == nullptr) {
    return Status::error(StatusCode::out_of_memory, "no memory for experts over hosts");
  }
  expert_parallel::DeviceScope const scope(expert_parallel::device_calls(), context.device().index,
                                           expert_parallel::ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  ExpertParallelDesc const& w = desc.within;
  Activation const& a = w.activation;
  hosts::Field const fields[] = {
      {"hosts", desc.place.hosts},
      {"exchange", static_cast<std::int64_t>(desc.exchange)},
      {"rank", w.rank},
      {"ranks", w.ranks},
      {"max_tokens", w.max_tokens},
      {"hidden", w.hidden},
      {"intermediate", w.intermediate},
      {"experts", w.experts},
      {"top_k", w.top_k},
      {"training", w.training ? 1 : 0},
      {"activation", static_cast<std::int64_t>(a.kind)},
      {"bits of alpha", std::bit_cast<std::int32_t>(a.alpha)},
      {"bits of limit", std::bit_cast<std::int32_t>(a.limit)},
      {"bits of up_offset", std::bit_cast<std::int32_t>(a.up_offset)},
      {"partial_combine", w.partial_combine || w.sums_on_owners ? 1 : 0}};
  static_assert(std::size(fields) <= hosts::kMaxFields);
  TESSERA_TRY(parts->rotation.agree(fields, {}));
  return HostsExperts(std::move(parts));
}

Status HostsExperts::forward(HostsForwardArgs const& args, Stream stream) noexcept {
  Parts& p = *parts_;
  HostsDesc const& d = p.desc;
  TESSERA_TRY(p.check_rail());
  auto const checked = ops::check_hosts_forward(d, p.context.device(), args);
  if (!checked.ok()) return checked.status();
  expert_parallel::DeviceScope const scope(expert_parallel::device_calls(),
                                           p.context.device().index,
                                           expert_parallel::ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  p.saved = checked.value().saved;
  HostsSaved numbers;
  HostsSaved& found = args.saved != nullptr ? *args.saved : numbers;
  p.forward_args = &args;
  return p.rotation.forward({.tokens = checked.value().tokens,
                             .gmem_x = args.x.data,
                             .gmem_topk_ids = static_cast<std::int32_t const*>(args.topk_ids.data),
                             .gmem_topk_weights = static_cast<float const*>(args.topk_weights.data),
                             .gmem_o = args.o.data,
                             .gmem_saved = p.saved != nullptr ? p.saved + AllSaved(d).steps_bytes(d)
                                                              : p.regions.unsaved.in(p.base),
                             .saves = p.saved != nullptr},
                            {found.rows_out.data(), found.rows_in.data()}, p, stream);
}

Status HostsExperts::backward(HostsBackwardArgs const& args, Stream stream) noexcept {
  Parts& p = *parts_;
  HostsDesc const& d = p.desc;
  TESSERA_TRY(p.check_rail());
  auto const checked = ops::check_hosts_backward(d, p.context.device(), args);
  if (!checked.ok()) return checked.status();
  expert_parallel::DeviceScope const scope(expert_parallel::device_calls(),
                                           p.context.device().index,
                                           expert_parallel::ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  p.saved = checked.value().saved;
  HostsSaved numbers = *args.saved;
  p.backward_args = &args;
  return p.rotation.backward({.tokens = checked.value().tokens,
                              .gmem_d_o = args.d_o.data,
                              .gmem_x = args.x.data,
                              .gmem_dx = args.dx.data,
                              .gmem_dscores = static_cast<float*>(args.dscores.data),
                              .gmem_saved = p.saved + AllSaved(d).steps_bytes(d)},
                             {numbers.rows_out.data(), numbers.rows_in.data()}, p, stream);
}

Status HostsExperts::check() const noexcept {
  TESSERA_TRY(parts_->rail.rail_ == nullptr ? Status() : parts_->rail.rail_->fault());
  return parts_->experts.check();
}

HostRail& HostsExperts::rail() noexcept { return parts_->rail; }

}  // namespace tessera
