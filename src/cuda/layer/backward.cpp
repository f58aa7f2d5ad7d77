// SPDX-License-Identifier: Apache-2.0
// moe_backward: down_projection_dgrad -> down_projection_wgrad -> dscores and dlogits -> router dgrad ->
// up_projection_dgrad -> up_projection_wgrad beside aggregate -> router wgrad on the caller's stream. Fast kernels from
// down_projection_wgrad on start while the previous one ends (docs/adr/0019-early-launches-in-backward.md,
// 0021-experts-handed-over.md). dx rows reuse the memory of a_scaled. As forward, a call waits for nothing and can be
// captured into a graph.
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "core/gathered_rows.hpp"
#include "core/gradient_dtype.hpp"
#include "core/router_math.hpp"
#include "core/workspace.hpp"
#include "cuda/host/router_backward.hpp"
#include "cuda/host/split_fp32.hpp"
#include "cuda/host/token_mask.hpp"
#include "cuda/layer/arguments.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/low_precision.hpp"
#include "cuda/layer/sequence.hpp"

namespace tessera::cuda {
namespace {

/// Says which steps a call needs for the outputs that it was given.
struct Wanted {
  bool dx, dlogits, dscores, a_scaled, dgrad, dw_router;
};

Wanted wanted(MoeDesc const& desc, MoeBackwardArgs const& args, Pass pass) noexcept {
  ExpertGradients const& g = args.gradients;
  bool const routed = desc.router.kind != RouterKind::given;
  bool const split = pass == Pass::backward_input;  // the caller gets what the second call may need
  Wanted out{};
  out.dx = args.dx.present();
  out.dw_router = g.dw_router.present();
  out.dlogits = routed && (split || out.dx || args.dlogits.present() || out.dw_router ||
                           g.db_router.present());
  out.dscores = out.dlogits || args.dscores.present();
  out.a_scaled = split || g.dw_down.present();
  out.dgrad = out.dx || out.dscores || out.a_scaled || g.dw_up.present() || g.dw_gate.present() ||
              g.db_up.present() || g.db_gate.present();
  return out;
}

/// SMs for the aggregate beside up_projection_wgrad, so that it ends a little earlier and router_wgrad follows it.
/// Rates of one SM with the other kernel beside it: bench/results/archive/h200/2026-11-22-early-launches-backward.json.
int sms_for_aggregate(UpProjectionWgradArguments const& wgrad, AggregateArguments const& aggregate,
                      int sm_count) noexcept {
  constexpr double kFlopsOfSm = 4.5e12, kBytesOfSm = 46e9;  // a second
  auto const rows = static_cast<double>(wgrad.rows), d = static_cast<double>(wgrad.hidden);
  double const gemm = 2 * rows * d * static_cast<double>(wgrad.halves * wgrad.intermediate);
  double const passes = aggregate.adds_to_o && aggregate.gmem_adds == nullptr ? 2 : 1;  // over dx
  double const bytes = 2 * static_cast<double>(aggregate.hidden) *
                       (rows + passes * static_cast<double>(aggregate.tokens));
  double const gemm_s = gemm / kFlopsOfSm, aggregate_s = bytes / kBytesOfSm;
  return static_cast<int>(sm_count * aggregate_s / (gemm_s + aggregate_s));
}

/// One call: its arrays, in the workspace or in the caller's buffers, and its launches.
class Backward {
 public:
  Backward(MoeDesc const& desc, MoeBackwardArgs const& args, RoutingView const& routing, Pass pass,
           SplitBackward split_by, Sequence& sequence) noexcept
      : desc_(desc),
        args_(args),
        routing_(routing),
        plan_(plan_backward(desc, pass)),
        base_(core::WorkspacePlan::align(args.workspace.data)),
        wanted_(wanted(desc, args, pass)),
        in_place_(wanted_.dx && rows_lie_in(desc, args.dx)),
        is_whole_(pass == Pass::backward),
        split_(split_by),
        fp32_router_(core::has_fp32_router(desc)),
        sequence_(sequence) {
    bool const split = pass != Pass::backward;
    gmem_dscores_ =
        args.dscores.present() ? static_cast<float*>(args.dscores.data) : plan_.dscores.in(base_);
    gmem_dlogits_ = split ? static_cast<float*>(args.dlogits_saved.data) : plan_.dlogits.in(base_);
    bool const has_h = pass != Pass::backward_weights;
    bool const over_h = has_h && desc.overwrite_h && !desc.quantises();
    void* const gmem_dh = over_h  ? const_cast<void*>(args.h.data)
                          : split ? args.dh.data
                                  : plan_.dh.in(base_);
    void* const gmem_own_a = wanted_.a_scaled ? plan_.a_or_dx.in(base_) : nullptr;
    experts_ = backward_arguments(
        desc, args,
        {.tables = routing,
         .gmem_recomputed_h = has_h && desc.save == SavePolicy::x ? gmem_dh : nullptr,
         .gmem_dh = gmem_dh,
         .gmem_a_scaled = split ? args.a_scaled.data : gmem_own_a,
         .gmem_ds_partials = wanted_.dscores ? plan_.ds_partials.in(base_) : nullptr,
         .gmem_dx_rows = in_place_ ? args.dx.data : plan_.a_or_dx.in(base_),
         .gmem_tile_counters = plan_.counters.in(base_)});
    if (desc.quantises()) experts_.up_wgrad.left = x();
    if (wanted_.dx && routed()) w_router_ = router_of_dx();
    if (wanted_.dx) put_router_part_in_rows();
    if (!split_.counters_are_zero) clear_counters(plan_.counters.in(base_), sequence_);
    if (wanted_.dx && fp32_router_) split_weights();
    if (in_place_ && !core::gathers_grouped_rows(desc)) {
      add_zero_tail(desc, routing, args.dx, sequence_);
    }
  }

