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
#include "ops/support.hpp"
#include "tessera/hosts.hpp"
#include "tessera/moe.hpp"

namespace tessera {
namespace {

namespace hosts = expert_parallel::hosts;

Status check_desc(HostsDesc const& d) noexcept {
  HostPlace const& p = d.place;
  ExpertParallelDesc const& within = d.within;
  if (p.hosts < 1 || p.hosts > kMaxHosts) {
    return Status::invalid("hosts=%d: 1 to %d", p.hosts, kMaxHosts);
  }
  if (p.host < 0 || p.host >= p.hosts) {
    return Status::invalid("host=%d: 0 to hosts-1 = %d", p.host, p.hosts - 1);
  }
  if (p.rank != within.rank) {
    return Status::invalid("place.rank=%d, within.rank=%d: the same rank of its host", p.rank,
                           within.rank);
  }
  if (d.exchange != HostExchange::all_rows && d.exchange != HostExchange::counted) {
    return Status::invalid("exchange=%d: one of HostExchange", static_cast<int>(d.exchange));
  }
  // Checks `within`.
  auto const bytes = ExpertParallel::window_bytes(within);
  if (!bytes.ok()) return bytes.status();
  std::int64_t const most = std::int64_t{within.ranks} * within.max_tokens * within.top_k;
  if (d.max_rows < 0 || d.max_rows > most || (d.max_rows != 0 && !within.training)) {
    return Status::invalid("max_rows=%lld: with training, 0 to ranks*max_tokens*top_k=%lld",
                           static_cast<long long>(d.max_rows), static_cast<long long>(most));
  }
  return {};
}

std::int64_t rows_of(HostsDesc const& d) noexcept {
  return d.max_rows != 0 ? d.max_rows
                         : std::int64_t{d.within.ranks} * d.within.max_tokens * d.within.top_k;
}
std::int64_t up_rows(HostsDesc const& d) noexcept {
  return (d.within.activation.gated() ? 2 : 1) * d.within.intermediate;
}
std::int64_t experts_of_rank(HostsDesc const& d) noexcept {
  return d.within.experts / d.within.ranks;
}

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
  layer.shape.tokens = rows_of(d);
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
        row_origins(plan.add<std::int32_t>(4 * rows_of(d))),
        row_scores(plan.add<float>(rows_of(d))),
        h(plan.add<std::byte>(2 * rows_of(d) * up_rows(d))) {}
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
    auto const row_bytes = static_cast<std::size_t>(2 * rows_of(d) * d.within.hidden);
    r.x_rows = add(row_bytes);
    r.d_o_rows = add(row_bytes);
    r.dx_rows = add(row_bytes);
    r.routing = add(r.routing_bytes);
    r.layer = add(r.layer_bytes);
    r.row_dscores = r.plan.add<float>(rows_of(d));
    return r;
  }
};

// Tensors of a call: contiguous, at multiples of 16 bytes where asked for.
struct CallCheck {
  core::TensorCheck check;

  void input(char const* name, ConstTensor const& tensor, DType dtype,
             std::initializer_list<std::int64_t> shape) noexcept {
    check.input(name, tensor, dtype, shape);
    check.contiguous(name, tensor);
    aligned(name, tensor.data, dtype);
  }
  void output(char const* name, Tensor const& tensor, DType dtype,
              std::initializer_list<std::int64_t> shape) noexcept {
    check.output(name, tensor, dtype, shape);
    check.contiguous(name, tensor);
    aligned(name, tensor.data, dtype);
  }
  void optional_output(char const* name, Tensor const& tensor, DType dtype,
                       std::initializer_list<std::int64_t> shape) noexcept {
    if (tensor.present()) output(name, tensor, dtype, shape);
  }
  void aligned(char const* name, void const* data, DType dtype) noexcept {
    if (dtype == DType::bf16 && reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
      check.fail(Status::invalid("%s=%p: begins at a multiple of 16", name, data));
    }
  }
  template <class Args>
  void weights(HostsDesc const& d, Args const& args) noexcept {
    std::int64_t const experts = experts_of_rank(d), n = d.within.intermediate;
    input("w_up", args.w_up, DType::bf16, {experts, up_rows(d), d.within.hidden});
    input("w_down", args.w_down, DType::bf16, {experts, d.within.hidden, n});
    if (!args.b_up.present() && !args.b_down.present()) return;
    input("b_up", args.b_up, DType::bf16, {experts, up_rows(d)});
    input("b_down", args.b_down, DType::bf16, {experts, d.within.hidden});
  }
};

Expected<std::int64_t> tokens_of(HostsDesc const& d, char const* name,
                                 ConstTensor const& tensor) noexcept {
  if (tensor.rank == 2 && tensor.shape[0] >= 0 && tensor.shape[0] <= d.within.max_tokens) {
    return tensor.shape[0];
  }
  return Status::invalid("%s: [T,%lld] with T from 0 to max_tokens=%lld", name,
                         static_cast<long long>(d.within.hidden),
                         static_cast<long long>(d.within.max_tokens));
}

