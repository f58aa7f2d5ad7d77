// SPDX-License-Identifier: Apache-2.0
#include "ops/support.hpp"

#include <type_traits>

#include "core/desc_check.hpp"
#include "core/gathered_rows.hpp"
#include "core/router_math.hpp"
#include "core/tensor_check.hpp"
#include "cuda/layer/backend.hpp"
#include "ops/plan.hpp"
#include "ops/quantised_rows.hpp"

namespace tessera::ops {
namespace {

struct Tables {
  RoutingView view;
  std::int64_t elements = 0;
};

Tables lay_out(MoeDesc const& desc, std::int32_t* base) noexcept {
  std::int64_t const slots = desc.num_slots(), tokens = desc.shape.tokens,
                     experts = desc.shape.experts;
  Tables out;
  auto const take = [&](auto*& member, bool present, std::int64_t count) {
    if (!present) return;
    if (base != nullptr) {
      member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(base + out.elements);
    }
    out.elements += count;
  };
  bool const routed = desc.router.kind != RouterKind::given;
  RoutingView& view = out.view;
  take(view.expert_offsets, true, experts + 1);
  take(view.sort_permutation, true, slots);
  take(view.gather_index, true, slots);
  take(view.inverse_permutation, true, slots);
  take(view.scores, true, slots);
  take(view.token_offsets, desc.experts_vary() && !core::gathers_grouped_rows(desc), tokens + 1);
  take(view.topk_ids, routed, slots);
  take(view.chosen_p, core::saves_chosen_p(desc), slots);
  constexpr std::int64_t kVector = 4;  // kernels read and write logits in 16 bytes
  if (core::saves_logits(desc)) out.elements = (out.elements + kVector - 1) / kVector * kVector;
  take(view.logits, core::saves_logits(desc), tokens * experts);
  take(view.unrounded_ids, desc.rounds_tokens(), tokens * desc.shape.top_k);
  return out;
}

}  // namespace

Status check_supported(MoeDesc const& desc) noexcept {
  TESSERA_TRY(core::check_desc(desc));
  if (desc.dtype != DType::fp32 && desc.dtype != DType::bf16) {
    return Status::unsupported("dtype=%d: the CPU backend of this version stores fp32 or bf16",
                               static_cast<int>(desc.dtype));
  }
  return {};
}

Status check_on_gpu(Context const& context) noexcept {
  if (context.cuda() != nullptr) return cuda::check_joins_gpus(context.cuda()->architecture());
  return Status::error(StatusCode::environment,
                       "experts over several ranks run on GPUs: this context is on cpu; create "
                       "it on cuda:N");
}

Status check_supported(Context const& context, MoeDesc const& desc) noexcept {
  if (context.cuda() == nullptr) return check_supported(desc);
  TESSERA_TRY(core::check_desc(desc));
  if (desc.quantises()) {
    TESSERA_TRY(cuda::check_multiplies_codes(context.cuda()->architecture(), desc.precision));
  }
  return cuda::check_supported(desc);
}

Status check_gains_by_fp8(Context const& context, MoeDesc const& desc) noexcept {
  if (context.cuda() != nullptr) {
    return cuda::check_gains_by_fp8(context.cuda()->architecture(), desc);
  }
  return Status::unsupported("a CPU multiplies no codes, quantising costs time");
}

MoeDesc resolved(Context const& context, MoeDesc desc) noexcept {
  desc = core::resolved(desc);
  if (desc.precision != Precision::automatic) return desc;
  bool const gains = check_gains_by_fp8(context, desc).ok();
  desc.precision = gains ? Precision::fp8 : Precision::native;
  desc.weight_codes = desc.weight_codes && gains;
  return desc;
}

std::size_t routing_table_bytes(MoeDesc const& desc) noexcept {
  // The tables lie one behind the other: where the last one ends is how much they take.
  return 4 * static_cast<std::size_t>(lay_out(desc, nullptr).elements);
}

RoutingView view_routing(MoeDesc const& desc, void* routing) noexcept {
  return lay_out(desc, static_cast<std::int32_t*>(routing)).view;
}

}  // namespace tessera::ops

namespace tessera {

Expected<std::size_t> routing_bytes(MoeDesc const& desc) noexcept {
  TESSERA_TRY(core::check_desc(desc));
  return ops::routing_table_bytes(core::resolved(desc));
}

Expected<RoutingView> routing_view(MoeDesc const& given, Buffer routing) noexcept {
  TESSERA_TRY(core::check_desc(given));
  MoeDesc const desc = core::resolved(given);
  core::TensorCheck check{{}};
  check.buffer("routing", routing, ops::routing_table_bytes(desc), 4, false);
  TESSERA_TRY(check.finish());
  return ops::view_routing(desc, routing.data);
}

Expected<Precision> chosen_precision(Context const& context, MoeDesc const& desc) noexcept {
  TESSERA_TRY(ops::check_supported(context, desc));
  return ops::resolved(context, desc).precision;
}

Expected<SavedBytes> saved_bytes(Context const& context, MoeDesc const& desc) noexcept {
  TESSERA_TRY(ops::check_supported(context, desc));
  return saved_bytes(ops::resolved(context, desc));
}

Expected<SavedBytes> saved_bytes(MoeDesc const& given) noexcept {
  TESSERA_TRY(core::check_desc(given));
  if (given.precision == Precision::automatic) {
    return Status::invalid(
        "precision=auto: what is saved depends on the device; put what chosen_precision() says in "
        "its place, in C tessera_moe_precision(), or ask with a context");
  }
  MoeDesc const desc = core::resolved(given);
  std::size_t const element = desc.quantises() ? 1 : dtype_bytes(desc.dtype);
  SavedBytes saved;
  if (desc.save == SavePolicy::none) return saved;
  saved.x = element * static_cast<std::size_t>(desc.shape.tokens * desc.shape.hidden);
  if (desc.save == SavePolicy::h) {
    saved.h = element * static_cast<std::size_t>(desc.num_slots() * desc.up_width() *
                                                 desc.shape.intermediate);
  }
  if (desc.quantises()) {
    saved.x_scale = ops::tensor_bytes(ops::x_scale_shape(desc));
    if (desc.save == SavePolicy::h) saved.h_scale = ops::tensor_bytes(ops::h_scale_shape(desc));
  }
  saved.routing = ops::routing_table_bytes(desc);
  return saved;
}

Expected<std::size_t> workspace_bytes(Context const& context, MoeDesc const& given,
                                      Pass pass) noexcept {
  TESSERA_TRY(core::check_pass(pass));
  TESSERA_TRY(ops::check_supported(context, given));
  MoeDesc const desc = ops::resolved(context, given);
  if (context.cuda() != nullptr) {
    return cuda::workspace_bytes(desc, pass, ops::routing_table_bytes(desc));
  }
  switch (pass) {
    case Pass::forward:
      return ops::plan_forward(context, desc).bytes;
    case Pass::route:
      return ops::plan_route(context, desc).bytes;
    default:
      return ops::plan_backward(context, desc, pass).bytes;
  }
}

}  // namespace tessera