  /// Makes what gradients of weights read in place of x, where forward saved codes.
  void dequantise_x() noexcept {
    ExpertGradients const& g = args_.gradients;
    if (!desc_.quantises() || !(g.dw_up.present() || g.dw_gate.present() || wanted_.dw_router)) {
      return;
    }
    add_dequantised_x(desc_, args_, plan_.x.in(base_), sequence_);
  }

  /// Computes dh, a_scaled, dscores and dlogits.
  void activations() noexcept {
    if (!wanted_.dgrad) return;
    bool const waits_itself = await_rows();
    if (desc_.quantises()) {
      if (desc_.save == SavePolicy::x) add_h8(desc_, args_, plan_, base_, routing_, sequence_);
      return add_quantised_down_dgrad(desc_, args_, plan_, base_, experts_.down_dgrad, sequence_);
    }
    if (desc_.save == SavePolicy::x) {
      sequence_.select("up_projection_fwd", experts_.recompute);
    }
    if (hands_a_over()) {
      hand_over(experts_.down_dgrad, experts_.down_wgrad, sequence_.device().architecture(),
                plan_.counters.in(base_) + kBackwardHandover);
    }
    // A CTA without an SM would keep the tile that is its first until the kernel beside this one ends. Those whose SMs
    // that kernel leaves early come a little later.
    int const sms = sequence_.device().sm_count() - (waits_itself ? split_.awaited.sms_beside : 0);
    sequence_.select("down_projection_dgrad", experts_.down_dgrad, sms);
  }

  /// Computes dscores and dlogits in the tail of down_projection_wgrad, on whose results they do not depend.
  void scores() noexcept {
    if (!wanted_.dgrad) return;
    if (wanted_.dlogits && desc_.router.replay) {
      add_replayed_dlogits();
    } else if (wanted_.dlogits && splits_rounded(desc_)) {
      sequence_.select("router_dlogits", rounded_dlogits());
    } else if (wanted_.dlogits) {
      sequence_.select("router_dlogits",
                       RouterGradientArguments{dscores(), dlogits(routing_.topk_ids, gmem_dscores_),
                                               follows_down_wgrad_});
    } else if (wanted_.dscores && !split_.adds_up_scores) {
      add_dscores();
    }
    if (fp32_router_) split_dlogits();
  }

