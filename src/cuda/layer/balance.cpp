// SPDX-License-Identifier: Apache-2.0
// router_loss and update_selection_bias: launches on the caller's stream, for tensors that were checked.
#include <cuda_runtime_api.h>

#include "cuda/host/router_loss.hpp"
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

std::size_t router_loss_workspace_bytes(MoeDesc const& desc) noexcept {
  return plan_router_loss(desc).bytes;
}

Status router_loss(DeviceContext const& device, MoeDesc const& desc, RouterLossArgs const& args,
                   Stream stream) noexcept {
  DeviceGuard const guard(device.index(), ContextChoice::any_of_device);
  TESSERA_TRY(guard.status());
  nvtx3::scoped_range_in<NvtxDomain> const range{"router_loss"};
  MoeShape const& s = desc.shape;
  RouterLossPlan const plan = plan_router_loss(desc);
  std::byte* const base = core::WorkspacePlan::align(args.workspace.data);
  std::int64_t const scope = args.scope_tokens != 0 ? args.scope_tokens : s.tokens;
  Sequence sequence(device, stream);
  sequence.add("balance costs", [&](cudaStream_t native) {
    return launch_balance_costs({.counts = counts_of(args.topk_counts),
                                 .balance = args.balance,
                                 .scope_tokens = scope,
                                 .experts = s.experts,
                                 .gmem_cost = plan.cost.in(base),
                                 .gmem_error = device.gmem_error()},
                                native);
  });
  sequence.select(
      "router_loss",
      RouterLossArguments{
          .gmem_logits = static_cast<float const*>(args.logits.data),
          .logits_pitch = matrix_rows(args.logits).pitch,
          .gmem_cost = plan.cost.in(base),
          .gmem_dlogits = static_cast<float*>(args.dlogits.data),
          .dlogits_pitch = args.dlogits.present() ? matrix_rows(args.dlogits).pitch : 0,
          .gmem_losses = static_cast<float*>(args.losses.data),
          .gmem_partials = plan.partials.in(base),
          .tokens = s.tokens,
          .experts = static_cast<std::int32_t>(s.experts),
          .kind = desc.router.kind,
          .z = static_cast<float>(static_cast<double>(args.z) / static_cast<double>(scope)),
          .d_loss = args.d_loss});
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
