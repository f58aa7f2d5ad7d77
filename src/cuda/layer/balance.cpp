// SPDX-License-Identifier: Apache-2.0
// router_loss and update_selection_bias: launches on the caller's stream, for tensors that were checked.
#include <cuda_runtime_api.h>

#include "cuda/host/router_loss.hpp"
#include "cuda/host/token_mask.hpp"
#include "cuda/layer/arguments.hpp"
#include "cuda/layer/backend.hpp"
#include "cuda/layer/load_counts.hpp"
#include "cuda/layer/plan.hpp"
#include "cuda/layer/sequence.hpp"

namespace tessera::cuda {
namespace {

core::LoadCounts counts_of(ConstTensor const& counts) noexcept {
  return {counts.data, counts.dtype, counts.present() ? counts.shape[0] : 0};
}

}  // namespace

std::size_t router_loss_workspace_bytes(MoeDesc const& desc, std::int64_t sequences) noexcept {
  return plan_router_loss(desc, sequences).bytes;
}

Status router_loss(DeviceContext const& device, MoeDesc const& desc, RouterLossArgs const& args,
                   Stream stream) noexcept {
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  nvtx3::scoped_range_in<NvtxDomain> const range{"router_loss"};
  MoeShape const& s = desc.shape;
  std::int64_t const sequences =
      args.sequence_balance == 0.0f ? 0 : args.sequence_offsets.shape[0] - 1;
  RouterLossPlan const plan = plan_router_loss(desc, sequences);
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  auto const* const gmem_mask = static_cast<std::uint8_t const*>(args.token_mask.data);
  std::int64_t const all = args.scope_tokens != 0 ? args.scope_tokens : s.tokens;
  Sequence sequence(device, stream);
  if (gmem_mask != nullptr) {
    sequence.add("token order", [&](cudaStream_t native) {
      return launch_token_order({.gmem_token_mask = gmem_mask,
                                 .tokens = s.tokens,
                                 .gmem_order = plan.order.in(base),
                                 .gmem_count = plan.count.in(base)},
                                native);
    });
  }
  if (sequences > 0) {
    sequence.add("sequence costs", [&](cudaStream_t native) {
      return launch_sequence_costs(
          {.gmem_offsets = args.sequence_offsets.data,
           .offsets_are_int64 = args.sequence_offsets.dtype == DType::int64,
           .gmem_ids = args.topk_ids.data,
           .ids_are_int64 = args.topk_ids.dtype == DType::int64,
           .ids_pitch = s.tokens > 1 ? args.topk_ids.stride[0] : args.topk_ids.shape[1],
           .top_k = args.topk_ids.shape[1],
           .gmem_token_mask = gmem_mask,
           .tokens = s.tokens,
           .experts = s.experts,
           .sequences = sequences,
           .balance = args.sequence_balance,
           .gmem_counts = plan.counts.in(base),
           .gmem_sequence_of = plan.sequence_of.in(base),
           .gmem_cost = plan.sequence_cost.in(base),
           .gmem_error = device.gmem_error()},
          native);
    });
  }
  sequence.add("balance costs", [&](cudaStream_t native) {
    return launch_balance_costs({.counts = counts_of(args.topk_counts),
                                 .balance = args.balance,
                                 .z = args.z,
                                 .scope_tokens = gmem_mask != nullptr ? args.scope_tokens : all,
                                 .gmem_count = plan.count.in(base),
                                 .experts = s.experts,
                                 .gmem_cost = plan.cost.in(base),
                                 .gmem_error = device.gmem_error()},
                                native);
  });
  sequence.select("router_loss",
                  RouterLossArguments{
                      .gmem_logits = static_cast<float const*>(args.logits.data),
                      .logits_pitch = matrix_rows(args.logits).pitch,
                      .gmem_cost = plan.cost.in(base),
                      .gmem_dlogits = static_cast<float*>(args.dlogits.data),
                      .dlogits_pitch = args.dlogits.present() ? matrix_rows(args.dlogits).pitch : 0,
                      .gmem_losses = static_cast<float*>(args.losses.data),
                      .gmem_sequence_loss = static_cast<float*>(args.sequence_loss.data),
                      .gmem_partials = plan.partials.in(base),
                      .tokens = s.tokens,
                      .experts = static_cast<std::int32_t>(s.experts),
                      .kind = desc.router.kind,
                      .d_loss = args.d_loss,
                      .gmem_order = gmem_mask != nullptr ? plan.order.in(base) : nullptr,
                      .gmem_count = plan.count.in(base),
                      .gmem_sequence_cost = sequences > 0 ? plan.sequence_cost.in(base) : nullptr,
                      .gmem_sequence_of = plan.sequence_of.in(base)});
  return sequence.status();
}

Status update_selection_bias(DeviceContext const& device, SelectionBiasArgs const& args,
                             Stream stream) noexcept {
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  Sequence sequence(device, stream);
  sequence.add("update_selection_bias", [&](cudaStream_t native) {
    return launch_selection_bias_update({.counts = counts_of(args.topk_counts),
                                         .rate = args.rate,
                                         .subtract_mean = args.subtract_mean,
                                         .gmem_bias = static_cast<float*>(args.selection_bias.data),
                                         .gmem_error = device.gmem_error()},
                                        native);
  });
  return sequence.status();
}

}  // namespace tessera::cuda