  /// Computes dw_down and db_down. It is the last reader of a_scaled, whose memory dx rows take then.
  void down_weights() noexcept {
    if (args_.gradients.db_down.present()) sequence_.select("db_down", experts_.db_down);
    if (args_.gradients.dw_down.present()) {
      sequence_.select("down_projection_wgrad", experts_.down_wgrad);
      follows_down_wgrad_ = true;
    }
  }

  /// Computes the router's part of dx, and the dx rows, which include that part where they can.
  void input_gradient() noexcept {
    if (!wanted_.dx) return;
    experts_.up_dgrad.waits_first = !follows_down_wgrad_;
    if (has_router_dgrad()) {
      sequence_.select(
          "router_dgrad",
          RouterDgradArguments{.gmem_dlogits = fp32_router_ ? plan_.dgrad_dlogits.in(base_)
                                                            : plan_.rounded.in(base_),
                               .w_router = w_router_,
                               .gmem_dx = args_.dx.data,
                               .dx_pitch = matrix_rows(args_.dx).pitch,
                               .tokens = desc_.shape.tokens,
                               .hidden = desc_.shape.hidden,
                               .experts = static_cast<std::int32_t>(desc_.shape.experts),
                               .gmem_tile_counter = plan_.counters.in(base_) + kRouterDgradCounter,
                               .terms = fp32_router_ ? kDgradTerms : 1,
                               .gmem_tokens = lists_tokens_ ? plan_.listed.in(base_) : nullptr,
                               .gmem_offsets = plan_.counters.in(base_) + kListedFirst,
                               .starts_early = lists_tokens_});
    }
    if (desc_.quantises()) {
      return add_quantised_up_dgrad(desc_, args_, plan_, base_, experts_.up_dgrad, sequence_);
    }
    if (in_place_) return sequence_.select("up_projection_dgrad", experts_.up_dgrad);
    AggregateArguments const whole = experts_.aggregate;
    for_each_column_chunk(desc_, [&](Columns columns, bool is_last) {
      UpProjectionDgradArguments up_dgrad = columns_of(experts_.up_dgrad, columns);
      // The rows of one chunk lie where those of the chunk before lay, which its aggregate reads.
      up_dgrad.waits_first = experts_.up_dgrad.waits_first || columns.first > 0;
      sequence_.select("up_projection_dgrad", up_dgrad);
      experts_.aggregate = columns_of(whole, columns);
      if (!is_last) sequence_.select("aggregate", experts_.aggregate);
    });
  }

  /// Computes dx from its rows, of the last columns where they come in chunks, and dw_up; side by side where both are
  /// wanted and have fast kernels, as one waits for memory and the other for the tensor cores. Where rows are written
  /// to dx itself, dx is done.
  void aggregate_and_up_weights(bool input, bool weights) noexcept {
    ExpertGradients const& g = args_.gradients;
    bool const dx = input && wanted_.dx && !in_place_;
    bool const dw_up = weights && (g.dw_up.present() || g.dw_gate.present());
    bool const both = dx && dw_up && sequence_.device().architecture() == Architecture::sm_90 &&
                      !refuse(experts_.up_wgrad).refused() && !refuse(experts_.aggregate).refused();
    int const all = sequence_.device().sm_count();
    int const sms = both ? sms_for_aggregate(experts_.up_wgrad, experts_.aggregate, all) : 0;
    if (dx && sms == 0) sequence_.select("aggregate", experts_.aggregate);
    // It reads nothing that up_projection_dgrad makes, or down_projection_wgrad.
    experts_.up_wgrad.starts_early = sms > 0 || (input ? in_place_ : follows_down_wgrad_);
    if (dw_up) sequence_.select("up_projection_wgrad", experts_.up_wgrad, all - sms);
    if (sms > 0) {
      sequence_.add("aggregate", [&](cudaStream_t stream) {
        std::int32_t* const gmem_counter = plan_.counters.in(base_) + kAggregateCounter;
        return launch_aggregate_beside<__nv_bfloat16>(
            {experts_.aggregate, reinterpret_cast<std::uint32_t*>(gmem_counter)}, all, stream);
      });
      follows_aggregate_beside_ = true;
    }
    if (weights && (g.db_up.present() || g.db_gate.present())) {
      sequence_.select("db_up", experts_.db_up);
      follows_aggregate_beside_ = false;
    }
  }

