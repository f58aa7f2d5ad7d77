// SPDX-License-Identifier: Apache-2.0
// moe_forward: (router) -> metadata -> up_projection_fwd -> down_projection_fwd -> aggregate on the caller's stream.
// Where tokens are rounded or experts choose, choose_tokens makes the tables instead of metadata.
// Where operands are quantised, x and the weights become codes before up_projection_fwd (low_precision.hpp).
// Kernels start beside the end of the one before (docs/adr/0037-early-launches-in-forward.md), a fast
// down_projection_fwd in the tail of up_projection_fwd (docs/adr/0021-experts-handed-over.md).
// Every launch has a size known from the shape: nothing waits, allocates or reads device memory from the host, so a
// call can be captured into a graph.
#include <cuda_runtime_api.h>

#include <iterator>
#include <span>

#include "core/gradient_dtype.hpp"
#include "core/router_groups.hpp"
#include "core/unused_elements.hpp"
#include "core/workspace.hpp"
#include "cuda/host/choose_tokens.hpp"
#include "cuda/host/token_mask.hpp"
#include "cuda/layer/arguments.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/device.hpp"
#include "cuda/layer/low_precision.hpp"
#include "cuda/layer/plan.hpp"
#include "cuda/layer/routing_tables.hpp"
#include "cuda/layer/select.hpp"
#include "cuda/layer/sequence.hpp"