// The memory of a pass that was saved.
Expected<std::byte*> saved_memory(HostsDesc const& d, HostsSaved const& saved) noexcept {
  if (!d.within.training) {
    return Status::invalid("saved: training=0; create the objects with within.training");
  }
  auto const bytes = HostsExperts::saved_bytes(d);
  if (!bytes.ok()) return bytes.status();
  if (saved.memory.data == nullptr || saved.memory.bytes < bytes.value()) {
    return Status::invalid("saved.memory: %zu bytes; saved_bytes() are %zu", saved.memory.bytes,
                           bytes.value());
  }
  return core::WorkspacePlan::align(saved.memory.data);
}

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
    std::int64_t const rows = rows_of(desc);
    return {of(all.step.expert_offsets.in(memory), DType::int32, {experts_of_rank(desc) + 1}),
            of(all.step.row_origins.in(memory), DType::int32, {rows, 4}),
            of(all.step.row_scores.in(memory), DType::fp32, {rows})};
  }
  [[nodiscard]] Tensor h(std::int32_t step) const noexcept {
    AllSaved const all(desc);
    return of(all.step.h.in(all.of_step(saved, step)), DType::bf16, {rows_of(desc), up_rows(desc)});
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
    std::int64_t const d = desc.within.hidden, top_k = desc.within.top_k, rows = rows_of(desc);
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
  TESSERA_TRY(check_desc(desc));
  TESSERA_TRY(ops::check_on_gpu(context));
  auto const regions = AllRegions::make(context, desc);
  if (!regions.ok()) return regions.status();
  return regions.value().plan.bytes();
}

Expected<std::size_t> HostsExperts::saved_bytes(HostsDesc const& desc) noexcept {
  TESSERA_TRY(check_desc(desc));
  AllSaved const all(desc);
  return all.steps_bytes(desc) + all.rotation.plan.bytes() + core::WorkspacePlan::kAlignment;
}

Expected<HostsExperts> HostsExperts::create(Context const& context, HostsDesc const& desc,
                                            ExpertParallel experts, HostRail rail,
                                            Buffer workspace) noexcept {
  TESSERA_TRY(check_desc(desc));
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
  auto const tokens = tokens_of(d, "x", args.x);
  if (!tokens.ok()) return tokens.status();
  std::int64_t const top_k = d.within.top_k, count = tokens.value();
  CallCheck call{core::TensorCheck{p.context.device()}};
  call.input("x", args.x, DType::bf16, {count, d.within.hidden});
  call.input("topk_ids", args.topk_ids, DType::int32, {count, top_k});
  call.input("topk_weights", args.topk_weights, DType::fp32, {count, top_k});
  call.weights(d, args);
  call.output("o", args.o, DType::bf16, {count, d.within.hidden});
  TESSERA_TRY(call.check.finish());
  expert_parallel::DeviceScope const scope(expert_parallel::device_calls(),
                                           p.context.device().index,
                                           expert_parallel::ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  p.saved = nullptr;
  if (args.saved != nullptr) {
    auto const memory = saved_memory(d, *args.saved);
    if (!memory.ok()) return memory.status();
    p.saved = memory.value();
  }
  HostsSaved numbers;
  HostsSaved& found = args.saved != nullptr ? *args.saved : numbers;
  p.forward_args = &args;
  return p.rotation.forward({.tokens = count,
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
  auto const tokens = tokens_of(d, "d_o", args.d_o);
  if (!tokens.ok()) return tokens.status();
  if (args.saved == nullptr) {
    return Status::invalid("saved: absent; pass what forward() has saved");
  }
  auto const memory = saved_memory(d, *args.saved);
  if (!memory.ok()) return memory.status();
  p.saved = memory.value();
  std::int64_t const experts = experts_of_rank(d), count = tokens.value();
  std::int64_t const hidden = d.within.hidden, n = d.within.intermediate;
  CallCheck call{core::TensorCheck{p.context.device()}};
  call.input("d_o", args.d_o, DType::bf16, {count, hidden});
  call.input("x", args.x, DType::bf16, {count, hidden});
  call.weights(d, args);
  call.output("dx", args.dx, DType::bf16, {count, hidden});
  call.output("dscores", args.dscores, DType::fp32, {count, d.within.top_k});
  call.optional_output("dw_up", args.dw_up, DType::fp32, {experts, up_rows(d), hidden});
  call.optional_output("dw_down", args.dw_down, DType::fp32, {experts, hidden, n});
  call.optional_output("db_up", args.db_up, DType::fp32, {experts, up_rows(d)});
  call.optional_output("db_down", args.db_down, DType::fp32, {experts, hidden});
  TESSERA_TRY(call.check.finish());
  expert_parallel::DeviceScope const scope(expert_parallel::device_calls(),
                                           p.context.device().index,
                                           expert_parallel::ContextChoice::any_of_device);
  TESSERA_TRY(scope.status());
  HostsSaved numbers = *args.saved;
  p.backward_args = &args;
  return p.rotation.backward({.tokens = count,
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