  void router_weights() noexcept {
    bool const db_router = args_.gradients.db_router.present();
    if (has_padding() && (wanted_.dw_router || db_router)) list_real_tokens();
    if (wanted_.dw_router) {
      sequence_.select(
          "router_wgrad",
          RouterWgradArguments{
              .gmem_dlogits = has_padding() ? packed_.dlogits.in(packed_base()) : wgrad_dlogits(),
              .x = x(),
              .gmem_dw_router = args_.gradients.dw_router.data,
              .dw_pitch = matrix_rows(args_.gradients.dw_router).pitch,
              .is_fp32 = router_gradients_are_fp32(),
              .accumulates = accumulates(),
              .gmem_partials = plan_.router_partials.in(base_),
              .gmem_arrived =
                  reinterpret_cast<std::uint32_t*>(plan_.counters.in(base_) + kRouterWgradParts),
              .hidden = desc_.shape.hidden,
              .experts = static_cast<std::int32_t>(desc_.shape.experts),
              .gmem_tile_counter = plan_.counters.in(base_) + kRouterWgradCounter,
              .starts_early = follows_aggregate_beside_ && !has_padding(),
              .terms = wgrad_terms(),
              .gmem_order = has_padding() ? packed_.order.in(packed_base()) : nullptr,
              .gmem_chunk_offsets =
                  has_padding() ? packed_.chunk_offsets.in(packed_base()) : nullptr});
    }
    if (!db_router) return;
    std::int64_t const experts = desc_.shape.experts;
    sequence_.select(
        "db_router",
        BiasGradientArguments{
            .left = {gmem_dlogits_, desc_.shape.tokens, experts},
            .left_is_fp32 = true,
            .gmem_gather_index = has_padding() ? packed_.order.in(packed_base()) : nullptr,
            .gmem_expert_offsets = has_padding() ? packed_.rows.in(packed_base()) : nullptr,
            .gmem_scores = nullptr,
            .gmem_sort_permutation = nullptr,
            .halves = 1,
            .db = {{.gmem = args_.gradients.db_router.data, .row_stride = 1, .block = experts}},
            .is_fp32 = router_gradients_are_fp32(),
            .accumulates = accumulates(),
            .columns = experts,
            .experts = 1});
  }

  /// Rounds what backward_input left in fp32 to the operand of router_wgrad.
  void round_saved_dlogits() noexcept {
    if (!wanted_.dw_router) return;
    if (fp32_router_) return split_dlogits_for_weights();
    sequence_.add("round dlogits", [&](cudaStream_t stream) {
      return launch_round_dlogits_plain({.gmem_dlogits = gmem_dlogits_,
                                         .gmem_rounded = plan_.rounded.in(base_),
                                         .count = desc_.shape.tokens * desc_.shape.experts},
                                        stream);
    });
  }