namespace tessera::cuda {
namespace {

/// Elements between rows of a checked [rows,columns] tensor.
std::int64_t pitch_of(ConstTensor const& tensor) noexcept {
  return tensor.shape[0] > 1 ? tensor.stride[0] : tensor.shape[1];
}

struct RouterTensors {
  ConstTensor const& x;
  ConstTensor const& w_router;
  ConstTensor const& b_router;
  ConstTensor const& selection_bias;
  ConstTensor const& token_mask;
  Tensor const& logits;  ///< where the caller wants them, or absent
};

struct RouterMemory {
  float* gmem_logits;
  void* gmem_router_terms;  ///< with an fp32 router
  int32_t* gmem_topk_ids;
  float* gmem_topk_weights;
  float* gmem_chosen_p;
  int32_t* gmem_token_offsets;  ///< where experts per token vary, else null
  // Token rounding and expert choice:
  int32_t* gmem_unrounded_ids = nullptr;
  float* gmem_member_scores = nullptr;
  int32_t* gmem_topk_counts = nullptr;
  std::byte* gmem_choice_workspace = nullptr;
  ChoiceTables tables = {};                 ///< that choose_tokens makes
  void* gmem_metadata_workspace = nullptr;  ///< null: no metadata follows
};

std::int32_t int32(std::int64_t value) noexcept { return static_cast<std::int32_t>(value); }

core::RouterGroups groups_of(MoeDesc const& desc) noexcept {
  return desc.router.kind == RouterKind::group_limited ? core::router_groups(desc)
                                                       : core::RouterGroups{};
}

/// Replaces the choice of padding tokens by none.
void add_mask(MoeDesc const& desc, RouterTensors const& tensors, std::int32_t* gmem_ids,
              float* gmem_scores, float* gmem_chosen_p, Sequence& sequence) noexcept {
  if (!tensors.token_mask.present()) return;
  sequence.add("mask choice", [&](cudaStream_t stream) {
    return launch_mask_choice(
        {.gmem_token_mask = static_cast<std::uint8_t const*>(tensors.token_mask.data),
         .tokens = desc.shape.tokens,
         .top_k = desc.shape.top_k,
         .gmem_ids = gmem_ids,
         .gmem_scores = gmem_scores,
         .gmem_chosen_p = gmem_chosen_p},
        stream);
  });
}

/// Says what experts choose their tokens from, or round them.
ChooseTokensArguments token_choice(MoeDesc const& desc, RouterTensors const& tensors,
                                   RouterMemory const& memory) noexcept {
  MoeShape const& s = desc.shape;
  auto const [groups, top_groups] = groups_of(desc);
  return {.gmem_logits = memory.gmem_logits,
          .gmem_selection_bias = static_cast<float const*>(tensors.selection_bias.data),
          .gmem_topk_ids = desc.rounds_tokens() ? memory.gmem_unrounded_ids : nullptr,
          .gmem_member_scores = memory.gmem_member_scores,
          .tokens = s.tokens,
          .experts = int32(s.experts),
          .top_k = int32(s.top_k),
          .router = desc.router,
          .capacity = desc.router.capacity,
          .groups = int32(groups),
          .top_groups = int32(top_groups),
          .slots = desc.num_slots(),
          .gmem_token_offsets = memory.gmem_token_offsets,
          .gmem_ids = memory.gmem_topk_ids,
          .gmem_scores = memory.gmem_topk_weights,
          .gmem_topk_counts = desc.rounds_tokens() ? memory.gmem_topk_counts : nullptr,
          .gmem_workspace = memory.gmem_choice_workspace,
          .gmem_token_mask = static_cast<std::uint8_t const*>(tensors.token_mask.data),
          .tables = memory.tables};
}

/// Makes the slots of every token, whose number varies, from the tokens that experts have chosen.
void add_token_choice(MoeDesc const& desc, RouterTensors const& tensors, RouterMemory const& memory,
                      ChooseTokensArguments const& args, Sequence& sequence) noexcept {
  sequence.add("choose tokens",
               [&](cudaStream_t stream) { return launch_choose_tokens(args, stream); });
  // Backward reads these of the choice before rounding.
  if (desc.rounds_tokens()) {
    add_mask(desc, tensors, memory.gmem_unrounded_ids, memory.gmem_member_scores, nullptr,
             sequence);
  }
}

RouteArguments topk_choice(MoeDesc const& desc, RouterTensors const& tensors,
                           RouterMemory const& memory) noexcept {
  MoeShape const& s = desc.shape;
  bool const rounds = desc.rounds_tokens();
  auto const [groups, top_groups] = groups_of(desc);
  return {
      .gmem_logits = memory.gmem_logits,
      .gmem_selection_bias = static_cast<float const*>(tensors.selection_bias.data),
      .gmem_topk_ids = rounds ? memory.gmem_unrounded_ids : memory.gmem_topk_ids,
      .gmem_topk_weights = rounds ? memory.gmem_member_scores : memory.gmem_topk_weights,
      .gmem_chosen_p = rounds ? nullptr : memory.gmem_chosen_p,
      .tokens = s.tokens,
      .experts = int32(s.experts),
      .top_k = int32(s.top_k),
      .kind = desc.router.kind,
      .route_scale = rounds ? 1.0f : desc.router.route_scale,
      .normalize_scores = desc.router.normalize_scores,
      .groups = int32(groups),
      .top_groups = int32(top_groups),
  };
}

/// Makes the top-k choice of every token. Returns the slots of a unit, if it ranks slots for metadata as well, or 0.
std::int32_t add_topk_choice(MoeDesc const& desc, RouterTensors const& tensors,
                             RouterMemory const& memory, Sequence& sequence) noexcept {
  RouteArguments args = topk_choice(desc, tensors, memory);
  std::int32_t unit_slots = 0;
  bool const ranks = memory.gmem_metadata_workspace != nullptr && !tensors.token_mask.present();
  if (ranks && !refuse(args).refused()) {
    unit_slots = route_unit_slots(args);
  }
  if (unit_slots > 0) {
    MetadataWorkspace const ranked = MetadataWorkspace::of(
        memory.gmem_metadata_workspace, desc.num_slots(), desc.shape.experts, unit_slots);
    args.gmem_unit_counts = ranked.gmem_counts;
    args.gmem_unit_ranks = ranked.gmem_ranks;
  }
  sequence.select("route", args);
  add_mask(desc, tensors, args.gmem_topk_ids, args.gmem_topk_weights, args.gmem_chosen_p, sequence);
  return unit_slots;
}

/// Makes the top-k choice of every token, with the scores of c = 1, and the slots that rounding leaves of it.
void add_rounded_choice(MoeDesc const& desc, RouterTensors const& tensors,
                        RouterMemory const& memory, Sequence& sequence) noexcept {
  RouteArguments const route = topk_choice(desc, tensors, memory);
  ChooseTokensArguments choice = token_choice(desc, tensors, memory);
  choice.has_ranks = !refuse(route).refused() && route_ranks_pairs(route);
  if (choice.has_ranks) {
    sequence.add("route",
                 [&](cudaStream_t stream) { return launch_route_and_rank(route, choice, stream); });
  } else {
    sequence.select("route", route);
  }
  add_token_choice(desc, tensors, memory, choice, sequence);
}

/// Makes ids and scores of every token from its logits, or the scores of given ids. Returns what add_topk_choice does.
std::int32_t add_choice(MoeDesc const& desc, RouterTensors const& tensors,
                        RouterMemory const& memory, Sequence& sequence) noexcept {
  if (!desc.router.replay) {
    if (!chooses_tokens(desc)) return add_topk_choice(desc, tensors, memory, sequence);
    if (desc.experts_choose()) {
      add_token_choice(desc, tensors, memory, token_choice(desc, tensors, memory), sequence);
    } else {
      add_rounded_choice(desc, tensors, memory, sequence);
    }
    return 0;
  }
  sequence.add("score choice", [&](cudaStream_t stream) {
    return launch_score_choice_plain({.gmem_logits = memory.gmem_logits,
                                      .gmem_ids = memory.gmem_topk_ids,
                                      .gmem_token_offsets = memory.gmem_token_offsets,
                                      .gmem_scores = memory.gmem_topk_weights,
                                      .gmem_chosen_p = memory.gmem_chosen_p,
                                      .tokens = desc.shape.tokens,
                                      .experts = int32(desc.shape.experts),
                                      .top_k = int32(desc.shape.top_k),
                                      .kind = desc.router.kind,
                                      .route_scale = desc.router.route_scale,
                                      .normalize_scores = desc.router.normalize_scores},
                                     stream);
  });
  return 0;
}

/// Computes logits, and ids and scores from them. Returns what add_topk_choice does.
std::int32_t add_router(MoeDesc const& desc, RouterTensors const& tensors,
                        RouterMemory const& memory, Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  sequence.select("router_logits", RouterLogitsArguments{
                                       .x = matrix_rows(tensors.x),
                                       .w_router = matrix_rows(tensors.w_router),
                                       .gmem_b_router = tensors.b_router.data,
                                       .gmem_logits = memory.gmem_logits,
                                       .hidden = s.hidden,
                                       .experts = static_cast<std::int32_t>(s.experts),
                                       .is_fp32 = core::has_fp32_router(desc),
                                       .gmem_terms = memory.gmem_router_terms,
                                   });
  std::int32_t const unit_slots = add_choice(desc, tensors, memory, sequence);
  if (!tensors.logits.present() || tensors.logits.data == memory.gmem_logits) return unit_slots;
  sequence.add("copy logits", [&](cudaStream_t stream) {
    std::size_t const row = sizeof(float) * static_cast<std::size_t>(s.experts);
    if (s.tokens == 0) return cudaSuccess;
    return cudaMemcpy2DAsync(tensors.logits.data,
                             sizeof(float) * static_cast<std::size_t>(pitch_of(tensors.logits)),
                             memory.gmem_logits, row, row, static_cast<std::size_t>(s.tokens),
                             cudaMemcpyDeviceToDevice, stream);
  });
  return unit_slots;
}

bool is_contiguous(Tensor const& tensor) noexcept {
  return tensor.present() && pitch_of(tensor) == tensor.shape[1];
}

ClearedWords unused_words(MoeDesc const& desc, RoutingView const& tables) noexcept {
  std::span<std::int32_t> const unused = core::unused_elements(desc, tables);
  return {unused.data(), int32(std::ssize(unused))};
}

void add_metadata(MoeDesc const& desc, std::int32_t const* gmem_ids, RoutingView const& tables,
                  void* gmem_workspace, ClearedWords const& cleared, std::int32_t unit_slots,
                  Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  sequence.select("metadata", MetadataArguments{
                                  .gmem_ids = gmem_ids,
                                  .ids_are_int64 = false,
                                  .gmem_token_offsets = tables.token_offsets,
                                  .slots = desc.num_slots(),
                                  .tokens = static_cast<std::int32_t>(s.tokens),
                                  .top_k = static_cast<std::int32_t>(s.top_k),
                                  .experts = static_cast<std::int32_t>(s.experts),
                                  .gmem_expert_offsets = tables.expert_offsets,
                                  .gmem_sort_permutation = tables.sort_permutation,
                                  .gmem_gather_index = tables.gather_index,
                                  .gmem_inverse_permutation = tables.inverse_permutation,
                                  .gmem_workspace = gmem_workspace,
                                  .cleared = cleared,
                                  .unused = unused_words(desc, tables),
                                  .unit_slots = unit_slots,
                              });
}

void add_groups(MoeDesc const& desc, GroupedRoutingArgs const& args, RoutingView const& tables,
                ClearedWords const& cleared, Sequence& sequence) noexcept {
  sequence.add("grouped rows", [&](cudaStream_t stream) {
    return launch_grouped_rows({.groups = integers(args.expert_offsets),
                                .grouping = desc.grouping,
                                .gmem_row_scores = static_cast<float const*>(args.row_scores.data),
                                .rows = desc.shape.tokens,
                                .experts = desc.shape.experts,
                                .tables = tables,
                                .gmem_error = sequence.device().gmem_error(),
                                .cleared = cleared},
                               stream);
  });
}

/// Makes the routing tables from a router, from given ids and weights, or from grouped rows.
void add_routing(MoeDesc const& desc, MoeForwardArgs const& args, ForwardPlan const& plan,
                 std::byte* base, RoutingView const& tables, Sequence& sequence) noexcept {
  MoeShape const& s = desc.shape;
  std::uint64_t* const gmem_error = sequence.device().gmem_error();
  ClearedWords const cleared = {plan.counters.in(base), int32(plan.cleared_words)};
  if (desc.grouping != RowGrouping::slots) {
    return add_groups(desc, {args.expert_offsets, args.row_scores}, tables, cleared, sequence);
  }
  bool const routed = desc.router.kind != RouterKind::given;
  std::int32_t* const gmem_ids = routed ? tables.topk_ids : plan.ids.in(base);
  if (!routed || desc.router.replay) {
    bool const varies = s.variable_experts;
    sequence.add("given slots", [&](cudaStream_t stream) {
      return launch_given_slots({.ids = integers(args.topk_ids),
                                 .gmem_weights = static_cast<float const*>(args.topk_weights.data),
                                 .token_offsets = integers(args.token_offsets),
                                 .ids_pitch = varies ? 0 : pitch_of(args.topk_ids),
                                 .weights_pitch = varies ? 0 : pitch_of(args.topk_weights),
                                 .top_k = s.top_k,
                                 .slots = desc.num_slots(),
                                 .tokens = s.tokens,
                                 .experts = s.experts,
                                 .gmem_ids = gmem_ids,
                                 .gmem_scores = tables.scores,
                                 .gmem_token_offsets = tables.token_offsets,
                                 .gmem_error = gmem_error},
                                stream);
    });
  }
  std::int32_t unit_slots = 0;
  if (routed) {
    // Logits that backward needs stay in the tables; others go where the caller wants them, or nowhere.
    float* const gmem_logits = tables.logits != nullptr     ? tables.logits
                               : is_contiguous(args.logits) ? static_cast<float*>(args.logits.data)
                                                            : plan.logits.in(base);
    unit_slots = add_router(
        desc,
        {args.x, args.w_router, args.b_router, args.selection_bias, args.token_mask, args.logits},
        {.gmem_logits = gmem_logits,
         .gmem_router_terms = plan.router_terms.in(base),
         .gmem_topk_ids = tables.topk_ids,
         .gmem_topk_weights = tables.scores,
         .gmem_chosen_p = tables.chosen_p,
         .gmem_token_offsets = tables.token_offsets,
         .gmem_unrounded_ids = tables.unrounded_ids,
         .gmem_member_scores = plan.choice.member_scores.in(base),
         .gmem_topk_counts = static_cast<std::int32_t*>(args.topk_counts.data),
         .gmem_choice_workspace = plan.choice.workspace.in(base),
         .tables = {.gmem_expert_offsets = tables.expert_offsets,
                    .gmem_sort_permutation = tables.sort_permutation,
                    .gmem_gather_index = tables.gather_index,
                    .gmem_inverse_permutation = tables.inverse_permutation,
                    .cleared = cleared,
                    .unused = unused_words(desc, tables)},
         .gmem_metadata_workspace = plan.metadata.in(base)},
        sequence);
  }
  if (chooses_tokens(desc)) return;  // and has made the tables
  add_metadata(desc, gmem_ids, tables, plan.metadata.in(base), cleared, unit_slots, sequence);
}

/// The experts of a layer that does not quantise.
void add_experts(MoeDesc const& desc, ExpertArguments& experts, bool in_place,
                 std::int32_t* gmem_counters, Sequence& sequence) noexcept {
  ExpertsFwdArguments const in_one = experts_fwd_arguments(experts, in_place, gmem_counters);
  if (has_few_tokens(desc) && prefers_few_tokens(in_one)) {
    return sequence.add("experts", [&](cudaStream_t stream) {
      return launch_experts_fwd_few_tokens(in_one, sequence.device().sm_count(), stream);
    });
  }
  auto const add = [&](Columns columns, bool) {
    DownProjectionFwdArguments down = in_place ? experts.down : columns_of(experts.down, columns);
    if (columns.first == 0) {
      hand_over(experts.up, down, sequence.device().architecture(),
                gmem_counters + kForwardHandover);
      sequence.select("up_projection_fwd", experts.up);
    }
    sequence.select("down_projection_fwd", down);
    if (!in_place) sequence.select("aggregate", columns_of(experts.aggregate, columns));
  };
  // Its rows are o, of which there is no chunk.
  if (in_place) return add({0, desc.shape.hidden}, true);
  for_each_column_chunk(desc, add);
}

}  // namespace

Status moe_forward(DeviceContext const& device, MoeDesc const& desc, MoeForwardArgs const& args,
                   RoutingView const& routing, std::size_t routing_bytes, Stream stream) noexcept {
  if (desc.quantises()) TESSERA_TRY(check_quantised(device.architecture(), desc, args));
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  nvtx3::scoped_range_in<NvtxDomain> const range{"moe_forward"};
  ForwardPlan const plan = plan_forward(desc, routing_bytes);
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  Sequence sequence(device, stream);
  bool const in_place = !args.row_scores.present() && rows_lie_in(desc, args.o);
  ExpertArguments experts = expert_arguments(desc, args,
                                             {.tables = routing,
                                              .gmem_a = plan.a.in(base),
                                              .gmem_y = in_place ? args.o.data : plan.y.in(base),
                                              .gmem_tile_counters = plan.counters.in(base)});
  add_routing(desc, args, plan, base, routing, sequence);
  // Without rounding the top-k choice counts the same; with it, choose_tokens has counted.
  Tensor const topk_counts = desc.rounds_tokens() ? Tensor{} : args.topk_counts;
  for (Tensor const& counts : {args.expert_counts, topk_counts}) {
    if (!counts.present()) continue;
    sequence.add("expert counts", [&](cudaStream_t native) {
      return launch_expert_counts(routing.expert_offsets, desc.shape.experts,
                                  static_cast<std::int32_t*>(counts.data), native);
    });
  }
  if (desc.quantises()) {
    add_quantised_projections(desc, args, plan, base, routing, experts.down.gmem_y, sequence);
    if (!in_place) sequence.select("aggregate", experts.aggregate);
  } else {
    add_experts(desc, experts, in_place, plan.counters.in(base), sequence);
  }
  if (in_place) add_zero_tail(desc, routing, args.o, sequence);
  return sequence.status();
}

Status route(DeviceContext const& device, MoeDesc const& desc, RouteArgs const& args,
             Stream stream) noexcept {
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  nvtx3::scoped_range_in<NvtxDomain> const range{"route"};
  MoeShape const& s = desc.shape;
  RoutePlan const plan = plan_route(desc);
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  Sequence sequence(device, stream);
  float* const gmem_logits =
      is_contiguous(args.logits) ? static_cast<float*>(args.logits.data) : plan.logits.in(base);
  add_router(
      desc,
      {args.x, args.w_router, args.b_router, args.selection_bias, args.token_mask, args.logits},
      {.gmem_logits = gmem_logits,
       .gmem_router_terms = plan.router_terms.in(base),
       .gmem_topk_ids = plan.ids.in(base),
       .gmem_topk_weights = plan.weights.in(base),
       .gmem_chosen_p = nullptr,
       .gmem_token_offsets = plan.token_offsets.in(base),
       .gmem_unrounded_ids = plan.unrounded_ids.in(base),
       .gmem_member_scores = plan.choice.member_scores.in(base),
       .gmem_choice_workspace = plan.choice.workspace.in(base)},
      sequence);
  bool const varies = desc.experts_vary();  // all slots are one row then
  sequence.add("route outputs", [&](cudaStream_t native) {
    return launch_route_outputs({.gmem_ids = plan.ids.in(base),
                                 .gmem_weights = plan.weights.in(base),
                                 .rows = varies ? 1 : s.tokens,
                                 .columns = varies ? desc.num_slots() : s.top_k,
                                 .gmem_ids_out = args.topk_ids.data,
                                 .ids_out_are_int64 = desc.ids_dtype == DType::int64,
                                 .ids_pitch = varies ? 0 : pitch_of(args.topk_ids),
                                 .gmem_weights_out = static_cast<float*>(args.topk_weights.data),
                                 .weights_pitch = varies ? 0 : pitch_of(args.topk_weights),
                                 .gmem_token_offsets = plan.token_offsets.in(base),
                                 .gmem_token_offsets_out = args.token_offsets.data,
                                 .tokens = s.tokens},
                                native);
  });
  return sequence.status();
}

Status routing_of_groups(DeviceContext const& device, MoeDesc const& desc,
                         GroupedRoutingArgs const& args, RoutingView const& routing,
                         Stream stream) noexcept {
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  Sequence sequence(device, stream);
  add_groups(desc, args, routing, {}, sequence);
  return sequence.status();
}

}  // namespace tessera::cuda