 private:
  /// Has the first kernel that reads rows of d_o wait for those that are on their way; false: a launch ahead of it
  /// does, or all are there.
  [[nodiscard]] bool await_rows() noexcept {
    core::AwaitedRows const& awaited = split_.awaited;
    if (awaited.gmem_arrivals == nullptr) return false;
    if (!desc_.quantises() && desc_.save != SavePolicy::x && !hands_a_over() &&
        sequence_.device().architecture() == Architecture::sm_90 &&
        !refuse(experts_.down_dgrad).refused()) {
      experts_.down_dgrad.awaited = awaited;
      return true;
    }
    sequence_.add("await rows",
                  [&](cudaStream_t stream) { return launch_await_rows_plain(awaited, stream); });
    return false;
  }
  /// The rows that gradients of weights read.
  [[nodiscard]] MatrixRows x() const noexcept {
    if (!desc_.quantises()) return matrix_rows(args_.x);
    return {plan_.x.in(base_), desc_.shape.tokens, desc_.shape.hidden};
  }
  [[nodiscard]] std::uint8_t const* gmem_mask() const noexcept {
    return static_cast<std::uint8_t const*>(args_.token_mask.data);
  }
  /// Counts the terms, each of E columns, in a row of router_wgrad's operand.
  [[nodiscard]] std::int32_t wgrad_terms() const noexcept { return fp32_router_ ? kWgradTerms : 1; }
  [[nodiscard]] std::uint16_t* wgrad_dlogits() const noexcept {
    return fp32_router_ ? plan_.wgrad_dlogits.in(base_) : plan_.rounded.in(base_);
  }
  [[nodiscard]] bool has_padding() const noexcept { return gmem_mask() != nullptr; }
  [[nodiscard]] std::byte* packed_base() const noexcept {
    return core::WorkspacePlan::align(plan_.packed.in(base_));
  }
  /// Lists the real tokens, as sums over tokens leave padding out: x of padding may be anything.
  void list_real_tokens() noexcept {
    MoeShape const& s = desc_.shape;
    std::int32_t* const gmem_rows = packed_.rows.in(packed_base());
    std::int32_t* const gmem_order = packed_.order.in(packed_base());
    sequence_.add("token order", [&](cudaStream_t stream) {
      cudaError_t const error = cudaMemsetAsync(gmem_rows, 0, sizeof(std::int32_t), stream);
      if (error != cudaSuccess) return error;
      return launch_token_order({.gmem_token_mask = gmem_mask(),
                                 .tokens = s.tokens,
                                 .gmem_order = gmem_order,
                                 .gmem_count = gmem_rows + 1},
                                stream);
    });
    if (!wanted_.dw_router) return;
    sequence_.add("pack dlogits", [&](cudaStream_t stream) {
      return launch_pack_dlogits({.gmem_order = gmem_order,
                                  .gmem_count = gmem_rows + 1,
                                  .gmem_dlogits = wgrad_dlogits(),
                                  .tokens = s.tokens,
                                  .hidden = s.hidden,
                                  .columns = static_cast<std::int32_t>(s.experts) * wgrad_terms(),
                                  .gmem_packed = packed_.dlogits.in(packed_base()),
                                  .gmem_chunk_offsets = packed_.chunk_offsets.in(packed_base())},
                                 stream);
    });
  }

  /// down_projection_wgrad comes right after down_projection_dgrad.
  [[nodiscard]] bool hands_a_over() const noexcept {
    ExpertGradients const& g = args_.gradients;
    return is_whole_ && g.dw_down.present() && !g.db_down.present();
  }
  [[nodiscard]] bool routed() const noexcept { return desc_.router.kind != RouterKind::given; }
  [[nodiscard]] bool has_router_dgrad() const noexcept {
    return wanted_.dx && routed() && (!part_in_rows_ || lists_tokens_);
  }
  /// Serves routers whose dlogits are 0 but for the experts of a token, and bf16 operands; with codes, router_dgrad
  /// adds it. After token rounding it is 0 in the rows of tokens with dlogits of other experts, which router_dgrad has.
  void put_router_part_in_rows() noexcept {
    bool const rounds = desc_.rounds_tokens();
    if (!routed() || core::has_softmax_over_all(desc_.router.kind) || args_.aux_dlogits.present() ||
        desc_.quantises() || (rounds && refuse(rounded_dlogits()).refused())) {
      return;
    }
    UpProjectionDgradArguments up_dgrad = experts_.up_dgrad;
    up_dgrad.gmem_row_dlogits = plan_.row_dlogits.in(base_);
    up_dgrad.w_router = w_router_;
    up_dgrad.router_in_terms = fp32_router_;
    bool refused = false;
    for_each_column_chunk(desc_, [&](Columns columns, bool) {
      refused |= refuse(columns_of(up_dgrad, columns), sequence_.device().architecture()).refused();
    });
    if (refused) return;
    experts_.up_dgrad = up_dgrad;
    experts_.aggregate.adds_to_o = rounds;
    if (rounds) experts_.aggregate.gmem_adds = plan_.is_listed.in(base_);
    part_in_rows_ = true;
    lists_tokens_ = rounds;
  }
  /// Returns w_router (E,d), or the terms (3E,d) of an fp32 one.
  [[nodiscard]] MatrixRows router_of_dx() const noexcept {
    if (!fp32_router_) return matrix_rows(args_.w_router);
    std::int64_t const d = desc_.shape.hidden;
    return {plan_.dgrad_router.in(base_), kDgradTerms * desc_.shape.experts, d};
  }
  void split_weights() noexcept {
    MatrixRows const from = matrix_rows(args_.w_router);
    split(split_weights_for_dgrad(static_cast<float const*>(from.gmem), from.pitch,
                                  desc_.shape.experts, desc_.shape.hidden,
                                  plan_.dgrad_router.in(base_)));
  }
  void split_dlogits_for_weights() noexcept {
    split(split_dlogits_for_wgrad(gmem_dlogits_, desc_.shape.tokens, desc_.shape.experts,
                                  plan_.wgrad_dlogits.in(base_)));
  }
  /// Splits fp32 dlogits into the operands of an fp32 router's GEMMs.
  void split_dlogits() noexcept {
    if (!wanted_.dlogits) return;
    if (wanted_.dw_router) split_dlogits_for_weights();
    if (has_router_dgrad()) {
      split(split_dlogits_for_dgrad(gmem_dlogits_, desc_.shape.tokens, desc_.shape.experts,
                                    plan_.dgrad_dlogits.in(base_)));
    }
  }
  void split(SplitArguments const& args) noexcept {
    sequence_.add("split fp32",
                  [&](cudaStream_t stream) { return launch_split_fp32_plain(args, stream); });
  }
  [[nodiscard]] bool router_gradients_are_fp32() const noexcept {
    return core::router_gradient_dtype(desc_, args_.gradients) == DType::fp32;
  }
  [[nodiscard]] bool accumulates() const noexcept {
    return args_.gradients.mode == GradientMode::accumulate;
  }

  [[nodiscard]] DscoresArguments dscores() const noexcept {
    DownProjectionDgradArguments const& dgrad = experts_.down_dgrad;
    return {.gmem_ds_partials = dgrad.gmem_ds_partials,
            .groups = score_groups(desc_.shape.intermediate),
            .gmem_inverse_permutation = routing_.inverse_permutation,
            .d_o = dgrad.d_o,
            .gmem_gather_index = dgrad.gmem_gather_index,
            .gmem_expert_offsets = routing_.expert_offsets,
            .b_down = weight_views(desc_, args_.weights).b_down,
            .gmem_dscores = gmem_dscores_,
            .slots = desc_.num_slots(),
            .hidden = desc_.shape.hidden,
            .experts = static_cast<std::int32_t>(desc_.shape.experts)};
  }

  /// The ids are distinct.
  [[nodiscard]] RouterDlogitsArguments dlogits(std::int32_t const* gmem_ids,
                                               float const* gmem_dscores) const noexcept {
    bool const split = gmem_dlogits_ == args_.dlogits_saved.data;
    bool const operand = has_router_dgrad() || wanted_.dw_router;
    return {.gmem_dscores = gmem_dscores,
            .gmem_ids = gmem_ids,
            .gmem_token_offsets = routing_.token_offsets,
            .gmem_scores = routing_.scores,
            .gmem_chosen_p = routing_.chosen_p,
            .gmem_logits = routing_.logits,
            .gmem_aux_dlogits = static_cast<float const*>(args_.aux_dlogits.data),
            .aux_pitch = matrix_rows(args_.aux_dlogits).pitch,
            .gmem_dlogits = gmem_dlogits_,
            .dlogits_are_scratch =
                !split && !args_.gradients.db_router.present() && !(fp32_router_ && operand),
            .gmem_rounded = operand && !fp32_router_ ? plan_.rounded.in(base_) : nullptr,
            .gmem_row_dlogits = part_in_rows_ ? plan_.row_dlogits.in(base_) : nullptr,
            .gmem_inverse_permutation = routing_.inverse_permutation,
            .gmem_copy = static_cast<float*>(args_.dlogits.data),
            .copy_pitch = matrix_rows(args_.dlogits).pitch,
            .tokens = desc_.shape.tokens,
            .experts = static_cast<std::int32_t>(desc_.shape.experts),
            .top_k = static_cast<std::int32_t>(desc_.shape.top_k),
            .kind = desc_.router.kind,
            .route_scale = desc_.router.route_scale,
            .normalize_scores = desc_.router.normalize_scores,
            .gmem_token_mask = gmem_mask()};
  }

  void add_dscores() noexcept {
    sequence_.add("dscores",
                  [&](cudaStream_t stream) { return launch_dscores_plain(dscores(), stream); });
  }

  /// Replayed ids may repeat within a token.
  void add_replayed_dlogits() noexcept {
    add_dscores();
    sequence_.add("merge repeats", [&](cudaStream_t stream) {
      return launch_merge_repeats_plain({.gmem_ids = routing_.topk_ids,
                                         .gmem_dscores = gmem_dscores_,
                                         .gmem_token_offsets = routing_.token_offsets,
                                         .gmem_merged_ids = plan_.merged_ids.in(base_),
                                         .gmem_merged_dscores = plan_.merged_dscores.in(base_),
                                         .tokens = desc_.shape.tokens,
                                         .top_k = static_cast<std::int32_t>(desc_.shape.top_k)},
                                        stream);
    });
    sequence_.add("router_dlogits", [&](cudaStream_t stream) {
      return launch_router_dlogits_plain(
          dlogits(plan_.merged_ids.in(base_), plan_.merged_dscores.in(base_)), stream);
    });
  }

  /// Experts that rounding dropped or added have terms of their own.
  [[nodiscard]] RoundedGradientArguments rounded_dlogits() const noexcept {
    std::int32_t* const counters = plan_.counters.in(base_);
    return {.dscores = dscores(),
            .rounded = {.dlogits = dlogits(routing_.topk_ids, gmem_dscores_),
                        .gmem_unrounded_ids = routing_.unrounded_ids,
                        .gmem_member_scores = plan_.member_scores.in(base_),
                        .gmem_member_dscores = plan_.member_dscores.in(base_),
                        .gmem_added_ids = plan_.added_ids.in(base_)},
            .listed = {.gmem_tokens = plan_.listed.in(base_),
                       .gmem_offsets = counters + kListedFirst,
                       .gmem_is_listed = plan_.is_listed.in(base_),
                       .gmem_counter = reinterpret_cast<std::uint64_t*>(counters + kListedTokens)},
            .starts_early = follows_down_wgrad_};
  }

  MoeDesc const& desc_;
  MoeBackwardArgs const& args_;
  RoutingView routing_;
  BackwardPlan plan_;
  PackedPlan packed_ = plan_packed(desc_);
  std::byte* base_;
  Wanted wanted_;
  bool in_place_;  ///< up_projection_dgrad writes dx
  bool is_whole_;
  SplitBackward split_;
  bool fp32_router_;  ///< beside bf16: its GEMMs multiply terms (host/split_fp32.hpp)
  Sequence& sequence_;
  BackwardArguments experts_;
  MatrixRows w_router_;  ///< of the router's part of dx
  float* gmem_dscores_;
  float* gmem_dlogits_;
  bool follows_down_wgrad_ = false;        ///< what comes next may start early
  bool follows_aggregate_beside_ = false;  ///< the same
  bool part_in_rows_ = false;              ///< the router's part of dx is in the dx rows
  bool lists_tokens_ = false;              ///< but for tokens that are listed
};

}  // namespace

Status moe_backward(DeviceContext const& device, MoeDesc const& desc, MoeBackwardArgs const& args,
                    RoutingView const& routing, Pass pass, Stream stream,
                    SplitBackward split) noexcept {
  if (desc.quantises()) TESSERA_TRY(check_quantised(device.architecture(), desc, args, pass));
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  nvtx3::scoped_range_in<NvtxDomain> const range{"moe_backward"};
  Sequence sequence(device, stream);
  Backward backward(desc, args, routing, pass, split, sequence);
  if (pass != Pass::backward_input) backward.dequantise_x();
  if (pass == Pass::backward_weights) {
    backward.round_saved_dlogits();
  } else {
    backward.activations();
  }
  bool const input = pass != Pass::backward_weights, weights = pass != Pass::backward_input;
  if (weights) backward.down_weights();
  if (input) backward.scores();
  if (input) backward.input_gradient();
  backward.aggregate_and_up_weights(input, weights);
  if (weights) backward.router_weights();
  return sequence.status();
}

}  // namespace tessera::cuda
